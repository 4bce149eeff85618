//! The parts of Kubernetes objects that a Service proxy uses. `watch` validates them and sets
//! defaults.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;

use super::{InvalidName, Name, PodNames, intern::Interner};
use crate::net::{IpFamily, Protocol};

/// Namespace and name: upstream's `types.NamespacedName`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespacedName {
    /// The namespace; empty for cluster-scoped kinds.
    pub namespace: Name,
    /// The object's name.
    pub name: Name,
}

impl NamespacedName {
    /// Creates the name of an object in a namespace.
    pub fn new(namespace: impl Into<Name>, name: impl Into<Name>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Validates the name of an object in a namespace.
    pub fn parse(namespace: &str, name: &str) -> Result<Self, InvalidName> {
        Ok(Self { namespace: Name::label(namespace)?, name: Name::subdomain(name)? })
    }

    /// Replaces both parts by shared copies.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.namespace.share(strings);
        self.name.share(strings);
    }
}

impl From<Name> for NamespacedName {
    /// Creates the name of a cluster-scoped object.
    fn from(name: Name) -> Self {
        Self { namespace: Name::default(), name }
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// A Service's `spec.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceType {
    /// Clients connect to cluster IPs and external IPs.
    ClusterIp,
    /// Clients also connect to a port of every node.
    NodePort,
    /// Clients also connect to load-balancer IPs.
    LoadBalancer,
    /// A DNS alias, which proxies ignore.
    ExternalName,
}

/// `internalTrafficPolicy` and `externalTrafficPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// Any endpoint.
    #[default]
    Cluster,
    /// Only endpoints of this node.
    Local,
}

impl TrafficPolicy {
    /// Returns the name in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cluster => "Cluster",
            Self::Local => "Local",
        }
    }
}

/// How clients from outside get an endpoint of a list (annotation `shunt.dev/balance`). All others
/// get one at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Balance {
    /// At random.
    #[default]
    Random,
    /// By a Maglev table, which is the same on every node. Only the ebpf mode has such tables.
    Maglev,
}

impl Balance {
    /// Returns the value of the annotation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Maglev => "maglev",
        }
    }
}

/// How packets of clients outside reach an endpoint on another node (annotation
/// `shunt.dev/forwarding`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Forwarding {
    /// Translated and masqueraded, so that the replies come back through this node.
    #[default]
    Nat,
    /// Through a tunnel to the endpoint's node, which translates them and answers the client itself
    /// (direct server return). Only the ebpf mode does this, between nodes with `shunt.dsr.enabled`.
    Dsr,
}

impl Forwarding {
    /// Returns the value of the annotation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nat => "nat",
            Self::Dsr => "dsr",
        }
    }
}

/// `sessionAffinity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SessionAffinity {
    /// Each connection gets an endpoint of its own.
    #[default]
    None,
    /// Connections of one client go to one endpoint until the timeout.
    ClientIp {
        /// `sessionAffinityConfig.clientIP.timeoutSeconds`, 1 to 86,400.
        timeout_seconds: NonZeroU32,
    },
}

/// `status.loadBalancer.ingress[].ipMode` (KEP-1860).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LoadBalancerIpMode {
    /// Packets reach the node with this destination, so the node serves it.
    #[default]
    Vip,
    /// The load balancer is a proxy: the node does not serve the address.
    Proxy,
}

/// An entry of `status.loadBalancer.ingress` with an `ip`. Entries with only a host name are left
/// out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadBalancerIngress {
    /// The address.
    pub ip: IpAddr,
    /// Says whether the node serves the address.
    pub ip_mode: LoadBalancerIpMode,
}

/// An entry of a Service's `spec.ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    /// The port's name. It may be empty if it is the only port.
    pub name: Name,
    /// The protocol.
    pub protocol: Protocol,
    /// The port on cluster, external and load-balancer IPs.
    pub port: NonZeroU16,
    /// The port on node addresses, if one is allocated.
    pub node_port: Option<NonZeroU16>,
}

/// A Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub name: NamespacedName,
    /// `spec.type`.
    pub service_type: ServiceType,
    /// `spec.clusterIPs` or `clusterIP`, at most one per family. Empty if headless (`None`) or
    /// unset.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress`.
    pub load_balancer_ingress: Vec<LoadBalancerIngress>,
    /// The valid entries of `spec.loadBalancerSourceRanges`, of both families.
    pub load_balancer_source_ranges: Vec<IpNet>,
    /// `spec.ports`.
    pub ports: Vec<ServicePort>,
    /// `spec.sessionAffinity` and its timeout.
    pub session_affinity: SessionAffinity,
    /// `spec.internalTrafficPolicy`.
    pub internal_traffic_policy: TrafficPolicy,
    /// `spec.externalTrafficPolicy`.
    pub external_traffic_policy: TrafficPolicy,
    /// `spec.healthCheckNodePort`, if allocated.
    pub health_check_node_port: Option<NonZeroU16>,
    /// The Service has the label `service.kubernetes.io/service-proxy-name`, with any value. The
    /// Snapshot does not contain it, even if the source did not filter it.
    pub excluded_by_label: bool,
    /// Annotation `shunt.dev/balance`. `None` without it: the settings decide.
    pub balance: Option<Balance>,
    /// Annotation `shunt.dev/forwarding`.
    pub forwarding: Forwarding,
}

