//! Keeps what shunt does on this node at the moment, for `/statusz`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{
    dataplane::{BackstopStatus, DisplacedLink, MapFill, Mode},
    kernel::redirecting_pods::ExemptNamespaces,
    model::{ChosenPath, IpFamily, SocketScope},
};

/// The last value of each fact about this proxy. The parts of shunt write it where they report a
/// change, and compare with it to find a change. `/statusz` reads it.
#[derive(Clone, Debug)]
pub struct Status {
    /// When the process started to run the proxy.
    pub(super) started: Timestamp,
    /// The same on the monotonic clock.
    pub(super) running_since: Instant,
    facts: Arc<Mutex<Facts>>,
}

/// The facts. All but the last two belong to the mode that runs.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) mode: Option<RunningMode>,
    pub(super) link_path: Option<ChosenPath>,
    pub(super) socket_scope: Option<ReportedScope>,
    pub(super) exempt: ExemptNamespaces,
    pub(super) backstop: Option<BackstopStatus>,
    pub(super) left_out: Vec<Arc<str>>,
    pub(super) displaced: Vec<DisplacedLink>,
    pub(super) unreadable_manifests: Vec<String>,
    /// The families of the pods on this node. Empty if they are not known.
    pub(super) node_families: BTreeSet<IpFamily>,
    /// Kinds that are not up to date, with the error.
    pub(super) watch_errors: Vec<String>,
    pub(super) watches: Option<Watches>,
    /// How many seconds the clock of this node is ahead of the API server's.
    pub(super) clock_ahead: Option<i64>,
    pub(super) map_fill: Vec<MapFill>,
    /// Each task that fails, with the error of the last attempt.
    pub(super) failing: BTreeMap<SyncTask, String>,
    /// Why the changed configuration file cannot be used. This does not belong to the mode.
    pub(super) configuration_refused: Option<String>,
    /// When another shunt on this node last ended because this one runs. This does not belong to
    /// the mode either.
    pub(super) second_shunt: Option<Instant>,
}

/// Reads the state of each watch.
#[derive(Clone)]
pub struct Watches(Arc<dyn Fn() -> Vec<WatchReport> + Send + Sync>);

impl Watches {
    /// Returns a reader that calls this function.
    pub fn new(read: impl Fn() -> Vec<WatchReport> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Reads the state now.
    pub(super) fn read(&self) -> Vec<WatchReport> {
        (self.0)()
    }
}

impl fmt::Debug for Watches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watches").field(&self.read()).finish()
    }
}

/// The state of the watch of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchReport {
    /// The kind, in the plural.
    pub kind: String,
    /// It is watched at the moment.
    pub connected: bool,
    /// The seconds since the last list, change or bookmark. `None` if there was none yet.
    pub seconds_since_event: Option<u64>,
}

/// The mode that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RunningMode {
    pub(super) mode: Mode,
    pub(super) why: String,
    pub(super) since: Timestamp,
}

/// Which sockets are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedScope {
    pub(super) scope: SocketScope,
    /// The reason, if not all sockets are served.
    pub(super) why: Option<Arc<str>>,
}

/// A task of the sync loop that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SyncTask {
    /// Programs the kernel with the Services.
    Program,
    /// Deletes stale UDP entries of conntrack.
    DeleteStaleUdp,
    /// Removes a backstop that nothing needs any more.
    RemoveBackstop,
}

impl fmt::Display for SyncTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Program => "program the kernel",
            Self::DeleteStaleUdp => "delete stale UDP entries of conntrack",
            Self::RemoveBackstop => "remove the backstop",
        })
    }
}

impl Default for Status {
    /// Returns the status of a proxy that starts now and runs no mode yet.
    fn default() -> Self {
        Self { started: Timestamp::now(), running_since: Instant::now(), facts: Arc::default() }
    }
}

impl Status {
    /// Sets the mode that runs from now on, and the reason for it. Forgets all facts about the mode
    /// before.
    pub fn set_mode(&self, mode: Mode, why: &str) {
        let mode = RunningMode { mode, why: why.into(), since: Timestamp::now() };
        let mut facts = self.facts();
        let (configuration_refused, second_shunt) = (facts.configuration_refused.take(), facts.second_shunt);
        *facts = Facts { mode: Some(mode), configuration_refused, second_shunt, ..Facts::default() };
    }

