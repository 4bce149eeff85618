//! The nftables dataplane: Services as elements of few maps, changed by transactions over netlink.
//!
//! Table, base chains with their priorities, sets, maps, comments and marks are kube-proxy's, so that others can order
//! themselves around them and what people know how to read stays readable. Where a packet goes is another way:
//!
//! ```text
//! service-ips-4      10.96.4.10 . tcp . 80 comment "default/web"
//! endpoints          ip daddr . meta l4proto . th dport @service-ips-4 goto endpoints-4
//! endpoints-4        dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 4 map @service-endpoints
//! service-endpoints  10.96.4.10 . tcp . 80 . 2 : 10.244.1.11 . 8080
//! ```
//!
//! kube-proxy has a chain for each service port, and rewrites it for each change of an endpoint. Measured with generated rules on
//! kernel 6.18, nft 1.0.6: 30,000 such chains take 186 s to load, nearly all of it in the kernel, and a change of one 218 ms
//! of CPU (26 ms at 5,000). For each commit the kernel walks over all chains of the table; and whenever a rule or a verdict with a
//! jump is added, it checks for loops and walks over everything that can be reached, elements of verdict maps included
//! (`nft_table_validate`, and `nft_validate_state_update` for when). One verdict map of all Services in front of one chain for each
//! number of endpoints so cost 32 us, 0.35 ms and 2.7 ms for an endpoint more at 100, 5,000 and 30,000 Services.
//!
//! So nothing that a change adds is such a verdict. Plain sets tell how many endpoints a destination has, by powers of two: then there
//! are few, and an endpoint more is one element (`lists.rs`). A map from destinations to numbers, and a small verdict map from these to
//! chains, would be one look instead of some, but nft 1.0.6 neither takes a map in front of `vmap` nor compares what a map
//! with concatenated keys gives, so it could not read its own listing back. What has no endpoint is dropped, or goes on with the rule,
//! which refuses it: no jump either. A change costs 22 to 50 us.
//!
//! Only source ranges and affinity give a service port chains of its own, with kube-proxy's names (`own.rs`), and entries in its verdict
//! maps. Several source ranges are one rule each.
//!
//! State is learned once, and again after a transaction that failed or a change by others; the ruleset's notices tell, and those of
//! our own socket are filtered out. Nothing is listed otherwise ([`Dataplane::is_certain`]).

mod draft;
mod lists;
mod names;
mod own;
mod plan;
mod service;
mod sets;
mod state;
mod table;

#[cfg(test)]
mod tests;

use crate::{
    dataplane::{
        Dataplane, FamilyError, ModeMetricsReader,
        conntrack::StaleUdpCleaner,
        families::{self, FailureCounters},
    },
    kernel::{
        KernelError,
        nftables::{self, Change, Family},
        ruleset_changes::TableChangeFlag,
    },
    model::{Dirty, IpFamily, Snapshot},
};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

pub use self::table::TABLE;
pub use self::{plan::Plan, state::State};
use self::{
    sets::{Base, Destination},
    state::{Held, Table},
};

/// The number that IP has for UDP.
const UDP: u8 = 17;

/// What the nftables dataplane needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NftablesSettings {
    /// The bit of a packet's mark that has it masqueraded; one bit is set.
    pub masquerade: u32,
}

/// The dataplane: a socket.
#[derive(Debug)]
pub struct Nftables {
    socket: nftables::Nftables,
    masquerade: u32,
    touched: Arc<TableChangeFlag>,
    stale_udp: StaleUdpCleaner,
    has_observed: bool,
    /// Families whose table could not be read, and why; not told yet.
    unread: Vec<(Family, KernelError)>,
    failures: FailureCounters,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The kernel refused something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// One family's table alone is not as it should be; all of the other's is.
    #[error(transparent)]
    OfFamily(#[from] FamilyError<NftablesError>),
}

const fn model_family(family: Family) -> IpFamily {
    match family {
        Family::Ip => IpFamily::V4,
        Family::Ip6 => IpFamily::V6,
    }
}

impl Nftables {
    /// Opens a socket. Nothing is changed until the first plan is applied. `touched` is asked whether others changed the tables.
    pub fn new(settings: &NftablesSettings, touched: Arc<TableChangeFlag>) -> Result<Self, KernelError> {
        Ok(Self {
            socket: nftables::Nftables::open()?,
            masquerade: settings.masquerade,
            touched,
            stale_udp: StaleUdpCleaner::new(&[]),
            has_observed: false,
            unread: Vec::new(),
            failures: FailureCounters::default(),
        })
    }

    /// Who the kernel says made this dataplane's changes: what a follower of the ruleset's changes has to leave out.
    pub const fn port(&self) -> u32 {
        self.socket.port()
    }

