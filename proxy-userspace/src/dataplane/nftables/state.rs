//! A mirror of the tables in this process, and the service ports that need each element.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    lists::SizedList,
    port_chains::ChainRules,
    sets::SharedSet,
    table::{self, RuleSettings},
};
use crate::{
    kernel::nftables::{Chain, Change, ElementKey, ElementValue, Hook, Name, Rule, SetSpec, TableListing},
    model::{IpFamily, NodeView, ResolvedPort, ServicePortKey},
};

/// The contents of both tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The tables by family.
    pub(super) tables: [Table; 2],
    /// The service ports for which the tables were programmed.
    pub(super) ports: HashMap<ServicePortKey, Arc<ResolvedPort>>,
    /// The addresses that serve node ports in the tables.
    pub(super) node_port_ips: BTreeSet<(IpFamily, ElementKey)>,
    /// The settings of the rules in the tables. `None` if they are unknown.
    pub(super) settings: Option<RuleSettings>,
    /// The bit of a packet's mark that requests masquerading.
    pub(super) masquerade_mark: u32,
    /// A transaction failed, or another program changed a table. The mirror may be wrong.
    pub(super) is_uncertain: bool,
    /// The families whose table could not be read.
    pub(super) unread: Vec<IpFamily>,
}

/// The contents of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) exists: bool,
    /// A set of shunt exists with another specification, or a chain with another hook, or the
    /// kernel refuses changes of the table. It has to be deleted and added again.
    pub(super) is_foreign: bool,
    pub(super) elements: HashMap<(SharedSet, ElementKey), Element>,
    /// The chains, with their rules if these are known.
    pub(super) chains: HashMap<Name, Option<Vec<Rule>>>,
    pub(super) sets: HashMap<Name, SetSpec>,
    /// The lists that have their sets and chains.
    pub(super) lists: BTreeSet<SizedList>,
}

/// An element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) value: ElementValue,
    /// The number of service ports that need it. 0 if an earlier process left it.
    pub(super) references: u32,
}

impl State {
    pub(super) fn table(&self, family: IpFamily) -> &Table {
        &self.tables[family as usize]
    }

    pub(super) fn table_mut(&mut self, family: IpFamily) -> &mut Table {
        &mut self.tables[family as usize]
    }

    /// Records a change that the kernel applied.
    pub(super) fn record(&mut self, family: IpFamily, change: Change) {
        let table = self.table_mut(family);
        match change {
            Change::AddTable(_) => table.exists = true,
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
                if let Some(set) = SharedSet::from_name(&set.name) {
                    table.elements.insert((set, key), Element { value, references: 1 });
                }
            }
            Change::DeleteElement(set, key) => {
                if let Some(set) = SharedSet::from_name(&set.name) {
                    table.elements.remove(&(set, key));
                }
            }
        }
    }
}

impl Table {
    /// Returns a table as it is listed. Its rules are unknown, so that they are written again.
    pub(super) fn from_listing(family: IpFamily, listing: TableListing) -> Self {
        let is_different = |set: SharedSet| {
            let listed = listing.sets.get(&set.name());
            listed.is_some_and(|spec| *spec != set.definition().spec(family))
        };
        Self {
            exists: listing.exists,
            is_foreign: SharedSet::all().any(is_different) || has_other_hooks(family, &listing.chains),
            chains: listing.chains.into_iter().map(|chain| (chain.name, None)).collect(),
            sets: listing.sets.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Returns true if the chain exists with exactly these rules.
    pub(super) fn has(&self, (name, rules): &ChainRules) -> bool {
        self.chains.get(name).is_some_and(|known| known.as_ref() == Some(rules))
    }
}

/// Returns true if a chain that always exists has another hook, type or priority, as in kube-proxy
/// 1.33 and before: its filter chains of the same names run before DNAT. A chain keeps its hook as
/// long as it exists.
fn has_other_hooks(family: IpFamily, listed: &[Chain]) -> bool {
    // Neither names nor hooks depend on the settings.
    let settings = RuleSettings::new(0, &NodeView::default());
    let wanted = table::chains(&settings, family);
    let wanted: HashMap<&Name, Option<Hook>> =
        wanted.iter().map(|(chain, _)| (&chain.name, chain.hook)).collect();
    listed.iter().any(|chain| wanted.get(&chain.name).is_some_and(|hook| *hook != chain.hook))
}
