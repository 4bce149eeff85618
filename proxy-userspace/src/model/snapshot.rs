//! The resolved model: what every dataplane reads, with nothing about Kubernetes left to decide.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;

use super::{IpFamily, MacAddress, NamespacedName, Protocol, TrafficPolicy};

/// Upstream's `ServicePortName`: shown as `namespace/name:port`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortName {
    /// The Service.
    pub service: NamespacedName,
    /// The port's name; may be empty.
    pub port: Arc<str>,
    /// The protocol: one port name may stand for TCP and UDP.
    pub protocol: Protocol,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.port.is_empty() { self.service.fmt(f) } else { write!(f, "{}:{}", self.service, self.port) }
    }
}

/// A service port in one IP family: the key of the Snapshot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortKey {
    /// The service port.
    pub name: ServicePortName,
    /// The family.
    pub family: IpFamily,
}

impl fmt::Display for ServicePortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.name.protocol, self.family)
    }
}

/// Which kind of address a frontend is; decides policy, firewall and masquerading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// A cluster IP: internalTrafficPolicy applies.
    ClusterIp,
    /// A port on the node's addresses: externalTrafficPolicy applies.
    NodePort,
    /// An external IP: externalTrafficPolicy applies.
    ExternalIp,
    /// A load-balancer IP of ipMode VIP: externalTrafficPolicy and source ranges apply.
    LoadBalancerIp,
}

/// One address a service port is reached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// The kind.
    pub kind: FrontendKind,
    /// The address; none for a node port, which is served on [`NodeView::node_port_addresses`].
    pub address: Option<IpAddr>,
    /// The destination port.
    pub port: NonZeroU16,
}

/// Who dials. Pods and the node take a short cut through externalTrafficPolicy Local, as in kube-proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A process of this node or a pod on it.
    Inside,
    /// Everybody else.
    Outside,
}

/// What a caller meets where no endpoint is left for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhenEmpty {
    /// Connection refused: the Service has no endpoint anywhere.
    Refuse,
    /// Silence or an unreachable error: there are endpoints, but policy Local forbids them.
    Drop,
}

/// An endpoint that was chosen for a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResolvedEndpoint {
    /// Address and port.
    pub address: SocketAddr,
    /// Runs on this node.
    pub is_local: bool,
}

/// One service port in one family, as this node has to serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPort {
    /// All addresses it is reached by, sorted, without duplicates; none that another entry of the Snapshot has
    /// ([`super::FrontendConflict`] has the rule). May be empty.
    pub frontends: Vec<Frontend>,
    /// Endpoints for policy Cluster, after readiness, termination fallback and topology; sorted, without duplicates. Empty
    /// where internalTrafficPolicy is Local and nothing is reached from outside.
    pub cluster_endpoints: Vec<ResolvedEndpoint>,
    /// Endpoints of this node for policy Local, after readiness and termination fallback; sorted. Empty unless a policy
    /// of the Service is Local.
    pub local_endpoints: Vec<ResolvedEndpoint>,
    /// Every endpoint that still serves (`conditions.serving`) or is ready, chosen or not: a UDP flow of this service port to
    /// any other address has lost its endpoint. Sorted by address, none twice; kept for UDP only.
    pub serving: Vec<ResolvedEndpoint>,
    /// There is an endpoint somewhere that is usable under some policy: upstream's `hasEndpoints`.
    pub has_endpoints: bool,
    /// Affinity by client, with its timeout in seconds.
    pub affinity_timeout: Option<NonZeroU32>,
    /// internalTrafficPolicy.
    pub internal_policy: TrafficPolicy,
    /// externalTrafficPolicy; Cluster where the Service has no address that is reached from outside.
    pub external_policy: TrafficPolicy,
    /// Source ranges of this family for load-balancer IPs. Empty where everybody may pass: none is set, or one of length 0,
    /// or only ranges of the other family, which upstream does not take for a restriction of this one.
    pub source_ranges: Vec<IpNet>,
    /// healthCheckNodePort, on Services of type LoadBalancer with externalTrafficPolicy Local.
    pub health_check_node_port: Option<NonZeroU16>,
}

impl ResolvedPort {
    /// The policy whose endpoint list a caller of this kind of address gets.
    pub fn policy(&self, kind: FrontendKind, caller: Caller) -> TrafficPolicy {
        match (kind, caller) {
            (FrontendKind::ClusterIp, _) => self.internal_policy,
            (_, Caller::Inside) => TrafficPolicy::Cluster,
            (_, Caller::Outside) => self.external_policy,
        }
    }

