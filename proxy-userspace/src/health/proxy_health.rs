//! Tracks whether the proxy is live and ready: upstream's `ProxyHealthServer` without its HTTP
//! server.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde::Serialize;
use tokio::{sync::watch, time::Instant};

use crate::model::IpFamily;

/// The proxy's health. The sync loop writes it, the HTTP routes read it.
///
/// The proxy is live while no change of either family has waited longer than the timeout. It is
/// ready (`/healthz`) if, in addition, the first full sync is in the kernel, no part of the node
/// has failed for longer than the timeout, the Node is not being deleted, and the Node object has
/// existed. It says nothing about a single Service.
#[derive(Clone, Debug)]
pub struct ProxyHealth {
    state: Arc<watch::Sender<State>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    timeout: Duration,
    /// One entry for each family, in the order of [`IpFamily::ALL`].
    families: [FamilyState; 2],
    node_was_there: bool,
    node_ineligible: bool,
    failing_part: Option<FailingPart>,
}

/// A part of the node that fails while everything else is kept up to date.
#[derive(Clone, Copy, Debug)]
struct FailingPart {
    since: Instant,
    /// The part has never worked.
    is_first: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct FamilyState {
    last_updated: Option<Timestamp>,
    oldest_pending: Option<Instant>,
}

impl State {
    /// As with upstream, a family that was never updated is live: the first sync may take long.
    fn is_live(&self, family: &FamilyState) -> bool {
        family.last_updated.is_none()
            || family.oldest_pending.is_none_or(|since| since.elapsed() < self.timeout)
    }

    fn is_programmed(&self) -> bool {
        self.families.iter().all(|family| family.last_updated.is_some())
    }

    /// Returns true if no part of the node has failed for too long.
    fn is_whole(&self) -> bool {
        self.failing_part
            .is_none_or(|FailingPart { since, is_first }| !is_first && since.elapsed() < self.timeout)
    }
}

/// The state of the Node object, as far as it decides whether the node may receive traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeObject {
    /// The object is needed, and has not existed so far.
    Missing,
    /// The object exists, or has existed, or is not needed.
    Present,
    /// The object is being deleted.
    Deleting,
}

/// The response body of `/healthz` and `/livez`, as upstream's `ProxyHealth`, and what upstream
/// does not have.
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
    /// Links on which a program of another owner runs before ours, with the name of that program.
    /// This does not make the proxy unhealthy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) displaced_links: Vec<String>,
    /// What cannot be read in the directory of manifests. This does not make the proxy unhealthy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) unreadable_manifests: Vec<String>,
    /// If true, the status code is 200.
    #[serde(skip)]
    pub(super) ok: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyReport {
    last_updated: String,
    healthy: bool,
}

/// What the kernel has of the changes, for `/statusz`.
#[derive(Debug)]
pub(super) struct Progress {
    /// One entry for each family, in the order of [`IpFamily::ALL`].
    pub(super) families: [FamilyProgress; 2],
    /// Why `/healthz` answers 503. Empty if it answers 200.
    pub(super) not_ready: Vec<&'static str>,
}

/// What the kernel has of one family.
#[derive(Clone, Copy, Debug)]
pub(super) struct FamilyProgress {
    pub(super) family: IpFamily,
    /// The time since the kernel had all changes. `None` if it never had.
    pub(super) last_updated: Option<Duration>,
    /// How long the oldest change waits that the kernel does not have yet.
    pub(super) oldest_pending: Option<Duration>,
}

/// Go's zero time.
const NEVER: &str = "0001-01-01T00:00:00Z";

impl ProxyHealth {
    /// Creates the state of a proxy that is live but not ready. Upstream's timeout is twice the
    /// sync period.
    pub fn new(timeout: Duration) -> Self {
        let state = State { timeout, ..State::default() };
        Self { state: Arc::new(watch::Sender::new(state)) }
    }

    /// Changes the timeout.
    pub fn set_timeout(&self, timeout: Duration) {
        self.state.send_modify(|state| state.timeout = timeout);
    }

    /// Records that these families have a change that the kernel does not have yet (upstream's
    /// `QueuedUpdate`).
    pub fn queued(&self, families: &[IpFamily]) {
        self.state.send_modify(|state| {
            for family in families {
                state.families[*family as usize].oldest_pending.get_or_insert_with(Instant::now);
            }
        });
    }

    /// Records that the kernel has all changes of these families (upstream's `Updated`).
    pub fn updated(&self, families: &[IpFamily]) {
        self.state.send_modify(|state| {
            for family in families {
                let last_updated = Some(Timestamp::now());
                state.families[*family as usize] = FamilyState { last_updated, oldest_pending: None };
            }
        });
    }

