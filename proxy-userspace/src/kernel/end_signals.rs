//! The signals that end the daemon. They are blocked in every thread, and one thread polls for them
//! without consuming them. A signal during a restart is therefore still pending for the next
//! process.

use std::{io, os::fd::AsFd as _};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

use super::KernelError;

const SIGNALS: [Signal; 2] = [Signal::SIGTERM, Signal::SIGINT];

/// A signalfd for each blocked signal. The signals stay blocked for the life of the process.
pub struct EndSignals([SignalFd; SIGNALS.len()]);

impl EndSignals {
    /// Blocks the signals in this thread and in all threads that it starts later. Other programs
    /// start with no signal blocked, because the standard library resets the mask. Call this before
    /// other threads start.
    pub fn block() -> Result<Self, KernelError> {
        let [terminate, interrupt] = SIGNALS.map(|signal| {
            SignalFd::with_flags(&SigSet::from_iter([signal]), SfdFlags::SFD_CLOEXEC)
                .map_err(failed("open a signalfd for"))
        });
        let blocked = Self([terminate?, interrupt?]);
        SigSet::from_iter(SIGNALS).thread_block().map_err(failed("block"))?;
        Ok(blocked)
    }

    /// Waits for a signal and returns its name.
    pub fn wait(&self) -> Result<&'static str, KernelError> {
        let mut polled = self.0.each_ref().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
        // A CPU profile interrupts threads by signals.
        while let Err(errno) = poll(&mut polled, PollTimeout::NONE) {
            if errno != Errno::EINTR {
                return Err(failed("wait for")(errno));
            }
        }
        let pending = polled.iter().zip(SIGNALS).find(|(one, _)| one.any() == Some(true));
        pending.map(|(_, signal)| signal.as_str()).ok_or_else(|| failed("identify")(nix::Error::EIO))
    }
}

fn failed(operation: &'static str) -> impl Fn(nix::Error) -> KernelError {
    move |errno| KernelError::call(operation, "signals")(io::Error::from(errno))
}
