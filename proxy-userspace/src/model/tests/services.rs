//! Rules for Services: frontends, families, policies, source ranges, conflicts and health checks.

use super::*;

fn load_balancer(name: &str, cluster_ip: &str, ingress: &[&str]) -> Service {
    let vip = |address: &&str| LoadBalancerIngress { ip: ip(address), ip_mode: LoadBalancerIpMode::Vip };
    Service {
        service_type: ServiceType::LoadBalancer,
        load_balancer_ingress: ingress.iter().map(vip).collect(),
        ..service(name, cluster_ip)
    }
}

fn with_external_ip(name: &str, cluster_ip: &str, external_ip: &str) -> Service {
    Service { external_ips: ips(&[external_ip]), ..service(name, cluster_ip) }
}

#[test]
fn external_ips_are_not_served_if_their_feature_gate_is_off() {
    let settings = ModelSettings { ignores_external_ips: true, ..settings() };
    let mut node_port = with_external_ip("a/y", "10.96.0.2", "192.0.2.2");
    node_port.ports[0].node_port = Some(port_number(30_080));
    node_port.external_traffic_policy = TrafficPolicy::Local;
    let mut world = World::default();
    let services = vec![with_external_ip("a/x", "10.96.0.1", "192.0.2.1"), node_port];
    world.apply(WatchEvent::Services(Delta::Replace(services)));
    let mut model = world.model(&settings, &facts(&[("eth0", "192.168.57.11/24")]));
    let served: Vec<_> = model.snapshot().ports.values().map(|port| frontends_of(port)).collect();
    assert_eq!(served, [vec!["ClusterIp 10.96.0.1:80"], vec!["ClusterIp 10.96.0.2:80", "NodePort *:30080"]]);
    let dirty = apply_service(&mut model, with_external_ip("a/x", "10.96.0.1", "192.0.2.9"));
    assert!(dirty.is_empty(), "a change of external IPs changes nothing: {dirty:?}");
}

#[test]
fn each_family_has_the_frontends_of_its_addresses() {
    let mut web = load_balancer("a/x", "10.96.0.1", &["198.51.100.1", "2001:db8::1"]);
    web.cluster_ips.push(ip("fd96::1"));
    web.external_ips = ips(&["192.0.2.1", "192.0.2.1", "2001:db8::2"]);
    web.ports[0].node_port = Some(port_number(30_080));
    let model = model(vec![web], vec![], vec![]);
    let ports: Vec<_> =
        model.snapshot().ports.iter().map(|(key, port)| (key.to_string(), frontends_of(port))).collect();
    let v4 = [
        "ClusterIp 10.96.0.1:80",
        "NodePort *:30080",
        "ExternalIp 192.0.2.1:80",
        "LoadBalancerIp 198.51.100.1:80",
    ];
    let v6 = [
        "ClusterIp [fd96::1]:80",
        "NodePort *:30080",
        "ExternalIp [2001:db8::2]:80",
        "LoadBalancerIp [2001:db8::1]:80",
    ];
    let expected = [("a/x TCP IPv4", v4), ("a/x TCP IPv6", v6)];
    assert_eq!(ports, expected.map(|(key, list)| (key.to_owned(), list.map(str::to_owned).to_vec())));
}

#[test]
fn a_family_without_a_cluster_ip_is_not_served() {
    let web = load_balancer("a/x", "10.96.0.1", &["2001:db8::1"]);
    let model = model(vec![web], vec![], vec![]);
    assert_eq!(model.snapshot().ports.keys().map(ToString::to_string).collect::<Vec<_>>(), ["a/x TCP IPv4"]);
}

#[test]
fn addresses_of_proxying_load_balancers_are_not_frontends() {
    let mut web = load_balancer("a/x", "10.96.0.1", &["198.51.100.1", "198.51.100.2"]);
    web.load_balancer_ingress[0].ip_mode = LoadBalancerIpMode::Proxy;
    assert_eq!(
        frontends_of(&resolved(web, vec![])),
        ["ClusterIp 10.96.0.1:80", "LoadBalancerIp 198.51.100.2:80"]
    );
}

#[test]
fn ipv4_mapped_addresses_are_ipv4() {
    let web = service("a/x", "::ffff:10.96.0.1");
    assert_eq!(frontends_of(&resolved(web, vec![])), ["ClusterIp 10.96.0.1:80"]);
}

#[test]
fn two_ports_of_one_name_and_protocol_use_the_later() {
    let mut web = service("a/x", "10.96.0.1");
    web.ports.push(service_port("", Protocol::Tcp, 81));
    web.ports.push(service_port("", Protocol::Udp, 82));
    let model = model(vec![web], vec![], vec![]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("a/x", "")]), ["ClusterIp 10.96.0.1:81"]);
    assert_eq!(model.snapshot().ports.len(), 2);
}

