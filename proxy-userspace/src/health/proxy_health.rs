//! Whether the proxy does its work: upstream's `ProxyHealthServer`, without its server.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde::Serialize;
use tokio::{sync::watch, time::Instant};

use crate::model::IpFamily;

/// The proxy's health, shared by the sync loop, which writes it, and the endpoints, which read it.
///
/// Live: no change waits for longer than the timeout. Ready (`/healthz`): live, the first full sync is in the kernel, no
/// Service lacks room there, and the Node is not going away.
#[derive(Clone, Debug)]
pub struct ProxyHealth {
    state: Arc<watch::Sender<State>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    timeout: Duration,
    last_updated: Option<Timestamp>,
    oldest_pending: Option<Instant>,
    node_being_deleted: bool,
    out_of_room: bool,
}

/// The body of `/healthz` and `/livez`, as upstream's `ProxyHealth`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: BTreeMap<&'static str, FamilyReport>,
    /// The status code says 200.
    #[serde(skip)]
    pub(super) ok: bool,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyReport {
    last_updated: String,
    healthy: bool,
}

/// Go's zero time.
const NEVER: &str = "0001-01-01T00:00:00Z";

impl ProxyHealth {
    /// Healthy, and not yet ready. Upstream's timeout is twice the sync period.
    pub fn new(timeout: Duration) -> Self {
        let state = State { timeout, ..State::default() };
        Self { state: Arc::new(watch::Sender::new(state)) }
    }

    /// Another timeout, from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.state.send_modify(|state| state.timeout = timeout);
    }

    /// There is a change that the kernel does not have yet.
    pub fn queued(&self) {
        self.state.send_modify(|state| {
            state.oldest_pending.get_or_insert_with(Instant::now);
        });
    }

    /// The kernel has everything.
    pub fn updated(&self) {
        self.state.send_modify(|state| {
            state.oldest_pending = None;
            state.last_updated = Some(Timestamp::now());
        });
    }

    /// Whether Services are not served for want of room in the kernel: waiting does not help, nor does a restart.
    pub fn set_out_of_room(&self, out_of_room: bool) {
        self.state.send_modify(|state| state.out_of_room = out_of_room);
    }

    /// What the Node says of itself.
    pub fn set_node_being_deleted(&self, being_deleted: bool) {
        self.state.send_modify(|state| state.node_being_deleted = being_deleted);
    }

    /// No change waits for too long.
    pub fn is_live(&self) -> bool {
        let State { oldest_pending, timeout, .. } = *self.state.borrow();
        oldest_pending.is_none_or(|since| since.elapsed() < timeout)
    }

    /// The first full sync is in the kernel.
    pub fn is_programmed(&self) -> bool {
        self.state.borrow().last_updated.is_some()
    }

    /// It serves all Services, as far as it knows, and may have the node's traffic: what `/healthz` answers.
    pub fn is_ready(&self) -> bool {
        let State { node_being_deleted, out_of_room, .. } = *self.state.borrow();
        self.is_programmed() && !node_being_deleted && !out_of_room && self.is_live()
    }

    pub(super) fn livez(&self) -> Report {
        self.report(None, self.is_live())
    }

    pub(super) fn healthz(&self) -> Report {
        let eligible = self.is_programmed() && !self.state.borrow().node_being_deleted;
        self.report(Some(eligible), self.is_ready())
    }

    fn report(&self, node_eligible: Option<bool>, ok: bool) -> Report {
        let last_updated =
            self.state.borrow().last_updated.map_or_else(|| NEVER.into(), |time| time.to_string());
        let now = Timestamp::now().to_string();
        let healthy = self.is_live() && !self.state.borrow().out_of_room;
        let family = FamilyReport { last_updated: last_updated.clone(), healthy };
        let status = if self.is_programmed() {
            IpFamily::ALL.map(|of| (if of == IpFamily::V4 { "IPv4" } else { "IPv6" }, family.clone())).into()
        } else {
            BTreeMap::new()
        };
        // As upstream: who is healthy was updated just now, whether or not there was anything to do.
        let last_updated = if ok { now.clone() } else { last_updated };
        Report { last_updated, current_time: now, node_eligible, healthy, status, ok }
    }
}
