//! Reads flows from the kernel, a part at a time, and names their Services.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{gather::Filter, kernel_rows::FlowRow};
use crate::{
    dataplane::{KnownFlow, Translator, for_each_flow},
    kernel::KernelError,
    model::{IpFamily, Model, Protocol, ServicePortKey},
    sync::{Inspected, Inspector, NoAnswer},
};

/// How many flows are named at once.
const FLOWS_AT_ONCE: usize = 512;
/// How many parts may wait for their names.
const WAITING: usize = 2;

/// Which flows to list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowFilter {
    /// Of this client.
    pub client: Option<IpAddr>,
    /// To this address of a Service.
    pub vip: Option<IpAddr>,
    /// To this endpoint.
    pub endpoint: Option<IpAddr>,
    /// In this state.
    pub state: Option<String>,
    /// To Services of this namespace.
    pub namespace: Option<String>,
    /// To the Service with this name.
    pub name: Option<String>,
    /// Without packets for at least this many seconds.
    pub min_idle: Option<u64>,
    /// With a packet in the last seconds, this many.
    pub max_idle: Option<u64>,
    /// At least this many seconds old.
    pub min_age: Option<u64>,
    /// At most this many seconds old.
    pub max_age: Option<u64>,
}

impl FlowFilter {
    fn matches(&self, flow: &KnownFlow) -> bool {
        let is = |wanted: Option<IpAddr>, address: IpAddr| wanted.is_none_or(|wanted| wanted == address);
        is(self.client, flow.client.ip())
            && is(self.vip, flow.destination.ip())
            && is(self.endpoint, flow.endpoint.ip())
            && self.state.as_deref().is_none_or(|wanted| wanted == flow.state.name())
            && is_within(flow.idle, self.min_idle, self.max_idle)
            && is_within(flow.age, self.min_age, self.max_age)
    }

    /// Returns which Services are wanted. `None` for all flows, also those of no Service.
    pub(super) fn services(&self) -> Option<Filter> {
        let Self { namespace, name, .. } = self.clone();
        (namespace.is_some() || name.is_some()).then_some(Filter { namespace, name, drift: false })
    }
}

/// Returns true if a time is between the limits. A time that is not known is only if there are
/// none.
fn is_within(time: Option<Duration>, min: Option<u64>, max: Option<u64>) -> bool {
    match time.map(|time| time.as_secs()) {
        Some(seconds) => min.is_none_or(|min| seconds >= min) && max.is_none_or(|max| seconds <= max),
        None => min.is_none() && max.is_none(),
    }
}

/// A part of a list, or why there is none.
pub(super) type FlowPart = Result<Vec<KnownFlow>, KernelError>;

/// Reads the flows that match, in a thread of its own. `pins` is the directory of the programs'
/// maps.
pub(super) fn read(pins: Option<PathBuf>, filter: FlowFilter) -> mpsc::Receiver<FlowPart> {
    let (parts, received) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let mut part = Vec::with_capacity(FLOWS_AT_ONCE);
        let read = for_each_flow(pins.as_deref(), &mut |flow| {
            if filter.matches(&flow) {
                part.push(flow);
            }
            if part.len() == FLOWS_AT_ONCE {
                // Nobody receives any more: the rest is read in vain, which takes milliseconds.
                drop(parts.blocking_send(Ok(std::mem::take(&mut part))));
            }
        });
        drop(parts.blocking_send(read.map(|()| part)));
    });
    received
}

/// Names the Services of flows, and leaves out those of others.
pub(super) async fn named(
    inspector: &Inspector,
    flows: Vec<KnownFlow>,
    services: Option<Filter>,
) -> Result<Vec<FlowRow>, NoAnswer> {
    let reader = move |inspected: &Inspected<'_>| {
        flows.iter().filter_map(|flow| row(Some(inspected.model), flow, services.as_ref())).collect()
    };
    inspector.read(reader).await
}

/// Returns the service port that has an address now. The address may be one of the node.
pub(super) fn owner_of(model: &Model, address: SocketAddr, protocol: Protocol) -> Option<&ServicePortKey> {
    let (port, family) = (NonZeroU16::new(address.port())?, IpFamily::of(address.ip()));
    let of_address = model.owner(Some(address.ip()), port, protocol, family);
    of_address.or_else(|| model.owner(None, port, protocol, family)).map(|owner| owner.key)
}

/// Reads the flows that match, where no shunt runs that knows their Services.
pub(super) async fn without_daemon(
    pins: Option<PathBuf>,
    filter: FlowFilter,
) -> Result<Vec<FlowRow>, KernelError> {
    let (mut parts, mut rows) = (read(pins, filter), Vec::new());
    while let Some(part) = parts.recv().await {
        rows.extend(part?.iter().filter_map(|flow| row(None, flow, None)));
    }
    Ok(rows)
}

/// Returns `None` if the filter leaves it out.
fn row(model: Option<&Model>, flow: &KnownFlow, services: Option<&Filter>) -> Option<FlowRow> {
    let KnownFlow { protocol, client, destination, endpoint, state, by, expires_after, idle, age } = *flow;
    let service = model.and_then(|model| owner_of(model, destination, protocol));
    if services.is_some_and(|wanted| !service.is_some_and(|key| wanted.matches(key))) {
        return None;
    }
    Some(FlowRow {
        protocol: protocol.name().to_owned(),
        client,
        vip: destination,
        endpoint,
        service: service.map(|key| key.name.to_string()),
        state: state.name().to_owned(),
        by: match by {
            Translator::Programs => "programs",
            Translator::Netfilter => "netfilter",
        }
        .to_owned(),
        expires_seconds: expires_after.map(|left| left.as_secs()),
        idle_seconds: idle.map(|idle| idle.as_secs()),
        age_seconds: age.map(|age| age.as_secs()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_is_not_known_is_within_no_limits() {
        let time = Some(Duration::from_mins(1));
        for (time, min, max, expected) in [
            (time, None, None, true),
            (time, Some(60), Some(60), true),
            (time, Some(61), None, false),
            (time, None, Some(59), false),
            (None, None, None, true),
            (None, Some(0), None, false),
        ] {
            assert_eq!(is_within(time, min, max), expected, "{time:?} {min:?} {max:?}");
        }
    }
}
