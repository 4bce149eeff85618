//! From a Snapshot to the map writes that make it true: pure, and in an order whose every prefix is safe.
//!
//! Endpoints, members and ranges are added first, under a generation that nothing reads yet; then each destination is
//! written once, which switches it over; then programs are attached, those that translate back before those that translate;
//! destinations that go are removed next, and what nothing reads any more last.

pub(crate) mod capacity;
pub(crate) mod ids;
pub(crate) mod ranges;
pub(crate) mod state;
pub(crate) mod step;
pub(crate) mod translate;

use std::collections::{BTreeSet, HashSet};

use proxy_common::{
    Addr,
    layout::{BridgeAddress, List, MemberKey, ServiceKey},
};

use self::{ids::Fresh, ranges::Range, state::State, step::Step};
use super::links::{LinkHook, Running};
use crate::{
    dataplane::PlanSize,
    kernel::bpf::tc::Hook,
    model::{Dirty, IpFamily, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

/// Changes to the kernel in the order in which they must be made, and who owns which identifier after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Identifiers given and taken; costs nothing in the kernel.
    pub names: Vec<(ServicePortKey, Option<u32>)>,
    /// The changes.
    pub steps: Vec<Step>,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.steps.len()
    }
}

/// What has to change.
pub(crate) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let mut planner = Planner::new(state, &snapshot.node);
    let mut detection_changes = false;
    if dirty.all || dirty.node {
        planner.node_addresses();
        detection_changes = planner.local_callers();
        planner.links();
    }
    if dirty.all {
        for (name, port) in &snapshot.ports {
            planner.port(name, port);
        }
        for name in state.all_names().filter(|name| !snapshot.ports.contains_key(name)) {
            planner.gone(name);
        }
        planner.leftovers();
    } else {
        if dirty.node {
            // What source ranges mean for the node and its pods changes with the node, and what is masqueraded with what can
            // be told of callers.
            let touched = snapshot.ports.iter().filter(|(name, port)| {
                (detection_changes || !port.source_ranges.is_empty()) && !dirty.ports.contains(name)
            });
            for (name, port) in touched {
                planner.port(name, port);
            }
        }
        for name in &dirty.ports {
            match snapshot.ports.get(name) {
                Some(port) => planner.port(name, port),
                None => planner.gone(name),
            }
        }
    }
    planner.finish()
}

/// The plan while it is made, a list a phase.
struct Planner<'a> {
    state: &'a State,
    node: &'a NodeView,
    names: Vec<(ServicePortKey, Option<u32>)>,
    claimed: HashSet<u32>,
    fresh: Fresh<'a>,
    additions: Vec<Step>,
    switches: Vec<Step>,
    attachments: Vec<Step>,
    written: HashSet<ServiceKey>,
    closures: Vec<(ServiceKey, u32)>,
    removals: Vec<Step>,
    releases: Vec<Step>,
}

impl<'a> Planner<'a> {
    fn new(state: &'a State, node: &'a NodeView) -> Self {
        Self {
            state,
            node,
            names: Vec::new(),
            claimed: HashSet::new(),
            fresh: state.fresh_ids(),
            additions: Vec::new(),
            switches: Vec::new(),
            attachments: Vec::new(),
            written: HashSet::new(),
            closures: Vec::new(),
            removals: Vec::new(),
            releases: Vec::new(),
        }
    }

    fn finish(self) -> Plan {
        let Self {
            state,
            names,
            additions,
            switches,
            attachments,
            written,
            closures,
            removals,
            releases,
            ..
        } = self;
        let attach = (!state.attached).then_some(Step::Attach);
        // Sockets do not wait for rules, which only packets need.
        let rules = (!state.rules_are_put).then_some(Step::PutRules);
        // A destination that another service port took over was switched, and must not be removed for its old owner. Those
        // that go do so before the slots they lead to.
        let closures = closures.into_iter().filter(|(key, _)| !written.contains(key));
        let steps = additions
            .into_iter()
            .chain(switches)
            .chain(attach)
            .chain(rules)
            .chain(attachments)
            .chain(closures.map(|(key, service)| Step::RemoveService(key, service)))
            .chain(removals)
            .chain(releases);
        Plan { names, steps: steps.collect() }
    }

