//! The parts of Kubernetes objects that a Service proxy uses, validated and defaulted at the edge by `watch`.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    net::IpAddr,
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;

use super::intern::Interner;
use crate::net::Protocol;

/// A namespace and name; upstream's `types.NamespacedName`. Nodes have an empty namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespacedName {
    /// The namespace; empty for cluster-scoped kinds.
    pub namespace: Arc<str>,
    /// The object's name.
    pub name: Arc<str>,
}

impl NamespacedName {
    /// A name within a namespace.
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl From<Arc<str>> for NamespacedName {
    /// The name of a cluster-scoped object.
    fn from(name: Arc<str>) -> Self {
        Self { namespace: "".into(), name }
    }
}

impl NamespacedName {
    /// Replaces both parts by their one copy.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        strings.share(&mut self.namespace);
        strings.share(&mut self.name);
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
    /// Reached by cluster IPs and external IPs.
    ClusterIp,
    /// Also reached by a port on every node.
    NodePort,
    /// Also reached by load-balancer addresses.
    LoadBalancer,
    /// A DNS alias; nothing for a proxy to do.
    ExternalName,
}

/// `internalTrafficPolicy` and `externalTrafficPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// Every endpoint of the cluster.
    #[default]
    Cluster,
    /// Endpoints of this node only.
    Local,
}

/// `sessionAffinity`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SessionAffinity {
    /// Each connection is placed anew.
    #[default]
    None,
    /// Connections of a client stay on one endpoint until it was idle for so long.
    ClientIp {
        /// `sessionAffinityConfig.clientIP.timeoutSeconds`, 1 to 86,400.
        timeout_seconds: NonZeroU32,
    },
}

/// `status.loadBalancer.ingress[].ipMode` (KEP-1860).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LoadBalancerIpMode {
    /// The address is delivered to the node unchanged, so the node serves it.
    #[default]
    Vip,
    /// The load balancer is a proxy of its own: the node leaves the address alone.
    Proxy,
}

/// One `status.loadBalancer.ingress` with an `ip`; those with a host name only are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadBalancerIngress {
    /// The address.
    pub ip: IpAddr,
    /// Who serves it.
    pub ip_mode: LoadBalancerIpMode,
}

/// One `spec.ports` of a Service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    /// The port's name; may be empty when it is the only one.
    pub name: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The port on cluster, external and load-balancer IPs.
    pub port: NonZeroU16,
    /// The port on node addresses, where the type has one and it is allocated.
    pub node_port: Option<NonZeroU16>,
}

/// A Service that this proxy may have to do something for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub name: NamespacedName,
    /// `spec.type`.
    pub service_type: ServiceType,
    /// `spec.clusterIPs` (or `clusterIP`), at most one a family; empty when headless (`None`) or unset.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress`.
    pub load_balancer_ingress: Vec<LoadBalancerIngress>,
    /// `spec.loadBalancerSourceRanges`, both families mixed. Entries outside CIDR syntax never get here.
    pub load_balancer_source_ranges: Vec<IpNet>,
    /// `spec.ports`.
    pub ports: Vec<ServicePort>,
    /// `spec.sessionAffinity` and its timeout.
    pub session_affinity: SessionAffinity,
    /// `spec.internalTrafficPolicy`.
    pub internal_traffic_policy: TrafficPolicy,
    /// `spec.externalTrafficPolicy`.
    pub external_traffic_policy: TrafficPolicy,
    /// `spec.healthCheckNodePort`, where allocated.
    pub health_check_node_port: Option<NonZeroU16>,
    /// Label `service.kubernetes.io/service-proxy-name`, whatever its value, or `service.kubernetes.io/headless`: other
    /// proxies' and headless Services are kept out of the Snapshot even where the source could not filter them.
    pub excluded_by_label: bool,
}

impl Service {
    /// Replaces names by their one copy.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.name.share_strings(strings);
        self.ports.iter_mut().for_each(|port| strings.share(&mut port.name));
    }
}

/// An EndpointSlice's `addressType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressType {
    /// IPv4 addresses.
    Ipv4,
    /// IPv6 addresses.
    Ipv6,
    /// Names; ignored by proxies.
    Fqdn,
}

