//! How the loop treats a sync that failed: reports, retries, and when it gives up the dataplane.

use std::time::Duration;

use tokio::time::Instant;

use super::{SyncError, SyncLoop};
use crate::{
    causes::with_causes,
    dataplane::{FailureScope, RenderError},
    health::SyncTask,
    metrics::SyncExtent,
    model::{Dirty, IpFamily},
    node::NodeEvents,
};

/// A failure that ends earlier appears in the log and in metrics only.
const REPORT_AFTER: Duration = Duration::from_mins(1);

/// The failure that lasts, if any.
#[derive(Debug, Default)]
pub(super) struct Failure {
    /// The family that failed, if the other one did not.
    pub(super) family: Option<IpFamily>,
    /// When the whole dataplane, not only a part of it, began to fail.
    since: Option<Instant>,
    /// A sync with changes of objects or of the node failed, or left out service ports. What a
    /// retry writes is then not only the repair of what somebody else changed.
    has_changes: bool,
    events: FailureEvents,
}

impl SyncLoop {
    /// Returns true if a sync that succeeds made only changes that repair what somebody else
    /// changed. A sync with the same repair may have failed before.
    pub(super) fn is_repair(&self, extent: SyncExtent, dirty: &Dirty) -> bool {
        extent == SyncExtent::Full && dirty.is_empty() && !self.failure.has_changes
    }

    /// Records that nothing fails. Returns true if something failed until now.
    pub(super) fn end_failure(&mut self) -> bool {
        self.end_node_failure();
        self.outputs.status.task_succeeded(SyncTask::Program).is_some()
    }

    /// Records that nothing fails but service ports that are left out.
    fn end_node_failure(&mut self) {
        self.outputs.health.no_part_failed();
        self.failure.since = None;
        self.failure.family = None;
        self.failure.has_changes = false;
        self.failure.events.recovered(&self.outputs.events);
    }

    /// Retries what failed if a removal may have made room for it.
    pub(super) fn retry_if_there_may_be_room(&mut self, now: Instant, dirty: &Dirty) {
        let is_removed = |key| !self.model.snapshot().ports.contains_key(key);
        if self.schedule.is_partial() && dirty.ports.iter().any(is_removed) {
            self.schedule.retry_soon(now);
        }
    }

    /// Records a sync that left out service ports and made all other changes. It counts as a sync.
    pub(super) fn left_ports_out(
        &mut self,
        started: Instant,
        extent: SyncExtent,
        nothing_dirty: bool,
        error: &RenderError,
    ) {
        let took = Instant::now() - started;
        if self.may_end_failure(extent) {
            self.end_node_failure();
        }
        // A retry that finds room for them repairs nothing.
        self.failure.has_changes = true;
        let is_first = !self.outputs.health.is_programmed();
        let RenderError::Apply { operations, .. } = error else { return };
        let retry_in = self.schedule.partly_failed(started, extent, nothing_dirty, true);
        let error = with_causes(error);
        tracing::debug!(error, ?retry_in, "service ports are left out");
        self.outputs.status.task_failed(SyncTask::Program, error);
        self.report(*operations);
        if *operations > 0 || is_first {
            self.log_sync(Instant::now(), took, *operations);
        }
    }

    /// Returns true if the success of a sync shows that nothing fails any more. A partial sync can
    /// succeed while another part still fails.
    pub(super) fn may_end_failure(&self, extent: SyncExtent) -> bool {
        extent == SyncExtent::Full || !self.schedule.is_partial()
    }

    /// Returns an error if the dataplane has failed for too long.
    fn check_broken(&mut self, now: Instant, error: &RenderError, message: &str) -> Result<(), SyncError> {
        if error.scope() == FailureScope::Node {
            self.failure.since = None;
            return Ok(());
        }
        let after = now - *self.failure.since.get_or_insert(now);
        if self.schedule.give_up_after().is_some_and(|limit| after >= limit) {
            return Err(SyncError::Broken { after, error: message.to_owned() });
        }
        Ok(())
    }

