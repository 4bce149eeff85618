//! How this node is resolved.

use std::time::Duration;

use super::*;
use crate::model::{
    DetectLocalMode, DirectScope, InterfaceGlobs, SourceAddress, XdpFeatures,
    testing::{facts, ip, link, node, settings},
};

fn names(view: &NodeView) -> Vec<&str> {
    view.links.values().map(|link| &*link.name).collect()
}

fn some_links() -> NodeFacts {
    let links = vec![
        Link { is_loopback: true, ..link(1, "lo") },
        link(2, "eth0"),
        Link { header: LinkHeader::Ip, ..link(3, "wg0") },
        Link { header: LinkHeader::Other(32), ..link(4, "ib0") },
        link(5, "cbr0"),
        Link { master: Some(5), ..link(6, "veth1") },
        Link { master: Some(9), ..link(7, "veth2") },
        Link { is_ifb: true, ..link(8, "ifb0") },
    ];
    NodeFacts { links, ..NodeFacts::default() }
}

#[test]
fn all_links_except_loopback_ifbs_and_unsupported_ones_are_served() {
    let view = node_view(&settings(), None, &some_links());
    assert_eq!(names(&view), ["eth0", "wg0", "cbr0", "veth1", "veth2"]);
    assert!(view.has_unserved_links, "ib0");
    assert_eq!(view.links[&3].framing, Framing::Ip);
    assert!(view.local_links.is_empty());
}

#[test]
fn links_that_lead_out_of_the_node_may_have_an_xdp_program() {
    let addresses = [
        (2, "192.0.2.11/24"),
        (3, "192.0.2.12/24"),
        (5, "10.244.1.1/24"),
        (6, "10.244.1.1/32"),
        (7, "192.0.2.13/24"),
        (8, "192.0.3.13/24"),
    ];
    let source = |(link, address): (u32, &str)| {
        let net: ipnet::IpNet = address.parse().unwrap();
        SourceAddress { link, address: net.addr(), prefix_len: net.prefix_len() }
    };
    let veth = Some(Device::Veth);
    let xdp = XdpFeatures { runs_programs: true, takes_frames: false };
    let links = vec![
        Link { xdp, ..link(2, "eth0") },
        Link { device: veth, xdp, ..link(3, "eth1") },
        Link { xdp, ..link(4, "eth2") },
        Link { device: None, xdp, ..link(5, "cbr0") },
        Link { device: veth, xdp, ..link(6, "veth1") },
        Link { xdp, ..link(7, "eth3") },
        Link { device: None, vlan: Some(vlan_of(7, 10)), ..link(8, "eth3.10") },
    ];
    let direct = |filtered: &[&str]| LinkPath::Direct {
        scope: DirectScope::Learned,
        lease: Duration::ZERO,
        without: BTreeSet::new(),
        filtered: filtered.iter().map(|name| Arc::from(*name)).collect(),
    };
    let source_addresses = addresses.map(source).to_vec();
    let mut facts = NodeFacts { links, source_addresses, link_path: direct(&[]), ..NodeFacts::default() };
    let with = |xdp, facts: &NodeFacts| {
        let view = node_view(&ModelSettings { xdp, ..settings() }, None, facts);
        let links = view.xdp_links.into_iter();
        links.map(|(index, link)| (index, link.mode, link.forwards)).collect::<Vec<_>>()
    };
    let (generic, native) = (XdpMode::Generic, XdpMode::Native);
    assert_eq!(with(XdpPolicy::Off, &facts), []);
    assert_eq!(with(XdpPolicy::Auto, &facts), [(2, native, true)]);
    assert_eq!(with(XdpPolicy::Native, &facts), [(2, native, true)], "nobody takes frames of the veth");
    facts.links[1].xdp.takes_frames = true;
    assert_eq!(with(XdpPolicy::Auto, &facts), [(2, native, true)]);
    assert_eq!(with(XdpPolicy::Native, &facts), [(2, native, true), (3, native, true)]);
    assert_eq!(with(XdpPolicy::Generic, &facts), [(2, generic, true), (3, generic, true)]);
    facts.link_path = direct(&["eth1"]);
    assert_eq!(with(XdpPolicy::Generic, &facts), [(2, generic, true), (3, generic, false)]);
    facts.link_path = LinkPath::Programs;
    assert_eq!(with(XdpPolicy::Generic, &facts), [(2, generic, false), (3, generic, false)]);
}

