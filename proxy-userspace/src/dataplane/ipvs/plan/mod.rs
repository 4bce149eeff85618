//! What has to change: pure, from what the kernel holds and what it shall hold.
//!
//! The order is one whose every beginning is safe: first what masquerades and guards, then virtual servers with their real ones,
//! then the addresses that lead to them; what goes does so the other way round.

mod servers;
mod step;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use self::servers::ServerChanges;
pub(super) use self::step::{SetChange, Step};
use super::{
    IpvsError,
    claims::{Claims, Item, claims},
    held::Held,
    node::Node,
    refusals::{Refusals, Refusing},
    rules::{self, Needs},
    sets::{Entry, Set},
    state::{Owners, State},
};
use crate::{
    dataplane::PlanSize,
    kernel::ipvs::{Timeouts, VirtualKey},
    model::{Dirty, IpFamily, ServicePortKey, Snapshot},
};

/// Changes to the kernel, in the order in which they must be made.
#[derive(Debug, Default)]
pub struct Plan {
    /// What is done.
    pub(super) steps: Vec<Step>,
    noted: Noted,
}

/// What is then known besides what the kernel holds.
#[derive(Debug, Default)]
struct Noted {
    ports: Vec<(ServicePortKey, Option<Claims>)>,
    users: Vec<(Item, usize)>,
    owners: BTreeMap<VirtualKey, Owners>,
    needs: BTreeMap<IpFamily, Needs>,
    /// What is left out.
    refused: Refusals,
    node: Node,
    /// It was planned about everything.
    is_full: bool,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.steps.iter().map(Step::len).sum()
    }
}

impl Plan {
    /// What iptables-restore is given, in order.
    pub fn rules(&self) -> Vec<(IpFamily, String)> {
        let rules = self.steps.iter().filter_map(|step| match step {
            Step::Rules(family, change) => Some((*family, change.input())),
            _ => None,
        });
        rules.collect()
    }

    /// All of it was done.
    pub fn record(mut self, state: &mut State) {
        for step in std::mem::take(&mut self.steps) {
            state.record(step);
        }
        self.noted.record(state);
    }

    /// Virtual servers whose owners change, with those they have then.
    pub(super) fn owners(&self) -> &BTreeMap<VirtualKey, Owners> {
        &self.noted.owners
    }

    /// Whether it was planned about everything.
    pub(super) fn is_full(&self) -> bool {
        self.noted.is_full
    }

    /// The steps are done and recorded, but for what was refused; or some are not at all.
    pub(super) fn note(
        self,
        state: &mut State,
        refusing: Refusing,
        is_complete: bool,
    ) -> Result<(), IpvsError> {
        let found = refusing.of(state, &self.noted.ports);
        if is_complete {
            self.noted.record(state);
        }
        found.record(&mut state.refused)
    }
}

impl Noted {
    fn record(self, state: &mut State) {
        let Self { ports, users, owners, needs, refused, node, is_full: _ } = self;
        for (key, claims) in ports {
            match claims {
                Some(claims) => drop(state.ports.insert(key, claims)),
                None => drop(state.ports.remove(&key)),
            }
        }
        for (item, users) in users {
            let presence = state.items.entry(item).or_default();
            presence.users = users;
            if !presence.is_there && users == 0 {
                state.items.remove(&item);
            }
        }
        for (key, owners) in owners {
            if owners.is_empty() {
                state.owners.remove(&key);
            } else {
                state.owners.insert(key, owners);
            }
        }
        state.needs.extend(needs);
        state.refused.keep(&refused);
        state.node = Some(node);
    }
}

/// What has to change.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    let node = Node::of(snapshot);
    let is_full = dirty.all || state.node.as_ref() != Some(&node);
    let refused = if is_full {
        state.refused.of_everything(snapshot, &node)
    } else {
        state.refused.of_others(&dirty.ports)
    };
    let mut planner = Planner::new(state, snapshot, node, refused);
    if is_full {
        snapshot.ports.keys().for_each(|key| planner.port(key));
        let gone = state.ports.keys().filter(|key| !snapshot.ports.contains_key(key));
        gone.for_each(|key| planner.port(key));
    } else {
        dirty.ports.iter().for_each(|key| planner.port(key));
    }
    planner.finish(is_full)
}

struct Planner<'a> {
    state: &'a State,
    snapshot: &'a Snapshot,
    node: Node,
    /// What is left out.
    refused: Refusals,
    /// How many users items get and lose.
    changes: BTreeMap<Item, isize>,
    owners: BTreeMap<VirtualKey, Owners>,
    ports: Vec<(ServicePortKey, Option<Claims>)>,
}

