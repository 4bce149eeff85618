//! What an explanation says about its client: place, hook, source ranges and masquerading.

use super::*;
use crate::model::{LoadBalancerIngress, LoadBalancerIpMode};

pub(super) const BALANCER: &str = "203.0.113.85";

/// `shop/web` with a load-balancer IP and source ranges: a client outside, and one pod.
pub(super) fn with_ranges(web: &mut Service) {
    web.service_type = ServiceType::LoadBalancer;
    web.external_traffic_policy = TrafficPolicy::Cluster;
    web.load_balancer_ingress =
        vec![LoadBalancerIngress { ip: ip(BALANCER), ip_mode: LoadBalancerIpMode::Vip }];
    web.load_balancer_source_ranges = cidrs(&["198.51.100.0/24", "10.244.1.7/32"]);
}

#[test]
fn pods_reach_a_service_with_source_ranges_through_the_link_program() {
    let model = model(with_ranges);
    let explained = ask(&model, Mode::Ebpf, Client::Address(ip(POD)), "203.0.113.85:80");
    assert_eq!((explained.hook, explained.verdict), (Hook::Link, Verdict::Translate), "{explained}");
    let reason = "the Service has source ranges, so the socket is left alone";
    assert!(explained.hook_reason.starts_with(reason), "{explained}");
    assert!(explained.masquerade.as_ref().is_some_and(|masquerade| masquerade.applies), "{explained}");
    assert!(chosen(&explained).iter().all(|(_, source)| *source == Some(Source::Node)), "{explained}");
    let of_cluster_ip = ask(&model, Mode::Ebpf, Client::Address(ip(POD)), "10.96.0.1:80");
    assert_eq!(of_cluster_ip.hook, Hook::Socket, "source ranges do not apply");
}

#[test]
fn pods_that_nothing_tells_from_others_get_policy_local_on_their_link() {
    let mut model = model(|_| ());
    model.set_settings(ModelSettings { cluster_cidrs: Vec::new(), ..settings() });
    model.resolve();
    let explained = ask(&model, Mode::Ebpf, Client::Address(ip(POD)), "192.0.2.11:30080");
    assert_eq!(explained.hook, Hook::Link, "{explained}");
    assert_eq!(chosen(&explained), [("10.244.1.8:8080".to_owned(), Some(Source::Client))]);
}

#[test]
fn a_denied_client_gets_no_endpoint() {
    let model = model(with_ranges);
    for mode in [Mode::Ebpf, Mode::Nftables] {
        let explained = ask(&model, mode, Client::Address(ip(OUTSIDE)), "203.0.113.85:80");
        assert_eq!(explained.verdict, Verdict::Drop, "{explained}");
        let is_denied = |endpoint: &EndpointChoice| {
            let reason = endpoint.reason.as_deref();
            !endpoint.chosen && reason == Some("the source ranges do not hold the client")
        };
        assert!(explained.endpoints.len() == 2 && explained.endpoints.iter().all(is_denied), "{explained}");
    }
}

#[test]
fn a_socket_learns_of_a_drop_at_once() {
    let model = model(|web| {
        with_ranges(web);
        web.internal_traffic_policy = TrafficPolicy::Local;
    });
    for (mode, client, text) in [
        (Mode::Ebpf, Client::Node, "dropped (the socket gets EHOSTUNREACH at once): "),
        (Mode::Ebpf, Client::Address(ip("10.244.1.99")), "dropped (no answer comes): "),
        (Mode::Nftables, Client::Node, "dropped (no answer comes): "),
    ] {
        let explained = ask(&model, mode, client.clone(), "203.0.113.85:80").to_string();
        assert!(explained.contains(text), "{mode} {client:?}: {explained}");
    }
}

#[test]
fn client_and_destination_have_one_family() {
    let model = model(|_| ());
    for (client, to) in [("fd57::50", "10.96.0.1:80"), ("::1", "shop/web"), ("192.0.2.50", "[fd00::1]:80")] {
        let error = named(&model, client, to, None).expect_err(client);
        assert!(error.ends_with(": no packet has both"), "{error}");
    }
    assert!(named(&model, "::ffff:192.0.2.50", "10.96.0.1:80", None).is_ok());
    let error = named(&model, "fd57::50", "10.96.0.1:80", None).expect_err("two families");
    assert_eq!(error, "fd57::50 is IPv6, 10.96.0.1 is IPv4: no packet has both");
}

#[test]
fn a_pod_of_another_node_is_the_same_by_name_and_address() {
    let model = model(|_| ());
    let [by_name, by_address] =
        ["shop/web-def", "10.244.2.9"].map(|from| named(&model, from, "10.96.0.1:80", None).expect(from));
    assert_eq!(by_name, by_address);
    assert!(by_address.location_reason.starts_with("the pod runs on n2, which decides"), "{by_address}");
    let masquerade = by_address.masquerade.as_ref().expect("translated");
    assert_eq!(masquerade.reason, "the client is in the cluster CIDR (local detection)");
    let external = named(&model, "10.244.2.9", "192.0.2.11:30080", None).expect("an address");
    let policy = external.policy.as_ref().expect("translated");
    assert!(policy.effect.starts_with("does not apply to clients in the cluster CIDR"), "{external}");
}
