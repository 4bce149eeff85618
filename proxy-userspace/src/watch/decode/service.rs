//! Decodes Services with the defaults of `v1` (upstream `pkg/apis/core/v1/defaults.go`).

use std::{fmt, net::IpAddr, num::NonZeroU32};

use smallvec::SmallVec;

use super::{
    Kind as _, Problems,
    metadata::{BALANCE, FORWARDING},
    parse,
    raw::{RawLoadBalancerIngress, RawService, RawServicePort, RawServiceSpec},
};
use crate::model::{
    Balance, Forwarding, Interner, IpFamily, LoadBalancerIngress, LoadBalancerIpMode, NamespacedName,
    Service, ServicePort, ServiceType, SessionAffinity, SharedValues, TrafficPolicy,
};

/// Upstream's `DefaultClientIPServiceAffinitySeconds`, three hours.
const DEFAULT_AFFINITY_SECONDS: NonZeroU32 = NonZeroU32::new(10_800).expect("not zero");
/// Upstream's `MaxClientIPServiceAffinitySeconds`, a day.
const MAX_AFFINITY_SECONDS: u32 = 86_400;

pub(super) fn service(
    name: NamespacedName,
    raw: RawService<'_>,
    shared: &mut SharedValues,
    problems: &mut Problems,
) -> Service {
    let metadata = raw.metadata.unwrap_or_default();
    let spec = raw.spec.unwrap_or_default();
    let ingress =
        raw.status.and_then(|status| status.load_balancer).map(|status| status.ingress).unwrap_or_default();
    let service_type = service_type(&spec, problems);
    let health_check = spec.health_check_node_port;
    let (internal, external) = (&spec.internal_traffic_policy, &spec.external_traffic_policy);
    Service {
        service_type,
        cluster_ips: cluster_ips(&spec, service_type, problems),
        external_ips: parse::list("spec.externalIPs", &spec.external_ips, problems, parse::ip),
        load_balancer_ingress: load_balancer_ingress(&ingress, problems),
        load_balancer_source_ranges: parse::list(
            "spec.loadBalancerSourceRanges",
            &spec.load_balancer_source_ranges,
            problems,
            parse::cidr,
        ),
        ports: ports(&spec.ports, &mut shared.strings, problems),
        session_affinity: session_affinity(&spec, problems),
        internal_traffic_policy: traffic_policy("spec.internalTrafficPolicy", internal.as_deref(), problems),
        external_traffic_policy: traffic_policy("spec.externalTrafficPolicy", external.as_deref(), problems),
        health_check_node_port: parse::optional_port("spec.healthCheckNodePort", health_check, problems),
        excluded_by_label: Service::is_excluded(&metadata),
        balance: balance(metadata.annotation(BALANCE), problems),
        forwarding: forwarding(metadata.annotation(FORWARDING), problems),
        name,
    }
}

fn service_type(spec: &RawServiceSpec<'_>, problems: &mut Problems) -> ServiceType {
    let words = [
        ("ClusterIP", ServiceType::ClusterIp),
        ("NodePort", ServiceType::NodePort),
        ("LoadBalancer", ServiceType::LoadBalancer),
        ("ExternalName", ServiceType::ExternalName),
    ];
    let value = spec.service_type.as_deref();
    parse::word("spec.type", value, ServiceType::ClusterIp, &words, problems)
        .unwrap_or(ServiceType::ClusterIp)
}

/// Decodes `clusterIPs`, or `clusterIP` if that is the only one. Empty for headless Services.
fn cluster_ips(spec: &RawServiceSpec<'_>, service_type: ServiceType, problems: &mut Problems) -> Vec<IpAddr> {
    let single = spec.cluster_ip.as_deref().filter(|value| !value.is_empty());
    let listed = &spec.cluster_ips;
    let mut values: SmallVec<[&str; 2]> = listed.iter().map(AsRef::as_ref).collect();
    if values.is_empty() {
        values.extend(single);
    }
    if service_type == ServiceType::ExternalName || matches!(values.first(), None | Some(&("None" | ""))) {
        return Vec::new();
    }
    let mut addresses: Vec<IpAddr> = Vec::with_capacity(values.len());
    for (i, value) in values.into_iter().enumerate() {
        let field = fmt::from_fn(|f| {
            if listed.is_empty() { f.write_str("spec.clusterIP") } else { write!(f, "spec.clusterIPs[{i}]") }
        });
        let Some(address) = parse::ip(&field, value, problems) else { continue };
        if let Some(single) = single.filter(|single| i == 0 && *single != value) {
            let first = format_args!("spec.clusterIP, which is {single:?}; the first must be");
            problems.not(&field, value, first);
        }
        if addresses.iter().any(|other| IpFamily::of(*other) == IpFamily::of(address)) {
            problems.not(field, value, "of another IP family than the one before; one of each is allowed");
        } else {
            addresses.push(address);
        }
    }
    addresses
}

