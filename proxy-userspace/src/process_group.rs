//! Ends the process group of a command: a command is often a script that waits for another program.

use std::{thread, time::Duration};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// The number of attempts to collect killed processes, and the pause between them: one second in
/// total. A process in uninterruptible sleep ends later.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// The group of a child that leads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessGroup(Pid);

impl ProcessGroup {
    /// Returns the group that a child leads. `None` for a number that no process can have.
    pub(crate) fn led_by(child: u32) -> Option<Self> {
        i32::try_from(child).ok().filter(|child| *child > 0).map(|child| Self(Pid::from_raw(child)))
    }

    /// Kills all processes of the group. Call this before the status of the leader is collected:
    /// until then, the kernel gives its number to no other process.
    pub(crate) fn kill(self) {
        // This fails if they have just ended by themselves.
        let _gone = killpg(self.0, Signal::SIGKILL);
    }

    /// Collects the status of killed processes of the group, after that of the leader. If this
    /// process is the first one of a container, it inherits what a leader leaves, and they would
    /// stay zombies. Otherwise there is nothing to collect. Waits a second at most.
    pub(crate) fn collect(self) {
        let group = Pid::from_raw(-self.0.as_raw());
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            match waitpid(group, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => {
                    attempts += 1;
                    thread::sleep(PAUSE);
                }
                Ok(_) | Err(Errno::EINTR) => {}
                // Usually ECHILD: there are no more.
                Err(_) => return,
            }
        }
    }
}
