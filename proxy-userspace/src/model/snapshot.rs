//! The resolved model, which is the only input of a dataplane.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Balance, Forwarding, IpFamily, LinkName, LinkPath, MacAddress, Name, NamespacedName, PortRange, Protocol,
    SocketScope, TrafficPolicy, TunnelView, Vlan, XdpMode,
};

/// The name of a service port, like upstream's `ServicePortName`: `namespace/name:port`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortName {
    /// The Service.
    pub service: NamespacedName,
    /// The port's name; may be empty.
    pub port: Name,
    /// The protocol. A TCP port and a UDP port may have the same name.
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

/// The kind of a frontend. It decides about traffic policy, source ranges and masquerading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// A cluster IP: internalTrafficPolicy applies.
    ClusterIp,
    /// A port of the node's addresses: externalTrafficPolicy applies.
    NodePort,
    /// An external IP: externalTrafficPolicy applies.
    ExternalIp,
    /// A load-balancer IP of ipMode VIP: externalTrafficPolicy and source ranges apply.
    LoadBalancerIp,
}

impl FrontendKind {
    /// Returns the name, in the style of the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::ExternalIp => "ExternalIP",
            Self::LoadBalancerIp => "LoadBalancerIP",
        }
    }
}

/// One address and port at which clients reach a service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// The kind.
    pub kind: FrontendKind,
    /// The address. None for a node port, which is served on [`NodeView::node_port_addresses`].
    pub address: Option<IpAddr>,
    /// The destination port.
    pub port: NonZeroU16,
}

/// The location of a client. As with kube-proxy, externalTrafficPolicy `Local` does not apply to
/// this node and its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientLocation {
    /// A process of this node or a pod on it.
    Inside,
    /// Any other client.
    Outside,
}

/// The verdict if the client's endpoint list is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoEndpointVerdict {
    /// Refuse: the Service has no usable endpoint on any node.
    Refuse,
    /// Drop: other nodes have endpoints, but policy `Local` excludes them.
    Drop,
}

/// An endpoint of an endpoint list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResolvedEndpoint {
    /// Address and port.
    pub address: SocketAddr,
    /// The endpoint runs on this node.
    pub is_local: bool,
}

/// One service port in one family, as this node must serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPort {
    /// The frontends, sorted, without duplicates. No other service port of the Snapshot has the
    /// same frontend (see [`super::FrontendConflict`]). May be empty.
    pub frontends: Vec<Frontend>,
    /// The endpoint list for policy `Cluster`, filtered by readiness, termination and topology.
    /// Sorted, without duplicates. Empty if internalTrafficPolicy is `Local` and there is no other
    /// frontend than the cluster IP.
    pub cluster_endpoints: Vec<ResolvedEndpoint>,
    /// The endpoint list for policy `Local`: endpoints of this node, filtered by readiness and
    /// termination. Sorted. Empty unless a policy of the Service is `Local`, or packets come for it
    /// through the tunnel.
    pub local_endpoints: Vec<ResolvedEndpoint>,
    /// For UDP only: all endpoints that serve (`conditions.serving`) or are ready, in a list or
    /// not. A UDP flow of this service port to another address has lost its endpoint. Sorted by
    /// address, without duplicates.
    pub serving: Vec<ResolvedEndpoint>,
    /// Upstream's `hasEndpoints`: at least one endpoint is usable, on any node.
    pub has_endpoints: bool,
    /// The timeout of `ClientIP` affinity in seconds; none without affinity.
    pub affinity_timeout: Option<NonZeroU32>,
    /// internalTrafficPolicy.
    pub internal_policy: TrafficPolicy,
    /// externalTrafficPolicy. `Cluster` if the Service has no frontend to which it applies.
    pub external_policy: TrafficPolicy,
    /// Source ranges of this family for load-balancer IPs. Empty if all clients may connect: no
    /// range is set, or one of length 0, or only ranges of the other family, which as upstream do
    /// not restrict this one.
    pub source_ranges: Vec<IpNet>,
    /// healthCheckNodePort of a Service of type `LoadBalancer` with externalTrafficPolicy `Local`.
    pub health_check_node_port: Option<NonZeroU16>,
    /// How clients from outside get an endpoint of their list.
    pub balance: Balance,
    /// How packets of clients from outside reach endpoints on other nodes.
    pub forwarding: Forwarding,
    /// For [`Forwarding::Dsr`]: the addresses of endpoints on nodes that take packets of the
    /// tunnel, with those of the nodes.
    pub dsr_nodes: BTreeMap<IpAddr, IpAddr>,
}

