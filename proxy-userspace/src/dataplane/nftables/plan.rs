//! From a Snapshot to the transactions that make it true: pure.
//!
//! Changes come in groups that belong together, such as all that is known of one destination, and a transaction is some groups.
//! The first groups make what others need: sets and chains, the addresses that are masqueraded to. Then come the
//! destinations, each with its endpoints, so that a packet sees the old list or the new one. What nothing needs any more goes last.
//! However many of the transactions are made, what is served is served right.

use std::{collections::BTreeSet, fmt, sync::Arc};

use super::{
    draft::Draft,
    lists::Sized,
    service,
    sets::Base,
    state::State,
    table::{self, Basis},
};
use crate::{
    dataplane::PlanSize,
    kernel::nftables::{Change, ElementKey, Family},
    model::{Dirty, ResolvedPort, ServicePortKey, Snapshot},
};

/// Transactions, in the order in which they are made, and what is known once they are.
#[derive(Debug, Default)]
pub struct Plan {
    /// Each is made as a whole or not at all.
    pub transactions: Vec<Vec<(Family, Change)>>,
    pub(super) facts: Facts,
}

/// What is known once a plan is made.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) owned: Vec<(ServicePortKey, Option<Arc<ResolvedPort>>)>,
    pub(super) claims: Vec<(Family, Base, ElementKey, u32)>,
    pub(super) sizes: Vec<(Family, Sized)>,
    pub(super) node_port_ips: Option<BTreeSet<(Family, ElementKey)>>,
    pub(super) basis: Option<Basis>,
}

impl PlanSize for Plan {
    fn len(&self) -> usize {
        self.transactions.iter().map(Vec::len).sum()
    }
}

/// In the words of nft, a line a change; transactions are apart by an empty line.
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
    /// Learns what is known once a plan was made, but for these families.
    pub(super) fn learn(&mut self, facts: Facts, failed: &[Family]) {
        let is_made = |family: Family| !failed.contains(&family);
        for (key, owned) in facts.owned.into_iter().filter(|(key, _)| is_made(service::family(key.family))) {
            match owned {
                Some(owned) => drop(self.owned.insert(key, owned)),
                None => drop(self.owned.remove(&key)),
            }
        }
        for (family, base, key, claims) in facts.claims.into_iter().filter(|(family, ..)| is_made(*family)) {
            if let Some(held) = self.table_mut(family).elements.get_mut(&(base, key)) {
                held.claims = claims;
            }
        }
        for (family, sized) in facts.sizes.into_iter().filter(|(family, _)| is_made(*family)) {
            self.table_mut(family).sizes.insert(sized);
        }
        if let Some(mut addresses) = facts.node_port_ips {
            addresses.retain(|(family, _)| is_made(*family));
            let held = std::mem::take(&mut self.node_port_ips).into_iter();
            addresses.extend(held.filter(|(family, _)| !is_made(*family)));
            self.node_port_ips = addresses;
        }
        if let Some(basis) = facts.basis.filter(|_| failed.is_empty()) {
            self.basis = Some(basis);
        }
    }
}

/// How many changes a transaction has at most, if its groups allow it: few megabytes of messages.
pub(super) const MOST_IN_TRANSACTION: usize = 10_000;
/// The same where a table has to be made anew, which happens at once, so that there is always a whole one. More is more than the
/// socket takes, and 50,000 Services with four endpoints.
const MOST_AT_ONCE: usize = 400_000;

/// Plans what is dirty, in transactions of at most so many changes, unless one group has more.
pub(super) fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty, most: usize) -> Plan {
    let basis = Basis::new(state.masquerade, &snapshot.node);
    let is_other_basis = state.basis.as_ref() != Some(&basis);
    let mut draft = Draft::new(state, &basis);
    if is_other_basis {
        draft.write_base();
    }
    if dirty.all || dirty.node {
        draft.set_node_port_ips(snapshot);
    }
    for key in ports(state, snapshot, dirty, is_other_basis) {
        draft.set_port(&key, snapshot, is_other_basis);
    }
    if dirty.all {
        draft.remove_strays();
    }
    let is_foreign = state.tables.iter().any(|table| table.is_foreign);
    draft.finish(if is_foreign { MOST_AT_ONCE } else { most })
}

/// The service ports to look at; where rules depend on what has changed of the node, also those with rules of their own.
fn ports(
    state: &State,
    snapshot: &Snapshot,
    dirty: &Dirty,
    is_other_basis: bool,
) -> BTreeSet<ServicePortKey> {
    if dirty.all {
        return state.owned.keys().chain(snapshot.ports.keys()).cloned().collect();
    }
    let mut ports = dirty.ports.clone();
    // All that there is is not looked through for a change of one.
    if is_other_basis {
        let with_rules = state.owned.iter().filter(|(_, port)| service::has_rules(port));
        ports.extend(with_rules.map(|(key, _)| key.clone()));
    }
    ports
}
