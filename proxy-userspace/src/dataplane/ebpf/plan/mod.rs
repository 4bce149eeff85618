//! Turns a Snapshot into the list of changes that make the kernel serve it. Planning is pure.
//!
//! The order of the changes makes every prefix of a plan safe:
//!
//! 1. Endpoints, members and source ranges are added. An endpoint takes the slot of one that
//!    leaves, or a slot that no frontend counts yet. If a list becomes shorter, its
//!    last endpoints take the slots of those that leave.
//! 2. Connections that conntrack translates are left to it before their frontends get Maglev
//!    tables.
//! 3. Each frontend is written once, with the new number of slots and the new generation.
//! 4. Programs are attached: those that translate replies before those that translate requests,
//!    and XDP programs last.
//! 5. Frontends that are no longer needed are removed.
//! 6. Entries that nothing reads any more are removed.

pub(crate) mod capacity;
pub(crate) mod digest;
pub(crate) mod ids;
mod node;
pub(crate) mod ranges;
mod slots;
pub(crate) mod state;
pub(crate) mod step;
pub(crate) mod translate;

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashSet;
use proxy_common::{
    Addr,
    layout::{DsrKey, Endpoint, EndpointKey, EndpointValue, List, MemberKey, ServiceKey, ServiceValue},
    maglev::TableSize,
};
use smallvec::SmallVec;

use self::{
    ids::IdAllocator,
    ranges::Range,
    state::State,
    step::{MapEntry, Step},
};
use crate::{
    dataplane::PlanSize,
    model::{Dirty, FrontendKind, IpFamily, LinkPath, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

/// Changes to the kernel in the order in which they must be made, and the identifiers of service
/// ports after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Service ports that get an identifier, or lose theirs. This changes nothing in the kernel.
    pub names: Vec<(ServicePortKey, Option<u32>)>,
    /// The changes.
    pub steps: Vec<Step>,
    /// It covers the whole Snapshot, not only what was dirty.
    pub is_whole: bool,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.steps.len()
    }
}

/// Returns the changes from the state to the Snapshot. Looks only at what is dirty.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let mut planner = Planner::new(state, &snapshot.node);
    let mut detection_changes = false;
    if dirty.all || dirty.node {
        planner.node_addresses();
        detection_changes = planner.local_clients();
        planner.socket_scope();
        planner.bridge_ports();
        planner.masquerade();
        match &snapshot.node.link_path {
            LinkPath::Programs | LinkPath::Direct { .. } => planner.translate_on_links(),
            LinkPath::Netfilter { .. } => planner.leave_links_to_netfilter(),
        }
        planner.vlans();
        planner.tunnel();
        planner.xdp();
        planner.direct_path();
    }
    if dirty.all {
        planner.reserve(snapshot.ports.len());
        for (name, port) in &snapshot.ports {
            planner.port(name, port);
        }
        for name in state.names.keys().filter(|name| !snapshot.ports.contains_key(name)) {
            planner.remove_port(name);
        }
        planner.remove_unowned();
    } else {
        if dirty.node && (detection_changes || !state.ranges.is_empty()) {
            // Whether source ranges contain the node and its pods changes with the node. What is
            // masqueraded depends on which clients can be recognized as local.
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
                None => planner.remove_port(name),
            }
        }
    }
    Plan { is_whole: dirty.all, ..planner.finish() }
}

/// The plan while it is made.
struct Planner<'a> {
    state: &'a State,
    node: &'a NodeView,
    new_ids: IdAllocator<'a>,
    names: Vec<(ServicePortKey, Option<u32>)>,
    claimed: HashSet<u32>,
    /// The frontends of the service ports.
    written: Vec<ServiceKey>,
    /// Frontends that get Maglev tables.
    with_new_tables: BTreeSet<ServiceKey>,
    direct_begins: bool,
    phases: Phases,
}

/// The changes of each phase, in order.
#[derive(Default)]
struct Phases {
    additions: Vec<Step>,
    switches: Vec<Step>,
    attachments: Vec<Step>,
    closures: Vec<(ServiceKey, ServiceValue)>,
    removals: Vec<Step>,
    releases: Vec<Step>,
}

impl<'a> Planner<'a> {
    fn new(state: &'a State, node: &'a NodeView) -> Self {
        let (new_ids, phases) = (state.new_ids(), Phases::default());
        Self {
            state,
            node,
            new_ids,
            names: Vec::new(),
            claimed: HashSet::default(),
            written: Vec::new(),
            with_new_tables: BTreeSet::new(),
            direct_begins: false,
            phases,
        }
    }

    /// Makes room for what is noted about so many service ports.
    fn reserve(&mut self, ports: usize) {
        self.written.reserve(ports);
        if self.state.names.is_empty() {
            self.claimed.reserve(ports);
            self.names.reserve(ports);
        }
    }