fn load_balancer_ingress(
    raw: &[RawLoadBalancerIngress<'_>],
    problems: &mut Problems,
) -> Vec<LoadBalancerIngress> {
    let words = [("VIP", LoadBalancerIpMode::Vip), ("Proxy", LoadBalancerIpMode::Proxy)];
    let entry = |(i, ingress): (usize, &RawLoadBalancerIngress<'_>)| {
        let field = format_args!("status.loadBalancer.ingress[{i}]");
        let value = ingress.ip.as_deref().filter(|value| !value.is_empty())?;
        let ip = parse::ip(format_args!("{field}.ip"), value, problems)?;
        let mode = ingress.ip_mode.as_deref();
        // As with upstream's IsVIPMode, an unknown mode is not VIP.
        let ip_mode =
            parse::word(format_args!("{field}.ipMode"), mode, LoadBalancerIpMode::Vip, &words, problems)
                .unwrap_or(LoadBalancerIpMode::Proxy);
        Some(LoadBalancerIngress { ip, ip_mode })
    };
    raw.iter().enumerate().filter_map(entry).collect()
}

fn ports(
    raw: &[RawServicePort<'_>],
    strings: &mut Interner<str>,
    problems: &mut Problems,
) -> Vec<ServicePort> {
    let mut ports: Vec<ServicePort> = Vec::with_capacity(raw.len());
    for (i, entry) in raw.iter().enumerate() {
        let Some(port) = service_port(i, entry, strings, problems) else { continue };
        let name_field = format_args!("spec.ports[{i}].name");
        if port.name.is_empty() && raw.len() > 1 {
            problems.add(name_field, "missing; with several ports each needs a name");
        }
        if ports.iter().any(|other| other.name == port.name) {
            problems.not(name_field, &*port.name, "a name that no other port has");
        } else if ports.iter().any(|other| (other.protocol, other.port) == (port.protocol, port.port)) {
            let value = format!("{}/{}", port.port, port.protocol);
            problems.not(format_args!("spec.ports[{i}]"), value, "a port that no other entry has");
        } else {
            ports.push(port);
        }
    }
    ports
}

fn service_port(
    i: usize,
    raw: &RawServicePort<'_>,
    strings: &mut Interner<str>,
    problems: &mut Problems,
) -> Option<ServicePort> {
    let field = format_args!("spec.ports[{i}]");
    let protocol = parse::protocol(format_args!("{field}.protocol"), raw.protocol.as_deref(), problems);
    let Some(port) = raw.port else {
        problems.add(format_args!("{field}.port"), "missing; a port number, 1 to 65535, is needed");
        return None;
    };
    let port = parse::port(format_args!("{field}.port"), port, problems);
    let node_port = parse::optional_port(format_args!("{field}.nodePort"), raw.node_port, problems);
    let name = parse::port_name(format_args!("{field}.name"), raw.name.as_deref(), strings, problems);
    Some(ServicePort { name: name?, protocol: protocol?, port: port?, node_port })
}

fn session_affinity(spec: &RawServiceSpec<'_>, problems: &mut Problems) -> SessionAffinity {
    let value = spec.session_affinity.as_deref();
    let words = [("None", false), ("ClientIP", true)];
    let by_client = parse::word("spec.sessionAffinity", value, false, &words, problems);
    if by_client != Some(true) {
        return SessionAffinity::None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let Some(seconds) = config.and_then(|config| config.timeout_seconds) else {
        return SessionAffinity::ClientIp { timeout_seconds: DEFAULT_AFFINITY_SECONDS };
    };
    let timeout = u32::try_from(seconds).ok().filter(|seconds| *seconds <= MAX_AFFINITY_SECONDS);
    let timeout = timeout.and_then(NonZeroU32::new);
    if timeout.is_none() {
        let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        problems.not(field, seconds, "a number of seconds, 1 to 86400");
    }
    SessionAffinity::ClientIp { timeout_seconds: timeout.unwrap_or(DEFAULT_AFFINITY_SECONDS) }
}

/// Decodes shunt's own annotation about the choice of an endpoint.
fn balance(value: Option<&str>, problems: &mut Problems) -> Option<Balance> {
    let words = [("random", Some(Balance::Random)), ("maglev", Some(Balance::Maglev))];
    parse::word(format_args!("metadata.annotations[{BALANCE}]"), value, None, &words, problems).flatten()
}

/// Decodes shunt's own annotation about packets for endpoints on other nodes.
fn forwarding(value: Option<&str>, problems: &mut Problems) -> Forwarding {
    let words = [Forwarding::Nat, Forwarding::Dsr].map(|forwarding| (forwarding.name(), forwarding));
    let field = format_args!("metadata.annotations[{FORWARDING}]");
    parse::word(field, value, Forwarding::Nat, &words, problems).unwrap_or_default()
}

fn traffic_policy(field: &str, value: Option<&str>, problems: &mut Problems) -> TrafficPolicy {
    let words = [("Cluster", TrafficPolicy::Cluster), ("Local", TrafficPolicy::Local)];
    parse::word(field, value, TrafficPolicy::Cluster, &words, problems).unwrap_or_default()
}
