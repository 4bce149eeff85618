//! The tunnel for direct server return: its link, the nodes at its other ends, and which endpoints
//! are behind them.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use ipnet::IpNet;

use super::{
    Delta, DsrAnnouncement, Forwarding, IpFamily, LinkAddress, LinkPath, ModelSettings, NamespacedName, Node,
    NodeFacts, ResolvedEndpoint, ResolvedPort, TrafficPolicy, endpoint_slice_cache::EndpointInfo,
};
use crate::net::{Link, SourceAddress, TUNNEL_LINK};

/// The tunnel of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelView {
    /// The interface index of the link.
    pub link: u32,
    /// The link is set up: the program for its packets is there. Until then nothing is sent, and
    /// other nodes are not told to send.
    pub is_up: bool,
    /// The bytes of the longest packet that leaves this node in one piece.
    pub mtu: u32,
    /// Packets for clients whose own packets came through the tunnel go back through it.
    pub returns: bool,
    /// The addresses of the nodes whose packets are taken.
    pub nodes: BTreeSet<IpAddr>,
    /// All addresses of these nodes. What comes from them does not go through the tunnel: a node
    /// would get its own packets back, and drop them.
    pub addresses_of_nodes: BTreeSet<IpAddr>,
    /// What this node announces.
    pub announcement: DsrAnnouncement,
}

/// The links of a node carry so many bytes if the kernel does not say (RFC 894).
const ETHERNET_MTU: u32 = 1_500;

impl TunnelView {
    /// Resolves the tunnel, if its link exists. `own` are the [`ends`] of this node. Netfilter does
    /// not translate packets that come through it.
    pub(super) fn resolve(
        settings: &ModelSettings,
        facts: &NodeFacts,
        own: &BTreeMap<IpFamily, IpAddr>,
        nodes: &OtherNodes,
    ) -> Option<Self> {
        let is_translated = !matches!(facts.link_path, LinkPath::Netfilter { .. });
        let port = settings.dsr_port.filter(|_| is_translated)?.get();
        let link = facts.links.iter().find(|link| &*link.name == TUNNEL_LINK)?;
        Some(Self {
            link: link.index,
            is_up: link.is_up,
            mtu: mtu(facts, own),
            returns: settings.dsr_returns && !nodes.announces_former_address(port),
            nodes: nodes.with_port(port),
            addresses_of_nodes: nodes.addresses_with_port(port),
            announcement: announcement(facts, own, port),
        })
    }
}

/// Returns the addresses of this node at which it takes packets of the tunnel, and from which it
/// sends them. `primary` are its addresses.
///
/// If the kernel chooses the source, it takes the first address of a subnet (`inet_select_addr`,
/// and `ipv6_dev_get_saddr` among addresses that are alike). Other nodes would drop packets from an
/// address that is not announced, so a primary address after the first has no tunnel.
pub(super) fn ends(facts: &NodeFacts, primary: &BTreeMap<IpFamily, IpAddr>) -> BTreeMap<IpFamily, IpAddr> {
    let is_source = |address| !facts.kernel_chooses_tunnel_source || is_first_of_subnet(facts, address);
    primary.iter().map(|(family, address)| (*family, *address)).filter(|(_, end)| is_source(*end)).collect()
}

fn is_first_of_subnet(facts: &NodeFacts, address: IpAddr) -> bool {
    let subnet = |source: &SourceAddress| {
        let net = IpNet::new(source.address, source.prefix_len).ok()?;
        Some((source.link, net.trunc()))
    };
    let own = facts.source_addresses.iter().find(|source| source.address == address).and_then(subnet);
    let first = facts.source_addresses.iter().find(|source| own.is_some() && subnet(source) == own);
    first.is_none_or(|first| first.address == address)
}

