//! What a service port wants in the kernel: virtual servers, addresses of the dummy link, and entries of sets.

use std::{fmt, net::SocketAddr};

use super::{
    node::{Node, Terms},
    refusals::{Refusals, Refused},
    sets::{Destination, Entry, Set},
};
use crate::{
    kernel::ipvs::{VirtualKey, VirtualServer},
    model::{
        Frontend, FrontendKind, IpFamily, Protocol, ResolvedEndpoint, ResolvedPort, ServicePortKey,
        TrafficPolicy,
    },
};

/// Something that several service ports may want. An address of the dummy link is an entry of [`Set::Addresses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Item {
    /// An entry of a set.
    Entry(IpFamily, Set, Entry),
    /// A rule that keeps the node itself, when it uses this load-balancer IP as its source, from what source ranges deny it.
    NodeDenied(IpFamily, Destination),
}

/// Why a service port wants a virtual server; one that names the address comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reason {
    /// It is reached by this address.
    Address(FrontendKind),
    /// The address is the node's, and the port its node port.
    NodePort,
}

/// What a service port wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claims {
    /// Virtual servers.
    pub(super) servers: Vec<(VirtualKey, Reason)>,
    /// All else; sorted, without duplicates.
    pub(super) items: Vec<Item>,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(family, set, entry) => write!(f, "{} {entry}", set.name(*family)),
            Self::NodeDenied(_, Destination { address, protocol, port }) => {
                let bits = if address.is_ipv4() { 32 } else { 128 };
                let number = protocol.number();
                write!(
                    f,
                    "-s {address}/{bits} -m ipvs --vproto {number} --vaddr {address} --vport {port} -j DROP"
                )
            }
        }
    }
}

/// What a service port wants on a node. An address of its own of which the kernel refuses anything is left out whole, so that nothing is
/// served without what guards it.
pub(super) fn claims(key: &ServicePortKey, port: &ResolvedPort, node: &Node, refused: &Refusals) -> Claims {
    let mut claiming = Claiming { key, port, node, refused, claims: Claims::default() };
    for frontend in &port.frontends {
        let Claims { servers, items } = &claiming.claims;
        let (servers, items) = (servers.len(), items.len());
        claiming.frontend(frontend);
        if claiming.has_refused(servers, items) {
            claiming.claims.servers.truncate(servers);
            claiming.claims.items.truncate(items);
        }
    }
    if let Some(port) = port.health_check_node_port {
        claiming.entry(Set::HealthCheckNodePort, Entry::Port(port.get()));
    }
    claiming.local_endpoints();
    let Claims { mut servers, mut items } = claiming.claims;
    items.retain(|item| !refused.has(key, Refused::Item(*item)));
    servers.sort_unstable();
    servers.dedup_by_key(|(key, _)| *key);
    items.sort_unstable();
    items.dedup();
    Claims { servers, items }
}

struct Claiming<'a> {
    key: &'a ServicePortKey,
    port: &'a ResolvedPort,
    node: &'a Node,
    refused: &'a Refusals,
    claims: Claims,
}

