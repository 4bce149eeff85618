//! The inputs of a plan other than Services: settings and facts of the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{rule_features::RefusedFeatures, settings::IpvsSettings};
use crate::{
    dataplane::iptables_text::LocalMatch,
    model::{IpFamily, Snapshot},
    net::PortRange,
};

/// The settings that plans use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlanOptions {
    /// The families that shunt serves.
    pub(super) families: Vec<IpFamily>,
    /// The settings of the mode.
    pub(super) settings: IpvsSettings,
    /// Families whose iptables knows `MASQUERADE --random-fully` (version 1.6.2 and later).
    pub(super) random_fully: BTreeSet<IpFamily>,
    /// What iptables refused so far. Rules do without it.
    pub(super) refused: RefusedFeatures,
}

impl PlanOptions {
    /// Returns true if shunt serves the family of this address.
    pub(super) fn serves(&self, address: IpAddr) -> bool {
        self.families.contains(&IpFamily::of(address))
    }
}

/// The facts of the node that plans use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    /// The addresses at which node ports are served. Loopback addresses are not among them: the
    /// kernel's virtual server does not forward packets from there (`crosses_local_route_boundary`
    /// of `net/netfilter/ipvs/ip_vs_xmit.c`). As upstream, addresses that are local by route are
    /// not either.
    pub(super) served_on: Vec<IpAddr>,
    /// Addresses on links other than the dummy link. Of these, the dummy link has only cluster IPs.
    pub(super) local_addresses: BTreeSet<IpAddr>,
    /// The node's own address of each family.
    pub(super) primary: BTreeMap<IpFamily, IpAddr>,
    /// The iptables match of packets that are not from local pods, for each family that has one.
    pub(super) not_local: BTreeMap<IpFamily, String>,
    /// All traffic to cluster IPs is masqueraded.
    pub(super) masquerade_all: bool,
    /// The source ports of masqueraded packets; `None` for any.
    pub(super) masquerade_ports: Option<PortRange>,
}

impl Node {
    /// Returns the node of a Snapshot.
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let node = &snapshot.node;
        let served = node.node_port_addresses_of_links().filter(|address| !address.is_loopback());
        let not_local =
            |family| Some((family, format!("! {}", LocalMatch::of(&node.local_detector, family)?)));
        Self {
            served_on: served.collect(),
            local_addresses: node.local_addresses.clone(),
            primary: node.primary_addresses.clone(),
            not_local: IpFamily::ALL.into_iter().filter_map(not_local).collect(),
            masquerade_all: node.masquerade_all,
            masquerade_ports: node.netfilter_ports(),
        }
    }
}
