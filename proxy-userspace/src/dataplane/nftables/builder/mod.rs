//! Builds a plan: collects the changes of sets, chains and elements, and then puts them into
//! transactions.

mod elements;
mod port_groups;
mod structure;

use std::{
    collections::BTreeSet,
    sync::{Arc, LazyLock},
};

use self::{
    elements::{ElementChange, ElementChanges, ElementId},
    port_groups::PortGroup,
};
use super::{
    lists::SizedList,
    plan::{Group, StateUpdate},
    service::{self, DestinationEndpoints, PortObjects},
    sets::SharedSet,
    state::{State, Table},
    table::RuleSettings,
};
use crate::{
    kernel::nftables::{ElementData, ElementKey, ElementValue, Name},
    model::{IpFamily, ServicePortKey, Snapshot},
};

pub(super) struct PlanBuilder<'a> {
    state: &'a State,
    settings: &'a RuleSettings,
    /// Sets and chains that all Services share.
    structure: Vec<Group>,
    /// Service ports with chains of their own.
    port_groups: Vec<PortGroup>,
    /// The elements that belong to one destination. They change destination by destination.
    by_destination: ElementChanges,
    /// All other elements.
    common: ElementChanges,
    new_lists: BTreeSet<(IpFamily, SizedList)>,
    unneeded_chains: Vec<(IpFamily, Name)>,
    unneeded_sets: Vec<(IpFamily, Name)>,
    update: StateUpdate,
}

impl<'a> PlanBuilder<'a> {
    pub(super) fn new(state: &'a State, settings: &'a RuleSettings) -> Self {
        Self {
            state,
            settings,
            structure: Vec::new(),
            port_groups: Vec::new(),
            by_destination: ElementChanges::new(),
            common: ElementChanges::new(),
            new_lists: BTreeSet::new(),
            unneeded_chains: Vec::new(),
            unneeded_sets: Vec::new(),
            update: StateUpdate::default(),
        }
    }

    /// Returns a table of the state. A table that is deleted and added again counts as empty.
    fn table(&self, family: IpFamily) -> &'a Table {
        static EMPTY: LazyLock<Table> = LazyLock::new(Table::default);
        match self.state.table(family) {
            foreign if foreign.is_foreign => &EMPTY,
            table => table,
        }
    }

    pub(super) fn set_node_port_ips(&mut self, snapshot: &Snapshot) {
        let addresses = snapshot.node.node_port_addresses.iter().copied();
        let addresses: BTreeSet<_> = service::node_port_ips(addresses).collect();
        if addresses == self.state.node_port_ips {
            return;
        }
        for (family, key) in addresses.difference(&self.state.node_port_ips) {
            self.add_reference(*family, SharedSet::NodePortIps, *key, ElementValue::Member(None));
        }
        for (family, key) in self.state.node_port_ips.difference(&addresses) {
            self.remove_reference(*family, SharedSet::NodePortIps, *key);
        }
        self.update.node_port_ips = Some(addresses);
    }

    fn add_reference(&mut self, family: IpFamily, set: SharedSet, key: ElementKey, value: ElementValue) {
        let change = self.change(family, set, key);
        change.references += 1;
        change.value = Some(value);
    }

    fn remove_reference(&mut self, family: IpFamily, set: SharedSet, key: ElementKey) {
        self.change(family, set, key).references -= 1;
    }

    fn change(&mut self, family: IpFamily, set: SharedSet, key: ElementKey) -> &mut ElementChange {
        let id = ElementId { family, set, key };
        let has_destination = id.destination().is_some();
        let changes = if has_destination { &mut self.by_destination } else { &mut self.common };
        changes.entry(id).or_default()
    }

    /// Adds what a service port needs now, and removes what it needs no longer.
    pub(super) fn set_port(&mut self, key: &ServicePortKey, snapshot: &Snapshot, settings_changed: bool) {
        let (before, port) = (self.state.ports.get(key), snapshot.ports.get(key));
        let had_chains = before.is_some_and(|port| service::has_chains(port));
        if before == port && !(settings_changed && had_chains) {
            return;
        }
        let family = key.family;
        let objects = |port: Option<&Arc<_>>| {
            port.map_or_else(PortObjects::default, |port| PortObjects::new(key, port, self.settings))
        };
        let (before, after) = (objects(before), objects(port));
        for (set, element) in before.keys() {
            self.remove_reference(family, set, element);
        }
        for (set, element, value) in after.elements.iter().cloned() {
            self.add_reference(family, set, element, value);
        }
        for list in &after.lists {
            self.ensure_list(family, list.sized());
            for (element, value) in self.numbered_endpoints(family, list) {
                self.add_reference(family, list.list.endpoints(), element, value);
            }
        }
        self.remove_own(family, &before, &after);
        self.write_own(key, &before, after);
        self.update.ports.push((key.clone(), port.cloned()));
    }

    /// Assigns numbers to endpoints. An endpoint keeps its number if the number is small enough.
    /// The other endpoints get the remaining numbers.
    fn numbered_endpoints(
        &self,
        family: IpFamily,
        list: &DestinationEndpoints,
    ) -> Vec<(ElementKey, ElementValue)> {
        let table = self.table(family);
        let mut remaining: BTreeSet<_> = list.endpoints.iter().copied().collect();
        let map = list.list.endpoints();
        let kept: Vec<_> = (0..list.numbers())
            .map(|number| {
                let key = list.destination.slot(number);
                let endpoint = match table.elements.get(&(map, key)).map(|element| &element.value) {
                    Some(ElementValue::Data(data)) => data.to_endpoint(),
                    _ => None,
                };
                (key, endpoint.filter(|endpoint| remaining.remove(endpoint)))
            })
            .collect();
        let mut remaining = remaining.into_iter();
        kept.into_iter()
            .filter_map(|(key, kept)| Some((key, kept.or_else(|| remaining.next())?)))
            .map(|(key, endpoint)| (key, ElementValue::Data(ElementData::from_endpoint(endpoint))))
            .collect()
    }

    /// Removes the chains and sets of a service port that it needs no longer.
    fn remove_own(&mut self, family: IpFamily, before: &PortObjects, after: &PortObjects) {
        let chains = before.chains.iter().map(|(name, _)| name);
        let chains = chains.filter(|name| after.chains.iter().all(|(kept, _)| kept != *name));
        self.unneeded_chains.extend(chains.map(|name| (family, name.clone())));
        let sets = before.sets.iter().map(|set| &set.name);
        let sets = sets.filter(|name| after.sets.iter().all(|kept| kept.name != **name));
        self.unneeded_sets.extend(sets.map(|name| (family, name.clone())));
    }
}
