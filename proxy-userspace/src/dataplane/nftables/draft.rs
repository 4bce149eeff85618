//! A plan in the making: what becomes of chains, sets and elements, settled and put into transactions once all is known.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use super::{
    own::ChainRules,
    plan::{Facts, Plan},
    service::{self, List, Wanted},
    shared::Shared,
    state::{Held, Owned, State, Table},
    table::{self, Base, Basis, COMMENT, Place},
};
use crate::{
    kernel::nftables::{Chain, Change, Data, Family, Key, Name, Rule, Set, Value},
    model::{ResolvedPort, ServicePortKey, Snapshot},
};

/// How many changes a transaction has at most, if its groups allow it: few megabytes of messages.
const MOST_IN_TRANSACTION: usize = 10_000;

/// What becomes of an element.
#[derive(Default)]
struct Touch {
    /// Service ports that need it now, less those that no longer do.
    claims: i64,
    value: Option<Value>,
}

type Group = Vec<(Family, Change)>;

/// A plan in the making.
pub(super) struct Draft<'a> {
    state: &'a State,
    basis: &'a Basis,
    /// Chains and sets.
    structure: Vec<Group>,
    /// By family and set, so that those of one destination are easily found together.
    touched: BTreeMap<(Family, Base, Key), Touch>,
    ensured: HashSet<(Family, Shared)>,
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
            touched: BTreeMap::new(),
            ensured: HashSet::new(),
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

    /// The tables with all that they have whatever the Services, and the chains that are shared.
    pub(super) fn write_base(&mut self) {
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
            self.write_chains(family, table::chains(self.basis, family), &mut group);
            self.structure.push(group);
            for shared in &table.shared {
                self.ensure(family, *shared);
            }
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

    fn ensure(&mut self, family: Family, shared: Shared) {
        if !self.ensured.insert((family, shared)) {
            return;
        }
        let chain = (plain(shared.name()), shared.rules(self.basis, family));
        let mut group = Group::new();
        self.write_chains(family, vec![chain], &mut group);
        if !group.is_empty() {
            self.structure.push(group);
        }
        self.facts.shared.push((family, shared));
    }

    pub(super) fn set_node_port_ips(&mut self, snapshot: &Snapshot) {
        let wanted: BTreeSet<(Family, Key)> =
            service::node_port_ips(snapshot.node.node_port_addresses.iter().copied()).into_iter().collect();
        if wanted == self.state.node_port_ips {
            return;
        }
        for (family, key) in wanted.difference(&self.state.node_port_ips) {
            self.claim(*family, Base::NodePortIps, *key, Value::Member);
        }
        for (family, key) in self.state.node_port_ips.difference(&wanted) {
            self.release(*family, Base::NodePortIps, *key);
        }
        self.facts.node_port_ips = Some(wanted);
    }

    fn claim(&mut self, family: Family, base: Base, key: Key, value: Value) {
        let touch = self.touched.entry((family, base, key)).or_default();
        touch.claims += 1;
        touch.value = Some(value);
    }

    fn release(&mut self, family: Family, base: Base, key: Key) {
        self.touched.entry((family, base, key)).or_default().claims -= 1;
    }

    /// Gives a service port what it needs now, and takes from it what it does not need any more.
    pub(super) fn set_port(&mut self, key: &ServicePortKey, snapshot: &Snapshot, is_other_basis: bool) {
        let family = service::family(key.family);
        let before = self.state.owned.get(key);
        let port = snapshot.ports.get(key);
        let has_rules = before.is_some_and(|owned| !owned.chains.is_empty());
        if before.map(|owned| &owned.port) == port && !(is_other_basis && has_rules) {
            return;
        }
        let wanted = port.map_or_else(Wanted::default, |port| service::wanted(key, port, self.basis));
        for (base, element) in before.iter().flat_map(|owned| &owned.elements) {
            self.release(family, *base, *element);
        }
        let owned = port.map(|port| self.give(family, Arc::clone(port), wanted));
        self.let_go(family, before, owned.as_ref());
        if before.is_some() || owned.is_some() {
            self.facts.owned.push((key.clone(), owned));
        }
    }

    fn give(&mut self, family: Family, port: Arc<ResolvedPort>, wanted: Wanted) -> Owned {
        for shared in &wanted.shared {
            self.ensure(family, *shared);
        }
        let chains = wanted.chains.iter().map(|(name, _)| name.clone()).collect();
        let sets = wanted.sets.iter().map(|set| set.name.clone()).collect();
        let mut elements = Vec::new();
        for (base, key, value) in wanted.elements.iter().cloned() {
            elements.push((base, key));
            self.claim(family, base, key, value);
        }
        for list in &wanted.lists {
            for (key, value) in self.fill(family, list) {
                elements.push((list.map, key));
                self.claim(family, list.map, key, value);
            }
        }
        self.write_own(family, wanted);
        elements.shrink_to_fit();
        Owned { port, elements, chains, sets }
    }

    /// Numbers for endpoints: those that have one keep it, as far as it is small enough, and the others get what is left.
    fn fill(&self, family: Family, list: &List) -> Vec<(Key, Value)> {
        let table = self.table(family);
        let count = u32::try_from(list.endpoints.len()).unwrap_or(u32::MAX);
        let mut left: BTreeSet<_> = list.endpoints.iter().copied().collect();
        let kept: Vec<_> = (0..count)
            .map(|number| {
                let key = list.destination.slot(number);
                let held = table.elements.get(&(list.map, key)).map(|held| &held.value);
                let endpoint = match held {
                    Some(Value::Data(data)) => data.to_endpoint().filter(|endpoint| left.remove(endpoint)),
                    _ => None,
                };
                (key, endpoint)
            })
            .collect();
        let mut left = left.into_iter();
        let endpoints = kept.into_iter().filter_map(|(key, kept)| Some((key, kept.or_else(|| left.next())?)));
        endpoints.map(|(key, endpoint)| (key, Value::Data(Data::endpoint(endpoint)))).collect()
    }

    /// Chains and sets of a service port's own, as one group: rules first leave sets alone that have to be made anew.
    fn write_own(&mut self, family: Family, wanted: Wanted) {
        let table = self.table(family);
        let mut group = Group::new();
        let is_other = |set: &Set| table.sets.get(&set.name).is_some_and(|shape| *shape != set.shape(family));
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
        if !group.is_empty() {
            self.structure.push(group);
        }
    }

    /// What a service port had to itself and has no longer.
    fn let_go(&mut self, family: Family, before: Option<&Owned>, after: Option<&Owned>) {
        let Some(before) = before else { return };
        let is_kept = |kept: Option<&Vec<Name>>, name: &Name| kept.is_some_and(|kept| kept.contains(name));
        let chains = before.chains.iter().filter(|name| !is_kept(after.map(|owned| &owned.chains), name));
        self.unneeded.extend(chains.map(|name| (family, name.clone())));
        let sets = before.sets.iter().filter(|name| !is_kept(after.map(|owned| &owned.sets), name));
        self.unneeded_sets.extend(sets.map(|name| (family, name.clone())));
    }

    /// What was found in the tables and nothing needs: of an earlier process, or kube-proxy's.
    pub(super) fn remove_strays(&mut self) {
        for family in Family::ALL {
            let table = self.table(family);
            for ((base, key), held) in &table.elements {
                if held.claims == 0 {
                    self.touched.entry((family, *base, *key)).or_default();
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
        let shared = self.ensured.iter().filter(|(of, _)| *of == family).map(|(_, shared)| shared.name());
        let planned: HashSet<&ServicePortKey> = self.facts.owned.iter().map(|(key, _)| key).collect();
        let unchanged = self.state.owned.iter().filter(|(key, _)| !planned.contains(key));
        let changed = self.facts.owned.iter().filter_map(|(key, owned)| Some((key, owned.as_ref()?)));
        let own = unchanged.chain(changed).filter(|(key, _)| service::family(key.family) == family);
        let own = own.flat_map(|(_, owned)| owned.chains.iter().chain(&owned.sets)).cloned();
        let sets = Base::ALL.map(Base::name);
        base.chain(shared).chain(own).chain(sets).collect()
    }

    pub(super) fn finish(mut self) -> Plan {
        let mut transactions = Packing::default();
        for group in std::mem::take(&mut self.structure) {
            transactions.add(group);
        }
        // By destination, in the order of its sets; none is for what no destination has to itself.
        let mut changes: Vec<(Family, Option<Place>, Change)> = Vec::new();
        for ((family, base, key), touch) in std::mem::take(&mut self.touched) {
            let place = base.place(family, &key);
            changes.extend(
                self.settle(family, base, key, touch).into_iter().flatten().map(|c| (family, place, c)),
            );
        }
        changes.sort_by_key(|(family, place, _)| (*family, *place));
        let is_removal = |change: &Change| matches!(change, Change::DeleteElement(..));
        let (shared, destinations): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|(_, place, _)| place.is_none());
        let (removed, added): (Vec<_>, Vec<_>) =
            shared.into_iter().partition(|(.., change)| is_removal(change));
        for (family, _, change) in added {
            transactions.add(vec![(family, change)]);
        }
        let mut destinations = destinations.into_iter().peekable();
        while let Some((family, place, change)) = destinations.next() {
            let mut group = vec![(family, change)];
            while let Some((.., change)) = destinations.next_if(|next| (next.0, next.1) == (family, place)) {
                group.push((family, change));
            }
            transactions.add(group);
        }
        for (family, _, change) in removed {
            transactions.add(vec![(family, change)]);
        }
        for (family, chain) in &self.unneeded {
            transactions.add(vec![(*family, Change::FlushChain(chain.clone()))]);
        }
        for (family, chain) in self.unneeded {
            transactions.add(vec![(family, Change::DeleteChain(chain))]);
        }
        for (family, set) in self.unneeded_sets {
            transactions.add(vec![(family, Change::DeleteSet(set))]);
        }
        Plan { transactions: transactions.0, facts: self.facts }
    }

    /// The changes that an element takes, if any.
    fn settle(&mut self, family: Family, base: Base, key: Key, touch: Touch) -> [Option<Change>; 2] {
        let held = self.table(family).elements.get(&(base, key));
        let claims = i64::from(held.map_or(0, |held| held.claims)) + touch.claims;
        let claims = u32::try_from(claims).unwrap_or(0);
        let set = base.set();
        let removal = Change::DeleteElement(set, key);
        let changes = match (held, touch.value) {
            (Some(_), _) if claims == 0 => return [Some(removal), None],
            (Some(Held { value: there, .. }), Some(value)) if *there != value => {
                [Some(removal), Some(Change::AddElement(set, key, value))]
            }
            (None, Some(value)) if claims > 0 => [None, Some(Change::AddElement(set, key, value))],
            _ => [None, None],
        };
        let is_added = changes[1].is_some();
        let recorded = if is_added { 1 } else { held.map_or(0, |held| held.claims) };
        if claims != recorded {
            self.facts.claims.push((family, base, key, claims));
        }
        changes
    }
}

fn plain(name: Name) -> Chain {
    Chain { name, hook: None, comment: "" }
}

/// Groups become transactions.
#[derive(Default)]
struct Packing(Vec<Group>);

impl Packing {
    fn add(&mut self, group: Group) {
        match self.0.last_mut() {
            _ if group.is_empty() => {}
            Some(last) if last.len() + group.len() <= MOST_IN_TRANSACTION => last.extend(group),
            _ => self.0.push(group),
        }
    }
}
