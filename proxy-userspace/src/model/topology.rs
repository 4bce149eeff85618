//! Which endpoints of a service port this node uses: readiness, termination fallback and topology hints.

use std::sync::Arc;

use super::{Hints, ResolvedEndpoint, endpoint_slice_cache::EndpointInfo};

/// Where this node is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology<'a> {
    pub(super) node_name: &'a str,
    /// Empty where the Node has no zone label.
    pub(super) zone: &'a str,
}

/// The kinds of endpoint list that a service port sends traffic to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uses {
    pub(super) cluster: bool,
    pub(super) local: bool,
}

/// The endpoints chosen, in the order given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Categorized {
    pub(super) cluster: Vec<ResolvedEndpoint>,
    pub(super) local: Vec<ResolvedEndpoint>,
    /// Some endpoint is usable, here or elsewhere. Never true beside an empty list for policy Cluster where that is used.
    pub(super) has_endpoints: bool,
}

/// Whose hints narrow the endpoints for policy Cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TopologyMode {
    All,
    SameNode,
    SameZone,
}

/// Upstream's `CategorizeEndpoints` (`pkg/proxy/topology.go`, 1.36): ready endpoints, else those that serve while they
/// terminate, for each policy by itself; hints narrow policy Cluster only, and never to nothing.
pub(super) fn categorize(endpoints: &[EndpointInfo<'_>], uses: Uses, here: Topology<'_>) -> Categorized {
    let mut categorized = Categorized {
        has_endpoints: endpoints
            .iter()
            .any(|endpoint| endpoint.is_ready() || endpoint.is_serving_terminating()),
        ..Categorized::default()
    };
    if uses.cluster {
        let mode = topology_mode(endpoints, here);
        categorized.cluster = choose(endpoints, |endpoint| is_available(endpoint, mode, here));
    }
    if uses.local {
        categorized.local = choose(endpoints, |endpoint| endpoint.is_local);
    }
    categorized
}

/// Ready endpoints that are eligible, else eligible ones that serve while they terminate. Hints are no longer looked at
/// in the latter case: where they would leave no ready endpoint, [`topology_mode`] has dropped them already.
fn choose(
    endpoints: &[EndpointInfo<'_>],
    eligible: impl Fn(&EndpointInfo<'_>) -> bool,
) -> Vec<ResolvedEndpoint> {
    let resolve = |chosen: &dyn Fn(&EndpointInfo<'_>) -> bool| -> Vec<_> {
        let chosen = endpoints.iter().filter(|endpoint| chosen(endpoint));
        let mut list: Vec<_> =
            chosen.map(|e| ResolvedEndpoint { address: e.address, is_local: e.is_local }).collect();
        list.shrink_to_fit();
        list
    };
    let ready = resolve(&|endpoint| endpoint.is_ready() && eligible(endpoint));
    if ready.is_empty() {
        resolve(&|endpoint| endpoint.is_serving_terminating() && eligible(endpoint))
    } else {
        ready
    }
}

/// Same node if every ready endpoint has node hints and one is for this node; else same zone likewise; else all.
fn topology_mode(endpoints: &[EndpointInfo<'_>], here: Topology<'_>) -> TopologyMode {
    let ready = || endpoints.iter().filter(|endpoint| endpoint.is_ready());
    if ready().next().is_none() {
        return TopologyMode::All;
    }
    let hinted_here = |mode| {
        ready().all(|endpoint| endpoint.hints_for(mode).is_some_and(|hints| !hints.is_empty()))
            && ready().any(|endpoint| is_available(endpoint, mode, here))
    };
    [TopologyMode::SameNode, TopologyMode::SameZone]
        .into_iter()
        .find(|mode| hinted_here(*mode))
        .unwrap_or(TopologyMode::All)
}

fn is_available(endpoint: &EndpointInfo<'_>, mode: TopologyMode, here: Topology<'_>) -> bool {
    let wanted = match mode {
        TopologyMode::All => return true,
        TopologyMode::SameNode => here.node_name,
        TopologyMode::SameZone => here.zone,
    };
    endpoint.hints_for(mode).is_some_and(|hints| hints.iter().any(|hint| hint.as_ref() == wanted))
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

    /// Ready and not terminating, or of a Service with publishNotReadyAddresses.
    pub(super) fn is_ready(&self) -> bool {
        self.conditions.ready
    }

    fn is_serving_terminating(&self) -> bool {
        self.conditions.serving && self.conditions.terminating
    }
}
