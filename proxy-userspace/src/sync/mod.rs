//! The loop: takes in what sources say, and keeps the kernel at what it means.
//!
//! A change is programmed at once when the loop is idle; under load changes are taken together, no more often than
//! `minSyncPeriod`. After a failure, and every `syncPeriod`, the kernel is read anew and compared with everything. The loop
//! and the dataplane run on one task: from an event to the kernel there is no other queue.
#![forbid(unsafe_code)]

mod conflicts;
mod failing;
mod lasting;
mod left_out;
mod no_local_endpoints;
mod node_wait;
mod pace;
mod report;

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, mpsc, watch},
    time::Instant,
};

pub use self::node_wait::PodCidrsError;
use self::{
    conflicts::Conflicts,
    lasting::Lasting,
    left_out::LeftOut,
    no_local_endpoints::NoLocalEndpoints,
    node_wait::NodeWait,
    pace::{Due, Pace},
    report::unix_now,
};
use crate::{
    causes::with_causes,
    dataplane::{RenderError, Renderer},
    health::{HealthChecks, ProxyHealth},
    metrics::{Metrics, SyncExtent, WatchedKind},
    model::{Dirty, IpFamily, Model, ModelSettings, NodeFacts, NodePortAddresses, UnixNanos, WatchEvent},
    node::NodeEvents,
};

/// Events taken in before the kernel gets its turn, so that a source that never pauses cannot starve it.
const MOST_EVENTS_AT_ONCE: usize = 4096;
/// Modes that only glance at the kernel every `syncPeriod` read it all so often: upstream's `FullSyncPeriod`.
const WHOLE_READING: Duration = Duration::from_hours(1);

/// What ends the loop, other than being told to.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Nothing can send events any more.
    #[error("the source of Services, EndpointSlices and Nodes has ended")]
    SourceEnded,
    /// Nothing can say what the node's addresses are any more.
    #[error("the source of the node's addresses has ended")]
    NodeFactsEnded,
    /// The node's pods are elsewhere than rules say, or it is not known where they are.
    #[error(transparent)]
    PodCidrs(#[from] PodCidrsError),
    /// The dataplane has failed for so long that it is not waited for any more.
    #[error("the kernel could not be programmed for {}: {error}", format_args!("{} s", after.as_secs()))]
    Broken {
        /// For how long.
        after: Duration,
        /// Why the last try failed.
        error: String,
    },
}

/// How often the loop acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncPeriods {
    /// Under load, the least time from one sync to the next; may be zero.
    pub min_sync_period: Duration,
    /// How often the kernel is compared with what it should hold.
    pub sync_period: Duration,
    /// After how long without a success the dataplane is given up, for another one to take over; none for never. A dataplane that
    /// serves all but some Services has not failed.
    pub give_up_after: Option<Duration>,
    /// Nothing is programmed before this node's Node object is known and has what rules depend on, for a while at least: where
    /// objects come from an API server, it comes with the others, or soon after on a new node.
    pub wait_for_node: bool,
}

/// What the loop is told by the configuration, and may be told anew while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncSettings {
    /// What resolution depends on.
    pub model: ModelSettings,
    /// How often it acts.
    pub periods: SyncPeriods,
}

/// What the loop listens to.
#[derive(Debug)]
pub struct Inputs {
    /// Objects.
    pub events: mpsc::Receiver<WatchEvent>,
    /// The kernel's links and addresses; `None` until they were read once.
    pub node_facts: watch::Receiver<Option<NodeFacts>>,
    /// Somebody else changed what this proxy put into the kernel: the kernel is to be read anew.
    pub disturbed: Arc<Notify>,
    /// Settings that differ from those the loop began with.
    pub settings: watch::Receiver<SyncSettings>,
}

/// What the loop tells.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Metrics.
    pub metrics: Metrics,
    /// Health.
    pub health: ProxyHealth,
    /// What people who look at the Node are told.
    pub events: NodeEvents,
    /// Health check node ports.
    pub health_checks: watch::Sender<HealthChecks>,
}

