//! Decides which UDP entries are stale, from the service ports before and after a change. Pure.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use super::{UdpFilter, UdpFlow};
use crate::model::{
    ClientLocation, Dirty, FrontendKind, IpFamily, LocalTrafficDetector, NodeView, Protocol, ResolvedPort,
    ServicePortKey, Snapshot, TrafficPolicy,
};

/// The UDP service ports at the time of the last cleanup.
#[derive(Debug, Default)]
pub(super) struct ServedPorts {
    ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    node_port_addresses: NodePortAddresses,
    /// The destinations of an earlier process.
    pub(super) former_destinations: HashSet<SocketAddr>,
    /// The families in which loopback addresses serve node ports.
    loopback: Vec<IpFamily>,
}

/// The addresses that serve node ports. 127.0.0.1 and `::1` represent all loopback addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodePortAddresses(BTreeSet<IpAddr>);

/// The destinations whose entries may be stale.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Candidates<'a> {
    destinations: HashMap<SocketAddr, Candidate<'a>>,
    node: &'a NodeView,
    node_port_addresses: NodePortAddresses,
    former_node_port_addresses: &'a NodePortAddresses,
}

/// The service ports of a destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Candidate<'a> {
    now: Option<(FrontendKind, &'a ResolvedPort)>,
    before: Option<&'a ResolvedPort>,
    /// An earlier process served it, with unknown endpoints.
    is_former: bool,
}

/// Returns true for UDP. Other protocols are ignored.
pub(super) fn is_udp(key: &ServicePortKey) -> bool {
    key.name.protocol == Protocol::Udp
}

impl ServedPorts {
    pub(super) fn new(loopback: &[IpFamily]) -> Self {
        Self { loopback: loopback.to_vec(), ..Self::default() }
    }

    /// Returns the candidates after a change. With `all`, includes unchanged service ports.
    pub(super) fn candidates<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        dirty: &Dirty,
        all: bool,
    ) -> Candidates<'a> {
        let node_port_addresses = NodePortAddresses::new(&snapshot.node, &self.loopback);
        let addresses_changed =
            (all || dirty.all || dirty.node) && node_port_addresses != self.node_port_addresses;
        let former = Candidate { is_former: true, ..Candidate::default() };
        let mut candidates = Candidates {
            destinations: self.former_destinations.iter().map(|to| (*to, former)).collect(),
            node: &snapshot.node,
            node_port_addresses,
            former_node_port_addresses: &self.node_port_addresses,
        };
        let keys: Box<dyn Iterator<Item = &ServicePortKey>> = if all || dirty.all {
            Box::new(self.ports.keys().chain(snapshot.ports.keys()))
        } else {
            Box::new(dirty.ports.iter())
        };
        let mut changes: Vec<_> = keys
            .filter(|key| is_udp(key))
            .map(|key| (key.family, self.ports.get(key), snapshot.ports.get(key)))
            .filter(|(_, before, now)| all || is_relevant_change(*before, *now))
            .collect();
        if addresses_changed {
            let has_node_port = |port: &ResolvedPort| port.frontends.iter().any(|at| at.address.is_none());
            let ports = snapshot.ports.iter().filter(|(key, port)| is_udp(key) && has_node_port(port));
            changes.extend(ports.map(|(key, port)| (key.family, self.ports.get(key), Some(port))));
        }
        for (family, before, now) in changes {
            candidates.add(family, before, |candidate, _, port| candidate.before = Some(port));
            candidates.add(family, now, |candidate, kind, port| candidate.now = Some((kind, port)));
        }
        candidates
    }

    /// Records the service ports after a cleanup.
    pub(super) fn update(&mut self, snapshot: &Snapshot, dirty: &Dirty, all: bool) {
        self.former_destinations.clear();
        if all || dirty.all || dirty.node {
            self.node_port_addresses = NodePortAddresses::new(&snapshot.node, &self.loopback);
        }
        if all || dirty.all {
            let ports = snapshot.ports.iter().filter(|(key, _)| is_udp(key));
            self.ports = ports.map(|(key, port)| (key.clone(), Arc::clone(port))).collect();
            return;
        }
        for key in dirty.ports.iter().filter(|key| is_udp(key)) {
            match snapshot.ports.get(key) {
                Some(port) => drop(self.ports.insert(key.clone(), Arc::clone(port))),
                None => drop(self.ports.remove(key)),
            }
        }
    }
}

