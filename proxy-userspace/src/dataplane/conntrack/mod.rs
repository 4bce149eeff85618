//! Deletes stale entries from conntrack, for the modes that translate in netfilter.
//!
//! Rules decide about the first packet of a flow. Conntrack repeats the decision for all further
//! packets. A UDP sender that never pauses keeps its entry forever, so entries that no rule would
//! create any more are deleted: entries to removed endpoints, including the last one; entries to
//! the VIP itself, from before its first endpoint; and entries of deleted Services. TCP connections
//! end with their endpoint and are not touched, with one exception: after rules were missing,
//! attempts to connect to a VIP that passed untranslated ([`attempts`]). Upstream:
//! `CleanStaleEntries` (`pkg/proxy/conntrack/cleanup.go`), which in 1.36 leaves the entries of
//! Services without endpoints and of deleted Services.
//!
//! An entry of a Service that was deleted while no proxy was running looks like another program's
//! translation. It stays, unless the dataplane found the VIP in the rules of its predecessor
//! ([`StaleUdpCleaner::add_former_destination`]).

mod attempts;
mod candidates;
mod thread;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use self::{
    attempts::ServedTcp,
    candidates::{Candidates, ServedPorts},
    thread::CleanerThread,
};
pub use crate::kernel::conntrack::{DeletionCounts, UdpFilter, UdpFlow};
use crate::{
    kernel::{KernelError, conntrack},
    model::{Dirty, IpFamily, Snapshot},
};

/// A table of entries: the kernel's, or a test's.
pub trait UdpTable: Send + fmt::Debug {
    /// Deletes the UDP entries that the filter and `is_stale` select.
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError>;

    /// Deletes the untranslated TCP entries of a family without an answer that `is_stale` selects
    /// by their original destination.
    fn delete_tcp_attempts(
        &mut self,
        family: IpFamily,
        is_stale: &mut dyn FnMut(SocketAddr) -> bool,
    ) -> Result<DeletionCounts, KernelError>;
}

/// The conntrack table of the calling thread's network namespace.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelTable;

impl UdpTable for KernelTable {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        conntrack::delete_udp(filter, is_stale)
    }

    fn delete_tcp_attempts(
        &mut self,
        family: IpFamily,
        is_stale: &mut dyn FnMut(SocketAddr) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        conntrack::delete_tcp_attempts(family, is_stale)
    }
}

/// The result of one walk over the entries of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleUdpDeletion {
    /// The family.
    pub family: IpFamily,
    /// The numbers of examined and deleted entries.
    pub flows: DeletionCounts,
    /// The duration of the walk.
    pub took: Duration,
}

/// Finds stale UDP entries from the changes since the last call, and deletes them.
#[derive(Debug)]
pub struct StaleUdpCleaner(Worker);

#[derive(Debug)]
enum Worker {
    /// Cleans on a thread, so that a walk over a large table does not delay the next sync.
    Thread(CleanerThread),
    /// Cleans in the call. For tables of tests.
    Inline(Cleaner),
}

impl StaleUdpCleaner {
    /// Returns a cleaner for this process's network namespace. `loopback` has the families in which
    /// the rules serve node ports on loopback addresses.
    pub fn new(loopback: &[IpFamily]) -> Self {
        Self(Worker::Thread(CleanerThread::new(Cleaner::new(KernelTable, loopback))))
    }

    /// Returns a cleaner for another table.
    pub fn with_table(table: impl UdpTable + 'static, loopback: &[IpFamily]) -> Self {
        Self(Worker::Inline(Cleaner::new(table, loopback)))
    }

    /// Makes the next call check the entries of all Services, and TCP attempts to connect to them.
    /// For use after rules were missing, when packets passed untranslated.
    pub fn recheck_all(&mut self, snapshot: &Snapshot) {
        let served = ServedTcp::new(snapshot);
        match &mut self.0 {
            Worker::Thread(thread) => thread.recheck = Some(served),
            Worker::Inline(cleaner) => cleaner.recheck_all(served),
        }
    }

    /// Adds a UDP destination that the rules of an earlier process served. If no Service has it at
    /// the next call, all its translated entries are stale. That call checks all Services. A node
    /// port has the unspecified address of its family.
    pub fn add_former_destination(&mut self, destination: SocketAddr) {
        match &mut self.0 {
            Worker::Thread(thread) => thread.former_destinations.push(destination),
            Worker::Inline(cleaner) => cleaner.add_former_destination(destination),
        }
    }

