//! Selects the node's addresses on which node ports are served, by `nodePortAddresses`.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::{IpAddrRange, IpNet, Ipv4AddrRange, Ipv6AddrRange};

use super::{IpFamily, ModelSettings, Node, NodePortAddresses, node_view::own_ip};

/// The largest range that is local by route and is served, in bits of the host part: 256 addresses.
/// The maps and sets for node ports hold single addresses.
const LARGEST_ROUTE: u8 = 8;
/// The most addresses that are served because of routes. The map `node_addresses` has room for
/// 4,096 by default.
const MAX_ROUTED: usize = 1024;

/// Selects addresses like upstream's `NodePortAddresses.GetNodeIPs`
/// (`pkg/proxy/util/nodeport_addresses.go`): a family without a range serves all its addresses,
/// even if the other family has a range.
///
/// If a family serves all its addresses, upstream matches the address type `local`, which includes
/// addresses that are local by route. So these are selected too.
pub(super) fn node_port_addresses(
    settings: &ModelSettings,
    node: Option<&Node>,
    local: &BTreeSet<IpAddr>,
    local_routes: &[IpNet],
) -> BTreeSet<IpAddr> {
    let ranges = Ranges::new(settings, node);
    let has_loopback = settings.loopback_node_ports;
    let local = local.iter().copied().filter(|address| has_loopback || !address.is_loopback());
    let served = local.filter(|address| ranges.contain(*address));
    let every = local_routes.iter().filter(|route| ranges.match_all(IpFamily::of(route.addr())));
    served.chain(routed(every)).collect()
}

/// Returns the families in which all addresses are selected, including those added later.
pub(super) fn families_with_every_address(
    settings: &ModelSettings,
    node: Option<&Node>,
) -> BTreeSet<IpFamily> {
    let ranges = Ranges::new(settings, node);
    IpFamily::ALL.into_iter().filter(|family| ranges.match_all(*family)).collect()
}

/// Returns the addresses in the ranges that are local by route, as far as they are served: see
/// [`LARGEST_ROUTE`] and [`MAX_ROUTED`].
fn routed<'a>(routes: impl Iterator<Item = &'a IpNet>) -> impl Iterator<Item = IpAddr> {
    let is_small = |route: &&IpNet| route.max_prefix_len() - route.prefix_len() <= LARGEST_ROUTE;
    let addresses = |route: &IpNet| match route {
        IpNet::V4(route) => IpAddrRange::V4(Ipv4AddrRange::new(route.network(), route.broadcast())),
        IpNet::V6(route) => IpAddrRange::V6(Ipv6AddrRange::new(route.network(), route.broadcast())),
    };
    routes.filter(is_small).flat_map(addresses).take(MAX_ROUTED)
}

/// The configured ranges of both families.
struct Ranges(Vec<IpNet>);

impl Ranges {
    /// As upstream, `primary` stands for `bindAddress` or the addresses in the Node object, as
    /// ranges. Loopback addresses are not used.
    fn new(settings: &ModelSettings, node: Option<&Node>) -> Self {
        Self(match &settings.node_port_addresses {
            NodePortAddresses::All => Vec::new(),
            NodePortAddresses::Cidrs(cidrs) => cidrs.clone(),
            NodePortAddresses::Primary { cidrs } => {
                let own = IpFamily::ALL.into_iter().filter_map(|family| own_ip(settings, node, family));
                own.filter(|ip| !ip.is_loopback()).map(IpNet::from).chain(cidrs.iter().copied()).collect()
            }
        })
    }

    fn of_family(&self, family: IpFamily) -> impl Iterator<Item = &IpNet> {
        self.0.iter().filter(move |range| IpFamily::of(range.addr()) == family)
    }

    /// Upstream's `MatchAll`.
    fn match_all(&self, family: IpFamily) -> bool {
        let mut ranges = self.of_family(family).peekable();
        ranges.peek().is_none() || ranges.any(|range| range.prefix_len() == 0)
    }

    fn contain(&self, address: IpAddr) -> bool {
        let family = IpFamily::of(address);
        self.match_all(family) || self.of_family(family).any(|range| range.contains(&address))
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
        node_port_addresses(settings, node, &local, &[]).iter().map(ToString::to_string).collect()
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
            let served = node_port_addresses(&settings, None, &local, &[]);
            assert_eq!(served, expected.iter().map(|address| ip(address)).collect());
        }
    }

    #[test]
    fn addresses_that_are_local_by_route_are_served_where_all_addresses_are() {
        let routes = cidrs(&["192.0.2.0/30", "198.51.100.7/32", "10.64.0.0/23", "2001:db8::7/128"]);
        let v4 = ["192.0.2.0", "192.0.2.1", "192.0.2.2", "192.0.2.3", "198.51.100.7"];
        let whole = NodePortAddresses::Cidrs(cidrs(&["0.0.0.0/0", "fd57::/64"]));
        let some = NodePortAddresses::Cidrs(cidrs(&["192.0.2.0/24", "2001:db8::/64"]));
        for (addresses, expected) in [
            (NodePortAddresses::All, [&v4[..], &["2001:db8::7"]].concat()),
            (whole, v4.to_vec()),
            (some, Vec::new()),
        ] {
            let settings = ModelSettings { node_port_addresses: addresses, ..testing::settings() };
            let served = node_port_addresses(&settings, None, &BTreeSet::new(), &routes);
            assert_eq!(served, expected.into_iter().map(ip).collect());
        }
    }

    #[test]
    fn routes_do_not_fill_the_map_of_addresses() {
        let routes: Vec<IpNet> =
            (0..9).map(|third| format!("192.0.{third}.0/24").parse().expect("a range")).collect();
        let served = node_port_addresses(&testing::settings(), None, &BTreeSet::new(), &routes);
        assert_eq!(served.len(), MAX_ROUTED);
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
    fn a_family_without_a_range_or_with_the_widest_one_has_every_address() {
        let (both, v4, v6) = (IpFamily::ALL.to_vec(), vec![IpFamily::V4], vec![IpFamily::V6]);
        for (ranges, expected) in [
            (vec![], both.clone()),
            (vec!["0.0.0.0/0", "::/0"], both),
            (vec!["192.168.57.0/24"], v6),
            (vec!["192.168.57.0/24", "0.0.0.0/0", "fd57::/64"], v4),
            (vec!["192.168.57.0/24", "fd57::/64"], vec![]),
        ] {
            let node_port_addresses = NodePortAddresses::Cidrs(cidrs(&ranges));
            let settings = ModelSettings { node_port_addresses, ..testing::settings() };
            let families = families_with_every_address(&settings, None);
            assert_eq!(Vec::from_iter(families), expected, "{ranges:?}");
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
            Vec::from_iter(node_port_addresses(&settings, Some(&node), &local, &[])),
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