/// The model, the dataplane, and what is between them.
pub struct SyncLoop {
    model: Model,
    renderer: Box<dyn Renderer>,
    outputs: Outputs,
    pace: Pace,
    every_node_port_address: bool,
    no_local_endpoints: NoLocalEndpoints,
    conflicts: Conflicts,
    node_wait: NodeWait,
    lasting: Lasting,
    left_out: LeftOut,
    last_whole_reading: Option<Instant>,
    trigger_times: Vec<UnixNanos>,
    last_error: Option<String>,
    /// The family that failed, where the other did not.
    failing_family: Option<IpFamily>,
    failing_since: Option<Instant>,
    broken: Option<SyncError>,
    last_stale_udp_error: Option<String>,
    last_logged: Option<Instant>,
}

impl SyncLoop {
    /// A loop that has programmed nothing yet.
    pub fn new(
        settings: ModelSettings,
        periods: SyncPeriods,
        renderer: Box<dyn Renderer>,
        outputs: Outputs,
    ) -> Self {
        let node_wait = NodeWait::new(&settings, periods.wait_for_node);
        Self {
            every_node_port_address: settings.node_port_addresses == NodePortAddresses::All,
            model: Model::new(settings),
            renderer,
            outputs,
            pace: Pace::new(periods),
            no_local_endpoints: NoLocalEndpoints::default(),
            conflicts: Conflicts::default(),
            node_wait,
            lasting: Lasting::default(),
            left_out: LeftOut::default(),
            last_whole_reading: None,
            trigger_times: Vec::new(),
            last_error: None,
            failing_family: None,
            failing_since: None,
            broken: None,
            last_stale_udp_error: None,
            last_logged: None,
        }
    }

    /// Runs until `shutdown` is ready. What the kernel holds then stays.
    pub async fn run(mut self, inputs: Inputs, shutdown: impl Future<Output = ()>) -> Result<(), SyncError> {
        self.run_until_broken(inputs, shutdown).await
    }

    /// The dataplane, to clean up with.
    pub fn into_renderer(self) -> Box<dyn Renderer> {
        self.renderer
    }

