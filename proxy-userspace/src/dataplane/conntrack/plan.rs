//! Which UDP flows are stale: from what was served and what is served now, without looking at the kernel.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use super::{UdpFilter, UdpFlow};
use crate::model::{
    ClientLocation, Dirty, FrontendKind, IpFamily, LocalTrafficDetector, NodeView, Protocol, ResolvedPort,
    ServicePortKey, Snapshot, TrafficPolicy,
};

/// What the rules made of UDP when flows were last looked at.
#[derive(Debug, Default)]
pub(super) struct Memory {
    ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    node_ports: NodePorts,
    /// Destinations of an earlier process.
    inherited: HashSet<SocketAddr>,
    loopback: Vec<IpFamily>,
}

/// The addresses that node ports are served on. 127.0.0.1 and `::1` stand for all of loopback.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodePorts(BTreeSet<IpAddr>);

/// The destinations whose flows are to be looked at, and which of those flows are stale.
#[derive(Debug, PartialEq, Eq)]
pub struct Suspects<'a> {
    destinations: HashMap<SocketAddr, Suspect<'a>>,
    node: &'a NodeView,
    node_ports: NodePorts,
    former_node_ports: &'a NodePorts,
}

/// What a destination leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Suspect<'a> {
    now: Option<(FrontendKind, &'a ResolvedPort)>,
    before: Option<&'a ResolvedPort>,
    /// Before that, it led to endpoints that nobody remembers.
    is_inherited: bool,
}

/// Whether a service port is UDP: the others are nobody's business here.
pub(super) fn is_udp(key: &ServicePortKey) -> bool {
    key.name.protocol == Protocol::Udp
}

impl Memory {
    /// Nothing was served yet.
    pub(super) fn new(loopback: &[IpFamily]) -> Self {
        Self { loopback: loopback.to_vec(), ..Self::default() }
    }

    /// Somebody served this.
    pub(super) fn add_former_destination(&mut self, destination: SocketAddr) {
        self.inherited.insert(destination);
    }

