//! Plans the transactions that lead from the state to a Snapshot. Pure.
//!
//! The changes come in groups that belong together, for example everything about one destination. A
//! transaction has one or more groups. The first groups add what others need: sets, chains, and the
//! addresses to which traffic is masqueraded. The destinations follow, each with its endpoints, so
//! that a packet finds either the old or the new list. At last, unneeded objects are deleted. After
//! each transaction, all traffic that is served is served correctly.

use std::{collections::BTreeSet, fmt, sync::Arc};

use super::{
    builder::PlanBuilder,
    lists::SizedList,
    service,
    sets::SharedSet,
    state::State,
    table::{self, RuleSettings},
};
use crate::{
    dataplane::PlanSize,
    kernel::nftables::{Change, ElementKey},
    model::{Dirty, IpFamily, ResolvedPort, ServicePortKey, Snapshot},
};

/// The changes of one or more groups.
pub(super) type Group = Vec<(IpFamily, Change)>;

/// The transactions in order.
#[derive(Debug, Default)]
pub struct Plan {
    /// The kernel applies each transaction completely or not at all.
    pub transactions: Vec<Vec<(IpFamily, Change)>>,
    pub(super) update: StateUpdate,
}

/// The part of the state that does not follow from the changes of a plan.
#[derive(Debug, Default)]
pub(super) struct StateUpdate {
    pub(super) ports: Vec<(ServicePortKey, Option<Arc<ResolvedPort>>)>,
    pub(super) references: Vec<(IpFamily, SharedSet, ElementKey, u32)>,
    pub(super) lists: Vec<(IpFamily, SizedList)>,
    pub(super) node_port_ips: Option<BTreeSet<(IpFamily, ElementKey)>>,
    pub(super) settings: Option<RuleSettings>,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.transactions.iter().map(Vec::len).sum()
    }
}

/// Displays each change as an nft command on its own line. An empty line separates transactions.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, transaction) in self.transactions.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            for (family, change) in transaction {
                writeln!(f, "{}", change.display(*family, table::TABLE))?;
            }
        }
        Ok(())
    }
}

impl State {
    /// Applies the update of a plan, except for the families that failed.
    pub(super) fn update(&mut self, update: StateUpdate, failed: &[IpFamily]) {
        let is_applied = |family: IpFamily| !failed.contains(&family);
        for (key, port) in update.ports.into_iter().filter(|(key, _)| is_applied(key.family)) {
            match port {
                Some(port) => drop(self.ports.insert(key, port)),
                None => drop(self.ports.remove(&key)),
            }
        }
        let references = update.references.into_iter().filter(|(family, ..)| is_applied(*family));
        for (family, set, key, references) in references {
            if let Some(element) = self.table_mut(family).elements.get_mut(&(set, key)) {
                element.references = references;
            }
        }
        for (family, list) in update.lists.into_iter().filter(|(family, _)| is_applied(*family)) {
            self.table_mut(family).lists.insert(list);
        }
        if let Some(mut addresses) = update.node_port_ips {
            addresses.retain(|(family, _)| is_applied(*family));
            let old = std::mem::take(&mut self.node_port_ips).into_iter();
            addresses.extend(old.filter(|(family, _)| !is_applied(*family)));
            self.node_port_ips = addresses;
        }
        if let Some(settings) = update.settings.filter(|_| failed.is_empty()) {
            self.settings = Some(settings);
        }
    }
}

/// The maximum number of changes in a transaction, unless one group has more. The messages are a
/// few megabytes.
pub(super) const MAX_CHANGES: usize = 10_000;
/// The same for a plan that deletes a table and adds it again. This happens in one transaction, so
/// that there is always a complete table. The limit is the socket's buffer: 50,000 Services with
/// four endpoints.
const MAX_CHANGES_OF_REBUILD: usize = 400_000;

/// Plans the dirty service ports, with at most this number of changes in a transaction.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty, max_changes: usize) -> Plan {
    let settings = RuleSettings::new(state.masquerade_mark, &snapshot.node);
    let settings_changed = state.settings.as_ref() != Some(&settings);
    let is_rebuild = state.tables.iter().any(|table| table.is_foreign);
    // A table that is deleted has to be written as a whole.
    let everything = Dirty::everything();
    let dirty = if is_rebuild { &everything } else { dirty };
    let mut builder = PlanBuilder::new(state, &settings);
    if settings_changed {
        builder.write_tables();
    }
    if dirty.all || dirty.node {
        builder.set_node_port_ips(snapshot);
    }
    for key in ports(state, snapshot, dirty, settings_changed) {
        builder.set_port(&key, snapshot, settings_changed);
    }
    if dirty.all {
        builder.remove_unneeded();
    }
    builder.finish(if is_rebuild { MAX_CHANGES_OF_REBUILD } else { max_changes })
}

/// Returns the service ports to plan. If the settings of rules changed, includes those with chains
/// of their own.
fn ports(
    state: &State,
    snapshot: &Snapshot,
    dirty: &Dirty,
    settings_changed: bool,
) -> BTreeSet<ServicePortKey> {
    if dirty.all {
        return state.ports.keys().chain(snapshot.ports.keys()).cloned().collect();
    }
    let mut ports = dirty.ports.clone();
    // The condition avoids a search through all service ports for each change.
    if settings_changed {
        let with_chains = state.ports.iter().filter(|(_, port)| service::has_chains(port));
        ports.extend(with_chains.map(|(key, _)| key.clone()));
    }
    ports
}
