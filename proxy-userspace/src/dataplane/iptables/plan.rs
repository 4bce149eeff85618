//! What has to change, as input of iptables-restore: pure, from what the kernel holds and what it shall hold.
//!
//! Upstream writes the shared chains (KUBE-SERVICES and its like) anew in every sync. Here a chain is written only if it changes,
//! so that the input for a change of endpoints is the same whatever the number of Services.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    fixed,
    input::{self, TableInput},
    names::{Chain, ROUTES_LOCALNET, Table},
    rules::{Contributions, Lines, PortRules, SHARED, Terms},
    state::{Content, FamilyState, PortState, State},
    terms::{LARGE, Node},
};
use crate::{
    dataplane::PlanSize,
    kernel::iptables::Backend,
    model::{Dirty, FrontendKind, IpFamily, ResolvedPort, ServicePortKey, Snapshot},
};

/// Changes to the kernel, by family.
#[derive(Debug, Default)]
pub struct Plan {
    /// By family; each is made by one iptables-restore.
    pub(super) families: Vec<FamilyPlan>,
}

/// What is then written for service ports; none where they are gone.
type PortChanges = Vec<(ServicePortKey, Option<PortState>)>;

/// Changes in one family.
#[derive(Debug)]
pub(super) struct FamilyPlan {
    /// The family.
    pub(super) family: IpFamily,
    /// Tables that change, in the order in which they must.
    pub(super) tables: Vec<TableInput>,
    /// Then the kernel is to route loopback addresses that come from elsewhere; a chain tells that it was this mode that set it.
    pub(super) route_localnet: bool,
    /// All service ports were looked at.
    pub(super) is_full: bool,
    ports: PortChanges,
    /// Service ports that were left out before and are so no more.
    no_longer_left_out: Vec<ServicePortKey>,
    /// Chains that nothing leads to any more and that stay for now.
    deferred: Vec<Chain>,
    /// Chains of earlier plans that stayed, and go.
    no_longer_deferred: usize,
    node: Node,
    is_large: bool,
}

impl Plan {
    /// What iptables-restore of a backend is given, by family; nothing where nothing changes.
    pub fn inputs(&self, backend: Backend) -> Vec<(IpFamily, String)> {
        self.families.iter().map(|plan| (plan.family, input::text(&plan.tables, backend))).collect()
    }

    /// All of it was done.
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
    /// Without what was put off: that it is done now is no change.
    fn len(&self) -> usize {
        let changes = self.tables.iter().map(TableInput::len).sum::<usize>();
        changes - self.no_longer_deferred + usize::from(self.route_localnet)
    }

    /// Service ports that are written.
    pub(super) fn written(&self) -> impl Iterator<Item = (&ServicePortKey, &PortState)> {
        self.ports.iter().filter_map(|(key, port)| Some((key, port.as_ref()?)))
    }

    /// The service port that a rule is of, and what was to be written for it.
    pub(super) fn owner(&self, rule: &str) -> Option<(&ServicePortKey, &PortState)> {
        let chains = rule.split(' ').filter_map(Chain::parse);
        let chains: Vec<Chain> = chains.filter(|chain| matches!(chain, Chain::Of(..))).collect();
        let is_named = |key: &ServicePortKey| {
            let name = key.name.to_string();
            rule.contains(&format!("\"{name} ")) || rule.contains(&format!("\"{name}\""))
        };
        let mut owners = self
            .written()
            .filter(|(key, port)| chains.iter().any(|chain| port.chains.contains(chain)) || is_named(key));
        owners.next()
    }

