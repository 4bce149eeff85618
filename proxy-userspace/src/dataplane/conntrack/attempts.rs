//! Finds the TCP destinations of which attempts to connect are stale: while rules were missing, no
//! rule translated their first segment, and conntrack repeats that for all further ones.

use std::{collections::HashSet, net::SocketAddr};

use super::candidates::NodePortAddresses;
use crate::model::{IpFamily, Protocol, Snapshot};

/// The VIPs and node ports of all TCP service ports.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServedTcp {
    /// A node port has the unspecified address of its family.
    destinations: HashSet<SocketAddr>,
    node_port_addresses: NodePortAddresses,
}

impl ServedTcp {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let ports = snapshot.ports.iter().filter(|(key, _)| key.name.protocol == Protocol::Tcp);
        let destinations = ports.flat_map(|(key, port)| {
            let unspecified = key.family.unspecified();
            let address = move |address: Option<_>| address.unwrap_or(unspecified);
            port.frontends.iter().map(move |at| SocketAddr::new(address(at.address), at.port.get()))
        });
        Self {
            destinations: destinations.collect(),
            node_port_addresses: NodePortAddresses::new(&snapshot.node, &IpFamily::ALL),
        }
    }

    /// Returns the families that have service ports.
    pub(super) fn families(&self) -> impl Iterator<Item = IpFamily> {
        IpFamily::ALL
            .into_iter()
            .filter(|family| self.destinations.iter().any(|to| IpFamily::of(to.ip()) == *family))
    }

    /// Returns true if the rules serve a destination.
    pub(super) fn contains(&self, destination: SocketAddr) -> bool {
        let address = destination.ip();
        let node_port = SocketAddr::new(IpFamily::of(address).unspecified(), destination.port());
        self.destinations.contains(&destination)
            || self.destinations.contains(&node_port) && self.node_port_addresses.contains(address)
    }
}
