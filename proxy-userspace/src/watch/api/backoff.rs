//! The pauses between attempts.

use std::time::Duration;

use super::Timing;

/// Pauses that double up to a limit. Each grows by a random part of itself.
pub(super) struct Backoff {
    timing: Timing,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(timing: Timing) -> Self {
        Self { timing, next: timing.first_retry }
    }

    /// Returns the pause before the next attempt.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.next.mul_f64(1.0 + fastrand::f64());
        self.next = (2 * self.next).min(self.timing.last_retry);
        pause.min(self.timing.last_retry)
    }

    /// Starts again with the shortest pause.
    pub(super) fn reset(&mut self) {
        self.next = self.timing.first_retry;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_with_jitter_up_to_the_limit_until_a_reset() {
        let timing = Timing::default();
        let mut backoff = Backoff::new(timing);
        let pauses: Vec<Duration> = (0..20).map(|_| backoff.pause()).collect();
        for (i, pause) in (0..).zip(&pauses) {
            let least = timing.first_retry.saturating_mul(1 << i).min(timing.last_retry);
            assert!(*pause >= least && *pause <= timing.last_retry.min(2 * least), "pause {i}: {pause:?}");
        }
        backoff.reset();
        assert!(backoff.pause() <= 2 * timing.first_retry);
    }
}
