//! The waits between attempts: doubling, at random, with an upper limit.

use std::time::Duration;

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
}
