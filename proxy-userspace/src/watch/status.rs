//! The state of a source, for health and metrics.

use std::time::SystemTime;

use jiff::Timestamp;

/// The state of a source, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchStatus {
    /// Services.
    pub services: KindStatus,
    /// EndpointSlices.
    pub endpoint_slices: KindStatus,
    /// Nodes.
    pub nodes: KindStatus,
    /// ServiceCIDRs, which the server may not have.
    pub service_cidrs: KindStatus,
    /// What cannot be read in a directory of manifests. The last good version of it is in effect,
    /// if there is one.
    pub manifest_errors: ManifestErrors,
}

/// The errors of manifests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestErrors {
    /// The number of errors.
    pub count: usize,
    /// The first ones, with the file and the position in it, and how many more there are.
    pub texts: Vec<String>,
}

impl WatchStatus {
    /// Returns true if each kind except ServiceCIDRs was listed at least once.
    pub fn synced(&self) -> bool {
        self.services.synced && self.endpoint_slices.synced && self.nodes.synced
    }
}

/// The state of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindStatus {
    /// The kind was listed at least once. Stays true.
    pub synced: bool,
    /// Why the kind is not up to date now; none if it is.
    pub last_error: Option<String>,
    /// Since when the kind is watched; none if it is not watched now.
    pub connected_since: Option<SystemTime>,
    /// When the last list, change or bookmark came. Kept while the kind is not watched. Its change
    /// alone wakes no receiver.
    pub last_event: Option<Timestamp>,
}

impl KindStatus {
    /// The kind is watched, without an error.
    pub(super) fn connected(&mut self) {
        self.last_error = None;
        self.connected_since.get_or_insert_with(SystemTime::now);
    }

    /// The kind is not watched.
    pub(super) fn failed(&mut self, error: String) {
        self.last_error = Some(error);
        self.connected_since = None;
    }
}
