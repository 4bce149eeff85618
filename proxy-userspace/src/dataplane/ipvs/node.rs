//! What depends on the node and the configuration besides Services.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::IpvsSettings;
use crate::model::{IpFamily, LocalTrafficDetector, Snapshot};

/// What is the same as long as the process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// The families that are served.
    pub(super) families: Vec<IpFamily>,
    /// The scheduler of all virtual servers.
    pub(super) scheduler: Arc<str>,
    /// Virtual servers in these ranges that no Service has are left alone.
    pub(super) exclude_cidrs: Vec<IpNet>,
    /// The bit that marks packets to be masqueraded.
    pub(super) masquerade_mark: u32,
    /// Families whose iptables takes `MASQUERADE --random-fully`, as from 1.6.2 on.
    pub(super) random_fully: BTreeSet<IpFamily>,
}

impl Terms {
    /// Those of these settings, for these families; nothing is known of their iptables yet.
    pub(super) fn new(settings: &IpvsSettings, families: Vec<IpFamily>) -> Self {
        Self {
            families,
            scheduler: Arc::clone(&settings.scheduler),
            exclude_cidrs: settings.exclude_cidrs.clone(),
            masquerade_mark: settings.masquerade_mark,
            random_fully: BTreeSet::new(),
        }
    }

    /// Whether a family's iptables takes `--random-fully`.
    pub(super) fn take_randomly(&mut self, family: IpFamily, random_fully: bool) {
        if random_fully {
            self.random_fully.insert(family);
        } else {
            self.random_fully.remove(&family);
        }
    }

    /// Whether somebody else's virtual servers may be on this address.
    pub(super) fn excludes(&self, address: IpAddr) -> bool {
        self.exclude_cidrs.iter().any(|range| range.contains(&address))
    }
}

/// The node, as far as anything here depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    /// Where node ports are served. Not on loopback: the kernel's virtual server does not send packets from there elsewhere
    /// (`crosses_local_route_boundary` of `net/netfilter/ipvs/ip_vs_xmit.c`).
    pub(super) served_on: Vec<IpAddr>,
    /// Addresses on other links than the dummy one, which it must not have too.
    pub(super) local_addresses: BTreeSet<IpAddr>,
    /// The node's own address, a family.
    pub(super) primary: BTreeMap<IpFamily, IpAddr>,
    /// What tells packets that are not of local pods, as a match; none where they cannot be told.
    pub(super) not_local: BTreeMap<IpFamily, String>,
    /// All traffic to cluster IPs is masqueraded.
    pub(super) masquerade_all: bool,
}

impl Node {
    /// The node of a Snapshot.
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let node = &snapshot.node;
        let served = node.node_port_addresses.iter().filter(|address| !address.is_loopback());
        let not_local = |family| Some((family, not_local(&node.local_detector, family)?));
        Self {
            served_on: served.copied().collect(),
            local_addresses: node.local_addresses.clone(),
            primary: node.primary_addresses.clone(),
            not_local: IpFamily::ALL.into_iter().filter_map(not_local).collect(),
            masquerade_all: node.masquerade_all,
        }
    }
}

/// Of several ranges of a family the first one counts, as upstream (`getLocalDetectors`): one rule cannot exclude two.
fn not_local(detector: &LocalTrafficDetector, family: IpFamily) -> Option<String> {
    match detector {
        LocalTrafficDetector::None => None,
        LocalTrafficDetector::Cidrs(cidrs) => {
            let range = cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family)?;
            Some(format!("! -s {}", range.trunc()))
        }
        LocalTrafficDetector::BridgeInterface(bridge) => Some(format!("! -i {bridge}")),
        LocalTrafficDetector::InterfaceNamePrefix(prefix) => Some(format!("! -i {prefix}+")),
    }
}