/// One `endpoints` of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// The first of `addresses`, as upstream uses no other; none where it is a name.
    pub address: Option<IpAddr>,
    /// `conditions.ready`; absent counts as true.
    pub ready: bool,
    /// `conditions.serving`; absent counts as true.
    pub serving: bool,
    /// `conditions.terminating`; absent counts as false.
    pub terminating: bool,
    /// `nodeName`.
    pub node_name: Option<Arc<str>>,
    /// `hints`, if it has any.
    pub hints: Option<Arc<Hints>>,
}

/// For whom an endpoint is meant. The many endpoints of a zone share one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hints {
    /// `hints.forZones[].name`.
    pub zones: Box<[Arc<str>]>,
    /// `hints.forNodes[].name`.
    pub nodes: Box<[Arc<str>]>,
}

/// One `ports` of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The Service port's name; absent counts as empty.
    pub name: Arc<str>,
    /// The protocol.
    pub protocol: Protocol,
    /// The endpoints' port; none means "all ports" and is ignored by proxies.
    pub port: Option<NonZeroU16>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The slice's own namespace and name.
    pub name: NamespacedName,
    /// Label `kubernetes.io/service-name`; a slice without one belongs to nobody.
    pub service: Option<Arc<str>>,
    /// What the addresses are.
    pub address_type: AddressType,
    /// The endpoints.
    pub endpoints: Vec<SliceEndpoint>,
    /// The ports all endpoints of this slice have.
    pub ports: Vec<SlicePort>,
    /// Annotation `endpoints.kubernetes.io/last-change-trigger-time`, nanoseconds since 1970; the programming latency
    /// metric starts here.
    pub last_change_trigger_time: Option<UnixNanos>,
}

impl EndpointSlice {
    /// Replaces names by their one copy.
    pub(crate) fn share_strings(&mut self, strings: &mut Interner<str>) {
        self.name.share_strings(strings);
        let nodes = self.endpoints.iter_mut().filter_map(|endpoint| endpoint.node_name.as_mut());
        let ports = self.ports.iter_mut().map(|port| &mut port.name);
        self.service.iter_mut().chain(nodes).chain(ports).for_each(|name| strings.share(name));
    }
}

/// Nanoseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixNanos(pub u64);

/// Which kind of address a Node's `status.addresses` entry is.
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
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `spec.podCIDRs` (or `podCIDR`).
    pub pod_cidrs: Vec<IpNet>,
    /// `status.addresses` that are IP addresses, in order.
    pub addresses: Vec<(NodeAddressType, IpAddr)>,
    /// Taint `ToBeDeletedByClusterAutoscaler` or a deletion timestamp: `/healthz` turns 503.
    pub being_deleted: bool,
}

/// A ServiceCIDR: ranges that addresses of Services are taken from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    /// The name.
    pub name: Arc<str>,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}

/// What happened to the objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta<T> {
    /// The complete list: whatever is not in it is gone. The first one makes the kind synced.
    Replace(Vec<T>),
    /// Added or changed.
    Apply(T),
    /// Gone. Unknown names are ignored.
    Delete(NamespacedName),
}

impl<T> Delta<T> {
    /// Makes it happen in a collection by name.
    pub fn apply_to(self, objects: &mut BTreeMap<NamespacedName, T>, name: impl Fn(&T) -> NamespacedName) {
        match self {
            Self::Replace(list) => {
                *objects = list.into_iter().map(|object| (name(&object), object)).collect();
            }
            Self::Apply(object) => drop(objects.insert(name(&object), object)),
            Self::Delete(name) => drop(objects.remove(&name)),
        }
    }
}

/// Those known objects that a complete list does not name any more.
pub(super) fn missing<'a>(
    known: impl Iterator<Item = &'a NamespacedName>,
    listed: impl Iterator<Item = &'a NamespacedName>,
) -> Vec<NamespacedName> {
    let listed: HashSet<_> = listed.collect();
    known.filter(|name| !listed.contains(name)).cloned().collect()
}

/// What a source of objects says. Sources may repeat themselves; the model finds out what really changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// Services.
    Services(Delta<Service>),
    /// EndpointSlices.
    EndpointSlices(Delta<EndpointSlice>),
    /// Nodes; sources may send only this node.
    Nodes(Delta<Node>),
    /// ServiceCIDRs. Not every cluster has them, and nothing waits for them.
    ServiceCidrs(Delta<ServiceCidr>),
}
