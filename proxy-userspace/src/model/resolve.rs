//! Makes [`ResolvedPort`]s of a Service: its ports, the frontends it owns and the endpoints this node uses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
};

use super::{
    IpFamily, NamespacedName, Protocol, ResolvedEndpoint, ResolvedPort, Service, ServicePort, ServicePortKey,
    endpoint_slice_cache::{EndpointInfo, EndpointSliceCache},
    frontend_claims::FrontendClaims,
    service_port::{self, ServicePortInfo},
    topology::{Topology, Uses, categorize},
};

/// What the load balancer of a Service asks this node on its healthCheckNodePort, one a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port to answer on.
    pub port: NonZeroU16,
    /// How many ready endpoints run on this node, by address; terminating ones do not count, whether or not they still
    /// take traffic (upstream's `LocalReadyEndpoints`).
    pub local_endpoints: usize,
}

/// What all Services are resolved with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolver<'a> {
    pub(super) slices: &'a EndpointSliceCache,
    pub(super) claims: &'a FrontendClaims,
    pub(super) here: Topology<'a>,
}

/// A Service as this node has to serve it.
#[derive(Debug, Default)]
pub(super) struct ResolvedService {
    pub(super) ports: BTreeMap<ServicePortKey, ResolvedPort>,
    pub(super) health_checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
}

impl Resolver<'_> {
    /// Resolves all ports of a Service.
    pub(super) fn resolve(&self, service: &Service) -> ResolvedService {
        let mut resolved = ResolvedService::default();
        let mut local_ready: BTreeMap<IpFamily, BTreeSet<IpAddr>> = BTreeMap::new();
        for (key, port) in service_port::ports(service) {
            let endpoints = self.slices.endpoints(&key, self.here.node_name);
            let ready = endpoints.iter().filter(|endpoint| endpoint.is_local && endpoint.is_ready());
            local_ready.entry(key.family).or_default().extend(ready.map(|endpoint| endpoint.address.ip()));
            let port = self.resolve_port(service, port, &key, &endpoints);
            if let Some(health_check_port) = port.health_check_node_port {
                let local_endpoints = local_ready.get(&key.family).map_or(0, BTreeSet::len);
                let check = HealthCheck { port: health_check_port, local_endpoints };
                resolved.health_checks.insert((service.name.clone(), key.family), check);
            }
            resolved.ports.insert(key, port);
        }
        resolved
    }

    fn resolve_port(
        &self,
        service: &Service,
        port: &ServicePort,
        key: &ServicePortKey,
        endpoints: &[EndpointInfo<'_>],
    ) -> ResolvedPort {
        let info = ServicePortInfo::new(service, port, key.family);
        let uses = Uses { cluster: info.uses_cluster_endpoints(), local: info.uses_local_endpoints() };
        let chosen = categorize(endpoints, uses, self.here);
        let mut frontends = info.frontends;
        frontends.retain(|frontend| self.claims.owns(key, frontend));
        frontends.shrink_to_fit();
        ResolvedPort {
            frontends,
            cluster_endpoints: chosen.cluster,
            local_endpoints: chosen.local,
            serving: serving(key.name.protocol, endpoints),
            has_endpoints: chosen.has_endpoints,
            affinity_timeout: info.affinity_timeout,
            internal_policy: info.internal_policy,
            external_policy: info.external_policy,
            source_ranges: info.source_ranges,
            health_check_node_port: info.health_check_node_port,
        }
    }
}

/// Upstream's `CleanStaleEntries` (`pkg/proxy/conntrack/cleanup.go`) asks for `serving` alone. Ready ones are listed too:
/// with publishNotReadyAddresses an endpoint may take traffic without serving, and its flows are not stale.
fn serving(protocol: Protocol, endpoints: &[EndpointInfo<'_>]) -> Vec<ResolvedEndpoint> {
    if protocol != Protocol::Udp {
        return Vec::new();
    }
    let serving = endpoints.iter().filter(|endpoint| endpoint.conditions.serving || endpoint.is_ready());
    let resolved = |endpoint: &EndpointInfo<'_>| ResolvedEndpoint {
        address: endpoint.address,
        is_local: endpoint.is_local,
    };
    let mut serving: Vec<_> = serving.map(resolved).collect();
    serving.shrink_to_fit();
    serving
}
