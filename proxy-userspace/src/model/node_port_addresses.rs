//! Selects the node's addresses on which node ports are served, by `nodePortAddresses`.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{IpFamily, ModelSettings, Node, NodePortAddresses, node_view::own_ip};

/// Selects addresses like upstream's `NodePortAddresses.GetNodeIPs`
/// (`pkg/proxy/util/nodeport_addresses.go`): a family without a range serves all its addresses,
/// even if the other family has a range.
pub(super) fn node_port_addresses(
    settings: &ModelSettings,
    node: Option<&Node>,
    local: &BTreeSet<IpAddr>,
) -> BTreeSet<IpAddr> {
    let ranges = ranges(settings, node);
    let served = |address: &IpAddr| {
        let mut of_family =
            ranges.iter().filter(|range| IpFamily::of(range.addr()) == IpFamily::of(*address)).peekable();
        of_family.peek().is_none() || of_family.any(|range| range.contains(address))
    };
    let has_loopback = settings.loopback_node_ports;
    local.iter().copied().filter(|address| has_loopback || !address.is_loopback()).filter(served).collect()
}

/// As upstream, `primary` stands for `bindAddress` or the addresses in the Node object, as ranges.
/// Loopback addresses are not used.
fn ranges(settings: &ModelSettings, node: Option<&Node>) -> Vec<IpNet> {
    match &settings.node_port_addresses {
        NodePortAddresses::All => Vec::new(),
        NodePortAddresses::Cidrs(cidrs) => cidrs.clone(),
        NodePortAddresses::Primary { cidrs } => {
            let own = IpFamily::ALL.into_iter().filter_map(|family| own_ip(settings, node, family));
            own.filter(|ip| !ip.is_loopback()).map(IpNet::from).chain(cidrs.iter().copied()).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        NodeAddressType,
        testing::{self, cidrs, ip, node},
    };

    const LOCAL: [&str; 6] =
        ["127.0.0.1", "::1", "192.168.57.11", "192.168.57.111", "10.244.1.1", "fd57::11"];

    fn served(settings: &NodePortAddresses, node: Option<&Node>) -> Vec<String> {
        let local = LOCAL.into_iter().map(ip).collect();
        let settings = &ModelSettings { node_port_addresses: settings.clone(), ..testing::settings() };
        node_port_addresses(settings, node, &local).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unset_serves_all_addresses_including_loopback() {
        assert_eq!(served(&NodePortAddresses::All, None).len(), LOCAL.len());
    }

    #[test]
    fn loopback_is_not_served_where_it_is_off_even_if_a_range_names_it() {
        let local = LOCAL.into_iter().map(ip).collect();
        let ranges = NodePortAddresses::Cidrs(cidrs(&["127.0.0.1/32", "192.168.57.0/24", "::/0"]));
        for (addresses, expected) in [
            (NodePortAddresses::All, &LOCAL[2..]),
            (ranges, &["192.168.57.11", "192.168.57.111", "fd57::11"]),
        ] {
            let settings = ModelSettings {
                node_port_addresses: addresses,
                loopback_node_ports: false,
                ..testing::settings()
            };
            let served = node_port_addresses(&settings, None, &local);
            assert_eq!(served, expected.iter().map(|address| ip(address)).collect());
        }
    }

    #[test]
    fn ranges_restrict_each_family_separately() {
        for (ranges, expected) in [
            (vec!["192.168.57.0/28"], vec!["192.168.57.11", "::1", "fd57::11"]),
            (vec!["192.168.57.0/24", "fd57::/64"], vec!["192.168.57.11", "192.168.57.111", "fd57::11"]),
            (vec!["127.0.0.0/8", "::1/128"], vec!["127.0.0.1", "::1"]),
            (
                vec!["0.0.0.0/0", "1.2.3.0/24", "fd00::/64"],
                vec!["10.244.1.1", "127.0.0.1", "192.168.57.11", "192.168.57.111"],
            ),
            (vec!["172.16.0.0/12", "fd00::/64"], vec![]),
        ] {
            assert_eq!(served(&NodePortAddresses::Cidrs(cidrs(&ranges)), None), expected, "{ranges:?}");
        }
    }

    #[test]
    fn primary_serves_the_address_of_the_node_object_in_each_family() {
        let addresses = ["192.168.57.11", "fd57::11", "192.168.57.111"].map(ip);
        let addresses = addresses.map(|ip| (NodeAddressType::InternalIp, ip)).to_vec();
        let node = Node { addresses, ..node("n1") };
        let primary = |ranges: &[&str]| NodePortAddresses::Primary { cidrs: cidrs(ranges) };
        assert_eq!(served(&primary(&[]), Some(&node)), ["192.168.57.11", "fd57::11"]);
        assert_eq!(
            served(&primary(&["127.0.0.0/8"]), Some(&node)),
            ["127.0.0.1", "192.168.57.11", "fd57::11"]
        );
    }

    #[test]
    fn primary_is_the_bind_address_if_it_is_set() {
        let addresses = vec![(NodeAddressType::InternalIp, ip("192.168.57.11"))];
        let node = Node { addresses, ..node("n1") };
        let settings = ModelSettings {
            bind_address: Some(ip("192.168.57.111")),
            node_port_addresses: NodePortAddresses::Primary { cidrs: Vec::new() },
            ..testing::settings()
        };
        let local = ["192.168.57.11", "192.168.57.111"].into_iter().map(ip).collect();
        assert_eq!(
            Vec::from_iter(node_port_addresses(&settings, Some(&node), &local)),
            [ip("192.168.57.111")]
        );
    }

    #[test]
    fn primary_serves_all_addresses_of_a_family_that_the_node_object_lacks() {
        let addresses = vec![(NodeAddressType::InternalIp, ip("192.168.57.11"))];
        let node = Node { addresses, ..node("n1") };
        let primary = NodePortAddresses::Primary { cidrs: Vec::new() };
        assert_eq!(served(&primary, Some(&node)), ["192.168.57.11", "::1", "fd57::11"]);
        assert_eq!(served(&primary, None).len(), LOCAL.len());
    }
}
