//! Resolves this node from the Node object, the configuration, and the kernel's links and
//! addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{
    Device, Framing, IpFamily, Link, LinkHeader, LinkPath, LocalTrafficDetector, MacAddress, Masquerade,
    ModelSettings, Node, NodeAddressType, NodeFacts, NodeView, PortRange, ServedLink, Vlan, XdpLink, XdpMode,
    XdpPolicy,
    local_detector::local_traffic_detector,
    masquerade_addresses::masquerade_addresses,
    node_port_addresses::{families_with_every_address, node_port_addresses},
};
use crate::net::TUNNEL_LINK;

/// Resolves this node.
pub(super) fn node_view(settings: &ModelSettings, node: Option<&Node>, facts: &NodeFacts) -> NodeView {
    let local_addresses = facts.addresses.iter().map(|entry| entry.address).collect();
    let local_detector = local_traffic_detector(settings, node);
    let bonds = bonds(facts);
    let links = served_links(settings, facts, &bonds);
    let has_unserved_links =
        facts.links.iter().any(|link| may_serve(settings, &bonds, link) && framing(settings, link).is_none());
    let masquerade = masquerade_ports(settings, facts, has_unserved_links).map(|ports| Masquerade {
        ports,
        with_direct_path: settings.masquerades_with_direct_path,
        addresses: masquerade_addresses(links.keys().copied(), facts),
    });
    let direct_links = direct_links(&links, &facts.link_path);
    let bond_ports = bond_ports(&links, facts, &bonds);
    NodeView {
        xdp_links: xdp_links(settings, &links, &direct_links, facts),
        peer_links: peer_links(&direct_links, facts),
        direct_links,
        vlans: vlans(&links, facts, &bonds),
        node_port_addresses: node_port_addresses(settings, node, &local_addresses, &facts.local_routes),
        every_node_port_address: families_with_every_address(settings, node),
        local_addresses,
        local_routes: facts.local_routes.clone(),
        primary_addresses: primary_addresses(settings, node, facts),
        links,
        has_unserved_links,
        link_path: facts.link_path.clone(),
        socket_scope: facts.socket_scope.clone(),
        exempt_addresses: facts.exempt_addresses.clone(),
        local_links: local_links(&local_detector, facts),
        bridge_ports: bridge_ports(facts),
        bond_ports,
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

/// Returns the address of this node in each family.
fn primary_addresses(
    settings: &ModelSettings,
    node: Option<&Node>,
    facts: &NodeFacts,
) -> BTreeMap<IpFamily, IpAddr> {
    let primary =
        |family| Some((family, own_ip(settings, node, family).or_else(|| kernel_ip(facts, family))?));
    IpFamily::ALL.into_iter().filter_map(primary).collect()
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

fn served_links(settings: &ModelSettings, facts: &NodeFacts, bonds: &Bonds<'_>) -> BTreeMap<u32, ServedLink> {
    let served = |link: &Link| {
        let framing = framing(settings, link)?;
        Some((link.index, ServedLink { name: link.name.clone(), framing }))
    };
    facts.links.iter().filter(|link| may_serve(settings, bonds, link)).filter_map(served).collect()
}

/// Returns the links on which flows that come in may take the direct path.
fn direct_links(links: &BTreeMap<u32, ServedLink>, path: &LinkPath) -> BTreeSet<u32> {
    let LinkPath::Direct { without, .. } = path else { return BTreeSet::new() };
    let is_direct = |link: &ServedLink| link.framing == Framing::Ethernet && !without.contains(&link.name);
    links.iter().filter(|(_, link)| is_direct(link)).map(|(index, _)| *index).collect()
}

/// Returns the links whose packets of the direct path may come in at once at the other end of the
/// pair. These are links of pods on which nothing would see the packets.
///
/// - While rules of others look at packets, the lease is zero, and there are no such links. A
///   chain of netfilter at the egress of a link is such a rule.
/// - A link with a subnet leads out of the node, and people capture packets there.
/// - A veth takes frames if its other end has an XDP program or GRO (kernel 8267fc71abb2). The
///   driver runs that program, and packets would pass it by.
fn peer_links(direct_links: &BTreeSet<u32>, facts: &NodeFacts) -> BTreeSet<u32> {
    let LinkPath::Direct { lease, filtered, .. } = &facts.link_path else { return BTreeSet::new() };
    if lease.is_zero() {
        return BTreeSet::new();
    }
    let is_bare = |link: &&Link| {
        link.hands_to_peer
            && link.master.is_none()
            && !filtered.contains(&link.name)
            && !link.xdp.takes_frames
            && !has_subnet(link, facts)
    };
    let links = facts.links.iter().filter(|link| direct_links.contains(&link.index));
    links.filter(is_bare).map(|link| link.index).collect()
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

/// Returns true if an address of the link has a subnet.
fn has_subnet(link: &Link, facts: &NodeFacts) -> bool {
    facts
        .source_addresses
        .iter()
        .any(|source| source.link == link.index && source.prefix_len < IpFamily::of(source.address).bits())
}

fn leads_out(link: &Link, facts: &NodeFacts) -> bool {
    // For few links: most are those of pods, which have no address with a subnet.
    let has_vlan = || facts.links.iter().any(|other| other.vlan.is_some_and(|vlan| vlan.link == link.index));
    let is_ethernet = link.header == LinkHeader::Ethernet;
    is_ethernet && link.master.is_none() && has_subnet(link, facts) && !has_vlan()
}

/// Returns where the XDP program of a link runs, if it may have one. Native XDP takes segmentation
/// offload away from a veth pair, so that bulk is several times slower. The peer of a veth drops
/// the frames that it gets from a program unless it has GRO or a program itself.
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
/// link that redirects to it. Packets on a port of a bond pass those of the bond.
fn may_serve(settings: &ModelSettings, bonds: &Bonds<'_>, link: &Link) -> bool {
    let is_former_tunnel = settings.dsr_port.is_none() && &*link.name == TUNNEL_LINK;
    let is_beneath_a_served_link =
        || bond_of(bonds, link).is_some_and(|bond| framing(settings, bond).is_some());
    !link.is_loopback && !link.is_ifb && !is_former_tunnel && !is_beneath_a_served_link()
}

/// The bonds of the node, by index.
type Bonds<'a> = BTreeMap<u32, &'a Link>;

fn bonds(facts: &NodeFacts) -> Bonds<'_> {
    facts.links.iter().filter(|link| link.is_bond).map(|link| (link.index, link)).collect()
}

/// Returns the bond of which a link is a port.
fn bond_of<'a>(bonds: &Bonds<'a>, port: &Link) -> Option<&'a Link> {
    bonds.get(&port.master?).copied()
}

/// Returns the ports of the bonds that are served, each with its bond.
fn bond_ports(links: &BTreeMap<u32, ServedLink>, facts: &NodeFacts, bonds: &Bonds<'_>) -> BTreeMap<u32, u32> {
    let ports = facts.links.iter().filter_map(|link| Some((link.index, bond_of(bonds, link)?.index)));
    ports.filter(|(_, bond)| links.contains_key(bond)).collect()
}

/// Returns the VLANs whose links have programs for packets that come in, or are ports of a bond
/// that has them.
fn vlans(links: &BTreeMap<u32, ServedLink>, facts: &NodeFacts, bonds: &Bonds<'_>) -> BTreeSet<Vlan> {
    let has_programs =
        |link: &Link| links.get(&link.index).is_some_and(|served| served.framing == Framing::Ethernet);
    let is_served = |link: &&Link| has_programs(link) || bond_of(bonds, link).is_some_and(has_programs);
    facts.links.iter().filter(is_served).filter_map(|link| link.vlan).collect()
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
mod tests;