fn vlan_of(link: u32, id: u16) -> Vlan {
    Vlan { link, id, protocol: 0x8100 }
}

/// Packets would be on one link for the programs, and on another for the stack. The direct path
/// needs the same link for both.
#[test]
fn ports_of_a_bond_and_links_beneath_vlans_leave_packets_to_the_link_above() {
    let vlan = |link, id| Some(vlan_of(link, id));
    let links = vec![
        Link { master: Some(4), ..link(2, "eth0") },
        Link { master: Some(4), header: LinkHeader::Other(32), ..link(3, "ib0") },
        Link { device: None, is_bond: true, ..link(4, "bond0") },
        Link { device: None, vlan: vlan(4, 10), ..link(5, "bond0.10") },
        Link { device: None, vlan: vlan(4, 11), ..link(6, "bond0.11") },
        Link { master: Some(8), ..link(7, "veth1") },
        Link { device: None, ..link(8, "br0") },
        Link { device: None, vlan: vlan(7, 12), master: Some(4), ..link(9, "veth1.12") },
    ];
    let facts = NodeFacts { links, ..facts(&[]) };
    let view = node_view(&settings(), None, &facts);
    assert_eq!(names(&view), ["bond0", "bond0.10", "bond0.11", "veth1", "br0"]);
    assert!(!view.has_unserved_links);
    assert_eq!(view.vlans, BTreeSet::from([vlan_of(4, 10), vlan_of(4, 11), vlan_of(7, 12)]));
    assert_eq!(view.bond_ports, BTreeMap::from([(2, 4), (3, 4), (9, 4)]));
    let except = vec!["bond0".parse().unwrap(), "bond0.11".parse().unwrap()];
    let interfaces = InterfaceGlobs { only: Vec::new(), except };
    let view = node_view(&ModelSettings { interfaces, ..settings() }, None, &facts);
    assert_eq!(names(&view), ["eth0", "bond0.10", "veth1", "br0", "veth1.12"]);
    assert!(view.bond_ports.is_empty(), "ports do not wait for a bond that is not served");
    assert_eq!(view.vlans, BTreeSet::from([vlan_of(4, 10), vlan_of(7, 12)]));
}

#[test]
fn excluded_links_are_not_served_even_if_they_are_included() {
    let glob = |glob: &str| glob.parse().unwrap();
    let interfaces =
        InterfaceGlobs { only: vec![glob("veth*"), glob("eth[0-9]"), glob("lo")], except: vec![glob("*2")] };
    let view = node_view(&ModelSettings { interfaces, ..settings() }, None, &some_links());
    assert_eq!(names(&view), ["eth0", "veth1"]);
}

