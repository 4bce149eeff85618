//! Chains and sets: those that all Services share, and those that one has to itself.

use std::collections::{BTreeSet, HashSet};

use super::{Draft, Group};
use crate::{
    dataplane::nftables::{
        lists::{List, Sized},
        own::ChainRules,
        service::{self, Wanted},
        sets::Base,
        table::{self, COMMENT},
    },
    kernel::nftables::{Chain, Change, ElementKey, Family, Name, Rule, Set},
    model::ServicePortKey,
};

/// A service port with chains of its own: they and its destinations change at once, as far as those are nobody else's.
pub(super) struct Whole {
    pub(super) family: Family,
    /// Its chains and sets.
    pub(super) group: Group,
    /// Where traffic to it is led, or was.
    pub(super) leads: BTreeSet<(Base, ElementKey)>,
    /// The chains that it has now.
    pub(super) chains: Vec<Name>,
}

impl Draft<'_> {
    /// The tables with all that they have whatever the Services, and the chains that are shared.
    pub(in super::super) fn write_base(&mut self) {
        for family in Family::ALL {
            let mut group = Group::new();
            if self.state.table(family).is_foreign {
                group.push((family, Change::DeleteTable));
            }
            let table = self.table(family);
            if !table.is_there {
                group.push((family, Change::AddTable(COMMENT)));
            }
            let missing = Base::ALL.into_iter().filter(|base| !table.sets.contains_key(&base.name()));
            group.extend(missing.map(|base| (family, Change::AddSet(base.set().clone()))));
            // Others lead to them; their rules come once there is all that these lead to.
            let lists = List::ALL.into_iter().map(|list| plain(list.chain().into()));
            let missing = lists.filter(|chain| !table.chains.contains_key(&chain.name));
            group.extend(missing.map(|chain| (family, Change::AddChain(chain))));
            self.write_chains(family, table::chains(self.basis, family), &mut group);
            self.structure.push(group);
        }
        self.facts.basis = Some(self.basis.clone());
    }

    /// Makes chains, or writes those anew that have other rules.
    fn write_chains(&self, family: Family, chains: Vec<(Chain, Vec<Rule>)>, group: &mut Group) {
        let table = self.table(family);
        let mut rules = Vec::new();
        for (chain, wanted) in chains {
            let (head, chain): (_, ChainRules) = (chain.clone(), (chain.name, wanted));
            if table.has(&chain) {
                continue;
            }
            if table.chains.contains_key(&chain.0) {
                group.push((family, Change::FlushChain(chain.0.clone())));
            } else {
                group.push((family, Change::AddChain(head)));
            }
            rules.push(chain);
        }
        for (chain, wanted) in rules {
            group.extend(wanted.into_iter().map(|rule| (family, Change::AddRule(chain.clone(), rule))));
        }
    }

    /// What a list of this size needs.
    pub(super) fn ensure(&mut self, family: Family, sized: Sized) {
        if self.table(family).sizes.contains(&sized) || !self.ensured.insert((family, sized)) {
            return;
        }
        let set = Base::Sized(sized);
        let is_there = self.table(family).sets.contains_key(&set.name());
        let mut group = Group::new();
        group.extend((!is_there).then(|| (family, Change::AddSet(set.set().clone()))));
        self.write_chains(family, vec![(plain(sized.chain()), sized.rules())], &mut group);
        if !group.is_empty() {
            self.structure.push(group);
        }
        self.facts.sizes.push((family, sized));
    }

    /// The chains that tell sizes apart: all that are in use.
    pub(super) fn write_lists(&mut self) {
        for family in Family::ALL {
            for list in List::ALL {
                let is_new = |sized: &Sized| (family, sized.list) == (family, list);
                let new = self.ensured.iter().filter(|(of, sized)| *of == family && is_new(sized));
                let new: BTreeSet<Sized> = new.map(|(_, sized)| *sized).collect();
                if new.is_empty() && self.facts.basis.is_none() {
                    continue;
                }
                let table = self.table(family);
                let known = table.sizes.iter().filter(|sized| sized.list == list).copied();
                let sizes: BTreeSet<Sized> = new.into_iter().chain(known).collect();
                let chain = (Name::from(list.chain()), list.rules(sizes.into_iter().map(|sized| sized.size)));
                if table.has(&chain) {
                    continue;
                }
                let (name, rules) = chain;
                let is_there = table.chains.contains_key(&name);
                let flush = is_there.then(|| (family, Change::FlushChain(name.clone())));
                let rules = rules.into_iter().map(|rule| (family, Change::AddRule(name.clone(), rule)));
                self.structure.push(flush.into_iter().chain(rules).collect());
            }
        }
    }

    /// Chains and sets of a service port's own, as one group: rules first leave sets alone that have to be made anew.
    pub(super) fn write_own(&mut self, family: Family, before: &Wanted, wanted: Wanted) {
        if before.chains.is_empty() && wanted.chains.is_empty() {
            return;
        }
        // What the key of an element is, and no more than that, is a destination.
        let is_lead = |(base, key): &(Base, ElementKey)| base.destination(family, key) == Some(key.bytes());
        let leads = before.keys().chain(wanted.keys()).filter(is_lead);
        let leads = leads.collect();
        let chains = wanted.chains.iter().map(|(name, _)| name.clone()).collect();
        let table = self.table(family);
        let mut group = Group::new();
        let is_other = |set: &Set| table.sets.get(&set.name).is_some_and(|shape| *shape != set.spec(family));
        let remade: Vec<_> = wanted.sets.iter().filter(|set| is_other(set)).collect();
        if !remade.is_empty() {
            let known = wanted.chains.iter().filter(|(name, _)| table.chains.contains_key(name));
            group.extend(known.map(|(name, _)| (family, Change::FlushChain(name.clone()))));
        }
        group.extend(remade.iter().map(|set| (family, Change::DeleteSet(set.name.clone()))));
        let is_made = |set: &&Set| is_other(set) || !table.sets.contains_key(&set.name);
        group.extend(wanted.sets.iter().filter(is_made).map(|set| (family, Change::AddSet(set.clone()))));
        if remade.is_empty() {
            let chains = wanted.chains.into_iter().map(|(name, rules)| (plain(name), rules)).collect();
            self.write_chains(family, chains, &mut group);
        } else {
            let missing = wanted.chains.iter().filter(|(name, _)| !table.chains.contains_key(name));
            group.extend(missing.map(|(name, _)| (family, Change::AddChain(plain(name.clone())))));
            let rules = wanted.chains.into_iter();
            let rules =
                rules.flat_map(|(name, rules)| rules.into_iter().map(move |rule| (name.clone(), rule)));
            group.extend(rules.map(|(name, rule)| (family, Change::AddRule(name, rule))));
        }
        self.wholes.push(Whole { family, group, leads, chains });
    }

    /// What was found in the tables and nothing needs: of an earlier process, or kube-proxy's.
    pub(in super::super) fn remove_strays(&mut self) {
        for family in Family::ALL {
            let table = self.table(family);
            for ((base, key), held) in &table.elements {
                if held.claims == 0 {
                    self.touch(family, *base, *key);
                }
            }
            let needed: HashSet<Name> = self.needed_names(family);
            let strays = |names: Vec<&Name>| {
                let mut strays: Vec<_> =
                    names.into_iter().filter(|name| !needed.contains(*name)).cloned().collect();
                strays.sort_unstable();
                strays.into_iter().map(move |name| (family, name))
            };
            // A chain whose rules are known is one that an unchanged service port may need, or a shared one.
            let unknown = table.chains.iter().filter(|(_, rules)| rules.is_none()).map(|(name, _)| name);
            self.unneeded.extend(strays(unknown.collect()));
            self.unneeded_sets.extend(strays(table.sets.keys().collect()));
        }
        self.unneeded.sort_unstable();
        self.unneeded.dedup();
        self.unneeded_sets.sort_unstable();
        self.unneeded_sets.dedup();
    }

    fn needed_names(&self, family: Family) -> HashSet<Name> {
        let base = table::chains(self.basis, family).into_iter().map(|(chain, _)| chain.name);
        let lists = List::ALL.into_iter().map(|list| list.chain().into());
        let new = self.ensured.iter().filter(|(of, _)| *of == family).map(|(_, sized)| *sized);
        let sizes = new.chain(self.table(family).sizes.iter().copied());
        let sizes = sizes.flat_map(|sized| [sized.chain(), Base::Sized(sized).name()]);
        let planned: HashSet<&ServicePortKey> = self.facts.owned.iter().map(|(key, _)| key).collect();
        let unchanged = self.state.owned.iter().filter(|(key, _)| !planned.contains(key));
        let changed = self.facts.owned.iter().filter_map(|(key, port)| Some((key, port.as_ref()?)));
        let own = unchanged.chain(changed).filter(|(_, port)| service::has_rules(port));
        let own = own.filter(|(key, _)| service::family(key.family) == family);
        let own = own.flat_map(|(key, port)| service::wanted(key, port, self.basis).into_names());
        let sets = Base::ALL.map(Base::name);
        base.chain(lists).chain(sizes).chain(own).chain(sets).collect()
    }
}

fn plain(name: Name) -> Chain {
    Chain { name, hook: None, comment: "" }
}