    /// Records that a part of the node, such as a link, could not be programmed while everything
    /// else was. The proxy stays live: a restart would not help, and Services are kept up to date.
    /// Call it before [`Self::updated`]: a part that fails in the first sync has never worked.
    pub fn part_failed(&self) {
        self.state.send_modify(|state| {
            let is_first = !state.is_programmed();
            state.failing_part.get_or_insert_with(|| FailingPart { since: Instant::now(), is_first });
        });
    }

    /// Records that all parts of the node were programmed.
    pub fn no_part_failed(&self) {
        self.state.send_modify(|state| state.failing_part = None);
    }

    /// Sets the state of the Node object. The node must not receive traffic while the Node is being
    /// deleted, or if no sync loop of this process has ever seen the Node.
    pub fn set_node(&self, node: NodeObject) {
        self.state.send_modify(|state| {
            state.node_was_there |= node != NodeObject::Missing;
            state.node_ineligible = match node {
                NodeObject::Missing => !state.node_was_there,
                NodeObject::Present => false,
                NodeObject::Deleting => true,
            };
        });
    }

    /// Returns true if no change of either family has waited too long.
    pub fn is_live(&self) -> bool {
        let state = self.state.borrow();
        state.families.iter().all(|family| state.is_live(family))
    }

    /// Returns true if Services are kept up to date on all parts of the node (upstream's
    /// `Health().Healthy`), whether or not the node may receive traffic.
    pub(super) fn is_healthy(&self) -> bool {
        self.is_live() && self.state.borrow().is_whole()
    }

    /// Returns true if no change of this family has waited too long.
    #[cfg(test)]
    pub(crate) fn is_live_for(&self, family: IpFamily) -> bool {
        let state = self.state.borrow();
        state.is_live(&state.families[family as usize])
    }

    /// Returns true after the first full sync is in the kernel.
    pub fn is_programmed(&self) -> bool {
        self.state.borrow().is_programmed()
    }

    /// Returns true if `/healthz` answers 200: Services are kept up to date and the node may
    /// receive traffic.
    pub fn is_ready(&self) -> bool {
        let state = *self.state.borrow();
        state.is_programmed() && !state.node_ineligible && self.is_healthy()
    }

    pub(super) fn livez(&self) -> Report {
        self.report(None, true, self.is_live())
    }

    pub(super) fn healthz(&self) -> Report {
        let eligible = self.is_programmed() && !self.state.borrow().node_ineligible;
        let is_whole = self.state.borrow().is_whole();
        self.report(Some(eligible), is_whole, self.is_ready())
    }

    /// Returns what the kernel has, and why the proxy is not ready.
    pub(super) fn progress(&self) -> Progress {
        let state = *self.state.borrow();
        let now = Timestamp::now();
        let families = IpFamily::ALL.map(|family| {
            let FamilyState { last_updated, oldest_pending } = state.families[family as usize];
            // The clock may have been set back meanwhile.
            let since = |time| Duration::try_from(now.duration_since(time)).unwrap_or_default();
            let oldest_pending = oldest_pending.map(|since| since.elapsed());
            FamilyProgress { family, last_updated: last_updated.map(since), oldest_pending }
        });
        let reasons = [
            (!self.is_programmed(), "the first full sync is not complete"),
            (state.node_ineligible, "the Node object is missing or is being deleted"),
            (!state.is_whole(), "a part of the node could not be programmed for too long"),
            (!self.is_live(), "a change waits for too long"),
        ];
        let not_ready = reasons.into_iter().filter(|(applies, _)| *applies).map(|(_, reason)| reason);
        Progress { families, not_ready: not_ready.collect() }
    }

    /// Without `is_whole`, nothing counts as healthy.
    fn report(&self, node_eligible: Option<bool>, is_whole: bool, ok: bool) -> Report {
        let state = *self.state.borrow();
        let text_of = |time: Option<Timestamp>| time.map_or_else(|| NEVER.into(), |time| time.to_string());
        let last_updated = text_of(state.families.iter().filter_map(|family| family.last_updated).max());
        let now = Timestamp::now().to_string();
        let healthy = self.is_live() && is_whole;
        // Upstream has one proxier for each family. A family that was never updated is not in the
        // report.
        let families = IpFamily::ALL.map(IpFamily::name).into_iter().zip(&state.families);
        let updated = families.filter(|(_, family)| family.last_updated.is_some());
        let status = updated.map(|(name, family)| {
            let healthy = state.is_live(family) && is_whole;
            (name, FamilyReport { last_updated: text_of(family.last_updated), healthy })
        });
        let status = status.collect();
        // As upstream: if the proxy is healthy, `lastUpdated` is the current time, even if there
        // was nothing to update.
        let last_updated = if ok { now.clone() } else { last_updated };
        Report {
            last_updated,
            current_time: now,
            node_eligible,
            healthy,
            status,
            displaced_links: Vec::new(),
            unreadable_manifests: Vec::new(),
            ok,
        }
    }
}
