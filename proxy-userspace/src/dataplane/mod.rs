//! What makes the kernel do a [`Snapshot`]: the trait that every mode implements.
//!
//! Laws that each mode's tests hold it to: after `apply`, planning again yields nothing; planning what is dirty reaches the
//! same state as planning everything; every prefix of a plan is safe; a plan grows with the change, not with the cluster.
#![forbid(unsafe_code)]

pub mod conntrack;
pub mod ebpf;
#[cfg(test)]
pub(crate) mod fake;
mod families;
pub mod iptables;
mod iptables_text;
pub mod ipvs;
mod name_hash;
pub mod nftables;
mod renderer;

pub use families::OneFamily;
pub use renderer::{RenderError, Renderer, Rendering};

pub use crate::mode::Mode;

use std::sync::Arc;

use self::conntrack::StaleUdpCleaner;
use crate::model::{Dirty, IpFamily, ServicePortKey, Snapshot};

/// One way of making the kernel serve a Snapshot.
pub trait Dataplane {
    /// What the kernel holds, as far as this mode wrote it.
    type State;
    /// Changes to the kernel, in the order in which they must be made. Plans are data: printed, compared and counted.
    type Plan: PlanSize + std::fmt::Debug;
    /// What can go wrong.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Reads what the kernel holds: at start, after a failed `apply`, and whenever [`Self::is_certain`] is not.
    fn observe(&mut self) -> Result<Self::State, Self::Error>;

    /// Whether the kernel certainly holds what the state says, so that it need not be read anew.
    fn is_certain(&mut self, state: &Self::State) -> bool {
        let _ = state;
        false
    }

    /// What has to change. Pure: takes no `self`.
    fn plan(state: &Self::State, snapshot: &Snapshot, dirty: &Dirty) -> Self::Plan;

    /// Makes the changes and keeps `state` true, also when it stops at an error.
    fn apply(&mut self, state: &mut Self::State, plan: Self::Plan) -> Result<(), Self::Error>;

    /// Removes all that this mode ever put into the kernel; goes on past errors and returns them all.
    fn cleanup(&mut self) -> Vec<Self::Error>;

    /// Whether an error of `apply` concerns some service ports or links only, and all else is as it should be.
    fn is_partial(error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// The family of which nothing is known to be as it should be, where an error of `apply` is of one alone: all of the other is.
    fn failed_family(error: &Self::Error) -> Option<IpFamily> {
        let _ = error;
        None
    }

    /// What finds stale UDP flows, in modes that translate in netfilter. It has to live as long as the dataplane: its memory
    /// of what was served must outlast [`Self::observe`].
    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        None
    }

    /// What the kernel counts, for metrics.
    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        None
    }

    /// What this mode has for metrics besides what all have.
    fn readings(&mut self) -> Option<Readings> {
        None
    }

    /// The links that are served without what comes in on them, since somebody else's setting leaves no other way.
    fn left_out(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// How full the kernel's tables are, for metrics.
    fn map_fill(&self, state: &Self::State) -> Vec<MapFill> {
        let _ = state;
        Vec::new()
    }
}

/// What the kernel counts since the tables were made. Read whenever metrics are asked for, from any thread.
pub trait KernelCounts: Send + Sync {
    /// How many packets met which fate, a name each.
    fn packets(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// How often something went wrong in a program of the kernel's.
    fn errors(&self) -> Vec<ProgramErrorCount> {
        Vec::new()
    }

    /// What became of traffic to Services; empty where that is not counted.
    fn services(&self) -> Vec<ServiceCount>;

    /// Whether refusals and drops are among what is counted of Services.
    fn counts_failures(&self) -> bool {
        true
    }
}

/// How often a program met an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramErrorCount {
    /// The program's name in the kernel.
    pub program: &'static str,
    /// What went wrong.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
}

/// What became of traffic to a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCount {
    /// The service port; none stands for all that are not counted apart.
    pub port: Option<ServicePortKey>,
    /// Connections, and flows of UDP.
    pub connections: u64,
    /// Tries that were refused.
    pub refusals: u64,
    /// Tries that were dropped.
    pub drops: u64,
    /// Bytes to endpoints, where packets are seen.
    pub bytes_to_endpoints: u64,
    /// Bytes to clients, where packets are seen.
    pub bytes_to_clients: u64,
}

/// Reads a mode's own metrics. Called whenever metrics are asked for, from any thread.
pub type Readings = Box<dyn Fn() -> Vec<Reading> + Send + Sync>;

/// A metric of one mode, with upstream's name. Those of one name stand together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Without `kubeproxy_`, and without the `_total` of a counter.
    pub name: &'static str,
    /// Upstream's help.
    pub help: &'static str,
    /// Labels with their values.
    pub labels: Vec<(&'static str, &'static str)>,
    /// What was read.
    pub value: ReadingValue,
}

/// The value of a [`Reading`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadingValue {
    /// It only grows.
    Counter(u64),
    /// It is what it is.
    Gauge(i64),
}

/// How full one of a dataplane's tables is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapFill {
    /// Its name, as people see it in the kernel.
    pub map: &'static str,
    /// Entries it holds.
    pub entries: usize,
    /// Entries it can hold.
    pub capacity: u32,
}

/// How many changes to the kernel a plan makes.
pub trait PlanSize {
    /// The number of changes.
    fn len(&self) -> usize;

    /// Nothing to do.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