    /// The same as [`Self::run`]; afterwards the dataplane is still there.
    pub async fn run_until_broken(
        &mut self,
        mut inputs: Inputs,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), SyncError> {
        tokio::pin!(shutdown);
        self.take_facts(&mut inputs.node_facts);
        loop {
            let wake = self.pace.wake_at().into_iter().chain(self.node_wait.wake_at()).min();
            tokio::select! {
                biased;
                () = &mut shutdown => return Ok(()),
                event = inputs.events.recv() => {
                    self.take_event(event.ok_or(SyncError::SourceEnded)?);
                    self.take_queued_events(&mut inputs.events);
                }
                changed = inputs.node_facts.changed() => {
                    changed.map_err(|_| SyncError::NodeFactsEnded)?;
                    self.take_facts(&mut inputs.node_facts);
                }
                // Without a sender they stay as they are.
                Ok(()) = inputs.settings.changed() => {
                    let settings = inputs.settings.borrow_and_update().clone();
                    self.take_settings(settings);
                }
                () = inputs.disturbed.notified() => self.pace.distrust(),
                () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
            if self.node_wait.look(&self.model, Instant::now())? {
                self.queue();
            }
            self.sync_if_due();
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
        }
    }

    fn take_settings(&mut self, SyncSettings { model, periods }: SyncSettings) {
        self.every_node_port_address = model.node_port_addresses == NodePortAddresses::All;
        self.model.set_settings(model);
        self.pace.set_periods(periods);
        self.queue();
    }

    fn take_queued_events(&mut self, events: &mut mpsc::Receiver<WatchEvent>) {
        for _ in 0..MOST_EVENTS_AT_ONCE {
            let Ok(event) = events.try_recv() else { break };
            self.take_event(event);
        }
    }

    fn take_event(&mut self, event: WatchEvent) {
        let kind = match event {
            WatchEvent::Services(_) => Some(WatchedKind::Service),
            WatchEvent::EndpointSlices(_) => Some(WatchedKind::EndpointSlice),
            WatchEvent::Nodes(_) => Some(WatchedKind::Node),
            WatchEvent::ServiceCidrs(_) => None,
        };
        if let Some(kind) = kind {
            self.outputs.metrics.event_received(kind);
        }
        self.model.apply(event);
        self.queue();
    }

    fn take_facts(&mut self, facts: &mut watch::Receiver<Option<NodeFacts>>) {
        if let Some(facts) = facts.borrow_and_update().clone() {
            self.model.set_node_facts(facts);
            self.queue();
        }
    }

    /// Something may have to be programmed. Before everything is listed nothing can be late.
    fn queue(&mut self) {
        if self.model.is_synced() && self.node_wait.is_over() && self.pace.queue() {
            self.outputs.health.queued(&IpFamily::ALL);
            self.outputs.metrics.sync_queued(unix_now().as_secs_f64());
        }
    }

    fn sync_if_due(&mut self) {
        let now = Instant::now();
        match self.pace.due(now) {
            Due::Nothing => {}
            Due::Changes => self.sync(now, SyncExtent::Partial),
            Due::Everything => self.sync(now, SyncExtent::Full),
        }
    }

    fn sync(&mut self, started: Instant, wanted: SyncExtent) {
        let dirty = self.model.resolve();
        // Kept up with here and not on success only: what is dirty is told once.
        self.no_local_endpoints.update(self.model.snapshot(), &dirty);
        self.conflicts.update(self.model.conflicts());
        self.trigger_times.extend(self.model.take_trigger_times());
        let extent = if dirty.all || self.may_have_made_room(&dirty) { SyncExtent::Full } else { wanted };
        let rendered = self.render(extent, &dirty);
        self.renderer.map_fill().into_iter().for_each(|fill| self.outputs.metrics.set_map_fill(fill));
        self.left_out.report(&self.renderer.left_out(), &self.outputs);
        match rendered {
            Ok(operations) => {
                self.succeeded(started, extent, &dirty, operations);
                self.delete_stale_udp(extent, &dirty);
            }
            Err(error) => {
                self.failed(started, extent, &error);
                if error.leaves_others() {
                    self.delete_stale_udp(extent, &dirty);
                }
            }
        }
    }

    fn render(&mut self, extent: SyncExtent, dirty: &Dirty) -> Result<usize, RenderError> {
        match extent {
            SyncExtent::Partial if dirty.is_empty() => Ok(0),
            SyncExtent::Partial => self.renderer.render(self.model.snapshot(), dirty),
            SyncExtent::Full => {
                let is_old = |at: Instant| at.elapsed() >= WHOLE_READING;
                if self.last_whole_reading.is_none_or(is_old) {
                    self.renderer.distrust();
                    self.last_whole_reading = Some(Instant::now());
                }
                self.renderer.observe()?;
                self.renderer.render(self.model.snapshot(), &Dirty::everything())
            }
        }
    }

    /// After all else: traffic to come needs the rules, and only flows of old this. A failure is no reason to program the
    /// rules again.
    fn delete_stale_udp(&mut self, extent: SyncExtent, dirty: &Dirty) {
        let everything = Dirty::everything();
        let dirty = if extent == SyncExtent::Full { &everything } else { dirty };
        match self.renderer.delete_stale_udp(self.model.snapshot(), dirty) {
            Ok(forgotten) => {
                for forgotten in forgotten {
                    self.outputs.metrics.conntrack_cleaned(forgotten);
                }
                self.last_stale_udp_error = None;
            }
            Err(error) => {
                let message = with_causes(&error);
                if self.last_stale_udp_error.as_ref() != Some(&message) {
                    tracing::warn!(error = message, "UDP senders may go on to endpoints that left");
                }
                self.last_stale_udp_error = Some(message);
            }
        }
    }

    fn succeeded(&mut self, started: Instant, extent: SyncExtent, dirty: &Dirty, operations: usize) {
        let now = Instant::now();
        let took = now - started;
        // Changes can be made while something else still fails, which only a look at everything tells to be over.
        let was_failing = extent == SyncExtent::Full || !self.pace.is_partial();
        let was_failing = was_failing && self.nothing_fails();
        let is_first = !self.outputs.health.is_programmed();
        self.pace.succeeded(started, extent, dirty.is_empty());
        self.report(extent, took, operations);
        if was_failing {
            tracing::info!("the kernel has everything again");
        } else if extent == SyncExtent::Full && !is_first && dirty.is_empty() && operations > 0 {
            self.outputs.metrics.drift_repaired(operations);
            tracing::warn!(operations, "the kernel held something else than it should; repaired");
        }
        if operations > 0 || is_first {
            self.log_sync(now, took, operations);
        }
    }

    /// Whether what failed may be possible now that something went.
    fn may_have_made_room(&self, dirty: &Dirty) -> bool {
        let goes = |key| !self.model.snapshot().ports.contains_key(key);
        self.pace.is_partial() && dirty.ports.iter().any(goes)
    }
}