    fn finish(self) -> Plan {
        let (state, epoch) = (self.state, self.next_epoch());
        let rules = self.rules();
        let Self { written, phases, with_new_tables: frontends, .. } = self;
        let leave = (!frontends.is_empty()).then_some(Step::LeaveConnectionsToConntrack { frontends });
        let attach = (!state.attached).then_some(Step::Attach);
        // Attaching to sockets does not wait for the rules: only packets need them.
        // A frontend that another service port took over was switched: it must not be removed for
        // its old owner. Frontends are removed before the slots that they lead to. Most plans
        // remove none.
        let written: HashSet<_> =
            if phases.closures.is_empty() { HashSet::default() } else { written.into_iter().collect() };
        let closures = phases.closures.into_iter().filter(|(key, _)| !written.contains(key));
        let steps = phases
            .additions
            .into_iter()
            .chain(leave)
            .chain(phases.switches)
            .chain(attach)
            .chain(rules)
            .chain(phases.attachments)
            .chain(closures.map(|(key, value)| Step::Remove(MapEntry::Service(key, value))))
            .chain(phases.removals)
            .chain(epoch)
            .chain(phases.releases);
        Plan { names: self.names, steps: steps.collect(), is_whole: false }
    }

    /// Plans the netfilter rules.
    fn rules(&self) -> Option<Step> {
        let masquerade = self.masquerade_ports().is_none();
        let is_right = self.state.rules_masquerade.is_none_or(|masquerades| masquerades == masquerade);
        (!self.state.rules_are_installed || !is_right).then_some(Step::InstallRules { masquerade })
    }

    /// Plans the difference between two sets of entries.
    fn difference<T: Ord + Copy>(
        &mut self,
        have: &BTreeSet<T>,
        wanted: &BTreeSet<T>,
        entry: impl Fn(T) -> MapEntry,
    ) {
        self.phases.additions.extend(wanted.difference(have).map(|item| Step::Put(entry(*item))));
        self.phases.removals.extend(have.difference(wanted).map(|item| Step::Remove(entry(*item))));
    }

    /// Plans the difference between two sets of entries with values.
    fn value_difference<K: Ord + Copy, V: PartialEq + Copy>(
        &mut self,
        have: &BTreeMap<K, V>,
        wanted: &BTreeMap<K, V>,
        entry: impl Fn(K, V) -> MapEntry,
    ) {
        let changed = wanted.iter().filter(|(key, value)| have.get(key) != Some(*value));
        self.phases.additions.extend(changed.map(|(key, value)| Step::Put(entry(*key, *value))));
        let unwanted = have.iter().filter(|(key, _)| !wanted.contains_key(key));
        self.phases.removals.extend(unwanted.map(|(key, value)| Step::Remove(entry(*key, *value))));
    }

    fn port(&mut self, name: &ServicePortKey, port: &ResolvedPort) {
        if port.frontends.is_empty() {
            // Other Services have all its addresses. Nothing would lead to its entries, and the
            // next process could not find them again.
            return self.remove_port(name);
        }
        let frontends = translate::frontends(port, name.family, name.name.protocol);
        let service = self.identifier(name, &frontends);
        let held: SmallVec<[_; 2]> = self.state.frontends(service).collect();
        let generation = self.slots(service, port, &held);
        self.set_members(service, &translate::members(service, name.name.protocol, port).collect());
        let ranges = translate::source_ranges(port, self.node, name.family).into_iter();
        self.set_ranges(service, &ranges.map(|prefix| Range { service, prefix }).collect());
        let nodes = port.dsr_nodes.iter().map(|(endpoint, node)| (Addr::from(*endpoint), Addr::from(*node)));
        self.set_dsr_nodes(service, &nodes.map(|(addr, node)| (DsrKey { service, addr }, node)).collect());
        for (key, kind) in &frontends {
            let (node, table_size) = (self.node, self.state.table_size);
            let value =
                translate::service_value(service, generation, port, *kind, node, name.family, table_size);
            let value = match key.tunneled {
                0 => value,
                _ => translate::tunneled_value(value, port, table_size),
            };
            let of_service = held.iter().find(|(held, _)| held == key).map(|(_, value)| value);
            let before = of_service.or_else(|| self.state.service(key));
            if gets_table(before, &value, self.state.attached) {
                self.with_new_tables.insert(*key);
            }
            if before != Some(&value) {
                self.phases.switches.push(Step::Put(MapEntry::Service(*key, value)));
            }
            self.written.push(*key);
        }
        let is_wanted = |key| frontends.iter().any(|(wanted, _)| *wanted == key);
        self.phases.closures.extend(held.into_iter().filter(|(key, _)| !is_wanted(*key)));
    }

    /// Returns the identifier of a service port: its own; after a restart that of its frontends;
    /// otherwise a new one.
    fn identifier(&mut self, name: &ServicePortKey, frontends: &[(ServiceKey, FrontendKind)]) -> u32 {
        if let Some(service) = self.state.id(name) {
            return service;
        }
        let adopted = frontends
            .iter()
            .filter_map(|(key, _)| self.state.service(key))
            .map(|value| value.service)
            .find(|service| !self.state.is_named(*service) && !self.claimed.contains(service));
        let service = adopted.unwrap_or_else(|| self.new_ids.next());
        self.claimed.insert(service);
        self.names.push((name.clone(), Some(service)));
        service
    }

