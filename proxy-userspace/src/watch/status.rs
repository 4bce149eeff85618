//! What a source can say about itself, for health and metrics.

use std::time::SystemTime;

use tokio::sync::watch;

/// A source's state, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchStatus {
    /// Services.
    pub services: KindStatus,
    /// EndpointSlices.
    pub endpoint_slices: KindStatus,
    /// Nodes.
    pub nodes: KindStatus,
    /// ServiceCIDRs, which may not be there.
    pub service_cidrs: KindStatus,
}

impl WatchStatus {
    /// Whether each kind was listed at least once, but ServiceCIDRs, which need not be there.
    pub fn synced(&self) -> bool {
        self.services.synced && self.endpoint_slices.synced && self.nodes.synced
    }
}

/// One kind's state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindStatus {
    /// Listed at least once; stays true.
    pub synced: bool,
    /// What keeps the kind from being up to date now; none while all is well.
    pub last_error: Option<String>,
    /// Since when changes have been coming in; none while they do not.
    pub connected_since: Option<SystemTime>,
}

impl KindStatus {
    /// All is well from now on.
    pub(super) fn connected(&mut self) {
        self.last_error = None;
        self.connected_since.get_or_insert_with(SystemTime::now);
    }

    /// Changes do not come in.
    pub(super) fn failed(&mut self, error: String) {
        self.last_error = Some(error);
        self.connected_since = None;
    }
}

/// A channel that starts with nothing listed.
pub(super) fn channel() -> watch::Sender<WatchStatus> {
    watch::Sender::new(WatchStatus::default())
}