impl ResolvedPort {
    /// Returns the policy that applies to a client of this kind of frontend.
    pub fn policy(&self, kind: FrontendKind, client: ClientLocation) -> TrafficPolicy {
        match (kind, client) {
            (FrontendKind::ClusterIp, _) => self.internal_policy,
            (_, ClientLocation::Inside) => TrafficPolicy::Cluster,
            (_, ClientLocation::Outside) => self.external_policy,
        }
    }

    /// Returns the endpoint list of a policy.
    pub fn endpoints(&self, policy: TrafficPolicy) -> &[ResolvedEndpoint] {
        match policy {
            TrafficPolicy::Cluster => &self.cluster_endpoints,
            TrafficPolicy::Local => &self.local_endpoints,
        }
    }

    /// Returns the verdict for a client whose endpoint list is empty.
    pub fn no_endpoint_verdict(&self) -> NoEndpointVerdict {
        if self.has_endpoints { NoEndpointVerdict::Drop } else { NoEndpointVerdict::Refuse }
    }
}

/// This node, as resolved from the Node object, the configuration and the kernel's links and
/// addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// All addresses of links in the node's network namespace, including loopback.
    pub local_addresses: BTreeSet<IpAddr>,
    /// The ranges that are local by a route that somebody added, whatever their size. They are not
    /// among [`Self::local_addresses`].
    pub local_routes: Vec<IpNet>,
    /// The addresses on which node ports are served. 127.0.0.1 and `::1` stand for all loopback
    /// addresses of their family. Addresses that are local by route are not among
    /// [`Self::local_addresses`].
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The families in which node ports are served on all addresses, including those added later.
    pub every_node_port_address: BTreeSet<IpFamily>,
    /// The node's own address in each family: from the Node object, otherwise from the kernel.
    pub primary_addresses: BTreeMap<IpFamily, IpAddr>,
    /// The local detector.
    pub local_detector: LocalTrafficDetector,
    /// The links that are served, by index: all except loopback, `ifb` links, links with
    /// unsupported headers, and those that the configuration excludes.
    pub links: BTreeMap<u32, ServedLink>,
    /// A link has no programs in the ebpf mode: the settings exclude it, or the programs do not
    /// know its headers. Loopback and `ifb` links do not count.
    pub has_unserved_links: bool,
    /// What translates packets that come in on these links.
    pub link_path: LinkPath,
    /// The indexes of the links on which flows that come in may take the direct path.
    pub direct_links: BTreeSet<u32>,
    /// The indexes of the links that may hand packets of the direct path to their peer.
    pub peer_links: BTreeSet<u32>,
    /// The links that may have an XDP program, by index.
    pub xdp_links: BTreeMap<u32, XdpLink>,
    /// The sockets that are served.
    pub socket_scope: SocketScope,
    /// The addresses of the pods that redirect their own packets, or did. Their sockets are not
    /// served meanwhile.
    pub exempt_addresses: BTreeSet<IpAddr>,
    /// The indexes of the links on which packets of local pods arrive, if [`Self::local_detector`]
    /// is about links.
    pub local_links: BTreeSet<u32>,
    /// For each link that is a port of a bridge, by index: the MAC address of the bridge.
    pub bridge_ports: BTreeMap<u32, MacAddress>,
    /// For each link that is a port of a bond, by index: the index of the bond.
    pub bond_ports: BTreeMap<u32, u32>,
    /// The VLANs whose links are served. Packets with their tags are not translated on the links
    /// beneath.
    pub vlans: BTreeSet<Vlan>,
    /// The ranges of all ServiceCIDRs, sorted, without duplicates. Empty if they are not known.
    pub service_cidrs: Vec<IpNet>,
    /// The tunnel to other nodes, if there is one.
    pub tunnel: Option<TunnelView>,
    /// Masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// How the link programs masquerade, if they may. `None` if netfilter does.
    pub masquerade: Option<Masquerade>,
    /// The source ports with which link programs of an earlier process masquerade.
    pub former_programs_ports: Option<PortRange>,
    /// The Node is being deleted: `/healthz` returns 503.
    pub being_deleted: bool,
}

/// The sources that the link programs give to the packets that they masquerade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masquerade {
    /// The ports.
    pub ports: PortRange,
    /// They begin to masquerade only if this node has the direct path. Then they go on while they
    /// translate packets that come in on links.
    pub with_direct_path: bool,
    /// The address for packets that leave on the link with this index for an endpoint in this
    /// subnet.
    pub addresses: BTreeMap<(u32, IpNet), IpAddr>,
}

