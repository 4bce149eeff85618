//! The clocks that eBPF programs and conntrack read.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::KernelError;

/// Returns a time of this clock in nanoseconds, as programs and their maps have it.
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the time of day, since 1970.
pub fn since_1970() -> Result<Duration, KernelError> {
    let now = clock_gettime(ClockId::CLOCK_REALTIME);
    now.map(Duration::from).map_err(|error| KernelError::call("read", "the clock")(error.into()))
}

/// Returns the monotonic time, without times of suspension, as `bpf_ktime_get_ns` does.
pub fn monotonic() -> Result<Duration, KernelError> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
    now.map(Duration::from).map_err(|error| KernelError::call("read", "the monotonic clock")(error.into()))
}
