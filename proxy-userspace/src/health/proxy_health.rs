//! Whether the proxy does its work: upstream's `ProxyHealthServer`, without its server.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde::Serialize;
use tokio::{sync::watch, time::Instant};

use crate::model::IpFamily;

/// The proxy's health, shared by the sync loop, which writes it, and the endpoints, which read it.
///
/// Live: no change of either family waits for longer than the timeout. Ready (`/healthz`): live, the first full sync is in the kernel, no
/// Service is missing there, and the Node is not going away, nor was never there.
#[derive(Clone, Debug)]
pub struct ProxyHealth {
    state: Arc<watch::Sender<State>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    timeout: Duration,
    /// By family, as in [`IpFamily::ALL`].
    families: [FamilyState; 2],
    node_was_there: bool,
    node_ineligible: bool,
    incomplete: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct FamilyState {
    last_updated: Option<Timestamp>,
    oldest_pending: Option<Instant>,
}

impl State {
    fn family_mut(&mut self, family: IpFamily) -> &mut FamilyState {
        &mut self.families[usize::from(family == IpFamily::V6)]
    }

    fn is_live(&self, family: &FamilyState) -> bool {
        family.oldest_pending.is_none_or(|since| since.elapsed() < self.timeout)
    }

    /// Both families were.
    fn is_programmed(&self) -> bool {
        self.families.iter().all(|family| family.last_updated.is_some())
    }

    /// When the family was updated that was so most recently; none until one was.
    fn last_updated(&self) -> Option<Timestamp> {
        self.families.iter().filter_map(|family| family.last_updated).max()
    }
}

/// What is known of the Node object, as far as it decides whether the node may have traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeObject {
    /// It was not there until now, where one ought to be.
    Missing,
    /// It is there, or was, or none is needed.
    There,
    /// It says that it is going away.
    Leaving,
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
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<&'static str, FamilyReport>,
    /// The status code says 200.
    #[serde(skip)]
    pub(super) ok: bool,
}

#[derive(Debug, Serialize)]
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

    /// There is a change of these families that the kernel does not have yet.
    pub fn queued(&self, families: &[IpFamily]) {
        self.state.send_modify(|state| {
            for family in families {
                state.family_mut(*family).oldest_pending.get_or_insert_with(Instant::now);
            }
        });
    }

    /// The kernel has everything of these families.
    pub fn updated(&self, families: &[IpFamily]) {
        self.state.send_modify(|state| {
            for family in families {
                let last_updated = Some(Timestamp::now());
                *state.family_mut(*family) = FamilyState { last_updated, oldest_pending: None };
            }
        });
    }

    /// Whether some Services are not served while all others are, be it for want of room in the kernel: a restart does not help,
    /// and the others are kept up to date.
    pub fn set_incomplete(&self, incomplete: bool) {
        self.state.send_modify(|state| state.incomplete = incomplete);
    }

    /// Whether the node is not to get traffic: its Node says that it is going away, or was never there as long as this process has
    /// run, whichever of its sync loops saw it.
    pub fn set_node(&self, node: NodeObject) {
        self.state.send_modify(|state| {
            state.node_was_there |= node != NodeObject::Missing;
            state.node_ineligible = match node {
                NodeObject::Missing => !state.node_was_there,
                NodeObject::There => false,
                NodeObject::Leaving => true,
            };
        });
    }

    /// No change of either family waits for too long.
    pub fn is_live(&self) -> bool {
        let state = self.state.borrow();
        state.families.iter().all(|family| state.is_live(family))
    }

    /// No change of a family does.
    pub fn is_live_for(&self, family: IpFamily) -> bool {
        let state = self.state.borrow();
        state.is_live(&state.families[usize::from(family == IpFamily::V6)])
    }

    /// The first full sync is in the kernel.
    pub fn is_programmed(&self) -> bool {
        self.state.borrow().is_programmed()
    }

    /// It serves all Services, as far as it knows, and may have the node's traffic: what `/healthz` answers.
    pub fn is_ready(&self) -> bool {
        let State { node_ineligible, incomplete, .. } = *self.state.borrow();
        self.is_programmed() && !node_ineligible && !incomplete && self.is_live()
    }

    pub(super) fn livez(&self) -> Report {
        self.report(None, self.is_live())
    }

    pub(super) fn healthz(&self) -> Report {
        let eligible = self.is_programmed() && !self.state.borrow().node_ineligible;
        self.report(Some(eligible), self.is_ready())
    }

    fn report(&self, node_eligible: Option<bool>, ok: bool) -> Report {
        let state = *self.state.borrow();
        let shown = |time: Option<Timestamp>| time.map_or_else(|| NEVER.into(), |time| time.to_string());
        let last_updated = shown(state.last_updated());
        let now = Timestamp::now().to_string();
        let healthy = self.is_live() && !state.incomplete;
        // As upstream, whose proxiers of both families tell of themselves: who never was updated is not there.
        let families = IpFamily::ALL.map(IpFamily::name).into_iter().zip(&state.families);
        let known = families.filter(|(_, family)| family.last_updated.is_some());
        let status = known.map(|(name, family)| {
            let healthy = state.is_live(family) && !state.incomplete;
            (name, FamilyReport { last_updated: shown(family.last_updated), healthy })
        });
        let status = status.collect();
        // As upstream: who is healthy was updated just now, whether or not there was anything to do.
        let last_updated = if ok { now.clone() } else { last_updated };
        Report { last_updated, current_time: now, node_eligible, healthy, status, ok }
    }
}
