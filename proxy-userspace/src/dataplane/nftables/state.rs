//! What the tables hold, mirrored in this process, and which service port needs what of it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{lists::Sized, own::ChainRules, sets::Base, table::Basis};
use crate::{
    kernel::nftables::{Change, ElementKey, ElementValue, Family, Name, Rule, SetSpec, TableListing},
    model::{ResolvedPort, ServicePortKey},
};

/// What both tables hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// By family.
    pub(super) tables: [Table; 2],
    /// The service ports they were made for.
    pub(super) owned: HashMap<ServicePortKey, Arc<ResolvedPort>>,
    /// The addresses of node ports that are in them on behalf of the node.
    pub(super) node_port_ips: BTreeSet<(Family, ElementKey)>,
    /// What the rules were written for; none where that is not known.
    pub(super) basis: Option<Basis>,
    /// The bit of a packet's mark that has it masqueraded.
    pub(super) masquerade: u32,
    /// A transaction failed, or others changed something: what is here may not be true.
    pub(super) is_doubtful: bool,
    /// Families whose table could not be read.
    pub(super) unread: Vec<Family>,
}

/// What one table holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) is_there: bool,
    /// A set of ours is there in another shape, which only removing the table helps against.
    pub(super) is_foreign: bool,
    pub(super) elements: HashMap<(Base, ElementKey), Held>,
    /// With their rules, where those are known.
    pub(super) chains: HashMap<Name, Option<Vec<Rule>>>,
    pub(super) sets: HashMap<Name, SetSpec>,
    /// The lists whose sets and chains are known to be there.
    pub(super) sizes: BTreeSet<Sized>,
}

/// An element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) value: ElementValue,
    /// How many service ports need it; 0 where it was found there.
    pub(super) claims: u32,
}

impl State {
    pub(super) fn table(&self, family: Family) -> &Table {
        &self.tables[family as usize]
    }

    pub(super) fn table_mut(&mut self, family: Family) -> &mut Table {
        &mut self.tables[family as usize]
    }

    /// Records a change that was made.
    pub(super) fn record(&mut self, family: Family, change: Change) {
        let table = self.table_mut(family);
        match change {
            Change::AddTable(_) => table.is_there = true,
            Change::DeleteTable => *table = Table::default(),
            Change::AddChain(chain) => drop(table.chains.insert(chain.name, Some(Vec::new()))),
            Change::FlushChain(chain) => drop(table.chains.insert(chain, Some(Vec::new()))),
            Change::DeleteChain(chain) => drop(table.chains.remove(&chain)),
            Change::AddRule(chain, rule) => {
                if let Some(Some(rules)) = table.chains.get_mut(&chain) {
                    rules.push(rule);
                }
            }
            Change::AddSet(set) => drop(table.sets.insert(set.name.clone(), set.spec(family))),
            Change::DeleteSet(set) => drop(table.sets.remove(&set)),
            Change::AddElement(set, key, value) => {
                if let Some(base) = Base::of(&set.name) {
                    table.elements.insert((base, key), Held { value, claims: 1 });
                }
            }
            Change::DeleteElement(set, key) => {
                if let Some(base) = Base::of(&set.name) {
                    table.elements.remove(&(base, key));
                }
            }
        }
    }
}

impl Table {
    /// What was found: rules are not known, and so are written anew.
    pub(super) fn found(family: Family, found: TableListing) -> Self {
        let is_other =
            |base: &Base| found.sets.get(&base.name()).is_some_and(|shape| *shape != base.set().spec(family));
        Self {
            is_there: found.exists,
            is_foreign: Base::every().any(|base| is_other(&base)),
            elements: HashMap::new(),
            chains: found.chains.into_iter().map(|name| (name, None)).collect(),
            sets: found.sets.into_iter().collect(),
            sizes: BTreeSet::new(),
        }
    }

    /// Whether a chain is there with these rules and no others.
    pub(super) fn has(&self, (name, rules): &ChainRules) -> bool {
        self.chains.get(name).is_some_and(|there| there.as_ref() == Some(rules))
    }
}
