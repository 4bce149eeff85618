//! The modes: how the kernel is made to serve a [`Snapshot`].
//!
//! The tests of each mode check these laws. After `apply`, a new plan is empty. A plan for what is
//! dirty reaches the same state as a plan for everything. The kernel is safe after each step of a
//! plan. The size of a plan depends on the change, not on the cluster.
#![forbid(unsafe_code)]

mod backstop;
pub mod conntrack;
mod drift;
pub mod ebpf;
#[cfg(test)]
pub(crate) mod fake;
mod families;
pub mod iptables;
mod iptables_text;
pub mod ipvs;
mod known_affinity;
mod known_connections;
mod known_flows;
mod name_hash;
pub mod nftables;
mod present;
mod renderer;
mod scope;
mod sctp_ports;

pub use backstop::{BackstopError, BackstopNeed, BackstopStatus, Backstopped, CreateBackstop};
pub use drift::{Held, HeldReader};
pub use families::FamilyError;
pub use known_affinity::{AffinityClient, AffinityKeeper, AffinityPort, KnownAffinity, known_affinity};
pub use known_connections::{KnownConnection, known_connections};
pub use known_flows::{FlowStage, KnownFlow, Translator, for_each_flow};
pub use present::modes_with_rules;
pub use renderer::{DataplaneRenderer, RenderError, Renderer};
pub use scope::{FailureScope, LeftOutPort, LeftOutReason};

pub use crate::mode::{BackstopPolicy, Mode};

use std::{
    fmt,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use proxy_common::layout::ServiceCounts;

use self::{conntrack::StaleUdpCleaner, ebpf::TracingPrograms};
use crate::{
    kernel::KernelError,
    model::{Dirty, ServicePortKey, Snapshot},
};

/// A mode.
pub trait Dataplane {
    /// What the kernel holds of this mode.
    type State;
    /// The kernel changes in the order in which they must be made. A plan is data: it can be
    /// printed, compared and counted.
    type Plan: PlanSize + fmt::Debug;
    /// The errors of this mode.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Reads what the kernel holds. Called at start, after a failed `apply`, and if
    /// [`Self::is_certain`] returns false.
    fn observe(&mut self) -> Result<Self::State, Self::Error>;

    /// Returns true if the kernel certainly holds what the state says. It is then not read again.
    fn is_certain(&mut self, _state: &Self::State) -> bool {
        false
    }

    /// Reads again what is not certain about a state. Returns false if everything must be read.
    fn refresh(&mut self, state: &mut Self::State) -> Result<bool, Self::Error> {
        Ok(self.is_certain(state))
    }

    /// Makes the next [`Self::refresh`] rely on nothing that may have been read before: somebody
    /// else may have changed the kernel.
    fn distrust(&mut self) {}

    /// Returns true if each [`Self::refresh`] compares all that the kernel holds. Otherwise it is
    /// read from time to time although it seems certain.
    fn compares_all(&self) -> bool {
        false
    }

    /// Returns true if the whole Snapshot was planned for this state and nothing failed since. Then
    /// only what is dirty, and the node, need a plan.
    fn is_current(_state: &Self::State) -> bool {
        false
    }

    /// Plans the changes. Pure: takes no `self`.
    fn plan(state: &Self::State, snapshot: &Snapshot, dirty: &Dirty) -> Self::Plan;

    /// Makes the changes and updates the state accordingly, even if an error stops it.
    fn apply(&mut self, state: &mut Self::State, plan: Self::Plan) -> Result<(), Self::Error>;

    /// Makes conntrack go on to translate its connections after the rules of the backstop are
    /// removed.
    fn keep_nat(&mut self) {}

    /// Removes everything that this mode put into the kernel. Continues after errors and returns
    /// them all.
    fn cleanup(&mut self) -> Vec<Self::Error>;

    /// Returns what an error of `apply` concerns.
    fn failure_scope(_error: &Self::Error) -> FailureScope {
        FailureScope::Everything
    }

    /// Returns why the mode serves no SCTP port on this node. `None` if it serves them. It is
    /// called only if there are SCTP ports.
    fn lacks_sctp(&self) -> Option<&'static str> {
        None
    }

    /// Returns the service ports that the last `apply` left out, and possibly those that an earlier
    /// one left out and that did not change since.
    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        Vec::new()
    }

    /// Returns the cleaner of stale UDP flows, in modes that translate in netfilter. It lives as
    /// long as the dataplane, because it must remember what was served before [`Self::observe`].
    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        None
    }

    /// Returns the reader of the kernel's counters, for metrics.
    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        None
    }

    /// Returns the reader of the metrics that only this mode has.
    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        None
    }

    /// Returns the links that have no room for programs, because of a setting of another program.
    fn left_out(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// Returns the links on which a program of another owner runs before ours, and insists on it.
    fn displaced(&self) -> Vec<DisplacedLink> {
        Vec::new()
    }

    /// Exchanges the programs for others that trace, or for its own ones again (`None`). The next
    /// plan for the node attaches them. Returns false if nothing changes, as in modes without
    /// programs.
    fn trace(&mut self, _state: &mut Self::State, _programs: Option<TracingPrograms>) -> bool {
        false
    }

    /// Returns what reads the kernel for [`Self::differences`]. `None` while it cannot be compared.
    fn held_reader(&self) -> Option<HeldReader> {
        None
    }

    /// Returns how the kernel differs from what the state says about a service port; with `None`,
    /// about what all share. Empty if it does not differ, or is of another mode.
    fn differences(
        _state: &Self::State,
        _held: &Held,
        _snapshot: &Snapshot,
        _of: Option<&ServicePortKey>,
    ) -> Vec<String> {
        Vec::new()
    }

    /// Returns how full the kernel's maps are, for metrics.
    fn map_fill(&self, _state: &Self::State) -> Vec<MapFill> {
        Vec::new()
    }

    /// Returns how many service ports have Maglev tables. `None` in a mode without such tables.
    fn maglev_count(&self) -> Option<MaglevCount> {
        None
    }
}

