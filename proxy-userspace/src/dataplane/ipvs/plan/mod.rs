//! Plans the changes that lead from what the kernel holds to the Snapshot. Pure.
//!
//! After each step the kernel is safe: a plan first adds what masquerades and protects, then
//! virtual servers with their real servers, then the addresses that lead to them. Removal has the
//! opposite order.

mod servers;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use self::servers::ServerChanges;
use super::{
    desired::{DesiredObjects, Item, KernelObject},
    error::IpvsError,
    failures::ApplyFailures,
    node::Node,
    rejections::Rejections,
    rule_features::RuleFeature,
    rules::{self, Needs},
    sets::{Entry, Set, SetEntry},
    state::{ServerUsers, State},
    step::{SetChange, Step},
};
use crate::{
    dataplane::{
        PlanSize,
        iptables_text::{self, Layout},
    },
    kernel::ipvs::{Timeouts, VirtualKey},
    model::{Dirty, IpFamily, ResolvedPort, ServicePortKey, Snapshot},
};

/// The kernel changes in the order in which they must be made, and how [`State`] changes besides.
#[derive(Debug, Default)]
pub struct Plan {
    /// The kernel changes.
    pub(super) steps: Vec<Step>,
    /// It is a full plan.
    pub(super) is_full: bool,
    /// The virtual servers whose users change, with all their users after the plan.
    pub(super) server_users: BTreeMap<VirtualKey, ServerUsers>,
    ports: Vec<(ServicePortKey, Option<DesiredObjects>)>,
    item_users: Vec<(Item, usize)>,
    needs: BTreeMap<IpFamily, Needs>,
    /// What the plan leaves out.
    rejections: Rejections,
    node: Node,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.steps.iter().map(Step::len).sum()
    }
}

impl Plan {
    /// Returns the inputs of iptables-restore, in order.
    pub fn rules(&self) -> Vec<(IpFamily, String)> {
        let rules = self.steps.iter().filter_map(|step| match step {
            Step::Rules(family, inputs) => Some((*family, iptables_text::text(inputs, Layout::ChainsFirst))),
            _ => None,
        });
        rules.collect()
    }

    /// Records in the state that all steps were made.
    pub fn record(mut self, state: &mut State) {
        for step in std::mem::take(&mut self.steps) {
            state.record(step);
        }
        // Without failures there is no error.
        let _ = self.finish(state, ApplyFailures::default(), true);
    }

    /// Records the result of a plan whose steps were recorded already. `is_complete` is false if a
    /// step failed for another reason than a rejected object.
    pub(super) fn finish(
        self,
        state: &mut State,
        failures: ApplyFailures,
        is_complete: bool,
    ) -> Result<(), IpvsError> {
        if !is_complete {
            return failures.record(state, &self.ports);
        }
        state.rejections.retain(&self.rejections);
        state.rejections.add_planned(self.rejections);
        let recorded = failures.record(state, &self.ports);
        for (key, desired) in self.ports {
            match desired {
                Some(desired) => drop(state.ports.insert(key, desired)),
                None => drop(state.ports.remove(&key)),
            }
        }
        for (item, users) in self.item_users {
            state.update_item(item, |item| item.users = users);
        }
        for (key, users) in self.server_users {
            if users.is_empty() {
                state.server_users.remove(&key);
            } else {
                state.server_users.insert(key, users);
            }
        }
        state.needs.extend(self.needs);
        state.node = Some(self.node);
        recorded
    }
}

/// Plans the changes for a Snapshot.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let node = Node::new(snapshot);
    let is_full = dirty.all || state.node.as_ref() != Some(&node);
    let rejections = if is_full {
        state.rejections.for_full_plan(snapshot, &node)
    } else {
        state.rejections.for_partial_plan(&dirty.ports)
    };
    let plan = Plan { is_full, rejections, node, ..Plan::default() };
    let mut planner = Planner { state, snapshot, changes: BTreeMap::new(), plan };
    if is_full {
        let gone = state.ports.keys().filter(|key| !snapshot.ports.contains_key(key));
        snapshot.ports.keys().chain(gone).for_each(|key| planner.add_port(key));
    } else {
        dirty.ports.iter().for_each(|key| planner.add_port(key));
    }
    planner.finish()
}

struct Planner<'a> {
    state: &'a State,
    snapshot: &'a Snapshot,
    /// The change of the number of users of each item.
    changes: BTreeMap<Item, isize>,
    /// The plan, without steps.
    plan: Plan,
}

/// Set entries and addresses to add and delete.
#[derive(Default)]
struct ItemChanges {
    added: Vec<SetChange>,
    deleted: Vec<SetChange>,
    new_addresses: Vec<IpAddr>,
    old_addresses: Vec<IpAddr>,
}

