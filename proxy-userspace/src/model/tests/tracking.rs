//! Tests what is dirty after an event, when a model is synced, and its counters.

use super::*;

fn web() -> Service {
    service("a/x", "10.96.0.1")
}

fn web_slice() -> EndpointSlice {
    slice(
        "a/s1",
        "x",
        vec![endpoint("10.244.1.1").for_zones(&["east"]), endpoint("10.244.2.1").for_zones(&["west"])],
    )
}

/// Returns a model of two Services. The first one has endpoints with hints.
fn two_services() -> Model {
    let other = slice("a/s2", "y", vec![endpoint("10.244.1.2")]);
    model(vec![web(), service("a/y", "10.96.0.2")], vec![web_slice(), other], vec![node(THIS_NODE)])
}

fn apply_node(model: &mut Model, node: Node) -> Dirty {
    model.apply(WatchEvent::Nodes(Delta::Apply(node)));
    model.resolve()
}

#[test]
fn nothing_is_resolved_before_all_lists_and_kernel_facts_are_known() {
    let mut model = Model::new(settings());
    model.apply(WatchEvent::Services(Delta::Apply(web())));
    let lists = [
        WatchEvent::Services(Delta::Replace(vec![web()])),
        WatchEvent::EndpointSlices(Delta::Replace(vec![web_slice()])),
        WatchEvent::Nodes(Delta::Replace(vec![])),
    ];
    for list in lists {
        assert!(!model.is_synced());
        assert!(model.resolve().is_empty());
        assert!(model.snapshot().ports.is_empty());
        model.apply(list);
    }
    assert!(!model.is_synced(), "the kernel's facts are missing");
    model.set_node_facts(NodeFacts::default());
    assert!(model.is_synced());
    assert_eq!(model.resolve(), Dirty::everything());
    assert_eq!(model.snapshot().ports.len(), 1);
    assert!(model.resolve().is_empty());
}

#[test]
fn an_event_without_a_change_makes_nothing_dirty() {
    let mut model = two_services();
    assert!(apply_service(&mut model, web()).is_empty());
    assert!(apply_slice(&mut model, web_slice()).is_empty());
    assert!(apply_node(&mut model, node(THIS_NODE)).is_empty());
    model.apply(WatchEvent::Services(Delta::Delete(namespaced("a/unknown"))));
    model.apply(WatchEvent::EndpointSlices(Delta::Delete(namespaced("a/unknown"))));
    model.set_settings(settings());
    assert!(model.resolve().is_empty());
}

#[test]
fn a_slice_makes_only_its_service_dirty() {
    let mut model = two_services();
    let mut changed = web_slice();
    changed.endpoints.pop();
    assert_eq!(dirty_ports(&apply_slice(&mut model, changed)), ["a/x TCP IPv4"]);
    assert_eq!(addresses(&model.snapshot().ports[&key("a/x", "")].cluster_endpoints), ["10.244.1.1:8080"]);
}

#[test]
fn a_slice_that_moves_to_another_service_makes_both_dirty() {
    let mut model = two_services();
    let moved = EndpointSlice { service: Some("y".into()), ..web_slice() };
    assert_eq!(dirty_ports(&apply_slice(&mut model, moved)), ["a/x TCP IPv4", "a/y TCP IPv4"]);
    assert!(model.snapshot().ports[&key("a/x", "")].cluster_endpoints.is_empty());
    assert_eq!(model.snapshot().ports[&key("a/y", "")].cluster_endpoints.len(), 3);
}

#[test]
fn slices_are_used_once_their_service_is_known() {
    let mut model = model(vec![], vec![web_slice()], vec![]);
    assert!(model.snapshot().ports.is_empty());
    assert_eq!(dirty_ports(&apply_service(&mut model, web())), ["a/x TCP IPv4"]);
    assert_eq!(model.snapshot().ports[&key("a/x", "")].cluster_endpoints.len(), 2);
}

#[test]
fn a_removed_port_is_dirty() {
    let mut model = two_services();
    let mut renamed = web();
    renamed.ports[0].name = "http".into();
    assert_eq!(dirty_ports(&apply_service(&mut model, renamed)), ["a/x TCP IPv4", "a/x:http TCP IPv4"]);
    assert!(!model.snapshot().ports.contains_key(&key("a/x", "")));
    assert!(model.snapshot().ports.contains_key(&key("a/x", "http")));
}

#[test]
fn a_service_that_becomes_headless_is_removed() {
    let mut model = two_services();
    let headless = Service { cluster_ips: Vec::new(), ..web() };
    assert_eq!(dirty_ports(&apply_service(&mut model, headless)), ["a/x TCP IPv4"]);
    assert_eq!(model.snapshot().ports.len(), 1);
}

