//! The waits between attempts: doubling, at random, with an upper limit.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

use super::Timing;

/// The waits between attempts.
pub(super) struct Retries {
    builder: ExponentialBuilder,
    waits: ExponentialBackoff,
    longest: Duration,
}

impl Retries {
    pub(super) fn new(timing: Timing) -> Self {
        let builder = ExponentialBuilder::default()
            .with_min_delay(timing.first_retry)
            .with_max_delay(timing.last_retry)
            .with_jitter()
            .without_max_times();
        Self { builder, waits: builder.build(), longest: timing.last_retry }
    }

    pub(super) fn next(&mut self) -> Duration {
        self.waits.next().unwrap_or(self.longest).min(self.longest)
    }

    pub(super) fn reset(&mut self) {
        self.waits = self.builder.build();
    }
}

/// A random number below `limit`, or 0.
pub(super) fn random_below(limit: u32) -> u32 {
    let random = RandomState::new().hash_one(limit);
    u32::try_from(random % u64::from(limit.max(1))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_with_jitter_up_to_the_limit_and_start_over_after_a_reset() {
        let timing = Timing::default();
        let mut retries = Retries::new(timing);
        let waits: Vec<Duration> = (0..20).map(|_| retries.next()).collect();
        for (i, wait) in (0..).zip(&waits) {
            let least = timing.first_retry.saturating_mul(1 << i).min(timing.last_retry);
            assert!(*wait >= least && *wait <= timing.last_retry.min(2 * least), "wait {i}: {wait:?}");
        }
        retries.reset();
        assert!(retries.next() <= 2 * timing.first_retry);
    }

    #[test]
    fn watches_of_many_nodes_do_not_end_at_the_same_moment() {
        let first = random_below(300);
        assert!((0..1000).any(|_| random_below(300) != first));
        assert_eq!(random_below(0), 0);
    }
}