    /// What to look for after this change; with `everything`, also at what did not change.
    pub(super) fn plan<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        dirty: &Dirty,
        everything: bool,
    ) -> Suspects<'a> {
        let node_ports = NodePorts::served(&snapshot.node, &self.loopback);
        let node_ports_moved = (everything || dirty.all || dirty.node) && node_ports != self.node_ports;
        let mut suspects = Suspects {
            destinations: HashMap::new(),
            node: &snapshot.node,
            node_ports,
            former_node_ports: &self.node_ports,
        };
        let inherited = Suspect { is_inherited: true, ..Suspect::default() };
        suspects.destinations.extend(self.inherited.iter().map(|to| (*to, inherited)));
        let keys: Box<dyn Iterator<Item = &ServicePortKey>> = if everything || dirty.all {
            Box::new(self.ports.keys().chain(snapshot.ports.keys()).filter(|key| is_udp(key)))
        } else {
            Box::new(dirty.ports.iter().filter(|key| is_udp(key)))
        };
        let mut changes: Vec<_> = keys
            .map(|key| (key.family, self.ports.get(key), snapshot.ports.get(key)))
            .filter(|(_, before, now)| everything || differs(*before, *now))
            .collect();
        if node_ports_moved {
            changes.extend(self.with_node_port(snapshot));
        }
        for (family, before, now) in changes {
            suspects.add(family, before, |suspect, _, port| suspect.before = Some(port));
            suspects.add(family, now, |suspect, kind, port| suspect.now = Some((kind, port)));
        }
        suspects
    }

    fn with_node_port<'a>(
        &'a self,
        snapshot: &'a Snapshot,
    ) -> impl Iterator<Item = (IpFamily, Option<&'a Arc<ResolvedPort>>, Option<&'a Arc<ResolvedPort>>)> {
        let has_one = |port: &ResolvedPort| port.frontends.iter().any(|at| at.address.is_none());
        let ports = snapshot.ports.iter().filter(move |(key, port)| is_udp(key) && has_one(port));
        ports.map(|(key, port)| (key.family, self.ports.get(key), Some(port)))
    }

    /// Keeps what is served now.
    pub(super) fn keep(&mut self, snapshot: &Snapshot, dirty: &Dirty, everything: bool) {
        self.inherited.clear();
        if everything || dirty.all || dirty.node {
            self.node_ports = NodePorts::served(&snapshot.node, &self.loopback);
        }
        if everything || dirty.all {
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

/// Whether a flow may be stale now that was not before: not when the choice of endpoints changed, but none left.
fn differs(before: Option<&Arc<ResolvedPort>>, now: Option<&Arc<ResolvedPort>>) -> bool {
    let matters = |port: &Arc<ResolvedPort>| {
        let empty = (port.cluster_endpoints.is_empty(), port.local_endpoints.is_empty());
        (empty, port.internal_policy, port.external_policy)
    };
    match (before, now) {
        (Some(before), Some(now)) if Arc::ptr_eq(before, now) => false,
        (Some(before), Some(now)) => {
            before.frontends != now.frontends
                || before.serving != now.serving
                || matters(before) != matters(now)
        }
        (None, None) => false,
        _ => true,
    }
}

impl NodePorts {
    fn served(node: &NodeView, loopback: &[IpFamily]) -> Self {
        let served =
            |address: &&IpAddr| !address.is_loopback() || loopback.contains(&IpFamily::of(**address));
        Self(node.node_port_addresses.iter().filter(served).copied().collect())
    }

    fn contains(&self, address: IpAddr) -> bool {
        let address = match address {
            IpAddr::V4(v4) if v4.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            other => other,
        };
        self.0.contains(&address)
    }
}

impl<'a> Suspects<'a> {
    fn add(
        &mut self,
        family: IpFamily,
        port: Option<&'a Arc<ResolvedPort>>,
        note: impl Fn(&mut Suspect<'a>, FrontendKind, &'a ResolvedPort),
    ) {
        let Some(port) = port else { return };
        for frontend in &port.frontends {
            let address = frontend.address.unwrap_or_else(|| unspecified(family));
            let destination = SocketAddr::new(address, frontend.port.get());
            note(self.destinations.entry(destination).or_default(), frontend.kind, port);
        }
    }

    /// What to ask the kernel for: a filter for each family that has suspects.
    pub fn filters(&self) -> impl Iterator<Item = UdpFilter> {
        IpFamily::ALL.into_iter().filter_map(|family| {
            let of_family = self.destinations.keys().filter(|to| IpFamily::of(to.ip()) == family);
            let mut ports = of_family.map(SocketAddr::port);
            let first = ports.next()?;
            Some(UdpFilter { family, destination_port: ports.all(|port| port == first).then_some(first) })
        })
    }

    /// Nothing to look for.
    pub fn is_empty(&self) -> bool {
        self.destinations.is_empty()
    }

    /// No rule that is in the kernel now would have made this flow, and one that was there made it or should have.
    pub fn is_stale(&self, flow: &UdpFlow) -> bool {
        let address = flow.destination.ip();
        if let Some(suspect) = self.destinations.get(&flow.destination) {
            return self.leads_astray(suspect, flow);
        }
        let (is_served, was_served) =
            (self.node_ports.contains(address), self.former_node_ports.contains(address));
        let node_port = SocketAddr::new(unspecified(IpFamily::of(address)), flow.destination.port());
        let suspect = self.destinations.get(&node_port).filter(|_| is_served || was_served);
        suspect.is_some_and(|suspect| {
            let now = suspect.now.filter(|_| is_served);
            let before = suspect.before.filter(|_| was_served);
            self.leads_astray(&Suspect { now, before, ..*suspect }, flow)
        })
    }

    /// Where nothing is served any more, somebody else may have flows of his own, to the same address and port.
    fn leads_astray(&self, suspect: &Suspect<'_>, flow: &UdpFlow) -> bool {
        match (suspect.now, suspect.before) {
            (Some((kind, port)), _) => !self.may_lead_to(port, kind, flow),
            (None, Some(port)) => serving(port, flow.reply_source).is_some(),
            (None, None) => suspect.is_inherited && flow.is_translated(),
        }
    }

    /// Any endpoint that serves keeps its flows, chosen for new ones or not, unless policy Local forbids it to this caller.
    fn may_lead_to(&self, port: &ResolvedPort, kind: FrontendKind, flow: &UdpFlow) -> bool {
        serving(port, flow.reply_source).is_some_and(|is_local| {
            is_local || port.policy(kind, self.caller(flow.source.ip())) == TrafficPolicy::Cluster
        })
    }

    /// Who may get more counts, where the rules go by what conntrack does not tell.
    fn caller(&self, source: IpAddr) -> ClientLocation {
        let is_inside = source.is_loopback()
            || self.node.local_addresses.contains(&source)
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

/// Whether the endpoint at this address is local; none if none there serves.
fn serving(port: &ResolvedPort, address: SocketAddr) -> Option<bool> {
    let found = port.serving.binary_search_by_key(&address, |endpoint| endpoint.address).ok()?;
    Some(port.serving[found].is_local)
}

const fn unspecified(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpFamily::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}
