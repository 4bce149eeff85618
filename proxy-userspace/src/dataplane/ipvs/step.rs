//! The steps of a plan. Each step is one command or one batch of messages to the kernel.

use std::net::{IpAddr, SocketAddr};

use super::sets::{Set, SetEntry};
use crate::{
    dataplane::iptables_text::TableInput,
    kernel::{
        ipvs::{Change, Timeouts, VirtualKey},
        sysctl::Sysctl,
    },
    model::IpFamily,
};

/// A step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Write a sysctl.
    Sysctl(Sysctl, i64),
    /// Set the IPVS timeouts that are not zero.
    Timeouts(Timeouts),
    /// Create the dummy link.
    Link,
    /// Run `ipset restore`.
    Sets(Vec<SetChange>),
    /// Run iptables-restore.
    Rules(IpFamily, Vec<TableInput>),
    /// Send messages to IPVS.
    Servers(Vec<Change>),
    /// Stop new connections to these real servers of TCP. Remove those that have no connections.
    Drain(Vec<(VirtualKey, SocketAddr)>),
    /// Add addresses to the dummy link.
    AddAddresses(Vec<IpAddr>),
    /// Delete addresses from the dummy link.
    DeleteAddresses(Vec<IpAddr>),
}

/// A change of an ipset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetChange {
    /// Create the set.
    Create(IpFamily, Set),
    /// Add an entry.
    Add(SetEntry),
    /// Delete an entry.
    Delete(SetEntry),
}

impl SetChange {
    /// Returns the line for `ipset restore`.
    pub(super) fn line(&self) -> String {
        match self {
            Self::Create(family, set) => {
                format!("create {} {}\n", set.name(*family), set.definition(*family))
            }
            Self::Add(entry) => format!("add {entry}\n"),
            Self::Delete(entry) => format!("del {entry}\n"),
        }
    }
}

impl Step {
    /// Returns the number of changes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Sysctl(..) | Self::Timeouts(_) | Self::Link => 1,
            Self::Sets(changes) => changes.len(),
            Self::Rules(_, inputs) => inputs.iter().map(TableInput::len).sum(),
            Self::Servers(changes) => changes.len(),
            Self::Drain(reals) => reals.len(),
            Self::AddAddresses(addresses) | Self::DeleteAddresses(addresses) => addresses.len(),
        }
    }
}
