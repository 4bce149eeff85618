//! Decodes recorded objects, invalid objects, and random JSON.

mod direct_return;
mod names;
mod protobuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::model::{
    AddressType, Balance, DsrAnnouncement, Forwarding, LoadBalancerIngress, LoadBalancerIpMode,
    NodeAddressType, Protocol, ServiceType, SessionAffinity, TrafficPolicy, UnixNanos,
};

const SERVICES: &str = include_str!("../../../../../tests/src/apiserver/recordings/services-list.json");
const SLICES: &str = include_str!("../../../../../tests/src/apiserver/recordings/endpointslices-list.json");
const NODES: &str = include_str!("../../../../../tests/src/apiserver/recordings/node1-list.json");

fn decode<'de, K: Kind, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Decoded<'static, K>, Problem> {
    super::decode(deserializer, &mut SharedValues::default())
}

fn items(list: &str) -> Vec<Value> {
    let list: Value = serde_json::from_str(list).unwrap();
    list["items"].as_array().unwrap().clone()
}

fn decoded<K: Kind>(object: &Value) -> Decoded<'_, K> {
    decode(object).unwrap()
}

/// Returns the object, which must be valid.
fn good<K: Kind>(object: &Value) -> K {
    let decoded = decoded::<K>(object);
    assert_eq!(decoded.problems, []);
    decoded.object.unwrap()
}

/// Returns the problems as text, and the object without them.
fn faulty<K: Kind>(object: &Value) -> (Vec<String>, K) {
    let decoded = decoded::<K>(object);
    (decoded.problems.iter().map(ToString::to_string).collect(), decoded.object.unwrap())
}

fn service(spec: &Value) -> Value {
    json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": spec})
}

fn slice(mut fields: Value) -> Value {
    fields["metadata"] = json!({"name": "web-1", "namespace": "shop"});
    fields
}

#[test]
fn a_recorded_load_balancer_service_is_decoded() {
    let services: Vec<Service> = items(SERVICES).iter().map(good).collect();
    let names: Vec<String> = services.iter().map(|service| service.name.to_string()).collect();
    assert_eq!(names, ["default/dual", "default/kubernetes", "default/lb", "default/web"]);
    let expected = Service {
        name: NamespacedName::new("default", "lb"),
        service_type: ServiceType::LoadBalancer,
        cluster_ips: vec!["10.96.2.12".parse().unwrap()],
        external_ips: vec![],
        load_balancer_ingress: vec![LoadBalancerIngress {
            ip: "198.51.100.20".parse().unwrap(),
            ip_mode: LoadBalancerIpMode::Vip,
        }],
        load_balancer_source_ranges: vec!["10.0.0.0/8".parse().unwrap()],
        ports: vec![crate::model::ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: 80.try_into().unwrap(),
            node_port: Some(30212.try_into().unwrap()),
        }],
        session_affinity: SessionAffinity::ClientIp { timeout_seconds: 10_800.try_into().unwrap() },
        internal_traffic_policy: TrafficPolicy::Cluster,
        external_traffic_policy: TrafficPolicy::Local,
        health_check_node_port: Some(31212.try_into().unwrap()),
        excluded_by_label: false,
        balance: None,
        forwarding: Forwarding::Nat,
    };
    assert_eq!(services[2], expected);
}

#[test]
fn recorded_slices_and_the_recorded_node_are_decoded() {
    let slices: Vec<EndpointSlice> = items(SLICES).iter().map(good).collect();
    assert_eq!(slices[2].name, NamespacedName::new("default", "lb-v4"));
    assert_eq!(slices[2].service.as_deref(), Some("lb"));
    assert_eq!(slices[2].address_type, AddressType::Ipv4);
    let nodes: Vec<_> =
        slices[2].endpoints.iter().map(|e| e.placement.node_name.as_deref().unwrap()).collect();
    assert_eq!(nodes, ["node1", "node2"]);
    assert_eq!(slices[1].endpoints[0].address.to_string(), "fd44:2::11");
    let node: Node = good(&items(NODES)[0]);
    assert_eq!(node.pod_cidrs, ["10.244.1.0/24".parse().unwrap(), "fd44:1::/64".parse().unwrap()]);
    let internal = |ip: &str| (NodeAddressType::InternalIp, ip.parse().unwrap());
    assert_eq!(node.addresses, [internal("192.168.57.11"), internal("fd57::11")]);
    assert!(!node.being_deleted);
}