#[test]
fn source_ranges_are_split_by_family() {
    let ranges_of = |ranges: &[&str]| {
        let web = load_balancer("a/x", "10.96.0.1", &["198.51.100.1"]);
        resolved(Service { load_balancer_source_ranges: cidrs(ranges), ..web }, vec![]).source_ranges
    };
    assert!(ranges_of(&[]).is_empty());
    let both = ranges_of(&["203.0.113.0/25", "2001:db8::/32", "10.1.2.3/8", "10.0.0.0/8"]);
    assert_eq!(both, cidrs(&["203.0.113.0/25", "10.0.0.0/8"]));
    assert!(ranges_of(&["2001:db8::/32"]).is_empty(), "the other family's ranges do not restrict this one");
    assert_eq!(
        ranges_of(&["203.0.113.0/25", "0.0.0.0/0"]),
        Vec::new(),
        "a range of length 0 restricts no client"
    );
    assert_eq!(ranges_of(&["::/0"]), Vec::new(), "a range of length 0 of the other family");
}

#[test]
fn affinity_and_policies_are_resolved() {
    let timeout_seconds = std::num::NonZeroU32::MIN;
    let web = Service {
        session_affinity: SessionAffinity::ClientIp { timeout_seconds },
        internal_traffic_policy: TrafficPolicy::Local,
        external_traffic_policy: TrafficPolicy::Local,
        ..with_external_ip("a/x", "10.96.0.1", "192.0.2.1")
    };
    let port = resolved(web, vec![]);
    assert_eq!(port.affinity_timeout, Some(timeout_seconds));
    assert_eq!((port.internal_policy, port.external_policy), (TrafficPolicy::Local, TrafficPolicy::Local));
}

#[test]
fn external_traffic_policy_needs_a_frontend_for_clients_outside() {
    let local = TrafficPolicy::Local;
    let inside = Service { external_traffic_policy: local, ..service("a/x", "10.96.0.1") };
    let without_address =
        Service { external_traffic_policy: local, ..load_balancer("a/x", "10.96.0.1", &["2001:db8::1"]) };
    for web in [inside, without_address] {
        let port = resolved(web, vec![slice("a/s", "x", vec![endpoint("10.244.1.1").on(THIS_NODE)])]);
        assert_eq!(port.external_policy, TrafficPolicy::Cluster);
        assert_eq!(port.local_endpoints, []);
    }
}

#[test]
fn source_ranges_apply_even_if_the_ip_is_also_external() {
    let mut web = load_balancer("a/x", "10.96.0.1", &["198.51.100.1"]);
    web.external_ips = ips(&["198.51.100.1", "10.96.0.1"]);
    assert_eq!(
        frontends_of(&resolved(web, vec![])),
        ["ClusterIp 10.96.0.1:80", "LoadBalancerIp 198.51.100.1:80"]
    );
}

#[test]
fn the_service_with_the_smaller_name_gets_a_claimed_address() {
    let (x, y) = (
        with_external_ip("a/x", "10.96.0.1", "192.0.2.1"),
        with_external_ip("a/y", "10.96.0.2", "192.0.2.1"),
    );
    let mut model = model(vec![y], vec![], vec![]);
    assert_eq!(
        frontends_of(&model.snapshot().ports[&key("a/y", "")]),
        ["ClusterIp 10.96.0.2:80", "ExternalIp 192.0.2.1:80"]
    );

    let dirty = apply_service(&mut model, x);
    assert_eq!(dirty_ports(&dirty), ["a/x TCP IPv4", "a/y TCP IPv4"]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("a/y", "")]), ["ClusterIp 10.96.0.2:80"]);
    let conflict = model.conflicts().next().expect("one conflict");
    assert_eq!((conflict.owner, conflict.loser), (key("a/x", ""), key("a/y", "")));

    model.apply(WatchEvent::Services(Delta::Delete(namespaced("a/x"))));
    assert_eq!(dirty_ports(&model.resolve()), ["a/x TCP IPv4", "a/y TCP IPv4"]);
    assert_eq!(
        frontends_of(&model.snapshot().ports[&key("a/y", "")]),
        ["ClusterIp 10.96.0.2:80", "ExternalIp 192.0.2.1:80"]
    );
    assert_eq!(model.conflicts().count(), 0);
}

#[test]
fn of_many_services_the_one_with_the_smaller_name_gets_a_claimed_address() {
    let services = many_names().map(|(name, cluster_ip)| with_external_ip(&name, &cluster_ip, "192.0.2.1"));
    let model = model(services.collect(), vec![], vec![]);
    let owner = key("a/s0000", "");
    assert_eq!(model.conflicts().count(), 1_199);
    assert!(model.conflicts().all(|conflict| conflict.owner == owner));
    for (key, port) in &model.snapshot().ports {
        assert_eq!(port.frontends.len(), if *key == owner { 2 } else { 1 }, "{key:?}");
    }
}

