//! The only place that reads the clock: deadlines for polling, and measurements of time.

use std::{
    env,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// The environment variable with the factor by which all waits are longer than usual, a whole
/// number. Set it on slow machines, such as a virtual machine without KVM.
const PATIENCE: &str = "SHUNT_TEST_PATIENCE";

/// The pause between two checks of something that is about to change.
const PAUSE: Duration = Duration::from_millis(5);

/// A point in time that ends a wait.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

/// Measures the time since its start.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Deadline {
    /// Returns the point in time `wait` from now; later on a slow machine, see [`scaled`].
    pub fn after(wait: Duration) -> Self {
        Self(now() + scaled(wait))
    }

    /// Returns true if the deadline has passed.
    pub fn passed(self) -> bool {
        now() >= self.0
    }

    /// Sleeps a few milliseconds, between two checks.
    pub fn pause() {
        thread::sleep(PAUSE);
    }

    /// Calls `check` until it returns a value or the deadline has passed. The last call begins
    /// after the deadline: if the machine stands still during a check, another one follows.
    pub fn poll<T>(self, mut check: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let is_last = self.passed();
            let found = check();
            if found.is_some() || is_last {
                return found;
            }
            Self::pause();
        }
    }

    /// Like [`Self::poll`], but returns the first error of `check`.
    pub fn try_poll<T, E>(self, mut check: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
        self.poll(|| check().transpose()).transpose()
    }
}

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        Self(now())
    }

    /// Returns the time since the start.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Returns `wait`, multiplied by the factor in `SHUNT_TEST_PATIENCE`.
pub fn scaled(wait: Duration) -> Duration {
    wait.saturating_mul(slowdown())
}

/// Returns the factor by which this machine is slower than usual, at least 1. Tests that repeat
/// only for certainty may repeat fewer times by this factor.
pub fn slowdown() -> u32 {
    static TIMES: OnceLock<u32> = OnceLock::new();
    *TIMES.get_or_init(|| {
        let text = env::var_os(PATIENCE).and_then(|text| text.into_string().ok());
        text.and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
    })
}

#[expect(clippy::disallowed_methods, reason = "tests measure and wait for real things; this file is where")]
fn now() -> Instant {
    Instant::now()
}