/// Reads the kernel's counters since the maps or tables were created. Called for each scrape of the
/// metrics, from any thread.
pub trait KernelCounts: Send + Sync {
    /// Returns the number of packets by outcome.
    fn packets(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns the number of errors in eBPF programs.
    fn errors(&self) -> Vec<ProgramErrorCount> {
        Vec::new()
    }

    /// Returns the counts of service ports. Empty if they are not counted.
    fn services(&self) -> Vec<ServiceCount>;

    /// Returns how full the prefilter is, if there is one.
    fn prefilter(&self) -> Option<PrefilterFill> {
        None
    }

    /// Returns true if the counts of service ports include refusals and drops.
    fn counts_failures(&self) -> bool {
        true
    }
}

/// How full the prefilter of the eBPF programs is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefilterFill {
    /// The size of the part in use.
    pub bytes: u64,
    /// The share of other addresses and ports that pass.
    pub false_positive_ratio: f64,
}

/// The number of errors in an eBPF program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramErrorCount {
    /// The program's name in the kernel.
    pub program: &'static str,
    /// The kind of error.
    pub reason: &'static str,
    /// The number of errors.
    pub count: u64,
}

/// The counts of a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCount {
    /// The service port. `None` stands for all service ports that are not counted individually.
    pub port: Option<ServicePortKey>,
    /// Its counts.
    pub counts: ServiceCounts,
}

/// Reads the metrics of one mode. Called for each scrape of the metrics, from any thread.
pub type ModeMetricsReader = Box<dyn Fn() -> Vec<ModeMetric> + Send + Sync>;

/// A metric of one mode, with kube-proxy's name. Metrics with the same name are adjacent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeMetric {
    /// The name without `kubeproxy_`, and without the `_total` of a counter.
    pub name: &'static str,
    /// kube-proxy's help text.
    pub help: &'static str,
    /// The labels and their values.
    pub labels: Vec<(&'static str, &'static str)>,
    /// The value.
    pub value: MetricValue,
}

/// The value of a [`ModeMetric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricValue {
    /// A number that only grows.
    Counter(u64),
    /// A number that can grow and shrink.
    Gauge(i64),
}

/// A link on which a program of another owner runs before ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DisplacedLink {
    /// The name of the link.
    pub link: Arc<str>,
    /// The name of the other program.
    pub by: Arc<str>,
}

/// Writes `eth0 by cni_ingress`.
impl fmt::Display for DisplacedLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.link, self.by)
    }
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapFill {
    /// The map's name in the kernel.
    pub map: &'static str,
    /// The number of entries.
    pub entries: usize,
    /// The maximum number of entries.
    pub capacity: u32,
}

/// How many service ports have Maglev tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaglevCount {
    /// Those that have them.
    pub with_tables: usize,
    /// Those for whose tables the map has no room.
    pub without_room: usize,
}

/// Returns how full the maps are that programs of the ebpf mode have, with or without a process.
/// They are pinned in this directory.
pub fn pinned_map_fill(pins: &Path) -> Result<Vec<MapFill>, KernelError> {
    ebpf::pinned_fill(pins)
}

/// Locks a value that stays usable if a thread panics while it has the lock.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The size of a plan.
pub trait PlanSize {
    /// Returns the number of kernel changes.
    fn len(&self) -> usize;

    /// Returns true if there is nothing to change.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
