//! Plans the chains and sets: those that all Services share, and those of one service port.

use std::collections::{BTreeSet, HashSet};

use super::{Group, PlanBuilder, port_groups::PortGroup};
use crate::{
    dataplane::nftables::{
        lists::{EndpointList, SizedList},
        port_chains::{self, ChainRules},
        service::{self, PortObjects},
        sets::SharedSet,
        table::{self, COMMENT},
    },
    kernel::nftables::{Chain, Change, ElementKey, Name, Rule, Set},
    model::{IpFamily, ServicePortKey},
};

impl PlanBuilder<'_> {
    /// Writes the tables with the sets and chains that do not depend on Services.
    pub(in super::super) fn write_tables(&mut self) {
        for family in IpFamily::ALL {
            let mut group = Group::new();
            if self.state.table(family).is_foreign {
                group.push((family, Change::DeleteTable));
            }
            let table = self.table(family);
            if !table.exists {
                group.push((family, Change::AddTable(COMMENT)));
            }
            let sets = SharedSet::permanent().map(SharedSet::definition);
            let missing = sets.filter(|set| !table.sets.contains_key(&set.name));
            group.extend(missing.map(|set| (family, Change::AddSet(set.clone()))));
            // Other chains lead to the chains of lists. Their rules follow when all their sets
            // exist.
            let lists = EndpointList::ALL.into_iter().map(|list| regular_chain(list.chain().into()));
            let missing = lists.filter(|chain| !table.chains.contains_key(&chain.name));
            group.extend(missing.map(|chain| (family, Change::AddChain(chain))));
            self.write_chains(family, table::chains(self.settings, family), &mut group);
            self.structure.push(group);
        }
        self.update.settings = Some(self.settings.clone());
    }

    /// Adds chains, and rewrites those that have other rules.
    fn write_chains(&self, family: IpFamily, chains: Vec<(Chain, Vec<Rule>)>, group: &mut Group) {
        let table = self.table(family);
        let mut all_rules = Vec::new();
        for (chain, rules) in chains {
            let rules = (chain.name.clone(), rules);
            if table.has(&rules) {
                continue;
            }
            let exists = table.chains.contains_key(&chain.name);
            let change = if exists { Change::FlushChain(chain.name) } else { Change::AddChain(chain) };
            group.push((family, change));
            all_rules.push(rules);
        }
        group.extend(additions_of_rules(family, all_rules));
    }

    /// Adds the set and the chain of a list, unless they exist.
    pub(super) fn ensure_list(&mut self, family: IpFamily, list: SizedList) {
        if self.table(family).lists.contains(&list) || !self.new_lists.insert((family, list)) {
            return;
        }
        let set = SharedSet::Sized(list).definition();
        let mut group = Group::new();
        if !self.table(family).sets.contains_key(&set.name) {
            group.push((family, Change::AddSet(set.clone())));
        }
        self.write_chains(family, vec![(regular_chain(list.chain()), list.rules())], &mut group);
        if !group.is_empty() {
            self.structure.push(group);
        }
        self.update.lists.push((family, list));
    }

    /// Writes the chains that lead to the chain of a list's size, for all sizes in use.
    pub(super) fn write_list_chains(&mut self) {
        for (family, list) in
            IpFamily::ALL.into_iter().flat_map(|family| EndpointList::ALL.map(move |list| (family, list)))
        {
            let new = self.new_lists.iter().filter(|(of, sized)| (*of, sized.list) == (family, list));
            let new: BTreeSet<SizedList> = new.map(|(_, sized)| *sized).collect();
            if new.is_empty() && self.update.settings.is_none() {
                continue;
            }
            let table = self.table(family);
            let existing = table.lists.iter().filter(|sized| sized.list == list).copied();
            let sizes: BTreeSet<SizedList> = new.into_iter().chain(existing).collect();
            let chain = (Name::from(list.chain()), list.rules(sizes.into_iter().map(|sized| sized.size)));
            if table.has(&chain) {
                continue;
            }
            let flush = table.chains.contains_key(&chain.0).then(|| Change::FlushChain(chain.0.clone()));
            let flush = flush.map(|change| (family, change));
            self.structure.push(flush.into_iter().chain(additions_of_rules(family, vec![chain])).collect());
        }
    }

    /// Writes the chains and sets of a service port as one group. A set with another specification
    /// is deleted and added again. Before that, the rules that use it are removed.
    pub(super) fn write_own(&mut self, key: &ServicePortKey, before: &PortObjects, after: PortObjects) {
        let family = key.family;
        if before.chains.is_empty() && after.chains.is_empty() {
            return;
        }
        // The key of an element that leads to the service port is exactly the destination.
        let is_leading =
            |(set, key): &(SharedSet, ElementKey)| set.destination(family, key) == Some(key.bytes());
        let leading_elements = before.keys().chain(after.keys()).filter(is_leading).collect();
        let names = after.chains.iter().map(|(name, _)| name.clone()).collect();
        let table = self.table(family);
        let mut group = Group::new();
        let is_different =
            |set: &Set| table.sets.get(&set.name).is_some_and(|spec| *spec != set.spec(family));
        let different: Vec<_> = after.sets.iter().filter(|set| is_different(set)).collect();
        let exists = |(name, _): &&ChainRules| table.chains.contains_key(name);
        if !different.is_empty() {
            let users = chains_of_sets(key, before, &after);
            let existing = users.into_iter().filter(|name| table.chains.contains_key(name));
            group.extend(existing.map(|name| (family, Change::FlushChain(name))));
        }
        group.extend(different.iter().map(|set| (family, Change::DeleteSet(set.name.clone()))));
        let is_added = |set: &&Set| is_different(set) || !table.sets.contains_key(&set.name);
        group.extend(after.sets.iter().filter(is_added).map(|set| (family, Change::AddSet(set.clone()))));
        if different.is_empty() {
            let chains = after.chains.into_iter().map(|(name, rules)| (regular_chain(name), rules)).collect();
            self.write_chains(family, chains, &mut group);
        } else {
            let missing = after.chains.iter().filter(|chain| !exists(chain));
            group.extend(missing.map(|(name, _)| (family, Change::AddChain(regular_chain(name.clone())))));
            group.extend(additions_of_rules(family, after.chains));
        }
        self.port_groups.push(PortGroup { family, group, leading_elements, chains: names });
    }

    /// Removes what nothing needs: objects of an earlier process or of kube-proxy.
    pub(in super::super) fn remove_unneeded(&mut self) {
        for family in IpFamily::ALL {
            let table = self.table(family);
            for ((set, key), element) in &table.elements {
                if element.references == 0 {
                    self.change(family, *set, *key);
                }
            }
            let needed: HashSet<Name> = self.needed_names(family);
            let unneeded = |name: &&Name| !needed.contains(*name);
            // If the rules of a chain are known, it is shared, or an unchanged service port may
            // need it.
            let unknown = table.chains.iter().filter(|(_, rules)| rules.is_none()).map(|(name, _)| name);
            let chains = unknown.filter(unneeded).map(|name| (family, name.clone()));
            self.unneeded_chains.extend(chains);
            let sets = table.sets.keys().filter(unneeded).map(|name| (family, name.clone()));
            self.unneeded_sets.extend(sets);
        }
        for unneeded in [&mut self.unneeded_chains, &mut self.unneeded_sets] {
            unneeded.sort_unstable();
            unneeded.dedup();
        }
    }

    fn needed_names(&self, family: IpFamily) -> HashSet<Name> {
        let shared = table::chains(self.settings, family).into_iter().map(|(chain, _)| chain.name);
        let lists = EndpointList::ALL.into_iter().map(|list| list.chain().into());
        let new = self.new_lists.iter().filter(|(of, _)| *of == family).map(|(_, sized)| *sized);
        let sized = new.chain(self.table(family).lists.iter().copied());
        let sized = sized.flat_map(|sized| [sized.chain(), SharedSet::Sized(sized).name()]);
        let planned: HashSet<&ServicePortKey> = self.update.ports.iter().map(|(key, _)| key).collect();
        let unchanged = self.state.ports.iter().filter(|(key, _)| !planned.contains(key));
        let changed = self.update.ports.iter().filter_map(|(key, port)| Some((key, port.as_ref()?)));
        let own = unchanged.chain(changed).filter(|(_, port)| service::has_chains(port));
        let own = own.filter(|(key, _)| key.family == family);
        let own = own.flat_map(|(key, port)| PortObjects::new(key, port, self.settings).into_names());
        let sets = SharedSet::permanent().map(SharedSet::name);
        shared.chain(lists).chain(sized).chain(own).chain(sets).collect()
    }
}

/// Returns the chains that may have rules with a set of the service port. One that is no longer
/// needed counts too, because it is deleted only at the end. The chains of an earlier process are
/// not in `before`.
fn chains_of_sets(key: &ServicePortKey, before: &PortObjects, after: &PortObjects) -> BTreeSet<Name> {
    let known = before.chains.iter().chain(&after.chains).map(|(name, _)| name.clone());
    known.chain(port_chains::selecting(&key.name)).collect()
}

fn additions_of_rules(family: IpFamily, chains: Vec<ChainRules>) -> impl Iterator<Item = (IpFamily, Change)> {
    chains.into_iter().flat_map(move |(chain, rules)| {
        rules.into_iter().map(move |rule| (family, Change::AddRule(chain.clone(), rule)))
    })
}

fn regular_chain(name: Name) -> Chain {
    Chain { name, hook: None }
}
