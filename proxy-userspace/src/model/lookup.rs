//! Answers questions about single service ports: who owns an address, and why an endpoint is used
//! or not.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    sync::Arc,
};

use super::{
    Frontend, FrontendKind, Hints, IpFamily, Model, Name, NamespacedName, Protocol, ResolvedEndpoint,
    ResolvedPort, ServicePortKey, ServicePortName, TrafficPolicy, UnservedReason,
    endpoint_slice_cache::EndpointInfo,
    frontend_claims::FrontendIdentity,
    service_port::{uses_cluster_endpoints, uses_local_endpoints},
    topology::{NodeLocation, TopologyMode, topology_mode},
};

/// The service port that serves an address and port.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// Its key.
    pub key: &'a ServicePortKey,
    /// What this node serves.
    pub port: &'a Arc<ResolvedPort>,
    /// The kind of the frontend.
    pub kind: FrontendKind,
}

/// An endpoint of a service port in any of its slices, used or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownEndpoint {
    /// Address and port.
    pub address: SocketAddr,
    /// The name of its pod, which is in the namespace of the Service.
    pub pod: Option<Name>,
    /// `nodeName`.
    pub node_name: Option<Arc<str>>,
    /// It runs on this node.
    pub is_local: bool,
    /// `conditions`.
    pub conditions: Conditions,
    /// `hints`.
    pub hints: Option<Arc<Hints>>,
    /// It is in a list, so that some client may get it.
    pub is_eligible: bool,
    /// Why it is not in the list for policy `Cluster`. `None` if it is, or if nothing uses the
    /// list.
    pub not_in_cluster_list: Option<Exclusion>,
    /// Why it is not in the list for policy `Local`. `None` if it is, or if nothing uses the list.
    pub not_in_local_list: Option<Exclusion>,
}

impl KnownEndpoint {
    /// Returns why a policy leaves the endpoint out.
    pub const fn exclusion(&self, policy: TrafficPolicy) -> Option<Exclusion> {
        match policy {
            TrafficPolicy::Cluster => self.not_in_cluster_list,
            TrafficPolicy::Local => self.not_in_local_list,
        }
    }
}

/// The conditions of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// It takes new connections.
    pub ready: bool,
    /// It answers, also while it terminates.
    pub serving: bool,
    /// It ends.
    pub terminating: bool,
}

/// Why an endpoint is not in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// It is neither ready, nor does it serve while it terminates.
    NotReady,
    /// It terminates, and others are ready.
    Terminating,
    /// The hints of all ready endpoints name zones, and its own do not name this node's zone.
    OtherZone,
    /// The hints of all ready endpoints name nodes, and its own do not name this node.
    OtherNodeHint,
    /// It is on another node, and the policy is `Local`.
    OtherNode,
}

impl Model {
    /// Returns the service port that serves an address and port. `address` is `None` for node
    /// ports.
    pub fn owner(
        &self,
        address: Option<IpAddr>,
        port: NonZeroU16,
        protocol: Protocol,
        family: IpFamily,
    ) -> Option<Owner<'_>> {
        let key = self.claims.owner(&FrontendIdentity { address, port, protocol, family })?;
        let (key, resolved) = self.snapshot.ports.get_key_value(key)?;
        let is_it = |frontend: &&Frontend| frontend.address == address && frontend.port == port;
        let frontend = resolved.frontends.iter().find(is_it)?;
        Some(Owner { key, port: resolved, kind: frontend.kind })
    }

    /// Returns the ports of an address that service ports have.
    pub fn ports_at(&self, address: IpAddr) -> Vec<(NonZeroU16, &ServicePortKey)> {
        self.claims.owners_at(address).collect()
    }

    /// Returns the ports of a Service in both families, sorted by name.
    pub fn ports_of_service(
        &self,
        service: &NamespacedName,
    ) -> impl Iterator<Item = (&ServicePortKey, &Arc<ResolvedPort>)> {
        let name = ServicePortName { service: service.clone(), port: "".into(), protocol: Protocol::Tcp };
        let first = ServicePortKey { name, family: IpFamily::V4 };
        self.snapshot.ports.range(first..).take_while(move |(key, _)| key.name.service == *service)
    }

    /// Returns why a Service is not served, if the source sent it.
    pub fn unserved(&self, service: &NamespacedName) -> Option<UnservedReason> {
        self.services.unserved(service)
    }

    /// Returns the name of this node.
    pub fn node_name(&self) -> &str {
        &self.settings.node_name
    }

    /// Returns all endpoints of a service port, sorted by address. Empty if the port is not in the
    /// Snapshot.
    pub fn known_endpoints(&self, key: &ServicePortKey) -> Vec<KnownEndpoint> {
        let Some(port) = self.snapshot.ports.get(key) else { return Vec::new() };
        let zone = self.node.as_ref().and_then(|node| node.zone.as_deref()).unwrap_or_default();
        let node = NodeLocation { node_name: &self.settings.node_name, zone };
        let endpoints = self.slices.endpoints(key, node.node_name);
        let topology = topology_mode(&endpoints, node);
        endpoints.iter().map(|endpoint| known(endpoint, port, topology)).collect()
    }
}

