//! Tells the programs, from a thread of its own, when something changed that decides where packets
//! on the direct path go.

use std::{path::Path, thread, time::Duration};

use aya::maps::{Array, MapData};
use proxy_common::layout::DirectWatch;

use super::{maps::open_pinned, plan::step::DirectFields};
use crate::{
    causes::with_causes,
    kernel::{KernelError, bpf::Wakeup, clock, forwarding_changes::ForwardingChanges, routing_rules, spawn},
    net::{OWN_PROGRAMS, OWN_TABLES},
};

/// The name of the map.
const MAP: &str = "direct_watch";
/// How long the programs rely on the thread after it looked.
const VALID: Duration = Duration::from_secs(1);
/// How often the thread looks. It may be late by three quarters of the time above.
const INTERVAL: Duration = Duration::from_millis(250);
/// How long changes that come together are waited for.
const BURST: Duration = Duration::from_millis(20);
/// How long after a change a packet may leave that the stack handled before the change.
const IN_STACK: Duration = Duration::from_secs(1);
/// How often the thread tries again to open its sockets.
const RETRY: Duration = Duration::from_secs(10);

/// The thread. It starts when it is needed, and ends when this is dropped.
pub(super) struct DirectWatcher {
    /// `None` while the thread has it.
    map: Option<Array<MapData, DirectWatch>>,
    end: Wakeup,
}

impl DirectWatcher {
    /// Opens the map that is pinned in `directory`.
    pub(super) fn open(directory: &Path) -> Result<Self, KernelError> {
        Ok(Self { map: Some(open_pinned(directory, MAP)?), end: Wakeup::new()? })
    }

    /// Starts the thread if the programs ask for what it knows. Otherwise packets go through the
    /// stack more often.
    pub(super) fn start_for(&mut self, fields: DirectFields) {
        if !fields.epoch.is_on() || fields.lease_ns == 0 {
            return;
        }
        let Some(map) = self.map.take() else { return };
        let mut watch = Watch { map, end: self.end.clone(), is_failing: false };
        if let Err(error) = spawn("direct-watch", move || while watch.run() {}) {
            watch_failed(&error);
        }
    }
}

impl Drop for DirectWatcher {
    fn drop(&mut self) {
        self.end.wake();
    }
}

fn watch_failed(error: &KernelError) {
    let error = with_causes(error);
    tracing::warn!(
        error,
        "cannot watch for changes of rules, routes and links: each flow on the direct path sends a packet through the stack twice a second"
    );
}

/// What the thread has.
struct Watch {
    map: Array<MapData, DirectWatch>,
    end: Wakeup,
    /// The last attempt failed, and that was logged.
    is_failing: bool,
}

impl Watch {
    /// Watches until an error. Returns false if the thread must end.
    fn run(&mut self) -> bool {
        let Err(error) = self.watch() else { return false };
        if !std::mem::replace(&mut self.is_failing, true) {
            watch_failed(&error);
        }
        let limit = RETRY.try_into().unwrap_or(nix::poll::PollTimeout::MAX);
        self.end.wait_for(&[], limit).is_ok_and(|ended| !ended)
    }

    fn watch(&mut self) -> Result<(), KernelError> {
        let result = self.watch_until_end();
        // Nobody watches any more.
        let withdrawn = self.tell(DirectWatch::NONE);
        result.and(withdrawn)
    }

    fn watch_until_end(&mut self) -> Result<(), KernelError> {
        let mut changes = ForwardingChanges::open(OWN_TABLES, OWN_PROGRAMS)?;
        let mut since = clock::monotonic()? + IN_STACK;
        let mut have_ports = routing_rules::routes_depend_on_ports()?;
        loop {
            let until_ns = clock::nanos(clock::monotonic()? + VALID);
            if changes.take()? {
                since = clock::monotonic()? + IN_STACK;
                have_ports = routing_rules::routes_depend_on_ports()?;
            }
            let portless_until_ns = if have_ports { 0 } else { until_ns };
            self.tell(DirectWatch { since_ns: clock::nanos(since), until_ns, portless_until_ns })?;
            self.is_failing = false;
            if changes.wait(INTERVAL, &self.end)? {
                return Ok(());
            }
            thread::sleep(BURST);
        }
    }

    fn tell(&mut self, watch: DirectWatch) -> Result<(), KernelError> {
        self.map.set(0, watch, 0).map_err(KernelError::bpf("write map", MAP))
    }
}
