//! What the kernel holds of this mode: the tables, and what was written for each service port.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    node::{Node, RuleOptions},
    rules::SHARED_CHAINS,
};
use crate::{
    dataplane::iptables_text::{Chain, Content, ROUTES_LOCALNET, Table, TableState},
    model::{IpFamily, ServicePortKey},
};

/// What was written for a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortState {
    /// Its own chains, in the table nat.
    pub(super) chains: Box<[Chain]>,
    /// Its rules in each of [`SHARED_CHAINS`].
    pub(super) shared: [Content; SHARED_CHAINS.len()],
    pub(super) endpoints: usize,
}

/// What the kernel holds in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FamilyState {
    /// The options with which the rules were written.
    pub(super) options: RuleOptions,
    pub(super) tables: BTreeMap<Table, TableState>,
    /// `route_localnet` is on: the kernel routes packets with loopback addresses from outside.
    pub(super) routes_localnet: bool,
    /// This mode set `route_localnet`, as [`ROUTES_LOCALNET`] records.
    pub(super) set_route_localnet: bool,
    /// The service ports that were written since the kernel was read.
    pub(super) ports: BTreeMap<ServicePortKey, PortState>,
    /// The number of endpoints of all service ports.
    pub(super) endpoints: usize,
    /// The node that all rules were written for; `None` until all have been written.
    pub(super) node: Option<Node>,
    /// The rules of endpoints have no comments.
    pub(super) is_large: bool,
    /// Service ports whose rules were rejected, with these rules. They are left out until they
    /// change.
    pub(super) left_out: BTreeMap<ServicePortKey, PortState>,
    /// Chains that cannot be removed, because rules of other programs lead to them.
    pub(super) undeletable: BTreeSet<Chain>,
    /// Chains that no rule leads to any more, and whose removal was deferred.
    pub(super) deferred: BTreeSet<Chain>,
}

impl FamilyState {
    /// The state right after the kernel was read.
    pub(super) fn observed(
        options: RuleOptions,
        tables: BTreeMap<Table, TableState>,
        routes_localnet: bool,
    ) -> Self {
        let mangle = tables.get(&Table::Mangle);
        let set_route_localnet = mangle.is_some_and(|mangle| mangle.chains.contains_key(&ROUTES_LOCALNET));
        Self { options, tables, routes_localnet, set_route_localnet, ..Self::default() }
    }

    /// Records what was written for a service port; `None` if it was removed.
    pub(super) fn record_port(&mut self, key: &ServicePortKey, port: Option<&PortState>) {
        let old = match port {
            Some(port) => self.ports.insert(key.clone(), port.clone()),
            None => self.ports.remove(key),
        };
        self.endpoints += port.map_or(0, |port| port.endpoints);
        self.endpoints -= old.map_or(0, |port| port.endpoints);
    }
}

/// What the kernel holds, by family. Families that the node does not have are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub(super) families: BTreeMap<IpFamily, FamilyState>,
}

impl State {
    /// Empty tables of both families.
    pub fn of_empty_tables(options: RuleOptions) -> Self {
        let tables = || Table::ALL.into_iter().map(|table| (table, TableState::default())).collect();
        let empty = |family| (family, FamilyState::observed(options, tables(), false));
        Self { families: IpFamily::ALL.into_iter().map(empty).collect() }
    }
}
