//! The nftables dataplane: Services are elements of a few maps, which netlink transactions change.
//!
//! The table, base chains with their priorities, sets, maps, comments and marks are kube-proxy's.
//! Other programs can order themselves around them, and people can read them. The path of a packet
//! is different:
//!
//! ```text
//! service-ips-4      10.96.4.10 . tcp . 80 comment "default/web"
//! endpoints          ip daddr . meta l4proto . th dport @service-ips-4 goto endpoints-4
//! endpoints-4        dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 4
//!                      map @service-endpoints
//! service-endpoints  10.96.4.10 . tcp . 80 . 2 : 10.244.1.11 . 8080
//! ```
//!
//! kube-proxy has a chain for each service port, and rewrites it for each change of an endpoint.
//! Measured with generated rules on kernel 6.18 and nft 1.0.6: 30,000 such chains take 186 s to
//! load, nearly all of it in the kernel, and the change of one takes 218 ms of CPU (26 ms at
//! 5,000). For each commit the kernel walks over all chains of the table. When a rule or a verdict
//! with a jump is added, the kernel also checks for loops: it walks over everything that can be
//! reached, including the elements of verdict maps (`nft_table_validate`;
//! `nft_validate_state_update` says when). With one verdict map of all Services, and one chain for
//! each number of endpoints, an additional endpoint cost 32 us, 0.35 ms and 2.7 ms at 100, 5,000
//! and 30,000 Services.
//!
//! A change therefore adds no such verdict. Plain sets have the number of a destination's
//! endpoints, rounded up to a power of two. There are few of them, and an additional endpoint is
//! one element (`lists.rs`). A map from destinations to numbers, followed by a small verdict map
//! from numbers to chains, would be one lookup instead of several. But nft 1.0.6 does not accept a
//! map in front of `vmap`, and does not compare the result of a map with concatenated keys, so that
//! it could not read its own listing. A destination without endpoints is dropped, or continues with
//! the rule, which refuses it: no jump either. A change costs 22 to 50 us.
//!
//! Only source ranges and affinity give a service port chains of its own, which have kube-proxy's
//! names (`port_chains.rs`), and entries in kube-proxy's verdict maps. Each source range is a rule.
//!
//! The state is read once, and again after a failed transaction or a change by another program. The
//! kernel notifies about changes; a filter removes those of shunt's own socket. Nothing else is
//! listed ([`Dataplane::is_certain`]).

mod builder;
mod drift;
mod leftovers;
mod lists;
mod names;
mod plan;
mod port_chains;
mod refusals;
mod service;
mod sets;
mod state;
mod table;

#[cfg(test)]
mod tests;

use std::{net::SocketAddr, sync::Arc};

pub use self::{drift::HeldTables, leftovers::LeftoverRemoval, plan::Plan, state::State, table::TABLE};
use self::{
    refusals::Refusals,
    sets::{Destination, SharedSet},
    state::{Element, Table},
};
use crate::{
    dataplane::{
        Dataplane, FailureScope, FamilyError, Held, HeldReader, ModeMetricsReader,
        conntrack::StaleUdpCleaner,
        families::{self, FailureCounters},
        sctp_ports,
    },
    kernel::{
        KernelError,
        nftables::{self, Change, Name},
        ruleset_changes::TableChangeFlag,
    },
    model::{Dirty, IpFamily, Protocol, ServicePortKey, ServicePortName, Snapshot},
};

/// The settings of the nftables dataplane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NftablesSettings {
    /// The bit of a packet's mark that requests masquerading. One bit is set.
    pub masquerade: u32,
}

/// The nftables dataplane.
#[derive(Debug)]
pub struct Nftables {
    socket: nftables::Nftables,
    masquerade_mark: u32,
    changed: Arc<TableChangeFlag>,
    stale_udp: StaleUdpCleaner,
    has_observed: bool,
    /// The families whose table could not be read. `apply` reports the errors.
    unread: Vec<(IpFamily, KernelError)>,
    failures: FailureCounters,
    refusals: Refusals,
}

/// An error of the nftables dataplane.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The kernel returned an error.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Only the table of one family failed.
    #[error(transparent)]
    OfFamily(#[from] FamilyError<NftablesError>),
}

