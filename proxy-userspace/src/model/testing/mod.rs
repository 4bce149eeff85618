//! Objects for tests, here and of the dataplanes: builders with the API's defaults, and generators over a small world in
//! which Services collide.

mod strategies;
mod world;

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use ipnet::IpNet;

pub use strategies::*;
pub use world::World;

use super::{
    AddressType, DetectLocalMode, EndpointSlice, Hints, InterfaceGlobs, IpFamily, Link, LinkAddress,
    LinkHeader, ModelSettings, NamespacedName, Node, NodeFacts, NodePortAddresses, Protocol, ResolvedPort,
    Service, ServicePort, ServicePortKey, ServicePortName, ServiceType, SessionAffinity, SliceEndpoint,
    SlicePort, TrafficPolicy,
};

/// The node that [`settings`] says this is.
pub const THIS_NODE: &str = "n1";

/// An address.
///
/// # Panics
/// When it is none, as all builders here.
pub fn ip(address: &str) -> IpAddr {
    address.parse().unwrap_or_else(|error| panic!("{address}: {error}"))
}

/// Addresses.
pub fn ips(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().copied().map(ip).collect()
}

/// Ranges.
pub fn cidrs(ranges: &[&str]) -> Vec<IpNet> {
    ranges.iter().map(|range| range.parse().unwrap_or_else(|error| panic!("{range}: {error}"))).collect()
}

/// A port number; not 0.
pub fn port_number(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap_or_else(|| panic!("port 0"))
}

/// `namespace/name`.
pub fn namespaced(name: &str) -> NamespacedName {
    let (namespace, name) = name.split_once('/').unwrap_or_else(|| panic!("{name}: no namespace"));
    NamespacedName::new(namespace, name)
}

/// A Service of type `ClusterIP` with one unnamed TCP port 80.
pub fn service(name: &str, cluster_ip: &str) -> Service {
    Service {
        name: namespaced(name),
        service_type: ServiceType::ClusterIp,
        cluster_ips: vec![ip(cluster_ip)],
        external_ips: Vec::new(),
        load_balancer_ingress: Vec::new(),
        load_balancer_source_ranges: Vec::new(),
        ports: vec![service_port("", Protocol::Tcp, 80)],
        session_affinity: SessionAffinity::None,
        internal_traffic_policy: TrafficPolicy::Cluster,
        external_traffic_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        excluded_by_label: false,
    }
}

/// A Service's port without a node port.
pub fn service_port(name: &str, protocol: Protocol, port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol, port: port_number(port), node_port: None }
}

/// The key of a Service's IPv4 TCP port.
pub fn key(service: &str, port: &str) -> ServicePortKey {
    let name = ServicePortName { service: namespaced(service), port: port.into(), protocol: Protocol::Tcp };
    ServicePortKey { name, family: IpFamily::V4 }
}

/// A slice of a Service in the same namespace, of the first endpoint's family, with one unnamed TCP port 8080.
pub fn slice(name: &str, service: &str, endpoints: Vec<SliceEndpoint>) -> EndpointSlice {
    let first = endpoints.first().and_then(|endpoint| endpoint.address);
    let address_type =
        if first.is_some_and(|address| address.is_ipv6()) { AddressType::Ipv6 } else { AddressType::Ipv4 };
    EndpointSlice {
        name: namespaced(name),
        service: Some(service.into()),
        address_type,
        endpoints,
        ports: vec![slice_port("", Protocol::Tcp, 8080)],
        last_change_trigger_time: None,
    }
}

/// A slice's port.
pub fn slice_port(name: &str, protocol: Protocol, port: u16) -> SlicePort {
    SlicePort { name: name.into(), protocol, port: Some(port_number(port)) }
}

/// A ready endpoint on no node in particular.
pub fn endpoint(address: &str) -> SliceEndpoint {
    SliceEndpoint {
        address: Some(ip(address)),
        ready: true,
        serving: true,
        terminating: false,
        node_name: None,
        hints: None,
    }
}

impl SliceEndpoint {
    /// Runs on this node.
    #[must_use]
    pub fn on(self, node: &str) -> Self {
        Self { node_name: Some(node.into()), ..self }
    }

    /// Neither ready nor serving.
    #[must_use]
    pub fn not_ready(self) -> Self {
        Self { ready: false, serving: false, ..self }
    }

    /// Terminates, and still serves.
    #[must_use]
    pub fn terminating(self) -> Self {
        Self { ready: false, serving: true, terminating: true, ..self }
    }

    /// Meant for these zones.
    #[must_use]
    pub fn for_zones(self, zones: &[&str]) -> Self {
        let hints = self.hints.as_deref().cloned().unwrap_or_default();
        Self { hints: Some(Hints { zones: names(zones), ..hints }.into()), ..self }
    }

    /// Meant for these nodes.
    #[must_use]
    pub fn for_nodes(self, nodes: &[&str]) -> Self {
        let hints = self.hints.as_deref().cloned().unwrap_or_default();
        Self { hints: Some(Hints { nodes: names(nodes), ..hints }.into()), ..self }
    }
}

/// A Node about which nothing is known.
pub fn node(name: &str) -> Node {
    Node { name: name.into(), zone: None, pod_cidrs: Vec::new(), addresses: Vec::new(), being_deleted: false }
}

/// A resolved service port without addresses and endpoints.
pub fn resolved_port() -> ResolvedPort {
    ResolvedPort {
        frontends: Vec::new(),
        cluster_endpoints: Vec::new(),
        local_endpoints: Vec::new(),
        serving: Vec::new(),
        has_endpoints: false,
        affinity_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    }
}

/// The default configuration on [`THIS_NODE`].
pub fn settings() -> ModelSettings {
    ModelSettings {
        node_name: THIS_NODE.into(),
        cluster_cidrs: Vec::new(),
        detect_local: DetectLocalMode::ClusterCidr,
        node_port_addresses: NodePortAddresses::All,
        masquerade_all: false,
        bind_address: None,
        interfaces: InterfaceGlobs::default(),
    }
}

/// A link with Ethernet frames that is no port of another.
pub fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        master: None,
        header: LinkHeader::Ethernet,
        is_loopback: false,
        bridge_address: None,
    }
}

/// The kernel's addresses as link and address with prefix.
pub fn facts(addresses: &[(&str, &str)]) -> NodeFacts {
    let mut addresses: Vec<_> = addresses
        .iter()
        .map(|(link, address)| {
            let net: IpNet = address.parse().unwrap_or_else(|error| panic!("{address}: {error}"));
            LinkAddress { link: (*link).into(), address: net.addr(), prefix_len: net.prefix_len() }
        })
        .collect();
    addresses.sort();
    NodeFacts { addresses, links: Vec::new() }
}

fn names(names: &[&str]) -> Box<[Arc<str>]> {
    names.iter().map(|name| Arc::from(*name)).collect()
}