    /// All of it was done.
    pub(super) fn record(self, state: &mut FamilyState) {
        for input in &self.tables {
            state.tables.entry(input.table).or_default().record(input);
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

/// What has to change.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let families = state.families.iter().map(|(family, held)| of_family(*family, held, snapshot, dirty));
    Plan { families: families.collect() }
}

fn of_family(family: IpFamily, held: &FamilyState, snapshot: &Snapshot, dirty: &Dirty) -> FamilyPlan {
    let node = Node::of(snapshot, family, held.offer);
    let ports = || snapshot.ports.iter().filter(move |(key, _)| key.family == family);
    let changed: BTreeSet<&ServicePortKey> = dirty.ports.iter().filter(|key| key.family == family).collect();
    let endpoints = |keys: &BTreeSet<&ServicePortKey>| -> usize {
        let endpoints_of =
            |key: &&ServicePortKey| snapshot.ports.get(*key).map_or(0, |port| count_endpoints(port));
        let was = |key: &&ServicePortKey| held.ports.get(*key).map_or(0, |port| port.endpoints);
        held.endpoints + keys.iter().map(endpoints_of).sum::<usize>() - keys.iter().map(was).sum::<usize>()
    };
    let is_known = held.node.as_ref() == Some(&node) && !dirty.all;
    let partial = is_known && (endpoints(&changed) > LARGE) == held.is_large;
    let is_large = if partial {
        held.is_large
    } else {
        ports().map(|(_, port)| count_endpoints(port)).sum::<usize>() > LARGE
    };
    let terms = Terms { family, offer: &held.offer, node: &node, is_large };
    let mut planner = Planner::new(terms, held, snapshot);
    if partial {
        for key in changed {
            planner.port(key);
        }
        planner.rewrite_shared();
    } else {
        let known = held.ports.keys().chain(held.left_out.keys());
        let gone = known.filter(|key| !snapshot.ports.contains_key(key));
        for key in ports().map(|(key, _)| key).chain(gone) {
            planner.port(key);
        }
        planner.everything();
    }
    let no_longer_left_out = std::mem::take(&mut planner.no_longer_left_out);
    let stale = planner.remove_stale(partial && is_large);
    let (tables, route_localnet, ports) = planner.finish();
    let is_full = !partial;
    let Stale { deferred, no_longer_deferred } = stale;
    FamilyPlan {
        family,
        tables,
        route_localnet,
        is_full,
        ports,
        no_longer_left_out,
        deferred,
        no_longer_deferred,
        node,
        is_large,
    }
}

/// What becomes of chains that nothing leads to any more.
struct Stale {
    deferred: Vec<Chain>,
    no_longer_deferred: usize,
}

fn port_state(port: &ResolvedPort, rules: &PortRules<'_>, chains: &[(Chain, Lines)]) -> PortState {
    PortState {
        chains: chains.iter().map(|(chain, _)| *chain).collect(),
        shared: rules.contributions().each_ref().map(|lines| Content::of(lines)),
        endpoints: count_endpoints(port),
    }
}

fn count_endpoints(port: &ResolvedPort) -> usize {
    let only_local = |address| port.cluster_endpoints.binary_search_by_key(address, |e| e.address).is_err();
    let locals = port.local_endpoints.iter().filter(|endpoint| only_local(&endpoint.address));
    port.cluster_endpoints.len() + locals.count()
}

/// Rules of different service ports exclude each other, so that their order is free; upstream's is that of a hash map. This one
/// spares iptables-nft the walk through its sorted list of chains that [`TableInput::write`] tells of. Rules of one target stay
/// as they were to each other.
fn by_target(lines: &str) -> Lines {
    let target = |line: &&str| line.rsplit_once(" -j ").map_or("", |(_, target)| target).to_owned();
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_by_cached_key(|line| std::cmp::Reverse(target(line)));
    lines.into_iter().flat_map(|line| [line, "\n"]).collect()
}

/// Puts the changes of a family together.
struct Planner<'a> {
    terms: Terms<'a>,
    held: &'a FamilyState,
    snapshot: &'a Snapshot,
    tables: BTreeMap<Table, TableInput>,
    /// Chains of service ports that are wanted, of those looked at.
    wanted: BTreeSet<Chain>,
    /// Those that were there for them.
    were: Vec<Chain>,
    shared_changes: [bool; SHARED.len()],
    /// The table filter gets rules that it did not have.
    filter_grows: bool,
    serves_node_ports: bool,
    ports: PortChanges,
    no_longer_left_out: Vec<ServicePortKey>,
}

impl<'a> Planner<'a> {
    fn new(terms: Terms<'a>, held: &'a FamilyState, snapshot: &'a Snapshot) -> Self {
        Self {
            terms,
            held,
            snapshot,
            tables: BTreeMap::new(),
            wanted: BTreeSet::new(),
            were: Vec::new(),
            shared_changes: [false; SHARED.len()],
            filter_grows: false,
            serves_node_ports: false,
            ports: Vec::new(),
            no_longer_left_out: Vec::new(),
        }
    }

    /// It was refused as it is.
    fn is_left_out(&self, key: &ServicePortKey, port: &ResolvedPort, rules: &PortRules<'_>) -> bool {
        let refused = self.held.left_out.get(key);
        refused.is_some_and(|refused| *refused == port_state(port, rules, &rules.chains()))
    }

    fn holds(&self, table: Table, chain: Chain) -> Option<&'a Content> {
        self.held.table(table)?.chains.get(&chain)
    }

    /// Writes the chain if it holds something else.
    fn fill(&mut self, table: Table, chain: Chain, lines: Lines) {
        if self.holds(table, chain) != Some(&Content::of(&lines)) {
            self.input(table).filled.push((chain, lines));
        }
    }

    fn input(&mut self, table: Table) -> &mut TableInput {
        self.tables.entry(table).or_insert_with(|| TableInput::new(table))
    }

    /// One service port: its own chains are written as far as they change, and what it adds to shared ones is noted.
    fn port(&mut self, key: &ServicePortKey) {
        let was = self.held.ports.get(key);
        let found = self.snapshot.ports.get_key_value(key);
        let found = found.map(|(key, port)| (key, port, PortRules::new(self.terms, key, port)));
        let Some((key, port, rules)) = found.filter(|(key, port, rules)| !self.is_left_out(key, port, rules))
        else {
            if !self.snapshot.ports.contains_key(key) {
                self.no_longer_left_out.push(key.clone());
            }
            self.note(key, was, None);
            return;
        };
        if self.held.left_out.contains_key(key) {
            self.no_longer_left_out.push(key.clone());
        }
        let chains = rules.chains();
        let now = port_state(port, &rules, &chains);
        self.serves_node_ports |= port.has_endpoints
            && port.frontends.iter().any(|frontend| frontend.kind == FrontendKind::NodePort);
        for (chain, lines) in chains {
            self.wanted.insert(chain);
            self.fill(Table::Nat, chain, lines);
        }
        self.note(key, was, Some(now));
    }

