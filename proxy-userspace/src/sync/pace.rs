//! When to act: at once when idle, together under load, later and later while failing, and now and then regardless.

use std::time::Duration;

use tokio::time::Instant;

use super::SyncPeriods;
use crate::metrics::SyncExtent;

/// Syncs that may follow each other at once after a pause, as with upstream's runner: a new Service and its endpoints are
/// two changes, and not yet load.
const BURST: u32 = 2;
/// The first pause after a failure; each further one is twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The longest pause after a failure, unless `syncPeriod` is shorter.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// The least time from one reading of the whole kernel to one that somebody else's change asks for.
const LEAST_BETWEEN_READINGS: Duration = Duration::from_secs(1);
/// Pauses vary by up to this part, so that nodes that failed together do not retry together.
const JITTER: f64 = 0.2;

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing yet.
    Nothing,
    /// What changed.
    Changes,
    /// The whole kernel, from a fresh observation.
    Everything,
}

/// Remembers what was done when.
#[derive(Debug)]
pub(super) struct Pace {
    periods: SyncPeriods,
    /// Something may have changed since the last sync.
    queued: bool,
    /// When the syncs so far are paid for, at one a `minSyncPeriod`.
    paid_at: Option<Instant>,
    last_full: Option<Instant>,
    /// The kernel may hold something else than was written.
    distrusted: bool,
    failures: u32,
    retry_at: Option<Instant>,
    /// When something new may be tried after a failure, sooner than the retry: one Service that cannot be programmed must
    /// not keep the others waiting.
    retry_new_at: Option<Instant>,
}

impl Pace {
    pub(super) fn new(periods: SyncPeriods) -> Self {
        Self {
            periods,
            queued: false,
            paid_at: None,
            last_full: None,
            distrusted: false,
            failures: 0,
            retry_at: None,
            retry_new_at: None,
        }
    }

    /// Other periods, from now on.
    pub(super) fn set_periods(&mut self, periods: SyncPeriods) {
        self.periods = periods;
        // Counted with the old ones.
        self.paid_at = None;
    }

    /// Something may have changed. True if nothing was queued before.
    pub(super) fn queue(&mut self) -> bool {
        !std::mem::replace(&mut self.queued, true)
    }

    /// Somebody changed what the kernel held: it is to be read anew, soon.
    pub(super) fn distrust(&mut self) {
        self.distrusted = true;
    }

    /// See [`SyncPeriods::give_up_after`].
    pub(super) fn give_up_after(&self) -> Option<Duration> {
        self.periods.give_up_after
    }

    /// When everything is due if nothing fails.
    fn reverify_at(&self) -> Option<Instant> {
        let pause = if self.distrusted { LEAST_BETWEEN_READINGS } else { self.periods.sync_period };
        self.last_full.map(|last| last + pause.min(self.periods.sync_period))
    }

