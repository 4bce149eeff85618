//! The plan for a cluster with every kind of Service, as kube-proxy 1.36 writes it, and the plans
//! of small changes.

use super::{options, plan, programmed};
use crate::{
    dataplane::{
        PlanSize as _,
        iptables_text::{self, Layout},
        ipvs::{plan::Plan, state::State, step::Step},
    },
    kernel::ipvs::Change,
    model::{
        Dirty, IpFamily, LoadBalancerIngress, LoadBalancerIpMode, Protocol, Service, ServicePortKey,
        ServiceType, Snapshot, TrafficPolicy,
        testing::{self, World, cidrs, endpoint, facts, ips, service, service_port, settings, slice},
    },
    net::PortRange,
};

fn add(world: &mut World, service: Service) {
    let name = service.name.name.to_string();
    world.services.insert(service.name.clone(), service);
    let endpoints = vec![endpoint("10.244.1.11").on(testing::THIS_NODE), endpoint("10.244.2.11").on("n2")];
    let slice = slice(&format!("default/{name}-1"), &name, endpoints);
    world.slices.insert(slice.name.clone(), slice);
}

fn ingress(address: &str) -> Vec<LoadBalancerIngress> {
    vec![LoadBalancerIngress { ip: testing::ip(address), ip_mode: LoadBalancerIpMode::Vip }]
}

const LINKS: [(&str, &str); 3] =
    [("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24"), ("cbr0", "10.244.1.1/24")];

fn snapshot_of(services: Vec<Service>) -> Snapshot {
    snapshot_on(&LINKS, services)
}

/// Returns the Snapshot of a node with these links.
fn snapshot_on(links: &[(&str, &str)], services: Vec<Service>) -> Snapshot {
    let mut world = World::default();
    for service in services {
        add(&mut world, service);
    }
    world.model(&settings(), &facts(links)).snapshot().clone()
}

/// Returns a Snapshot with one Service that has this cluster IP.
pub(super) fn one_service(cluster_ip: &str) -> Snapshot {
    snapshot_of(vec![service("default/web", cluster_ip)])
}

/// Returns a Snapshot with every kind of Service.
pub(super) fn snapshot() -> Snapshot {
    let named = |name: &str, ip: &str| service(&format!("default/{name}"), ip);
    let mut affinity = named("affinity", "10.96.0.11");
    affinity.session_affinity =
        crate::model::SessionAffinity::ClientIp { timeout_seconds: 10_800.try_into().unwrap() };
    let mut dns = named("dns", "10.96.0.10");
    dns.ports = vec![service_port("", Protocol::Udp, 53)];
    let mut external = named("external", "10.96.0.12");
    external.external_ips = ips(&["198.51.100.12", "192.168.57.11"]);
    let mut node_port = named("node-port", "10.96.0.13");
    node_port.service_type = ServiceType::NodePort;
    node_port.ports[0].node_port = Some(testing::port_number(30_113));
    let mut balanced = named("balanced", "10.96.0.14");
    balanced.service_type = ServiceType::LoadBalancer;
    balanced.load_balancer_ingress = ingress("198.51.100.14");
    balanced.load_balancer_source_ranges = cidrs(&["192.0.2.0/24"]);
    let mut local = named("local", "10.96.0.15");
    local.service_type = ServiceType::LoadBalancer;
    local.external_traffic_policy = TrafficPolicy::Local;
    local.ports[0].node_port = Some(testing::port_number(30_115));
    local.health_check_node_port = Some(testing::port_number(31_115));
    local.load_balancer_ingress = ingress("198.51.100.15");
    snapshot_of(vec![affinity, dns, external, node_port, balanced, local])
}

fn text(plan: &Plan) -> String {
    let lines: Vec<String> = plan.steps.iter().flat_map(lines).collect();
    lines.join("\n")
}

