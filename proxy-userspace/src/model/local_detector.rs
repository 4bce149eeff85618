//! Resolves `detectLocalMode` with the Node.

use ipnet::IpNet;

use super::{DetectLocalMode, IpFamily, LocalTrafficDetector, ModelSettings, Node};

/// Resolves the local detector like upstream's `getLocalDetectors`
/// (`cmd/kube-proxy/app/server_linux.go`). NodeCIDR needs the Node.
pub(super) fn local_traffic_detector(settings: &ModelSettings, node: Option<&Node>) -> LocalTrafficDetector {
    match &settings.detect_local {
        DetectLocalMode::ClusterCidr => by_cidrs(&settings.cluster_cidrs),
        DetectLocalMode::NodeCidr => by_cidrs(node.map_or(&[], |node| &node.pod_cidrs)),
        DetectLocalMode::BridgeInterface(bridge) => LocalTrafficDetector::BridgeInterface(bridge.clone()),
        DetectLocalMode::InterfaceNamePrefix(prefix) => {
            LocalTrafficDetector::InterfaceNamePrefix(prefix.clone())
        }
    }
}

/// Returns the pod CIDRs of the Node that `clusterCIDR` does not contain. Returns none if
/// `clusterCIDR` is not set, or if `detectLocalMode` does not use it.
pub(super) fn pod_cidrs_outside_cluster_cidr(settings: &ModelSettings, node: &Node) -> Vec<IpNet> {
    match local_traffic_detector(settings, None) {
        LocalTrafficDetector::Cidrs(ranges) => {
            let is_outside = |pods: &&IpNet| !ranges.iter().any(|range| range.contains(*pods));
            node.pod_cidrs.iter().filter(is_outside).copied().collect()
        }
        _ => Vec::new(),
    }
}

/// As upstream, only the first range of each family is used.
fn by_cidrs(cidrs: &[IpNet]) -> LocalTrafficDetector {
    let first = |family| cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family).map(IpNet::trunc);
    let cidrs: Vec<_> = IpFamily::ALL.into_iter().filter_map(first).collect();
    if cidrs.is_empty() { LocalTrafficDetector::None } else { LocalTrafficDetector::Cidrs(cidrs) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        NodeAddressType,
        testing::{cidrs, node, settings},
    };

    fn detect(mode: DetectLocalMode, cluster_cidrs: &[&str], node: Option<&Node>) -> LocalTrafficDetector {
        let settings =
            ModelSettings { detect_local: mode, cluster_cidrs: cidrs(cluster_cidrs), ..settings() };
        local_traffic_detector(&settings, node)
    }

    #[test]
    fn cluster_cidr_uses_the_first_range_of_each_family() {
        let ranges = ["10.244.0.0/16", "fd44::/16", "10.9.0.0/16"];
        assert_eq!(
            detect(DetectLocalMode::ClusterCidr, &ranges, None),
            LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16", "fd44::/16"]))
        );
    }

    #[test]
    fn without_a_range_nothing_is_detected() {
        assert_eq!(detect(DetectLocalMode::ClusterCidr, &[], Some(&node("n1"))), LocalTrafficDetector::None);
        assert_eq!(detect(DetectLocalMode::NodeCidr, &["10.244.0.0/16"], None), LocalTrafficDetector::None);
    }

    #[test]
    fn node_cidr_uses_the_ranges_of_the_node() {
        let node = Node { pod_cidrs: cidrs(&["10.244.1.0/24", "fd44:1::/64"]), ..node("n1") };
        assert_eq!(
            detect(DetectLocalMode::NodeCidr, &["10.244.0.0/16"], Some(&node)),
            LocalTrafficDetector::Cidrs(node.pod_cidrs.clone())
        );
    }

    #[test]
    fn interfaces_are_used_as_configured() {
        assert_eq!(
            detect(DetectLocalMode::BridgeInterface("cbr0".into()), &[], None),
            LocalTrafficDetector::BridgeInterface("cbr0".into())
        );
        assert_eq!(
            detect(DetectLocalMode::InterfaceNamePrefix("veth".into()), &[], None),
            LocalTrafficDetector::InterfaceNamePrefix("veth".into())
        );
    }

    #[test]
    fn pod_cidrs_outside_the_cluster_cidr_are_found_by_family() {
        let outside = |mode, cluster_cidrs: &[&str]| {
            let settings =
                ModelSettings { detect_local: mode, cluster_cidrs: cidrs(cluster_cidrs), ..settings() };
            let node = Node { pod_cidrs: cidrs(&["10.244.1.0/24", "fd44:1::/64"]), ..node("n1") };
            pod_cidrs_outside_cluster_cidr(&settings, &node)
        };
        let by_cluster_cidr = |ranges: &[&str]| outside(DetectLocalMode::ClusterCidr, ranges);
        assert!(by_cluster_cidr(&["10.244.0.0/16", "fd44::/16"]).is_empty());
        assert_eq!(by_cluster_cidr(&["10.244.0.0/16"]), cidrs(&["fd44:1::/64"]));
        assert_eq!(by_cluster_cidr(&["10.245.0.0/16", "fd44::/16"]), cidrs(&["10.244.1.0/24"]));
        assert!(by_cluster_cidr(&[]).is_empty());
        assert!(outside(DetectLocalMode::NodeCidr, &["10.245.0.0/16"]).is_empty());
    }

    #[test]
    fn families_are_those_of_the_pods_or_else_of_the_addresses() {
        let address = |text: &str| (NodeAddressType::InternalIp, text.parse().expect("an address"));
        let addresses = vec![address("192.0.2.1"), address("2001:db8::1")];
        let six = Node { pod_cidrs: cidrs(&["fd44:1::/64"]), addresses, ..node("n1") };
        assert_eq!(six.families(), [IpFamily::V6].into());
        assert_eq!(Node { pod_cidrs: Vec::new(), ..six }.families(), IpFamily::ALL.into());
    }
}
