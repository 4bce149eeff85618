//! Selects the endpoints of a service port that this node uses, by readiness, termination and
//! hints.

use std::sync::Arc;

use super::{Hints, ResolvedEndpoint, endpoint_slice_cache::EndpointInfo};

/// The location of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeLocation<'a> {
    pub(super) node_name: &'a str,
    /// Empty if the Node has no zone label.
    pub(super) zone: &'a str,
}

/// The policies that some traffic of a service port uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedPolicies {
    pub(super) cluster: bool,
    pub(super) local: bool,
}

/// The endpoint list of each policy, in the order of the given endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EndpointLists {
    pub(super) cluster: Vec<ResolvedEndpoint>,
    pub(super) local: Vec<ResolvedEndpoint>,
    /// At least one endpoint is usable, on any node. Then `cluster` is not empty if it is used.
    pub(super) has_endpoints: bool,
}

/// The hints that restrict the endpoints for policy `Cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TopologyMode {
    All,
    SameNode,
    SameZone,
}

/// Upstream's `CategorizeEndpoints` (`pkg/proxy/topology.go`, 1.36). Each policy uses ready
/// endpoints. If it has none, it uses those that serve while they terminate. Hints restrict only
/// policy `Cluster`, and never to an empty list.
pub(super) fn categorize(
    endpoints: &[EndpointInfo<'_>],
    policies: UsedPolicies,
    node: NodeLocation<'_>,
) -> EndpointLists {
    let is_usable = |endpoint: &EndpointInfo<'_>| endpoint.is_ready() || endpoint.is_serving_terminating();
    let mut lists =
        EndpointLists { has_endpoints: endpoints.iter().any(is_usable), ..EndpointLists::default() };
    if policies.cluster {
        let mode = topology_mode(endpoints, node);
        lists.cluster = select(endpoints, |endpoint| is_available(endpoint, mode, node));
    }
    if policies.local {
        lists.local = select(endpoints, |endpoint| endpoint.is_local);
    }
    lists
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
fn topology_mode(endpoints: &[EndpointInfo<'_>], node: NodeLocation<'_>) -> TopologyMode {
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
        let Hints { zones, nodes } = self.hints?;
        match mode {
            TopologyMode::All => None,
            TopologyMode::SameNode => Some(nodes),
            TopologyMode::SameZone => Some(zones),
        }
    }

    /// Returns true if the endpoint is ready and not terminating, or if its Service has
    /// publishNotReadyAddresses.
    pub(super) fn is_ready(&self) -> bool {
        self.conditions.ready
    }

    fn is_serving_terminating(&self) -> bool {
        self.conditions.serving && self.conditions.terminating
    }
}
