//! The clock that programs in the kernel read.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::KernelError;

/// Time since some moment before the machine's start, without times of suspension: what `bpf_ktime_get_ns` tells.
pub fn monotonic() -> Result<Duration, KernelError> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
    now.map(Duration::from).map_err(|error| KernelError::call("read", "the monotonic clock")(error.into()))
}
