//! Plans the changes of the iptables mode: a pure function from the observed state and the Snapshot
//! to inputs of iptables-restore.
//!
//! Upstream writes the shared chains (KUBE-SERVICES and others) anew in every sync. This mode
//! writes a chain only if it changes, so that the input for a change of endpoints does not grow
//! with the number of Services.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    fixed_chains::{MODE, REQUIRED_CHAINS, add_last_rules, fixed_chains},
    isolation::RuleOwners,
    node::{LARGE, Node},
    rules::{PortRules, RuleContext, SHARED_CHAINS, empty_shared_rules},
    state::{FamilyState, PortState, State},
};
use crate::{
    dataplane::{
        PlanSize,
        iptables_text::{self, Chain, ChainRules, Content, Layout, ROUTES_LOCALNET, Table, TableInput},
    },
    kernel::iptables::Backend,
    model::{Dirty, FrontendKind, IpFamily, ResolvedPort, ServicePortKey, Snapshot},
};

/// The changes of both families.
#[derive(Debug, Default)]
pub struct Plan {
    /// A plan for each family. One iptables-restore applies it.
    pub(super) families: Vec<FamilyPlan>,
}

#[derive(Debug)]
pub(super) struct FamilyPlan {
    pub(super) family: IpFamily,
    /// The tables that change, in the order of the changes.
    pub(super) tables: Vec<TableInput>,
    /// `route_localnet` is set after that. [`ROUTES_LOCALNET`] records that this mode set it.
    pub(super) route_localnet: bool,
    /// The plan covers all service ports.
    pub(super) is_full: bool,
    /// Service ports that change, with what is written for them; `None` if they are removed.
    ports: Vec<(ServicePortKey, Option<PortState>)>,
    /// Service ports that were left out before and are not any more.
    no_longer_left_out: Vec<ServicePortKey>,
    /// Chains that no rule leads to any more. Their removal is deferred.
    deferred: Vec<Chain>,
    /// The number of chains that this plan removes and that earlier plans deferred.
    no_longer_deferred: usize,
    node: Node,
    is_large: bool,
}

impl Plan {
    /// Returns the input of iptables-restore for a backend, by family; empty text if nothing
    /// changes.
    pub fn inputs(&self, backend: Backend) -> Vec<(IpFamily, String)> {
        let text = |plan: &FamilyPlan| iptables_text::text(&plan.tables, Layout::TargetsFirst(backend));
        self.families.iter().map(|plan| (plan.family, text(plan))).collect()
    }

    /// Records that all changes were made.
    pub fn record(self, state: &mut State) {
        for plan in self.families {
            if let Some(family) = state.families.get_mut(&plan.family) {
                plan.record(family);
            }
        }
    }
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.families.iter().map(FamilyPlan::len).sum()
    }
}

impl FamilyPlan {
    /// The number of changes. Removals that an earlier plan deferred do not count.
    fn len(&self) -> usize {
        let changes = self.tables.iter().map(TableInput::len).sum::<usize>();
        changes - self.no_longer_deferred + usize::from(self.route_localnet)
    }

    /// The service ports that are written.
    pub(super) fn written(&self) -> impl Iterator<Item = (&ServicePortKey, &PortState)> {
        self.ports.iter().filter_map(|(key, port)| Some((key, port.as_ref()?)))
    }

    /// Returns the service port of a rule, and what the plan writes for it.
    pub(super) fn owner(&self, rule: &str) -> Option<(&ServicePortKey, &PortState)> {
        self.written().find(|port| RuleOwners::of(&[*port]).own(rule))
    }

    /// Returns true if the plan writes rules that count packets.
    pub(super) fn has_counters(&self) -> bool {
        let mut written = self.tables.iter().flat_map(|input| &input.filled);
        written.any(|rules| rules.lines.contains("--nfacct-name"))
    }