/// Entries and addresses that come and go.
#[derive(Default)]
struct ItemChanges {
    added: Vec<SetChange>,
    deleted: Vec<SetChange>,
    new_addresses: Vec<IpAddr>,
    old_addresses: Vec<IpAddr>,
}

impl<'a> Planner<'a> {
    fn new(state: &'a State, snapshot: &'a Snapshot, node: Node, refused: Refusals) -> Self {
        let (changes, owners) = (BTreeMap::new(), BTreeMap::new());
        Self { state, snapshot, node, refused, changes, owners, ports: Vec::new() }
    }

    /// One service port.
    fn port(&mut self, key: &ServicePortKey) {
        let is_served = self.state.terms.families.contains(&key.family);
        let port = self.snapshot.ports.get(key).filter(|_| is_served);
        let new = port.map(|port| claims(key, port, &self.node, &self.refused));
        let old = self.state.ports.get(key);
        for (claims, by) in [(old, -1), (new.as_ref(), 1)] {
            for (server, reason) in claims.into_iter().flat_map(|claims| &claims.servers) {
                let held = self.state.owners.get(server);
                let owners = self.owners.entry(*server).or_insert_with(|| held.cloned().unwrap_or_default());
                if by > 0 {
                    owners.insert((*reason, key.clone()));
                } else {
                    owners.remove(&(*reason, key.clone()));
                }
            }
        }
        if old == new.as_ref() {
            return;
        }
        for (claims, by) in [(old, -1), (new.as_ref(), 1)] {
            for item in claims.into_iter().flat_map(|claims| &claims.items) {
                *self.changes.entry(*item).or_default() += by;
            }
        }
        self.ports.push((key.clone(), new));
    }

    /// How many service ports want an item then.
    fn users(&self, item: &Item) -> usize {
        let held = self.state.items.get(item).map_or(0, |presence| presence.users);
        held.saturating_add_signed(self.changes.get(item).copied().unwrap_or(0))
    }

    fn finish(self, is_full: bool) -> Plan {
        let items = self.items(is_full);
        let servers = ServerChanges::new(self.state, self.snapshot, &self.owners, &self.refused, is_full);
        let needs = self.needs();
        let (rules_first, rules_last) = self.rules(&needs, is_full);
        let mut steps = Vec::new();
        if is_full {
            steps.extend(self.foundations());
        }
        let ItemChanges { added, deleted, new_addresses, old_addresses } = items;
        // Whatever does not guard may go at once: then one process does it all, and makes room for what comes.
        let (mut last, mut first): (Vec<_>, Vec<_>) = deleted.into_iter().partition(is_guard);
        if added.is_empty() {
            last.append(&mut first);
        }
        first.extend(added);
        let is_takeover = self.state.rules.values().any(Held::is_of_another_mode);
        let (early, late) = if is_takeover { (Vec::new(), rules_first) } else { (rules_first, Vec::new()) };
        steps.push(Step::Sets(first));
        steps.extend(early);
        steps.push(Step::Servers(servers.added));
        steps.push(Step::AddAddresses(new_addresses));
        steps.extend(late);
        steps.push(Step::Retire(servers.retired));
        steps.push(Step::Servers(servers.removed));
        steps.push(Step::DeleteAddresses(old_addresses));
        steps.push(Step::Sets(last));
        steps.extend(rules_last);
        steps.retain(|step| step.len() > 0);
        Plan { steps, noted: self.noted(needs, is_full) }
    }

    fn noted(self, needs: BTreeMap<IpFamily, Needs>, is_full: bool) -> Noted {
        let users = self.changes.keys().map(|item| (*item, self.users(item))).collect();
        let Self { ports, owners, refused, node, .. } = self;
        Noted { ports, users, owners, needs, refused, node, is_full }
    }

    /// What all else stands on.
    fn foundations(&self) -> Vec<Step> {
        let state = self.state;
        let mut steps: Vec<Step> =
            state.settings.iter().map(|(setting, value)| Step::Setting(*setting, *value)).collect();
        if state.timeouts != Timeouts::default() {
            steps.push(Step::Timeouts(state.timeouts));
        }
        if !state.has_link {
            steps.push(Step::Link);
        }
        let all = state.terms.families.iter().flat_map(|family| Set::ALL.map(|set| (*family, set)));
        let missing = all.filter(|set| !state.sets.contains(set));
        steps.push(Step::Sets(missing.map(|(family, set)| SetChange::Create(family, set)).collect()));
        steps
    }

