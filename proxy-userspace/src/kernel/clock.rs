//! The clock that eBPF programs read.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::KernelError;

/// Returns the monotonic time, without times of suspension, as `bpf_ktime_get_ns` does.
pub fn monotonic() -> Result<Duration, KernelError> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
    now.map(Duration::from).map_err(|error| KernelError::call("read", "the monotonic clock")(error.into()))
}
