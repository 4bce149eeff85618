//! Plans as people read them.

use super::*;

fn endpoints(addresses: &[&str]) -> Vec<ResolvedEndpoint> {
    let parse = |text: &&str| {
        let (text, is_local) = text.strip_suffix('!').map_or((*text, false), |text| (text, true));
        ResolvedEndpoint { address: text.parse().expect("an endpoint"), is_local }
    };
    addresses.iter().map(parse).collect()
}

/// 10.99.0.1:80 with these endpoints; those that end in `!` run on this node.
pub(super) fn web(addresses: &[&str]) -> ResolvedPort {
    let frontend =
        Frontend { kind: FrontendKind::ClusterIp, address: Some(ip("10.99.0.1")), port: port_number(80) };
    ResolvedPort {
        frontends: vec![frontend],
        cluster_endpoints: endpoints(addresses),
        has_endpoints: !addresses.is_empty(),
        ..resolved_port()
    }
}

fn with(port: ResolvedPort) -> Snapshot {
    let node = NodeView {
        local_detector: LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16", "fd44::/16"])),
        node_port_addresses: BTreeSet::from([ip("192.168.57.11"), ip("127.0.0.1")]),
        primary_addresses: BTreeMap::from([(IpFamily::V4, ip("192.168.57.11"))]),
        service_cidrs: cidrs(&["10.96.0.0/12", "fd96::/112"]),
        ..NodeView::default()
    };
    Snapshot { ports: BTreeMap::from([(key("default/web", "http"), Arc::new(port))]), node }
}

/// A load balancer of all kinds of address.
fn everywhere(port: ResolvedPort) -> ResolvedPort {
    let at = |kind, address: Option<&str>, port| Frontend {
        kind,
        address: address.map(ip),
        port: port_number(port),
    };
    let frontends = vec![
        at(FrontendKind::ClusterIp, Some("10.99.0.1"), 80),
        at(FrontendKind::NodePort, None, 30080),
        at(FrontendKind::LoadBalancerIp, Some("198.51.100.1"), 80),
    ];
    ResolvedPort { frontends, ..port }
}

/// What changes from one Snapshot to another, as text.
fn change(before: ResolvedPort, after: ResolvedPort) -> String {
    let dirty = Dirty { ports: BTreeSet::from([key("default/web", "http")]), ..Dirty::default() };
    let mut state = programmed(&with(before));
    let change = plan(&state, &with(after), &dirty);
    let text = change.to_string();
    apply(&mut state, change);
    text
}

#[test]
fn a_first_plan_reads_as_what_nft_would_be_told() {
    let port = ResolvedPort {
        local_endpoints: endpoints(&["10.244.1.11:8080!"]),
        external_policy: TrafficPolicy::Local,
        source_ranges: cidrs(&["192.168.57.0/24", "203.0.113.7/32"]),
        ..everywhere(web(&["10.244.1.11:8080!", "10.244.2.11:8080"]))
    };
    let first = plan(&empty(), &with(port), &Dirty::everything());
    let of_ip: Vec<String> =
        first.to_string().lines().filter(|line| line.contains(" ip ")).map(Into::into).collect();
    insta::assert_snapshot!("first", of_ip.join("\n"));
}

#[test]
fn one_endpoint_for_another_is_one_element() {
    let before = web(&["10.244.1.11:8080!", "10.244.2.11:8080", "10.244.2.12:8080"]);
    let after = web(&["10.244.1.11:8080!", "10.244.2.12:8080", "10.244.2.13:8080"]);
    insta::assert_snapshot!("replaced", change(before, after));
}

#[test]
fn one_endpoint_less_is_another_size_at_times_and_the_last_one_takes_the_place_that_is_free() {
    let before = web(&["10.244.1.11:8080!", "10.244.2.11:8080", "10.244.2.12:8080"]);
    insta::assert_snapshot!("fewer", change(before, web(&["10.244.2.11:8080", "10.244.2.12:8080"])));
}

