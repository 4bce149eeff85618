//! The tunnel for direct server return: its link, the nodes at its other ends, and which endpoints
//! are behind them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use super::{
    Delta, Forwarding, IpFamily, NamespacedName, Node, NodeFacts, ResolvedEndpoint, ResolvedPort,
    TrafficPolicy, endpoint_slice_cache::EndpointInfo,
};
use crate::net::TUNNEL_LINK;

/// The tunnel of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelView {
    /// The interface index of the link.
    pub link: u32,
    /// The bytes of the longest packet that leaves this node in one piece.
    pub mtu: u32,
    /// The addresses of the nodes whose packets are taken.
    pub nodes: BTreeSet<IpAddr>,
    /// Where this node takes packets, at most one address of each family.
    pub addresses: Vec<SocketAddr>,
}

/// The links of a node carry so many bytes if the kernel does not say (RFC 894).
const ETHERNET_MTU: u32 = 1_500;

impl TunnelView {
    /// Resolves the tunnel, if its link exists. `primary` are the addresses of this node.
    pub(super) fn resolve(
        port: Option<NonZeroU16>,
        facts: &NodeFacts,
        primary: &BTreeMap<IpFamily, IpAddr>,
        nodes: &OtherNodes,
    ) -> Option<Self> {
        let port = port?.get();
        let link = facts.links.iter().find(|link| &*link.name == TUNNEL_LINK)?.index;
        let links_of = |address: &IpAddr| {
            let address = *address;
            facts.source_addresses.iter().filter(move |source| source.address == address)
        };
        let mtu_of = |index: u32| facts.links.iter().find(|link| link.index == index).map(|link| link.mtu);
        let mtu = primary.values().flat_map(links_of).filter_map(|source| mtu_of(source.link)).min();
        Some(Self {
            link,
            mtu: mtu.unwrap_or(ETHERNET_MTU),
            nodes: nodes.addresses.values().flatten().copied().collect(),
            addresses: primary.values().map(|address| SocketAddr::new(*address, port)).collect(),
        })
    }
}

/// The other nodes that take packets of the tunnel.
#[derive(Debug, Default)]
pub(super) struct OtherNodes {
    /// The addresses of each node, at most one of each family.
    addresses: BTreeMap<Box<str>, Vec<IpAddr>>,
}

impl OtherNodes {
    /// Applies a change of Nodes. Returns true if an address differs. Nodes with another port of
    /// the tunnel than this one do not understand it.
    pub(super) fn apply(&mut self, delta: &Delta<Node>, this: &str, port: Option<NonZeroU16>) -> bool {
        match delta {
            Delta::Apply(node) => self.set(node, this, port),
            Delta::Delete(NamespacedName { name, .. }) => self.addresses.remove(&**name).is_some(),
            Delta::Replace(nodes) => {
                let listed: BTreeSet<&str> = nodes.iter().map(|node| &*node.name).collect();
                let before = self.addresses.len();
                self.addresses.retain(|name, _| listed.contains(&**name));
                let is_removed = self.addresses.len() != before;
                nodes.iter().fold(is_removed, |differs, node| self.set(node, this, port) || differs)
            }
        }
    }

    fn set(&mut self, node: &Node, this: &str, port: Option<NonZeroU16>) -> bool {
        let has_port = |address: &&SocketAddr| Some(address.port()) == port.map(NonZeroU16::get);
        let addresses: Vec<IpAddr> = match &*node.name == this {
            true => Vec::new(),
            false => node.dsr_addresses.iter().filter(has_port).map(SocketAddr::ip).collect(),
        };
        if addresses.is_empty() {
            return self.addresses.remove(&*node.name).is_some();
        }
        let differs = self.addresses.get(&*node.name) != Some(&addresses);
        self.addresses.insert((*node.name).into(), addresses);
        differs
    }

    /// Returns the address of a node, of this family if it has one.
    fn address(&self, node: &str, family: IpFamily) -> Option<IpAddr> {
        let addresses = self.addresses.get(node)?;
        let of_family = addresses.iter().find(|address| IpFamily::of(**address) == family);
        of_family.or(addresses.first()).copied()
    }

    /// Sets the nodes of a service port's endpoints. `endpoints` are sorted by address.
    pub(super) fn set_endpoints(
        &self,
        port: &mut ResolvedPort,
        endpoints: &[EndpointInfo<'_>],
        family: IpFamily,
    ) {
        if port.forwarding != Forwarding::Dsr {
            return;
        }
        let node_of = |endpoint: &ResolvedEndpoint| {
            let at = endpoints.binary_search_by_key(&endpoint.address, |info| info.address).ok()?;
            let info = endpoints.get(at)?;
            let node = self.address(info.endpoint.placement.node_name.as_deref()?, family)?;
            Some((endpoint.address.ip(), node))
        };
        let remote = port.cluster_endpoints.iter().filter(|endpoint| !endpoint.is_local);
        port.dsr_nodes = remote.filter_map(node_of).collect();
    }
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
