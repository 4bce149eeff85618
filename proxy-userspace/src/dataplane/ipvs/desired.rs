//! The kernel objects that a service port needs: virtual servers, addresses of the dummy link, and
//! ipset entries.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    node::Node,
    sets::{Destination, Entry, Set, SetEntry},
};
use crate::{
    dataplane::iptables_text::host_bits,
    kernel::ipvs::{VirtualKey, VirtualServer},
    model::{
        Frontend, FrontendKind, IpFamily, Protocol, ResolvedEndpoint, ResolvedPort, ServicePortKey,
        TrafficPolicy,
    },
};

/// An object that several service ports can share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// An ipset entry. An entry of [`Set::Addresses`] is also an address of the dummy link.
    Entry(SetEntry),
    /// A rule that drops connections of the node itself to this load-balancer IP. The source ranges
    /// do not allow the node, and the source of such a connection is the load-balancer IP.
    NodeDenied(IpFamily, Destination),
}

impl Item {
    /// Returns the item of an address of the dummy link.
    pub(super) fn address(address: IpAddr) -> Self {
        let family = IpFamily::of(address);
        Self::Entry(SetEntry { family, set: Set::Addresses, entry: Entry::Address(address) })
    }

    /// Returns the family of the item.
    pub(super) const fn family(&self) -> IpFamily {
        let (Self::Entry(SetEntry { family, .. }) | Self::NodeDenied(family, _)) = self;
        *family
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(entry) => write!(f, "{entry}"),
            Self::NodeDenied(_, Destination { address, protocol, port }) => {
                let (bits, number) = (host_bits(*address), protocol.number());
                write!(
                    f,
                    "-s {address}/{bits} -m ipvs --vproto {number} --vaddr {address} --vport {port} -j DROP"
                )
            }
        }
    }
}

/// An object that the kernel can reject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KernelObject {
    /// An ipset entry or an address of the dummy link.
    Item(Item),
    /// A virtual server.
    VirtualServer(VirtualKey),
    /// A real server of a virtual server.
    RealServer(VirtualKey, SocketAddr),
}

/// Why a service port needs a virtual server. If several service ports need the same virtual
/// server, a frontend that names the address precedes a node port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ServerReason {
    /// The address and port are a frontend of this kind.
    Address(FrontendKind),
    /// The address belongs to the node, and the port is a node port.
    NodePort,
}

/// The objects that a service port needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DesiredObjects {
    /// Virtual servers, sorted.
    pub(super) servers: Vec<(VirtualKey, ServerReason)>,
    /// Everything else, sorted and without duplicates.
    pub(super) items: Vec<Item>,
}

impl DesiredObjects {
    /// Returns the objects that a service port needs on a node, without rejected objects. If the
    /// kernel rejected an object of a frontend, the whole frontend is left out, because the
    /// rejected object could have protected it.
    pub(super) fn new(
        key: &ServicePortKey,
        port: &ResolvedPort,
        node: &Node,
        is_rejected: &dyn Fn(KernelObject) -> bool,
    ) -> Self {
        let mut builder = Builder { key, port, node, is_rejected, objects: Self::default() };
        let mut all = Self::default();
        for frontend in &port.frontends {
            builder.add_frontend(frontend);
            let Self { mut servers, mut items } = std::mem::take(&mut builder.objects);
            let is_server_rejected =
                servers.iter().any(|(key, _)| is_rejected(KernelObject::VirtualServer(*key)));
            if !is_server_rejected && !items.iter().any(|item| is_rejected(KernelObject::Item(*item))) {
                all.servers.append(&mut servers);
                all.items.append(&mut items);
            }
        }
        if let Some(port) = port.health_check_node_port {
            builder.add_entry(Set::HealthCheckNodePort, Entry::Port(port.get()));
        }
        builder.add_local_endpoints();
        builder.objects.items.retain(|item| !is_rejected(KernelObject::Item(*item)));
        all.items.append(&mut builder.objects.items);
        all.servers.sort_unstable();
        all.servers.dedup_by_key(|(key, _)| *key);
        all.items.sort_unstable();
        all.items.dedup();
        all
    }

    /// Returns true if the service port needs this object, or the virtual server of this real
    /// server.
    pub(super) fn contains(&self, object: KernelObject) -> bool {
        match object {
            KernelObject::Item(item) => self.items.contains(&item),
            KernelObject::VirtualServer(key) | KernelObject::RealServer(key, _) => self.reason(key).is_some(),
        }
    }

    /// Returns why the service port needs a virtual server.
    pub(super) fn reason(&self, key: VirtualKey) -> Option<ServerReason> {
        self.servers.iter().find_map(|(server, reason)| (*server == key).then_some(*reason))
    }
}

struct Builder<'a> {
    key: &'a ServicePortKey,
    port: &'a ResolvedPort,
    node: &'a Node,
    is_rejected: &'a dyn Fn(KernelObject) -> bool,
    objects: DesiredObjects,
}

