//! Resolved service ports, for tests that pass them to a dataplane directly.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use proxy_userspace::model::{
    Balance, Forwarding, Frontend, FrontendKind, IpFamily, NamespacedName, Protocol, ResolvedEndpoint,
    ResolvedPort, ServicePortKey, ServicePortName, TrafficPolicy,
};

/// Returns the key of a service port whose Service has this name, with `-` for characters that
/// names do not allow.
pub fn key(name: &str, protocol: Protocol, address: IpAddr) -> ServicePortKey {
    let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let service = NamespacedName::parse("test", name.trim_matches('-')).expect("a valid name");
    ServicePortKey {
        name: ServicePortName { service, port: "".into(), protocol },
        family: IpFamily::of(address),
    }
}

/// Returns a service port with a cluster IP and these endpoints, all of them on this node and
/// serving.
pub fn port(address: SocketAddr, endpoints: &[SocketAddr]) -> ResolvedPort {
    let endpoints: Vec<_> =
        endpoints.iter().map(|address| ResolvedEndpoint { address: *address, is_local: true }).collect();
    ResolvedPort {
        frontends: vec![Frontend {
            kind: FrontendKind::ClusterIp,
            address: Some(address.ip()),
            port: NonZeroU16::new(address.port()).unwrap_or(NonZeroU16::MIN),
        }],
        local_endpoints: Vec::new(),
        serving: endpoints.clone(),
        has_endpoints: !endpoints.is_empty(),
        cluster_endpoints: endpoints,
        affinity_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        balance: Balance::Random,
        forwarding: Forwarding::Nat,
        dsr_nodes: BTreeMap::new(),
    }
}