    /// Plans the slots. Returns the generation of the lists: the present one if no slot changes.
    ///
    /// Connections remember the generation, so it must not stay if an endpoint leaves. A process
    /// that ended after it wrote slots may not have written the frontends: the slots tell.
    fn slots(&mut self, service: u32, port: &ResolvedPort, frontends: &[(ServiceKey, ServiceValue)]) -> u32 {
        let slots: SmallVec<[_; 8]> = self.state.slots(service).collect();
        let published = frontends.iter().map(|(_, value)| value.generation);
        let last = published.chain(slots.iter().map(|(_, value)| value.generation)).max();
        let last = last.unwrap_or_default();
        let (mut written, mut surplus) = (Vec::new(), Vec::new());
        for (list, wanted) in translate::lists(port) {
            let key = |slot| EndpointKey { service, list: list.number(), slot };
            let held = slots.iter().filter(|(key, _)| key.list == list.number());
            let endpoints = held.clone().map(|(key, value)| (key.slot, value.endpoint));
            let changes = slots::arrange(endpoints, &wanted).into_iter();
            written.extend(changes.map(|(slot, endpoint)| (key(slot), endpoint)));
            let count = u32::try_from(wanted.len()).unwrap_or(u32::MAX);
            surplus.extend(held.filter(|(key, _)| key.slot >= count));
        }
        let generation = last + u32::from(!written.is_empty() || !surplus.is_empty());
        let value = |endpoint| EndpointValue { endpoint, generation };
        let put = |(key, endpoint)| Step::Put(MapEntry::Endpoint(key, value(endpoint)));
        self.phases.additions.extend(written.into_iter().map(put));
        self.remove_slots(surplus.into_iter());
        generation
    }

    fn remove_slots(&mut self, slots: impl Iterator<Item = (&'a EndpointKey, &'a EndpointValue)>) {
        let removed = slots.map(|(key, value)| Step::Remove(MapEntry::Endpoint(*key, *value)));
        self.phases.removals.extend(removed);
    }

    /// Plans the members. Also destroys the sockets of members that no longer serve.
    fn set_members(&mut self, service: u32, wanted: &BTreeSet<MemberKey>) {
        let have: BTreeSet<MemberKey> = self.state.members_of(service).copied().collect();
        self.difference(&have, wanted, MapEntry::Member);
        let gone = have.difference(wanted).filter(|member| member.list == List::Serving.number());
        let endpoints: Vec<Endpoint> = gone.map(|member| member.endpoint).collect();
        if !endpoints.is_empty() {
            self.phases.releases.push(Step::ReleaseSockets { service, endpoints });
        }
    }

    fn set_ranges(&mut self, service: u32, wanted: &BTreeSet<Range>) {
        let have = self.state.ranges_of(service).copied().collect();
        self.difference(&have, wanted, MapEntry::SourceRange);
    }

    fn set_dsr_nodes(&mut self, service: u32, wanted: &BTreeMap<DsrKey, Addr>) {
        let have = self.state.dsr_endpoints_of(service).map(|(key, node)| (*key, *node)).collect();
        self.value_difference(&have, wanted, MapEntry::DsrEndpoint);
    }

    fn remove_port(&mut self, name: &ServicePortKey) {
        if let Some(service) = self.state.id(name) {
            self.names.push((name.clone(), None));
            self.remove_all(service);
        }
    }

    fn remove_all(&mut self, service: u32) {
        self.phases.closures.extend(self.state.frontends(service));
        self.remove_slots(self.state.slots(service));
        self.set_ranges(service, &BTreeSet::new());
        self.set_members(service, &BTreeSet::new());
        self.set_dsr_nodes(service, &BTreeMap::new());
    }

    /// Removes the entries of an earlier process that no service port took over.
    fn remove_unowned(&mut self) {
        for service in self.state.services_in_use() {
            if !self.state.is_named(service) && !self.claimed.contains(&service) {
                self.remove_all(service);
            }
        }
    }
}

/// Returns true if a frontend gets a Maglev table, so that the programs adopt connections which
/// they do not know. Before the programs of this process are attached, a frontend that is new to it
/// may have connections too.
fn gets_table(before: Option<&ServiceValue>, value: &ServiceValue, attached: bool) -> bool {
    has_table(value) && before.map_or(!attached, |before| !has_table(before))
}

/// Returns true if clients outside choose by a Maglev table.
pub(crate) fn has_table(value: &ServiceValue) -> bool {
    TableSize::of_flags(value.flags).is_some()
}

/// Returns the unspecified address of a family, which the key of a node port has.
pub(super) const fn any(family: IpFamily) -> Addr {
    match family {
        IpFamily::V4 => Addr::UNSPECIFIED_V4,
        IpFamily::V6 => Addr::UNSPECIFIED_V6,
    }
}
