//! Decides about a connection to a service port: source ranges, policy, endpoints and masquerading.

use std::sync::Arc;

use super::{
    EndpointChoice, Explanation, Location, Masquerade, Policy, Situation, Source, SourceRanges, Verdict,
    client::Whereabouts, hook::Seen,
};
use crate::{
    dataplane::ebpf::{masquerades, sends_through_tunnel},
    mode::Mode,
    model::{
        Balance, Exclusion, FrontendKind, Hints, IpFamily, KnownEndpoint, NoEndpointVerdict, Owner,
        ResolvedEndpoint, ResolvedPort, TrafficPolicy,
    },
};

/// A connection to a service port.
pub(super) struct Connection<'a> {
    pub(super) situation: Situation<'a>,
    pub(super) whereabouts: &'a Whereabouts,
    pub(super) seen: &'a Seen,
    pub(super) owner: Owner<'a>,
    pub(super) family: IpFamily,
}

impl Connection<'_> {
    /// Completes the explanation.
    pub(super) fn decide(&self, answer: &mut Explanation) {
        answer.source_ranges = self.source_ranges();
        let (list, policy) = self.list();
        answer.policy = Some(self.policy(policy));
        let (applies, reason) = self.masquerade();
        answer.masquerade = Some(Masquerade { applies, reason: reason.to_owned() });
        let is_denied = answer.source_ranges.as_ref().is_some_and(|ranges| !ranges.allowed);
        let known = self.situation.model.known_endpoints(self.owner.key);
        let choices = known.iter().map(|endpoint| self.choice(endpoint, list, policy, applies));
        answer.endpoints = choices.map(|choice| if is_denied { denied(choice) } else { choice }).collect();
        (answer.verdict, answer.reason) = if is_denied {
            (Verdict::Drop, "the source ranges of the Service do not hold the client".to_owned())
        } else if list.is_empty() {
            self.without_endpoints()
        } else {
            (Verdict::Translate, format!("one of {} endpoints{}", list.len(), self.chosen_by(list, policy)))
        };
    }

    /// Says by what an endpoint is chosen, unless at random.
    fn chosen_by(&self, list: &[ResolvedEndpoint], policy: TrafficPolicy) -> &'static str {
        let ResolvedPort { balance, affinity_timeout, .. } = self.owner.port.as_ref();
        let is_on_links = self.seen.rules == Some(Mode::Ebpf) && !self.seen.is_socket();
        if *balance != Balance::Maglev || !is_on_links || self.is_inside() || list.len() < 2 {
            return "";
        }
        // With policy Local, each node has a list of its own.
        match (affinity_timeout, policy) {
            (None, TrafficPolicy::Cluster) => {
                ", by the client's address and port: the same on every node (Maglev)"
            }
            (Some(_), TrafficPolicy::Cluster) => ", by the client's address: the same on every node (Maglev)",
            (None, TrafficPolicy::Local) => ", by the client's address and port (Maglev)",
            (Some(_), TrafficPolicy::Local) => ", by the client's address (Maglev)",
        }
    }

    fn is_external(&self) -> bool {
        self.owner.kind != FrontendKind::ClusterIp
    }

    /// Returns true if policy `Local` of external addresses does not apply to the client.
    fn is_inside(&self) -> bool {
        let node = &self.situation.model.snapshot().node;
        match self.whereabouts.location {
            Location::Node => true,
            Location::Pod if self.seen.is_socket() => true,
            Location::Pod | Location::Outside => {
                node.local_detector.is_implemented(self.family) && self.whereabouts.is_detected(node)
            }
        }
    }

    /// Returns the endpoints of which the client gets one, and the policy that chose them.
    fn list(&self) -> (&[ResolvedEndpoint], TrafficPolicy) {
        let port = self.owner.port;
        let policy = match (self.is_external(), self.is_inside()) {
            (false, _) => port.internal_policy,
            // One virtual server serves all clients.
            (true, _) if self.is_ipvs() && port.external_policy == TrafficPolicy::Local => {
                let has_local = !port.local_endpoints.is_empty();
                if has_local || !self.is_inside() { TrafficPolicy::Local } else { TrafficPolicy::Cluster }
            }
            (true, true) => TrafficPolicy::Cluster,
            (true, false) => port.external_policy,
        };
        (port.endpoints(policy), policy)
    }

    fn is_ipvs(&self) -> bool {
        self.seen.rules == Some(Mode::Ipvs)
    }

    fn policy(&self, applied: TrafficPolicy) -> Policy {
        let (field, value) = if self.is_external() {
            ("externalTrafficPolicy", self.owner.port.external_policy)
        } else {
            ("internalTrafficPolicy", self.owner.port.internal_policy)
        };
        let effect = match (value, applied) {
            (TrafficPolicy::Local, TrafficPolicy::Cluster) => match self.whereabouts.location {
                Location::Outside => {
                    "does not apply to clients in the cluster CIDR (local detection): they get all endpoints"
                }
                Location::Node | Location::Pod => {
                    "does not apply to this node and its pods: they get all endpoints"
                }
            },
            (_, TrafficPolicy::Cluster) => "all endpoints",
            (_, TrafficPolicy::Local) => "endpoints of this node only",
        };
        Policy { field: field.to_owned(), value: value.name().to_owned(), effect: effect.to_owned() }
    }

    fn source_ranges(&self) -> Option<SourceRanges> {
        let ranges = &self.owner.port.source_ranges;
        if self.owner.kind != FrontendKind::LoadBalancerIp || ranges.is_empty() {
            return None;
        }
        let primary = || self.situation.model.snapshot().node.primary_addresses.get(&self.family).copied();
        let source = self.whereabouts.address.or_else(primary);
        let allowed = source.is_some_and(|source| ranges.iter().any(|range| range.contains(&source)));
        Some(SourceRanges { ranges: ranges.clone(), allowed })
    }

    /// Returns true if the node gives its own address to the connection, and why or why not.
    fn masquerade(&self) -> (bool, &'static str) {
        let node = &self.situation.model.snapshot().node;
        if self.whereabouts.location == Location::Node {
            return (false, "the node connects with an address of its own");
        }
        if self.seen.is_socket() {
            return (false, "the socket connects to the endpoint itself: nothing to masquerade");
        }
        let masquerades = masquerades(self.owner.port, self.owner.kind, node, self.family);
        let is_detected = self.whereabouts.is_detected(node);
        match (self.owner.kind, if is_detected { masquerades.inside } else { masquerades.outside }) {
            (FrontendKind::ClusterIp, true) if node.masquerade_all => (true, "masqueradeAll"),
            (FrontendKind::ClusterIp, true) => (
                true,
                "local detection does not take the client for a pod of this node: replies must return here",
            ),
            (FrontendKind::ClusterIp, false) if is_detected => (false, self.detected()),
            (FrontendKind::ClusterIp, false) => (false, "no local detection, so nothing counts as not local"),
            (_, true) if self.may_use_tunnel() => (
                true,
                "externalTrafficPolicy Cluster: replies must return here, except from endpoints that get \
                 the packets through the tunnel (direct server return)",
            ),
            (_, true) => (true, "externalTrafficPolicy Cluster: replies must return here"),
            (_, false) => (false, "externalTrafficPolicy Local keeps the client's address"),
        }
    }

    /// Says why local detection takes the client for a local pod.
    fn detected(&self) -> &'static str {
        match self.whereabouts.location {
            Location::Outside => "the client is in the cluster CIDR (local detection)",
            Location::Node | Location::Pod => "the client is a local pod",
        }
    }

    /// Returns true if packets to other nodes may go through the tunnel.
    fn may_use_tunnel(&self) -> bool {
        let is_on_links = self.seen.rules == Some(Mode::Ebpf) && !self.seen.is_socket();
        let node = &self.situation.model.snapshot().node;
        let sends = sends_through_tunnel(self.owner.port, self.owner.kind, node, self.family);
        let is_of_node =
            |address| node.tunnel.as_ref().is_some_and(|tunnel| tunnel.addresses_of_nodes.contains(address));
        let may_come_back = self.whereabouts.address.as_ref().is_some_and(is_of_node);
        let is_up = node.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_up);
        is_on_links && is_up && sends && !self.is_inside() && !may_come_back
    }

    fn choice(
        &self,
        endpoint: &KnownEndpoint,
        list: &[ResolvedEndpoint],
        policy: TrafficPolicy,
        masquerade: bool,
    ) -> EndpointChoice {
        let chosen = list.iter().any(|listed| listed.address == endpoint.address);
        let is_hairpin = !self.seen.is_socket() && self.whereabouts.address == Some(endpoint.address.ip());
        let is_node = self.whereabouts.location == Location::Node;
        let is_tunneled =
            self.may_use_tunnel() && self.owner.port.dsr_nodes.contains_key(&endpoint.address.ip());
        let is_masqueraded = is_node || masquerade && !is_tunneled || is_hairpin;
        let source = if is_masqueraded { Source::Node } else { Source::Client };
        EndpointChoice {
            address: endpoint.address,
            pod: endpoint.pod.as_deref().map(ToOwned::to_owned),
            node: endpoint.node_name.as_deref().map(ToOwned::to_owned),
            local: endpoint.is_local,
            chosen,
            reason: (!chosen).then(|| why_not_in_list(endpoint, policy)),
            source: chosen.then_some(source),
        }
    }

    fn without_endpoints(&self) -> (Verdict, String) {
        let port = self.owner.port;
        if self.is_ipvs() {
            let is_outside = self.is_external() && !self.is_inside() && port.has_endpoints;
            return if is_outside {
                (
                    Verdict::Drop,
                    "no endpoint of this node, and replies of others would not return here".to_owned(),
                )
            } else {
                (Verdict::Refuse, "the virtual server has no endpoint".to_owned())
            };
        }
        match port.no_endpoint_verdict() {
            NoEndpointVerdict::Refuse => {
                (Verdict::Refuse, "the Service has no usable endpoint on any node".to_owned())
            }
            NoEndpointVerdict::Drop => {
                (Verdict::Drop, "policy Local, and no usable endpoint is on this node".to_owned())
            }
        }
    }
}

