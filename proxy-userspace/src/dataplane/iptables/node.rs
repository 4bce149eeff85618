//! What the rules depend on besides Services: options, and the node.

use std::net::IpAddr;

use crate::{
    dataplane::iptables_text::LocalMatch,
    model::{IpFamily, PortRange, Snapshot},
};

/// With more endpoints in a family than this, rules of endpoints have no comments: upstream's
/// `largeClusterEndpointsThreshold`.
pub(super) const LARGE: usize = 1000;

/// The settings of this mode, and the features of iptables and the kernel at the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "the options are independent of each other")]
pub struct RuleOptions {
    /// The bit that marks packets to be masqueraded.
    pub masquerade_mark: u32,
    /// Node ports are also served on 127.0.0.1 if `nodePortAddresses` contains it.
    pub localhost_node_ports: bool,
    /// iptables supports `MASQUERADE --random-fully`, as from 1.6.2 on.
    pub random_fully: bool,
    /// `nf_conntrack_tcp_be_liberal` is on: packets that conntrack calls invalid are not dropped.
    pub be_liberal: bool,
    /// The kernel counts packets with nfacct objects.
    pub counters: bool,
}

/// The part of the node that rules of one family depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Matches packets of local pods; `None` if they cannot be distinguished.
    pub(super) local: Option<LocalMatch>,
    /// All traffic to cluster IPs is masqueraded.
    pub(super) masquerade_all: bool,
    /// The source ports of masqueraded packets; `None` for any.
    pub(super) masquerade_ports: Option<PortRange>,
    /// The node's primary address.
    pub(super) primary: Option<IpAddr>,
    /// The addresses at which node ports are served; `None` for all addresses of the node.
    pub(super) served_on: Option<Vec<IpAddr>>,
    /// Node ports are served on 127.0.0.1. Then the kernel has to route loopback addresses.
    pub(super) localhost_node_ports: bool,
}

impl Node {
    /// The node of a Snapshot, for a family.
    ///
    /// As upstream (`MatchAll`), the configuration decides whether node ports are served on all
    /// addresses, also on those that are local by route. Ranges that happen to contain the
    /// addresses of all links do not. Loopback is served only in IPv4, and only if the option is
    /// set.
    pub(super) fn of(snapshot: &Snapshot, family: IpFamily, options: RuleOptions) -> Self {
        let node = &snapshot.node;
        let of_family = |address: &IpAddr| IpFamily::of(*address) == family;
        let serves_loopback = family == IpFamily::V4 && options.localhost_node_ports;
        let mut served: Vec<IpAddr> = node.node_port_addresses_of_links().filter(of_family).collect();
        let is_all = node.every_node_port_address.contains(&family);
        served.retain(|address| serves_loopback || !address.is_loopback());
        Self {
            local: LocalMatch::of(&node.local_detector, family),
            masquerade_all: node.masquerade_all,
            masquerade_ports: node.netfilter_ports(),
            primary: node.primary_addresses.get(&family).copied(),
            localhost_node_ports: serves_loopback && (is_all || served.iter().any(IpAddr::is_loopback)),
            served_on: (!is_all).then_some(served),
        }
    }
}
