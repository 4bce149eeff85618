//! When the loop syncs: at once when idle, rarely under load, with backoff after failures.

use std::time::Duration;

use tokio::time::Instant;

use super::SyncPeriods;
use crate::metrics::SyncExtent;

/// How many syncs may follow each other at once after a pause, as with upstream's runner. A new
/// Service and its endpoints are two changes, but not yet load.
const BURST: u32 = 2;
/// The first pause after a failure. Each further pause is twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The longest pause after a failure, unless `syncPeriod` is shorter.
const MAX_RETRY: Duration = Duration::from_secs(10);
/// The least time between two full syncs because removals may have made room for a part that
/// failed.
pub(super) const MIN_ROOM_PERIOD: Duration = Duration::from_secs(1);
/// The least time between two full syncs that drift causes.
const MIN_DRIFT_PERIOD: Duration = Duration::from_secs(1);
/// Pauses are shortened by up to this fraction at random. Nodes that failed together then do not
/// retry together.
const JITTER: f64 = 0.2;

/// The times of past syncs, and what follows from them for the next one.
#[derive(Debug)]
pub(super) struct Schedule {
    periods: SyncPeriods,
    /// Something may have changed since the last sync.
    queued: bool,
    /// When the token bucket is full again. It gains one token per `minSyncPeriod`.
    bucket_full_at: Option<Instant>,
    last_full: Option<Instant>,
    /// The kernel may hold something else than was written.
    drift_suspected: bool,
    failures: u32,
    retry_at: Option<Instant>,
    /// When a new change may be tried after a failure. This is before most retries: one Service
    /// that cannot be programmed must not delay the others.
    retry_new_at: Option<Instant>,
    /// A part failed and the kernel has everything else. Changes to the rest are made as usual, and
    /// the retry is a full sync beside them.
    partial: Option<FailedPart>,
}

/// What failed while the kernel has everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailedPart {
    /// Only service ports, which are left out.
    ServicePorts,
    /// A family, or a part of the node.
    More,
}

impl Schedule {
    pub(super) fn new(periods: SyncPeriods) -> Self {
        Self {
            periods,
            queued: false,
            bucket_full_at: None,
            last_full: None,
            drift_suspected: false,
            failures: 0,
            retry_at: None,
            retry_new_at: None,
            partial: None,
        }
    }

    /// Replaces the periods.
    pub(super) fn set_periods(&mut self, periods: SyncPeriods) {
        self.periods = periods;
        // It was computed from the old period.
        self.bucket_full_at = None;
    }

    /// Records that something may have changed. Returns true if nothing was queued before.
    pub(super) fn queue(&mut self) -> bool {
        !std::mem::replace(&mut self.queued, true)
    }

    /// Asks for a full sync soon, because somebody else changed the kernel.
    pub(super) fn suspect_drift(&mut self) {
        self.drift_suspected = true;
    }

    /// See [`SyncPeriods::give_up_after`].
    pub(super) fn give_up_after(&self) -> Option<Duration> {
        self.periods.give_up_after
    }

    /// When the next full sync is due if nothing fails.
    fn full_at(&self) -> Option<Instant> {
        let pause = if self.drift_suspected { MIN_DRIFT_PERIOD } else { self.periods.sync_period };
        self.last_full.map(|last| last + pause.min(self.periods.sync_period))
    }