    fn note(&mut self, key: &ServicePortKey, was: Option<&PortState>, now: Option<PortState>) {
        let empty = [Content::of(""); SHARED.len()];
        let before = was.map_or(&empty, |port| &port.shared);
        let after = now.as_ref().map_or(&empty, |port| &port.shared);
        for (index, (table, _)) in SHARED.iter().enumerate() {
            let changes = before[index] != after[index];
            self.shared_changes[index] |= changes;
            self.filter_grows |= changes && *table == Table::Filter && after[index].rules > 0;
        }
        self.were.extend(was.into_iter().flat_map(|port| &port.chains));
        if was != now.as_ref() {
            self.ports.push((key.clone(), now));
        }
    }

    /// Writes the shared chains that change.
    fn rewrite_shared(&mut self) {
        if !self.shared_changes.contains(&true) {
            return;
        }
        let mut lines = Contributions::default();
        for (key, port) in self.snapshot.ports.iter().filter(|(key, _)| key.family == self.terms.family) {
            let rules = PortRules::new(self.terms, key, port);
            if self.is_left_out(key, port, &rules) {
                continue;
            }
            let added = rules.contributions();
            for (index, added) in added.iter().enumerate() {
                if self.shared_changes[index] {
                    lines[index].push_str(added);
                }
            }
        }
        for (index, mut lines) in lines.into_iter().enumerate() {
            if self.shared_changes[index] {
                let (table, chain) = SHARED[index];
                if table == Table::Nat {
                    lines = by_target(&lines);
                }
                lines.push_str(&fixed::tail(index, self.terms));
                self.fill(table, chain, lines);
            }
        }
    }

    /// What is looked at only if everything is: all that does not belong to a service port.
    fn everything(&mut self) {
        self.shared_changes = [true; SHARED.len()];
        self.rewrite_shared();
        for (table, chain, lines) in fixed::chains(self.terms) {
            self.fill(table, chain, lines);
        }
        for (table, chain) in fixed::EXISTING {
            let is_filled = self.tables.get(&table).is_some_and(|input| input.fills(chain));
            if self.holds(table, chain).is_none() && !is_filled {
                self.input(table).filled.push((chain, Lines::new()));
            }
        }
        for table in Table::ALL {
            let missing = self.held.table(table).map(|held| held.missing_jumps(table));
            self.input(table).jumps = missing.unwrap_or_default();
        }
        let nat = self.held.table(Table::Nat).into_iter().flat_map(|nat| nat.chains.keys());
        self.were = nat.copied().filter(|chain| matches!(chain, Chain::Of(..))).collect();
    }

    /// Removes chains that nothing leads to any more; in large clusters not at once but when everything is looked at, every
    /// `syncPeriod`, as upstream (`largeClusterMode`, `lastIPTablesCleanup`).
    fn remove_stale(&mut self, defer: bool) -> Stale {
        let wanted = std::mem::take(&mut self.wanted);
        let stale: BTreeSet<Chain> =
            self.were.iter().copied().filter(|chain| !wanted.contains(chain)).collect();
        if defer {
            return Stale { deferred: stale.into_iter().collect(), no_longer_deferred: 0 };
        }
        let (held, removed): (Vec<_>, Vec<_>) =
            stale.into_iter().partition(|chain| self.held.held_by_others.contains(chain));
        for chain in held {
            self.fill(Table::Nat, chain, Lines::new());
        }
        let no_longer_deferred = removed.iter().filter(|chain| self.held.deferred.contains(chain)).count();
        if !removed.is_empty() {
            self.input(Table::Nat).removed = removed;
        }
        Stale { deferred: Vec::new(), no_longer_deferred }
    }

    /// Where Services lose what they had, the table filter refuses before the table nat stops to translate; where they only
    /// gain, it goes on refusing until nat translates.
    fn finish(mut self) -> (Vec<TableInput>, bool, PortChanges) {
        let route_localnet = self.terms.family == IpFamily::V4
            && self.serves_node_ports
            && self.terms.node.has_localhost_node_ports()
            && !self.held.routes_localnet;
        let is_noted = self.holds(Table::Mangle, ROUTES_LOCALNET).is_some();
        if !is_noted && (route_localnet || self.held.set_route_localnet) {
            self.input(Table::Mangle).filled.push((ROUTES_LOCALNET, Lines::new()));
        }
        let mut tables: Vec<TableInput> =
            self.tables.into_values().filter(|input| !input.is_empty()).collect();
        if !self.filter_grows {
            tables.reverse();
        }
        (tables, route_localnet, self.ports)
    }
}
