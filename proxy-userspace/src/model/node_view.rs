//! Resolves this node from the Node object, the configuration, and the kernel's links and
//! addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{
    Device, Framing, IpFamily, Link, LinkHeader, LinkPath, LocalTrafficDetector, MacAddress, Masquerade,
    ModelSettings, Node, NodeAddressType, NodeFacts, NodeView, PortRange, ServedLink, SourceAddress, XdpLink,
    XdpMode, XdpPolicy,
    local_detector::local_traffic_detector,
    masquerade_addresses::masquerade_addresses,
    node_port_addresses::{families_with_every_address, node_port_addresses},
};
use crate::net::TUNNEL_LINK;

/// Resolves this node.
pub(super) fn node_view(settings: &ModelSettings, node: Option<&Node>, facts: &NodeFacts) -> NodeView {
    let local_addresses = facts.addresses.iter().map(|entry| entry.address).collect();
    let primary =
        |family| Some((family, own_ip(settings, node, family).or_else(|| kernel_ip(facts, family))?));
    let local_detector = local_traffic_detector(settings, node);
    let links = served_links(settings, facts);
    let has_unserved_links =
        facts.links.iter().any(|link| may_serve(settings, link) && framing(settings, link).is_none());
    let masquerade = masquerade_ports(settings, facts, has_unserved_links).map(|ports| Masquerade {
        ports,
        with_direct_path: settings.masquerades_with_direct_path,
        addresses: masquerade_addresses(links.keys().copied(), facts),
    });
    let direct_links = direct_links(&links, &facts.link_path);
    NodeView {
        xdp_links: xdp_links(settings, &links, &direct_links, facts),
        direct_links,
        node_port_addresses: node_port_addresses(settings, node, &local_addresses, &facts.local_routes),
        every_node_port_address: families_with_every_address(settings, node),
        local_addresses,
        local_routes: facts.local_routes.clone(),
        primary_addresses: IpFamily::ALL.into_iter().filter_map(primary).collect(),
        links,
        has_unserved_links,
        link_path: facts.link_path.clone(),
        socket_scope: facts.socket_scope.clone(),
        exempt_addresses: facts.exempt_addresses.clone(),
        local_links: local_links(&local_detector, facts),
        bridge_ports: bridge_ports(facts),
        local_detector,
        service_cidrs: Vec::new(),
        tunnel: None,
        masquerade_all: settings.masquerade_all,
        masquerade,
        former_programs_ports: facts.former_programs_ports,
        being_deleted: node.is_some_and(|node| node.being_deleted),
    }
}

/// Returns the source ports of the flows that the programs masquerade, if they may. Unless they
/// must, they leave it to netfilter where it needs more than they do: packets that leave on an
/// unserved link pass no program, and sockets of the node would lose their own ports.
fn masquerade_ports(
    settings: &ModelSettings,
    facts: &NodeFacts,
    has_unserved_links: bool,
) -> Option<PortRange> {
    let ports = settings.masquerade_ports?;
    let takes_ports = facts.local_ports.is_some_and(|local| ports.common(local).is_some());
    let is_possible = !settings.masquerades_with_direct_path || !has_unserved_links && !takes_ports;
    is_possible.then_some(ports)
}

/// Upstream's `detectNodeIPs` (`cmd/kube-proxy/app/server.go`) for one family: returns
/// `bindAddress`, otherwise the address in the Node object.
pub(super) fn own_ip(settings: &ModelSettings, node: Option<&Node>, family: IpFamily) -> Option<IpAddr> {
    let bind_address = settings.bind_address.filter(|address| IpFamily::of(*address) == family);
    bind_address.or_else(|| node_ip(node?, family))
}

/// Upstream's `GetNodeHostIPs` (`pkg/util/node/node.go`) for one family: returns the first internal
/// address, otherwise the first external one.
fn node_ip(node: &Node, family: IpFamily) -> Option<IpAddr> {
    let of_type = |address_type| {
        let addresses = node.addresses.iter().filter(move |(other, _)| *other == address_type);
        addresses.map(|(_, address)| *address).find(|address| IpFamily::of(*address) == family)
    };
    of_type(NodeAddressType::InternalIp).or_else(|| of_type(NodeAddressType::ExternalIp))
}