#[test]
fn annotation_says_how_clients_get_an_endpoint() {
    let annotated = |value: &str| {
        let mut service = service(&json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
        service["metadata"]["annotations"] = json!({"shunt.dev/balance": value, "other": "x"});
        service
    };
    for (value, expected) in [("maglev", Balance::Maglev), ("random", Balance::Random)] {
        assert_eq!(good::<Service>(&annotated(value)).balance, Some(expected));
    }
    let (problems, service): (_, Service) = faulty(&annotated("Maglev"));
    assert_eq!(
        problems,
        ["metadata.annotations[shunt.dev/balance]: \"Maglev\" is not one of random, maglev"]
    );
    assert_eq!(service.balance, None, "the settings decide");
}

#[test]
fn absent_service_fields_get_the_defaults_of_the_api_server() {
    let service: Service = good(&json!({
        "metadata": {"name": "web"},
        "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}], "sessionAffinity": "ClientIP"},
    }));
    assert_eq!(service.name, NamespacedName::new("default", "web"));
    assert_eq!(service.service_type, ServiceType::ClusterIp);
    assert_eq!(service.cluster_ips, ["10.96.0.10".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(service.ports[0].protocol, Protocol::Tcp);
    assert_eq!(service.ports[0].node_port, None);
    assert_eq!(service.internal_traffic_policy, TrafficPolicy::Cluster);
    let three_hours = SessionAffinity::ClientIp { timeout_seconds: 10_800.try_into().unwrap() };
    assert_eq!(service.session_affinity, three_hours);
}

#[test]
fn null_means_absent() {
    let spec =
        json!({"clusterIP": null, "clusterIPs": null, "ports": null, "type": null, "externalIPs": null});
    let service: Service =
        good(&json!({"metadata": {"name": "a", "labels": null}, "spec": spec, "status": null}));
    assert!(service.ports.is_empty() && service.cluster_ips.is_empty());
}

#[test]
fn headless_and_external_name_services_have_no_cluster_ips() {
    let headless = json!({"clusterIP": "None", "clusterIPs": ["None"]});
    assert!(good::<Service>(&service(&headless)).cluster_ips.is_empty());
    let external = json!({"type": "ExternalName", "externalName": "example.test", "clusterIP": ""});
    let external: Service = good(&service(&external));
    assert_eq!(external.service_type, ServiceType::ExternalName);
}

#[test]
fn absent_conditions_mean_ready_serving_and_not_terminating() {
    let object = slice(json!({"addressType": "IPv4", "endpoints": [
        {"addresses": ["10.0.0.1"]},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "terminating": true}},
    ], "ports": [{}]}));
    let slice: EndpointSlice = good(&object);
    let conditions: Vec<_> = slice.endpoints.iter().map(|e| (e.ready, e.serving, e.terminating)).collect();
    assert_eq!(conditions, [(true, true, false), (false, true, true)]);
    assert_eq!(
        (&*slice.ports[0].name, slice.ports[0].protocol, slice.ports[0].port),
        ("", Protocol::Tcp, None)
    );
    assert_eq!(slice.service, None);
}

#[test]
fn hints_and_the_trigger_time_are_decoded() {
    let mut object = slice(json!({"addressType": "IPv6", "endpoints": [{
        "addresses": ["fd44::1", "fd44::2"], "nodeName": "n1", "zone": "east",
        "hints": {"forZones": [{"name": "east"}, {"name": "west"}], "forNodes": [{"name": "n1"}]},
    }]}));
    object["metadata"]["annotations"] =
        json!({"endpoints.kubernetes.io/last-change-trigger-time": "1970-01-01T00:00:01.5Z", "other": "x"});
    let slice: EndpointSlice = good(&object);
    let endpoint = &slice.endpoints[0];
    assert_eq!(endpoint.address.to_string(), "fd44::1", "only the first counts");
    let hints = endpoint.placement.hints.as_deref().unwrap();
    assert_eq!(hints.zones.iter().map(|zone| &**zone).collect::<Vec<_>>(), ["east", "west"]);
    assert_eq!(hints.nodes.iter().map(|node| &**node).collect::<Vec<_>>(), ["n1"]);
    assert_eq!(slice.last_change_trigger_time, Some(UnixNanos(1_500_000_000)));
}

#[test]
fn the_pods_of_endpoints_are_decoded() {
    let endpoint = |address: &str, target: Value| json!({"addresses": [address], "targetRef": target});
    let object = slice(json!({"addressType": "IPv4", "endpoints": [
        endpoint("10.0.0.1", json!({"kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "1"})),
        endpoint("10.0.0.2", json!({"kind": "Pod", "name": "web-1"})),
        endpoint("10.0.0.3", json!({"kind": "Pod", "namespace": "other", "name": "web-2"})),
        endpoint("10.0.0.4", json!({"kind": "Node", "name": "web-3"})),
        endpoint("10.0.0.5", json!({"kind": "Pod", "name": "Not a name"})),
        endpoint("10.0.0.6", json!(null)),
    ]}));
    let slice: EndpointSlice = good(&object);
    let pods: Vec<_> = slice.pods.iter().collect();
    let expected = [Some("web-0"), Some("web-1"), None, None, None, None];
    assert_eq!(pods.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
}

#[test]
fn leading_zeros_blanks_and_host_bits_are_removed_like_upstream() {
    let spec = json!({
        "type": "LoadBalancer", "clusterIP": "172.30.0.041", "externalIPs": ["192.168.099.022", "::ffff:10.1.2.3"],
        "loadBalancerSourceRanges": [" 203.0.113.000/025 ", "10.1.2.3/8\t", "fd00::5/16"],
        "ports": [{"name": "p80", "port": 80, "nodePort": 3001}],
    });
    let mut object = service(&spec);
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "1.2.3.004"}, {"hostname": "lb.test"}]}});
    let service: Service = good(&object);
    let addresses =
        |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<std::net::IpAddr>>();
    assert_eq!(service.cluster_ips, addresses(&["172.30.0.41"]));
    assert_eq!(service.external_ips, addresses(&["192.168.99.22", "10.1.2.3"]));
    let ranges: Vec<String> = service.load_balancer_source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["203.0.113.0/25", "10.0.0.0/8", "fd00::/16"]);
    assert_eq!(service.load_balancer_ingress.len(), 1);
    assert_eq!(service.load_balancer_ingress[0].ip, addresses(&["1.2.3.4"])[0]);
}