    /// Records that all changes were made.
    pub(super) fn record(self, state: &mut FamilyState) {
        for input in &self.tables {
            state.tables.entry(input.table).or_default().record(&MODE, input);
        }
        for (key, port) in &self.ports {
            state.record_port(key, port.as_ref());
        }
        for key in &self.no_longer_left_out {
            state.left_out.remove(key);
        }
        if self.is_full {
            state.deferred.clear();
        }
        state.deferred.extend(self.deferred);
        state.routes_localnet |= self.route_localnet;
        state.set_route_localnet |= self.route_localnet;
        state.node = Some(self.node);
        state.is_large = self.is_large;
    }
}

pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let families = state.families.iter().map(|(family, state)| plan_family(*family, state, snapshot, dirty));
    Plan { families: families.collect() }
}

fn plan_family(family: IpFamily, state: &FamilyState, snapshot: &Snapshot, dirty: &Dirty) -> FamilyPlan {
    let node = Node::of(snapshot, family, state.options);
    let changed: BTreeSet<&ServicePortKey> = dirty.ports.iter().filter(|key| key.family == family).collect();
    let is_known = state.node.as_ref() == Some(&node) && !dirty.all;
    let endpoints = || endpoints_after(state, snapshot, &changed);
    let is_partial = is_known && (endpoints() > LARGE) == state.is_large;
    let ports = || snapshot.ports.iter().filter(move |(key, _)| key.family == family);
    let is_large = if is_partial {
        state.is_large
    } else {
        count_served_endpoints(state, ports().map(|(key, port)| (key, &**port))) > LARGE
    };
    let context = RuleContext { family, options: &state.options, node: &node, is_large };
    let mut planner = Planner::new(context, state, snapshot, !is_partial);
    if is_partial {
        for key in changed {
            planner.plan_port(key);
        }
        planner.rewrite_shared();
    } else {
        let known = state.ports.keys().chain(state.left_out.keys());
        let gone = known.filter(|key| !snapshot.ports.contains_key(key));
        ports().map(|(key, _)| key).chain(gone).for_each(|key| planner.plan_port(key));
        planner.plan_node();
    }
    planner.remove_stale(is_partial && is_large);
    planner.finish()
}

/// The number of endpoints of a family after a change of some service ports.
fn endpoints_after(state: &FamilyState, snapshot: &Snapshot, changed: &BTreeSet<&ServicePortKey>) -> usize {
    let new = changed.iter().filter_map(|key| Some((*key, &**snapshot.ports.get(*key)?)));
    let old = changed.iter().filter_map(|key| state.ports.get(*key)).map(|port| port.endpoints);
    state.endpoints + count_served_endpoints(state, new) - old.sum::<usize>()
}

/// The number of endpoints of service ports. Those of service ports that are left out do not count:
/// otherwise, a full plan and the change of a service port could differ on whether there are too
/// many for comments, and each change would be a full plan.
fn count_served_endpoints<'a>(
    state: &FamilyState,
    ports: impl Iterator<Item = (&'a ServicePortKey, &'a ResolvedPort)>,
) -> usize {
    let served = ports.filter(|(key, _)| !state.left_out.contains_key(key));
    served.map(|(_, port)| count_endpoints(port)).sum()
}

fn port_state(port: &ResolvedPort, rules: &PortRules<'_>, chains: &[ChainRules]) -> PortState {
    PortState {
        chains: chains.iter().map(|rules| rules.chain).collect(),
        shared: rules.shared_rules().each_ref().map(|rules| Content::of(&rules.lines)),
        endpoints: count_endpoints(port),
    }
}

fn count_endpoints(port: &ResolvedPort) -> usize {
    let only_local = |address| port.cluster_endpoints.binary_search_by_key(address, |e| e.address).is_err();
    let locals = port.local_endpoints.iter().filter(|endpoint| only_local(&endpoint.address));
    port.cluster_endpoints.len() + locals.count()
}

/// Sorts rules by target. Rules of different service ports exclude each other, so that their order
/// is free; upstream's is that of a hash map. This order spares iptables-nft the walk through its
/// sorted list of chains, see [`iptables_text::text`]. Rules with the same target keep their order.
fn sort_by_target(lines: &str) -> String {
    let target = |line: &&str| line.rsplit_once(" -j ").map_or("", |(_, target)| target).to_owned();
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_by_cached_key(|line| std::cmp::Reverse(target(line)));
    lines.into_iter().flat_map(|line| [line, "\n"]).collect()
}

