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
mod ports;
pub(crate) mod ranges;
mod slots;
pub(crate) mod state;
pub(crate) mod step;
pub(crate) mod translate;

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashSet;
use proxy_common::{
    Addr,
    layout::{ServiceKey, ServiceValue},
    maglev::TableSize,
};

use self::{
    ids::IdAllocator,
    state::State,
    step::{MapEntry, Step},
};
use super::rules::RuleDuties;
use crate::{
    dataplane::PlanSize,
    model::{Dirty, IpFamily, LinkPath, NodeView, ServicePortKey, Snapshot},
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
        planner.all_ports(&snapshot.ports);
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
    // While they cannot be written, each attempt may take seconds: changes of Services do not try.
    let rules = (dirty.all || dirty.node).then(|| planner.rules()).flatten();
    Plan { is_whole: dirty.all, ..planner.finish(rules) }
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

impl Phases {
    /// Adds the changes of other service ports.
    fn extend(&mut self, other: Self) {
        let Self { additions, switches, attachments, closures, removals, releases } = other;
        self.additions.extend(additions);
        self.switches.extend(switches);
        self.attachments.extend(attachments);
        self.closures.extend(closures);
        self.removals.extend(removals);
        self.releases.extend(releases);
    }
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

    fn finish(self, rules: Option<Step>) -> Plan {
        let (state, epoch) = (self.state, self.next_epoch());
        let Self { written, phases, with_new_tables: frontends, .. } = self;
        let leave = (!frontends.is_empty()).then_some(Step::LeaveConnectionsToConntrack { frontends });
        let attach = (!state.attached).then_some(Step::Attach);
        // Attaching to sockets does not wait for the rules: only packets need them. If the programs
        // refuse packets, they do so from when they are attached. Those of an earlier version may
        // only mark packets, and need the rules until they are replaced.
        let (rules, fewer_rules) = match rules {
            Some(Step::InstallRules(duties)) if !duties.refuse => {
                (Some(Step::LetProgramsRefuse(duties)), rules)
            }
            _ => (rules, None),
        };
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
            .chain(fewer_rules)
            .chain(closures.map(|(key, value)| Step::Remove(MapEntry::Service(key, value))))
            .chain(phases.removals)
            .chain(epoch)
            .chain(phases.releases);
        Plan { names: self.names, steps: steps.collect(), is_whole: false }
    }

    /// Plans the netfilter rules.
    fn rules(&self) -> Option<Step> {
        let masquerade = self.masquerade_ports().is_none();
        let duties = RuleDuties { masquerade, refuse: masquerade || !self.programs_may_refuse() };
        let is_right = self.state.rule_duties.is_none_or(|current| current == duties);
        (!self.state.rules_are_installed || !is_right).then_some(Step::InstallRules(duties))
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