impl NodeView {
    /// Returns true if the kernel takes the address for one of its own (`RTN_LOCAL`).
    pub fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback()
            || self.local_addresses.contains(&address)
            || self.local_routes.iter().any(|route| route.contains(&address))
    }

    /// Returns the addresses of links on which node ports are served.
    pub fn node_port_addresses_of_links(&self) -> impl Iterator<Item = IpAddr> {
        self.node_port_addresses.intersection(&self.local_addresses).copied()
    }

    /// Returns the source ports if the link programs masquerade from now on; `None` if netfilter
    /// does. `masquerades` says that the programs do so far.
    ///
    /// On a node that loses the direct path they go on: netfilter could give a new connection the
    /// port of a flow that the programs know.
    pub fn masquerade_ports(&self, masquerades: bool) -> Option<PortRange> {
        let masquerade = self.masquerade.as_ref()?;
        let begins = !masquerade.with_direct_path || matches!(self.link_path, LinkPath::Direct { .. });
        (begins || masquerades).then_some(masquerade.ports)
    }

    /// Returns the source ports that netfilter's rules may give to packets that they masquerade
    /// while the link programs masquerade others. `None` if it may give any.
    ///
    /// A reply to a port of the programs' range is taken for one to a flow that they masquerade.
    pub fn netfilter_ports(&self) -> Option<PortRange> {
        const APART: PortRange = PortRange { first: 32_768, last: u16::MAX };
        let masquerade = self.masquerade.as_ref();
        let programs = masquerade.map(|masquerade| masquerade.ports).or(self.former_programs_ports)?;
        programs.common(APART).is_none().then_some(APART)
    }
}

/// A link on which packets are translated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedLink {
    /// The name.
    pub name: Arc<str>,
    /// The header with which packets begin.
    pub framing: Framing,
}

/// A link that may have an XDP program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpLink {
    /// The name.
    pub name: Arc<str>,
    /// Where the program runs.
    pub mode: XdpMode,
    /// Its own MAC address.
    pub address: MacAddress,
    /// It takes frames that programs on other links redirect to it.
    pub takes_frames: bool,
    /// Frames that leave on the link where they came in are redirected to it.
    pub redirects_to_itself: bool,
    /// The program forwards packets, so that the link gets one. Otherwise it keeps the one that it
    /// has, which passes all: drivers may lose packets while programs come and go.
    pub forwards: bool,
}

/// The header with which the packets of a served link begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Framing {
    /// An Ethernet header.
    Ethernet,
    /// The IP header.
    Ip,
    /// The IP header of a packet that another node sent through the tunnel. Packets that leave need
    /// no program.
    Tunnel,
}

/// The local detector, resolved from upstream's `detectLocalMode`: which packets come from local
/// pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LocalTrafficDetector {
    /// Unknown. No packet counts as local, and no packet is masqueraded because it is not local.
    #[default]
    None,
    /// Packets with a source in these ranges (ClusterCIDR, NodeCIDR). A family without a range has
    /// no detector.
    Cidrs(Vec<IpNet>),
    /// Packets that arrived through this bridge.
    BridgeInterface(LinkName),
    /// Packets that arrived through links whose names start with this prefix.
    InterfaceNamePrefix(LinkName),
}

impl LocalTrafficDetector {
    /// Upstream's `IsImplemented` for one family: returns true if it is known which packets are
    /// local.
    pub fn is_implemented(&self, family: IpFamily) -> bool {
        match self {
            Self::None => false,
            Self::Cidrs(cidrs) => cidrs.iter().any(|cidr| IpFamily::of(cidr.addr()) == family),
            Self::BridgeInterface(_) | Self::InterfaceNamePrefix(_) => true,
        }
    }
}

/// Everything that this node must serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The service ports.
    pub ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    /// This node.
    pub node: NodeView,
}

/// The differences to the previous Snapshot. A dataplane looks at nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Everything: after the first resolution, or for a dataplane that starts again.
    pub all: bool,
    /// Service ports that were added, changed or removed.
    pub ports: BTreeSet<ServicePortKey>,
    /// [`Snapshot::node`] changed.
    pub node: bool,
}

impl Dirty {
    /// Marks everything as dirty.
    pub fn everything() -> Self {
        Self { all: true, ports: BTreeSet::new(), node: true }
    }

    /// Returns true if nothing differs.
    pub fn is_empty(&self) -> bool {
        !self.all && self.ports.is_empty() && !self.node
    }
}
