//! The tunnel for direct server return: its link, the nodes at its other ends, and which endpoints
//! are behind them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use super::{
    Delta, DsrAnnouncement, Forwarding, IpFamily, LinkAddress, LinkPath, ModelSettings, NamespacedName, Node,
    NodeFacts, ResolvedEndpoint, ResolvedPort, TrafficPolicy, endpoint_slice_cache::EndpointInfo,
};
use crate::net::{Link, SourceAddress, TUNNEL_LINK};

/// The tunnel of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelView {
    /// The interface index of the link.
    pub link: u32,
    /// The link is set up: the program for its packets is there. Until then nothing is sent, and
    /// other nodes are not told to send.
    pub is_up: bool,
    /// The bytes of the longest packet that leaves this node in one piece.
    pub mtu: u32,
    /// Packets for clients whose own packets came through the tunnel go back through it.
    pub returns: bool,
    /// The addresses of the nodes whose packets are taken.
    pub nodes: BTreeSet<IpAddr>,
    /// All addresses of these nodes. What comes from them does not go through the tunnel: a node
    /// would get its own packets back, and drop them.
    pub addresses_of_nodes: BTreeSet<IpAddr>,
    /// What this node announces.
    pub announcement: DsrAnnouncement,
}

/// The links of a node carry so many bytes if the kernel does not say (RFC 894).
const ETHERNET_MTU: u32 = 1_500;

impl TunnelView {
    /// Resolves the tunnel, if its link exists. `primary` are the addresses of this node. Netfilter
    /// does not translate packets that come through it.
    pub(super) fn resolve(
        settings: &ModelSettings,
        facts: &NodeFacts,
        primary: &BTreeMap<IpFamily, IpAddr>,
        nodes: &OtherNodes,
    ) -> Option<Self> {
        let is_translated = !matches!(facts.link_path, LinkPath::Netfilter { .. });
        let port = settings.dsr_port.filter(|_| is_translated)?.get();
        let link = facts.links.iter().find(|link| &*link.name == TUNNEL_LINK)?;
        Some(Self {
            link: link.index,
            is_up: link.is_up,
            mtu: mtu(facts, primary),
            returns: settings.dsr_returns,
            nodes: nodes.with_port(port),
            addresses_of_nodes: nodes.addresses_with_port(port),
            announcement: announcement(facts, primary, port),
        })
    }
}

/// Returns what this node announces. Of its other addresses, those with a subnet come first if
/// there are too many: the others are often those of VIPs and pods.
fn announcement(facts: &NodeFacts, primary: &BTreeMap<IpFamily, IpAddr>, port: u16) -> DsrAnnouncement {
    let ends = primary.values().filter(|address| is_tunnel_address(**address));
    let addresses: Vec<_> = ends.map(|address| SocketAddr::new(*address, port)).collect();
    let is_host_route = |entry: &LinkAddress| entry.prefix_len >= IpFamily::of(entry.address).bits();
    let is_end = |address: &IpAddr| primary.values().any(|primary| primary == address);
    let of_node = facts.addresses.iter().filter(|entry| is_address_of_node(entry.address));
    let others = of_node.filter(|entry| !addresses.is_empty() && !is_end(&entry.address));
    let sorted: BTreeSet<_> = others.map(|entry| (is_host_route(entry), entry.address)).collect();
    let mut others = BTreeSet::new();
    for (_, address) in sorted {
        if others.len() < DsrAnnouncement::MAX_OTHERS {
            others.insert(address);
        }
    }
    DsrAnnouncement { addresses, others }
}

/// Returns the bytes of the longest packet that leaves this node in one piece: the MTU of the links
/// with its addresses. If routers reach the node at an address of loopback, its packets leave on
/// other links.
fn mtu(facts: &NodeFacts, primary: &BTreeMap<IpFamily, IpAddr>) -> u32 {
    let link_of = |source: &SourceAddress| facts.links.iter().find(|link| link.index == source.link);
    let is_primary = |source: &&SourceAddress| primary.values().any(|address| *address == source.address);
    let sends = |link: &&Link| !link.is_loopback && link.mtu != 0;
    let of_node = facts.source_addresses.iter().filter(is_primary).filter_map(link_of).filter(sends);
    let devices = || {
        let links = facts.source_addresses.iter().filter_map(link_of).filter(sends);
        links.filter(|link| link.device.is_some()).map(|link| link.mtu).min()
    };
    of_node.map(|link| link.mtu).min().or_else(devices).unwrap_or(ETHERNET_MTU)
}

