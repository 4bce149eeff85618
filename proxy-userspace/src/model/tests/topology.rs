//! Tests the endpoint list of each policy, with the semantics of upstream's
//! `TestCategorizeEndpoints` (`pkg/proxy/topology_test.go`, 1.36).

use super::*;

/// An endpoint is written as the last byte of its address and its properties: `here` (on this
/// node), `unready`, `terminating` (and serving), `gone` (terminating, not serving), `zones=a,b`,
/// `nodes=n1,n2`.
struct Case {
    about: &'static str,
    service: fn() -> Service,
    zone: &'static str,
    endpoints: &'static [&'static str],
    cluster: &'static [u8],
    local: &'static [u8],
    has_endpoints: bool,
}

const BASE: Case = Case {
    about: "",
    service: plain,
    zone: "",
    endpoints: &[],
    cluster: &[],
    local: &[],
    has_endpoints: true,
};

fn plain() -> Service {
    service("a/x", "10.96.0.1")
}

fn internal_local() -> Service {
    Service { internal_traffic_policy: TrafficPolicy::Local, ..plain() }
}

fn node_port() -> Service {
    let mut service = Service { service_type: ServiceType::NodePort, ..plain() };
    service.ports[0].node_port = Some(port_number(30_080));
    service
}

fn external_local() -> Service {
    Service { external_traffic_policy: TrafficPolicy::Local, ..node_port() }
}

fn internal_local_external_cluster() -> Service {
    Service { internal_traffic_policy: TrafficPolicy::Local, ..node_port() }
}

fn both_local() -> Service {
    Service { internal_traffic_policy: TrafficPolicy::Local, ..external_local() }
}

fn external_local_without_frontend() -> Service {
    Service { external_traffic_policy: TrafficPolicy::Local, ..plain() }
}

fn parse(text: &str) -> SliceEndpoint {
    let mut words = text.split_whitespace();
    let last_byte = words.next().unwrap_or_else(|| panic!("{text}: no address"));
    words.fold(endpoint(&format!("10.1.2.{last_byte}")), |endpoint, word| {
        let list =
            |names: &'static str| word.strip_prefix(names).map(|names| names.split(',').collect::<Vec<_>>());
        match (word, list("zones="), list("nodes=")) {
            ("here", ..) => endpoint.on(THIS_NODE),
            ("unready", ..) => endpoint.not_ready(),
            ("terminating", ..) => endpoint.terminating(),
            ("gone", ..) => SliceEndpoint { serving: false, ..endpoint.terminating() },
            (_, Some(zones), _) => endpoint.for_zones(&zones),
            (_, _, Some(nodes)) => endpoint.for_nodes(&nodes),
            _ => panic!("{text}: {word}"),
        }
    })
}

fn check(cases: &[Case]) {
    for case in cases {
        let endpoints = case.endpoints.iter().copied().map(parse).collect();
        let zone = (!case.zone.is_empty()).then(|| case.zone.into());
        let model = model(
            vec![(case.service)()],
            vec![slice("a/s", "x", endpoints)],
            vec![Node { zone, ..node(THIS_NODE) }],
        );
        let port = &model.snapshot().ports[&key("a/x", "")];
        let expected =
            |list: &[u8]| list.iter().map(|byte| format!("10.1.2.{byte}:8080")).collect::<Vec<_>>();
        assert_eq!(addresses(&port.cluster_endpoints), expected(case.cluster), "cluster: {}", case.about);
        assert_eq!(addresses(&port.local_endpoints), expected(case.local), "local: {}", case.about);
        assert_eq!(port.has_endpoints, case.has_endpoints, "has_endpoints: {}", case.about);
    }
}

#[test]
fn zone_hints_keep_traffic_in_this_nodes_zone() {
    const ABCA: &[&str] = &["3 zones=a", "4 zones=b", "5 zones=c", "6 zones=a"];
    check(&[
        Case { about: "in a zone with endpoints", zone: "a", endpoints: ABCA, cluster: &[3, 6], ..BASE },
        Case { about: "no zone label", endpoints: ABCA, cluster: &[3, 4, 5, 6], ..BASE },
        Case {
            about: "no endpoint for this zone",
            zone: "d",
            endpoints: ABCA,
            cluster: &[3, 4, 5, 6],
            ..BASE
        },
        Case {
            about: "one ready endpoint without a hint",
            zone: "a",
            endpoints: &["3 zones=a", "4 zones=b", "5", "6 zones=a"],
            cluster: &[3, 4, 5, 6],
            ..BASE
        },
        Case {
            about: "an unready endpoint without a hint does not matter",
            zone: "a",
            endpoints: &["3 zones=a", "4 zones=b", "5 unready", "6 terminating"],
            cluster: &[3],
            ..BASE
        },
        Case {
            about: "several zones in a hint",
            zone: "c",
            endpoints: &["3 zones=a,b,c", "4 zones=b,c", "5 zones=b,d", "6 zones=c"],
            cluster: &[3, 4, 6],
            ..BASE
        },
        Case {
            about: "one endpoint of the zone is not ready",
            zone: "a",
            endpoints: &["3 zones=a", "4 zones=b", "6 zones=a unready"],
            cluster: &[3],
            ..BASE
        },
        Case {
            about: "no endpoint of the zone is ready",
            zone: "a",
            endpoints: &["3 zones=a unready", "4 zones=b", "5 zones=c", "6 zones=a unready"],
            cluster: &[4, 5],
            ..BASE
        },
    ]);
}