    /// Returns the mode that runs.
    pub fn mode(&self) -> Option<Mode> {
        self.facts().mode.as_ref().map(|running| running.mode)
    }

    /// Sets what translates packets that come in on links, and returns what was set before.
    pub fn set_link_path(&self, path: ChosenPath) -> Option<ChosenPath> {
        self.facts().link_path.replace(path)
    }

    /// Sets which sockets are served, and the reason if that does not follow from the scope.
    pub fn set_socket_scope(&self, scope: SocketScope, why: Option<Arc<str>>) {
        self.facts().socket_scope = Some(ReportedScope { scope, why });
    }

    /// Sets the network namespaces whose sockets are left alone. Returns the previous ones.
    pub fn set_exempt_namespaces(&self, exempt: ExemptNamespaces) -> ExemptNamespaces {
        mem::replace(&mut self.facts().exempt, exempt)
    }

    /// Sets the backstop that is in place. Returns the previous one.
    pub fn set_backstop(&self, backstop: Option<BackstopStatus>) -> Option<BackstopStatus> {
        mem::replace(&mut self.facts().backstop, backstop)
    }

    /// Sets the links that have no room for programs. Returns the previous ones.
    pub fn set_links_left_out(&self, links: Vec<Arc<str>>) -> Vec<Arc<str>> {
        mem::replace(&mut self.facts().left_out, links)
    }

    /// Sets the links on which a program of another owner runs before shunt's. Returns the previous
    /// ones.
    pub fn set_links_displaced(&self, links: Vec<DisplacedLink>) -> Vec<DisplacedLink> {
        mem::replace(&mut self.facts().displaced, links)
    }

    /// Returns what [`Self::set_links_displaced`] set, as text.
    pub(super) fn displaced_links(&self) -> Vec<String> {
        self.facts().displaced.iter().map(ToString::to_string).collect()
    }

    /// Sets what cannot be read in the directory of manifests, in words.
    pub fn set_unreadable_manifests(&self, errors: Vec<String>) {
        self.facts().unreadable_manifests = errors;
    }

    /// Returns what [`Self::set_unreadable_manifests`] set.
    pub(super) fn unreadable_manifests(&self) -> Vec<String> {
        self.facts().unreadable_manifests.clone()
    }

    /// Sets the families of the pods on this node, as its Node object has them.
    pub fn set_node_families(&self, families: BTreeSet<IpFamily>) {
        self.facts().node_families = families;
    }

    /// Sets which kinds of objects are not up to date, each with the error.
    pub fn set_watch_errors(&self, errors: Vec<String>) {
        self.facts().watch_errors = errors;
    }

    /// Sets what reads the state of the watches.
    pub fn set_watches(&self, watches: Watches) {
        self.facts().watches = Some(watches);
    }

    /// Sets how many seconds the clock of this node is ahead of the API server's; negative if it is
    /// behind.
    pub fn set_clock_ahead(&self, seconds: i64) {
        self.facts().clock_ahead = Some(seconds);
    }

    /// Sets how full the kernel's maps are.
    pub fn set_map_fill(&self, fill: Vec<MapFill>) {
        self.facts().map_fill = fill;
    }

    /// Sets why the changed configuration file cannot be used. `None` if it can be used.
    pub fn set_configuration_refused(&self, error: Option<String>) {
        self.facts().configuration_refused = error;
    }

    /// Records that another shunt ended now because this one runs. Returns true for the first time.
    pub(super) fn refused_second_shunt(&self) -> bool {
        self.facts().second_shunt.replace(Instant::now()).is_none()
    }

    /// Records that a task failed with this error. Returns the error of the attempt before, if that
    /// failed, too.
    pub fn task_failed(&self, task: SyncTask, error: String) -> Option<String> {
        self.facts().failing.insert(task, error)
    }

    /// Records that a task succeeded. Returns the error of the attempt before, if that failed.
    pub fn task_succeeded(&self, task: SyncTask) -> Option<String> {
        self.facts().failing.remove(&task)
    }

    /// Returns true if the last attempt of a task failed.
    #[cfg(test)]
    pub(crate) fn is_failing(&self, task: SyncTask) -> bool {
        self.facts().failing.contains_key(&task)
    }

    /// Locks the facts. They stay usable if a thread panics while it has the lock.
    pub(super) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