#[test]
fn another_zone_makes_only_services_with_hints_dirty() {
    let mut model = two_services();
    let dirty = apply_node(&mut model, Node { zone: Some("west".into()), ..node(THIS_NODE) });
    assert_eq!(dirty_ports(&dirty), ["a/x TCP IPv4"]);
    assert!(!dirty.node, "the node itself did not change");
    assert_eq!(addresses(&model.snapshot().ports[&key("a/x", "")].cluster_endpoints), ["10.244.2.1:8080"]);
}

#[test]
fn the_last_facts_of_a_deleted_node_stay() {
    let mut model = two_services();
    apply_node(&mut model, Node { zone: Some("west".into()), ..node(THIS_NODE) });
    model.apply(WatchEvent::Nodes(Delta::Delete(NamespacedName::new("", THIS_NODE))));
    assert!(model.resolve().is_empty());
    model.apply(WatchEvent::Nodes(Delta::Replace(vec![])));
    assert!(model.resolve().is_empty());
    assert_eq!(model.node().and_then(|node| node.zone.as_deref()), Some("west"));
}

#[test]
fn other_nodes_are_ignored() {
    let mut model = two_services();
    let west = Node { zone: Some("west".into()), being_deleted: true, ..node("n2") };
    assert!(apply_node(&mut model, west.clone()).is_empty());
    model.apply(WatchEvent::Nodes(Delta::Delete(NamespacedName::new("", "n2"))));
    model.apply(WatchEvent::Nodes(Delta::Replace(vec![node(THIS_NODE), west])));
    assert!(model.resolve().is_empty());
}

#[test]
fn addresses_of_the_node_make_only_the_node_dirty() {
    let mut model = two_services();
    model.set_node_facts(facts(&[("eth0", "192.168.57.12/24")]));
    assert_eq!(model.resolve(), Dirty { node: true, ..Dirty::default() });
    assert!(model.snapshot().node.node_port_addresses.contains(&ip("192.168.57.12")));
    let narrowed =
        ModelSettings { node_port_addresses: NodePortAddresses::Cidrs(cidrs(&["10.0.0.0/8"])), ..settings() };
    model.set_settings(narrowed);
    assert_eq!(model.resolve(), Dirty { node: true, ..Dirty::default() });
    assert!(model.snapshot().node.node_port_addresses.is_empty());
}

#[test]
fn a_missing_node_object_is_reported_by_name() {
    let mut model = model(vec![], vec![], vec![]);
    assert_eq!(model.missing_node(), Some(THIS_NODE));
    apply_node(&mut model, node(THIS_NODE));
    assert_eq!(model.missing_node(), None);
}

#[test]
fn another_node_name_takes_effect_once_that_node_is_listed() {
    let local = slice("a/s1", "x", vec![endpoint("10.244.1.1").on("n2")]);
    let mut model = model(vec![web(), service("a/y", "10.96.0.2")], vec![local], vec![node(THIS_NODE)]);
    model.set_settings(ModelSettings { node_name: "n2".into(), ..settings() });
    assert!(model.resolve().is_empty());
    model.apply(WatchEvent::Nodes(Delta::Replace(vec![node("n2")])));
    assert_eq!(dirty_ports(&model.resolve()), ["a/x TCP IPv4"]);
    assert!(model.snapshot().ports[&key("a/x", "")].cluster_endpoints[0].is_local);
}

#[test]
fn unchanged_ports_stay_the_same_in_memory() {
    let mut model = two_services();
    let before = std::sync::Arc::clone(&model.snapshot().ports[&key("a/x", "")]);
    apply_service(&mut model, service("a/z", "10.96.0.3"));
    let mut changed = web_slice();
    changed.endpoints[0] = endpoint("10.244.1.1").for_zones(&["east"]);
    assert!(apply_slice(&mut model, changed).is_empty(), "a hint that not all endpoints have is ignored");
    assert!(std::sync::Arc::ptr_eq(&before, &model.snapshot().ports[&key("a/x", "")]));
}

