//! The one place that reads the clock: deadlines for polling, and how long something took.

use std::{
    env,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// How many times as long as usual to wait, a whole number: set where everything is slow, as in a virtual machine without
/// KVM.
const PATIENCE: &str = "SHUNT_TEST_PATIENCE";

/// How long to wait between two looks at something that is about to change.
const PAUSE: Duration = Duration::from_millis(5);

/// A point in time that ends a wait.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

/// A running stopwatch.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Deadline {
    /// The point `wait` from now; later where everything is slow, see [`scaled`].
    pub fn after(wait: Duration) -> Self {
        Self(now() + scaled(wait))
    }

    /// Whether it is reached.
    pub fn passed(self) -> bool {
        now() >= self.0
    }

    /// Sleeps a few milliseconds, between two looks.
    pub fn pause() {
        thread::sleep(PAUSE);
    }

    /// Looks until `look` finds something or the deadline passes; looks at least once.
    pub fn poll<T>(self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let found = look();
            if found.is_some() || self.passed() {
                return found;
            }
            Self::pause();
        }
    }
}

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        Self(now())
    }

    /// The time since the start.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// How long to wait for what is done within `wait` on an ordinary machine: as many times longer as the variable
/// `SHUNT_TEST_PATIENCE` says.
pub fn scaled(wait: Duration) -> Duration {
    wait.saturating_mul(slowdown())
}

/// How many times slower than on an ordinary machine everything is; 1 or more. What is repeated only to be sure may be
/// repeated that much less.
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
