//! What a failed `apply` concerns, and the service ports that it left out.

use std::fmt;

use crate::model::{IpFamily, ServicePortKey};

/// What an error of `apply` concerns. Everything else was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureScope {
    /// Anything may be missing.
    Everything,
    /// One family, of which nothing is certain.
    Family(IpFamily),
    /// A part of the node that serves many Services, such as a link or the netfilter rules.
    /// Service ports may be left out, too.
    Node,
    /// Only the service ports that are left out.
    ServicePorts,
}

impl FailureScope {
    /// Returns true if something was certainly applied.
    pub const fn is_limited(self) -> bool {
        !matches!(self, Self::Everything)
    }
}

/// Why a service port is left out; the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeftOutReason {
    /// A map has no room for it.
    MapFull,
    /// The mode cannot serve its protocol on this node.
    Protocol,
    /// The kernel or a command rejected a part of it.
    Rejected,
}

impl LeftOutReason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::MapFull, Self::Protocol, Self::Rejected];

    /// Returns the value of the label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MapFull => "map-full",
            Self::Protocol => "protocol",
            Self::Rejected => "rejected",
        }
    }
}

impl fmt::Display for LeftOutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A service port that is not served as it should be, while others are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOutPort {
    /// The service port.
    pub port: ServicePortKey,
    /// The reason.
    pub reason: LeftOutReason,
    /// The error, and what may help.
    pub message: String,
}