#[test]
fn trigger_times_are_those_of_changes_after_the_start() {
    let timed = |slice: EndpointSlice, time| EndpointSlice {
        last_change_trigger_time: Some(UnixNanos(time)),
        ..slice
    };
    let v4 = |time| TriggerTime { family: IpFamily::V4, at: UnixNanos(time) };
    let mut model = model(vec![web()], vec![], vec![]);
    model.ignore_trigger_times_until(UnixNanos(1));
    apply_slice(&mut model, timed(web_slice(), 1));
    assert_eq!(model.take_trigger_times(), [], "the change is older than the process");
    apply_slice(&mut model, timed(web_slice(), 2));
    assert_eq!(model.take_trigger_times(), [], "only the time changed");

    let smaller = || slice("a/s1", "x", vec![endpoint("10.244.1.1")]);
    apply_slice(&mut model, timed(smaller(), 3));
    apply_slice(&mut model, timed(slice("a/s2", "y", vec![endpoint("10.244.1.2")]), 4));
    assert_eq!(model.take_trigger_times(), [3, 4].map(v4));
    assert_eq!(model.take_trigger_times(), []);

    model.apply(WatchEvent::EndpointSlices(Delta::Apply(timed(web_slice(), 5))));
    model.apply(WatchEvent::EndpointSlices(Delta::Delete(namespaced("a/s1"))));
    assert_eq!(model.take_trigger_times(), [], "a deleted slice drops the times of its Service");
    model.apply(WatchEvent::EndpointSlices(Delta::Replace(vec![timed(smaller(), 6)])));
    assert_eq!(model.take_trigger_times(), [v4(6)], "lists contain changes");

    let in_v6 = |name: &str, last, time| {
        let endpoints = vec![endpoint(&format!("fd44::{last}"))];
        let slice = EndpointSlice { address_type: AddressType::Ipv6, ..slice(name, "x", endpoints) };
        WatchEvent::EndpointSlices(Delta::Apply(timed(slice, time)))
    };
    model.apply(in_v6("a/s6", 1, 7));
    model.apply(WatchEvent::EndpointSlices(Delta::Delete(namespaced("a/s1"))));
    let v6 = TriggerTime { family: IpFamily::V6, at: UnixNanos(7) };
    assert_eq!(model.take_trigger_times(), [v6], "the families are separate");
}

#[test]
fn services_and_endpoints_are_counted() {
    let mut model = two_services();
    assert_eq!((model.service_count(), model.endpoint_count()), (2, 3));
    model.apply(WatchEvent::EndpointSlices(Delta::Delete(namespaced("a/s1"))));
    model.apply(WatchEvent::Services(Delta::Replace(vec![web()])));
    assert_eq!((model.service_count(), model.endpoint_count()), (1, 1));
}

#[test]
fn ranges_of_all_service_cidrs_are_in_the_snapshot() {
    let mut model = two_services();
    assert!(model.is_synced());
    let object =
        |name: &'static str, ranges: &[&str]| ServiceCidr { name: name.into(), cidrs: cidrs(ranges) };
    let both =
        vec![object("a", &["10.96.0.0/16", "fd96::/112"]), object("b", &["10.0.0.0/16", "10.96.0.0/16"])];
    model.apply(WatchEvent::ServiceCidrs(Delta::Replace(both)));
    let dirty = model.resolve();
    assert!(dirty.node && dirty.ports.is_empty());
    assert_eq!(model.snapshot().node.service_cidrs, cidrs(&["10.0.0.0/16", "10.96.0.0/16", "fd96::/112"]));
    model.apply(WatchEvent::ServiceCidrs(Delta::Delete(NamespacedName::new("", "a"))));
    assert!(model.resolve().node);
    assert_eq!(model.snapshot().node.service_cidrs, cidrs(&["10.0.0.0/16", "10.96.0.0/16"]));
    model.apply(WatchEvent::ServiceCidrs(Delta::Apply(object("b", &["10.96.0.0/16", "10.0.0.0/16"]))));
    assert!(!model.resolve().node, "the same ranges in another order");
}

#[test]
fn a_cluster_ip_of_a_link_is_not_served_while_the_link_has_it() {
    let services = vec![service("kube-system/dns", "10.96.0.10"), service("default/web", "10.96.0.80")];
    let mut model = model(services, vec![], vec![node(THIS_NODE)]);
    model.set_settings(ModelSettings { leaves_cluster_ips_of_links: true, ..settings() });
    let node = ("eth0", "192.168.57.11/24");
    model.set_node_facts(facts(&[node]));
    model.resolve();
    let served = |model: &Model| {
        let ports = model.snapshot().ports.values();
        let addresses = ports.flat_map(|port| port.frontends.iter().filter_map(|frontend| frontend.address));
        addresses.map(|address| address.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(served(&model), ["10.96.0.80", "10.96.0.10"]);

    let ipvs = ("kube-ipvs0", "10.96.0.80/32");
    model.set_node_facts(facts(&[node, ("nodelocaldns", "10.96.0.10/32"), ipvs]));
    let dirty = model.resolve();
    assert_eq!(
        dirty.ports.iter().map(|key| key.name.service.to_string()).collect::<Vec<_>>(),
        ["kube-system/dns"]
    );
    assert_eq!(served(&model), ["10.96.0.80"]);

    model.set_node_facts(facts(&[node]));
    assert_eq!(model.resolve().ports.len(), 1);
    assert_eq!(served(&model), ["10.96.0.80", "10.96.0.10"]);
}