#[test]
fn invalid_values_are_named_and_left_out_while_the_rest_stays() {
    let (problems, service): (_, Service) = faulty(&service(&json!({
        "type": "NodePort", "clusterIPs": ["10.96.0.10", "10.96.0.11", "fd96::10"],
        "externalIPs": ["198.51.100.1", "nonsense"], "loadBalancerSourceRanges": ["10.0.0.0/33"],
        "internalTrafficPolicy": "Sometimes",
        "ports": [
            {"name": "a", "port": 80, "nodePort": 70000}, {"name": "b", "port": 0}, {"name": "c", "port": 1, "protocol": "TPC"},
            {"name": "a", "port": 81}, {"name": "d"}, {"name": "e", "port": 80},
        ],
    })));
    assert_eq!(
        problems,
        [
            "spec.clusterIPs[1]: \"10.96.0.11\" is not of another IP family than the one before; one of each is allowed",
            "spec.externalIPs[1]: \"nonsense\" is not an IP address",
            "spec.loadBalancerSourceRanges[0]: \"10.0.0.0/33\" is not a range in CIDR notation, like 10.0.0.0/8 or fd00::/64",
            "spec.ports[0].nodePort: 70000 is not a port number, 1 to 65535",
            "spec.ports[1].port: 0 is not a port number, 1 to 65535",
            "spec.ports[2].protocol: \"TPC\" is not one of TCP, UDP, SCTP",
            "spec.ports[3].name: \"a\" is not a name that no other port has",
            "spec.ports[4].port: missing; a port number, 1 to 65535, is needed",
            "spec.ports[5]: \"80/TCP\" is not a port that no other entry has",
            "spec.internalTrafficPolicy: \"Sometimes\" is not one of Cluster, Local",
        ]
    );
    assert_eq!(service.cluster_ips.len(), 2);
    assert_eq!(service.external_ips.len(), 1);
    assert_eq!(service.ports.len(), 1);
}

#[test]
fn an_invalid_address_removes_only_its_endpoint() {
    let pod = |name: &str| json!({"kind": "Pod", "name": name});
    let (problems, slice): (_, EndpointSlice) = faulty(&slice(json!({"addressType": "IPv4", "endpoints": [
        {"addresses": ["fd44::1"], "targetRef": pod("web-0")}, {"addresses": ["10.0.0.256"]},
        {"addresses": []}, {"addresses": ["10.0.0.3"], "targetRef": pod("web-3")},
    ]})));
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert_eq!(slice.endpoints.len(), 1);
    assert_eq!(slice.pods.get(0).as_deref(), Some("web-3"), "the name of its own pod");
}

#[test]
fn an_ipv4_mapped_address_of_an_endpoint_is_an_ipv4_address() {
    let of_type = |address_type| {
        slice(json!({"addressType": address_type, "endpoints": [{"addresses": ["::ffff:10.0.0.1"]}]}))
    };
    let slice: EndpointSlice = good(&of_type("IPv4"));
    assert_eq!(slice.endpoints[0].address.to_string(), "10.0.0.1");
    let (problems, slice): (_, EndpointSlice) = faulty(&of_type("IPv6"));
    assert_eq!((problems.len(), slice.endpoints.len()), (1, 0), "{problems:?}");
}