/// Returns what this node announces. Of its other addresses, those with a subnet come first if
/// there are too many: the others are often those of VIPs and pods.
fn announcement(facts: &NodeFacts, primary: &BTreeMap<IpFamily, IpAddr>, port: u16) -> DsrAnnouncement {
    let ends = primary.values().filter(|address| is_tunnel_address(**address));
    let addresses: Vec<_> = ends.map(|address| SocketAddr::new(*address, port)).collect();
    let is_host_route = |entry: &LinkAddress| entry.prefix_len >= IpFamily::of(entry.address).bits();
    let is_end = |address: &IpAddr| primary.values().any(|primary| primary == address);
    let of_node = facts.addresses.iter().filter(|entry| is_address_of_node(entry.address));
    let others = of_node.filter(|entry| !addresses.is_empty() && !is_end(&entry.address));
    let sorted: BTreeSet<_> = others.map(|entry| (is_host_route(entry), entry.address)).collect();
    let mut others = BTreeSet::new();
    for (_, address) in sorted {
        if others.len() < DsrAnnouncement::MAX_OTHERS {
            others.insert(address);
        }
    }
    DsrAnnouncement { addresses, others }
}

/// Returns the bytes of the longest packet that leaves this node in one piece: the MTU of the links
/// with its addresses. If routers reach the node at an address of loopback, its packets leave on
/// other links.
fn mtu(facts: &NodeFacts, primary: &BTreeMap<IpFamily, IpAddr>) -> u32 {
    let link_of = |source: &SourceAddress| facts.links.iter().find(|link| link.index == source.link);
    let is_primary = |source: &&SourceAddress| primary.values().any(|address| *address == source.address);
    let sends = |link: &&Link| !link.is_loopback && link.mtu != 0;
    let of_node = facts.source_addresses.iter().filter(is_primary).filter_map(link_of).filter(sends);
    let devices = || {
        let links = facts.source_addresses.iter().filter_map(link_of).filter(sends);
        links.filter(|link| link.device.is_some()).map(|link| link.mtu).min()
    };
    of_node.map(|link| link.mtu).min().or_else(devices).unwrap_or(ETHERNET_MTU)
}

