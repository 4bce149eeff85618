//! What nodes know of the tunnel and of each other.

use super::*;
use crate::model::{
    Forwarding, Model, ModelSettings, Node, Service, ServiceType, WatchEvent,
    testing::{
        THIS_NODE, endpoint, facts, ip, key, link, node, port_number, service, service_port, settings, slice,
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
    let mut facts = facts(&[("eth0", "192.168.57.11/24"), ("eth0", "fd57::11/64")]);
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
    assert_eq!(tunnel.announcement.to_string(), "192.168.57.11:4790,[fd57::11]:4790");
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

/// Others would drop packets from an address that they do not know.
#[test]
fn nothing_is_sent_while_a_former_address_of_this_node_is_announced() {
    let this = |address| dsr_node(THIS_NODE, &[address]);
    let mut model =
        model(Some(4_790), vec![this("192.168.57.11:4790"), dsr_node("n2", &["192.168.57.12:4790"])]);
    let settings = ModelSettings { dsr_port: Some(port_number(4_790)), dsr_returns: true, ..settings() };
    model.set_settings(settings);
    model.resolve();
    let returns = |model: &Model| model.snapshot().node.tunnel.clone().expect("a tunnel").returns;
    let through = [(ip("10.244.2.1"), ip("192.168.57.12"))];
    assert_eq!((nodes_of(&model), returns(&model)), (through.into(), true));

    let mut moved = facts(&[("eth0", "192.168.57.14/24")]);
    moved.links = vec![link(2, "eth0"), link(9, TUNNEL_LINK)];
    model.set_node_facts(moved);
    let dirty = model.resolve();
    assert_eq!((nodes_of(&model), returns(&model)), (Vec::new(), false));
    assert!(dirty.node && dirty.ports.contains(&key("a/web", "")));
    let announcement = model.snapshot().node.tunnel.clone().expect("a tunnel").announcement;
    assert_eq!(announcement.to_string(), "192.168.57.14:4790");

    model.apply(WatchEvent::Nodes(Delta::Apply(this("192.168.57.14:4790"))));
    model.resolve();
    assert_eq!((nodes_of(&model), returns(&model)), (through.into(), true));
}

#[test]
fn address_from_which_the_kernel_would_not_send_has_no_tunnel() {
    let addresses = ["192.168.57.11/24", "192.168.57.12/24", "fd57::111/64", "fd57::11/64", "10.0.0.1/8"];
    let source = |text: &str| {
        let net: IpNet = text.parse().expect("an address with a subnet");
        SourceAddress { link: 2, address: net.addr(), prefix_len: net.prefix_len() }
    };
    let source_addresses = addresses.into_iter().map(source).collect();
    let mut facts = NodeFacts { source_addresses, ..NodeFacts::default() };
    for (v4, v6, v4_is_first, v6_is_first) in [
        ("192.168.57.11", "fd57::11", true, false),
        ("192.168.57.12", "fd57::111", false, true),
        ("10.0.0.1", "fd58::1", true, true),
    ] {
        let primary = BTreeMap::from([(IpFamily::V4, ip(v4)), (IpFamily::V6, ip(v6))]);
        facts.kernel_chooses_tunnel_source = false;
        assert_eq!(ends(&facts, &primary), primary);
        facts.kernel_chooses_tunnel_source = true;
        let ends = ends(&facts, &primary);
        let found = IpFamily::ALL.map(|family| ends.contains_key(&family));
        assert_eq!(found, [v4_is_first, v6_is_first], "{v4}, {v6}");
    }
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
