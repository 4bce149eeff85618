//! Names for the addresses in a trace: service ports, pods, links and network namespaces.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use nix::net::if_::if_nameindex;
use tokio::time::Instant;

use crate::{
    kernel::netns,
    model::{IpFamily, Model, Protocol},
    net::NetnsCookie,
    sync::{Inspector, NoAnswer},
};

/// How long names are kept. Services, pods and links come and go.
const KEPT: Duration = Duration::from_secs(2);
/// How many service ports are looked up at once, so that a change of the kernel waits less than a
/// millisecond.
const AT_ONCE: usize = 256;

/// An address of a Service.
pub(super) type Vip = (SocketAddr, Protocol);

/// Knows names for some seconds.
#[derive(Debug, Default)]
pub(super) struct Names {
    services: HashMap<Vip, Option<String>>,
    pods: HashMap<IpAddr, Option<String>>,
    links: BTreeMap<u32, String>,
    /// The addresses of network namespaces. `None` for those that cannot be found.
    places: HashMap<NetnsCookie, Option<IpAddr>>,
    own: Option<NetnsCookie>,
    learned: Option<Instant>,
}

impl Names {
    /// Learns the names that are not known yet, or were learned too long ago.
    pub(super) async fn learn(
        &mut self,
        inspector: &Inspector,
        vips: impl IntoIterator<Item = Vip>,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> Result<(), NoAnswer> {
        let vips = vips.into_iter().filter(|vip| !self.services.contains_key(vip));
        let vips: Vec<Vip> = vips.collect::<HashSet<_>>().into_iter().collect();
        for part in vips.chunks(AT_ONCE) {
            let part = part.to_vec();
            let named = inspector.read(move |inspected| -> Vec<_> {
                part.into_iter().map(|vip| (vip, service(inspected.model, vip))).collect()
            });
            self.services.extend(named.await?);
        }
        let unknown: BTreeSet<IpAddr> =
            addresses.into_iter().filter(|address| !self.pods.contains_key(address)).collect();
        if !unknown.is_empty() {
            let wanted = unknown.clone();
            let pods = inspector.read(move |inspected| inspected.model.pods_at(&wanted)).await?;
            let name = |address| (address, pods.get(&address).map(ToString::to_string));
            self.pods.extend(unknown.into_iter().map(name));
        }
        Ok(())
    }

    /// Finds the network namespaces that are not known yet. The others, and all names, are
    /// forgotten if they were learned too long ago.
    pub(super) async fn find_places(&mut self, cookies: impl IntoIterator<Item = NetnsCookie>) {
        if self.learned.is_none_or(|learned| learned.elapsed() > KEPT) {
            *self = Self { learned: Some(Instant::now()), ..Self::default() };
            self.own = netns::current_cookie().ok().flatten();
        }
        let is_unknown =
            |cookie: &NetnsCookie| Some(*cookie) != self.own && !self.places.contains_key(cookie);
        let unknown: Vec<NetnsCookie> = cookies.into_iter().filter(is_unknown).collect();
        if unknown.is_empty() {
            return;
        }
        let found = tokio::task::spawn_blocking(netns::addresses_by_cookie).await.unwrap_or_default();
        self.places.extend(unknown.into_iter().map(|cookie| (cookie, None)));
        let first = |(cookie, addresses): (_, BTreeSet<IpAddr>)| (cookie, addresses.first().copied());
        self.places.extend(found.into_iter().map(first));
    }

    /// Returns the service port that has an address, as `namespace/name:port`.
    pub(super) fn service(&self, vip: Vip) -> Option<String> {
        self.services.get(&vip).cloned().flatten()
    }

    /// Returns the pod that has an address, as `namespace/name`.
    pub(super) fn pod(&self, address: IpAddr) -> Option<String> {
        self.pods.get(&address).cloned().flatten()
    }

    /// Returns the first address of a network namespace other than that of the node.
    pub(super) fn address_of(&self, netns: NetnsCookie) -> Option<IpAddr> {
        self.places.get(&netns).copied().flatten()
    }

    /// Returns the name of the place from which a socket connects: `node`, the name of a pod, or an
    /// address.
    pub(super) fn place(&self, netns: NetnsCookie) -> Option<String> {
        if self.own == Some(netns) {
            return Some("node".to_owned());
        }
        let address = self.address_of(netns)?;
        Some(self.pod(address).unwrap_or_else(|| address.to_string()))
    }

    /// Returns the name of a link.
    pub(super) fn link(&mut self, index: u32) -> String {
        if !self.links.contains_key(&index) {
            let links = if_nameindex().ok();
            let name = |link: &nix::net::if_::Interface| link.name().to_string_lossy().into_owned();
            self.links = links.iter().flatten().map(|link| (link.index(), name(link))).collect();
        }
        self.links.get(&index).cloned().unwrap_or_else(|| format!("link {index}"))
    }
}

/// Returns the service port that has an address. Addresses of node ports are not listed, so a port
/// is looked up without its address, too.
fn service(model: &Model, (vip, protocol): Vip) -> Option<String> {
    let port = NonZeroU16::new(vip.port())?;
    let family = IpFamily::of(vip.ip());
    let of_address = model.owner(Some(vip.ip()), port, protocol, family);
    let owner = of_address.or_else(|| model.owner(None, port, protocol, family))?;
    Some(owner.key.name.to_string())
}
