//! Finds out where a client is.

use std::net::IpAddr;

use super::{Client, KnownClient, Location};
use crate::model::{LocalTrafficDetector, Model, NodeView};

/// A client with its place.
#[derive(Clone, Debug)]
pub(super) struct Whereabouts {
    pub(super) location: Location,
    /// `None` for the node itself.
    pub(super) address: Option<IpAddr>,
    pub(super) reason: String,
}

impl Whereabouts {
    /// Returns true if local detection takes its packets for those of a local pod. Where it looks
    /// at links, the address does not tell the link: if any link counts, that of the pod does.
    pub(super) fn is_detected(&self, node: &NodeView) -> bool {
        match (&node.local_detector, self.address) {
            (LocalTrafficDetector::Cidrs(ranges), Some(address)) => {
                ranges.iter().any(|range| range.contains(&address))
            }
            (LocalTrafficDetector::None | LocalTrafficDetector::Cidrs(_), _) => false,
            (LocalTrafficDetector::BridgeInterface(_) | LocalTrafficDetector::InterfaceNamePrefix(_), _) => {
                self.location == Location::Pod && !node.local_links.is_empty()
            }
        }
    }
}

/// Finds a client's place. The question may name it.
pub(super) fn locate(model: &Model, client: &Client) -> Whereabouts {
    let found =
        |location, address, reason: &str| Whereabouts { location, address, reason: reason.to_owned() };
    match *client {
        Client::Node => found(Location::Node, None, "a process of this node"),
        Client::Pod(address) => found(Location::Pod, Some(address), "the question says so"),
        Client::Outside(address) => found(Location::Outside, Some(address), "the question says so"),
        Client::Address(address) => {
            let (location, reason) = of_address(model, address.to_canonical());
            let address = (location != Location::Node).then(|| address.to_canonical());
            Whereabouts { location, address, reason }
        }
        Client::Known(KnownClient { location, address, ref reason, .. }) => found(location, address, reason),
    }
}

/// Returns why a pod counts as outside.
pub(super) fn on_another_node(node: &str) -> String {
    format!(
        "the pod runs on {node}, which decides about its connections first; this is what happens to its packets \
         if they come to this node"
    )
}

fn of_address(model: &Model, address: IpAddr) -> (Location, String) {
    let node = &model.snapshot().node;
    if node.is_local(address) {
        return (Location::Node, "the address is one of this node's".to_owned());
    }
    let pod_cidrs = model.node().map_or(&[][..], |node| &node.pod_cidrs);
    if let Some(range) = pod_cidrs.iter().find(|range| range.contains(&address)) {
        return (Location::Pod, format!("the pod CIDR {range} of this node holds the address"));
    }
    if node.exempt_addresses.contains(&address) {
        return (Location::Pod, "a pod of this node that redirects its own packets".to_owned());
    }
    let ports = model.snapshot().ports.values();
    let mut endpoints = ports.flat_map(|port| port.cluster_endpoints.iter().chain(&port.local_endpoints));
    if endpoints.any(|endpoint| endpoint.is_local && endpoint.address.ip() == address) {
        return (Location::Pod, "an endpoint on this node has the address".to_owned());
    }
    if let Some(node) = model.node_of_pod(address).filter(|node| **node != *model.node_name()) {
        return (Location::Outside, on_another_node(&node));
    }
    let reason = "no pod CIDR and no endpoint of this node has the address; if it is a pod of this node, \
                  ask with --client pod";
    (Location::Outside, reason.to_owned())
}