/// Collects the changes of a family.
struct Planner<'a> {
    context: RuleContext<'a>,
    state: &'a FamilyState,
    snapshot: &'a Snapshot,
    /// The plan so far; its tables are in `tables` until it is finished.
    plan: FamilyPlan,
    tables: BTreeMap<Table, TableInput>,
    /// The chains that the planned service ports need.
    needed: BTreeSet<Chain>,
    /// The chains that existed for them.
    existing: Vec<Chain>,
    shared_changes: [bool; SHARED_CHAINS.len()],
    /// The table filter gets rules that it did not have.
    filter_grows: bool,
    serves_node_ports: bool,
}

impl<'a> Planner<'a> {
    fn new(context: RuleContext<'a>, state: &'a FamilyState, snapshot: &'a Snapshot, is_full: bool) -> Self {
        let plan = FamilyPlan {
            family: context.family,
            tables: Vec::new(),
            route_localnet: false,
            is_full,
            ports: Vec::new(),
            no_longer_left_out: Vec::new(),
            deferred: Vec::new(),
            no_longer_deferred: 0,
            node: context.node.clone(),
            is_large: context.is_large,
        };
        Self {
            context,
            state,
            snapshot,
            plan,
            tables: BTreeMap::new(),
            needed: BTreeSet::new(),
            existing: Vec::new(),
            shared_changes: [false; SHARED_CHAINS.len()],
            filter_grows: false,
            serves_node_ports: false,
        }
    }

    /// Returns true if a service port was left out with exactly these rules.
    fn is_left_out(&self, key: &ServicePortKey, port: &ResolvedPort, rules: &PortRules<'_>) -> bool {
        let rejected = self.state.left_out.get(key);
        rejected.is_some_and(|rejected| *rejected == port_state(port, rules, &rules.own_chains()))
    }

