//! The labels of metrics, and the types whose names are their values.

use crate::model::IpFamily;

/// The values of constant labels.
pub(super) type Labels<const N: usize> = [(&'static str, &'static str); N];
/// The values of labels that are not known in advance.
pub(super) type TextLabels = Vec<(&'static str, String)>;

/// The traffic policy to which a count applies; the label `traffic_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicySide {
    /// internalTrafficPolicy.
    Internal,
    /// externalTrafficPolicy.
    External,
}

/// The extent of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncExtent {
    /// A full sync, after a fresh observation of the kernel.
    Full,
    /// A partial sync of what was dirty.
    Partial,
}

/// Why `auto` runs another mode than the one that it prefers; the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The kernel or the node lacks something that the preferred mode needs.
    Unsupported,
    /// A mode ran and failed for good.
    Broken,
}

impl Fallback {
    pub(super) const ALL: [Self; 2] = [Self::Unsupported, Self::Broken];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::Broken => "broken",
        }
    }
}

/// The kinds of watched objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchedKind {
    /// Services.
    Service,
    /// EndpointSlices.
    EndpointSlice,
    /// Nodes.
    Node,
}

impl WatchedKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
        }
    }
}

pub(super) const fn ip_family(family: IpFamily) -> (&'static str, &'static str) {
    ("ip_family", family.name())
}

pub(super) const fn policy_labels(side: PolicySide, family: IpFamily) -> Labels<2> {
    let side = match side {
        PolicySide::Internal => "internal",
        PolicySide::External => "external",
    };
    [("traffic_policy", side), ip_family(family)]
}

pub(super) const fn code(healthy: bool) -> (&'static str, &'static str) {
    ("code", if healthy { "200" } else { "503" })
}
