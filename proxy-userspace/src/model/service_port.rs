//! Resolves one port of a Service in one family, without its endpoints and without other Services.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16};

use ipnet::IpNet;
use smallvec::SmallVec;

use super::{
    Balance, Forwarding, Frontend, FrontendKind, IpFamily, LoadBalancerIpMode, ResolvedPort, Service,
    ServicePort, ServicePortKey, ServicePortName, ServiceType, SessionAffinity, TrafficPolicy, tunnel,
};

/// The settings that apply to Services which do not say otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortDefaults {
    /// How clients get an endpoint.
    pub(super) balance: Balance,
    /// The port of the tunnel, if there is one.
    pub(super) dsr_port: Option<NonZeroU16>,
}

/// Resolves a port in a family in which the Service has a cluster IP, like upstream's
/// `newBaseServiceInfo` (`pkg/proxy/serviceport.go`). The result has all frontends that the Service
/// claims, and no endpoints.
pub(super) fn resolve(
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    defaults: PortDefaults,
) -> ResolvedPort {
    let frontends = frontends(service, port, family);
    let external_policy =
        if frontends.iter().any(is_external) { external_policy(service) } else { TrafficPolicy::Cluster };
    let forwarding = tunnel::forwarding(
        service.forwarding,
        defaults.dsr_port,
        external_policy,
        frontends.iter().any(is_external),
    );
    ResolvedPort {
        frontends,
        cluster_endpoints: Vec::new(),
        local_endpoints: Vec::new(),
        serving: Vec::new(),
        has_endpoints: false,
        affinity_timeout: match service.session_affinity {
            SessionAffinity::None => None,
            SessionAffinity::ClientIp { timeout_seconds } => Some(timeout_seconds),
        },
        internal_policy: service.internal_traffic_policy,
        external_policy,
        source_ranges: source_ranges(service, family),
        health_check_node_port: health_check_node_port(service),
        balance: service.balance.unwrap_or(match forwarding {
            // A node that lost a flow then still knows its endpoint's node.
            Forwarding::Dsr => Balance::Maglev,
            Forwarding::Nat => defaults.balance,
        }),
        forwarding,
        dsr_nodes: BTreeMap::new(),
    }
}

/// Returns true if some traffic uses the endpoint list for policy `Cluster`. Traffic from this node
/// and its pods to external frontends does so even if externalTrafficPolicy is `Local`.
pub(super) fn uses_cluster_endpoints(port: &ResolvedPort) -> bool {
    port.internal_policy == TrafficPolicy::Cluster || port.frontends.iter().any(is_external)
}

/// Returns true if some traffic uses the endpoint list for policy `Local`. Packets that come
/// through the tunnel do.
pub(super) fn uses_local_endpoints(port: &ResolvedPort) -> bool {
    [port.internal_policy, port.external_policy].contains(&TrafficPolicy::Local)
        || port.forwarding == Forwarding::Dsr
}

