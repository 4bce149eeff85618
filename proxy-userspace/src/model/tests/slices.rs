//! Rules for EndpointSlices: merged lists, and ignored entries.

use super::*;

fn endpoints_of(slices: Vec<EndpointSlice>) -> Vec<String> {
    addresses(&resolved(service("a/x", "10.96.0.1"), slices).cluster_endpoints)
}

#[test]
fn endpoints_of_several_slices_become_one_sorted_list() {
    let slices = vec![
        slice("a/s2", "x", vec![endpoint("10.244.1.9"), endpoint("10.244.1.10")]),
        slice("a/s1", "x", vec![endpoint("10.244.2.1"), endpoint("10.244.1.9")]),
        slice("a/s3", "other", vec![endpoint("10.244.3.1")]),
        slice("b/s1", "x", vec![endpoint("10.244.4.1")]),
    ];
    assert_eq!(endpoints_of(slices), ["10.244.1.9:8080", "10.244.1.10:8080", "10.244.2.1:8080"]);
}

#[test]
fn ports_are_matched_by_name_and_protocol_in_each_slice() {
    let mut first = slice("a/s1", "x", vec![endpoint("10.244.1.1")]);
    first.ports = [
        slice_port("", Protocol::Tcp, 8080),
        slice_port("", Protocol::Tcp, 9090),
        slice_port("", Protocol::Udp, 5353),
        slice_port("admin", Protocol::Tcp, 8443),
        SlicePort { name: "".into(), protocol: Protocol::Tcp, port: None },
    ]
    .into();
    let mut second = slice("a/s2", "x", vec![endpoint("10.244.1.1")]);
    second.ports = [slice_port("", Protocol::Tcp, 8081)].into();
    assert_eq!(endpoints_of(vec![first, second]), ["10.244.1.1:8080", "10.244.1.1:8081", "10.244.1.1:9090"]);
}

#[test]
fn a_duplicate_address_uses_the_endpoint_that_is_not_terminating() {
    let (running, terminating) = (endpoint("10.244.1.1"), endpoint("10.244.1.1").terminating());
    for (first, second) in [(running.clone(), terminating.clone()), (terminating, running)] {
        let slices =
            vec![slice("a/s1", "x", vec![first, endpoint("10.244.1.2")]), slice("a/s2", "x", vec![second])];
        assert_eq!(endpoints_of(slices), ["10.244.1.1:8080", "10.244.1.2:8080"]);
    }
}

#[test]
fn a_duplicate_address_uses_the_later_running_endpoint() {
    let other = || endpoint("10.244.1.2");
    let slices =
        |first, second| vec![slice("a/s1", "x", vec![first, other()]), slice("a/s2", "x", vec![second])];
    let (ready, unready) = (endpoint("10.244.1.1"), endpoint("10.244.1.1").not_ready());
    assert_eq!(endpoints_of(slices(unready.clone(), ready.clone())).len(), 2);
    assert_eq!(endpoints_of(slices(ready, unready)), ["10.244.1.2:8080"]);
}

#[test]
fn host_names_and_addresses_of_the_other_family_are_ignored() {
    let mut names = slice("a/s1", "x", vec![endpoint("10.244.1.1")]);
    names.address_type = AddressType::Fqdn;
    let mixed = slice("a/s2", "x", vec![endpoint("10.244.1.2"), endpoint("fd44::1")]);
    let orphan = EndpointSlice { service: None, ..slice("a/s3", "x", vec![endpoint("10.244.1.4")]) };
    let nameless = EndpointSlice { service: Some("".into()), ..orphan.clone() };
    assert_eq!(endpoints_of(vec![names, mixed, orphan, nameless]), ["10.244.1.2:8080"]);
}

#[test]
fn each_family_has_its_own_endpoints() {
    let dual = Service { cluster_ips: ips(&["fd96::1", "10.96.0.1"]), ..service("a/x", "10.96.0.1") };
    let slices = vec![
        slice("a/s1", "x", vec![endpoint("10.244.1.1")]),
        slice("a/s2", "x", vec![endpoint("fd44:1::1")]),
    ];
    let model = model(vec![dual], slices, vec![]);
    let lists: Vec<_> =
        model.snapshot().ports.values().map(|port| addresses(&port.cluster_endpoints)).collect();
    assert_eq!(lists, [["10.244.1.1:8080"], ["[fd44:1::1]:8080"]]);
}

#[test]
fn endpoints_of_this_node_are_local() {
    let slices = vec![slice(
        "a/s1",
        "x",
        vec![endpoint("10.244.1.1").on(THIS_NODE), endpoint("10.244.1.2").on("n2"), endpoint("10.244.1.3")],
    )];
    let port = resolved(service("a/x", "10.96.0.1"), slices);
    assert_eq!(port.cluster_endpoints.iter().map(|e| e.is_local).collect::<Vec<_>>(), [true, false, false]);
}

#[test]
fn all_serving_endpoints_are_listed_for_udp_only() {
    let mut dns = service("a/x", "10.96.0.1");
    dns.ports = vec![service_port("", Protocol::Tcp, 53), service_port("udp", Protocol::Udp, 53)];
    let mut endpoints = slice(
        "a/s1",
        "x",
        vec![
            endpoint("10.244.1.1"),
            endpoint("10.244.1.2").terminating(),
            endpoint("10.244.1.3").not_ready(),
            SliceEndpoint { serving: false, ..endpoint("10.244.1.4") },
        ],
    );
    endpoints.ports = [slice_port("", Protocol::Tcp, 5353), slice_port("udp", Protocol::Udp, 5353)].into();
    let model = model(vec![dns], vec![endpoints], vec![]);
    let serving: Vec<Vec<_>> = model
        .snapshot()
        .ports
        .values()
        .map(|port| port.serving.iter().map(|endpoint| endpoint.address.to_string()).collect())
        .collect();
    assert_eq!(serving, [vec![], vec!["10.244.1.1:5353", "10.244.1.2:5353", "10.244.1.4:5353"]]);
}
