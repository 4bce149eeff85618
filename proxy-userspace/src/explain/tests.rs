//! Tests of single decisions. The conformance runner compares all of them with real connections.

use super::*;
use crate::model::{
    Delta, EndpointSlice, ModelSettings, Node, Service, ServiceType, TrafficPolicy, WatchEvent,
    testing::{cidrs, endpoint, facts, ip, node, port_number, service, settings, slice},
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
            "is a node port of shop/web, but the address is none",
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