impl Builder<'_> {
    fn is_local(&self) -> bool {
        self.port.external_policy == TrafficPolicy::Local
    }

    fn protocol(&self) -> Protocol {
        self.key.name.protocol
    }

    fn add_entry(&mut self, set: Set, entry: Entry) {
        self.objects.items.push(Item::Entry(SetEntry { family: self.key.family, set, entry }));
    }

    fn add_server(&mut self, address: SocketAddr, reason: ServerReason) {
        self.objects.servers.push((VirtualKey { protocol: self.protocol(), address }, reason));
    }

    fn add_frontend(&mut self, frontend: &Frontend) {
        let port = frontend.port.get();
        let Some(address) = frontend.address else {
            self.add_node_port(port);
            return;
        };
        self.add_server(SocketAddr::new(address, port), ServerReason::Address(frontend.kind));
        // As upstream, only a cluster IP may be on another link too: NodeLocal DNSCache puts one
        // there.
        let is_cluster_ip = frontend.kind == FrontendKind::ClusterIp;
        if is_cluster_ip || !self.node.local_addresses.contains(&address) {
            self.add_entry(Set::Addresses, Entry::Address(address));
        }
        let to = Destination { address, protocol: self.protocol(), port };
        let entry = Entry::Destination(to);
        match frontend.kind {
            FrontendKind::ClusterIp => self.add_entry(Set::ClusterIp, entry),
            FrontendKind::ExternalIp if self.is_local() => self.add_entry(Set::ExternalIpLocal, entry),
            FrontendKind::ExternalIp => self.add_entry(Set::ExternalIp, entry),
            FrontendKind::LoadBalancerIp => self.add_load_balancer(to),
            FrontendKind::NodePort => {}
        }
    }

    fn add_load_balancer(&mut self, to: Destination) {
        self.add_entry(Set::LoadBalancer, Entry::Destination(to));
        if self.is_local() {
            self.add_entry(Set::LoadBalancerLocal, Entry::Destination(to));
        }
        let ranges = &self.port.source_ranges;
        if ranges.is_empty() {
            return;
        }
        let primary = self.node.primary.get(&self.key.family);
        let is_node_allowed = primary.is_some_and(|node| ranges.iter().any(|range| range.contains(node)));
        self.add_entry(Set::LoadBalancerFirewall, Entry::Destination(to));
        for range in ranges {
            self.add_entry(Set::LoadBalancerSourceCidr, Entry::Within(to, *range));
        }
        // The load-balancer IP is on the dummy link. The node's own connections to it use it as
        // their source.
        if is_node_allowed {
            self.add_entry(Set::LoadBalancerSourceIp, Entry::From(to, to.address));
        } else {
            self.objects.items.push(Item::NodeDenied(self.key.family, to));
        }
    }

    fn add_node_port(&mut self, port: u16) {
        let (family, protocol) = (self.key.family, self.protocol());
        let addresses = self.node.served_on.iter().filter(|it| IpFamily::of(**it) == family);
        let addresses: Vec<_> = addresses.copied().collect();
        let (all, local) = match protocol {
            Protocol::Tcp => (Set::NodePortTcp, Set::NodePortLocalTcp),
            Protocol::Udp => (Set::NodePortUdp, Set::NodePortLocalUdp),
            Protocol::Sctp => (Set::NodePortSctp, Set::NodePortLocalSctp),
        };
        let entries: Vec<_> = if protocol == Protocol::Sctp {
            let to = |address: &_| Destination { address: *address, protocol, port };
            addresses.iter().map(|address| Entry::Destination(to(address))).collect()
        } else {
            vec![Entry::Port(port)]
        };
        for entry in entries {
            self.add_entry(all, entry);
            if self.is_local() {
                self.add_entry(local, entry);
            }
        }
        for address in addresses {
            let key = VirtualKey { protocol, address: SocketAddr::new(address, port) };
            if !(self.is_rejected)(KernelObject::VirtualServer(key)) {
                self.add_server(key.address, ServerReason::NodePort);
            }
        }
    }

    /// Adds the hairpin entries: the replies of a pod to itself must pass through the node.
    fn add_local_endpoints(&mut self) {
        let both = self.port.cluster_endpoints.iter().chain(&self.port.local_endpoints);
        for endpoint in both.filter(|endpoint| endpoint.is_local) {
            let (address, port) = (endpoint.address.ip(), endpoint.address.port());
            let to = Destination { address, protocol: self.protocol(), port };
            self.add_entry(Set::LoopBack, Entry::From(to, address));
        }
    }
}

/// Returns the properties of a virtual server of a service port.
pub(super) fn virtual_server(key: VirtualKey, port: &ResolvedPort, scheduler: &Arc<str>) -> VirtualServer {
    let server = VirtualServer::new(Arc::clone(scheduler), key.address.ip());
    match port.affinity_timeout {
        Some(seconds) => server.persistent(seconds.get()),
        None => server,
    }
}

/// Returns the endpoints of a virtual server.
///
/// One virtual server serves all clients: from outside, pods and the node. If externalTrafficPolicy
/// is Local and this node has an endpoint, all clients reach endpoints of this node only. If this
/// node has none, the virtual server has all endpoints, for pods and the node. Clients from outside
/// then get no replies, because replies to them carry the endpoint's own address
/// (<https://github.com/kubernetes/kubernetes/pull/97081>). kube-proxy does the same if
/// internalTrafficPolicy is Local. But no client of a cluster IP is outside, and the API says that
/// such traffic is dropped. Here it is dropped.
pub(super) fn endpoints(reason: ServerReason, port: &ResolvedPort) -> &[ResolvedEndpoint] {
    match reason {
        ServerReason::Address(FrontendKind::ClusterIp) => port.endpoints(port.internal_policy),
        _ if port.external_policy == TrafficPolicy::Local && !port.local_endpoints.is_empty() => {
            &port.local_endpoints
        }
        _ => &port.cluster_endpoints,
    }
}
