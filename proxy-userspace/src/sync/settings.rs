//! The settings of the sync loop.

use std::time::Duration;

use crate::model::ModelSettings;

/// How often the loop acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncPeriods {
    /// The least time between two syncs under load; may be zero.
    pub min_sync_period: Duration,
    /// How often the kernel is compared with the whole Snapshot.
    pub sync_period: Duration,
    /// How long the dataplane may fail before another mode replaces it; `None` for any time. A
    /// dataplane that serves all but some Services does not count as failing.
    pub give_up_after: Option<Duration>,
    /// Nothing is programmed before this node's Node object is known and has the fields that rules
    /// depend on, within limits. An API server sends the Node together with the other objects, or
    /// soon after them if the node is new.
    pub wait_for_node: bool,
}

/// Settings of the loop. They can change while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncSettings {
    /// The settings of endpoint resolution.
    pub model: ModelSettings,
    /// How often the loop acts.
    pub periods: SyncPeriods,
}