/// Returns the choice for a client that no source range holds.
fn denied(choice: EndpointChoice) -> EndpointChoice {
    let of_ranges = || "the source ranges do not hold the client".to_owned();
    let reason = choice.reason.or_else(|| Some(of_ranges()));
    EndpointChoice { chosen: false, source: None, reason, ..choice }
}

/// Says why a policy leaves an endpoint out.
pub fn why_not_in_list(endpoint: &KnownEndpoint, policy: TrafficPolicy) -> String {
    let hints = |of: fn(&Hints) -> &[Arc<str>]| {
        endpoint.hints.as_deref().map(|hints| of(hints).join(", ")).unwrap_or_default()
    };
    match endpoint.exclusion(policy) {
        Some(Exclusion::NotReady) if endpoint.conditions.terminating => {
            "it terminates and does not serve".to_owned()
        }
        Some(Exclusion::NotReady) => "it is not ready".to_owned(),
        Some(Exclusion::Terminating) => "it terminates, and others are ready".to_owned(),
        Some(Exclusion::OtherZone) => format!("its hints are for the zone {}", hints(|hints| &hints.zones)),
        Some(Exclusion::OtherNodeHint) => {
            format!("its hints are for the node {}", hints(|hints| &hints.nodes))
        }
        Some(Exclusion::OtherNode) => "it is on another node".to_owned(),
        None => "the mode does not use it".to_owned(),
    }
}
