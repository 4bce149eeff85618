//! SIGHUP, which asks a daemon to read its configuration again.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};

use super::KernelError;

/// The hangups that arrive. From the first [`Hangups::listen`] on, none ends the process.
pub struct Hangups(Signals);

impl Hangups {
    /// Listens within the runtime of this thread.
    pub fn listen() -> Result<Self, KernelError> {
        let hangups = signal(SignalKind::hangup()).map_err(KernelError::call("wait for", "SIGHUP"))?;
        let failed = |errno| KernelError::call("unblock", "SIGHUP")(io::Error::from(errno));
        hangup().thread_unblock().map_err(failed)?;
        Ok(Self(hangups))
    }

    /// Waits for a hangup.
    pub async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            // The runtime is shutting down, and this task with it.
            std::future::pending::<()>().await;
        }
    }
}

/// Blocks SIGHUP in this thread, whose mask a restart keeps: one that arrives meanwhile waits until
/// the next process listens.
pub(super) fn hold() -> Result<(), KernelError> {
    hangup().thread_block().map_err(|errno| KernelError::call("block", "SIGHUP")(io::Error::from(errno)))
}

fn hangup() -> SigSet {
    SigSet::from_iter([Signal::SIGHUP])
}