    fn content(&self, table: Table, chain: Chain) -> Option<&'a Content> {
        self.state.tables.get(&table)?.chains.get(&chain)
    }

    /// Writes a chain unless it holds these rules.
    fn fill(&mut self, table: Table, rules: ChainRules) {
        if self.content(table, rules.chain) != Some(&Content::of(&rules.lines)) {
            self.input(table).filled.push(rules);
        }
    }

    fn input(&mut self, table: Table) -> &mut TableInput {
        self.tables.entry(table).or_insert_with(|| TableInput::new(table))
    }

    /// Plans one service port: writes those of its own chains that change, and finds the shared
    /// chains that change.
    fn plan_port(&mut self, key: &ServicePortKey) {
        let found = self.snapshot.ports.get_key_value(key);
        let found = found.map(|(key, port)| (key, port, PortRules::new(self.context, key, port)));
        let served = found.filter(|(key, port, rules)| !self.is_left_out(key, port, rules));
        let is_gone = !self.snapshot.ports.contains_key(key);
        if is_gone || (served.is_some() && self.state.left_out.contains_key(key)) {
            self.plan.no_longer_left_out.push(key.clone());
        }
        let new = served.map(|(_, port, rules)| {
            let chains = rules.own_chains();
            let new = port_state(port, &rules, &chains);
            self.serves_node_ports |= port.has_endpoints
                && port.frontends.iter().any(|frontend| frontend.kind == FrontendKind::NodePort);
            for rules in chains {
                self.needed.insert(rules.chain);
                self.fill(Table::Nat, rules);
            }
            new
        });
        self.record_change(key, new);
    }

    fn record_change(&mut self, key: &ServicePortKey, new: Option<PortState>) {
        let old = self.state.ports.get(key);
        let empty = [Content::of(""); SHARED_CHAINS.len()];
        let before = old.map_or(&empty, |port| &port.shared);
        let after = new.as_ref().map_or(&empty, |port| &port.shared);
        for (index, (table, _)) in SHARED_CHAINS.iter().enumerate() {
            let changes = before[index] != after[index];
            self.shared_changes[index] |= changes;
            self.filter_grows |= changes && *table == Table::Filter && after[index].rules > 0;
        }
        self.existing.extend(old.into_iter().flat_map(|port| &port.chains));
        if old != new.as_ref() {
            self.plan.ports.push((key.clone(), new));
        }
    }

    /// Writes the shared chains that change.
    fn rewrite_shared(&mut self) {
        if !self.shared_changes.contains(&true) {
            return;
        }
        let mut shared = empty_shared_rules();
        for (key, port) in self.snapshot.ports.iter().filter(|(key, _)| key.family == self.context.family) {
            let rules = PortRules::new(self.context, key, port);
            if self.is_left_out(key, port, &rules) {
                continue;
            }
            for (index, added) in rules.shared_rules().iter().enumerate() {
                if self.shared_changes[index] {
                    shared[index].lines.push_str(&added.lines);
                }
            }
        }
        for (index, mut rules) in shared.into_iter().enumerate() {
            if self.shared_changes[index] {
                let (table, _) = SHARED_CHAINS[index];
                if table == Table::Nat {
                    rules.lines = sort_by_target(&rules.lines);
                }
                add_last_rules(index, &mut rules, self.context);
                self.fill(table, rules);
            }
        }
    }

    /// Plans everything that does not belong to a service port.
    fn plan_node(&mut self) {
        self.shared_changes = [true; SHARED_CHAINS.len()];
        self.rewrite_shared();
        for (table, rules) in fixed_chains(self.context) {
            self.fill(table, rules);
        }
        for (table, chain) in REQUIRED_CHAINS {
            let is_filled = self.tables.get(&table).is_some_and(|input| input.fills(chain));
            if self.content(table, chain).is_none() && !is_filled {
                self.input(table).filled.push(ChainRules::new(chain));
            }
        }
        for table in Table::ALL {
            let state = self.state.tables.get(&table);
            self.input(table).jumps =
                state.map(|state| state.missing_jumps(&MODE, table)).unwrap_or_default();
        }
        let nat = self.state.tables.get(&Table::Nat).into_iter().flat_map(|nat| nat.chains.keys());
        self.existing = nat.copied().filter(|chain| matches!(chain, Chain::Of(..))).collect();
    }

    /// Removes chains that no rule leads to any more. In a large cluster, only a full plan removes
    /// them, once per `syncPeriod`, as upstream (`largeClusterMode`, `lastIPTablesCleanup`).
    fn remove_stale(&mut self, defer: bool) {
        let existing: BTreeSet<Chain> = self.existing.iter().copied().collect();
        let stale = existing.difference(&self.needed).copied();
        if defer {
            self.plan.deferred = stale.collect();
            return;
        }
        let is_undeletable = |chain: &Chain| self.state.undeletable.contains(chain);
        let (undeletable, removed): (Vec<_>, Vec<_>) = stale.partition(is_undeletable);
        for chain in undeletable {
            self.fill(Table::Nat, ChainRules::new(chain));
        }
        self.plan.no_longer_deferred =
            removed.iter().filter(|chain| self.state.deferred.contains(chain)).count();
        if !removed.is_empty() {
            self.input(Table::Nat).removed = removed;
        }
    }

    /// Puts the tables in order. If Services only gain endpoints, the table nat translates before
    /// the table filter stops to refuse. If Services lose endpoints, filter refuses before nat
    /// stops to translate.
    fn finish(mut self) -> FamilyPlan {
        self.plan.route_localnet =
            self.serves_node_ports && self.context.node.localhost_node_ports && !self.state.routes_localnet;
        let is_recorded = self.content(Table::Mangle, ROUTES_LOCALNET).is_some();
        if !is_recorded && (self.plan.route_localnet || self.state.set_route_localnet) {
            self.input(Table::Mangle).filled.push(ChainRules::new(ROUTES_LOCALNET));
        }
        self.plan.tables = self.tables.into_values().filter(|input| !input.is_empty()).collect();
        if !self.filter_grows {
            self.plan.tables.reverse();
        }
        self.plan
    }
}
