//! Resolves a Service into [`ResolvedPort`]s: the frontends that it owns, and the endpoints that
//! this node uses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    Frontend, FrontendKind, IpFamily, NamespacedName, Protocol, ResolvedPort, Service, ServicePort,
    ServicePortKey,
    endpoint_slice_cache::{EndpointInfo, EndpointSliceCache},
    frontend_claims::{Claims, FrontendClaims, claims_of},
    service_port::{self, PortDefaults},
    topology::{NodeLocation, resolve_endpoints, set_endpoint_lists},
    tunnel::OtherNodes,
};

/// The health check of a Service's load balancer in one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The healthCheckNodePort.
    pub port: NonZeroU16,
    /// The number of ready endpoints on this node, by address (upstream's `LocalReadyEndpoints`).
    /// Terminating endpoints do not count, even if they take traffic.
    pub local_endpoints: usize,
}

/// The input that is the same for all Services.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolver<'a> {
    pub(super) slices: &'a EndpointSliceCache,
    pub(super) claims: &'a FrontendClaims,
    pub(super) node: NodeLocation<'a>,
    /// Cluster IPs among these addresses are not served.
    pub(super) link_addresses: &'a BTreeSet<IpAddr>,
    pub(super) defaults: PortDefaults,
    pub(super) other_nodes: &'a OtherNodes,
}

/// A Service as this node must serve it.
#[derive(Debug, Default)]
pub(super) struct ResolvedService {
    /// Sorted by key.
    pub(super) ports: SmallVec<[(ServicePortKey, ResolvedPort); 1]>,
    pub(super) health_checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
}

/// The same of several Services.
#[derive(Debug, Default)]
pub(super) struct ResolvedServices {
    /// Sorted by key.
    pub(super) ports: Vec<(ServicePortKey, Arc<ResolvedPort>)>,
    /// The frontends of the ports, sorted.
    pub(super) claims: Claims,
    pub(super) health_checks: BTreeMap<(NamespacedName, IpFamily), HealthCheck>,
}

impl Resolver<'_> {
    /// Resolves all ports of a Service.
    pub(super) fn resolve(&self, service: &Service) -> ResolvedService {
        let mut resolved = self.resolve_claims(service);
        for (key, port) in &mut resolved.ports {
            self.keep_served(key, port);
        }
        resolved
    }

    /// Resolves all ports of Services, which are sorted, with every frontend that they claim.
    pub(super) fn resolve_all(&self, services: &[&Service]) -> ResolvedServices {
        let mut all = ResolvedServices { ports: Vec::with_capacity(services.len()), ..Default::default() };
        for service in services {
            let ResolvedService { ports, health_checks } = self.resolve_claims(service);
            all.ports.extend(ports.into_iter().map(|(key, port)| (key, Arc::new(port))));
            all.health_checks.extend(health_checks);
        }
        all.claims = claims_of(&all.ports);
        all
    }

    /// Resolves all ports of a Service with every frontend that it claims.
    /// [`Self::keep_served`] removes those that others own.
    pub(super) fn resolve_claims(&self, service: &Service) -> ResolvedService {
        let mut resolved = ResolvedService::default();
        let mut local_ready: BTreeMap<IpFamily, BTreeSet<IpAddr>> = BTreeMap::new();
        for (key, port) in service_port::ports(service) {
            let endpoints = self.slices.endpoints(&key, self.node.node_name);
            let port = self.resolve_port(service, port, &key, &endpoints);
            if let Some(health_check_port) = port.health_check_node_port {
                let ready = endpoints.iter().filter(|endpoint| endpoint.is_local && endpoint.is_ready());
                let addresses = local_ready.entry(key.family).or_default();
                addresses.extend(ready.map(|endpoint| endpoint.address.ip()));
                let check = HealthCheck { port: health_check_port, local_endpoints: addresses.len() };
                resolved.health_checks.insert((service.name.clone(), key.family), check);
            }
            resolved.ports.push((key, port));
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
        let mut resolved = service_port::resolve(service, port, key.family, self.defaults);
        set_endpoint_lists(&mut resolved, endpoints, self.node);
        self.other_nodes.set_endpoints(&mut resolved, endpoints, key.family, self.defaults.dsr_port);
        if key.name.protocol == Protocol::Udp {
            // Upstream's `CleanStaleEntries` (`pkg/proxy/conntrack/cleanup.go`) checks only
            // `serving`. With publishNotReadyAddresses, a ready endpoint can take traffic without
            // serving.
            resolved.serving = resolve_endpoints(endpoints, |info| info.endpoint.serving || info.is_ready());
        }
        resolved
    }

    /// Returns true if [`Self::keep_served`] removes nothing.
    pub(super) fn serves_all_claims(&self) -> bool {
        self.claims.all_own() && self.link_addresses.is_empty()
    }

    /// Removes the frontends that this node does not serve for the service port.
    pub(super) fn keep_served(&self, key: &ServicePortKey, port: &mut ResolvedPort) {
        let claimed = port.frontends.len();
        port.frontends.retain(|frontend| self.claims.owns(key, frontend) && !self.is_of_link(frontend));
        if port.frontends.len() < claimed {
            port.frontends.shrink_to_fit();
        }
    }

    fn is_of_link(&self, frontend: &Frontend) -> bool {
        let is_of_link = |address| self.link_addresses.contains(&address);
        frontend.kind == FrontendKind::ClusterIp && frontend.address.is_some_and(is_of_link)
    }
}
