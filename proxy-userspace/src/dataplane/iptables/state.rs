//! What the kernel holds of ours: which chains with which contents, which jumps, and what was written for each service port.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hasher as _},
};

use super::{
    input::TableInput,
    jumps::{JUMPS, Jump},
    names::{Chain, ROUTES_LOCALNET, Table},
    rules::SHARED,
    terms::{Node, Offer},
};
use crate::model::{IpFamily, ServicePortKey};

/// What a chain holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    /// Of its rules in the words of iptables-save, in order.
    digest: u64,
    /// How many there are.
    pub(super) rules: usize,
}

impl Content {
    /// The content of a chain with these rules.
    pub(super) fn of(lines: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(lines.as_bytes());
        Self { digest: hasher.finish(), rules: lines.lines().count() }
    }
}

/// What a table holds of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TableState {
    /// Chains, with what they hold.
    pub(super) chains: BTreeMap<Chain, Content>,
    /// Rules in all of them.
    pub(super) rules: usize,
    /// The jumps that are there.
    pub(super) jumps: BTreeSet<usize>,
}

impl TableState {
    /// A chain holds this from now on.
    pub(super) fn fill(&mut self, chain: Chain, content: Content) {
        self.remove(chain);
        self.chains.insert(chain, content);
        self.rules += content.rules;
    }

    /// A chain is gone.
    pub(super) fn remove(&mut self, chain: Chain) {
        if let Some(was) = self.chains.remove(&chain) {
            self.rules -= was.rules;
        }
    }

    /// What came of an input that was taken.
    pub(super) fn record(&mut self, input: &TableInput) {
        for (chain, lines) in &input.filled {
            self.fill(*chain, Content::of(lines));
        }
        input.removed.iter().for_each(|chain| self.remove(*chain));
        self.jumps.extend(&input.jumps);
    }

    /// Jumps of a table that are not there.
    pub(super) fn missing_jumps(&self, table: Table) -> Vec<usize> {
        let of_table = |(_, jump): &(usize, &Jump)| jump.table == table;
        let missing = JUMPS.iter().enumerate().filter(of_table).map(|(index, _)| index);
        missing.filter(|index| !self.jumps.contains(index)).collect()
    }
}

/// What was written for a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortState {
    /// Chains of its own, in the table nat.
    pub(super) chains: Box<[Chain]>,
    /// What it added to each of [`SHARED`].
    pub(super) shared: [Content; SHARED.len()],
    /// Its endpoints.
    pub(super) endpoints: usize,
}

/// What the kernel holds in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FamilyState {
    /// What iptables and the kernel offer.
    pub(super) offer: Offer,
    /// By table.
    pub(super) tables: BTreeMap<Table, TableState>,
    /// The kernel routes loopback addresses that come from elsewhere.
    pub(super) routes_localnet: bool,
    /// It was this mode that had it do so, which a chain tells.
    pub(super) set_route_localnet: bool,
    /// By service port; those that were written since the kernel was read.
    pub(super) ports: BTreeMap<ServicePortKey, PortState>,
    /// Endpoints of all of them.
    pub(super) endpoints: usize,
    /// The node that all rules were written for; none as long as not all were.
    pub(super) node: Option<Node>,
    /// Rules of endpoints went without comments.
    pub(super) is_large: bool,
    /// Service ports whose rules were refused, with what was refused; they are left out until they change.
    pub(super) left_out: BTreeMap<ServicePortKey, PortState>,
    /// Chains that cannot be removed, since rules of others lead to them.
    pub(super) held_by_others: BTreeSet<Chain>,
    /// Chains that nothing leads to any more, and whose removal was put off.
    pub(super) deferred: BTreeSet<Chain>,
}

impl FamilyState {
    /// What was read from the kernel.
    pub(super) fn observed(offer: Offer, tables: BTreeMap<Table, TableState>, routes_localnet: bool) -> Self {
        let mangle = tables.get(&Table::Mangle);
        let set_route_localnet = mangle.is_some_and(|mangle| mangle.chains.contains_key(&ROUTES_LOCALNET));
        Self {
            offer,
            tables,
            routes_localnet,
            set_route_localnet,
            ports: BTreeMap::new(),
            endpoints: 0,
            node: None,
            is_large: false,
            left_out: BTreeMap::new(),
            held_by_others: BTreeSet::new(),
            deferred: BTreeSet::new(),
        }
    }

    /// A table.
    pub(super) fn table(&self, table: Table) -> Option<&TableState> {
        self.tables.get(&table)
    }

    /// Notes what was written for a service port; none where it is gone.
    pub(super) fn record_port(&mut self, key: &ServicePortKey, port: Option<&PortState>) {
        let was = match port {
            Some(port) => self.ports.insert(key.clone(), port.clone()),
            None => self.ports.remove(key),
        };
        self.endpoints += port.map_or(0, |port| port.endpoints);
        self.endpoints -= was.map_or(0, |port| port.endpoints);
    }
}

/// What the kernel holds, by family; families that the node cannot have are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// By family.
    pub(super) families: BTreeMap<IpFamily, FamilyState>,
}

impl State {
    /// Empty tables of both families.
    pub fn of_empty_tables(offer: Offer) -> Self {
        let tables = || Table::ALL.into_iter().map(|table| (table, TableState::default())).collect();
        let empty = |family| (family, FamilyState::observed(offer, tables(), false));
        Self { families: IpFamily::ALL.into_iter().map(empty).collect() }
    }
}
