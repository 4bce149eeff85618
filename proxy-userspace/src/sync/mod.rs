//! The sync loop: takes in events and keeps the kernel in the state that they require.
//!
//! An idle loop programs a change at once. Under load it combines changes and syncs at most once a
//! `minSyncPeriod`. After a failure, and every `syncPeriod`, it reads the kernel again and compares
//! it with the whole Snapshot. The loop and the dataplane run on one task: there is no other queue
//! between an event and the kernel.
#![forbid(unsafe_code)]

mod backstop_report;
mod channels;
mod conflicts;
mod displaced;
mod failure;
mod inspection;
mod kernel_reads;
mod left_out;
mod left_out_ports;
mod no_local_endpoints;
mod node_wait;
mod report;
mod schedule;
mod settings;
mod takeover_stage;

#[cfg(test)]
mod tests;

use std::time::Duration;

use futures::FutureExt as _;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

pub use self::{
    channels::{Inputs, Outputs},
    inspection::{Inspected, Inspector, NoAnswer, Request, TraceEnd},
    node_wait::PodCidrsError,
    settings::{SyncPeriods, SyncSettings},
    takeover_stage::TakeoverStage,
};
use self::{
    conflicts::Conflicts,
    failure::Failure,
    inspection::ProgrammedTimes,
    kernel_reads::KernelReads,
    left_out_ports::LeftOutPorts,
    no_local_endpoints::NoLocalEndpoints,
    node_wait::NodeWait,
    report::{now, unix_now},
    schedule::Schedule,
};
use crate::{
    causes::with_causes,
    dataplane::{FailureScope, Mode, RenderError, Renderer, ebpf::TracingPrograms},
    health::SyncTask,
    metrics::{Metrics, SyncExtent, WatchedKind},
    model::{Dirty, IpFamily, Model, NodeFacts, TriggerTime, WatchEvent},
};

/// The most events taken in before the next sync. A source that never pauses cannot delay it.
const MAX_EVENTS_PER_TURN: usize = 4096;

/// The reason why the loop ended, other than a shutdown.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Nothing can send events any more.
    #[error("the source of Services, EndpointSlices and Nodes has ended")]
    SourceEnded,
    /// Nothing can report the node's addresses any more.
    #[error("the source of the node's addresses has ended")]
    NodeFactsEnded,
    /// The pod CIDRs that the rules depend on are missing or have changed.
    #[error(transparent)]
    PodCidrs(#[from] PodCidrsError),
    /// The dataplane failed for longer than [`SyncPeriods::give_up_after`].
    #[error("programming the kernel has failed for {} s: {error}", after.as_secs())]
    Broken {
        /// How long it failed.
        after: Duration,
        /// The error of the last attempt.
        error: String,
    },
}

/// The sync loop with its model and its dataplane.
pub struct SyncLoop {
    model: Model,
    renderer: Box<dyn Renderer>,
    outputs: Outputs,
    shutdown: CancellationToken,
    schedule: Schedule,
    no_local_endpoints: NoLocalEndpoints,
    conflicts: Conflicts,
    left_out_ports: LeftOutPorts,
    programmed: ProgrammedTimes,
    node_wait: NodeWait,
    failure: Failure,
    kernel_reads: KernelReads,
    trigger_times: Vec<TriggerTime>,
    last_logged: Option<Instant>,
    exchanges_programs: bool,
}

impl SyncLoop {
    /// Creates a loop that has programmed nothing yet. It ends when `shutdown` is cancelled.
    pub fn new(
        SyncSettings { model, periods }: SyncSettings,
        renderer: Box<dyn Renderer>,
        outputs: Outputs,
        shutdown: CancellationToken,
    ) -> Self {
        let (node_wait, left_out_ports) =
            (NodeWait::new(&model, periods.wait_for_node), LeftOutPorts::new(model.node_name.to_string()));
        let mut model = Model::new(model);
        model.ignore_trigger_times_until(now());
        Self {
            node_wait,
            left_out_ports,
            programmed: ProgrammedTimes::default(),
            model,
            renderer,
            outputs,
            shutdown,
            schedule: Schedule::new(periods),
            no_local_endpoints: NoLocalEndpoints::default(),
            conflicts: Conflicts::default(),
            failure: Failure::default(),
            kernel_reads: KernelReads::default(),
            trigger_times: Vec::new(),
            last_logged: None,
            exchanges_programs: false,
        }
    }