fn known(info: &EndpointInfo<'_>, port: &ResolvedPort, topology: TopologyMode) -> KnownEndpoint {
    let EndpointInfo { address, is_local, endpoint, .. } = *info;
    let is_in =
        |list: &[ResolvedEndpoint]| list.binary_search_by_key(&address, |listed| listed.address).is_ok();
    let (in_cluster, in_local) = (is_in(&port.cluster_endpoints), is_in(&port.local_endpoints));
    let is_left_out = uses_cluster_endpoints(port) && !in_cluster;
    let is_left_out_locally = uses_local_endpoints(port) && !in_local;
    KnownEndpoint {
        address,
        pod: info.pod(),
        node_name: endpoint.placement.node_name.clone(),
        is_local,
        conditions: Conditions {
            ready: endpoint.ready,
            serving: endpoint.serving,
            terminating: endpoint.terminating,
        },
        hints: endpoint.placement.hints.clone(),
        is_eligible: in_cluster || in_local,
        not_in_cluster_list: is_left_out.then(|| not_in_cluster_list(info, topology)),
        not_in_local_list: is_left_out_locally.then(|| not_in_local_list(info)),
    }
}

fn not_in_cluster_list(info: &EndpointInfo<'_>, topology: TopologyMode) -> Exclusion {
    match topology {
        _ if !info.is_ready() => not_ready(info),
        TopologyMode::SameNode => Exclusion::OtherNodeHint,
        TopologyMode::SameZone | TopologyMode::All => Exclusion::OtherZone,
    }
}

fn not_in_local_list(info: &EndpointInfo<'_>) -> Exclusion {
    if info.is_local { not_ready(info) } else { Exclusion::OtherNode }
}

fn not_ready(info: &EndpointInfo<'_>) -> Exclusion {
    if info.is_serving_terminating() { Exclusion::Terminating } else { Exclusion::NotReady }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Delta, NodeFacts, ServiceType, SliceEndpoint, WatchEvent,
        testing::{endpoint, ip, key, namespaced, node, port_number, service, settings, slice},
    };

    /// Creates a model of one Service, `ns/web`, with these endpoints.
    fn model(endpoints: Vec<SliceEndpoint>) -> Model {
        let mut model = Model::new(settings());
        model.set_node_facts(NodeFacts::default());
        let zoned = crate::model::Node { zone: Some("a".into()), ..node("n1") };
        model.apply(WatchEvent::Nodes(Delta::Replace(vec![zoned])));
        let mut web = service("ns/web", "10.0.0.1");
        web.service_type = ServiceType::NodePort;
        web.ports[0].node_port = Some(port_number(30080));
        web.external_traffic_policy = TrafficPolicy::Local;
        model.apply(WatchEvent::Services(Delta::Replace(vec![web])));
        model.apply(WatchEvent::EndpointSlices(Delta::Replace(vec![slice("ns/web-1", "web", endpoints)])));
        model.resolve();
        model
    }

    fn exclusions(model: &Model) -> Vec<[Option<Exclusion>; 2]> {
        let endpoints = model.known_endpoints(&key("ns/web", ""));
        endpoints
            .iter()
            .map(|it| [TrafficPolicy::Cluster, TrafficPolicy::Local].map(|p| it.exclusion(p)))
            .collect()
    }

    #[test]
    fn the_owner_of_an_address_is_the_port_that_serves_it() {
        let model = model(vec![endpoint("10.1.0.1").on("n1")]);
        let of = |address: Option<&str>, port| {
            let owner = model.owner(address.map(ip), port_number(port), Protocol::Tcp, IpFamily::V4)?;
            Some((owner.key.name.service.clone(), owner.kind))
        };
        assert_eq!(of(Some("10.0.0.1"), 80), Some((namespaced("ns/web"), FrontendKind::ClusterIp)));
        assert_eq!(of(None, 30080), Some((namespaced("ns/web"), FrontendKind::NodePort)));
        assert_eq!(of(Some("10.0.0.1"), 81), None);
        assert_eq!(of(Some("10.0.0.2"), 80), None);
    }

    #[test]
    fn endpoints_say_why_they_are_left_out() {
        let model = model(vec![
            endpoint("10.1.0.1").on("n1"),
            endpoint("10.1.0.2").on("n1").not_ready(),
            endpoint("10.1.0.3").on("n1").terminating(),
            endpoint("10.1.0.4").on("n2"),
        ]);
        let expected = [
            [None, None],
            [Some(Exclusion::NotReady); 2],
            [Some(Exclusion::Terminating); 2],
            [None, Some(Exclusion::OtherNode)],
        ];
        assert_eq!(exclusions(&model), expected);
    }

    #[test]
    fn hints_leave_out_the_endpoints_of_other_zones() {
        let model = model(vec![
            endpoint("10.1.0.1").on("n1").for_zones(&["a"]),
            endpoint("10.1.0.2").on("n2").for_zones(&["b"]),
        ]);
        let expected = [[None, None], [Some(Exclusion::OtherZone), Some(Exclusion::OtherNode)]];
        assert_eq!(exclusions(&model), expected);
    }
}