    /// The endpoint list of a policy.
    pub fn endpoints(&self, policy: TrafficPolicy) -> &[ResolvedEndpoint] {
        match policy {
            TrafficPolicy::Cluster => &self.cluster_endpoints,
            TrafficPolicy::Local => &self.local_endpoints,
        }
    }

    /// What a caller meets when the list of its policy is empty.
    pub fn when_empty(&self) -> WhenEmpty {
        if self.has_endpoints { WhenEmpty::Drop } else { WhenEmpty::Refuse }
    }
}

/// What this node knows of itself: the Node object and the kernel's addresses, resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Every address on a link of the node's namespace, loopback included.
    pub local_addresses: BTreeSet<IpAddr>,
    /// Those on which node ports are served. 127.0.0.1 and `::1` stand for all of loopback of their family.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The address the node calls its own, a family: from the Node object, else from the kernel.
    pub primary_addresses: BTreeMap<IpFamily, IpAddr>,
    /// `spec.podCIDRs` of the Node and the configured clusterCIDRs: where pods of this node live, as far as known.
    pub pod_cidrs: Vec<IpNet>,
    /// How traffic of local pods is told from other traffic.
    pub local_detector: LocalTrafficDetector,
    /// The links that packets are translated on, by index: all but loopback, links of an unknown kind, and those that the
    /// configuration leaves out.
    pub links: BTreeMap<u32, ServedLink>,
    /// Indexes of the links that traffic of local pods comes in on, where [`Self::local_detector`] goes by links.
    pub local_links: BTreeSet<u32>,
    /// The address of the bridge, for every link that is a port of one, by the port's index.
    pub bridge_ports: BTreeMap<u32, MacAddress>,
    /// Where addresses of Services are taken from: what the ServiceCIDRs name, each once and in order. None where they are not
    /// known.
    pub service_cidrs: Vec<IpNet>,
    /// All traffic to cluster IPs is masqueraded.
    pub masquerade_all: bool,
    /// The Node is going away: `/healthz` answers 503.
    pub being_deleted: bool,
}

/// A link that packets are translated on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedLink {
    /// Its name.
    pub name: Arc<str>,
    /// What its packets begin with.
    pub framing: Framing,
    /// It has an address of the node's own, at which others reach it; one out of the pods' ranges, as gateways of pods have, is
    /// none of these.
    pub has_node_address: bool,
}

/// What the packets of a link begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Framing {
    /// An Ethernet header.
    Ethernet,
    /// The IP header.
    Ip,
}

/// Upstream's `detectLocalMode`, resolved: which source counts as a pod of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LocalTrafficDetector {
    /// Unknown: nothing counts as local, and nothing is masqueraded for not being so.
    #[default]
    None,
    /// Sources in these ranges (ClusterCIDR, NodeCIDR); a family without one has no detector.
    Cidrs(Vec<IpNet>),
    /// Packets that came in through this bridge.
    BridgeInterface(Arc<str>),
    /// Packets that came in through links whose name starts so.
    InterfaceNamePrefix(Arc<str>),
}

impl LocalTrafficDetector {
    /// Upstream's `IsImplemented`, for one family: traffic of this family can be told to be a local pod's or not.
    pub fn is_implemented(&self, family: IpFamily) -> bool {
        match self {
            Self::None => false,
            Self::Cidrs(cidrs) => cidrs.iter().any(|cidr| IpFamily::of(cidr.addr()) == family),
            Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => true,
        }
    }
}

/// Everything this node has to serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Service ports by key.
    pub ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    /// This node.
    pub node: NodeView,
}

/// What differs from the last Snapshot that was resolved; a dataplane looks at nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Everything: the first resolution, or a dataplane that has to start over.
    pub all: bool,
    /// Service ports that came, changed or went.
    pub ports: BTreeSet<ServicePortKey>,
    /// [`Snapshot::node`] changed.
    pub node: bool,
}

impl Dirty {
    /// Everything.
    pub fn everything() -> Self {
        Self { all: true, ports: BTreeSet::new(), node: true }
    }

    /// Nothing to do.
    pub fn is_empty(&self) -> bool {
        !self.all && self.ports.is_empty() && !self.node
    }
}