    fn items(&self, is_full: bool) -> ItemChanges {
        let mut changes = ItemChanges::default();
        self.changes.keys().for_each(|item| self.item(*item, &mut changes));
        if is_full {
            let unknown = self.state.items.keys().filter(|item| !self.changes.contains_key(item));
            unknown.for_each(|item| self.item(*item, &mut changes));
            let is_wanted = |address: &IpAddr| {
                let entry = Entry::Address(*address);
                self.users(&Item::Entry(IpFamily::of(*address), Set::Addresses, entry)) > 0
            };
            let stray = self.state.addresses.iter().filter(|address| {
                !is_wanted(address)
                    && !self.state.terms.excludes(**address)
                    && !changes.old_addresses.contains(address)
            });
            let stray: Vec<_> = stray.copied().collect();
            changes.old_addresses.extend(stray);
        }
        changes
    }

    fn item(&self, item: Item, to: &mut ItemChanges) {
        let Item::Entry(family, set, entry) = item else { return };
        let is_wanted = self.users(&item) > 0;
        let is_there = self.state.items.get(&item).is_some_and(|presence| presence.is_there);
        match (is_wanted, is_there) {
            (true, false) => to.added.push(SetChange::Add(family, set, entry)),
            (false, true) => to.deleted.push(SetChange::Delete(family, set, entry)),
            _ => {}
        }
        if let (Set::Addresses, Entry::Address(address)) = (set, entry) {
            match (is_wanted, self.state.addresses.contains(&address)) {
                (true, false) => to.new_addresses.push(address),
                (false, true) if !self.state.terms.excludes(address) => to.old_addresses.push(address),
                _ => {}
            }
        }
    }

    /// What rules are needed then, by family.
    fn needs(&self) -> BTreeMap<IpFamily, Needs> {
        let families = self.state.terms.families.iter();
        let mut needs: BTreeMap<IpFamily, Needs> = families
            .map(|family| (*family, self.state.needs.get(family).cloned().unwrap_or_default()))
            .collect();
        for item in self.changes.keys() {
            let is_wanted = self.users(item) > 0;
            match item {
                Item::Entry(family, set, _) => {
                    let Some(needs) = needs.get_mut(family) else { continue };
                    if is_wanted {
                        needs.filled.insert(*set);
                    } else if needs.filled.contains(set) && !self.has_wanted(*family, *set) {
                        needs.filled.remove(set);
                    }
                }
                Item::NodeDenied(family, _) => {
                    let Some(needs) = needs.get_mut(family) else { continue };
                    if is_wanted {
                        needs.denied.insert(item.to_string());
                    } else {
                        needs.denied.remove(&item.to_string());
                    }
                }
            }
        }
        needs
    }

    fn has_wanted(&self, family: IpFamily, set: Set) -> bool {
        let of_set = |item: &&Item| matches!(item, Item::Entry(f, s, _) if (*f, *s) == (family, set));
        let first = Item::Entry(family, set, Entry::Port(0));
        let held = self.state.items.range(first..).map(|(item, _)| item).take_while(of_set);
        let new = self.changes.range(first..).map(|(item, _)| item).take_while(of_set);
        held.chain(new).any(|item| self.users(item) > 0)
    }

    /// The rules for what is there before and after, and then those for what is there after; nothing where nothing changes.
    fn rules(&self, needs: &BTreeMap<IpFamily, Needs>, is_full: bool) -> (Vec<Step>, Vec<Step>) {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for (family, held) in &self.state.rules {
            let Some(after) = needs.get(family) else { continue };
            let before = self.state.needs.get(family).cloned().unwrap_or_else(|| self.found(*family));
            if !is_full && before == *after {
                continue;
            }
            let mut held = held.clone();
            for (needs, steps) in [(&before.union(after), &mut first), (after, &mut last)] {
                let wanted = rules::chains(*family, &self.state.terms, &self.node, needs);
                if let Some(change) = held.difference(&wanted) {
                    held.record(&change);
                    steps.push(Step::Rules(*family, change));
                }
            }
        }
        (first, last)
    }

    /// Sets that the kernel has entries of.
    fn found(&self, family: IpFamily) -> Needs {
        let there = self.state.items.iter().filter(|(_, presence)| presence.is_there);
        let filled: BTreeSet<Set> = there
            .filter_map(|(item, _)| match item {
                Item::Entry(of, set, _) if *of == family => Some(*set),
                _ => None,
            })
            .collect();
        Needs { filled, denied: BTreeSet::new() }
    }
}

fn is_guard(change: &SetChange) -> bool {
    matches!(change, SetChange::Delete(_, set, _) if set.is_guard())
}
