//! The parts of a plan: what is sent to whom at once.

use std::net::{IpAddr, SocketAddr};

use super::super::{
    held::RulesChange,
    sets::{Entry, Set},
};
use crate::{
    kernel::{
        ipvs::{Change, Timeouts, VirtualKey},
        sysctl::NetSetting,
    },
    model::IpFamily,
};

/// A part of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Step {
    /// A setting of the kernel.
    Setting(NetSetting, i64),
    /// Those that are not zero.
    Timeouts(Timeouts),
    /// Make the dummy link.
    Link,
    /// One `ipset restore`.
    Sets(Vec<SetChange>),
    /// One iptables-restore.
    Rules(IpFamily, RulesChange),
    /// Messages to IPVS.
    Servers(Vec<Change>),
    /// Real servers of TCP that get no new connections, and go when they have none any more.
    Retire(Vec<(VirtualKey, SocketAddr)>),
    /// Addresses of the dummy link.
    AddAddresses(Vec<IpAddr>),
    /// Addresses that it has no more.
    DeleteAddresses(Vec<IpAddr>),
}

/// A change of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum SetChange {
    /// Make it.
    Create(IpFamily, Set),
    /// Add an entry.
    Add(IpFamily, Set, Entry),
    /// Delete one.
    Delete(IpFamily, Set, Entry),
}

impl SetChange {
    /// As `ipset restore` takes it.
    pub(in super::super) fn line(&self) -> String {
        match self {
            Self::Create(family, set) => {
                format!("create {} {}\n", set.name(*family), set.made_as(*family))
            }
            Self::Add(family, set, entry) => format!("add {} {entry}\n", set.name(*family)),
            Self::Delete(family, set, entry) => format!("del {} {entry}\n", set.name(*family)),
        }
    }
}

impl Step {
    /// How many changes it is.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Setting(..) | Self::Timeouts(_) | Self::Link => 1,
            Self::Sets(changes) => changes.len(),
            Self::Rules(_, change) => change.len(),
            Self::Servers(changes) => changes.len(),
            Self::Retire(reals) => reals.len(),
            Self::AddAddresses(addresses) | Self::DeleteAddresses(addresses) => addresses.len(),
        }
    }
}