    fn node_addresses(&mut self) {
        let wanted: BTreeSet<Addr> =
            self.node.node_port_addresses.iter().map(|address| Addr::from(*address).node_address()).collect();
        let have = &self.state.node_addresses;
        self.additions.extend(wanted.difference(have).copied().map(Step::PutNodeAddress));
        self.removals.extend(have.difference(&wanted).copied().map(Step::RemoveNodeAddress));
    }

    /// Whether it differs from before.
    fn local_callers(&mut self) -> bool {
        let (detection, wanted) = translate::local_detection(self.node);
        let have = &self.state.local_sources;
        self.additions.extend(wanted.difference(have).copied().map(Step::PutLocalSource));
        self.removals.extend(have.difference(&wanted).copied().map(Step::RemoveLocalSource));
        let sources_differ = *have != wanted;
        let (have, wanted) = (&self.state.local_links, &self.node.local_links);
        self.additions.extend(wanted.difference(have).copied().map(Step::PutLocalLink));
        self.removals.extend(have.difference(wanted).copied().map(Step::RemoveLocalLink));
        let way_differs = self.state.local_detection != detection as u32;
        // Between the sources it looks at and the Services that rely on it.
        self.additions.extend(way_differs.then_some(Step::SetLocalDetection(detection)));
        sources_differ || way_differs
    }

    fn links(&mut self) {
        let (node, state) = (self.node, self.state);
        for (&index, bridge) in &node.bridge_ports {
            let wanted = BridgeAddress::new(bridge.0);
            if state.bridge_ports.get(&index) != Some(&wanted) {
                self.additions.push(Step::PutBridgePort(index, wanted));
            }
        }
        let unwanted = state.bridge_ports.keys().filter(|index| !node.bridge_ports.contains_key(index));
        self.removals.extend(unwanted.copied().map(Step::RemoveBridgePort));
        for hook in [Hook::Egress, Hook::Ingress] {
            for (&index, link) in &node.links {
                let at = LinkHook { hook, index };
                let is_right = match state.links.get(&at) {
                    Some(Running::Current(framing)) => *framing == link.framing,
                    Some(Running::LeftOut) => !link.has_node_address,
                    Some(Running::Outdated) | None => false,
                };
                if !is_right {
                    self.attachments.push(Step::AttachLink(at, link.clone()));
                }
            }
        }
        let unwanted = state.links.keys().rev().filter(|at| !node.links.contains_key(&at.index));
        self.attachments.extend(unwanted.copied().map(Step::DetachLink));
    }

    fn port(&mut self, name: &ServicePortKey, port: &ResolvedPort) {
        if port.frontends.is_empty() {
            // Other Services have all its addresses. Nothing would lead to what it has, and nobody would find it again.
            return self.gone(name);
        }
        let keys: Vec<ServiceKey> = port
            .frontends
            .iter()
            .map(|f| translate::service_key(f, name.family, name.name.protocol))
            .collect();
        let service = self.identify(name, &keys);
        let generation = self.lists(service, port);
        self.members(service, name, port);
        self.ranges(service, port);
        for (frontend, key) in port.frontends.iter().zip(&keys) {
            let value =
                translate::service_value(service, generation, port, frontend.kind, self.node, name.family);
            if self.state.service(key) != Some(&value) {
                self.switches.push(Step::PutService(*key, value));
            }
            self.written.insert(*key);
        }
        self.remove_destinations(service, &keys);
    }

    /// The identifier of a service port: its own, else, after a restart, that of its destinations, else a new one.
    fn identify(&mut self, name: &ServicePortKey, keys: &[ServiceKey]) -> u32 {
        if let Some(service) = self.state.id(name) {
            return service;
        }
        let adopted = keys
            .iter()
            .filter_map(|key| self.state.service(key))
            .map(|value| value.service)
            .find(|service| !self.state.is_named(*service) && !self.claimed.contains(service));
        let service = adopted.unwrap_or_else(|| self.fresh.next());
        self.claimed.insert(service);
        self.names.push((name.clone(), Some(service)));
        service
    }

