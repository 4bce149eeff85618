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

/// Holds them back in this thread and all that it starts from now on; not in other programs, which the standard library starts with
/// none held back. To be called before there is another thread.
pub fn hold() -> Result<(), KernelError> {
    SigSet::from_iter(ENDING).thread_block().map_err(failed("hold back"))
}

/// Waits until one has come; returns its name.
pub fn wait() -> Result<&'static str, KernelError> {
    let open = |signal: Signal| {
        let one = SigSet::from_iter([signal]);
        SignalFd::with_flags(&one, SfdFlags::SFD_CLOEXEC).map_err(failed("look for"))
    };
    let [terminate, interrupt] = ENDING.map(open);
    let (terminate, interrupt) = (terminate?, interrupt?);
    let mut looked_at = [&terminate, &interrupt].map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
    poll(&mut looked_at, PollTimeout::NONE).map_err(failed("wait for"))?;
    let came = looked_at.iter().zip(ENDING).find(|(one, _)| one.any() == Some(true));
    came.map(|(_, signal)| signal.as_str()).ok_or_else(|| failed("tell apart")(nix::Error::EIO))
}

fn failed(operation: &'static str) -> impl Fn(nix::Error) -> KernelError {
    move |errno| KernelError::call(operation, "signals")(io::Error::from(errno))
}