/// Guesses the node's address if the Node object has none: the first address with a subnet,
/// otherwise the first address. Host routes to pods and VIPs have the full prefix length.
fn kernel_ip(facts: &NodeFacts, family: IpFamily) -> Option<IpAddr> {
    let candidates = facts.addresses.iter().filter(|entry| {
        IpFamily::of(entry.address) == family && !entry.address.is_loopback() && &*entry.link != "lo"
    });
    let is_host_route = |prefix_len: u8| prefix_len >= family.bits();
    candidates
        .min_by_key(|entry| (is_host_route(entry.prefix_len), &entry.link, entry.address))
        .map(|entry| entry.address)
}

fn served_links(settings: &ModelSettings, facts: &NodeFacts) -> BTreeMap<u32, ServedLink> {
    let served = |link: &Link| {
        let framing = framing(settings, link)?;
        Some((link.index, ServedLink { name: link.name.clone(), framing }))
    };
    facts.links.iter().filter(|link| may_serve(settings, link)).filter_map(served).collect()
}

/// Returns the links on which flows that come in may take the direct path.
fn direct_links(links: &BTreeMap<u32, ServedLink>, path: &LinkPath) -> BTreeSet<u32> {
    let LinkPath::Direct { without, .. } = path else { return BTreeSet::new() };
    let is_direct = |link: &ServedLink| link.framing == Framing::Ethernet && !without.contains(&link.name);
    links.iter().filter(|(_, link)| is_direct(link)).map(|(index, _)| *index).collect()
}

/// Returns the links that may have an XDP program: those that lead out of the node, by an address
/// with a subnet. Frames for a bridge or a bond come in on its ports, and hardware may have removed
/// the tag of a frame for a VLAN: the program would not see whose they are.
fn xdp_links(
    settings: &ModelSettings,
    links: &BTreeMap<u32, ServedLink>,
    direct_links: &BTreeSet<u32>,
    facts: &NodeFacts,
) -> BTreeMap<u32, XdpLink> {
    if settings.xdp == XdpPolicy::Off {
        return BTreeMap::new();
    }
    let is_filtered = |name: &Arc<str>| match &facts.link_path {
        LinkPath::Direct { filtered, .. } => filtered.contains(name),
        LinkPath::Programs | LinkPath::Netfilter { .. } => false,
    };
    let xdp_link = |link: &Link| {
        let mode = xdp_mode(settings.xdp, link)?;
        let is_native = mode == XdpMode::Native;
        let link_view = XdpLink {
            name: link.name.clone(),
            mode,
            address: link.hardware_address?,
            takes_frames: !is_native || link.xdp.takes_frames,
            redirects_to_itself: is_native && link.device == Some(Device::Veth),
            forwards: direct_links.contains(&link.index) && !is_filtered(&link.name),
        };
        Some((link.index, link_view))
    };
    let served = facts.links.iter().filter(|link| links.contains_key(&link.index));
    served.filter(|link| leads_out(link, facts)).filter_map(xdp_link).collect()
}

fn leads_out(link: &Link, facts: &NodeFacts) -> bool {
    let is_subnet = |source: &SourceAddress| {
        source.link == link.index && source.prefix_len < IpFamily::of(source.address).bits()
    };
    // For few links: most are those of pods, which have no address with a subnet.
    let has_vlan = || facts.links.iter().any(|other| other.vlan_of == Some(link.index));
    let is_ethernet = link.header == LinkHeader::Ethernet;
    is_ethernet && link.master.is_none() && facts.source_addresses.iter().any(is_subnet) && !has_vlan()
}

