//! Decides the change of each element, and puts all changes into transactions.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{Group, PlanBuilder, port_groups::PortGroup};
use crate::{
    dataplane::nftables::{plan::Plan, sets::SharedSet, state::Element},
    kernel::nftables::{Change, ElementKey, ElementValue},
    model::IpFamily,
};

/// A pending change of an element.
#[derive(Default)]
pub(super) struct ElementChange {
    /// The change of the number of service ports that need it.
    pub(super) references: i64,
    pub(super) value: Option<ElementValue>,
}

/// Identifies an element. In this order, the elements of a destination are consecutive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ElementId {
    pub(super) family: IpFamily,
    pub(super) set: SharedSet,
    pub(super) key: ElementKey,
}

/// The pending changes of elements.
pub(super) type ElementChanges = BTreeMap<ElementId, ElementChange>;

impl ElementId {
    /// Returns the destination to which the element belongs. Returns `None` if it belongs to
    /// several.
    pub(super) fn destination(&self) -> Option<&[u8]> {
        self.set.destination(self.family, &self.key)
    }

    fn has_same_destination(&self, other: &Self) -> bool {
        (self.family, self.destination()) == (other.family, other.destination())
    }
}

impl Ord for ElementId {
    fn cmp(&self, other: &Self) -> Ordering {
        let destinations = (self.family, self.destination()).cmp(&(other.family, other.destination()));
        destinations.then_with(|| (self.set, self.key).cmp(&(other.set, other.key)))
    }
}

impl PartialOrd for ElementId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PlanBuilder<'_> {
    /// Returns the plan, with at most this number of changes in a transaction unless one group has
    /// more.
    pub(in super::super) fn finish(mut self, max_changes: usize) -> Plan {
        self.write_list_chains();
        let mut transactions = Transactions { max_changes, transactions: Vec::new() };
        for group in std::mem::take(&mut self.structure) {
            transactions.add(group);
        }
        // Masquerading is added before traffic is led to an endpoint, and removed afterwards.
        let (mut added, mut removed) = (Group::new(), Group::new());
        for (id, change) in std::mem::take(&mut self.common) {
            for change in self.element_changes(id, change) {
                let is_removal = matches!(change, Change::DeleteElement(..));
                if is_removal { &mut removed } else { &mut added }.push((id.family, change));
            }
        }
        transactions.add_each(added);
        for group in self.take_port_groups() {
            transactions.add(self.with_destinations(group));
        }
        self.write_destinations(&mut transactions);
        transactions.add_each(removed);
        transactions.add_each(self.removals());
        Plan { transactions: transactions.transactions, update: self.update }
    }

    /// Returns the removals of unneeded chains and sets. All rules are removed first, because they
    /// may lead to other unneeded chains or use the sets. The chains are last, because elements of
    /// unneeded maps may lead to them.
    fn removals(&mut self) -> Group {
        let chains = std::mem::take(&mut self.unneeded_chains);
        let sets = std::mem::take(&mut self.unneeded_sets);
        let rules = chains.iter().map(|(family, chain)| (*family, Change::FlushChain(chain.clone())));
        let rules: Group = rules.collect();
        let chains = chains.into_iter().map(|(family, chain)| (family, Change::DeleteChain(chain)));
        let sets = sets.into_iter().map(|(family, set)| (family, Change::DeleteSet(set)));
        rules.into_iter().chain(sets).chain(chains).collect()
    }

    /// Returns the group of service ports with their destinations.
    fn with_destinations(&mut self, port: PortGroup) -> Group {
        let PortGroup { family, mut group, leading_elements, .. } = port;
        for (set, key) in leading_elements {
            for id in self.changes_of_destination(ElementId { family, set, key }) {
                let change = self.by_destination.remove(&id).unwrap_or_default();
                group.extend(self.element_changes(id, change).map(|change| (family, change)));
            }
        }
        group
    }

    /// Returns the pending changes of the destination to which this element belongs. The element's
    /// key is exactly the destination.
    pub(super) fn changes_of_destination(&self, element: ElementId) -> Vec<ElementId> {
        let first = ElementId { set: element.set.first_with_destination(), ..element };
        let changes = self.by_destination.range(first..).map(|(id, _)| *id);
        changes.take_while(|id| id.has_same_destination(&element)).collect()
    }

    /// Writes the elements of all destinations, one group for each destination.
    fn write_destinations(&mut self, transactions: &mut Transactions) {
        let mut group = Group::new();
        let mut last: Option<ElementId> = None;
        for (id, change) in std::mem::take(&mut self.by_destination) {
            if last.is_some_and(|last| !last.has_same_destination(&id)) {
                transactions.add(std::mem::take(&mut group));
            }
            group.extend(self.element_changes(id, change).map(|change| (id.family, change)));
            last = Some(id);
        }
        transactions.add(group);
    }

    /// Returns the changes of an element: none, a deletion, an addition, or both to replace the
    /// value.
    fn element_changes(
        &mut self,
        id: ElementId,
        change: ElementChange,
    ) -> impl Iterator<Item = Change> + use<> {
        let ElementId { family, set, key } = id;
        let element = self.table(family).elements.get(&(set, key));
        let old_references = element.map_or(0, |element| element.references);
        let references = u32::try_from(i64::from(old_references) + change.references).unwrap_or(0);
        let (is_deleted, new_value) = match (element, change.value) {
            (Some(_), _) if references == 0 => (true, None),
            (Some(Element { value: old, .. }), Some(value)) if *old != value => (true, Some(value)),
            (None, Some(value)) if references > 0 => (false, Some(value)),
            _ => (false, None),
        };
        let is_gone = is_deleted && new_value.is_none();
        let recorded_references = if new_value.is_some() { 1 } else { old_references };
        if !is_gone && references != recorded_references {
            self.update.references.push((family, set, key, references));
        }
        let definition = set.definition();
        let deletion = is_deleted.then_some(Change::DeleteElement(definition, key));
        let addition = new_value.map(|value| Change::AddElement(definition, key, value));
        deletion.into_iter().chain(addition)
    }
}

/// Packs groups into transactions.
struct Transactions {
    max_changes: usize,
    transactions: Vec<Group>,
}

impl Transactions {
    fn add(&mut self, group: Group) {
        match self.transactions.last_mut() {
            _ if group.is_empty() => {}
            Some(last) if last.len() + group.len() <= self.max_changes => last.extend(group),
            _ => self.transactions.push(group),
        }
    }

    /// Adds each change as a group.
    fn add_each(&mut self, changes: Group) {
        for change in changes {
            self.add(vec![change]);
        }
    }
}