/// Returns true for an address at which other nodes can reach one node. Packets for it must not
/// stay on the node that sends them, go to a group of nodes, or depend on a link.
pub fn is_tunnel_address(address: IpAddr) -> bool {
    let is_only_on_link = match address {
        IpAddr::V4(address) => address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !(is_only_on_link || address.is_unspecified() || address.is_loopback() || address.is_multicast())
}

/// Returns true for an address that is of one node only, as far as the address says.
pub fn is_address_of_node(address: IpAddr) -> bool {
    let is_only_on_link = matches!(address, IpAddr::V4(address) if address.is_link_local());
    is_tunnel_address(address) && !is_only_on_link
}

/// The other nodes that take packets of the tunnel, and the addresses that this node has announced
/// to them.
#[derive(Debug, Default)]
pub(super) struct OtherNodes {
    /// What each node announces.
    nodes: BTreeMap<Box<str>, DsrAnnouncement>,
    /// What the Node of this node announces. Other nodes drop packets that come from elsewhere.
    /// `None` until there is such an object: manifests may have none.
    announced: Option<Vec<SocketAddr>>,
}

impl OtherNodes {
    /// Applies a change of Nodes. `this` is the name of this node. Returns true if an address
    /// differs.
    pub(super) fn apply(&mut self, delta: &Delta<Node>, this: &str) -> bool {
        match delta {
            Delta::Apply(node) => self.set(node, this),
            Delta::Delete(NamespacedName { name, .. }) => self.nodes.remove(&**name).is_some(),
            Delta::Replace(nodes) => {
                let listed: BTreeSet<&str> = nodes.iter().map(|node| &*node.name).collect();
                let before = self.nodes.len();
                self.nodes.retain(|name, _| listed.contains(&**name));
                let is_removed = self.nodes.len() != before;
                if !listed.contains(this) {
                    self.announced = None;
                }
                nodes.iter().fold(is_removed, |differs, node| self.set(node, this) || differs)
            }
        }
    }

    fn set(&mut self, node: &Node, this: &str) -> bool {
        if &*node.name == this {
            let differs = self.announced.as_ref() != Some(&node.dsr.addresses);
            self.announced = Some(node.dsr.addresses.clone());
            return self.nodes.remove(this).is_some() || differs;
        }
        if node.dsr.addresses.is_empty() {
            return self.nodes.remove(&*node.name).is_some();
        }
        let differs = self.nodes.get(&*node.name) != Some(&node.dsr);
        self.nodes.insert((*node.name).into(), node.dsr.clone());
        differs
    }

    /// Returns the addresses of all nodes with this port. Nodes with another port of the tunnel do
    /// not understand this one.
    fn with_port(&self, port: u16) -> BTreeSet<IpAddr> {
        self.nodes.values().flat_map(|node| of_port(&node.addresses, port)).collect()
    }

    /// Returns all addresses of the nodes with this port.
    fn addresses_with_port(&self, port: u16) -> BTreeSet<IpAddr> {
        let nodes = self.nodes.values().filter(|node| of_port(&node.addresses, port).next().is_some());
        nodes.flat_map(|node| of_port(&node.addresses, port).chain(node.others.iter().copied())).collect()
    }

    /// Returns the address of a node with this port to which this node may send, of this family if
    /// it has one.
    fn address(&self, node: &str, port: u16, family: IpFamily) -> Option<IpAddr> {
        let addresses = &self.nodes.get(node)?.addresses;
        let possible = || {
            let families = of_port(addresses, port).map(|address| (IpFamily::of(address), address));
            families.filter(|(family, _)| self.is_known_to_others(*family, port))
        };
        let of_family = possible().find(|(of, _)| *of == family);
        of_family.or_else(|| possible().next()).map(|(_, address)| address)
    }

    /// Returns true if other nodes accept packets of the tunnel whose outer header has an address
    /// of this node and family.
    fn is_known_to_others(&self, family: IpFamily, port: u16) -> bool {
        let is_among =
            |announced: &Vec<_>| of_port(announced, port).any(|address| IpFamily::of(address) == family);
        self.announced.as_ref().is_none_or(is_among)
    }

    /// Sets the nodes of a service port's endpoints. `endpoints` are sorted by address.
    pub(super) fn set_endpoints(
        &self,
        port: &mut ResolvedPort,
        endpoints: &[EndpointInfo<'_>],
        family: IpFamily,
        tunnel_port: Option<NonZeroU16>,
    ) {
        let Some(tunnel_port) = tunnel_port.filter(|_| port.forwarding == Forwarding::Dsr) else { return };
        let node_of = |endpoint: &ResolvedEndpoint| {
            let at = endpoints.binary_search_by_key(&endpoint.address, |info| info.address).ok()?;
            let info = endpoints.get(at)?;
            let node =
                self.address(info.endpoint.placement.node_name.as_deref()?, tunnel_port.get(), family)?;
            Some((endpoint.address.ip(), node))
        };
        let remote = port.cluster_endpoints.iter().filter(|endpoint| !endpoint.is_local);
        port.dsr_nodes = remote.filter_map(node_of).collect();
    }
}

fn of_port(addresses: &[SocketAddr], port: u16) -> impl Iterator<Item = IpAddr> {
    addresses.iter().filter(move |address| address.port() == port).map(SocketAddr::ip)
}

/// Returns how packets of clients outside reach endpoints on other nodes. Direct server return is
/// for external addresses with policy Cluster: with policy Local no endpoint is on another node.
pub(super) fn forwarding(
    wanted: Forwarding,
    port: Option<NonZeroU16>,
    external_policy: TrafficPolicy,
    is_external: bool,
) -> Forwarding {
    let is_possible = port.is_some() && is_external && external_policy == TrafficPolicy::Cluster;
    if is_possible { wanted } else { Forwarding::Nat }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Forwarding, Model, ModelSettings, Node, Service, ServiceType, WatchEvent,
        testing::{
            THIS_NODE, endpoint, facts, ip, key, link, node, port_number, service, service_port, settings,
            slice,
        },
    };

    fn dsr_node(name: &str, addresses: &[&str]) -> Node {
        let addresses = addresses.iter().map(|address| address.parse().expect("an address")).collect();
        Node { dsr: DsrAnnouncement { addresses, ..DsrAnnouncement::default() }, ..node(name) }
    }

    fn web() -> Service {
        let mut web = service("a/web", "10.96.0.1");
        web.service_type = ServiceType::NodePort;
        web.ports = vec![service_port("", crate::model::Protocol::Tcp, 80)];
        web.ports[0].node_port = Some(port_number(30_080));
        Service { forwarding: Forwarding::Dsr, ..web }
    }

    /// Returns a model of a Service with endpoints on three nodes.
    fn model(port: Option<u16>, nodes: Vec<Node>) -> Model {
        let settings = ModelSettings { dsr_port: port.map(port_number), ..settings() };
        let mut model = Model::new(settings);
        let endpoints = vec![
            endpoint("10.244.1.1").on(THIS_NODE),
            endpoint("10.244.2.1").on("n2"),
            endpoint("10.244.3.1").on("n3"),
        ];
        model.apply(WatchEvent::Services(Delta::Replace(vec![web()])));
        model.apply(WatchEvent::EndpointSlices(Delta::Replace(vec![slice("a/s", "web", endpoints)])));
        model.apply(WatchEvent::Nodes(Delta::Replace(nodes)));
        let mut facts = facts(&[("eth0", "192.168.57.11/24")]);
        facts.links = vec![link(2, "eth0"), link(9, TUNNEL_LINK)];
        model.set_node_facts(facts);
        model.resolve();
        model
    }

    fn nodes_of(model: &Model) -> Vec<(IpAddr, IpAddr)> {
        let port = &model.snapshot().ports[&key("a/web", "")];
        port.dsr_nodes.iter().map(|(endpoint, node)| (*endpoint, *node)).collect()
    }

    #[test]
    fn endpoints_on_nodes_that_announce_the_same_port_are_behind_the_tunnel() {
        let nodes = || {
            vec![
                dsr_node(THIS_NODE, &["192.168.57.11:4790", "192.168.57.11:4791"]),
                dsr_node("n2", &["192.168.57.12:4790", "[fd57::12]:4790"]),
                dsr_node("n3", &["192.168.57.13:4791"]),
            ]
        };
        let model_with = |port| model(port, nodes());
        assert_eq!(nodes_of(&model_with(Some(4_790))), [(ip("10.244.2.1"), ip("192.168.57.12"))]);
        assert_eq!(nodes_of(&model_with(Some(4_791))), [(ip("10.244.3.1"), ip("192.168.57.13"))]);
        assert_eq!(nodes_of(&model_with(None)), []);
        let tunnel = model_with(Some(4_790)).snapshot().node.tunnel.clone().expect("a tunnel");
        assert_eq!((tunnel.link, tunnel.mtu), (9, 1_500));
        assert_eq!(tunnel.nodes, BTreeSet::from([ip("192.168.57.12"), ip("fd57::12")]));
        assert_eq!(tunnel.announcement.addresses, ["192.168.57.11:4790".parse().expect("an address")]);
    }

    #[test]
    fn services_follow_nodes_that_begin_and_end_to_take_packets() {
        let this = dsr_node(THIS_NODE, &["192.168.57.11:4790", "[fd57::11]:4790"]);
        let mut model = model(Some(4_790), vec![this, node("n2")]);
        assert_eq!(nodes_of(&model), []);
        model.apply(WatchEvent::Nodes(Delta::Apply(dsr_node("n2", &["[fd57::12]:4790"]))));
        let dirty = model.resolve();
        assert_eq!(nodes_of(&model), [(ip("10.244.2.1"), ip("fd57::12"))], "the other family serves too");
        assert!(dirty.node && dirty.ports.contains(&key("a/web", "")));
        model.apply(WatchEvent::Nodes(Delta::Delete(NamespacedName::from(node("n2").name))));
        model.resolve();
        assert_eq!(nodes_of(&model), []);
    }

    /// The other node would drop the packets.
    #[test]
    fn nothing_is_sent_before_other_nodes_know_where_this_one_sends_from() {
        let other = dsr_node("n2", &["192.168.57.12:4790", "[fd57::12]:4790"]);
        let mut model = model(Some(4_790), vec![node(THIS_NODE), other]);
        assert_eq!(nodes_of(&model), []);
        for (announced, to) in [("[fd57::11]:4790", "fd57::12"), ("192.168.57.11:4790", "192.168.57.12")] {
            model.apply(WatchEvent::Nodes(Delta::Apply(dsr_node(THIS_NODE, &[announced]))));
            let dirty = model.resolve();
            assert_eq!(nodes_of(&model), [(ip("10.244.2.1"), ip(to))]);
            assert!(dirty.ports.contains(&key("a/web", "")));
        }
        model.apply(WatchEvent::Nodes(Delta::Apply(dsr_node(THIS_NODE, &["192.168.57.11:4791"]))));
        model.resolve();
        assert_eq!(nodes_of(&model), [], "another port");
    }

    /// Packets of such clients would come back to their own node with its address as the source.
    #[test]
    fn all_addresses_of_nodes_with_the_same_port_are_known() {
        let others = |texts: &[&str]| texts.iter().map(|text| ip(text)).collect::<BTreeSet<_>>();
        let with = |node: Node, texts: &[&str]| {
            let dsr = DsrAnnouncement { others: others(texts), ..node.dsr };
            Node { dsr, ..node }
        };
        let this = dsr_node(THIS_NODE, &["192.168.57.11:4790"]);
        let other = with(dsr_node("n2", &["192.168.57.12:4790"]), &["10.0.0.12", "fd57::12"]);
        let another_port = with(dsr_node("n3", &["192.168.57.13:4791"]), &["10.0.0.13"]);
        let mut model = model(Some(4_790), vec![this, other, another_port]);
        let tunnel = |model: &Model| model.snapshot().node.tunnel.clone().expect("a tunnel");
        assert_eq!(tunnel(&model).nodes, others(&["192.168.57.12"]));
        let known = &["192.168.57.12", "10.0.0.12", "fd57::12"];
        assert_eq!(tunnel(&model).addresses_of_nodes, others(known));
        let changed = with(dsr_node("n2", &["192.168.57.12:4790"]), &["10.0.0.14"]);
        model.apply(WatchEvent::Nodes(Delta::Apply(changed)));
        assert!(model.resolve().node);
        assert_eq!(tunnel(&model).addresses_of_nodes, others(&["192.168.57.12", "10.0.0.14"]));
    }

    #[test]
    fn a_node_announces_its_other_addresses_but_those_of_loopback_and_of_links() {
        let primary = BTreeMap::from([(IpFamily::V4, ip("192.0.2.11"))]);
        let announced = |addresses: &[(&str, &str)]| announcement(&facts(addresses), &primary, 4_790);
        let some = announced(&[
            ("lo", "127.0.0.1/8"),
            ("lo", "::1/128"),
            ("lo", "192.0.2.100/32"),
            ("eth0", "192.0.2.11/24"),
            ("eth0", "192.0.2.12/24"),
            ("eth0", "fd57::11/64"),
            ("eth1", "10.0.0.11/8"),
            ("nodelocaldns", "169.254.20.10/32"),
        ]);
        assert_eq!(some.to_string(), "192.0.2.11:4790,10.0.0.11,192.0.2.12,192.0.2.100,fd57::11");
        let many: Vec<_> = (1..=40).map(|last| format!("10.0.0.{last}/32")).collect();
        let mut many: Vec<_> = many.iter().map(|address| ("eth0", address.as_str())).collect();
        many.push(("eth1", "10.0.1.1/24"));
        let many = announced(&many);
        assert_eq!(many.others.len(), DsrAnnouncement::MAX_OTHERS);
        assert!(many.others.contains(&ip("10.0.1.1")));
        assert!(many.to_string().len() < 600);
        let nobody = announcement(&facts(&[("eth0", "192.0.2.11/24")]), &BTreeMap::new(), 4_790);
        assert_eq!(nobody, DsrAnnouncement::default(), "the node takes no packets");
    }

    #[test]
    fn heartbeats_of_other_nodes_change_nothing() {
        let other = || dsr_node("n2", &["192.168.57.12:4790"]);
        let mut model = model(Some(4_790), vec![node(THIS_NODE), other()]);
        let mut apply = |node| model.apply(WatchEvent::Nodes(Delta::Apply(node))).is_relevant;
        assert!(!apply(Node { being_deleted: true, ..other() }));
        assert!(!apply(node("n4")));
        assert!(apply(dsr_node("n4", &["192.168.57.14:4790"])));
        assert!(apply(node(THIS_NODE)), "the Node of this node says more than where it is");
    }

    #[test]
    fn address_of_loopback_does_not_make_packets_longer() {
        let device = Some(crate::net::Device::Hardware);
        let lo = Link { is_loopback: true, mtu: 65_536, ..link(1, "lo") };
        let source = |link, address, prefix_len| SourceAddress { link, address: ip(address), prefix_len };
        let facts = NodeFacts {
            links: vec![lo, Link { mtu: 1_450, device, ..link(2, "eth0") }],
            source_addresses: vec![source(1, "192.0.2.1", 32), source(2, "192.168.57.11", 24)],
            ..NodeFacts::default()
        };
        let mtu_at = |address: &str| mtu(&facts, &[(IpFamily::V4, ip(address))].into());
        assert_eq!(mtu_at("192.0.2.1"), 1_450);
        assert_eq!(mtu_at("192.168.57.11"), 1_450);
        assert_eq!(mtu_at("192.0.2.7"), 1_450, "an address that the kernel does not choose as source");
    }

    #[test]
    fn addresses_that_others_cannot_reach_are_not_announced() {
        for address in ["127.0.0.1", "::1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "fe80::1"] {
            assert!(!is_tunnel_address(ip(address)), "{address}");
        }
        assert!(is_tunnel_address(ip("192.0.2.1")) && is_tunnel_address(ip("2001:db8::1")));
    }

    #[test]
    fn service_with_policy_local_or_without_external_addresses_needs_no_tunnel() {
        let wanted =
            |policy, is_external| forwarding(Forwarding::Dsr, Some(port_number(4_790)), policy, is_external);
        assert_eq!(wanted(TrafficPolicy::Cluster, true), Forwarding::Dsr);
        assert_eq!(wanted(TrafficPolicy::Local, true), Forwarding::Nat);
        assert_eq!(wanted(TrafficPolicy::Cluster, false), Forwarding::Nat);
        assert_eq!(forwarding(Forwarding::Dsr, None, TrafficPolicy::Cluster, true), Forwarding::Nat);
    }
}