/// Returns true for an address at which other nodes can reach one node. Packets for it must not
/// stay on the node that sends them, go to a group of nodes, or depend on a link.
pub fn is_tunnel_address(address: IpAddr) -> bool {
    let is_only_on_link = match address {
        IpAddr::V4(address) => address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !(is_only_on_link || address.is_unspecified() || address.is_loopback() || address.is_multicast())
}

/// Returns true for an address that is of one node only, as far as the address says.
pub fn is_address_of_node(address: IpAddr) -> bool {
    let is_only_on_link = matches!(address, IpAddr::V4(address) if address.is_link_local());
    is_tunnel_address(address) && !is_only_on_link
}

/// The other nodes that take packets of the tunnel, and the addresses that this node has announced
/// to them.
#[derive(Debug, Default)]
pub(super) struct OtherNodes {
    /// What each node announces.
    nodes: BTreeMap<Box<str>, DsrAnnouncement>,
    /// What the Node of this node announces. Other nodes drop packets that come from elsewhere.
    /// `None` until there is such an object: manifests may have none.
    announced: Option<Vec<SocketAddr>>,
    /// Where packets of this node come from.
    own: BTreeSet<IpAddr>,
}

impl OtherNodes {
    /// Sets the addresses from which this node sends. Returns true if they differ.
    pub(super) fn set_own(&mut self, primary: &BTreeMap<IpFamily, IpAddr>) -> bool {
        let own = primary.values().copied().collect();
        mem::replace(&mut self.own, own) != self.own
    }

    /// Forgets what this node announces, because it is another node now.
    pub(super) fn forget_announced(&mut self) {
        self.announced = None;
    }

    /// Applies a change of Nodes. `this` is the name of this node; what it announces stays if its
    /// Node is deleted, as its other facts do. Returns true if an address differs.
    pub(super) fn apply(&mut self, delta: &Delta<Node>, this: &str) -> bool {
        match delta {
            Delta::Apply(node) => self.set(node, this),
            Delta::Delete(NamespacedName { name, .. }) => self.nodes.remove(&**name).is_some(),
            Delta::Replace(nodes) => {
                let listed: BTreeSet<&str> = nodes.iter().map(|node| &*node.name).collect();
                let before = self.nodes.len();
                self.nodes.retain(|name, _| listed.contains(&**name));
                let is_removed = self.nodes.len() != before;
                nodes.iter().fold(is_removed, |differs, node| self.set(node, this) || differs)
            }
        }
    }

    fn set(&mut self, node: &Node, this: &str) -> bool {
        if &*node.name == this {
            let differs = self.announced.as_ref() != Some(&node.dsr.addresses);
            self.announced = Some(node.dsr.addresses.clone());
            return self.nodes.remove(this).is_some() || differs;
        }
        if node.dsr.addresses.is_empty() {
            return self.nodes.remove(&*node.name).is_some();
        }
        let differs = self.nodes.get(&*node.name) != Some(&node.dsr);
        self.nodes.insert((*node.name).into(), node.dsr.clone());
        differs
    }

    /// Returns the addresses of all nodes with this port. Nodes with another port of the tunnel do
    /// not understand this one.
    fn with_port(&self, port: u16) -> BTreeSet<IpAddr> {
        self.nodes.values().flat_map(|node| of_port(&node.addresses, port)).collect()
    }

    /// Returns all addresses of the nodes with this port.
    fn addresses_with_port(&self, port: u16) -> BTreeSet<IpAddr> {
        let nodes = self.nodes.values().filter(|node| of_port(&node.addresses, port).next().is_some());
        nodes.flat_map(|node| of_port(&node.addresses, port).chain(node.others.iter().copied())).collect()
    }

    /// Returns the address of a node with this port to which this node may send, of this family if
    /// it has one.
    fn address(&self, node: &str, port: u16, family: IpFamily) -> Option<IpAddr> {
        let addresses = &self.nodes.get(node)?.addresses;
        let possible = || {
            let families = of_port(addresses, port).map(|address| (IpFamily::of(address), address));
            families.filter(|(family, _)| self.is_known_to_others(*family, port))
        };
        let of_family = possible().find(|(of, _)| *of == family);
        of_family.or_else(|| possible().next()).map(|(_, address)| address)
    }

    /// Returns true if other nodes accept packets of the tunnel from the address of this family
    /// that this node has now. An address that it had before may still be announced.
    fn is_known_to_others(&self, family: IpFamily, port: u16) -> bool {
        let is_current = |address| IpFamily::of(address) == family && self.own.contains(&address);
        self.announced.as_ref().is_none_or(|announced| of_port(announced, port).any(is_current))
    }

    /// Returns true if this node announces an address from which it does not send any more.
    fn announces_former_address(&self, port: u16) -> bool {
        let announced = self.announced.iter().flat_map(|announced| of_port(announced, port));
        announced.into_iter().any(|address| !self.own.contains(&address))
    }

    /// Sets the nodes of a service port's endpoints. `endpoints` are sorted by address.
    pub(super) fn set_endpoints(
        &self,
        port: &mut ResolvedPort,
        endpoints: &[EndpointInfo<'_>],
        family: IpFamily,
        tunnel_port: Option<NonZeroU16>,
    ) {
        let Some(tunnel_port) = tunnel_port.filter(|_| port.forwarding == Forwarding::Dsr) else { return };
        let node_of = |endpoint: &ResolvedEndpoint| {
            let at = endpoints.binary_search_by_key(&endpoint.address, |info| info.address).ok()?;
            let info = endpoints.get(at)?;
            let node =
                self.address(info.endpoint.placement.node_name.as_deref()?, tunnel_port.get(), family)?;
            Some((endpoint.address.ip(), node))
        };
        let remote = port.cluster_endpoints.iter().filter(|endpoint| !endpoint.is_local);
        port.dsr_nodes = remote.filter_map(node_of).collect();
    }
}

fn of_port(addresses: &[SocketAddr], port: u16) -> impl Iterator<Item = IpAddr> {
    addresses.iter().filter(move |address| address.port() == port).map(SocketAddr::ip)
}

/// Returns how packets of clients outside reach endpoints on other nodes. Direct server return is
/// for external addresses with policy Cluster: with policy Local no endpoint is on another node.
pub(super) fn forwarding(
    wanted: Forwarding,
    port: Option<NonZeroU16>,
    external_policy: TrafficPolicy,
    is_external: bool,
) -> Forwarding {
    let is_possible = port.is_some() && is_external && external_policy == TrafficPolicy::Cluster;
    if is_possible { wanted } else { Forwarding::Nat }
}

#[cfg(test)]
mod tests;
