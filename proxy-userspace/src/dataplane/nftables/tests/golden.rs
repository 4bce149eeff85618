//! Golden plans.

use super::*;

fn endpoints(addresses: &[&str]) -> Vec<ResolvedEndpoint> {
    let parse = |text: &&str| {
        let (text, is_local) = text.strip_suffix('!').map_or((*text, false), |text| (text, true));
        ResolvedEndpoint { address: text.parse().expect("an endpoint"), is_local }
    };
    addresses.iter().map(parse).collect()
}

/// Returns 10.99.0.1:80 with these endpoints. An endpoint that ends in `!` is on this node.
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

/// Returns a load balancer with a frontend of each kind.
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

/// Returns the plan from one service port to another, as text.
fn change(before: ResolvedPort, after: ResolvedPort) -> String {
    let dirty = Dirty { ports: BTreeSet::from([key("default/web", "http")]), ..Dirty::default() };
    let mut state = programmed(&with(before));
    let change = plan(&state, &with(after), &dirty);
    let text = change.to_string();
    apply(&mut state, change);
    text
}

#[test]
fn first_plan_is_displayed_as_nft_commands() {
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
fn replaced_endpoint_changes_one_element() {
    let before = web(&["10.244.1.11:8080!", "10.244.2.11:8080", "10.244.2.12:8080"]);
    let after = web(&["10.244.1.11:8080!", "10.244.2.12:8080", "10.244.2.13:8080"]);
    insta::assert_snapshot!("replaced", change(before, after));
}

#[test]
fn last_endpoint_takes_the_number_of_a_removed_one() {
    let before = web(&["10.244.1.11:8080!", "10.244.2.11:8080", "10.244.2.12:8080"]);
    insta::assert_snapshot!("fewer", change(before, web(&["10.244.2.11:8080", "10.244.2.12:8080"])));
}

#[test]
fn additional_endpoint_is_one_element_or_one_larger_list() {
    let of = |count: usize| {
        web(&["10.244.2.1:80", "10.244.2.2:80", "10.244.2.3:80", "10.244.2.4:80", "10.244.2.5:80"][..count])
    };
    let another_size = change(of(4), of(5));
    insta::assert_snapshot!("more", format!("{}\na fifth:\n{another_size}", change(of(3), of(4))));
}

#[test]
fn connections_are_refused_after_the_last_endpoint() {
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
fn new_affinity_timeout_replaces_the_sets() {
    let sticky = |seconds| ResolvedPort {
        affinity_timeout: std::num::NonZeroU32::new(seconds),
        ..web(&["10.244.2.11:8080"])
    };
    insta::assert_snapshot!("timeout", change(sticky(10800), sticky(60)));
}

/// The chain of the old policy looks up the clients in the sets that are deleted.
#[test]
fn affinity_timeout_and_policy_change_together() {
    let sticky = |seconds, policy| {
        let affinity_timeout = std::num::NonZeroU32::new(seconds);
        let local_endpoints = endpoints(&["10.244.1.11:8080!"]);
        let has_local = policy == TrafficPolicy::Local;
        ResolvedPort {
            affinity_timeout,
            internal_policy: policy,
            cluster_endpoints: if has_local { Vec::new() } else { local_endpoints.clone() },
            local_endpoints: if has_local { local_endpoints } else { Vec::new() },
            ..web(&["10.244.1.11:8080!"])
        }
    };
    let (before, after) = (sticky(10800, TrafficPolicy::Cluster), sticky(60, TrafficPolicy::Local));
    insta::assert_snapshot!("timeout_and_policy", change(before.clone(), after.clone()));
    let mut kernel = programmed(&with(before));
    let mut state = restarted(&kernel);
    let catching_up = plan(&state, &with(after.clone()), &Dirty::everything());
    apply_to(&mut kernel, &mut state, catching_up);
    assert_eq!(without_lists(&state), without_lists(&programmed(&with(after))));
}

/// The first service port has no endpoint for its other external address any more, and its chains
/// say so at once.
#[test]
fn destination_moves_to_another_service_port_together_with_the_chains_of_both() {
    let sticky = |address: &str| {
        let at = |kind, address: &str| Frontend { kind, address: Some(ip(address)), port: port_number(80) };
        let cluster_ip = if address == "198.51.100.1" { "10.99.0.1" } else { "10.99.0.2" };
        let frontends = vec![at(FrontendKind::ClusterIp, cluster_ip), at(FrontendKind::ExternalIp, address)];
        let affinity_timeout = std::num::NonZeroU32::new(10800);
        ResolvedPort { frontends, affinity_timeout, ..web(&["10.244.2.11:8080"]) }
    };
    let both = |web: ResolvedPort, other: ResolvedPort| {
        let mut snapshot = with(web);
        snapshot.ports.insert(key("default/other", "http"), Arc::new(other));
        snapshot
    };
    let state = programmed(&both(sticky("198.51.100.1"), sticky("198.51.100.2")));
    let local = ResolvedPort { external_policy: TrafficPolicy::Local, ..sticky("198.51.100.3") };
    let mut other = sticky("198.51.100.2");
    other.frontends.extend(sticky("198.51.100.1").frontends.into_iter().skip(1));
    let after = both(ResolvedPort { has_endpoints: true, ..local }, other);
    let dirty = Dirty { ports: after.ports.keys().cloned().collect(), ..Dirty::default() };
    let changes = plan::plan(&state, &after, &dirty, 1);
    let moves = |change: &(IpFamily, Change)| change.1.display(change.0, "t").contains("198.51.100.1");
    let flushes = |change: &(IpFamily, Change)| matches!(change.1, Change::FlushChain(_));
    let with_move: Vec<_> = changes.transactions.iter().filter(|group| group.iter().any(moves)).collect();
    assert_eq!(with_move.len(), 1, "{changes}");
    assert!(with_move[0].iter().any(flushes), "the chains of the first change with it: {changes}");
}

#[test]
fn new_local_detector_rewrites_its_rules() {
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
fn objects_of_kube_proxy_are_removed() {
    let snapshot = with(web(&["10.244.2.11:8080"]));
    let mut kernel = programmed(&snapshot);
    let theirs = ["service-UEU3GDQ7-default/af/tcp/", "endpoint-UPR4LYLF-default/af/tcp/__10.244.1.11/8080"];
    let table = kernel.table_mut(IpFamily::V4);
    table.chains.extend(theirs.map(|name| (Name::from(name), Some(Vec::new()))));
    let key = Destination { address: Some(ip("10.99.0.1")), protocol: Protocol::Tcp, port: 80 }.key();
    let value = ElementValue::verdict(Verdict::Goto(theirs[0].into()), Some("default/af".into()));
    table.elements.insert((SharedSet::ServiceIps, key), Element { value, references: 0 });
    let mut state = restarted(&kernel);
    let takeover = plan(&state, &snapshot, &Dirty::everything());
    let text = takeover.to_string();
    assert!(text.contains("delete chain ip kube-proxy service-UEU3GDQ7-default/af/tcp/\n"), "{text}");
    apply_to(&mut kernel, &mut state, takeover);
    assert_eq!(without_lists(&state), without_lists(&programmed(&snapshot)));
}

#[test]
fn table_with_different_sets_is_rebuilt() {
    let snapshot = with(web(&["10.244.2.11:8080"]));
    let mut kernel = programmed(&snapshot);
    let mut state = restarted(&kernel);
    state.table_mut(IpFamily::V4).is_foreign = true;
    let rebuild = plan(&state, &snapshot, &Dirty::everything());
    assert_eq!(rebuild.transactions[0][0], (IpFamily::V4, Change::DeleteTable));
    apply_to(&mut kernel, &mut state, rebuild);
    assert_eq!(without_lists(&state), without_lists(&programmed(&snapshot)));
}

/// A rebuild was refused, and then another Service changes.
#[test]
fn plan_that_deletes_a_table_writes_all_of_it_whatever_changed() {
    let snapshot = with(web(&["10.244.2.11:8080"]));
    let mut state = restarted(&programmed(&snapshot));
    state.table_mut(IpFamily::V4).is_foreign = true;
    let [whole, partial] =
        [Dirty::everything(), Dirty::default()].map(|dirty| plan(&state, &snapshot, &dirty).to_string());
    assert!(whole.contains("delete table ip kube-proxy"), "{whole}");
    assert_eq!(partial, whole);
}

#[test]
fn chain_with_another_hook_makes_its_table_foreign() {
    let is_foreign = |name: &str, hook| {
        let chains = vec![Chain { name: name.into(), hook }];
        let listing = TableListing { exists: true, chains, ..TableListing::default() };
        Table::from_listing(IpFamily::V4, listing).is_foreign
    };
    let hook = Hook { kind: "filter", number: libc::NF_INET_LOCAL_OUT, priority: 0 };
    assert!(!is_foreign("filter-output", Some(hook)));
    assert!(is_foreign("filter-output", Some(Hook { priority: -110, ..hook })), "as in kube-proxy 1.33");
    assert!(is_foreign("filter-output", Some(Hook { number: libc::NF_INET_FORWARD, ..hook })));
    assert!(is_foreign("filter-output", Some(Hook { kind: "route", ..hook })));
    assert!(is_foreign("filter-output", None));
    assert!(!is_foreign("services", None));
    assert!(is_foreign("services", Some(hook)));
    assert!(!is_foreign("filter-output-post-dnat", Some(hook)), "it can be deleted");
}
