//! Tests of single decisions. The conformance runner compares all of them with real connections.

mod clients;
mod destinations;
mod errors;

use super::*;
use crate::{
    model::{
        Balance, Delta, DsrAnnouncement, EndpointSlice, Forwarding, ModelSettings, Node, PodPlace, Service,
        ServicePort, ServiceType, SessionAffinity, TrafficPolicy, WatchEvent,
        testing::{THIS_NODE, cidrs, endpoint, facts, ip, link, node, port_number, service, settings, slice},
    },
    net::TUNNEL_LINK,
};

const POD: &str = "10.244.1.7";
const OUTSIDE: &str = "192.0.2.50";

/// A node with the Service `shop/web`: cluster IP 10.96.0.1 and node port 30080, policy Local, one
/// endpoint here and one elsewhere.
fn model(change: impl FnOnce(&mut Service)) -> Model {
    let settings = ModelSettings { cluster_cidrs: cidrs(&["10.244.0.0/16"]), ..settings() };
    let mut model = Model::new(settings);
    model.set_node_facts(facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.0.2.11/24")]));
    let own = Node { pod_cidrs: cidrs(&["10.244.1.0/24"]), ..node("n1") };
    model.apply(WatchEvent::Nodes(Delta::Replace(vec![own])));
    let mut web = service("shop/web", "10.96.0.1");
    web.service_type = ServiceType::NodePort;
    web.ports[0].node_port = Some(port_number(30080));
    web.external_traffic_policy = TrafficPolicy::Local;
    change(&mut web);
    model.apply(WatchEvent::Services(Delta::Replace(vec![web])));
    let endpoints = vec![endpoint("10.244.1.8").on("n1"), endpoint("10.244.2.9").on("n2")];
    let pods = ["web-abc", "web-def"].map(|pod| Some(pod.into())).into_iter().collect();
    let slice = EndpointSlice { pods, ..slice("shop/web-1", "web", endpoints) };
    model.apply(WatchEvent::EndpointSlices(Delta::Replace(vec![slice])));
    model.resolve();
    model
}

fn ask(model: &Model, mode: Mode, client: Client, to: &str) -> Explanation {
    let destination = to.parse().expect("an address");
    let question = Question { client, destination, protocol: Protocol::Tcp, outside_cgroup: false };
    explain(Situation { model, mode, backstop: None }, &question)
}

fn chosen(explanation: &Explanation) -> Vec<(String, Option<Source>)> {
    let chosen = explanation.endpoints.iter().filter(|endpoint| endpoint.chosen);
    chosen.map(|endpoint| (endpoint.address.to_string(), endpoint.source)).collect()
}

#[test]
fn a_pod_is_translated_at_its_socket_or_by_rules() {
    let model = model(|_| ());
    for (mode, hook) in [(Mode::Ebpf, Hook::Socket), (Mode::Nftables, Hook::Netfilter)] {
        let explained = ask(&model, mode, Client::Address(ip(POD)), "10.96.0.1:80");
        assert_eq!((explained.hook, explained.verdict), (hook, Verdict::Translate), "{mode}");
        let both = ["10.244.1.8:8080", "10.244.2.9:8080"].map(|at| (at.to_owned(), Some(Source::Client)));
        assert_eq!(chosen(&explained), both, "{mode}");
    }
}

#[test]
fn a_client_outside_gets_local_endpoints_under_policy_local() {
    let model = model(|_| ());
    let explained = ask(&model, Mode::Ebpf, Client::Address(ip(OUTSIDE)), "192.0.2.11:30080");
    assert_eq!((explained.location, explained.hook), (Location::Outside, Hook::Link));
    assert_eq!(chosen(&explained), [("10.244.1.8:8080".to_owned(), Some(Source::Client))]);
    let left_out = explained.endpoints.iter().find(|endpoint| !endpoint.chosen).expect("one is left out");
    assert_eq!(left_out.reason.as_deref(), Some("it is on another node"));
}

#[test]
fn a_client_outside_is_masqueraded_under_policy_cluster() {
    let model = model(|web| web.external_traffic_policy = TrafficPolicy::Cluster);
    let explained = ask(&model, Mode::Iptables, Client::Address(ip(OUTSIDE)), "192.0.2.11:30080");
    assert!(chosen(&explained).iter().all(|(_, source)| *source == Some(Source::Node)), "{explained}");
}

#[test]
fn a_pod_that_reaches_itself_through_rules_sees_the_node() {
    let model = model(|_| ());
    let explained = ask(&model, Mode::Nftables, Client::Address(ip("10.244.1.8")), "10.96.0.1:80");
    let sources: Vec<_> = chosen(&explained).into_iter().map(|(_, source)| source).collect();
    assert_eq!(sources, [Some(Source::Node), Some(Source::Client)]);
}

#[test]
fn pods_are_named() {
    let model = model(|_| ());
    let explained = ask(&model, Mode::Ebpf, Client::Address(ip("10.244.1.8")), "10.96.0.1:80");
    let pod = PodOf { namespace: "shop".to_owned(), name: "web-abc".to_owned() };
    assert_eq!(explained.client_pod, Some(pod));
    let names: Vec<_> = explained.endpoints.iter().filter_map(|endpoint| endpoint.pod.as_deref()).collect();
    assert_eq!(names, ["web-abc", "web-def"]);
    assert!(explained.to_string().contains("10.244.1.8, shop/web-abc, a pod of this node"), "{explained}");
}

#[test]
fn other_ports_and_addresses_are_told_apart() {
    let model = model(|_| ());
    for (mode, to, verdict, part) in [
        (Mode::Ebpf, "10.96.0.1:81", Verdict::Pass, "the address has only the ports 80/TCP (shop/web)"),
        (Mode::Nftables, "10.96.0.1:81", Verdict::Refuse, "refuses other ports"),
        (Mode::Ebpf, "10.96.0.9:80", Verdict::Pass, "no Service has this address and port"),
        (
            Mode::Ebpf,
            "192.0.2.12:30080",
            Verdict::Pass,
            "is a node port of shop/web, but the address is none of this node's",
        ),
        (Mode::Nftables, "127.0.0.1:30080", Verdict::Pass, "no node ports on this loopback address"),
        (Mode::Ebpf, "127.0.0.1:30080", Verdict::Translate, "one of 2 endpoints"),
    ] {
        let explained = ask(&model, mode, Client::Node, to);
        assert_eq!(explained.verdict, verdict, "{mode} {to}");
        assert!(explained.reason.contains(part), "{mode} {to}: {}", explained.reason);
    }
}

#[test]
fn choice_by_a_table_is_said_for_clients_on_links() {
    let model = model(|web| web.balance = Some(Balance::Maglev));
    let reason = |mode, client| ask(&model, mode, client, "10.96.0.1:80").reason;
    let outside = || Client::Address(ip("198.51.100.9"));
    assert_eq!(
        reason(Mode::Ebpf, outside()),
        "one of 2 endpoints, by the client's address and port: the same on every node (Maglev)"
    );
    assert_eq!(reason(Mode::Ebpf, Client::Node), "one of 2 endpoints", "its sockets choose at random");
    assert_eq!(reason(Mode::Nftables, outside()), "one of 2 endpoints", "the mode has no tables");
}

#[test]
fn endpoints_behind_the_tunnel_see_the_client() {
    let mut model = model(|web| {
        web.external_traffic_policy = TrafficPolicy::Cluster;
        web.forwarding = Forwarding::Dsr;
    });
    let mut with_tunnel = facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.0.2.11/24")]);
    with_tunnel.links = vec![link(9, TUNNEL_LINK)];
    model.set_node_facts(with_tunnel);
    let settings = ModelSettings { cluster_cidrs: cidrs(&["10.244.0.0/16"]), ..settings() };
    model.set_settings(ModelSettings { dsr_port: Some(port_number(4_790)), ..settings });
    for (name, address) in [(THIS_NODE, "192.0.2.11:4790"), ("n2", "192.0.2.12:4790")] {
        let addresses = vec![address.parse().expect("an address")];
        let dsr = DsrAnnouncement { addresses, ..DsrAnnouncement::default() };
        model.apply(WatchEvent::Nodes(Delta::Apply(Node { dsr, ..node(name) })));
    }
    model.resolve();
    let ask = |mode, client| ask(&model, mode, Client::Address(ip(client)), "192.0.2.11:30080");
    let sources =
        |mode, client| chosen(&ask(mode, client)).into_iter().map(|(_, source)| source).collect::<Vec<_>>();
    assert_eq!(sources(Mode::Ebpf, OUTSIDE), [Some(Source::Node), Some(Source::Client)]);
    assert_eq!(sources(Mode::Nftables, OUTSIDE), [Some(Source::Node), Some(Source::Node)]);
    let masquerade = ask(Mode::Ebpf, OUTSIDE).masquerade.expect("translated");
    assert!(masquerade.applies && masquerade.reason.contains("through the tunnel"), "{masquerade:?}");
    let of_node = sources(Mode::Ebpf, "192.0.2.12");
    assert_eq!(of_node, [Some(Source::Node), Some(Source::Node)], "a node would drop its own packets");
}

#[test]
fn what_no_hook_sees_is_said() {
    let model = model(|_| ());
    let destination = "10.96.0.1:80".parse().expect("an address");
    let question =
        Question { client: Client::Node, destination, protocol: Protocol::Tcp, outside_cgroup: true };
    let situation = Situation { model: &model, mode: Mode::Ebpf, backstop: None };
    let explained = explain(situation, &question);
    assert_eq!((explained.hook, explained.verdict), (Hook::Nothing, Verdict::Pass));
    let backed = explain(Situation { backstop: Some(Mode::Nftables), ..situation }, &question);
    assert_eq!((backed.hook, backed.verdict), (Hook::Backstop, Verdict::Translate));
}

#[test]
fn text_says_each_step() {
    let model = model(|_| ());
    let explained = ask(&model, Mode::Ebpf, Client::Address(ip(OUTSIDE)), "192.0.2.11:30080");
    insta::assert_snapshot!(explained);
}

/// Asks with names.
fn named(model: &Model, from: &str, to: &str, pod: Option<&PodPlace>) -> Result<Explanation, String> {
    let question = NamedQuestion {
        from: from.parse().expect(from),
        client: ClientKind::Auto,
        to: to.parse().expect(to),
        outside_cgroup: false,
    };
    let question = question.resolve(model, pod).map_err(|error| error.to_string())?;
    Ok(explain(Situation { model, mode: Mode::Ebpf, backstop: None }, &question))
}

#[test]
fn services_and_pods_are_found_by_their_names() {
    let model = model(|web| {
        web.ports[0].name = "http".into();
        web.ports.push(ServicePort { name: "dns".into(), protocol: Protocol::Udp, ..web.ports[0].clone() });
        web.ports[1].port = port_number(53);
        web.ports[1].node_port = None;
    });
    for (to, expected) in [
        ("shop/web:http", Ok("10.96.0.1:80 TCP")),
        ("web.shop:80", Ok("10.96.0.1:80 TCP")),
        ("web.shop.svc.cluster.local:dns", Ok("10.96.0.1:53 UDP")),
        ("shop/web:53", Ok("10.96.0.1:53 UDP")),
        ("shop/web", Err("shop/web stands for several ports: name one of 53/udp (dns), 80/tcp (http)")),
        ("shop/web:81", Err("shop/web:81 has no such port: it has 53/udp (dns), 80/tcp (http)")),
        ("10.96.0.1", Err("10.96.0.1 stands for several ports")),
        ("shop/db:80", Err("this node serves no Service shop/db with a cluster IP")),
        ("10.96.0.2", Err("no Service has the address 10.96.0.2: name a port")),
    ] {
        let explained = named(&model, "shop/web-abc", to, None);
        let explained =
            explained.map(|explained| format!("{} {}", explained.destination, explained.protocol));
        match expected {
            Ok(expected) => assert_eq!(explained.as_deref(), Ok(expected), "{to}"),
            Err(part) => assert!(explained.expect_err(to).contains(part), "{to}"),
        }
    }
    let explained = named(&model, "shop/web-def", "shop/web:http", None).expect("an endpoint");
    assert_eq!((explained.client, explained.location), (Some(ip("10.244.2.9")), Location::Outside));
    assert!(explained.location_reason.contains("the pod runs on n2, which decides"), "{explained}");
    let unknown = named(&model, "shop/job-1", "shop/web:http", None).expect_err("no endpoint");
    assert!(unknown.contains("no endpoint of a Service is the pod shop/job-1"), "{unknown}");
}

#[test]
fn a_pod_that_others_know_is_where_they_say() {
    let model = model(|_| ());
    let pod = |node: &str, host_network| PodPlace {
        name: NamespacedName::new("shop", "job-1"),
        addresses: vec![ip("10.244.1.77")],
        node_name: Some(node.to_owned()),
        host_network,
    };
    let at = |pod: &PodPlace| {
        let explained = named(&model, "shop/job-1", "shop/web", Some(pod)).expect("a pod");
        assert_eq!(explained.client_pod.map(|pod| pod.name).as_deref(), Some("job-1"));
        (explained.location, explained.client)
    };
    assert_eq!(at(&pod("n1", false)), (Location::Pod, Some(ip("10.244.1.77"))));
    assert_eq!(at(&pod("n1", true)), (Location::Node, None));
    assert_eq!(at(&pod("n2", true)), (Location::Outside, Some(ip("10.244.1.77"))));
    let six = PodPlace { addresses: vec![ip("fd00::1")], ..pod("n1", false) };
    let error = named(&model, "shop/job-1", "shop/web", Some(&six)).expect_err("another family");
    assert!(error.contains("the pod shop/job-1 has no IPv4 address for 10.96.0.1"), "{error}");
}

#[test]
fn the_holder_of_affinity_decides_if_the_client_may_get_it() {
    let model = model(|web| {
        web.session_affinity =
            SessionAffinity::ClientIp { timeout_seconds: 300.try_into().expect("not zero") };
    });
    let with = |state: AffinityState| {
        let mut explained = ask(&model, Mode::Ebpf, Client::Address(ip(OUTSIDE)), "192.0.2.11:30080");
        explained.set_affinity(state);
        explained
    };
    let holds = |endpoint: &str| AffinityState::Holds {
        endpoint: endpoint.parse().expect(endpoint),
        remaining_seconds: Some(42),
    };
    let local = with(holds("10.244.1.8:8080"));
    assert_eq!(local.reason, "the endpoint 10.244.1.8:8080, which holds the client's affinity");
    let text = "ClientIP, 300 s: the client holds 10.244.1.8:8080, for 42 s if it does not connect again";
    assert!(local.to_string().contains(text), "{local}");
    // Policy Local leaves it out.
    assert_eq!(with(holds("10.244.2.9:8080")).reason, "one of 1 endpoints");
    assert!(with(AffinityState::HoldsNone).to_string().contains("the client holds no endpoint yet"));
    let unknown = with(AffinityState::Unknown("no such file".to_owned()));
    assert!(unknown.to_string().contains("who holds it is not known: no such file"), "{unknown}");
}

#[test]
fn another_decision_of_the_kernel_is_a_difference() {
    let model = model(|_| ());
    let mut explained = ask(&model, Mode::Ebpf, Client::Address(ip(OUTSIDE)), "192.0.2.11:30080");
    for (verdict, destination, difference) in [
        (Verdict::Translate, "10.244.1.8:8080", None),
        (Verdict::Translate, "10.244.2.9:8080", Some("the link program translates it to 10.244.2.9:8080")),
        (Verdict::Pass, "192.0.2.11:30080", Some("the link program passes it unchanged")),
        (Verdict::Refuse, "192.0.2.11:30080", Some("the link program refuses it")),
        (Verdict::Drop, "192.0.2.11:30080", Some("the link program drops it")),
    ] {
        let destination = destination.parse().expect(destination);
        let mut check = Check::default();
        explained.compare(Decision { verdict, destination }, &mut check);
        assert_eq!(check.differences.first().map(String::as_str), difference);
        assert_eq!(check.compared.len(), usize::from(difference.is_none()));
        explained.check = Some(check);
    }
    assert!(explained.to_string().contains("Check          ! the link program drops it"), "{explained}");
}