    /// Reports the failure and schedules a retry. A family that did not fail is programmed as
    /// usual, and the failed one is retried with backoff.
    pub(super) fn failed(
        &mut self,
        started: Instant,
        extent: SyncExtent,
        nothing_dirty: bool,
        error: &RenderError,
    ) -> Result<(), SyncError> {
        let message = with_causes(error);
        // During a shutdown no command is started. A failure then says nothing about the dataplane.
        if self.shutdown.is_cancelled() {
            tracing::debug!(error = message, "the last sync before the shutdown is incomplete");
            return Ok(());
        }
        let scope = error.scope();
        let family = if let FailureScope::Family(family) = scope { Some(family) } else { None };
        self.failure.family = family;
        self.failure.has_changes |= !nothing_dirty;
        let failed = family.map_or(IpFamily::ALL.to_vec(), |family| vec![family]);
        self.outputs.metrics.sync_failed(&failed);
        match scope {
            FailureScope::Family(_) => {
                self.outputs.health.queued(&failed);
                self.report(0);
            }
            FailureScope::Node | FailureScope::ServicePorts => {
                self.outputs.health.part_failed();
                self.report_latency();
                self.report_served();
            }
            FailureScope::Everything => {
                // As with upstream, these changes do not count later.
                self.trigger_times.clear();
                self.outputs.health.queued(&failed);
            }
        }
        self.failure.events.failed(started, &message, &self.outputs.events);
        let retry_in = if scope.is_limited() {
            self.schedule.partly_failed(started, extent, nothing_dirty, false)
        } else {
            self.schedule.failed(Instant::now())
        };
        let before = self.outputs.status.task_failed(SyncTask::Program, message.clone());
        if before.as_ref() == Some(&message) {
            tracing::debug!(error = message, ?retry_in, "cannot program the kernel: the same error again");
        } else {
            tracing::error!(error = message, ?retry_in, "cannot program the kernel; shunt will try again");
        }
        self.check_broken(started, error, &message)
    }
}

/// Reports a lasting failure and its end as Kubernetes Events.
#[derive(Debug, Default)]
pub(super) struct FailureEvents {
    since: Option<Instant>,
    is_reported: bool,
}

impl FailureEvents {
    /// Records that programming failed at this time.
    pub(super) fn failed(&mut self, now: Instant, error: &str, events: &NodeEvents) {
        let since = *self.since.get_or_insert(now);
        if now - since >= REPORT_AFTER && !std::mem::replace(&mut self.is_reported, true) {
            let seconds = (now - since).as_secs();
            events.warning(
                "FailedToProgram",
                format!(
                    "programming the kernel has failed for {seconds} s: {error}; Services keep their last state \
                     and shunt tries again"
                ),
            );
        }
    }

    /// Records that nothing fails any more.
    pub(super) fn recovered(&mut self, events: &NodeEvents) {
        self.since = None;
        if std::mem::take(&mut self.is_reported) {
            events.normal("Programmed", "programming the kernel works again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_failure_and_its_end_are_reported_once() {
        let (events, mut received) = NodeEvents::channel();
        let mut failure = FailureEvents::default();
        let start = Instant::now();
        let mut fail = |failure: &mut FailureEvents, seconds| {
            failure.failed(start + Duration::from_secs(seconds), "why", &events);
            received.try_recv().map(|event| (event.is_warning, event.reason)).ok()
        };
        assert_eq!(fail(&mut failure, 0), None);
        assert_eq!(fail(&mut failure, 59), None);
        assert_eq!(fail(&mut failure, 60), Some((true, "FailedToProgram")));
        assert_eq!(fail(&mut failure, 90), None);
        failure.recovered(&events);
        failure.recovered(&events);
        assert_eq!(received.try_recv().map(|event| event.reason), Ok("Programmed"));
        assert!(received.try_recv().is_err());
    }
}
