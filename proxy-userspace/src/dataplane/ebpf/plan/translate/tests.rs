//! Flags, counts and ranges of translated service ports.

use super::*;
use crate::model::testing::{cidrs, port_number, resolved_port};

const NONE: u16 = 0;
const OUTSIDE: u16 = flags::MASQUERADE_OUTSIDE;
const BOTH: u16 = flags::MASQUERADE_INSIDE | flags::MASQUERADE_OUTSIDE;

fn node(local_detector: LocalTrafficDetector, masquerade_all: bool) -> NodeView {
    NodeView { local_detector, masquerade_all, ..NodeView::default() }
}

fn value(port: &ResolvedPort, kind: FrontendKind, node: &NodeView, family: IpFamily) -> ServiceValue {
    service_value(1, 1, port, kind, node, family, TableSize::default())
}

#[test]
fn clients_outside_choose_by_a_table_whose_size_follows_their_list() {
    let endpoints = |count: u8| -> Vec<ResolvedEndpoint> {
        let address = |number| ([10, 244, 1, number], 8080).into();
        (0..count).map(|number| ResolvedEndpoint { address: address(number), is_local: true }).collect()
    };
    let port = ResolvedPort {
        cluster_endpoints: endpoints(200),
        local_endpoints: endpoints(3),
        external_policy: TrafficPolicy::Local,
        balance: Balance::Maglev,
        ..resolved_port()
    };
    let size = |port: &ResolvedPort, kind| {
        let value = value(port, kind, &NodeView::default(), IpFamily::V4);
        TableSize::of_flags(value.flags).map(TableSize::entries)
    };
    assert_eq!(size(&port, FrontendKind::NodePort), Some(16_381));
    assert_eq!(size(&port, FrontendKind::ClusterIp), Some(32_749));
    let random = ResolvedPort { balance: Balance::Random, ..port.clone() };
    assert_eq!(size(&random, FrontendKind::NodePort), None);
    let single = ResolvedPort { local_endpoints: endpoints(1), ..port };
    assert_eq!(size(&single, FrontendKind::NodePort), Some(251), "there is nothing to choose");
    let none = ResolvedPort { local_endpoints: Vec::new(), ..single };
    assert_eq!(size(&none, FrontendKind::NodePort), None);
}

#[test]
fn cluster_ip_traffic_of_others_than_local_pods_is_masqueraded() {
    let cidrs = LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16"]));
    let bridge = LocalTrafficDetector::BridgeInterface("cbr0".into());
    for (detector, masquerade_all, v4, v6) in [
        (LocalTrafficDetector::None, false, NONE, NONE),
        (LocalTrafficDetector::None, true, BOTH, BOTH),
        (cidrs.clone(), false, OUTSIDE, NONE),
        (cidrs, true, BOTH, BOTH),
        (bridge, false, OUTSIDE, OUTSIDE),
    ] {
        let node = node(detector, masquerade_all);
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            let port = ResolvedPort { internal_policy: policy, external_policy: policy, ..resolved_port() };
            let flags =
                IpFamily::ALL.map(|family| masquerade_flags(&port, FrontendKind::ClusterIp, &node, family));
            assert_eq!(flags, [v4, v6], "{node:?} {policy:?}");
        }
    }
}

#[test]
fn external_traffic_is_masqueraded_with_policy_cluster_only() {
    let detector = LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16"]));
    for (policy, expected) in [(TrafficPolicy::Cluster, BOTH), (TrafficPolicy::Local, NONE)] {
        let port = ResolvedPort { external_policy: policy, ..resolved_port() };
        for kind in [FrontendKind::NodePort, FrontendKind::ExternalIp, FrontendKind::LoadBalancerIp] {
            for node in [node(LocalTrafficDetector::None, false), node(detector.clone(), true)] {
                assert_eq!(masquerade_flags(&port, kind, &node, IpFamily::V4), expected, "{kind:?} {node:?}");
            }
        }
    }
}