    /// Where an earlier process led UDP flows, of Services that may be gone by now.
    fn suspect_udp(&mut self, tables: &[Table; 2]) {
        for (family, table) in Family::ALL.into_iter().zip(tables) {
            let unspecified = match family {
                Family::Ip => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                Family::Ip6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let found = table.elements.keys().filter_map(|(base, key)| Destination::read(*base, family, key));
            for Destination { address, port, .. } in found.filter(|destination| destination.protocol == UDP) {
                self.stale_udp.add_former_destination(SocketAddr::new(address.unwrap_or(unspecified), port));
            }
        }
    }

    fn read(&mut self, family: Family) -> Result<Table, KernelError> {
        let found = self.socket.list_table(family, TABLE)?;
        let mut table = Table::found(family, found);
        if table.is_foreign {
            return Ok(table);
        }
        for base in Base::every() {
            if table.sets.contains_key(&base.name()) {
                let elements = self.socket.list_elements(family, TABLE, &base.name())?;
                let held = elements.into_iter().map(|(key, value)| ((base, key), Held { value, claims: 0 }));
                table.elements.extend(held);
            }
        }
        Ok(table)
    }
}

impl Dataplane for Nftables {
    type State = State;
    type Plan = Plan;
    type Error = NftablesError;

    /// A table that cannot be read is left as it is, and told of by `apply`: the other goes on.
    fn observe(&mut self) -> Result<State, NftablesError> {
        // Before it is read: what is changed meanwhile is read again.
        self.touched.take();
        self.unread.clear();
        let tables = Family::ALL.map(|family| {
            self.read(family).unwrap_or_else(|error| {
                self.unread.push((family, error));
                Table::default()
            })
        });
        let unread: Vec<Family> = self.unread.iter().map(|(family, _)| *family).collect();
        if unread.len() == Family::ALL.len()
            && let Some((_, error)) = self.unread.pop()
        {
            return Err(error.into());
        }
        if !std::mem::replace(&mut self.has_observed, true) {
            self.suspect_udp(&tables);
        }
        let is_doubtful = !unread.is_empty();
        Ok(State { tables, masquerade: self.masquerade, is_doubtful, unread, ..State::default() })
    }

    fn is_certain(&mut self, state: &State) -> bool {
        !state.is_doubtful && !self.touched.is_set()
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty, plan::MOST_IN_TRANSACTION)
    }

    /// Goes on with the other family where one fails.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), NftablesError> {
        let mut errors = std::mem::take(&mut self.unread);
        let mut failed = state.unread.clone();
        for mut transaction in plan.transactions {
            transaction.retain(|(family, _)| !failed.contains(family));
            for (family, error) in self.make(state, transaction) {
                failed.push(family);
                errors.push((family, error));
            }
        }
        state.learn(plan.facts, &failed);
        let of_family = |(family, error): (_, KernelError)| (Some(model_family(family)), error.into());
        families::first_error(errors.into_iter().map(of_family).collect()).map_or(Ok(()), Err)
    }

    fn failed_family(error: &NftablesError) -> Option<IpFamily> {
        if let NftablesError::OfFamily(one) = error { Some(one.family) } else { None }
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        let (name, help) =
            ("sync_proxy_rules_nftables_sync_failures", "Cumulative proxy nftables sync failures");
        Some(self.failures.metrics(name, help))
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn cleanup(&mut self) -> Vec<NftablesError> {
        remove_tables(&mut self.socket).into_iter().map(NftablesError::from).collect()
    }
}

impl Nftables {
    /// Makes a transaction, of both families at once if that is possible; says which of them failed.
    fn make(&mut self, state: &mut State, transaction: Vec<(Family, Change)>) -> Vec<(Family, KernelError)> {
        let Some(&(first, _)) = transaction.first() else { return Vec::new() };
        let Err(error) = self.socket.commit(TABLE, &transaction) else {
            for (family, change) in transaction {
                state.record(family, change);
            }
            return Vec::new();
        };
        state.is_doubtful = true;
        if transaction.iter().all(|(family, _)| *family == first) {
            self.failures.count(model_family(first));
            return vec![(first, error)];
        }
        let (one, other): (Vec<_>, Vec<_>) =
            transaction.into_iter().partition(|(family, _)| *family == first);
        [one, other].into_iter().flat_map(|part| self.make(state, part)).collect()
    }

    /// Removes the tables that any process made, this one's or kube-proxy's.
    pub fn cleanup_tables() -> Vec<KernelError> {
        match nftables::Nftables::open() {
            Ok(mut socket) => remove_tables(&mut socket),
            Err(error) => vec![error],
        }
    }
}

fn remove_tables(socket: &mut nftables::Nftables) -> Vec<KernelError> {
    let mut errors = Vec::new();
    for family in Family::ALL {
        match socket.list_table(family, TABLE) {
            Ok(found) if found.exists => {
                errors.extend(socket.commit(TABLE, &[(family, Change::DeleteTable)]).err());
            }
            Ok(_) => {}
            Err(error) if is_without_nftables(&error) => {}
            Err(error) => errors.push(error),
        }
    }
    errors
}

/// A kernel without `nf_tables` has none of our tables.
fn is_without_nftables(error: &KernelError) -> bool {
    let KernelError::Call { source, .. } = error else { return false };
    matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT))
}
