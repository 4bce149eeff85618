//! The signals that end the daemon: held back in every thread, and looked for by one that leaves them where they are. So none is lost: one
//! that comes while the program is started anew is still there for the next process.

use std::{io, os::fd::AsFd as _};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

use super::KernelError;

/// Those of the daemon.
const ENDING: [Signal; 2] = [Signal::SIGTERM, Signal::SIGINT];

/// The ending signals, held back for as long as the process lives; a descriptor for each tells that it has come.
pub struct EndSignals([SignalFd; ENDING.len()]);

impl EndSignals {
    /// Holds them back in this thread and all that it starts from now on; not in other programs, which the standard library starts with
    /// none held back. To be called before there is another thread.
    pub fn hold() -> Result<Self, KernelError> {
        let [terminate, interrupt] = ENDING.map(|signal| {
            SignalFd::with_flags(&SigSet::from_iter([signal]), SfdFlags::SFD_CLOEXEC)
                .map_err(failed("look for"))
        });
        let held = Self([terminate?, interrupt?]);
        SigSet::from_iter(ENDING).thread_block().map_err(failed("hold back"))?;
        Ok(held)
    }

    /// Waits until one has come; returns its name.
    pub fn wait(&self) -> Result<&'static str, KernelError> {
        let mut looked_at = self.0.each_ref().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
        poll(&mut looked_at, PollTimeout::NONE).map_err(failed("wait for"))?;
        let came = looked_at.iter().zip(ENDING).find(|(one, _)| one.any() == Some(true));
        came.map(|(_, signal)| signal.as_str()).ok_or_else(|| failed("tell apart")(nix::Error::EIO))
    }
}

fn failed(operation: &'static str) -> impl Fn(nix::Error) -> KernelError {
    move |errno| KernelError::call(operation, "signals")(io::Error::from(errno))
}
