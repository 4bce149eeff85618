//! The tunnel to other nodes, for direct server return.

use std::num::NonZeroU16;

use super::{HookState, LinkHook, State};
use crate::{
    causes::with_causes,
    kernel::{KernelError, bpf::tc::Hook, tunnel_link},
    model::Framing,
};

/// The tunnel for direct server return.
#[derive(Debug)]
pub(super) struct Tunnel {
    port: Option<NonZeroU16>,
    /// Why it could not be prepared the last time.
    failure: Option<String>,
}

impl Tunnel {
    /// Returns the tunnel with this UDP port. [`Self::prepare`] creates it.
    pub(super) const fn new(port: Option<NonZeroU16>) -> Self {
        Self { port, failure: None }
    }

    /// Creates the tunnel, or removes that of an earlier process.
    pub(super) fn prepare(&mut self) {
        self.report(self.port.map_or_else(tunnel_link::remove, tunnel_link::create));
    }

    /// Repairs what others changed.
    pub(super) fn repair(&mut self) {
        if let Some(port) = self.port {
            self.report(tunnel_link::create(port));
        }
    }

    /// Sets the tunnel up if it has its program. Others may have set it down.
    pub(super) fn set_up(&mut self, state: &State) {
        let has_program = tunnel_link::index().is_some_and(|index| {
            let hook = LinkHook { index, hook: Hook::Ingress };
            state.links.get(&hook) == Some(&HookState::Current(Framing::Tunnel))
        });
        if self.port.is_some() && self.failure.is_none() && has_program {
            self.report(tunnel_link::set(true));
        }
    }

    /// Logs each failure once. Without a tunnel, packets of all Services are masqueraded.
    fn report(&mut self, result: Result<(), KernelError>) {
        let failure = result.err().map(|error| with_causes(&error));
        if let Some(error) = failure.as_ref().filter(|error| self.failure.as_ref() != Some(error)) {
            tracing::warn!(
                error,
                "cannot prepare the tunnel for direct server return: packets to other nodes are masqueraded"
            );
        }
        self.failure = failure;
    }
}