/// Returns where the XDP program of a link runs, if it may have one. Native XDP takes segmentation
/// offload away from a veth pair, so that bulk is several times slower. The peer of a veth drops the
/// frames that it gets from a program unless it has GRO or a program itself.
fn xdp_mode(policy: XdpPolicy, link: &Link) -> Option<XdpMode> {
    let is_hardware = link.device? == Device::Hardware;
    match policy {
        XdpPolicy::Off => None,
        XdpPolicy::Auto => (is_hardware && link.xdp.runs_programs).then_some(XdpMode::Native),
        XdpPolicy::Generic => Some(XdpMode::Generic),
        XdpPolicy::Native => (is_hardware || link.xdp.takes_frames).then_some(XdpMode::Native),
    }
}

/// Returns true unless the programs have no work on a link. Packets on an ifb pass the hooks of the
/// link that redirects to it.
fn may_serve(settings: &ModelSettings, link: &Link) -> bool {
    let is_former_tunnel = settings.dsr_port.is_none() && &*link.name == TUNNEL_LINK;
    !link.is_loopback && !link.is_ifb && !is_former_tunnel
}

/// Returns the framing of a link that the settings allow and whose headers the programs know.
fn framing(settings: &ModelSettings, link: &Link) -> Option<Framing> {
    if &*link.name == TUNNEL_LINK {
        return Some(Framing::Tunnel);
    }
    let framing = match link.header {
        LinkHeader::Ethernet => Framing::Ethernet,
        LinkHeader::Ip => Framing::Ip,
        LinkHeader::Other(_) => return None,
    };
    settings.interfaces.allow(&link.name).then_some(framing)
}

/// Returns the links on which packets of local pods arrive. With a bridge, upstream's `-i` names
/// the bridge. The ports of the bridge see the same packets before it.
fn local_links(detector: &LocalTrafficDetector, facts: &NodeFacts) -> BTreeSet<u32> {
    let named = |matches: &dyn Fn(&str) -> bool| -> BTreeSet<u32> {
        facts.links.iter().filter(|link| matches(&link.name)).map(|link| link.index).collect()
    };
    match detector {
        LocalTrafficDetector::None | LocalTrafficDetector::Cidrs(_) => BTreeSet::new(),
        LocalTrafficDetector::InterfaceNamePrefix(prefix) => named(&|name| name.starts_with(&**prefix)),
        LocalTrafficDetector::BridgeInterface(bridge) => {
            let bridge = named(&|name| name == &**bridge);
            let is_port = |link: &&Link| link.master.is_some_and(|master| bridge.contains(&master));
            let ports = facts.links.iter().filter(is_port).map(|link| link.index);
            bridge.iter().copied().chain(ports).collect()
        }
    }
}

fn bridge_ports(facts: &NodeFacts) -> BTreeMap<u32, MacAddress> {
    let bridges: BTreeMap<u32, MacAddress> =
        facts.links.iter().filter_map(|link| Some((link.index, link.bridge_address?))).collect();
    let bridge_of = |link: &Link| Some((link.index, *bridges.get(&link.master?)?));
    facts.links.iter().filter_map(bridge_of).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::{
        DetectLocalMode, DirectScope, InterfaceGlobs, XdpFeatures,
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
            Link { device: None, vlan_of: Some(7), ..link(8, "eth3.10") },
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

    #[test]
    fn excluded_links_are_not_served_even_if_they_are_included() {
        let glob = |glob: &str| glob.parse().unwrap();
        let interfaces = InterfaceGlobs {
            only: vec![glob("veth*"), glob("eth[0-9]"), glob("lo")],
            except: vec![glob("*2")],
        };
        let view = node_view(&ModelSettings { interfaces, ..settings() }, None, &some_links());
        assert_eq!(names(&view), ["eth0", "veth1"]);
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
        assert_eq!(
            masquerades(NodeFacts { local_ports: local_ports(1_024, 65_535), ..facts }),
            [false, true]
        );
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
        assert_eq!(
            view.primary_addresses.into_iter().collect::<Vec<_>>(),
            [(IpFamily::V4, ip("192.168.57.11"))]
        );
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
}