#[test]
fn an_external_ip_cannot_take_over_a_cluster_ip() {
    let thief = with_external_ip("a/thief", "10.96.0.9", "10.96.0.1");
    let other = load_balancer("b/lb", "10.96.0.8", &["10.96.0.1"]);
    let model = model(vec![thief, other, service("z/victim", "10.96.0.1")], vec![], vec![]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("z/victim", "")]), ["ClusterIp 10.96.0.1:80"]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("a/thief", "")]), ["ClusterIp 10.96.0.9:80"]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("b/lb", "")]), ["ClusterIp 10.96.0.8:80"]);
}

#[test]
fn a_load_balancer_ip_precedes_an_external_ip() {
    let model = model(
        vec![
            with_external_ip("a/x", "10.96.0.1", "198.51.100.1"),
            load_balancer("b/y", "10.96.0.2", &["198.51.100.1"]),
        ],
        vec![],
        vec![],
    );
    assert_eq!(frontends_of(&model.snapshot().ports[&key("a/x", "")]), ["ClusterIp 10.96.0.1:80"]);
    assert_eq!(model.snapshot().ports[&key("b/y", "")].frontends.len(), 2);
}

#[test]
fn two_protocols_may_use_the_same_port_number() {
    let mut dns = with_external_ip("a/x", "10.96.0.1", "192.0.2.1");
    dns.service_type = ServiceType::NodePort;
    dns.ports[0].node_port = Some(port_number(30_053));
    dns.ports.push(ServicePort { name: "udp".into(), protocol: Protocol::Udp, ..dns.ports[0].clone() });
    let model = model(vec![dns], vec![], vec![]);
    assert!(model.snapshot().ports.values().all(|port| port.frontends.len() == 3));
}

#[test]
fn the_service_with_the_smaller_name_gets_a_claimed_node_port() {
    let with_node_port = |name: &str, cluster_ip: &str| {
        let mut service = Service { service_type: ServiceType::NodePort, ..service(name, cluster_ip) };
        service.ports[0].node_port = Some(port_number(30_080));
        service
    };
    let model =
        model(vec![with_node_port("b/x", "10.96.0.1"), with_node_port("a/y", "10.96.0.2")], vec![], vec![]);
    assert_eq!(frontends_of(&model.snapshot().ports[&key("b/x", "")]), ["ClusterIp 10.96.0.1:80"]);
    assert_eq!(
        frontends_of(&model.snapshot().ports[&key("a/y", "")]),
        ["ClusterIp 10.96.0.2:80", "NodePort *:30080"]
    );
}

#[test]
fn losing_an_address_keeps_policies_and_endpoints() {
    let mut y = with_external_ip("a/y", "10.96.0.2", "192.0.2.1");
    y.external_traffic_policy = TrafficPolicy::Local;
    let slices = vec![slice("a/s", "y", vec![endpoint("10.244.1.1").on(THIS_NODE)])];
    let mut model = model(vec![y], slices, vec![]);
    let before = model.snapshot().ports[&key("a/y", "")].as_ref().clone();
    apply_service(&mut model, with_external_ip("a/x", "10.96.0.1", "192.0.2.1"));
    let after = model.snapshot().ports[&key("a/y", "")].as_ref().clone();
    assert_eq!(ResolvedPort { frontends: before.frontends.clone(), ..after }, before);
}

#[test]
fn health_checks_count_ready_endpoints_of_this_node_by_address() {
    let mut web = load_balancer("a/x", "10.96.0.1", &["198.51.100.1"]);
    web.external_traffic_policy = TrafficPolicy::Local;
    web.health_check_node_port = Some(port_number(32_000));
    web.ports.push(service_port("other", Protocol::Tcp, 81));
    let ready = || endpoint("10.244.1.1").on(THIS_NODE);
    let mut endpoints = slice("a/s", "x", vec![ready(), endpoint("10.244.2.1").on("n2")]);
    endpoints.ports = [slice_port("", Protocol::Tcp, 8080), slice_port("other", Protocol::Tcp, 8081)].into();
    let mut model = model(vec![web.clone()], vec![endpoints.clone()], vec![]);
    let checks = |model: &Model| -> Vec<_> {
        model
            .health_checks()
            .iter()
            .map(|((name, _), check)| (name.to_string(), check.port.get(), check.local_endpoints))
            .collect()
    };
    assert_eq!(checks(&model), [("a/x".to_owned(), 32_000, 1)]);

    endpoints.endpoints[0] = ready().terminating();
    apply_slice(&mut model, endpoints);
    assert_eq!(checks(&model), [("a/x".to_owned(), 32_000, 0)], "terminating endpoints do not count");
    assert_eq!(model.snapshot().ports[&key("a/x", "")].local_endpoints.len(), 1, "but they take traffic");

    apply_service(&mut model, Service { external_traffic_policy: TrafficPolicy::Cluster, ..web });
    assert_eq!(checks(&model), []);
}