impl Service {
    /// Replaces names by shared copies.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.name.share_strings(strings);
        self.ports.iter_mut().for_each(|port| port.name.share(strings));
    }
}

/// An EndpointSlice's `addressType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressType {
    /// IPv4 addresses.
    Ipv4,
    /// IPv6 addresses.
    Ipv6,
    /// Host names, which proxies ignore.
    Fqdn,
}

/// An entry of an EndpointSlice's `endpoints`. There are many, so it is small.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// The first of `addresses`, the only one that upstream uses. It is never an IPv4-mapped IPv6
    /// address.
    pub address: IpAddr,
    /// `conditions.ready`; the default is true.
    pub ready: bool,
    /// `conditions.serving`; the default is true.
    pub serving: bool,
    /// `conditions.terminating`; the default is false.
    pub terminating: bool,
    /// Where the endpoint is, and for whom.
    pub placement: Arc<Placement>,
}

const _: () = assert!(size_of::<SliceEndpoint>() == 32, "120,000 endpoints are to take 4 MB");

/// Where an endpoint is, and for whom. Equal endpoints share one copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// `nodeName`.
    pub node_name: Option<Arc<str>>,
    /// `hints`, if it has any.
    pub hints: Option<Arc<Hints>>,
}

/// The zones and nodes that should use an endpoint. Endpoints with equal hints share one copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hints {
    /// `hints.forZones[].name`.
    pub zones: Box<[Arc<str>]>,
    /// `hints.forNodes[].name`.
    pub nodes: Box<[Arc<str>]>,
}

/// An entry of an EndpointSlice's `ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlicePort {
    /// The Service port's name; the default is empty.
    pub name: Name,
    /// The protocol.
    pub protocol: Protocol,
    /// The endpoints' port. None means all ports, and proxies ignore it.
    pub port: Option<NonZeroU16>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The slice's own namespace and name.
    pub name: NamespacedName,
    /// Label `kubernetes.io/service-name`. A slice without it belongs to no Service.
    pub service: Option<Name>,
    /// The type of the addresses.
    pub address_type: AddressType,
    /// The endpoints; none if their addresses are host names.
    pub endpoints: Vec<SliceEndpoint>,
    /// The pods of the endpoints, of `targetRef`.
    pub pods: PodNames,
    /// The ports of all endpoints of this slice. Slices with equal ports share one copy.
    pub ports: Arc<[SlicePort]>,
    /// Annotation `endpoints.kubernetes.io/last-change-trigger-time`. The metric of the programming
    /// latency starts at this time.
    pub last_change_trigger_time: Option<UnixNanos>,
}

impl EndpointSlice {
    /// Replaces the names that the decoder did not share by shared copies.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.name.namespace.share(strings);
        self.service.iter_mut().for_each(|name| name.share(strings));
    }
}

/// A time in nanoseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixNanos(pub u64);

/// The type of an entry of a Node's `status.addresses`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeAddressType {
    /// `InternalIP`.
    InternalIp,
    /// `ExternalIP`.
    ExternalIp,
}

/// A Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The name.
    pub name: Name,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `spec.podCIDRs` or `podCIDR`.
    pub pod_cidrs: Vec<IpNet>,
    /// The IP addresses in `status.addresses`, in order.
    pub addresses: Vec<(NodeAddressType, IpAddr)>,
    /// The Node has the taint `ToBeDeletedByClusterAutoscaler` or a deletion timestamp. `/healthz`
    /// returns 503.
    pub being_deleted: bool,
    /// Annotation `shunt.dev/dsr`: what the node announces for direct server return.
    pub dsr: DsrAnnouncement,
}

/// What a node announces to the others for direct server return. As text, it is the value of an
/// annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DsrAnnouncement {
    /// Where the node takes packets of the tunnel, and where those that it sends come from: at most
    /// one address of each family. Empty if it takes none.
    pub addresses: Vec<SocketAddr>,
    /// The other addresses of the node, at most [`Self::MAX_OTHERS`]. If one of them is a client,
    /// its packets do not go through the tunnel.
    pub others: BTreeSet<IpAddr>,
}

impl DsrAnnouncement {
    /// The largest number of other addresses. The annotation is seen by all nodes.
    pub const MAX_OTHERS: usize = 32;
}

impl fmt::Display for DsrAnnouncement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses = self.addresses.iter().map(ToString::to_string);
        let texts: Vec<_> = addresses.chain(self.others.iter().map(ToString::to_string)).collect();
        f.write_str(&texts.join(","))
    }
}

impl Node {
    /// Returns the families of the pods on this node: those of its pod CIDRs, or else of its
    /// addresses. Empty if the object has neither.
    pub fn families(&self) -> BTreeSet<IpFamily> {
        let of_pods: BTreeSet<_> = self.pod_cidrs.iter().map(|cidr| IpFamily::of(cidr.addr())).collect();
        if of_pods.is_empty() {
            return self.addresses.iter().map(|(_, address)| IpFamily::of(*address)).collect();
        }
        of_pods
    }
}

/// A ServiceCIDR: ranges from which Services get their cluster IPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    /// The name.
    pub name: Name,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}