    /// When to look again if nothing else happens.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        if self.retry_at.is_some() {
            let new = self.retry_new_at.filter(|_| self.queued);
            return self.retry_at.into_iter().chain(new).min();
        }
        let reverify = self.reverify_at();
        if !self.queued {
            return reverify;
        }
        // `None` is a first sync, which runs as soon as it is queued.
        self.allowed_at().into_iter().chain(reverify).min()
    }

    /// When the next sync may start: so long before the last ones are paid for.
    fn allowed_at(&self) -> Option<Instant> {
        let ahead = self.periods.min_sync_period * (BURST - 1);
        self.paid_at.map(|paid_at| paid_at.checked_sub(ahead).unwrap_or(paid_at))
    }

    pub(super) fn due(&self, now: Instant) -> Due {
        let passed = |time: Instant| time <= now;
        if let Some(retry_at) = self.retry_at {
            let something_new = self.queued && self.retry_new_at.is_none_or(passed);
            return if passed(retry_at) || something_new { Due::Everything } else { Due::Nothing };
        }
        if self.reverify_at().is_some_and(passed) {
            return Due::Everything;
        }
        let allowed = self.allowed_at().is_none_or(passed);
        if self.queued && allowed { Due::Changes } else { Due::Nothing }
    }

    /// A sync that started then reached the kernel, or found `nothing_dirty` and had no need to.
    pub(super) fn succeeded(&mut self, started: Instant, extent: SyncExtent, nothing_dirty: bool) {
        self.queued = false;
        self.failures = 0;
        self.retry_at = None;
        self.retry_new_at = None;
        if extent == SyncExtent::Full {
            self.last_full = Some(started);
            self.distrusted = false;
        }
        // Events that change nothing do not count as load.
        if !nothing_dirty {
            let from = self.paid_at.map_or(started, |paid_at| paid_at.max(started));
            self.paid_at = Some(from + self.periods.min_sync_period);
        }
    }

    /// A sync that started then failed. Returns how long it is to the next try.
    pub(super) fn failed(&mut self, started: Instant) -> Duration {
        let longest = LONGEST_RETRY.min(self.periods.sync_period);
        let pause = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(longest);
        let pause = pause.mul_f64(1.0 - JITTER * fastrand::f64());
        self.failures = self.failures.saturating_add(1);
        self.queued = false;
        self.retry_at = Some(started + pause);
        self.retry_new_at = Some(started + FIRST_RETRY);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pace() -> Pace {
        Pace::new(SyncPeriods {
            min_sync_period: SECOND,
            sync_period: 30 * SECOND,
            give_up_after: None,
            wait_for_node: false,
        })
    }

    #[test]
    fn an_idle_loop_acts_at_once_and_a_busy_one_waits_for_min_sync_period() {
        let start = Instant::now();
        let mut pace = pace();
        assert!(pace.queue() && !pace.queue());
        for _ in 0..BURST {
            pace.queue();
            assert_eq!(pace.due(start), Due::Changes);
            pace.succeeded(start, SyncExtent::Full, false);
        }
        pace.queue();
        assert_eq!(pace.due(start + SECOND / 2), Due::Nothing);
        assert_eq!(pace.wake_at(), Some(start + SECOND));
        assert_eq!(pace.due(start + SECOND), Due::Changes);
        pace.succeeded(start + SECOND, SyncExtent::Partial, false);
        pace.queue();
        assert_eq!(pace.wake_at(), Some(start + 2 * SECOND), "a burst is earned by pausing");
    }

    #[test]
    fn events_that_change_nothing_delay_nothing() {
        let start = Instant::now();
        let mut pace = pace();
        for _ in 0..5 {
            pace.queue();
            pace.succeeded(start, SyncExtent::Partial, true);
        }
        pace.queue();
        assert_eq!(pace.due(start), Due::Changes);
    }

    #[test]
    fn retries_come_later_and_later_up_to_a_bound() {
        let start = Instant::now();
        let mut pace = pace();
        let pauses: Vec<_> = (0..40).map(|_| pace.failed(start)).collect();
        assert!(pauses[0] <= FIRST_RETRY && pauses[0] >= FIRST_RETRY.mul_f64(0.79));
        assert!(pauses[3] > pauses[0] * 4, "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= LONGEST_RETRY));
        assert!(pauses[39] >= LONGEST_RETRY.mul_f64(0.79));
        assert_eq!(pace.due(start + LONGEST_RETRY), Due::Everything);
    }

    #[test]
    fn a_change_after_a_failure_does_not_wait_for_the_retry() {
        let start = Instant::now();
        let mut pace = pace();
        for _ in 0..10 {
            pace.queue();
            pace.failed(start);
        }
        assert_eq!(pace.due(start + FIRST_RETRY), Due::Nothing, "nothing new");
        pace.queue();
        assert_eq!(pace.due(start), Due::Nothing, "not at any rate either");
        assert_eq!(pace.wake_at(), Some(start + FIRST_RETRY));
        assert_eq!(pace.due(start + FIRST_RETRY), Due::Everything);
    }

    #[test]
    fn what_somebody_else_changed_is_looked_at_soon_and_not_all_the_time() {
        let start = Instant::now();
        let mut pace = pace();
        pace.succeeded(start, SyncExtent::Full, false);
        pace.distrust();
        assert_eq!(pace.due(start), Due::Nothing);
        assert_eq!(pace.wake_at(), Some(start + LEAST_BETWEEN_READINGS));
        assert_eq!(pace.due(start + LEAST_BETWEEN_READINGS), Due::Everything);
        pace.succeeded(start + SECOND, SyncExtent::Full, true);
        assert_eq!(pace.wake_at(), Some(start + 31 * SECOND));
    }

    #[test]
    fn everything_is_due_each_sync_period() {
        let start = Instant::now();
        let mut pace = pace();
        pace.succeeded(start, SyncExtent::Full, false);
        assert_eq!(pace.wake_at(), Some(start + 30 * SECOND));
        assert_eq!(pace.due(start + 29 * SECOND), Due::Nothing);
        assert_eq!(pace.due(start + 30 * SECOND), Due::Everything);
    }
}
