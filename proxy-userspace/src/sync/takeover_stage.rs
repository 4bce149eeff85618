//! The stage of the loop that takes over from another mode, proxy or process.

use crate::dataplane::Mode;

/// The stage that takes over from another mode, proxy or process, once all Services are served. The
/// loop calls both methods after each successful full sync. `()` takes over nothing.
pub trait TakeoverStage: Send {
    /// Returns true if the takeover must wait while service ports are left out, because the others
    /// may serve these.
    fn waits_for_every_service(&self, _backstop: Option<Mode>) -> bool {
        false
    }

    /// Takes over connections. Called before stale UDP entries are deleted: connections to removed
    /// endpoints must not continue.
    fn take_over_connections(&mut self) {}

    /// Removes what the others wrote into the kernel, except the rules of the mode `backstop`.
    /// Called after stale UDP entries are deleted.
    fn remove_others(&mut self, _backstop: Option<Mode>) {}
}

impl TakeoverStage for () {}