    /// Returns the dataplane, for a cleanup.
    pub fn into_renderer(self) -> Box<dyn Renderer> {
        self.renderer
    }

    /// Runs until the shutdown. The kernel then keeps its state.
    pub async fn run(
        &mut self,
        mut inputs: Inputs,
        takeover: &mut dyn TakeoverStage,
    ) -> Result<(), SyncError> {
        let shutdown = self.shutdown.clone();
        self.take_facts(&mut inputs.node_facts);
        self.read_ahead(&mut inputs.events);
        if inputs.drift.notified().now_or_never().is_some() {
            self.distrust_kernel();
        }
        if !shutdown.is_cancelled() {
            self.sync_if_due(takeover)?;
        }
        loop {
            let wake = self.schedule.wake_at().into_iter().chain(self.node_wait.wake_at()).min();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => {
                    // If that fails, programs that trace stay until the next start.
                    let _ = self.exchange_programs(None, takeover);
                    return Ok(());
                }
                event = inputs.events.recv() => {
                    self.take_events(event.ok_or(SyncError::SourceEnded)?, &mut inputs, takeover)?;
                }
                changed = inputs.node_facts.changed() => {
                    changed.map_err(|_| SyncError::NodeFactsEnded)?;
                    self.take_facts(&mut inputs.node_facts);
                }
                // Without a sender the settings stay the same.
                Ok(()) = inputs.settings.changed() => self.take_settings(&mut inputs.settings),
                () = inputs.drift.notified() => self.distrust_kernel(),
                Some(request) = inputs.requests.recv() => {
                    if !self.answer(request, takeover)? {
                        continue;
                    }
                }
                () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
            self.sync_if_due(takeover)?;
        }
    }

    /// Records that somebody else changed what shunt wrote into the kernel.
    fn distrust_kernel(&mut self) {
        self.schedule.suspect_drift();
        self.kernel_reads.distrust();
        self.renderer.distrust();
    }

    fn sync_if_due(&mut self, takeover: &mut dyn TakeoverStage) -> Result<(), SyncError> {
        if self.node_wait.check(&self.model, Instant::now())? {
            self.queue();
        }
        let now = Instant::now();
        self.schedule.due(now).map_or(Ok(()), |extent| self.sync(now, extent, takeover))
    }