#[test]
fn fqdn_slices_have_no_endpoints() {
    let object = slice(json!({"addressType": "FQDN", "endpoints": [{"addresses": ["a.test"]}]}));
    let slice: EndpointSlice = good(&object);
    assert_eq!(slice.address_type, AddressType::Fqdn);
    assert_eq!(slice.endpoints, []);
}

#[test]
fn a_wrong_json_type_is_named_by_its_path() {
    let problem = decode::<Service, _>(&service(&json!({"ports": [{"port": "80"}]}))).unwrap_err();
    assert_eq!(problem.field, "spec.ports[0].port");
    assert!(problem.what.contains("\"80\""), "{problem}");
}

#[test]
fn services_of_other_proxies_and_slices_of_headless_services_are_excluded_by_label() {
    const PROXY: &str = "service.kubernetes.io/service-proxy-name";
    const HEADLESS: &str = "service.kubernetes.io/headless";
    for (label, excludes_services) in [(PROXY, true), (HEADLESS, false)] {
        let mut object = service(&json!({"clusterIP": "10.96.0.1"}));
        object["metadata"]["labels"] = json!({label: ""});
        let decoded = decoded::<Service>(&object);
        assert_eq!(decoded.selected, !excludes_services, "a Service with {label}");
        assert_eq!(decoded.object.unwrap().excluded_by_label, excludes_services);
    }
    for (label, excludes_slices) in [(PROXY, false), (HEADLESS, true)] {
        let metadata = json!({"name": "a-1", "labels": {label: ""}});
        let slice = json!({"metadata": metadata, "addressType": "IPv4", "endpoints": []});
        assert_eq!(decoded::<EndpointSlice>(&slice).selected, !excludes_slices, "a slice with {label}");
    }
}

#[test]
fn a_taint_or_deletion_timestamp_marks_a_node_as_being_deleted() {
    let tainted = json!({"metadata": {"name": "n"}, "spec": {"taints": [
        {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}});
    let deleted = json!({"metadata": {"name": "n", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
    assert!(good::<Node>(&tainted).being_deleted && good::<Node>(&deleted).being_deleted);
}

/// Any JSON, often with values like those of the recordings.
fn arbitrary_json() -> impl Strategy<Value = Value> {
    let words = [
        "",
        "None",
        "TCP",
        "10.0.0.1",
        "fd00::/64",
        "IPv4",
        "ClientIP",
        "999.1.1.1",
        "::ffff:1.2.3.4/96",
        "é\u{0}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        proptest::sample::select(words.to_vec()).prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::hash_map("[a-zA-Z]{0,8}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Counts all values of a tree.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Replaces the value number `at` by `new`.
fn replace(value: &mut Value, at: &mut usize, new: &Value) {
    if *at == 0 {
        *value = new.clone();
    }
    *at = at.wrapping_sub(1);
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| replace(item, at, new)),
        Value::Object(fields) => fields.values_mut().for_each(|field| replace(field, at, new)),
        _ => {}
    }
}

proptest! {
    #[test]
    fn no_mutation_of_an_object_makes_the_decoder_panic(
        pick in any::<proptest::sample::Index>(),
        replacements in proptest::collection::vec((any::<proptest::sample::Index>(), arbitrary_json()), 1..4),
    ) {
        let all: Vec<Value> = [SERVICES, SLICES, NODES].into_iter().flat_map(items).collect();
        let mut object = pick.get(&all).clone();
        for (position, new) in replacements {
            let mut at = position.index(count(&object));
            replace(&mut object, &mut at, &new);
        }
        let _ = decode::<Service, _>(&object);
        let _ = decode::<EndpointSlice, _>(&object);
        let _ = decode::<Node, _>(&object);
        let yaml = serde_yaml_ng::to_string(&object).unwrap();
        let _ = serde_yaml_ng::from_str::<serde_yaml_ng::Value>(&yaml).map(decode::<Service, _>);
    }

    #[test]
    fn no_json_makes_the_decoder_panic(object in arbitrary_json()) {
        let _ = decode::<Service, _>(&object);
        let _ = decode::<EndpointSlice, _>(&object);
        let _ = decode::<Node, _>(&object);
    }

    #[test]
    fn no_text_makes_the_value_parsers_panic(text in ".{0,40}", number in any::<i64>()) {
        let mut problems = Problems::default();
        let _ = parse::ip("f", &text, &mut problems);
        let _ = parse::cidr("f", &text, &mut problems);
        let _ = parse::time("f", &text, &mut problems);
        let _ = parse::port_name("f", Some(&text), &mut Interner::default(), &mut problems);
        prop_assert_eq!(parse::port("f", number, &mut problems).is_some(), (1..=65_535).contains(&number));
    }
}