impl Nftables {
    /// Opens a socket. `changed` says whether another program changed the tables.
    pub fn new(settings: &NftablesSettings, changed: Arc<TableChangeFlag>) -> Result<Self, KernelError> {
        Ok(Self {
            socket: nftables::Nftables::open()?,
            masquerade_mark: settings.masquerade,
            changed,
            stale_udp: StaleUdpCleaner::new(&[]),
            has_observed: false,
            unread: Vec::new(),
            failures: FailureCounters::default(),
            refusals: Refusals::default(),
        })
    }

    /// Returns the netlink port of this dataplane's changes. A reader of notifications leaves them
    /// out.
    pub const fn port(&self) -> u32 {
        self.socket.port
    }

    /// Passes the UDP destinations of an earlier process on to the cleaner, because their Services
    /// may be deleted.
    fn add_former_udp_destinations(&mut self, tables: &[Table; 2]) {
        for (family, table) in IpFamily::ALL.into_iter().zip(tables) {
            let keys = table.elements.keys();
            for destination in keys.filter_map(|(set, key)| Destination::read(*set, family, key)) {
                if destination.protocol == Protocol::Udp {
                    let address = destination.address.unwrap_or(family.unspecified());
                    let destination = SocketAddr::new(address, destination.port);
                    self.stale_udp.add_former_destination(destination);
                }
            }
        }
    }
}

/// Reads the table of a family, without rules.
fn read_table(socket: &mut nftables::Nftables, family: IpFamily) -> Result<Table, KernelError> {
    let mut table = Table::from_listing(family, socket.list_table(family, TABLE)?);
    for set in SharedSet::all() {
        if table.sets.get(&set.name()) == Some(&set.definition().spec(family)) {
            let elements = socket.list_elements(family, TABLE, &set.name())?.into_iter();
            let element = |(key, value)| ((set, key), Element { value, references: 0 });
            table.elements.extend(elements.map(element));
        }
    }
    Ok(table)
}

impl Dataplane for Nftables {
    type State = State;
    type Plan = Plan;
    type Error = NftablesError;

    /// If one table cannot be read, it is not changed, and `apply` returns the error. The other
    /// table is served.
    fn observe(&mut self) -> Result<State, NftablesError> {
        // The flag is cleared first: a change during the reading sets it again.
        self.changed.take();
        self.unread.clear();
        let tables = IpFamily::ALL.map(|family| self.read(family));
        let unread: Vec<IpFamily> = self.unread.iter().map(|(family, _)| *family).collect();
        if unread.len() == IpFamily::ALL.len()
            && let Some((_, error)) = self.unread.pop()
        {
            return Err(error.into());
        }
        if !std::mem::replace(&mut self.has_observed, true) {
            self.add_former_udp_destinations(&tables);
        }
        self.refusals.read();
        let is_uncertain = !unread.is_empty();
        let masquerade_mark = self.masquerade_mark;
        Ok(State { tables, masquerade_mark, is_uncertain, unread, ..State::default() })
    }