    /// When to check again if nothing else happens.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        if self.fails_as_a_whole() {
            let new = self.retry_new_at.filter(|_| self.queued);
            return self.retry_at.into_iter().chain(new).min();
        }
        let full = self.full_at().into_iter().chain(self.retry_at).min();
        if !self.queued {
            return full;
        }
        // `None` is the first sync, which runs as soon as it is queued.
        self.allowed_at().into_iter().chain(full).min()
    }

    /// When the next sync may start under load: up to [`BURST`] syncs may run without a pause.
    fn allowed_at(&self) -> Option<Instant> {
        let ahead = self.periods.min_sync_period * (BURST - 1);
        self.bucket_full_at.map(|bucket_full_at| bucket_full_at.checked_sub(ahead).unwrap_or(bucket_full_at))
    }

    /// Returns the sync that is due, if any.
    pub(super) fn due(&self, now: Instant) -> Option<SyncExtent> {
        let passed = |time: Instant| time <= now;
        if let Some(retry_at) = self.retry_at {
            if passed(retry_at) {
                return Some(SyncExtent::Full);
            }
            if self.partial.is_none() {
                let may_try = self.queued && self.retry_new_at.is_none_or(passed);
                return may_try.then_some(SyncExtent::Full);
            }
        }
        if self.full_at().is_some_and(passed) {
            return Some(SyncExtent::Full);
        }
        (self.queued && self.allowed_at().is_none_or(passed)).then_some(SyncExtent::Partial)
    }

    /// Records a sync that succeeded. With `nothing_dirty` it did not change the kernel.
    pub(super) fn succeeded(&mut self, started: Instant, extent: SyncExtent, nothing_dirty: bool) {
        self.queued = false;
        if extent == SyncExtent::Full || self.partial.is_none() {
            self.failures = 0;
            self.retry_at = None;
            self.retry_new_at = None;
            self.partial = None;
        }
        self.ran(started, extent, nothing_dirty);
    }

    /// Records a sync that compared or changed the kernel, with all but some parts.
    fn ran(&mut self, started: Instant, extent: SyncExtent, nothing_dirty: bool) {
        if extent == SyncExtent::Full {
            self.last_full = Some(started);
            self.drift_suspected = false;
        }
        // Events that change nothing are not load.
        if !nothing_dirty {
            let from = self.bucket_full_at.map_or(started, |bucket_full_at| bucket_full_at.max(started));
            self.bucket_full_at = Some(from + self.periods.min_sync_period);
        }
    }

    /// Returns true while a part fails and the kernel has everything else.
    pub(super) fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Returns true while the whole dataplane fails: what the kernel has is not known.
    pub(super) fn fails_as_a_whole(&self) -> bool {
        self.retry_at.is_some() && self.partial.is_none()
    }

    /// Records a sync that failed. Returns the time to the next full sync. Pauses begin at the end
    /// of the sync, which may take seconds.
    pub(super) fn failed(&mut self, ended: Instant) -> Duration {
        self.partial = None;
        self.queued = false;
        let pause = self.next_pause(MAX_RETRY);
        self.retry_at = Some(ended + pause);
        self.retry_new_at = Some(ended + FIRST_RETRY.max(self.periods.min_sync_period));
        pause
    }

    /// Records a sync of which only a part failed. It counts as a sync in every other respect.
    /// Returns the time to the next attempt, which is a full sync.
    pub(super) fn partly_failed(
        &mut self,
        started: Instant,
        extent: SyncExtent,
        nothing_dirty: bool,
        only_ports: bool,
    ) -> Duration {
        self.queued = false;
        self.ran(started, extent, nothing_dirty);
        let is_worse = self.partial == Some(FailedPart::ServicePorts) && !only_ports;
        let is_retry = extent == SyncExtent::Full || self.partial.is_none() || is_worse;
        self.partial = Some(if only_ports { FailedPart::ServicePorts } else { FailedPart::More });
        if let (Some(retry_at), false) = (self.retry_at, is_retry) {
            // Changes that come all the time must not defer the retry.
            return retry_at.saturating_duration_since(started);
        }
        if is_worse {
            // A family or the node must not wait as long as a service port that does not fit.
            self.failures = 0;
        }
        // What is left out rarely fits soon. Removals bring the retry forward.
        let pause = self.next_pause(if only_ports { Duration::MAX } else { MAX_RETRY });
        self.retry_at = Some(started + pause);
        pause
    }

    /// Makes the retry of a part that failed come soon: something may have made room for it.
    pub(super) fn retry_soon(&mut self, now: Instant) {
        let soon = self.last_full.map_or(now, |last| (last + MIN_ROOM_PERIOD).max(now));
        self.retry_at = self.retry_at.map(|at| at.min(soon));
    }

    /// Returns the next pause, which is twice as long as the one before.
    fn next_pause(&mut self, longest: Duration) -> Duration {
        let longest = longest.min(self.periods.sync_period);
        let pause = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(longest);
        self.failures = self.failures.saturating_add(1);
        pause.mul_f64(1.0 - JITTER * fastrand::f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn schedule() -> Schedule {
        Schedule::new(SyncPeriods {
            min_sync_period: SECOND,
            sync_period: 30 * SECOND,
            give_up_after: None,
            wait_for_node: false,
        })
    }

    #[test]
    fn an_idle_loop_acts_at_once_and_a_busy_one_waits() {
        let start = Instant::now();
        let mut schedule = schedule();
        assert!(schedule.queue() && !schedule.queue());
        for _ in 0..BURST {
            schedule.queue();
            assert_eq!(schedule.due(start), Some(SyncExtent::Partial));
            schedule.succeeded(start, SyncExtent::Full, false);
        }
        schedule.queue();
        assert_eq!(schedule.due(start + SECOND / 2), None);
        assert_eq!(schedule.wake_at(), Some(start + SECOND));
        assert_eq!(schedule.due(start + SECOND), Some(SyncExtent::Partial));
        schedule.succeeded(start + SECOND, SyncExtent::Partial, false);
        schedule.queue();
        assert_eq!(schedule.wake_at(), Some(start + 2 * SECOND), "only a pause allows another burst");
    }

    #[test]
    fn events_that_change_nothing_delay_nothing() {
        let start = Instant::now();
        let mut schedule = schedule();
        for _ in 0..5 {
            schedule.queue();
            schedule.succeeded(start, SyncExtent::Partial, true);
        }
        schedule.queue();
        assert_eq!(schedule.due(start), Some(SyncExtent::Partial));
    }

    #[test]
    fn retries_back_off_up_to_a_bound() {
        let start = Instant::now();
        let mut schedule = schedule();
        let pauses: Vec<_> = (0..40).map(|_| schedule.failed(start)).collect();
        assert!(pauses[0] <= FIRST_RETRY && pauses[0] >= FIRST_RETRY.mul_f64(0.79));
        assert!(pauses[3] > pauses[0] * 4, "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= MAX_RETRY));
        assert!(pauses[39] >= MAX_RETRY.mul_f64(0.79));
        assert_eq!(schedule.due(start + MAX_RETRY), Some(SyncExtent::Full));
    }

    #[test]
    fn a_change_after_a_failure_does_not_wait_for_the_retry() {
        let start = Instant::now();
        let mut schedule = schedule();
        schedule.periods.min_sync_period = Duration::ZERO;
        for _ in 0..10 {
            schedule.queue();
            schedule.failed(start);
        }
        assert_eq!(schedule.due(start + FIRST_RETRY), None, "nothing new");
        schedule.queue();
        assert_eq!(schedule.due(start), None, "the rate is limited");
        assert_eq!(schedule.wake_at(), Some(start + FIRST_RETRY));
        assert_eq!(schedule.due(start + FIRST_RETRY), Some(SyncExtent::Full));
    }

    #[test]
    fn changes_after_a_failure_do_not_come_faster_than_the_least_period() {
        let ended = Instant::now();
        let mut schedule = schedule();
        for _ in 0..10 {
            schedule.failed(ended);
        }
        schedule.queue();
        assert_eq!(schedule.due(ended + FIRST_RETRY), None);
        assert_eq!(schedule.wake_at(), Some(ended + SECOND));
        assert_eq!(schedule.due(ended + SECOND), Some(SyncExtent::Full));
    }

    #[test]
    fn a_failing_family_does_not_wait_as_long_as_a_left_out_service_port() {
        let start = Instant::now();
        let mut schedule = schedule();
        let mut fail = |extent, only_ports| schedule.partly_failed(start, extent, false, only_ports);
        let pauses: Vec<_> = (0..20).map(|_| fail(SyncExtent::Full, true)).collect();
        assert!(pauses[19] >= (30 * SECOND).mul_f64(0.79), "{pauses:?}");
        assert_eq!(fail(SyncExtent::Partial, true), pauses[19], "the retry is not deferred");
        assert!(fail(SyncExtent::Partial, false) <= FIRST_RETRY);
        assert!(fail(SyncExtent::Full, false) <= 2 * FIRST_RETRY);
        assert_eq!(schedule.due(start + 2 * FIRST_RETRY), Some(SyncExtent::Full));
    }

    #[test]
    fn suspected_drift_causes_a_full_sync_soon() {
        let start = Instant::now();
        let mut schedule = schedule();
        schedule.succeeded(start, SyncExtent::Full, false);
        schedule.suspect_drift();
        assert_eq!(schedule.due(start), None);
        assert_eq!(schedule.wake_at(), Some(start + MIN_DRIFT_PERIOD));
        assert_eq!(schedule.due(start + MIN_DRIFT_PERIOD), Some(SyncExtent::Full));
        schedule.succeeded(start + SECOND, SyncExtent::Full, true);
        assert_eq!(schedule.wake_at(), Some(start + 31 * SECOND));
    }

    #[test]
    fn a_full_sync_is_due_each_sync_period() {
        let start = Instant::now();
        let mut schedule = schedule();
        schedule.succeeded(start, SyncExtent::Full, false);
        assert_eq!(schedule.wake_at(), Some(start + 30 * SECOND));
        assert_eq!(schedule.due(start + 29 * SECOND), None);
        assert_eq!(schedule.due(start + 30 * SECOND), Some(SyncExtent::Full));
    }
}
