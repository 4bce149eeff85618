//! The decoded objects of the measured cluster, and changes of them.

use std::num::NonZeroU16;

use anyhow::{Context as _, Result, bail, ensure};
use proxy_userspace::{
    config::{Config, ObjectSource},
    model::{Delta, EndpointSlice, Service, WatchEvent},
    watch::ManifestSource,
};
use tokio::sync::mpsc;

use super::super::{
    cluster::{ENDPOINTS, LARGE_NAMESPACE, LARGE_SLICE, MEASURED_NAMESPACE},
    protocol::ChangeKind,
};

/// Services, EndpointSlices and Nodes.
const KINDS: usize = 3;

/// The decoded objects of the manifests.
#[derive(Default)]
pub(super) struct Objects {
    /// The first list of each kind. Empty once it was taken.
    first: Vec<WatchEvent>,
    /// The Services that are changed: all alike.
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
    /// The slices of the large Service. None in a small cluster.
    large: Vec<EndpointSlice>,
}

impl Objects {
    pub(super) async fn read(config: &Config) -> Result<Self> {
        let ObjectSource::Manifests(directory) = &config.source else { bail!("no --manifests") };
        let (to, mut from) = mpsc::channel(KINDS);
        let source = tokio::spawn(ManifestSource::new(directory).run(to));
        let mut objects = Self::default();
        for _ in 0..KINDS {
            objects.add(from.recv().await.context("the manifest source ended early")?);
        }
        drop(from);
        source.await??;
        ensure!(
            !objects.services.is_empty() && !objects.slices.is_empty(),
            "there is nothing to change: at least two Services are needed"
        );
        Ok(objects)
    }

    fn add(&mut self, event: WatchEvent) {
        match &event {
            WatchEvent::Services(Delta::Replace(list)) => {
                let ordinary = list.iter().filter(|service| is_ordinary(&service.name.namespace));
                self.services.extend(ordinary.cloned());
            }
            WatchEvent::EndpointSlices(Delta::Replace(list)) => {
                let of = |is_wanted: fn(&str) -> bool| {
                    list.iter().filter(move |slice| is_wanted(&slice.name.namespace)).cloned()
                };
                self.slices.extend(of(is_ordinary));
                self.large.extend(of(|namespace| namespace == LARGE_NAMESPACE));
            }
            _ => {}
        }
        self.first.push(event);
    }

    /// Takes the first list of each kind.
    pub(super) fn first(&mut self) -> Vec<WatchEvent> {
        std::mem::take(&mut self.first)
    }

    /// Returns the kinds of changes that this cluster allows.
    pub(super) fn kinds(&self) -> impl Iterator<Item = ChangeKind> {
        let large: &[ChangeKind] = if self.large.is_empty() { &[] } else { &ChangeKind::OF_LARGE };
        ChangeKind::OF_ORDINARY.into_iter().chain(large.iter().copied())
    }

    /// Changes an object, and returns the event. `number` chooses the object.
    pub(super) fn change(&mut self, kind: ChangeKind, number: usize) -> Result<WatchEvent> {
        let slices = if kind.is_of_large() { &mut self.large } else { &mut self.slices };
        let usual = if kind.is_of_large() { LARGE_SLICE } else { usize::from(ENDPOINTS) };
        match kind {
            ChangeKind::Endpoint | ChangeKind::LargeEndpoint => {
                let slice = nth(slices, number)?;
                replace_endpoint(slice).context("a slice without endpoints")?;
                Ok(WatchEvent::EndpointSlices(Delta::Apply(slice.clone())))
            }
            ChangeKind::Scaled | ChangeKind::LargeScaled => {
                let slice = nth(slices, number)?;
                scale(slice, usual).context("a slice without endpoints")?;
                Ok(WatchEvent::EndpointSlices(Delta::Apply(slice.clone())))
            }
            ChangeKind::Service => {
                let service = nth(&mut self.services, number)?;
                change_port(service).context("a Service without ports")?;
                Ok(WatchEvent::Services(Delta::Apply(service.clone())))
            }
            ChangeKind::Everything => bail!("the first sync is no change"),
        }
    }
}

/// The Service under load and the large one differ from all others.
fn is_ordinary(namespace: &str) -> bool {
    ![MEASURED_NAMESPACE, LARGE_NAMESPACE].contains(&namespace)
}

fn nth<T>(of: &mut [T], number: usize) -> Result<&mut T> {
    let index = number.checked_rem(of.len()).context("there is nothing to change")?;
    of.get_mut(index).context("there is nothing to change")
}

/// Replaces the first endpoint address by another one, or restores it.
fn replace_endpoint(slice: &mut EndpointSlice) -> Option<()> {
    if let std::net::IpAddr::V4(ip) = &mut slice.endpoints.first_mut()?.address {
        *ip = (ip.to_bits() ^ 1 << 15).into();
    }
    Some(())
}

/// Adds an endpoint to the `usual` ones, or removes the added one.
fn scale(slice: &mut EndpointSlice, usual: usize) -> Option<()> {
    if slice.endpoints.len() > usual {
        slice.endpoints.pop();
        return Some(());
    }
    let mut more = slice.endpoints.first()?.clone();
    if let std::net::IpAddr::V4(ip) = &mut more.address {
        *ip = (ip.to_bits() ^ 1 << 14).into();
    }
    slice.endpoints.push(more);
    Some(())
}

fn change_port(service: &mut Service) -> Option<()> {
    let port = service.ports.first_mut()?;
    port.port = NonZeroU16::new(port.port.get() ^ 1 << 14)?;
    Some(())
}
