//! Objects for tests of the model and of the dataplanes: builders with the API's defaults, and
//! generators for a small world in which Services often conflict.

mod strategies;
mod world;

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, sync::Arc};

use ipnet::IpNet;

pub use strategies::*;
pub use world::World;

use super::{
    AddressType, Balance, Device, DsrAnnouncement, EndpointSlice, Forwarding, Hints, IpFamily, Link,
    LinkAddress, LinkHeader, MacAddress, ModelSettings, Name, NamespacedName, Node, NodeFacts, Placement,
    PodNames, Protocol, ResolvedPort, Service, ServicePort, ServicePortKey, ServicePortName, ServiceType,
    SessionAffinity, SliceEndpoint, SlicePort, TrafficPolicy, XdpFeatures,
};

/// The name of this node in [`settings`].
pub const THIS_NODE: &str = "n1";

/// Parses an address.
///
/// # Panics
/// Panics if the text is not an address. All builders of this module panic on invalid text.
pub fn ip(address: &str) -> IpAddr {
    address.parse().unwrap_or_else(|error| panic!("{address}: {error}"))
}

/// Parses addresses.
pub fn ips(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().copied().map(ip).collect()
}

/// Parses CIDRs.
pub fn cidrs(ranges: &[&str]) -> Vec<IpNet> {
    ranges.iter().map(|range| range.parse().unwrap_or_else(|error| panic!("{range}: {error}"))).collect()
}

/// Converts a port number, which must not be 0.
pub fn port_number(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap_or_else(|| panic!("port 0"))
}

/// Parses `namespace/name`.
pub fn namespaced(name: &str) -> NamespacedName {
    let (namespace, name) = name.split_once('/').unwrap_or_else(|| panic!("{name}: no namespace"));
    NamespacedName::parse(namespace, name).unwrap_or_else(|allowed| panic!("{name}: not {allowed}"))
}

/// Parses the name of a port, which may be empty.
fn port_name(name: &str) -> Name {
    if name.is_empty() { Name::default() } else { valid_name(name) }
}

/// Parses a name.
pub(super) fn valid_name(name: &str) -> Name {
    Name::subdomain(name).unwrap_or_else(|allowed| panic!("{name}: not {allowed}"))
}

/// Returns a Service of type `ClusterIP` with one unnamed TCP port 80.
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
        balance: None,
        forwarding: Forwarding::Nat,
    }
}

/// Returns the names and cluster IPs of so many Services that two threads share the work
/// (`parallel.rs`). The names are sorted.
pub fn many_names() -> impl Iterator<Item = (String, String)> {
    (0..1_200_u16).map(|number| {
        let [high, low] = number.to_be_bytes();
        (format!("a/s{number:04}"), format!("10.96.{high}.{low}"))
    })
}

/// Returns a port of a Service, without a node port.
pub fn service_port(name: &str, protocol: Protocol, port: u16) -> ServicePort {
    ServicePort { name: port_name(name), protocol, port: port_number(port), node_port: None }
}

/// Returns the key of a Service's IPv4 TCP port.
pub fn key(service: &str, port: &str) -> ServicePortKey {
    let name =
        ServicePortName { service: namespaced(service), port: port_name(port), protocol: Protocol::Tcp };
    ServicePortKey { name, family: IpFamily::V4 }
}

/// Returns a slice of a Service in the same namespace, with one unnamed TCP port 8080. The first
/// endpoint determines the family.
pub fn slice(name: &str, service: &str, endpoints: Vec<SliceEndpoint>) -> EndpointSlice {
    let first = endpoints.first().map(|endpoint| endpoint.address);
    let address_type =
        if first.is_some_and(|address| address.is_ipv6()) { AddressType::Ipv6 } else { AddressType::Ipv4 };
    EndpointSlice {
        name: namespaced(name),
        service: Some(valid_name(service)),
        address_type,
        endpoints,
        pods: PodNames::default(),
        ports: [slice_port("", Protocol::Tcp, 8080)].into(),
        last_change_trigger_time: None,
    }
}

/// Returns a port of a slice.
pub fn slice_port(name: &str, protocol: Protocol, port: u16) -> SlicePort {
    SlicePort { name: port_name(name), protocol, port: Some(port_number(port)) }
}

/// Returns a ready endpoint without a node name.
pub fn endpoint(address: &str) -> SliceEndpoint {
    SliceEndpoint {
        address: ip(address),
        ready: true,
        serving: true,
        terminating: false,
        placement: Arc::default(),
    }
}

impl SliceEndpoint {
    /// Sets the node name.
    #[must_use]
    pub fn on(self, node: &str) -> Self {
        self.placed(|placement| placement.node_name = Some(node.into()))
    }

    /// Makes the endpoint neither ready nor serving.
    #[must_use]
    pub fn not_ready(self) -> Self {
        Self { ready: false, serving: false, ..self }
    }

    /// Makes the endpoint terminating, but still serving.
    #[must_use]
    pub fn terminating(self) -> Self {
        Self { ready: false, serving: true, terminating: true, ..self }
    }

    /// Sets zone hints.
    #[must_use]
    pub fn for_zones(self, zones: &[&str]) -> Self {
        self.hinted(|hints| hints.zones = names(zones))
    }

    /// Sets node hints.
    #[must_use]
    pub fn for_nodes(self, nodes: &[&str]) -> Self {
        self.hinted(|hints| hints.nodes = names(nodes))
    }

    fn hinted(self, change: impl FnOnce(&mut Hints)) -> Self {
        self.placed(|placement| change(Arc::make_mut(placement.hints.get_or_insert_default())))
    }

    fn placed(mut self, change: impl FnOnce(&mut Placement)) -> Self {
        change(Arc::make_mut(&mut self.placement));
        self
    }
}

/// Returns a Node with only a name.
pub fn node(name: &str) -> Node {
    Node {
        name: valid_name(name),
        zone: None,
        pod_cidrs: Vec::new(),
        addresses: Vec::new(),
        being_deleted: false,
        dsr: DsrAnnouncement::default(),
    }
}

/// Returns a resolved service port without frontends and endpoints.
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
        balance: Balance::Random,
        forwarding: Forwarding::Nat,
        dsr_nodes: BTreeMap::new(),
    }
}

/// Returns the default configuration on [`THIS_NODE`].
pub fn settings() -> ModelSettings {
    ModelSettings { node_name: THIS_NODE.into(), loopback_node_ports: true, ..ModelSettings::default() }
}

/// Returns an Ethernet link that is not a port of another link.
pub fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        master: None,
        header: LinkHeader::Ethernet,
        mtu: 1_500,
        is_up: true,
        is_loopback: false,
        is_ifb: false,
        bridge_address: None,
        hardware_address: Some(MacAddress([2, 0, 0, 0, 1, 1])),
        device: Some(Device::Hardware),
        is_bond: false,
        vlan: None,
        xdp: XdpFeatures::default(),
        hands_to_peer: false,
    }
}

/// Returns the kernel's facts from pairs of a link and an address with prefix length.
pub fn facts(addresses: &[(&str, &str)]) -> NodeFacts {
    let mut addresses: Vec<_> = addresses
        .iter()
        .map(|(link, address)| {
            let net: IpNet = address.parse().unwrap_or_else(|error| panic!("{address}: {error}"));
            LinkAddress { link: (*link).into(), address: net.addr(), prefix_len: net.prefix_len() }
        })
        .collect();
    addresses.sort();
    NodeFacts { addresses, ..NodeFacts::default() }
}

fn names(names: &[&str]) -> Box<[Arc<str>]> {
    names.iter().map(|name| Arc::from(*name)).collect()
}