#[test]
fn node_hints_precede_zone_hints() {
    const HINTED: &[&str] =
        &["3 zones=a nodes=n1", "4 zones=b nodes=n2", "5 zones=c nodes=n3", "6 zones=a nodes=n4"];
    const OF_OTHERS: &[&str] = &["3 zones=a nodes=n7", "4 zones=b nodes=n2", "6 zones=a nodes=n4"];
    check(&[
        Case { about: "one hint is for this node", zone: "a", endpoints: HINTED, cluster: &[3], ..BASE },
        Case { about: "node hints do not need a zone", endpoints: HINTED, cluster: &[3], ..BASE },
        Case {
            about: "no hint for this node: by zone",
            zone: "a",
            endpoints: OF_OTHERS,
            cluster: &[3, 6],
            ..BASE
        },
        Case {
            about: "neither node nor zone: all",
            zone: "z",
            endpoints: OF_OTHERS,
            cluster: &[3, 4, 6],
            ..BASE
        },
        Case {
            about: "one ready endpoint without a node hint: by zone",
            zone: "b",
            endpoints: &["3 zones=a nodes=n1", "4 zones=b", "6 zones=b nodes=n4"],
            cluster: &[4, 6],
            ..BASE
        },
        Case {
            about: "the endpoint of this node is not ready: by zone",
            zone: "a",
            endpoints: &["3 zones=a nodes=n1 unready", "4 zones=b nodes=n2", "6 zones=a nodes=n4"],
            cluster: &[6],
            ..BASE
        },
    ]);
}

#[test]
fn policy_local_ignores_hints() {
    const MIXED: &[&str] = &["3 here zones=a", "4 here zones=b", "5 zones=c", "6 zones=a"];
    let cases = [external_local, internal_local_external_cluster, both_local].map(|service| Case {
        about: "cluster by zone, local by node",
        service,
        zone: "a",
        endpoints: MIXED,
        cluster: &[3, 6],
        local: &[3, 4],
        ..BASE
    });
    check(&cases);
}

#[test]
fn a_policy_has_a_list_only_if_traffic_uses_it() {
    const BOTH: &[&str] = &["1 here", "2"];
    check(&[
        Case { about: "plain", endpoints: BOTH, cluster: &[1, 2], ..BASE },
        Case { about: "iTP Local", service: internal_local, endpoints: BOTH, local: &[1], ..BASE },
        Case {
            about: "iTP Local with a node port",
            service: internal_local_external_cluster,
            endpoints: BOTH,
            cluster: &[1, 2],
            local: &[1],
            ..BASE
        },
        Case {
            about: "eTP Local",
            service: external_local,
            endpoints: BOTH,
            cluster: &[1, 2],
            local: &[1],
            ..BASE
        },
        Case {
            about: "both Local",
            service: both_local,
            endpoints: BOTH,
            cluster: &[1, 2],
            local: &[1],
            ..BASE
        },
        Case {
            about: "eTP Local without a frontend for clients outside",
            service: external_local_without_frontend,
            endpoints: BOTH,
            cluster: &[1, 2],
            ..BASE
        },
    ]);
}

#[test]
fn endpoints_of_other_nodes_count_for_has_endpoints() {
    check(&[
        Case { about: "iTP Local, all remote", service: internal_local, endpoints: &["1", "2"], ..BASE },
        Case {
            about: "both Local, all remote",
            service: both_local,
            endpoints: &["1", "2"],
            cluster: &[1, 2],
            ..BASE
        },
        Case {
            about: "iTP Local, all remote terminate",
            service: internal_local,
            endpoints: &["1 terminating"],
            ..BASE
        },
        Case {
            about: "iTP Local, none usable",
            service: internal_local,
            endpoints: &["1 unready", "2 gone", "3 here unready"],
            has_endpoints: false,
            ..BASE
        },
        Case { about: "iTP Local, none", service: internal_local, has_endpoints: false, ..BASE },
    ]);
}

#[test]
fn terminating_endpoints_are_used_only_without_a_ready_one() {
    const MIXED: &[&str] = &["1", "2 here unready", "3 here terminating", "4 terminating"];
    check(&[
        Case { about: "none at all", has_endpoints: false, ..BASE },
        Case { about: "none ready", endpoints: &["1 unready", "2 unready"], has_endpoints: false, ..BASE },
        Case { about: "one ready", endpoints: &["1 unready", "2"], cluster: &[2], ..BASE },
        Case {
            about: "all terminate",
            endpoints: &["1 here terminating", "2 terminating"],
            cluster: &[1, 2],
            ..BASE
        },
        Case { about: "one stopped serving", endpoints: &["1 terminating", "2 gone"], cluster: &[1], ..BASE },
        Case {
            about: "hints do not matter once all terminate",
            zone: "a",
            endpoints: &["1 terminating zones=a", "2 terminating zones=b"],
            cluster: &[1, 2],
            ..BASE
        },
        Case {
            about: "ready elsewhere, terminating here",
            service: external_local,
            endpoints: MIXED,
            cluster: &[1],
            local: &[3],
            ..BASE
        },
        Case {
            about: "only remote ones, terminating",
            service: both_local,
            endpoints: &["1 terminating", "2 terminating"],
            cluster: &[1, 2],
            ..BASE
        },
    ]);
}