impl Claiming<'_> {
    fn is_local(&self) -> bool {
        self.port.external_policy == TrafficPolicy::Local
    }

    /// Whether anything is refused from these places on.
    fn has_refused(&self, servers: usize, items: usize) -> bool {
        let is_refused = |what| self.refused.has(self.key, what);
        let Claims { servers: all_servers, items: all_items } = &self.claims;
        all_servers[servers..].iter().any(|(key, _)| is_refused(Refused::Server(*key)))
            || all_items[items..].iter().any(|item| is_refused(Refused::Item(*item)))
    }

    fn protocol(&self) -> Protocol {
        self.key.name.protocol
    }

    fn entry(&mut self, set: Set, entry: Entry) {
        self.claims.items.push(Item::Entry(self.key.family, set, entry));
    }

    fn server(&mut self, address: SocketAddr, reason: Reason) {
        self.claims.servers.push((VirtualKey { protocol: self.protocol(), address }, reason));
    }

    fn frontend(&mut self, frontend: &Frontend) {
        let port = frontend.port.get();
        let Some(address) = frontend.address else {
            self.node_port(port);
            return;
        };
        self.server(SocketAddr::new(address, port), Reason::Address(frontend.kind));
        if !self.node.local_addresses.contains(&address) {
            self.entry(Set::Addresses, Entry::Address(address));
        }
        let to = Destination { address, protocol: self.protocol(), port };
        let entry = Entry::Destination(to);
        match frontend.kind {
            FrontendKind::ClusterIp => self.entry(Set::ClusterIp, entry),
            FrontendKind::ExternalIp if self.is_local() => self.entry(Set::ExternalIpLocal, entry),
            FrontendKind::ExternalIp => self.entry(Set::ExternalIp, entry),
            FrontendKind::LoadBalancerIp => self.load_balancer(to),
            FrontendKind::NodePort => {}
        }
    }

    fn load_balancer(&mut self, to: Destination) {
        self.entry(Set::LoadBalancer, Entry::Destination(to));
        if self.is_local() {
            self.entry(Set::LoadBalancerLocal, Entry::Destination(to));
        }
        let ranges = &self.port.source_ranges;
        if ranges.is_empty() {
            return;
        }
        let primary = self.node.primary.get(&self.key.family);
        let is_node_allowed = primary.is_some_and(|node| ranges.iter().any(|range| range.contains(node)));
        self.entry(Set::LoadBalancerFirewall, Entry::Destination(to));
        for range in ranges {
            self.entry(Set::LoadBalancerSourceCidr, Entry::Within(to, *range));
        }
        // The address is one of the node's own: what the node sends there comes from it.
        if is_node_allowed {
            self.entry(Set::LoadBalancerSourceIp, Entry::From(to, to.address));
        } else {
            self.claims.items.push(Item::NodeDenied(self.key.family, to));
        }
    }

    fn node_port(&mut self, port: u16) {
        let family = self.key.family;
        let addresses = self.node.served_on.iter().filter(|it| IpFamily::of(**it) == family);
        let addresses: Vec<_> = addresses.copied().collect();
        let (all, local) = match self.protocol() {
            Protocol::Tcp => (Set::NodePortTcp, Set::NodePortLocalTcp),
            Protocol::Udp => (Set::NodePortUdp, Set::NodePortLocalUdp),
            Protocol::Sctp => (Set::NodePortSctp, Set::NodePortLocalSctp),
        };
        let entries: Vec<_> = if self.protocol() == Protocol::Sctp {
            let to = |address: &_| Destination { address: *address, protocol: Protocol::Sctp, port };
            addresses.iter().map(|address| Entry::Destination(to(address))).collect()
        } else {
            vec![Entry::Port(port)]
        };
        for entry in entries {
            self.entry(all, entry);
            if self.is_local() {
                self.entry(local, entry);
            }
        }
        let protocol = self.protocol();
        for address in addresses {
            let key = VirtualKey { protocol, address: SocketAddr::new(address, port) };
            if !self.refused.has(self.key, Refused::Server(key)) {
                self.server(key.address, Reason::NodePort);
            }
        }
    }

    /// What comes back to the pod that sent it has to pass through the node.
    fn local_endpoints(&mut self) {
        let both = self.port.cluster_endpoints.iter().chain(&self.port.local_endpoints);
        for endpoint in both.filter(|endpoint| endpoint.is_local) {
            let (address, port) = (endpoint.address.ip(), endpoint.address.port());
            let to = Destination { address, protocol: self.protocol(), port };
            self.entry(Set::LoopBack, Entry::From(to, address));
        }
    }
}

/// How a virtual server of a service port works.
pub(super) fn server(key: VirtualKey, port: &ResolvedPort, terms: &Terms) -> VirtualServer {
    let server = VirtualServer::new(terms.scheduler.clone(), key.address.ip());
    match port.affinity_timeout {
        Some(seconds) => server.persistent(seconds.get()),
        None => server,
    }
}

/// The endpoints behind it.
///
/// One virtual server serves all callers, from outside as well as pods and the node. Where externalTrafficPolicy is Local
/// and this node has an endpoint, all of them reach endpoints of this node only; where it has none, all endpoints are there
/// for pods and the node, and callers from outside hear nothing, since answers to them come from the endpoint's own address
/// (<https://github.com/kubernetes/kubernetes/pull/97081>). Upstream does so under internalTrafficPolicy Local too, where nobody
/// is from outside and the API says that such traffic is dropped: there it is.
pub(super) fn endpoints(reason: Reason, port: &ResolvedPort) -> &[ResolvedEndpoint] {
    match reason {
        Reason::Address(FrontendKind::ClusterIp) => port.endpoints(port.internal_policy),
        _ if port.external_policy == TrafficPolicy::Local && !port.local_endpoints.is_empty() => {
            &port.local_endpoints
        }
        _ => &port.cluster_endpoints,
    }
}