/// Returns true if the change can make entries stale. A change of the endpoint lists alone cannot,
/// unless a list is or was empty.
fn is_relevant_change(before: Option<&Arc<ResolvedPort>>, now: Option<&Arc<ResolvedPort>>) -> bool {
    let properties = |port: &Arc<ResolvedPort>| {
        let is_empty = (port.cluster_endpoints.is_empty(), port.local_endpoints.is_empty());
        (is_empty, port.internal_policy, port.external_policy)
    };
    match (before, now) {
        (Some(before), Some(now)) if Arc::ptr_eq(before, now) => false,
        (Some(before), Some(now)) => {
            before.frontends != now.frontends
                || before.serving != now.serving
                || properties(before) != properties(now)
        }
        (None, None) => false,
        _ => true,
    }
}

impl NodePortAddresses {
    pub(super) fn new(node: &NodeView, loopback: &[IpFamily]) -> Self {
        let is_served =
            |address: &&IpAddr| !address.is_loopback() || loopback.contains(&IpFamily::of(**address));
        Self(node.node_port_addresses.iter().filter(is_served).copied().collect())
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let address = match address {
            IpAddr::V4(v4) if v4.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            other => other,
        };
        self.0.contains(&address)
    }
}

impl<'a> Candidates<'a> {
    fn add(
        &mut self,
        family: IpFamily,
        port: Option<&'a Arc<ResolvedPort>>,
        set: impl Fn(&mut Candidate<'a>, FrontendKind, &'a ResolvedPort),
    ) {
        let Some(port) = port else { return };
        for frontend in &port.frontends {
            let address = frontend.address.unwrap_or(family.unspecified());
            let destination = SocketAddr::new(address, frontend.port.get());
            set(self.destinations.entry(destination).or_default(), frontend.kind, port);
        }
    }

    /// Returns a filter for each family that has candidates.
    pub(super) fn filters(&self) -> impl Iterator<Item = UdpFilter> {
        IpFamily::ALL.into_iter().filter_map(|family| {
            let of_family = self.destinations.keys().filter(|to| IpFamily::of(to.ip()) == family);
            let mut ports = of_family.map(SocketAddr::port);
            let first = ports.next()?;
            Some(UdpFilter { family, destination_port: ports.all(|port| port == first).then_some(first) })
        })
    }

    /// Returns true if shunt's former rules created this entry, or a rule was missing, and no
    /// current rule would create it.
    pub(super) fn is_stale(&self, flow: &UdpFlow) -> bool {
        let address = flow.destination.ip();
        if let Some(candidate) = self.destinations.get(&flow.destination) {
            return self.is_stale_for(candidate, flow);
        }
        let is_served = self.node_port_addresses.contains(address);
        let was_served = self.former_node_port_addresses.contains(address);
        let node_port = SocketAddr::new(IpFamily::of(address).unspecified(), flow.destination.port());
        let candidate = self.destinations.get(&node_port).filter(|_| is_served || was_served);
        candidate.is_some_and(|candidate| {
            let now = candidate.now.filter(|_| is_served);
            let before = candidate.before.filter(|_| was_served);
            self.is_stale_for(&Candidate { now, before, ..*candidate }, flow)
        })
    }

    /// If no Service has the destination any more, another program may have entries for it. Only
    /// entries to former endpoints are stale then.
    fn is_stale_for(&self, candidate: &Candidate<'_>, flow: &UdpFlow) -> bool {
        match (candidate.now, candidate.before) {
            (Some((kind, port)), _) => !self.is_allowed(port, kind, flow),
            (None, Some(port)) => find_serving(port, flow.reply_source).is_some(),
            (None, None) => candidate.is_former && flow.is_translated(),
        }
    }

    /// Returns true if the entry leads to a serving endpoint, in the endpoint list or not, and
    /// policy Local does not exclude it.
    fn is_allowed(&self, port: &ResolvedPort, kind: FrontendKind, flow: &UdpFlow) -> bool {
        find_serving(port, flow.reply_source).is_some_and(|is_local| {
            is_local || port.policy(kind, self.client_location(flow.source.ip())) == TrafficPolicy::Cluster
        })
    }

    /// If the rules use information that conntrack does not have, the client counts as inside,
    /// where more endpoints are allowed.
    fn client_location(&self, source: IpAddr) -> ClientLocation {
        let is_inside = self.node.is_local(source)
            || match &self.node.local_detector {
                LocalTrafficDetector::None => false,
                LocalTrafficDetector::Cidrs(cidrs) => cidrs.iter().any(|cidr| cidr.contains(&source)),
                LocalTrafficDetector::BridgeInterface(_) | LocalTrafficDetector::InterfaceNamePrefix(_) => {
                    true
                }
            };
        if is_inside { ClientLocation::Inside } else { ClientLocation::Outside }
    }
}

/// Looks up the serving endpoint with this address. Returns whether it is local.
fn find_serving(port: &ResolvedPort, address: SocketAddr) -> Option<bool> {
    let found = port.serving.binary_search_by_key(&address, |endpoint| endpoint.address).ok()?;
    Some(port.serving[found].is_local)
}