/// Returns the ports of a Service in each family in which it has a cluster IP. The API does not
/// allow two ports with the same name and protocol. As upstream, the later one is used. Sorted by
/// key.
pub(super) fn ports(service: &Service) -> SmallVec<[(ServicePortKey, &ServicePort); 1]> {
    let families = IpFamily::ALL.into_iter().filter(|family| cluster_ip(service, *family).is_some());
    let mut ports: SmallVec<[_; 1]> = families
        .flat_map(|family| {
            service.ports.iter().map(move |port| {
                let name = ServicePortName {
                    service: service.name.clone(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                };
                (ServicePortKey { name, family }, port)
            })
        })
        .collect();
    // Stable: the later one of two ports stays behind the other.
    ports.sort_by(|(key, _), (other, _)| key.cmp(other));
    ports.dedup_by(|later, earlier| {
        let is_same = later.0 == earlier.0;
        if is_same {
            earlier.1 = later.1;
        }
        is_same
    });
    ports
}

/// Returns the frontends of a port, sorted, without duplicates. An address of two kinds gets the
/// kind that is first in [`precedence`]. So the source ranges of a load-balancer IP apply even if
/// the address is an external IP too.
pub(super) fn frontends(service: &Service, port: &ServicePort, family: IpFamily) -> Vec<Frontend> {
    let addressed = |kind, address| Frontend { kind, address: Some(address), port: port.port };
    let external = of_family(&service.external_ips, family);
    let ingress = service.load_balancer_ingress.iter();
    let vips =
        ingress.filter(|ingress| ingress.ip_mode == LoadBalancerIpMode::Vip).map(|ingress| &ingress.ip);

    // Most service ports have only a cluster IP, and keep this list.
    let mut frontends: Vec<Frontend> = Vec::with_capacity(1);
    frontends.extend(cluster_ip(service, family).map(|ip| addressed(FrontendKind::ClusterIp, ip)));
    frontends.extend(port.node_port.map(|port| Frontend {
        kind: FrontendKind::NodePort,
        address: None,
        port,
    }));
    frontends.extend(external.map(|ip| addressed(FrontendKind::ExternalIp, ip)));
    frontends.extend(of_family(vips, family).map(|ip| addressed(FrontendKind::LoadBalancerIp, ip)));

    frontends.sort_unstable_by_key(|frontend| (frontend.address, precedence(frontend.kind)));
    frontends.dedup_by_key(|frontend| frontend.address);
    frontends.sort_unstable();
    frontends.shrink_to_fit();
    frontends
}

/// Returns the precedence of a kind for an address that is claimed as several kinds. The smallest
/// wins. The API server allocates cluster IPs, and controllers report load-balancer IPs, but
/// anybody who may write Services can set external IPs (CVE-2020-8554).
pub(super) const fn precedence(kind: FrontendKind) -> u8 {
    match kind {
        FrontendKind::ClusterIp => 0,
        FrontendKind::LoadBalancerIp => 1,
        FrontendKind::ExternalIp => 2,
        FrontendKind::NodePort => 3,
    }
}

fn cluster_ip(service: &Service, family: IpFamily) -> Option<IpAddr> {
    of_family(&service.cluster_ips, family).next()
}

/// Returns the addresses of a family. As in Go's net package, IPv4-mapped addresses are IPv4.
fn of_family<'a>(
    addresses: impl IntoIterator<Item = &'a IpAddr>,
    family: IpFamily,
) -> impl Iterator<Item = IpAddr> {
    addresses.into_iter().map(IpAddr::to_canonical).filter(move |address| IpFamily::of(*address) == family)
}

fn is_external(frontend: &Frontend) -> bool {
    frontend.kind != FrontendKind::ClusterIp
}

/// As upstream's `ExternalPolicyLocal` (`pkg/api/v1/service/util.go`), the policy applies only to a
/// Service that clients outside can reach.
fn external_policy(service: &Service) -> TrafficPolicy {
    let reachable = match service.service_type {
        ServiceType::NodePort | ServiceType::LoadBalancer => true,
        ServiceType::ClusterIp => !service.external_ips.is_empty(),
        ServiceType::ExternalName => false,
    };
    if reachable { service.external_traffic_policy } else { TrafficPolicy::Cluster }
}

/// See [`super::ResolvedPort::source_ranges`]. A range of length 0 permits all clients of its
/// family.
fn source_ranges(service: &Service, family: IpFamily) -> Vec<IpNet> {
    let mut ranges: Vec<IpNet> = Vec::new();
    for range in &service.load_balancer_source_ranges {
        if IpFamily::of(range.addr()) != family {
            continue;
        }
        if range.prefix_len() == 0 {
            return Vec::new();
        }
        let range = range.trunc();
        if !ranges.contains(&range) {
            ranges.push(range);
        }
    }
    ranges
}

/// Upstream's `NeedsHealthCheck`.
fn health_check_node_port(service: &Service) -> Option<NonZeroU16> {
    let needed = service.service_type == ServiceType::LoadBalancer
        && service.external_traffic_policy == TrafficPolicy::Local;
    service.health_check_node_port.filter(|_| needed)
}
