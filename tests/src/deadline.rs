//! The one place that reads the clock: deadlines for polling, and how long something took.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How long to wait between two looks at something that is about to change.
const PAUSE: Duration = Duration::from_millis(5);

/// A point in time that ends a wait.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

/// A running stopwatch.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Deadline {
    /// The point `wait` from now.
    pub fn after(wait: Duration) -> Self {
        Self(now() + wait)
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

#[expect(clippy::disallowed_methods, reason = "tests measure and wait for real things; this file is where")]
fn now() -> Instant {
    Instant::now()
}
