//! Makes conntrack forget UDP flows that lead where their Service leads no longer, for the modes that translate in netfilter.
//!
//! Rules decide about the first packet of a flow; those after it go where conntrack remembers. A UDP sender that never pauses
//! keeps its entry for ever, so entries that no rule would make any more are deleted: to endpoints that left, the last one
//! included, to the Service's own address from before its first endpoint came, and of Services that went. TCP connections end
//! with their endpoint and are never touched. Upstream: `CleanStaleEntries` (`pkg/proxy/conntrack/cleanup.go`), which in 1.36
//! leaves the entries of Services without endpoints and of those that went.
//!
//! What is not found: entries of a Service that went while no proxy ran look like anybody's translation. They are left, unless
//! the dataplane found the Service's address in the rules of its predecessor and says so ([`StaleUdpCleaner::add_former_destination`]).

mod plan;
mod thread;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

pub use self::plan::Suspects;
use self::{plan::Memory, thread::LookThread};
pub use crate::kernel::conntrack::{DeletionCounts, UdpFilter, UdpFlow};
use crate::{
    kernel::{KernelError, conntrack},
    model::{Dirty, IpFamily, Snapshot},
};

/// Deletes tracked UDP flows: the kernel's table, or one that a test made.
pub trait UdpTable: Send + fmt::Debug {
    /// Deletes those that pass the filter and that `is_stale` chooses.
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError>;
}

/// The table of the calling thread's network namespace.
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
}

/// What one look at the flows of a family came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleUdpDeletion {
    /// The family.
    pub family: IpFamily,
    /// How many were looked at and deleted.
    pub flows: DeletionCounts,
    /// How long it took.
    pub took: Duration,
}

/// Finds stale flows by what changed since the last time, and makes conntrack forget them.
#[derive(Debug)]
pub struct StaleUdpCleaner(Place);

/// Where the work is done.
#[derive(Debug)]
enum Place {
    /// On a thread of its own: a walk through a large table must not hold up the next change.
    Thread(LookThread),
    /// In the call, over a table that is not this process's own.
    Here(Looks),
}

impl StaleUdpCleaner {
    /// For this process's network namespace. `loopback` are the families whose node ports the rules serve on loopback
    /// addresses too; in the others, flows there are not ours.
    pub fn new(loopback: &[IpFamily]) -> Self {
        Self(Place::Thread(LookThread::new(Looks::new(KernelTable, loopback))))
    }

    /// Over another table, and at once.
    pub fn with_table(flows: impl UdpTable + 'static, loopback: &[IpFamily]) -> Self {
        Self(Place::Here(Looks::new(flows, loopback)))
    }

    /// The next look is at the flows of every Service: rules were missing for a while, so that packets passed untranslated.
    pub fn recheck_all(&mut self) {
        match &mut self.0 {
            Place::Thread(thread) => thread.recheck_all(),
            Place::Here(looks) => looks.recheck_all(),
        }
    }

    /// Rules of an earlier process led this UDP destination somewhere. Should no Service have it at the next look, which is
    /// one at everything, all flows to it that are translated are stale. A node port has the unspecified address of its
    /// family. For what is found in the kernel at start-up.
    pub fn add_former_destination(&mut self, destination: SocketAddr) {
        match &mut self.0 {
            Place::Thread(thread) => thread.add_former_destination(destination),
            Place::Here(looks) => looks.add_former_destination(destination),
        }
    }

    /// Has what became stale deleted, and tells what came of looks that have ended: of earlier ones where they are made on a thread.
    /// To be called when the rules for `dirty` are in the kernel, never before: deleted earlier, a flow would come back as it
    /// was. Nothing is read from the kernel unless a UDP service port changed in a way that matters; the first call looks at all
    /// of them. What fails is tried again at the next call with UDP changes, or with `dirty.all`.
    pub fn delete_stale(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, KernelError> {
        match &mut self.0 {
            Place::Thread(thread) => thread.delete_stale(snapshot, dirty),
            Place::Here(looks) => looks.delete_stale(snapshot, dirty),
        }
    }
}

/// Looks for stale flows, one after the other.
#[derive(Debug)]
struct Looks {
    flows: Box<dyn UdpTable>,
    memory: Memory,
    owed: Owed,
}

/// What a look at the table has still to be about.
#[derive(Debug, Default)]
struct Owed {
    /// Every service port, changed or not.
    everything: bool,
    /// What changed when it last failed.
    dirty: Dirty,
}

impl Looks {
    fn new(flows: impl UdpTable + 'static, loopback: &[IpFamily]) -> Self {
        Self {
            flows: Box::new(flows),
            memory: Memory::new(loopback),
            owed: Owed { everything: true, dirty: Dirty::default() },
        }
    }

    fn recheck_all(&mut self) {
        self.owed.everything = true;
    }

    fn add_former_destination(&mut self, destination: SocketAddr) {
        self.memory.add_former_destination(destination);
        self.owed.everything = true;
    }

    fn delete_stale(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, KernelError> {
        if !self.owed.everything && !concerns_udp(dirty) {
            return Ok(Vec::new());
        }
        self.owed.add(dirty);
        let suspects = self.memory.plan(snapshot, &self.owed.dirty, self.owed.everything);
        let forgotten = delete(&mut *self.flows, &suspects)?;
        drop(suspects);
        self.memory.keep(snapshot, &self.owed.dirty, self.owed.everything);
        self.owed = Owed::default();
        Ok(forgotten)
    }
}

impl Owed {
    fn add(&mut self, dirty: &Dirty) {
        self.dirty.all |= dirty.all;
        self.dirty.node |= dirty.node;
        self.dirty.ports.extend(dirty.ports.iter().filter(|key| plan::is_udp(key)).cloned());
    }
}

fn concerns_udp(dirty: &Dirty) -> bool {
    dirty.all || dirty.node || dirty.ports.iter().any(plan::is_udp)
}

/// One walk a family, and none for a family without suspects.
#[expect(clippy::disallowed_methods, reason = "how long a walk takes is measured")]
fn delete(flows: &mut dyn UdpTable, suspects: &Suspects<'_>) -> Result<Vec<StaleUdpDeletion>, KernelError> {
    let mut forgotten = Vec::new();
    for filter in suspects.filters() {
        let began = Instant::now();
        let deleted = flows.delete(filter, &mut |flow| suspects.is_stale(flow))?;
        forgotten.push(StaleUdpDeletion { family: filter.family, flows: deleted, took: began.elapsed() });
    }
    Ok(forgotten)
}