    fn is_certain(&mut self, state: &State) -> bool {
        !state.is_uncertain && !self.changed.is_set()
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty, plan::MAX_CHANGES)
    }

    /// If one family fails, continues with the other.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), NftablesError> {
        let mut errors = std::mem::take(&mut self.unread);
        let mut failed = state.unread.clone();
        for mut transaction in plan.transactions {
            transaction.retain(|(family, _)| !failed.contains(family));
            for (family, error) in self.commit(state, transaction) {
                failed.push(family);
                errors.push((family, error));
            }
        }
        let read = IpFamily::ALL.into_iter().filter(|family| !state.unread.contains(family));
        let error = |family| errors.iter().find(|(of, _)| *of == family).map(|(_, error)| error);
        self.refusals.applied(read.map(|family| (family, error(family))));
        state.update(plan.update, &failed);
        let errors = errors.into_iter().map(|(family, error)| (Some(family), error.into()));
        families::first_error(errors.collect()).map_or(Ok(()), Err)
    }

    fn lacks_sctp(&self) -> Option<&'static str> {
        sctp_ports::lacked_by_conntrack()
    }

    fn failure_scope(error: &NftablesError) -> FailureScope {
        match error {
            NftablesError::OfFamily(one) => FailureScope::Family(one.family),
            NftablesError::Kernel(_) => FailureScope::Everything,
        }
    }

    fn held_reader(&self) -> Option<HeldReader> {
        Some(Box::new(|| HeldTables::read().map(Held::Nftables)))
    }

    fn differences(state: &State, held: &Held, _: &Snapshot, of: Option<&ServicePortKey>) -> Vec<String> {
        let Held::Nftables(held) = held else { return Vec::new() };
        of.map_or_else(|| held.differences_of_node(state), |key| held.differences(state, key))
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
    /// Reads the table of a family. If the kernel refuses every change of it, it has to be deleted
    /// and added again.
    fn read(&mut self, family: IpFamily) -> Table {
        let mut table = read_table(&mut self.socket, family).unwrap_or_else(|error| {
            self.unread.push((family, error));
            Table::default()
        });
        if table.exists && self.refusals.needs_rebuild(family) {
            tracing::warn!(%family, "the kernel refuses changes of the table {TABLE}; writing it again");
            table.is_foreign = true;
        }
        table
    }

    /// Commits a transaction. If it fails and has changes of both families, commits each family
    /// separately. Returns the families that failed.
    fn commit(
        &mut self,
        state: &mut State,
        transaction: Vec<(IpFamily, Change)>,
    ) -> Vec<(IpFamily, KernelError)> {
        let Some(&(first, _)) = transaction.first() else { return Vec::new() };
        let Err(error) = self.socket.commit(TABLE, &transaction) else {
            for (family, change) in transaction {
                state.record(family, change);
            }
            return Vec::new();
        };
        state.is_uncertain = true;
        if transaction.iter().all(|(family, _)| *family == first) {
            self.failures.count(first);
            return vec![(first, error)];
        }
        let (one, other): (Vec<_>, Vec<_>) =
            transaction.into_iter().partition(|(family, _)| *family == first);
        [one, other].into_iter().flat_map(|part| self.commit(state, part)).collect()
    }

    /// Returns true if a table of any process exists, including kube-proxy's.
    pub fn has_tables() -> bool {
        let socket = nftables::Nftables::open();
        socket.is_ok_and(|mut socket| {
            let mut exists = |family| socket.list_table(family, TABLE).is_ok_and(|table| table.exists);
            IpFamily::ALL.into_iter().any(&mut exists)
        })
    }

    /// Removes the tables of all processes, including kube-proxy's.
    pub fn cleanup_tables() -> Vec<KernelError> {
        match nftables::Nftables::open() {
            Ok(mut socket) => remove_tables(&mut socket),
            Err(error) => vec![error],
        }
    }

    /// Removes what only shunt has from the tables of any process, and leaves what kube-proxy has.
    /// For the time after kube-proxy took the tables over.
    pub fn remove_leftovers() -> LeftoverRemoval {
        match nftables::Nftables::open() {
            Ok(mut socket) => leftovers::remove(&mut socket),
            Err(error) => LeftoverRemoval { errors: vec![error], ..LeftoverRemoval::default() },
        }
    }
}

/// Returns the name of the set of an endpoint's clients, if its service port has affinity.
pub(super) fn affinity_set(service: &ServicePortName, endpoint: SocketAddr) -> Name {
    names::name(names::AFFINITY, &names::of_endpoint(service, endpoint))
}

fn remove_tables(socket: &mut nftables::Nftables) -> Vec<KernelError> {
    let mut errors = Vec::new();
    for family in IpFamily::ALL {
        match socket.list_table(family, TABLE) {
            Ok(table) if table.exists => {
                errors.extend(socket.commit(TABLE, &[(family, Change::DeleteTable)]).err());
            }
            Ok(_) => {}
            Err(error) if is_without_nftables(&error) => {}
            Err(error) => errors.push(error),
        }
    }
    errors
}

/// Returns true if the kernel has no nf_tables, and therefore no tables.
fn is_without_nftables(error: &KernelError) -> bool {
    let KernelError::Call { source, .. } = error else { return false };
    matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT))
}
