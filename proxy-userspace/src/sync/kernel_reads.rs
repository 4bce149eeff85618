//! When the renderer reads the kernel.

use std::time::Duration;

use tokio::time::Instant;

use crate::dataplane::{RenderError, Renderer};

/// How often modes that otherwise only check the kernel every `syncPeriod` read all of it:
/// upstream's `FullSyncPeriod`.
pub(super) const FULL_READ_PERIOD: Duration = Duration::from_hours(1);

/// How long the first sync relies on what was read of the kernel before it.
const READ_AHEAD_LIMIT: Duration = Duration::from_secs(5);

/// The times of the reads.
#[derive(Debug, Default)]
pub(super) struct KernelReads {
    last_full: Option<Instant>,
    /// Before the first sync.
    ahead: Option<Instant>,
}

impl KernelReads {
    /// Reads the kernel while the objects are on their way. If that fails, the first sync reads it,
    /// and reports the error. An error about one IP family is reported by the first sync too, which
    /// leaves the family to the retry that follows.
    pub(super) fn read_ahead(&mut self, renderer: &mut dyn Renderer) {
        self.ahead = renderer.observe().is_ok().then(Instant::now);
    }

    /// Forgets what was read ahead: somebody else has changed it.
    pub(super) const fn distrust(&mut self) {
        self.ahead = None;
    }

    /// Reads the kernel for a sync of everything.
    pub(super) fn read(&mut self, renderer: &mut dyn Renderer) -> Result<(), RenderError> {
        if let Some(at) = self.ahead.take().filter(|at| at.elapsed() < READ_AHEAD_LIMIT) {
            self.last_full = Some(at);
            return Ok(());
        }
        let is_old = |at: Instant| at.elapsed() >= FULL_READ_PERIOD;
        if self.last_full.is_none_or(is_old) {
            renderer.invalidate();
            self.last_full = Some(Instant::now());
        }
        renderer.observe()
    }
}
