//! The addresses of this node with which masqueraded packets leave on each link.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{IpFamily, NodeFacts, SourceAddress};

/// Returns the address for each of these links and the subnet of the endpoint. The subnet with
/// prefix length 0 is for all other endpoints.
///
/// The choice follows the kernel's for `masquerade`: an address of the link (`inet_select_addr` in
/// `net/ipv4/devinet.c`), first one in the subnet of the endpoint; without one on the link, the
/// first of the other links.
pub(super) fn masquerade_addresses(
    links: impl Iterator<Item = u32>,
    facts: &NodeFacts,
) -> BTreeMap<(u32, IpNet), IpAddr> {
    let mut of_links: BTreeMap<u32, Vec<&SourceAddress>> = BTreeMap::new();
    for source in &facts.source_addresses {
        of_links.entry(source.link).or_default().push(source);
    }
    let first_of_family = |sources: &mut dyn Iterator<Item = &&SourceAddress>, family| {
        sources.map(|source| source.address).find(|address| IpFamily::of(*address) == family)
    };
    let anywhere = IpFamily::ALL.map(|family| first_of_family(&mut of_links.values().flatten(), family));
    let mut addresses = BTreeMap::new();
    for link in links {
        let own = of_links.get(&link).map_or(&[][..], Vec::as_slice);
        for (family, other) in IpFamily::ALL.into_iter().zip(anywhere) {
            let everywhere = IpNet::new_assert(family.unspecified(), 0);
            let default = first_of_family(&mut own.iter(), family).or(other);
            addresses.extend(default.map(|address| ((link, everywhere), address)));
        }
        for source in own {
            // The first address of a subnet counts.
            if let Ok(subnet) = IpNet::new(source.address, source.prefix_len) {
                addresses.entry((link, subnet.trunc())).or_insert(source.address);
            }
        }
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::ip;

    fn source(link: u32, address: &str) -> SourceAddress {
        let net: IpNet = address.parse().unwrap();
        SourceAddress { link, address: net.addr(), prefix_len: net.prefix_len() }
    }

    /// Returns the address for an endpoint behind a link, as the trie in the kernel finds it.
    fn chosen(addresses: &BTreeMap<(u32, IpNet), IpAddr>, link: u32, endpoint: &str) -> Option<IpAddr> {
        let endpoint = ip(endpoint);
        let matching = addresses.iter().filter(|((of, subnet), _)| *of == link && subnet.contains(&endpoint));
        matching.max_by_key(|((_, subnet), _)| subnet.prefix_len()).map(|(_, address)| *address)
    }

    #[test]
    fn the_subnet_of_the_endpoint_then_the_link_then_another_link_has_the_address() {
        let source_addresses = vec![
            source(2, "192.0.2.11/24"),
            source(2, "198.51.100.11/24"),
            source(2, "198.51.100.12/24"),
            source(3, "10.244.1.1/24"),
            source(2, "fd57::11/64"),
        ];
        let facts = NodeFacts { source_addresses, ..NodeFacts::default() };
        let addresses = masquerade_addresses([2, 3, 4].into_iter(), &facts);
        for (link, endpoint, expected) in [
            (2, "203.0.113.1", "192.0.2.11"),
            (2, "198.51.100.9", "198.51.100.11"),
            (3, "10.244.1.5", "10.244.1.1"),
            (3, "10.244.2.5", "10.244.1.1"),
            (4, "10.244.2.5", "192.0.2.11"),
            (3, "fd44::1", "fd57::11"),
        ] {
            assert_eq!(chosen(&addresses, link, endpoint), Some(ip(expected)), "{link} {endpoint}");
        }
        assert_eq!(chosen(&addresses, 5, "10.244.2.5"), None, "this link is not served");
    }
}