#[test]
fn packets_are_handed_to_peers_of_links_where_nothing_of_others_would_see_them() {
    let xdp = XdpFeatures::default();
    let links = vec![
        Link { hands_to_peer: true, ..link(2, "eth0") },
        Link { hands_to_peer: true, ..link(3, "veth1") },
        Link { hands_to_peer: true, master: Some(2), ..link(4, "veth2") },
        Link { hands_to_peer: true, ..link(5, "veth3") },
        Link { hands_to_peer: true, xdp: XdpFeatures { takes_frames: true, ..xdp }, ..link(6, "veth4") },
        Link { device: None, vlan: Some(vlan_of(2, 10)), ..link(7, "eth0.10") },
    ];
    let peers = |lease, without: &[&str], filtered: &[&str]| {
        let [without, filtered] =
            [without, filtered].map(|names| names.iter().map(|name| Arc::from(*name)).collect());
        let link_path = LinkPath::Direct { scope: DirectScope::Learned, lease, without, filtered };
        let address =
            |link, address: &str, prefix_len| SourceAddress { link, address: ip(address), prefix_len };
        let source_addresses = vec![address(2, "192.0.2.11", 24), address(5, "10.244.1.1", 32)];
        let facts = NodeFacts { links: links.clone(), link_path, source_addresses, ..NodeFacts::default() };
        node_view(&settings(), None, &facts).peer_links.into_iter().collect::<Vec<_>>()
    };
    let watched = Duration::from_secs(8);
    assert_eq!(
        peers(watched, &[], &[]),
        [3, 5],
        "eth0 leads out, veth2 is a port, and veth4 may have XDP behind it"
    );
    assert_eq!(peers(watched, &["veth1"], &["veth3"]), [0_u32; 0]);
    assert_eq!(peers(Duration::ZERO, &[], &[]), [0_u32; 0], "rules of others");
    let facts = NodeFacts { links: links.clone(), ..NodeFacts::default() };
    assert!(node_view(&settings(), None, &facts).peer_links.is_empty());
}

