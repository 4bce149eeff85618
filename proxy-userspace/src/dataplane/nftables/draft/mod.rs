//! A plan in the making: what becomes of chains, sets and elements, settled and put into transactions once all is known.

mod settle;
mod structure;

use std::{collections::BTreeSet, sync::Arc};

use self::{
    settle::{Spot, Touch, Touched},
    structure::Whole,
};
use super::{
    lists::Sized,
    plan::Facts,
    service::{self, Listed, Wanted},
    sets::Base,
    state::{State, Table},
    table::Basis,
};
use crate::{
    kernel::nftables::{Change, ElementData, ElementKey, ElementValue, Family, Name},
    model::{ServicePortKey, Snapshot},
};

type Group = Vec<(Family, Change)>;

/// A plan in the making.
pub(super) struct Draft<'a> {
    state: &'a State,
    basis: &'a Basis,
    /// Chains and sets.
    structure: Vec<Group>,
    /// Service ports with chains of their own.
    wholes: Vec<Whole>,
    /// In the order in which they change.
    touched: Touched,
    /// The same of those that no destination has to itself.
    common: Touched,
    ensured: BTreeSet<(Family, Sized)>,
    /// Chains and sets that are needed no longer.
    unneeded: Vec<(Family, Name)>,
    unneeded_sets: Vec<(Family, Name)>,
    facts: Facts,
}

impl<'a> Draft<'a> {
    pub(super) fn new(state: &'a State, basis: &'a Basis) -> Self {
        Self {
            state,
            basis,
            structure: Vec::new(),
            wholes: Vec::new(),
            touched: Touched::new(),
            common: Touched::new(),
            ensured: BTreeSet::new(),
            unneeded: Vec::new(),
            unneeded_sets: Vec::new(),
            facts: Facts::default(),
        }
    }

    /// What is there of a table; nothing, where it has to be made anew.
    fn table(&self, family: Family) -> &'a Table {
        static NOTHING: std::sync::LazyLock<Table> = std::sync::LazyLock::new(Table::default);
        match self.state.table(family) {
            foreign if foreign.is_foreign => &NOTHING,
            table => table,
        }
    }

    pub(super) fn set_node_port_ips(&mut self, snapshot: &Snapshot) {
        let wanted: BTreeSet<(Family, ElementKey)> =
            service::node_port_ips(snapshot.node.node_port_addresses.iter().copied()).into_iter().collect();
        if wanted == self.state.node_port_ips {
            return;
        }
        for (family, key) in wanted.difference(&self.state.node_port_ips) {
            self.claim(*family, Base::NodePortIps, *key, ElementValue::Member(None));
        }
        for (family, key) in self.state.node_port_ips.difference(&wanted) {
            self.release(*family, Base::NodePortIps, *key);
        }
        self.facts.node_port_ips = Some(wanted);
    }

    fn claim(&mut self, family: Family, base: Base, key: ElementKey, value: ElementValue) {
        let touch = self.touch(family, base, key);
        touch.claims += 1;
        touch.value = Some(value);
    }

    fn release(&mut self, family: Family, base: Base, key: ElementKey) {
        self.touch(family, base, key).claims -= 1;
    }

    fn touch(&mut self, family: Family, base: Base, key: ElementKey) -> &mut Touch {
        let spot = Spot { family, base, key };
        let touched = if spot.destination().is_some() { &mut self.touched } else { &mut self.common };
        touched.entry(spot).or_default()
    }

    /// Gives a service port what it needs now, and takes from it what it does not need any more.
    pub(super) fn set_port(&mut self, key: &ServicePortKey, snapshot: &Snapshot, is_other_basis: bool) {
        let (before, port) = (self.state.owned.get(key), snapshot.ports.get(key));
        let has_rules = before.is_some_and(|port| service::has_rules(port));
        if before == port && !(is_other_basis && has_rules) {
            return;
        }
        let family = service::family(key.family);
        let wanted = |port: &Arc<_>| service::wanted(key, port, self.basis);
        let (before, after) =
            (before.map_or_else(Wanted::default, wanted), port.map_or_else(Wanted::default, wanted));
        for (base, element) in before.keys() {
            self.release(family, base, element);
        }
        for (base, key, value) in after.elements.iter().cloned() {
            self.claim(family, base, key, value);
        }
        for listed in &after.lists {
            self.ensure(family, listed.sized());
            for (key, value) in self.fill(family, listed) {
                self.claim(family, listed.list.endpoints(), key, value);
            }
        }
        self.let_go(family, &before, &after);
        self.write_own(family, &before, after);
        self.facts.owned.push((key.clone(), port.cloned()));
    }

    /// Numbers for endpoints: those that have one keep it, as far as it is small enough, and the others get what is left.
    fn fill(&self, family: Family, listed: &Listed) -> Vec<(ElementKey, ElementValue)> {
        let table = self.table(family);
        let mut left: BTreeSet<_> = listed.endpoints.iter().copied().collect();
        let map = listed.list.endpoints();
        let kept: Vec<_> = (0..listed.numbers())
            .map(|number| {
                let key = listed.destination.slot(number);
                let held = table.elements.get(&(map, key)).map(|held| &held.value);
                let endpoint = match held {
                    Some(ElementValue::Data(data)) => {
                        data.to_endpoint().filter(|endpoint| left.remove(endpoint))
                    }
                    _ => None,
                };
                (key, endpoint)
            })
            .collect();
        let mut left = left.into_iter();
        let endpoints = kept.into_iter().filter_map(|(key, kept)| Some((key, kept.or_else(|| left.next())?)));
        endpoints
            .map(|(key, endpoint)| (key, ElementValue::Data(ElementData::from_endpoint(endpoint))))
            .collect()
    }

    /// What a service port had to itself and has no longer.
    fn let_go(&mut self, family: Family, before: &Wanted, after: &Wanted) {
        let chains = before.chains.iter().map(|(name, _)| name);
        let chains = chains.filter(|name| after.chains.iter().all(|(kept, _)| kept != *name));
        self.unneeded.extend(chains.map(|name| (family, name.clone())));
        let sets = before.sets.iter().map(|set| &set.name);
        let sets = sets.filter(|name| after.sets.iter().all(|kept| kept.name != **name));
        self.unneeded_sets.extend(sets.map(|name| (family, name.clone())));
    }
}