/// A container of docker or libvirt has a network namespace, and an address outside the ranges
/// of pods.
#[test]
fn ranges_that_hold_the_pods_decide_nothing_about_sockets_outside_the_node() {
    let node = NodeView {
        primary_addresses: [(IpFamily::V4, "192.0.2.1".parse().expect("an address"))].into(),
        local_detector: LocalTrafficDetector::Cidrs(cidrs(&["10.244.1.0/24"])),
        ..NodeView::default()
    };
    for (ranges, expected) in [
        (&[][..], 0),
        (&["10.244.1.0/24"], flags::SOURCE_RANGES),
        (&["172.17.0.0/16"], flags::SOURCE_RANGES),
        (&["172.17.0.0/16", "192.0.2.0/24"], flags::SOURCE_RANGES | flags::NODE_IN_RANGES),
        (&["172.17.0.0/16", "0.0.0.0/0"], 0),
    ] {
        let frontend = Frontend {
            kind: FrontendKind::LoadBalancerIp,
            address: Some("198.51.100.1".parse().expect("an address")),
            port: port_number(80),
        };
        let port =
            ResolvedPort { source_ranges: cidrs(ranges), frontends: vec![frontend], ..resolved_port() };
        let ranged = value(&port, FrontendKind::LoadBalancerIp, &node, IpFamily::V4);
        assert_eq!(ranged.flags & !BOTH, expected, "{ranges:?}");
        assert_eq!(depends_on_source(&port, IpFamily::V4), expected != 0, "{ranges:?}");
        let other = value(&port, FrontendKind::ClusterIp, &node, IpFamily::V4);
        assert_eq!(other.flags & flags::SOURCE_RANGES, 0, "{ranges:?}");
    }
}

/// Upstream's short cut past policy Local needs a detector.
#[test]
fn pods_that_cannot_be_recognized_are_left_to_the_links_under_policy_local() {
    let left = flags::SOURCE_RANGES | flags::NODE_IN_RANGES;
    let v4_only = LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16"]));
    let whole = ["10.0.0.0/8", "0.0.0.0/0"];
    for (detector, policy, ranges, expected) in [
        (LocalTrafficDetector::None, TrafficPolicy::Local, &[][..], [left, left]),
        (LocalTrafficDetector::None, TrafficPolicy::Local, &whole, [left, 0]),
        (LocalTrafficDetector::None, TrafficPolicy::Local, &["10.0.0.0/8"], [0, 0]),
        (LocalTrafficDetector::None, TrafficPolicy::Cluster, &[], [0, 0]),
        (v4_only, TrafficPolicy::Local, &[], [0, left]),
    ] {
        let node = node(detector, false);
        let port = ResolvedPort { external_policy: policy, source_ranges: cidrs(ranges), ..resolved_port() };
        let of = |kind, family| value(&port, kind, &node, family).flags & (left | flags::DROP_WHEN_EMPTY);
        for kind in [FrontendKind::NodePort, FrontendKind::ExternalIp] {
            assert_eq!(IpFamily::ALL.map(|family| of(kind, family)), expected, "{node:?} {ranges:?}");
        }
        assert_eq!(of(FrontendKind::ClusterIp, IpFamily::V4), 0);
        let holds_all = source_ranges(&port, &node, IpFamily::V4)
            .contains(&Prefix { addr: Addr::UNSPECIFIED_V4, prefix_len: 96 });
        assert_eq!(holds_all, expected[0] != 0 || ranges == whole);
    }
}

#[test]
fn local_clients_are_recognized_by_source_or_by_link() {
    let (detection, sources) =
        local_detection(&node(LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16", "fd44::/64"])), false));
    let lengths: Vec<u32> = sources.iter().map(|source| source.prefix_len).collect();
    assert_eq!((detection, lengths), (LocalDetection::Source, vec![112, 64]));
    let by_link = node(LocalTrafficDetector::InterfaceNamePrefix("veth".into()), false);
    assert_eq!(local_detection(&by_link), (LocalDetection::Link, BTreeSet::new()));
}
