//! When the renderer reads the kernel.

use std::{panic, thread, time::Duration};

use tokio::{sync::mpsc, time::Instant};

use super::{SyncLoop, apply};
use crate::{
    dataplane::{RenderError, Renderer},
    model::WatchEvent,
};

/// How often modes that otherwise only check the kernel every `syncPeriod` read all of it:
/// upstream's `FullSyncPeriod`.
pub(super) const FULL_READ_PERIOD: Duration = Duration::from_hours(1);

/// How long the first sync relies on what was read of the kernel before it.
const READ_AHEAD_LIMIT: Duration = Duration::from_secs(5);

/// How often the sync loop looks for events while the kernel is read. An event has many objects, so
/// that a short pause costs little.
const EVENT_POLL: Duration = Duration::from_millis(1);

/// The times of the reads.
#[derive(Debug, Default)]
pub(super) struct KernelReads {
    last_full: Option<Instant>,
    /// Before the first sync.
    ahead: Option<Instant>,
}

impl SyncLoop {
    /// Reads the kernel, and takes in events meanwhile.
    pub(super) fn read_ahead(&mut self, events: &mut mpsc::Receiver<WatchEvent>) {
        let Self { kernel_reads, renderer, model, outputs, .. } = self;
        let mut is_relevant = false;
        kernel_reads.read_ahead(&mut **renderer, || {
            let event = events.try_recv().ok().map(|event| apply(model, &outputs.metrics, event));
            is_relevant |= event == Some(true);
            event.is_some()
        });
        if is_relevant {
            self.queue();
        }
    }
}

impl KernelReads {
    /// Reads the kernel on a thread of its own while the objects are on their way. Meanwhile calls
    /// `take_event`, which returns false if there is none.
    ///
    /// If the read fails, or there is no thread for it, the first sync reads the kernel and reports
    /// the error. An error about one IP family is reported by the first sync too, which leaves the
    /// family to the retry that follows.
    fn read_ahead(&mut self, renderer: &mut dyn Renderer, mut take_event: impl FnMut() -> bool) {
        let caller = thread::current();
        let read = || {
            let is_read = renderer.observe().is_ok();
            caller.unpark();
            is_read
        };
        let is_read = thread::scope(|scope| {
            let reader = thread::Builder::new().name("shunt-reader".into()).spawn_scoped(scope, read).ok()?;
            while !reader.is_finished() {
                if !take_event() {
                    thread::park_timeout(EVENT_POLL);
                }
            }
            Some(reader.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
        });
        self.ahead = is_read.unwrap_or_default().then(Instant::now);
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
