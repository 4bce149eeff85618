//! What rules depend on besides Services: the configuration, what iptables and the kernel offer, and the node.

use std::net::IpAddr;

use crate::model::{IpFamily, LocalTrafficDetector, NodeView, Snapshot};

/// More endpoints than this in a family, and rules of endpoints go without comments: upstream's
/// `largeClusterEndpointsThreshold`.
pub(super) const LARGE: usize = 1000;

/// What is the same as long as the process runs, and what the kernel said when it was observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact by itself")]
pub struct Offer {
    /// The bit that marks packets to be masqueraded.
    pub masquerade_mark: u32,
    /// Node ports are served on 127.0.0.1 too, if `nodePortAddresses` has it.
    pub localhost_node_ports: bool,
    /// `MASQUERADE --random-fully`: iptables 1.6.2.
    pub random_fully: bool,
    /// `nf_conntrack_tcp_be_liberal` is on: packets that conntrack calls invalid are not dropped.
    pub be_liberal: bool,
    /// The kernel counts packets by nfacct objects.
    pub counters: bool,
}

/// The node, as far as rules of one family depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// What tells packets of local pods, as matches; none where they cannot be told.
    pub(super) local: Option<LocalMatch>,
    /// All traffic to cluster IPs is masqueraded.
    pub(super) masquerade_all: bool,
    /// The node's own address.
    pub(super) primary: Option<IpAddr>,
    /// Where node ports are served.
    pub(super) ports_on: NodePortsOn,
}

/// Matches of packets of local pods, and of all others. Sources stand before destinations in iptables-save, links after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LocalMatch {
    /// Packets from this range.
    Source(String),
    /// Packets that came in on this link; a `+` at the end stands for any rest.
    Link(String),
}

/// Where node ports are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodePortsOn {
    /// On every address of the node.
    EveryAddress {
        /// Loopback too.
        loopback: bool,
    },
    /// On these.
    Addresses(Vec<IpAddr>),
}

impl Node {
    /// The node of a Snapshot, to a family.
    pub(super) fn of(snapshot: &Snapshot, family: IpFamily, offer: Offer) -> Self {
        let node = &snapshot.node;
        Self {
            local: local_match(&node.local_detector, family),
            masquerade_all: node.masquerade_all,
            primary: node.primary_addresses.get(&family).copied(),
            ports_on: ports_on(node, family, offer),
        }
    }

    /// Node ports are served on 127.0.0.1, for which the kernel has to route loopback addresses.
    pub(super) fn has_localhost_node_ports(&self) -> bool {
        match &self.ports_on {
            NodePortsOn::EveryAddress { loopback } => *loopback,
            NodePortsOn::Addresses(addresses) => addresses.iter().any(IpAddr::is_loopback),
        }
    }
}

/// Of several ranges of a family the first one counts, as upstream (`getLocalDetectors`): one rule cannot exclude two.
fn local_match(detector: &LocalTrafficDetector, family: IpFamily) -> Option<LocalMatch> {
    match detector {
        LocalTrafficDetector::None => None,
        LocalTrafficDetector::Cidrs(cidrs) => {
            let range = cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family)?;
            Some(LocalMatch::Source(range.trunc().to_string()))
        }
        LocalTrafficDetector::BridgeInterface(bridge) => Some(LocalMatch::Link(bridge.to_string())),
        LocalTrafficDetector::InterfaceNamePrefix(prefix) => Some(LocalMatch::Link(format!("{prefix}+"))),
    }
}

/// Upstream goes by the configuration (`MatchAll`). By what it resolves to is the same: where all addresses are served, each
/// new one comes with a new Snapshot. Loopback is served in IPv4 alone, and only if asked for.
fn ports_on(node: &NodeView, family: IpFamily, offer: Offer) -> NodePortsOn {
    let of_family = |address: &&IpAddr| IpFamily::of(**address) == family;
    let serves_loopback = family == IpFamily::V4 && offer.localhost_node_ports;
    let served: Vec<IpAddr> = node.node_port_addresses.iter().filter(of_family).copied().collect();
    if served.len() == node.local_addresses.iter().filter(of_family).count() {
        return NodePortsOn::EveryAddress { loopback: serves_loopback };
    }
    let is_servable = |address: &IpAddr| serves_loopback || !address.is_loopback();
    NodePortsOn::Addresses(served.into_iter().filter(is_servable).collect())
}