    /// Deletes the entries that became stale, and returns the results of the walks that have ended.
    /// On a thread, these can be walks of earlier calls.
    ///
    /// The rules for `dirty` must be in the kernel already: otherwise, the next packet would create
    /// a deleted entry again. Reads nothing from the kernel unless a UDP service port changed in a
    /// relevant way. The first call checks all service ports. After an error, the next call with
    /// UDP changes or with `dirty.all` tries again.
    pub fn delete_stale(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, KernelError> {
        match &mut self.0 {
            Worker::Thread(thread) => thread.delete_stale(snapshot, dirty),
            Worker::Inline(cleaner) => cleaner.delete_stale(snapshot, dirty),
        }
    }
}

#[derive(Debug)]
struct Cleaner {
    table: Box<dyn UdpTable>,
    served: ServedPorts,
    pending: PendingCheck,
}

/// The service ports that still have to be checked.
#[derive(Debug, Default)]
struct PendingCheck {
    /// All service ports, changed or not.
    all: bool,
    /// Attempts to connect to these destinations.
    attempts: Option<ServedTcp>,
    /// The changes since the last success.
    dirty: Dirty,
}

impl Cleaner {
    fn new(table: impl UdpTable + 'static, loopback: &[IpFamily]) -> Self {
        Self {
            table: Box::new(table),
            served: ServedPorts::new(loopback),
            pending: PendingCheck { all: true, ..PendingCheck::default() },
        }
    }

    fn add_former_destination(&mut self, destination: SocketAddr) {
        self.served.former_destinations.insert(destination);
        self.pending.all = true;
    }

    fn recheck_all(&mut self, served: ServedTcp) {
        self.pending.all = true;
        self.pending.attempts = Some(served);
    }

    fn delete_stale(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, KernelError> {
        if !self.pending.all && !concerns_udp(dirty) {
            return Ok(Vec::new());
        }
        self.pending.add(dirty);
        let candidates = self.served.candidates(snapshot, &self.pending.dirty, self.pending.all);
        let mut deletions = delete(&mut *self.table, &candidates)?;
        if let Some(served) = &self.pending.attempts {
            deletions.extend(delete_attempts(&mut *self.table, served)?);
        }
        drop(candidates);
        self.served.update(snapshot, &self.pending.dirty, self.pending.all);
        self.pending = PendingCheck::default();
        Ok(deletions)
    }
}

impl PendingCheck {
    fn add(&mut self, dirty: &Dirty) {
        self.dirty.all |= dirty.all;
        self.dirty.node |= dirty.node;
        self.dirty.ports.extend(dirty.ports.iter().filter(|key| candidates::is_udp(key)).cloned());
    }
}

fn concerns_udp(dirty: &Dirty) -> bool {
    dirty.all || dirty.node || dirty.ports.iter().any(candidates::is_udp)
}

/// Walks over the UDP entries of each family that has candidates.
fn delete(
    table: &mut dyn UdpTable,
    candidates: &Candidates<'_>,
) -> Result<Vec<StaleUdpDeletion>, KernelError> {
    let walk = |filter: UdpFilter| {
        timed(filter.family, || table.delete(filter, &mut |flow| candidates.is_stale(flow)))
    };
    candidates.filters().map(walk).collect()
}

/// Walks over the TCP entries of each family that has service ports.
fn delete_attempts(
    table: &mut dyn UdpTable,
    served: &ServedTcp,
) -> Result<Vec<StaleUdpDeletion>, KernelError> {
    let walk = |family| timed(family, || table.delete_tcp_attempts(family, &mut |to| served.contains(to)));
    served.families().map(walk).collect()
}

#[expect(clippy::disallowed_methods, reason = "the duration of a walk is measured")]
fn timed(
    family: IpFamily,
    walk: impl FnOnce() -> Result<DeletionCounts, KernelError>,
) -> Result<StaleUdpDeletion, KernelError> {
    let started = Instant::now();
    let flows = walk()?;
    Ok(StaleUdpDeletion { family, flows, took: started.elapsed() })
}
