//! Compares the maps that userspace writes with what they must hold, in a thread of its own, so
//! that no change waits for it.
//!
//! The thread reads all entries and adds up their digest, which the state of the sync thread has as
//! well. A plan that is applied meanwhile makes the result useless, and the thread reads again. If
//! the maps differ, the sync thread is notified: it reads them itself and repairs them.

use std::{
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, SyncSender},
    },
    thread,
    time::Duration,
};

use super::{
    super::{OnDrift, plan::digest::Digest},
    entries::EntryReader,
    prefilter::{Prefilter, PrefilterBits},
    usage::MapUsage,
};
use crate::{
    dataplane::lock,
    kernel::{KernelError, spawn},
};

/// How often the maps are read if plans are applied meanwhile.
const ATTEMPTS: usize = 10;
/// The pause between these attempts. A plan takes some milliseconds.
const PAUSE: Duration = Duration::from_millis(50);

/// What the maps must hold, and whether they do.
#[derive(Debug, Default)]
struct Expectation {
    /// The digest of all entries; `None` while a plan is applied.
    digest: Option<Digest>,
    /// The number of plans that were applied.
    plans: u64,
    /// The maps were found to differ, or could not be compared.
    is_doubtful: bool,
}

/// A thread that compares the maps. It ends when this is dropped.
pub(crate) struct MapChecker {
    expectation: Arc<Mutex<Expectation>>,
    wake: SyncSender<()>,
}

impl MapChecker {
    /// Starts the thread. It calls `on_drift` if the maps differ.
    pub(crate) fn start(
        entries: EntryReader,
        prefilter: Arc<Mutex<Prefilter>>,
        usage: Arc<MapUsage>,
        on_drift: OnDrift,
    ) -> Result<Self, KernelError> {
        let expectation = Arc::new(Mutex::new(Expectation::default()));
        let (wake, woken) = mpsc::sync_channel(1);
        let mut check = Check {
            expectation: Arc::clone(&expectation),
            entries,
            prefilter,
            usage,
            looked_after: None,
            on_drift,
        };
        spawn("map-check", move || check.run(&woken))?;
        Ok(Self { expectation, wake })
    }

    /// Records that a plan begins to change the maps.
    pub(crate) fn begin_plan(&self) {
        let mut expectation = lock(&self.expectation);
        expectation.digest = None;
        expectation.plans += 1;
    }

    /// Records what the maps hold after a plan.
    pub(crate) fn end_plan(&self, digest: Digest) {
        lock(&self.expectation).digest = Some(digest);
    }

    /// Returns true if the last comparison was not successful. The caller then reads the maps.
    pub(crate) fn take_doubt(&self) -> bool {
        std::mem::take(&mut lock(&self.expectation).is_doubtful)
    }

    /// Starts a comparison.
    pub(crate) fn start_comparison(&self) {
        // If the channel is full, a comparison is due already. The thread lives as long as this.
        let _ = self.wake.try_send(());
    }
}

/// The work of the thread.
struct Check {
    expectation: Arc<Mutex<Expectation>>,
    entries: EntryReader,
    prefilter: Arc<Mutex<Prefilter>>,
    usage: Arc<MapUsage>,
    /// The number of plans before the last look at the prefilter.
    looked_after: Option<u64>,
    on_drift: OnDrift,
}

impl Check {
    fn run(&mut self, woken: &Receiver<()>) {
        while woken.recv().is_ok() {
            match self.compare_between_plans() {
                Ok(Some(true)) => {}
                Ok(Some(false)) => {
                    tracing::debug!("the maps differ from what was written");
                    self.doubt();
                    (self.on_drift)();
                }
                // The next full sync reads the maps on its own thread.
                Ok(None) => self.doubt(),
                Err(error) => {
                    tracing::debug!(%error, "cannot compare the maps");
                    self.doubt();
                }
            }
        }
    }

    fn doubt(&self) {
        lock(&self.expectation).is_doubtful = true;
    }

    /// Returns whether the maps hold what they must. `None` if plans were applied during each
    /// attempt.
    fn compare_between_plans(&mut self) -> Result<Option<bool>, KernelError> {
        for _ in 0..ATTEMPTS {
            if let Some(is_same) = self.compare()? {
                return Ok(Some(is_same));
            }
            thread::sleep(PAUSE);
        }
        Ok(None)
    }

    /// Compares once. If the maps are as they must be, also clears bits of the prefilter that
    /// nothing needs.
    fn compare(&mut self) -> Result<Option<bool>, KernelError> {
        let before = lock(&self.expectation).plans;
        let mut digest = Digest::default();
        let mut needed = self.looks_at_prefilter(before);
        self.entries.read(|entry| {
            digest.add(&entry);
            if let Some(needed) = &mut needed {
                entry.prefilter_item().into_iter().for_each(|item| needed.insert(item));
            }
        })?;
        // A plan waits while bits are cleared, which takes much less than a millisecond.
        let expectation = lock(&self.expectation);
        let Some(expected) = expectation.digest.filter(|_| expectation.plans == before) else {
            return Ok(None);
        };
        let is_same = digest == expected;
        if let Some(needed) = needed.filter(|_| is_same) {
            lock(&self.prefilter).clear_stale(&needed, &self.usage);
            self.looked_after = Some(before);
        }
        Ok(Some(is_same))
    }

    /// Returns room for the bits that the maps need, unless no bit can have become stale: only
    /// plans remove entries from the maps.
    fn looks_at_prefilter(&self, plans: u64) -> Option<PrefilterBits> {
        let prefilter = lock(&self.prefilter);
        let is_clean = self.looked_after == Some(plans) && prefilter.is_clean();
        (!is_clean).then(|| PrefilterBits::new(prefilter.words()))
    }
}
