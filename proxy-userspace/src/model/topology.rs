//! Selects the endpoints of a service port that this node uses, by readiness, termination and
//! hints.

use std::sync::Arc;

use super::{
    Hints, ResolvedEndpoint, ResolvedPort,
    endpoint_slice_cache::EndpointInfo,
    service_port::{uses_cluster_endpoints, uses_local_endpoints},
};

/// The location of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeLocation<'a> {
    pub(super) node_name: &'a str,
    /// Empty if the Node has no zone label.
    pub(super) zone: &'a str,
}

/// The hints that restrict the endpoints for policy `Cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TopologyMode {
    All,
    SameNode,
    SameZone,
}

/// Sets the endpoint list of each policy that some traffic uses, like upstream's
/// `CategorizeEndpoints` (`pkg/proxy/topology.go`, 1.36). Each policy uses ready endpoints. If it
/// has none, it uses those that serve while they terminate. Hints restrict only policy `Cluster`,
/// and never to an empty list.
pub(super) fn set_endpoint_lists(
    port: &mut ResolvedPort,
    endpoints: &[EndpointInfo<'_>],
    node: NodeLocation<'_>,
) {
    port.has_endpoints = endpoints.iter().any(|e| e.is_ready() || e.is_serving_terminating());
    if uses_cluster_endpoints(port) {
        let mode = topology_mode(endpoints, node);
        port.cluster_endpoints = select(endpoints, |endpoint| is_available(endpoint, mode, node));
    }
    if uses_local_endpoints(port) {
        port.local_endpoints = select(endpoints, |endpoint| endpoint.is_local);
    }
}

/// Selects the ready endpoints among the eligible ones. If there is none, selects those that serve
/// while they terminate. Hints do not matter then: if no ready endpoint matches the hints,
/// [`topology_mode`] ignores them.
fn select(
    endpoints: &[EndpointInfo<'_>],
    is_eligible: impl Fn(&EndpointInfo<'_>) -> bool,
) -> Vec<ResolvedEndpoint> {
    let ready = resolve_endpoints(endpoints, |endpoint| endpoint.is_ready() && is_eligible(endpoint));
    if ready.is_empty() {
        resolve_endpoints(endpoints, |endpoint| endpoint.is_serving_terminating() && is_eligible(endpoint))
    } else {
        ready
    }
}

/// Returns the selected endpoints in a list without spare capacity.
pub(super) fn resolve_endpoints(
    endpoints: &[EndpointInfo<'_>],
    is_selected: impl Fn(&EndpointInfo<'_>) -> bool,
) -> Vec<ResolvedEndpoint> {
    let selected = endpoints.iter().filter(|endpoint| is_selected(endpoint));
    let mut list: Vec<_> =
        selected.map(|e| ResolvedEndpoint { address: e.address, is_local: e.is_local }).collect();
    list.shrink_to_fit();
    list
}

/// Returns `SameNode` if all ready endpoints have node hints, and one is for this node. Otherwise
/// checks `SameZone` in the same way. Otherwise returns `All`.
pub(super) fn topology_mode(endpoints: &[EndpointInfo<'_>], node: NodeLocation<'_>) -> TopologyMode {
    let ready = || endpoints.iter().filter(|endpoint| endpoint.is_ready());
    if ready().next().is_none() {
        return TopologyMode::All;
    }
    let is_hinted = |mode| {
        ready().all(|endpoint| endpoint.hints_for(mode).is_some_and(|hints| !hints.is_empty()))
            && ready().any(|endpoint| is_available(endpoint, mode, node))
    };
    [TopologyMode::SameNode, TopologyMode::SameZone]
        .into_iter()
        .find(|mode| is_hinted(*mode))
        .unwrap_or(TopologyMode::All)
}

fn is_available(endpoint: &EndpointInfo<'_>, mode: TopologyMode, node: NodeLocation<'_>) -> bool {
    let name = match mode {
        TopologyMode::All => return true,
        TopologyMode::SameNode => node.node_name,
        TopologyMode::SameZone => node.zone,
    };
    endpoint.hints_for(mode).is_some_and(|hints| hints.iter().any(|hint| &**hint == name))
}

impl EndpointInfo<'_> {
    fn hints_for(&self, mode: TopologyMode) -> Option<&[Arc<str>]> {
        let Hints { zones, nodes } = self.endpoint.placement.hints.as_deref()?;
        match mode {
            TopologyMode::All => None,
            TopologyMode::SameNode => Some(nodes),
            TopologyMode::SameZone => Some(zones),
        }
    }

    /// Returns true if the endpoint is ready and not terminating, or if its Service has
    /// publishNotReadyAddresses.
    pub(super) fn is_ready(&self) -> bool {
        self.endpoint.ready
    }

    /// Returns true if the endpoint takes traffic while it terminates.
    pub(super) fn is_serving_terminating(&self) -> bool {
        self.endpoint.serving && self.endpoint.terminating
    }
}