#[test]
fn one_endpoint_more_is_one_element_and_the_lists_of_another_size_are_made_once() {
    let of = |count: usize| {
        web(&["10.244.2.1:80", "10.244.2.2:80", "10.244.2.3:80", "10.244.2.4:80", "10.244.2.5:80"][..count])
    };
    let another_size = change(of(4), of(5));
    insta::assert_snapshot!("more", format!("{}\na fifth:\n{another_size}", change(of(3), of(4))));
}

#[test]
fn the_last_endpoint_leaves_and_connections_are_refused() {
    insta::assert_snapshot!("none", change(everywhere(web(&["10.244.2.11:8080"])), everywhere(web(&[]))));
}

#[test]
fn affinity_has_a_set_of_clients_for_each_endpoint() {
    let sticky = |addresses: &[&str]| ResolvedPort {
        affinity_timeout: std::num::NonZeroU32::new(10800),
        ..everywhere(web(addresses))
    };
    let before = sticky(&["10.244.1.11:8080!", "10.244.2.11:8080"]);
    let without = with(web(&["10.244.1.11:8080!", "10.244.2.11:8080"]));
    let state = programmed(&without);
    let dirty = Dirty { ports: without.ports.keys().cloned().collect(), ..Dirty::default() };
    let turned_on = plan(&state, &with(before.clone()), &dirty).to_string();
    let left = change(before, sticky(&["10.244.2.11:8080", "10.244.2.12:8080"]));
    insta::assert_snapshot!("affinity", format!("{turned_on}\nan endpoint leaves, another comes:\n{left}"));
}

#[test]
fn another_timeout_makes_the_sets_anew() {
    let sticky = |seconds| ResolvedPort {
        affinity_timeout: std::num::NonZeroU32::new(seconds),
        ..web(&["10.244.2.11:8080"])
    };
    insta::assert_snapshot!("timeout", change(sticky(10800), sticky(60)));
}

#[test]
fn other_pod_ranges_rewrite_the_rules_that_name_them() {
    let port = ResolvedPort {
        local_endpoints: endpoints(&["10.244.1.11:8080!"]),
        external_policy: TrafficPolicy::Local,
        ..everywhere(web(&["10.244.1.11:8080!", "10.244.2.11:8080"]))
    };
    let before = with(port);
    let mut state = programmed(&before);
    let mut after = before;
    after.node.local_detector = LocalTrafficDetector::InterfaceNamePrefix("veth".into());
    let change = plan(&state, &after, &Dirty { node: true, ..Dirty::default() });
    insta::assert_snapshot!("detector", change.to_string());
    apply(&mut state, change);
    assert!(plan(&state, &after, &Dirty::everything()).is_empty());
}

#[test]
fn what_kube_proxy_left_is_taken_over_and_removed() {
    let snapshot = with(web(&["10.244.2.11:8080"]));
    let mut state = restarted(&programmed(&snapshot));
    let theirs = ["service-UEU3GDQ7-default/af/tcp/", "endpoint-UPR4LYLF-default/af/tcp/__10.244.1.11/8080"];
    let table = state.table_mut(Family::Ip);
    table.chains.extend(theirs.map(|name| (Name::from(name), None)));
    let key = Destination { address: Some(ip("10.99.0.1")), protocol: 6, port: 80 }.key();
    let value = ElementValue::verdict(Verdict::Goto(theirs[0].into()), Some("default/af".into()));
    table.elements.insert((Base::ServiceIps, key), Held { value, claims: 0 });
    let takeover = plan(&state, &snapshot, &Dirty::everything());
    let text = takeover.to_string();
    assert!(text.contains("delete chain ip kube-proxy service-UEU3GDQ7-default/af/tcp/\n"), "{text}");
    apply(&mut state, takeover);
    assert_eq!(without_sizes(&state), without_sizes(&programmed(&snapshot)));
}

#[test]
fn a_table_with_other_sets_is_made_anew() {
    let snapshot = with(web(&["10.244.2.11:8080"]));
    let mut state = restarted(&programmed(&snapshot));
    state.table_mut(Family::Ip).is_foreign = true;
    let anew = plan(&state, &snapshot, &Dirty::everything());
    assert_eq!(anew.transactions[0][0], (Family::Ip, Change::DeleteTable));
    apply(&mut state, anew);
    assert_eq!(without_sizes(&state), without_sizes(&programmed(&snapshot)));
}