    fn inspected(&self) -> Inspected<'_> {
        Inspected {
            model: &self.model,
            mode: self.outputs.status.mode(),
            backstop: self.renderer.backstop(),
            left_out: &self.left_out_ports,
            programmed: &self.programmed,
            renderer: &*self.renderer,
        }
    }

    /// Exchanges the programs for others that trace, or back. Returns false if nothing changes. If
    /// attaching them fails, the next sync tries again.
    fn exchange_programs(
        &mut self,
        programs: Option<TracingPrograms>,
        takeover: &mut dyn TakeoverStage,
    ) -> Result<bool, SyncError> {
        self.exchanges_programs = self.renderer.trace(programs);
        if self.exchanges_programs {
            self.sync(Instant::now(), SyncExtent::Partial, takeover)?;
        }
        Ok(std::mem::take(&mut self.exchanges_programs))
    }

    /// Takes in an event and those that wait behind it, and once what waits beside them: events
    /// that never pause must not keep out the rest.
    fn take_events(
        &mut self,
        event: WatchEvent,
        inputs: &mut Inputs,
        takeover: &mut dyn TakeoverStage,
    ) -> Result<(), SyncError> {
        self.take_event(event);
        self.take_queued_events(&mut inputs.events);
        // The loop finds out itself that a sender is gone.
        if inputs.node_facts.has_changed().unwrap_or(false) {
            self.take_facts(&mut inputs.node_facts);
        }
        if inputs.settings.has_changed().unwrap_or(false) {
            self.take_settings(&mut inputs.settings);
        }
        if inputs.drift.notified().now_or_never().is_some() {
            self.distrust_kernel();
        }
        if let Ok(request) = inputs.requests.try_recv() {
            self.answer(request, takeover)?;
        }
        Ok(())
    }

    /// Answers a request. Returns true if it may have changed something.
    fn answer(&mut self, request: Request, takeover: &mut dyn TakeoverStage) -> Result<bool, SyncError> {
        match request {
            Request::Read(inspection) => {
                inspection(&self.inspected());
                Ok(false)
            }
            Request::Trace(programs, reply) => {
                // Nobody waits for the answer if the asker is gone.
                let _ = reply.send(self.exchange_programs(programs, takeover)?);
                Ok(true)
            }
        }
    }

    fn take_settings(&mut self, settings: &mut watch::Receiver<SyncSettings>) {
        let SyncSettings { model, periods } = settings.borrow_and_update().clone();
        self.model.set_settings(model);
        self.schedule.set_periods(periods);
        self.queue();
    }

    fn take_queued_events(&mut self, events: &mut mpsc::Receiver<WatchEvent>) {
        for _ in 0..MAX_EVENTS_PER_TURN {
            let Ok(event) = events.try_recv() else { break };
            self.take_event(event);
        }
    }

    fn take_event(&mut self, event: WatchEvent) {
        if apply(&mut self.model, &self.outputs.metrics, event) {
            self.queue();
        }
    }

    fn take_facts(&mut self, facts: &mut watch::Receiver<Option<NodeFacts>>) {
        if let Some(facts) = facts.borrow_and_update().clone() {
            self.model.set_node_facts(facts);
            self.queue();
        }
    }

    /// Queues a sync. Before all objects are listed, a sync cannot be late and is not queued.
    fn queue(&mut self) {
        if self.model.is_synced() && self.node_wait.is_over && self.schedule.queue() {
            self.outputs.health.queued(&IpFamily::ALL);
            self.outputs.metrics.sync_queued(unix_now().as_secs_f64());
        }
    }

    fn sync(
        &mut self,
        started: Instant,
        due: SyncExtent,
        takeover: &mut dyn TakeoverStage,
    ) -> Result<(), SyncError> {
        let mut dirty = self.model.resolve();
        dirty.node |= self.exchanges_programs;
        if dirty.node && self.outputs.health.is_programmed() {
            // The sync may fail or take long, and the Node may be on its way out.
            self.report_node();
        }
        // Updated here, not only after a success: the model reports each dirty port once.
        self.no_local_endpoints.update(self.model.snapshot(), &dirty);
        self.conflicts.update(self.model.conflicts());
        self.trigger_times.extend(self.model.take_trigger_times());
        self.retry_if_there_may_be_room(started, &dirty);
        let is_full = dirty.all
            || due == SyncExtent::Full
            || self.schedule.fails_as_a_whole()
            || self.schedule.due(started) == Some(SyncExtent::Full);
        let extent = if is_full { SyncExtent::Full } else { SyncExtent::Partial };
        let rendered = self.render(extent, &dirty);
        self.outputs.metrics.sync_ended(extent, Instant::now() - started);
        self.report_maps();
        left_out::report(self.renderer.left_out(), &self.outputs);
        displaced::report(self.renderer.displaced(), &self.outputs);
        let scope = rendered.as_ref().err().map(RenderError::scope);
        if scope.is_none_or(FailureScope::is_limited) {
            // Before the takeover, which may remove what served them until now.
            self.left_out_ports.update(self.renderer.left_out_ports(), extent, &dirty, &self.outputs);
        }
        if !self.shutdown.is_cancelled() {
            self.note_programmed(extent, &dirty, scope);
        }
        match rendered {
            Ok(operations) => {
                self.succeeded(started, extent, &dirty, operations);
                self.finish(extent, &dirty, Some(takeover));
                Ok(())
            }
            Err(error) if scope == Some(FailureScope::ServicePorts) && !self.shutdown.is_cancelled() => {
                self.left_ports_out(started, extent, dirty.is_empty(), &error);
                let waits = takeover.waits_for_every_service(self.backstop_mode());
                self.finish(extent, &dirty, (!waits).then_some(takeover));
                Ok(())
            }
            Err(error) => {
                let outcome = self.failed(started, extent, dirty.is_empty(), &error);
                backstop_report::report(self.renderer.backstop().as_ref(), &self.outputs);
                if error.scope().is_limited() {
                    self.delete_stale_udp(extent, &dirty);
                }
                outcome
            }
        }
    }

    /// Takes over from others and removes what is not needed any more, once Services are served.
    fn finish(&mut self, extent: SyncExtent, dirty: &Dirty, takeover: Option<&mut dyn TakeoverStage>) {
        let mut takeover = takeover.filter(|_| extent == SyncExtent::Full);
        if let Some(takeover) = &mut takeover {
            takeover.take_over_connections();
        }
        self.delete_stale_udp(extent, dirty);
        if let Some(takeover) = takeover {
            takeover.remove_others(self.backstop_mode());
        }
        backstop_report::report_errors(&self.renderer.remove_unneeded(), &self.outputs);
        backstop_report::report(self.renderer.backstop().as_ref(), &self.outputs);
    }

    fn backstop_mode(&self) -> Option<Mode> {
        self.renderer.backstop().map(|backstop| backstop.mode)
    }

    fn render(&mut self, extent: SyncExtent, dirty: &Dirty) -> Result<usize, RenderError> {
        match extent {
            SyncExtent::Partial if dirty.is_empty() => Ok(0),
            SyncExtent::Partial => self.renderer.render(self.model.snapshot(), dirty),
            SyncExtent::Full => {
                self.kernel_reads.read(&mut *self.renderer)?;
                let is_current = self.renderer.is_current() && !dirty.all;
                let everything =
                    if is_current { Dirty { node: true, ..dirty.clone() } } else { Dirty::everything() };
                self.renderer.render(self.model.snapshot(), &everything)
            }
        }
    }

    /// Runs after the rules are in place: new traffic needs the rules, and only old flows need
    /// this. A failure is no reason to program the rules again.
    fn delete_stale_udp(&mut self, extent: SyncExtent, dirty: &Dirty) {
        let everything = Dirty::everything();
        let dirty = if extent == SyncExtent::Full { &everything } else { dirty };
        match self.renderer.delete_stale_udp(self.model.snapshot(), dirty) {
            Ok(deleted) => {
                for deleted in deleted {
                    self.outputs.metrics.conntrack_cleaned(deleted);
                }
                self.outputs.status.task_succeeded(SyncTask::DeleteStaleUdp);
            }
            Err(error) => {
                let error = with_causes(&error);
                let before = self.outputs.status.task_failed(SyncTask::DeleteStaleUdp, error.clone());
                if before.as_ref() != Some(&error) {
                    tracing::warn!(
                        error,
                        "cannot delete stale UDP entries of conntrack: UDP clients may keep sending to removed \
                         endpoints; the next sync tries again"
                    );
                }
            }
        }
    }
}

/// Applies an event. Returns true if it may change something for this node.
fn apply(model: &mut Model, metrics: &Metrics, event: WatchEvent) -> bool {
    let kind = match event {
        WatchEvent::Services(_) | WatchEvent::ServicePart(_) => Some(WatchedKind::Service),
        WatchEvent::EndpointSlices(_) | WatchEvent::EndpointSlicePart(_) => Some(WatchedKind::EndpointSlice),
        WatchEvent::Nodes(_) => Some(WatchedKind::Node),
        WatchEvent::ServiceCidrs(_) => None,
    };
    let applied = model.apply(event);
    if let Some(kind) = kind {
        metrics.event_received(kind, applied.objects);
    }
    applied.is_relevant
}