    /// Plans the slots and says which generation holds them: the present one where nothing changed.
    fn lists(&mut self, service: u32, port: &ResolvedPort) -> u32 {
        let present = self.state.destinations(service).map(|(_, value)| value.generation).max();
        let newest = self.state.slots(service).map(|(key, _)| key.generation).max();
        let slots = |generation| translate::slots(service, generation, port);
        let is_current = |generation: &u32| {
            self.state
                .slots(service)
                .filter(|(key, _)| key.generation == *generation)
                .map(|(k, v)| (*k, *v))
                .eq(slots(*generation))
        };
        let generation = present.filter(is_current).unwrap_or_else(|| {
            let next = present.max(newest).map_or(1, |last| last + 1);
            self.additions.extend(slots(next).map(|(key, value)| Step::PutEndpoint(key, value)));
            next
        });
        let stale = self.state.slots(service).filter(|(key, _)| key.generation != generation);
        self.removals.extend(stale.map(|(key, _)| Step::RemoveEndpoint(*key)));
        generation
    }

    fn members(&mut self, service: u32, name: &ServicePortKey, port: &ResolvedPort) {
        let wanted: BTreeSet<MemberKey> = translate::members(service, name.name.protocol, port).collect();
        let have: BTreeSet<MemberKey> = self.state.members_of(service).copied().collect();
        self.additions.extend(wanted.difference(&have).copied().map(Step::PutMember));
        self.drop_members(service, have.difference(&wanted).copied());
    }

    /// Removes members, and the sockets of those that no longer serve.
    fn drop_members(&mut self, service: u32, members: impl Iterator<Item = MemberKey>) {
        let mut endpoints = Vec::new();
        for member in members {
            if member.list == List::Serving.number() {
                endpoints.push(member.endpoint);
            }
            self.removals.push(Step::RemoveMember(member));
        }
        if !endpoints.is_empty() {
            self.releases.push(Step::ReleaseSockets { service, endpoints });
        }
    }

    fn ranges(&mut self, service: u32, port: &ResolvedPort) {
        let wanted: BTreeSet<Range> = port.source_ranges.iter().map(|net| Range::new(service, net)).collect();
        let have: BTreeSet<Range> = self.state.ranges_of(service).copied().collect();
        self.additions.extend(wanted.difference(&have).copied().map(Step::PutRange));
        self.removals.extend(have.difference(&wanted).copied().map(Step::RemoveRange));
    }

    fn remove_destinations(&mut self, service: u32, wanted: &[ServiceKey]) {
        let unwanted = self.state.destinations(service).filter(|(key, _)| !wanted.contains(key));
        self.closures.extend(unwanted.map(|(key, _)| (key, service)));
    }

    fn gone(&mut self, name: &ServicePortKey) {
        if let Some(service) = self.state.id(name) {
            self.names.push((name.clone(), None));
            self.remove_all(service);
        }
    }

    fn remove_all(&mut self, service: u32) {
        self.remove_destinations(service, &[]);
        self.removals.extend(self.state.slots(service).map(|(key, _)| Step::RemoveEndpoint(*key)));
        self.removals.extend(self.state.ranges_of(service).copied().map(Step::RemoveRange));
        self.drop_members(service, self.state.members_of(service).copied());
    }

    /// What an earlier process left behind and nobody took over.
    fn leftovers(&mut self) {
        for service in self.state.services_in_use() {
            if !self.state.is_named(service) && !self.claimed.contains(&service) {
                self.remove_all(service);
            }
        }
    }
}

/// The unspecified address of a family: where a node port's key has no address.
pub(crate) const fn any(family: IpFamily) -> Addr {
    match family {
        IpFamily::V4 => Addr::UNSPECIFIED_V4,
        IpFamily::V6 => Addr::UNSPECIFIED_V6,
    }
}