fn lines(step: &Step) -> Vec<String> {
    match step {
        Step::Sysctl(setting, value) => vec![format!("set {} = {value}", setting.0)],
        Step::Timeouts(timeouts) => vec![format!("{timeouts:?}")],
        Step::Link => vec!["make the link".into()],
        Step::Sets(changes) => {
            let lines = changes.iter().map(|change| change.line().trim_end().to_owned());
            ["ipset restore".into()].into_iter().chain(lines).collect()
        }
        Step::Rules(family, inputs) => {
            let input = iptables_text::text(inputs, Layout::ChainsFirst);
            [format!("restore {family}")].into_iter().chain(input.lines().map(String::from)).collect()
        }
        Step::Servers(changes) => changes.iter().map(ToString::to_string).collect(),
        Step::Drain(reals) => reals.iter().map(|(key, real)| format!("retire {real} of {key}")).collect(),
        Step::AddAddresses(addresses) => vec![format!("add {addresses:?}")],
        Step::DeleteAddresses(addresses) => vec![format!("delete {addresses:?}")],
    }
}

#[test]
fn every_kind_of_service_is_written_as_kube_proxy_does() {
    let state = State::empty(options());
    let first = plan(&state, &snapshot(), &Dirty::everything());
    let shown = text(&first);
    // Without Services of IPv6, its sets are empty.
    let shown: Vec<&str> = shown.lines().filter(|line| !line.starts_with("create KUBE-6-")).collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn rules_take_other_ports_than_programs_of_an_earlier_process() {
    let mut snapshot = snapshot();
    snapshot.node.former_programs_ports = Some(PortRange { first: 1_024, last: 29_999 });
    let shown = text(&plan(&State::empty(options()), &snapshot, &Dirty::everything()));
    for protocol in ["tcp", "udp"] {
        let apart = format!("-A KUBE-POSTROUTING -p {protocol} -m comment ");
        let rules: Vec<&str> = shown.lines().filter(|line| line.starts_with(&apart)).collect();
        assert!(rules.iter().all(|rule| rule.contains("-j MASQUERADE --to-ports 32768-65535")), "{rules:?}");
        // Hairpins of one family, and what is marked, of both.
        assert_eq!(rules.len(), 3, "{rules:?}");
    }
    let state = programmed(&snapshot);
    snapshot.node.former_programs_ports = None;
    let change = plan(&state, &snapshot, &Dirty { node: true, ..Dirty::default() });
    let shown = text(&change);
    assert!(shown.contains("-A KUBE-POSTROUTING") && !shown.contains("--to-ports"), "{shown}");
}

fn many(count: u16) -> Vec<Service> {
    (0..count)
        .map(|i| service(&format!("default/s{i}"), &format!("10.97.{}.{}", i / 250, i % 250 + 1)))
        .collect()
}

fn dirty(key: &str) -> Dirty {
    Dirty { ports: [testing::key(key, "")].into(), ..Dirty::default() }
}

#[test]
fn a_plan_is_the_same_at_ten_and_at_a_thousand_services() {
    let plans = [10, 1000].map(|count| {
        let before = snapshot_of(many(count));
        let state = programmed(&before);
        let mut services = many(count);
        let added = service("default/new", "10.96.0.99");
        services.push(added);
        let with_one_more = snapshot_of(services);
        let one = plan(&state, &with_one_more, &dirty("default/new"));
        let mut more = state.clone();
        let again = plan(&more, &with_one_more, &dirty("default/new"));
        again.record(&mut more);
        let gone = plan(&more, &before, &dirty("default/new"));
        let mut moved = before.clone();
        let key: ServicePortKey = testing::key("default/s3", "");
        let port = std::sync::Arc::make_mut(moved.ports.get_mut(&key).unwrap());
        port.cluster_endpoints.pop();
        let endpoint = plan(&state, &moved, &dirty("default/s3"));
        [one, gone, endpoint].map(|plan| (plan.len(), text(&plan)))
    });
    assert_eq!(plans[0], plans[1]);
    let lengths = plans[0].each_ref().map(|(length, _)| *length);
    // A new Service: a virtual server, two real servers, an address, and the entries of the cluster
    // IP and the address. A removed Service: the same without real servers, which are removed with
    // their virtual server. A removed endpoint: a real server.
    assert_eq!(lengths, [6, 4, 1], "{:#?}", plans[0]);
}

#[test]
fn a_new_service_gets_its_addresses_last() {
    let before = snapshot_of(many(3));
    let state = programmed(&before);
    let mut services = many(3);
    services.push(service("default/new", "10.96.0.99"));
    let change = plan(&state, &snapshot_of(services), &dirty("default/new"));
    let kinds: Vec<&str> = change
        .steps
        .iter()
        .map(|step| match step {
            Step::Sets(_) => "sets",
            Step::Servers(changes) if matches!(changes[0], Change::AddServer(..)) => "servers",
            Step::AddAddresses(_) => "addresses",
            _ => "other",
        })
        .collect();
    assert_eq!(kinds, ["sets", "servers", "addresses"]);
}

#[test]
fn a_cluster_ip_of_another_link_is_filtered_and_an_external_ip_of_one_is_not() {
    let mut dns = service("kube-system/dns", "10.96.0.10");
    dns.external_ips = ips(&["192.168.57.11"]);
    let links = [&LINKS[..], &[("nodelocaldns", "10.96.0.10/32")]].concat();
    let state = programmed(&snapshot_on(&links, vec![dns]));
    let held: Vec<_> = state.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(held, ["10.96.0.10"]);
    assert!(super::is_safe(&state));
}

#[test]
fn source_ranges_stay_until_the_restriction_to_them_ends() {
    let ranges_of = |ranges: &[&str]| {
        let mut balanced = service("default/balanced", "10.96.0.14");
        balanced.service_type = ServiceType::LoadBalancer;
        balanced.load_balancer_ingress = ingress("198.51.100.14");
        balanced.load_balancer_source_ranges = cidrs(ranges);
        balanced
    };
    let snapshot_of = |services| {
        let mut snapshot = snapshot_of(services);
        snapshot.node.primary_addresses.insert(IpFamily::V4, testing::ip("192.168.57.11"));
        snapshot
    };
    let before = snapshot_of(vec![ranges_of(&["192.0.2.0/24", "192.168.57.0/24"])]);
    let state = programmed(&before);
    // A new Service adds entries in the same plan.
    let after = snapshot_of(vec![ranges_of(&[]), service("default/new", "10.96.0.99")]);
    let change = plan(&state, &after, &Dirty::everything());
    let deletions = |plan: &Plan| -> Vec<String> {
        text(plan).lines().filter(|line| line.starts_with("del ")).map(str::to_owned).collect()
    };
    assert_eq!(
        deletions(&change),
        [
            "del KUBE-LOAD-BALANCER-FW 198.51.100.14,6:80",
            "del KUBE-LOAD-BALANCER-SOURCE-CIDR 198.51.100.14,6:80,192.0.2.0/24",
            "del KUBE-LOAD-BALANCER-SOURCE-CIDR 198.51.100.14,6:80,192.168.57.0/24",
            "del KUBE-LOAD-BALANCER-SOURCE-IP 198.51.100.14,6:80,198.51.100.14",
        ]
    );
    // An exchanged range makes room for the new one in a full set.
    let after = snapshot_of(vec![ranges_of(&["203.0.113.0/24", "192.168.57.0/24"])]);
    let shown = text(&plan(&state, &after, &Dirty::everything()));
    let range = |line: &str| line.contains("KUBE-LOAD-BALANCER-SOURCE-CIDR");
    let changes: Vec<&str> = shown.lines().filter(|line| range(line)).collect();
    assert_eq!(
        changes,
        [
            "del KUBE-LOAD-BALANCER-SOURCE-CIDR 198.51.100.14,6:80,192.0.2.0/24",
            "add KUBE-LOAD-BALANCER-SOURCE-CIDR 198.51.100.14,6:80,203.0.113.0/24",
        ]
    );
}