#[test]
fn direct_path_is_for_ethernet_links_without_filters_of_others() {
    let direct = |without: &[&str]| {
        let without = without.iter().map(|name| (*name).into()).collect();
        let facts = NodeFacts {
            link_path: LinkPath::Direct {
                scope: DirectScope::Learned,
                lease: Duration::ZERO,
                without,
                filtered: BTreeSet::new(),
            },
            ..some_links()
        };
        node_view(&settings(), None, &facts).direct_links.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(direct(&[]), [2, 5, 6, 7]);
    assert_eq!(direct(&["veth1", "eth1"]), [2, 5, 7]);
    assert!(node_view(&settings(), None, &some_links()).direct_links.is_empty());
}

#[test]
fn programs_begin_to_masquerade_with_the_direct_path_and_go_on() {
    let ports = PortRange { first: 1_024, last: 29_999 };
    let settings = |with_direct_path| ModelSettings {
        masquerade_ports: Some(ports),
        masquerades_with_direct_path: with_direct_path,
        ..settings()
    };
    let direct = LinkPath::Direct {
        scope: DirectScope::Learned,
        lease: Duration::ZERO,
        without: BTreeSet::new(),
        filtered: BTreeSet::new(),
    };
    let netfilter = LinkPath::Netfilter { why: "a rule".into() };
    for (with_direct_path, path, so_far, expected) in [
        (true, &LinkPath::Programs, false, None),
        (true, &direct, false, Some(ports)),
        (true, &LinkPath::Programs, true, Some(ports)),
        (true, &netfilter, false, None),
        (true, &netfilter, true, Some(ports)),
        (false, &netfilter, false, Some(ports)),
    ] {
        let facts = NodeFacts { links: vec![link(2, "eth0")], link_path: path.clone(), ..facts(&[]) };
        let view = node_view(&settings(with_direct_path), None, &facts);
        assert_eq!(view.masquerade_ports(so_far), expected, "{path:?}");
    }
}

#[test]
fn netfilter_takes_other_ports_than_programs_of_this_process_or_an_earlier_one() {
    let range = |first, last| Some(PortRange { first, last });
    let ports = |of_process, of_former| {
        let settings = ModelSettings { masquerade_ports: of_process, ..settings() };
        let facts = NodeFacts { former_programs_ports: of_former, ..facts(&[]) };
        node_view(&settings, None, &facts).netfilter_ports()
    };
    assert_eq!(ports(None, None), None);
    for programs in [range(1_024, 29_999), range(1_024, 32_767)] {
        assert_eq!(ports(programs, None), range(32_768, 65_535));
        assert_eq!(ports(None, programs), range(32_768, 65_535));
    }
    assert_eq!(ports(None, range(1_024, 65_535)), None, "no ports are left");
}

#[test]
fn programs_masquerade_of_their_own_accord_only_with_ports_and_links_for_all() {
    let masquerade_ports = Some(PortRange { first: 1_024, last: 29_999 });
    let masquerades = |facts: NodeFacts| {
        [true, false].map(|masquerades_with_direct_path| {
            let settings = ModelSettings { masquerade_ports, masquerades_with_direct_path, ..settings() };
            node_view(&settings, None, &facts).masquerade.is_some()
        })
    };
    let links = vec![link(2, "eth0")];
    let local_ports = |first, last| Some(PortRange { first, last });
    let facts = NodeFacts { links, local_ports: local_ports(32_768, 60_999), ..facts(&[]) };
    assert_eq!(masquerades(facts.clone()), [true, true]);
    assert_eq!(masquerades(some_links()), [false, true], "ib0 has no program");
    assert_eq!(masquerades(NodeFacts { local_ports: local_ports(1_024, 65_535), ..facts }), [false, true]);
}

#[test]
fn packets_of_local_pods_arrive_on_the_bridge_its_ports_or_named_links() {
    let local = |detect_local| {
        let interfaces = InterfaceGlobs { only: vec!["eth0".parse().unwrap()], except: Vec::new() };
        let settings = ModelSettings { detect_local, interfaces, ..settings() };
        node_view(&settings, None, &some_links()).local_links.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(local(DetectLocalMode::BridgeInterface("cbr0".into())), [5, 6]);
    assert_eq!(local(DetectLocalMode::InterfaceNamePrefix("veth".into())), [6, 7]);
}

#[test]
fn ports_of_bridges_are_listed_with_the_address_of_the_bridge() {
    let address = MacAddress([2, 0, 0, 0, 0, 5]);
    let mut facts = some_links();
    let bridge = facts.links.iter_mut().find(|link| &*link.name == "cbr0").unwrap();
    bridge.bridge_address = Some(address);
    let view = node_view(&settings(), None, &facts);
    assert_eq!(view.bridge_ports, BTreeMap::from([(6, address)]));
}

#[test]
fn internal_addresses_of_the_node_object_precede_external_ones() {
    let addresses = vec![
        (NodeAddressType::ExternalIp, ip("203.0.113.1")),
        (NodeAddressType::InternalIp, ip("192.168.57.11")),
        (NodeAddressType::InternalIp, ip("192.168.57.12")),
        (NodeAddressType::ExternalIp, ip("2001:db8::1")),
    ];
    let view = node_view(&settings(), Some(&Node { addresses, ..node("n1") }), &NodeFacts::default());
    assert_eq!(view.primary_addresses[&IpFamily::V4], ip("192.168.57.11"));
    assert_eq!(view.primary_addresses[&IpFamily::V6], ip("2001:db8::1"));
}

#[test]
fn without_a_node_object_the_primary_address_is_the_kernels() {
    let facts = facts(&[
        ("cali1", "10.244.1.1/32"),
        ("eth0", "192.168.57.11/24"),
        ("lo", "127.0.0.1/8"),
        ("lo", "10.0.0.9/8"),
    ]);
    let view = node_view(&settings(), None, &facts);
    assert_eq!(view.primary_addresses.into_iter().collect::<Vec<_>>(), [(IpFamily::V4, ip("192.168.57.11"))]);
}

#[test]
fn all_addresses_of_the_kernel_are_local() {
    let view = node_view(&settings(), None, &facts(&[("lo", "127.0.0.1/8"), ("eth0", "fd57::11/64")]));
    assert_eq!(view.local_addresses.into_iter().collect::<Vec<_>>(), ["127.0.0.1", "fd57::11"].map(ip));
}

#[test]
fn a_node_that_is_being_deleted_is_marked() {
    let node = Node { being_deleted: true, ..node("n1") };
    assert!(node_view(&settings(), Some(&node), &NodeFacts::default()).being_deleted);
}