impl Planner<'_> {
    /// Compares what a service port needs with what it needed before.
    fn add_port(&mut self, key: &ServicePortKey) {
        let is_served = self.state.options.families.contains(&key.family);
        let port = self.snapshot.ports.get(key).filter(|_| is_served);
        if let Some(port) = port {
            self.leave_out_refused(key, port);
        }
        let is_rejected = |object| self.plan.rejections.contains(key, object);
        let new = port.map(|port| DesiredObjects::new(key, port, &self.plan.node, &is_rejected));
        let old = self.state.ports.get(key);
        for (desired, is_new) in [(old, false), (new.as_ref(), true)] {
            for (server, reason) in desired.into_iter().flat_map(|desired| &desired.servers) {
                let before = || self.state.server_users.get(server).cloned().unwrap_or_default();
                let users = self.plan.server_users.entry(*server).or_insert_with(before);
                if is_new {
                    users.insert((*reason, key.clone()));
                } else {
                    users.remove(&(*reason, key.clone()));
                }
            }
        }
        if old == new.as_ref() {
            return;
        }
        for (desired, by) in [(old, -1), (new.as_ref(), 1)] {
            for item in desired.into_iter().flat_map(|desired| &desired.items) {
                *self.changes.entry(*item).or_default() += by;
            }
        }
        self.plan.ports.push((key.clone(), new));
    }

    /// Leaves out the load-balancer IPs of a service port whose access cannot be restricted,
    /// because iptables refuses the rule.
    fn leave_out_refused(&mut self, key: &ServicePortKey, port: &ResolvedPort) {
        let feature = (key.family, RuleFeature::IpvsMatch);
        let Some(error) = self.state.options.refused.get(&feature) else { return };
        for item in DesiredObjects::new(key, port, &self.plan.node, &|_| false).items {
            if matches!(item, Item::NodeDenied(..)) {
                self.plan.rejections.add(key.clone(), KernelObject::Item(item), error.clone());
            }
        }
    }

    /// Returns the number of service ports that need an item after the plan.
    fn users(&self, item: &Item) -> usize {
        let before = self.state.items.get(item).map_or(0, |item| item.users);
        before.saturating_add_signed(self.changes.get(item).copied().unwrap_or(0))
    }

    fn finish(mut self) -> Plan {
        let ItemChanges { added, deleted, new_addresses, old_addresses } = self.items();
        let servers = ServerChanges::new(self.state, self.snapshot, &self.plan);
        self.plan.needs = self.needs();
        let (rules_first, rules_last) = self.rules();
        let mut steps = if self.plan.is_full { self.foundations() } else { Vec::new() };
        // Entries that protect nothing can be deleted first. One ipset process then makes all
        // changes, and the deletions make room for new entries.
        let (mut last, mut first) = split_deletions(deleted);
        if added.is_empty() {
            last.append(&mut first);
        }
        first.extend(added);
        let is_takeover = self.state.rules.values().any(|rules| rules.is_of_iptables_mode);
        let (early, late) = if is_takeover { (Vec::new(), rules_first) } else { (rules_first, Vec::new()) };
        steps.push(Step::Sets(first));
        steps.extend(early);
        steps.push(Step::Servers(servers.added));
        steps.push(Step::AddAddresses(new_addresses));
        steps.extend(late);
        steps.push(Step::Drain(servers.drained));
        steps.push(Step::Servers(servers.removed));
        steps.push(Step::DeleteAddresses(old_addresses));
        steps.push(Step::Sets(last));
        steps.extend(rules_last);
        steps.retain(|step| step.len() > 0);
        let item_users = self.changes.keys().map(|item| (*item, self.users(item))).collect();
        Plan { steps, item_users, ..self.plan }
    }

    /// Plans what all other steps need: sysctls, timeouts, the dummy link and the sets.
    fn foundations(&self) -> Vec<Step> {
        let state = self.state;
        let mut steps: Vec<Step> =
            state.sysctls.iter().map(|(setting, value)| Step::Sysctl(*setting, *value)).collect();
        if state.timeouts != Timeouts::default() {
            steps.push(Step::Timeouts(state.timeouts));
        }
        if !state.has_link {
            steps.push(Step::Link);
        }
        let all = state.options.families.iter().flat_map(|family| Set::all().map(|set| (*family, set)));
        let missing = all.filter(|set| !state.sets.contains(set));
        steps.push(Step::Sets(missing.map(|(family, set)| SetChange::Create(family, set)).collect()));
        steps
    }

    fn items(&self) -> ItemChanges {
        let state = self.state;
        // The node's own ports would answer at an address that no Service has, so it is deleted in
        // excluded ranges too.
        let is_unneeded = |address: &&IpAddr| self.users(&Item::address(**address)) == 0;
        let mut changes = ItemChanges::default();
        let mut items: BTreeSet<&Item> = self.changes.keys().collect();
        if self.plan.is_full {
            items.extend(state.items.keys().filter(|item| state.options.families.contains(&item.family())));
            let served = state.addresses.iter().filter(|address| state.options.serves(**address));
            changes.old_addresses.extend(served.filter(is_unneeded));
        }
        for item in items {
            let Item::Entry(entry) = *item else { continue };
            let is_needed = self.users(item) > 0;
            match (is_needed, state.has_item(item)) {
                (true, false) => changes.added.push(SetChange::Add(entry)),
                (false, true) => changes.deleted.push(SetChange::Delete(entry)),
                _ => {}
            }
            if let SetEntry { set: Set::Addresses, entry: Entry::Address(address), .. } = entry {
                match state.addresses.contains(&address) {
                    false if is_needed => changes.new_addresses.push(address),
                    true if !self.plan.is_full && is_unneeded(&&address) => {
                        changes.old_addresses.push(address);
                    }
                    _ => {}
                }
            }
        }
        changes
    }

    /// Returns what the rules of each family depend on after the plan.
    fn needs(&self) -> BTreeMap<IpFamily, Needs> {
        let families = self.state.options.families.iter();
        let mut needs: BTreeMap<IpFamily, Needs> = families
            .map(|family| (*family, self.state.needs.get(family).cloned().unwrap_or_default()))
            .collect();
        for item in self.changes.keys() {
            let family = item.family();
            let Some(needs) = needs.get_mut(&family) else { continue };
            let is_needed = self.users(item) > 0;
            match item {
                Item::Entry(SetEntry { set, .. }) if is_needed => drop(needs.filled.insert(*set)),
                Item::Entry(SetEntry { set, .. }) => {
                    if needs.filled.contains(set) && !self.has_needed_entry(family, *set) {
                        needs.filled.remove(set);
                    }
                }
                Item::NodeDenied(..) if is_needed => drop(needs.denied.insert(item.to_string())),
                Item::NodeDenied(..) => drop(needs.denied.remove(&item.to_string())),
            }
        }
        needs
    }

    fn has_needed_entry(&self, family: IpFamily, set: Set) -> bool {
        let is_of_set =
            |item: &&Item| matches!(item, Item::Entry(entry) if (entry.family, entry.set) == (family, set));
        let first = Item::Entry(SetEntry { family, set, entry: Entry::Port(0) });
        let before = self.state.items.range(first..).map(|(item, _)| item).take_while(is_of_set);
        let new = self.changes.range(first..).map(|(item, _)| item).take_while(is_of_set);
        before.chain(new).any(|item| self.users(item) > 0)
    }

    /// Plans the rules in two parts. The first part serves what exists before and after the plan,
    /// and the second part only what exists after it.
    fn rules(&self) -> (Vec<Step>, Vec<Step>) {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for (family, held) in &self.state.rules {
            let Some(after) = self.plan.needs.get(family) else { continue };
            let before = self.state.needs.get(family).cloned();
            let before = before.unwrap_or_else(|| self.needs_of_existing_entries(*family));
            if !self.plan.is_full && before == *after {
                continue;
            }
            let mut held = held.clone();
            for (needs, steps) in [(&before.union(after), &mut first), (after, &mut last)] {
                let chains = rules::chains(*family, &self.state.options, &self.plan.node, needs);
                let inputs = held.difference(&chains);
                if !inputs.is_empty() {
                    held.record(&inputs);
                    steps.push(Step::Rules(*family, inputs));
                }
            }
        }
        (first, last)
    }

    fn needs_of_existing_entries(&self, family: IpFamily) -> Needs {
        let set_of = |item: &Item| match item {
            Item::Entry(entry) if entry.family == family => Some(entry.set),
            _ => None,
        };
        let filled: BTreeSet<Set> = self.state.existing_items().filter_map(set_of).collect();
        Needs { filled, denied: BTreeSet::new() }
    }
}

/// Splits the deletions of set entries into guards, which are deleted last, and all others. If the
/// restriction to source ranges ends, the ranges are guards, too: without them, the entry that
/// stands for the restriction would drop all packets. Entries are in the order of their sets, so
/// that the restriction goes first.
fn split_deletions(deleted: Vec<SetChange>) -> (Vec<SetChange>, Vec<SetChange>) {
    let server = |change: &SetChange, sets: &[Set]| match change {
        SetChange::Delete(entry) if sets.contains(&entry.set) => entry.entry.server(),
        _ => None,
    };
    let unrestricted: BTreeSet<VirtualKey> =
        deleted.iter().filter_map(|change| server(change, &[Set::LoadBalancerFirewall])).collect();
    let is_guard = |change: &SetChange| {
        matches!(change, SetChange::Delete(entry) if entry.set.is_guard())
            || server(change, &[Set::LoadBalancerSourceCidr, Set::LoadBalancerSourceIp])
                .is_some_and(|key| unrestricted.contains(&key))
    };
    deleted.into_iter().partition(is_guard)
}
