//! What an explanation says about destinations that no service port serves.

use super::*;
use crate::model::{LoadBalancerIngress, LoadBalancerIpMode};

/// Asks about a node with a backstop.
fn with_backstop(model: &Model, client: Client, to: &str, protocol: Protocol) -> Explanation {
    let destination = to.parse().expect("an address");
    let question = Question { client, destination, protocol, outside_cgroup: false };
    explain(Situation { model, mode: Mode::Ebpf, backstop: Some(Mode::Nftables) }, &question)
}

#[test]
fn a_backstop_refuses_other_ports_of_cluster_ips() {
    let model = model(|_| ());
    for (client, to, protocol) in [
        (Client::Node, "10.96.0.1:81", Protocol::Tcp),
        (Client::Node, "10.96.0.1:80", Protocol::Udp),
        (Client::Node, "10.96.0.1:30080", Protocol::Tcp),
        (Client::Address(ip(OUTSIDE)), "10.96.0.1:81", Protocol::Tcp),
    ] {
        let explained = with_backstop(&model, client, to, protocol);
        assert_eq!((explained.hook, explained.verdict), (Hook::Backstop, Verdict::Refuse), "{explained}");
        let reason = "; the nftables backstop refuses other ports of cluster IPs";
        assert!(explained.reason.ends_with(reason), "{explained}");
    }
    let served = with_backstop(&model, Client::Node, "10.96.0.1:80", Protocol::Tcp);
    assert_eq!((served.hook, served.verdict), (Hook::Socket, Verdict::Translate));
    let other = with_backstop(&model, Client::Node, "192.0.2.99:81", Protocol::Tcp);
    assert_eq!((other.hook, other.verdict), (Hook::Socket, Verdict::Pass), "no cluster IP");
}

#[test]
fn only_cluster_ips_refuse_other_ports() {
    let model = model(clients::with_ranges);
    let explained = ask(&model, Mode::Nftables, Client::Node, "203.0.113.85:81");
    assert_eq!(explained.verdict, Verdict::Pass, "{explained}");
}

#[test]
fn the_unspecified_address_is_the_node_itself() {
    let model = model(|_| ());
    let ask = |mode, client, to| {
        let explained = ask(&model, mode, client, to);
        (explained.verdict, explained.reason)
    };
    let (verdict, _) = ask(Mode::Ebpf, Client::Node, "0.0.0.0:30080");
    assert_eq!(verdict, Verdict::Translate);
    let (verdict, reason) = ask(Mode::Ebpf, Client::Address(ip(POD)), "0.0.0.0:30080");
    assert_eq!((verdict, &*reason), (Verdict::Pass, "an address that stands for the client itself"));
    let (verdict, reason) = ask(Mode::Nftables, Client::Node, "0.0.0.0:30080");
    assert!(verdict == Verdict::Pass && reason.contains("on this loopback address"), "{reason}");
}

#[test]
fn addresses_of_others_are_named() {
    let model = model(|web| {
        clients::with_ranges(web);
        web.external_traffic_policy = TrafficPolicy::Local;
        web.health_check_node_port = Some(port_number(31_000));
        let ingress = LoadBalancerIngress { ip: ip("203.0.113.9"), ip_mode: LoadBalancerIpMode::Proxy };
        web.load_balancer_ingress.push(ingress);
    });
    for (to, part) in [
        ("203.0.113.9:80", "the load-balancer IP of shop/web with ipMode Proxy"),
        ("203.0.113.9:30080", "the load-balancer IP of shop/web with ipMode Proxy"),
        ("192.0.2.11:31000", "it is the health check node port of shop/web: shunt itself answers there"),
        ("192.0.2.12:31000", "no Service has this address and port"),
        ("10.244.2.9:8080", "it is an endpoint of shop/web itself"),
        ("10.244.2.9:9", "the address is that of the endpoint 10.244.2.9:8080 of shop/web, not of a Service"),
        ("192.0.2.12:30080", "none of this node's; if it is one of another node, that node serves the port"),
        ("203.0.113.85:30080", "the address is one of Services, and has only the ports 80/TCP (shop/web)"),
    ] {
        let explained = ask(&model, Mode::Ebpf, Client::Address(ip(OUTSIDE)), to);
        assert_eq!(explained.verdict, Verdict::Pass, "{to}");
        assert!(explained.reason.contains(part), "{to}: {}", explained.reason);
    }
    let loopback = ask(&model, Mode::Nftables, Client::Node, "127.0.0.1:30080");
    assert!(loopback.reason.contains("the nftables mode serves no node ports"), "{loopback}");
}
