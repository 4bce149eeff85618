//! Puts the changes of service ports with chains of their own into one group each, or of several
//! service ports into one group if a destination moves from one to the other.

use std::collections::{BTreeMap, BTreeSet};

use super::{Group, PlanBuilder, elements::ElementId};
use crate::{
    dataplane::nftables::sets::SharedSet,
    kernel::nftables::{ElementKey, ElementValue, Name, Verdict},
    model::IpFamily,
};

/// Service ports with chains of their own. They change in one transaction with their destinations.
pub(super) struct PortGroup {
    pub(super) family: IpFamily,
    /// The changes of chains and sets.
    pub(super) group: Group,
    /// The elements that lead to the service ports, before or after the change.
    pub(super) leading_elements: BTreeSet<(SharedSet, ElementKey)>,
    /// The chains of the service ports after the change.
    pub(super) chains: Vec<Name>,
}

impl PlanBuilder<'_> {
    /// Returns the groups of all service ports. A destination that moves to another service port
    /// must not lead to chains that have changed already, or that have not changed yet.
    pub(super) fn take_port_groups(&mut self) -> Vec<PortGroup> {
        let groups = std::mem::take(&mut self.port_groups);
        let owner: BTreeMap<(IpFamily, &Name), usize> = (0..)
            .zip(&groups)
            .flat_map(|(number, group)| group.chains.iter().map(move |chain| ((group.family, chain), number)))
            .collect();
        let mut leads: Vec<usize> = (0..groups.len()).collect();
        for (number, group) in groups.iter().enumerate() {
            for chain in self.next_chains(group) {
                if let Some(&other) = owner.get(&(group.family, &chain)) {
                    let (from, to) = (first_of(&leads, number), first_of(&leads, other));
                    leads[from.max(to)] = from.min(to);
                }
            }
        }
        merged(groups, &leads)
    }

    /// Returns the chains to which the destinations of a group lead after the change.
    fn next_chains(&self, port: &PortGroup) -> BTreeSet<Name> {
        let family = port.family;
        let elements = port.leading_elements.iter().map(|&(set, key)| ElementId { family, set, key });
        let changes = elements.flat_map(|element| self.changes_of_destination(element));
        let chain = |id: ElementId| match &self.by_destination[&id].value {
            Some(ElementValue::Verdict(value)) => match &value.verdict {
                Verdict::Goto(chain) => Some(chain.clone()),
                _ => None,
            },
            _ => None,
        };
        changes.filter_map(chain).collect()
    }
}

/// Follows the numbers of groups to the first group with which one is merged.
fn first_of(leads: &[usize], mut number: usize) -> usize {
    while leads[number] != number {
        number = leads[number];
    }
    number
}

fn merged(groups: Vec<PortGroup>, leads: &[usize]) -> Vec<PortGroup> {
    let mut merged: BTreeMap<usize, PortGroup> = BTreeMap::new();
    for (number, group) in groups.into_iter().enumerate() {
        match merged.get_mut(&first_of(leads, number)) {
            Some(first) => {
                first.group.extend(group.group);
                first.leading_elements.extend(group.leading_elements);
            }
            None => drop(merged.insert(number, group)),
        }
    }
    merged.into_values().collect()
}
