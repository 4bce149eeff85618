//! What becomes of a sync that failed: who is told, what goes on, and when it is given up.

use tokio::time::Instant;

use super::{SyncError, SyncLoop};
use crate::{causes::with_causes, dataplane::RenderError, metrics::SyncExtent, model::IpFamily};

impl SyncLoop {
    /// Whether anything failed until now.
    pub(super) fn nothing_fails(&mut self) -> bool {
        self.outputs.health.set_incomplete(false);
        self.failing_since = None;
        self.failing_family = None;
        self.lasting.is_over(&self.outputs.events);
        self.last_error.take().is_some()
    }

    fn give_up_if_broken(&mut self, now: Instant, error: &RenderError, message: &str) {
        if error.is_partial() {
            self.failing_since = None;
            return;
        }
        let after = now - *self.failing_since.get_or_insert(now);
        if self.pace.give_up_after().is_some_and(|limit| after >= limit) {
            self.broken = Some(SyncError::Broken { after, error: message.to_owned() });
        }
    }

    /// The family that did not fail goes on: what changes of it is programmed at once, and the other is tried later and later.
    pub(super) fn failed(&mut self, started: Instant, extent: SyncExtent, error: &RenderError) {
        if error.is_by_stopping() {
            tracing::debug!(error = with_causes(error), "not everything is programmed before the end");
            return;
        }
        self.failing_family = error.family();
        match self.failing_family {
            Some(family) => {
                self.outputs.metrics.sync_failed(&[family]);
                self.outputs.health.queued(&[family]);
                self.report(extent, Instant::now() - started, 0);
            }
            None if error.is_partial() => {
                self.outputs.metrics.sync_failed(&IpFamily::ALL);
                self.outputs.health.set_incomplete(true);
                self.report_served();
            }
            None => {
                self.outputs.metrics.sync_failed(&IpFamily::ALL);
                self.outputs.health.queued(&IpFamily::ALL);
            }
        }
        let message = with_causes(error);
        self.give_up_if_broken(started, error, &message);
        self.lasting.goes_on(started, &message, &self.outputs.events);
        let retry_in = self.pace.failed(started, error.leaves_others());
        if self.last_error.as_ref() == Some(&message) {
            tracing::debug!(error = message, ?retry_in, "still cannot program the kernel");
        } else {
            tracing::error!(error = message, ?retry_in, "cannot program the kernel");
        }
        self.last_error = Some(message);
    }
}
