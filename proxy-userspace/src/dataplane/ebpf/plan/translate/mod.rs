//! Translates a resolved service port into entries of the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;
use proxy_common::{
    Addr,
    layout::{
        self, DsrAddress, Endpoint, List, LocalDetection, MemberKey, ServiceKey, ServiceValue, VlanKey,
        XdpLinkValue, flags,
    },
    maglev::TableSize,
};

use super::{
    super::links::xdp::XdpState,
    any,
    ranges::{LinkSubnet, Prefix},
    state::State,
    step::TunnelFields,
};
use crate::{
    model::{
        Balance, ClientLocation, Forwarding, Frontend, FrontendKind, IpFamily, LocalTrafficDetector,
        NoEndpointVerdict, NodeView, Protocol, ResolvedEndpoint, ResolvedPort, SocketScope, TrafficPolicy,
        TunnelView, Vlan, XdpLink,
    },
    net::NetnsCookie,
};

/// Returns which sockets the programs serve, and the namespaces that they leave alone. The scope
/// `All` says that no pod was ever exempt.
pub(crate) fn socket_scope(node: &NodeView) -> (layout::SocketScope, &BTreeSet<NetnsCookie>) {
    static NONE: BTreeSet<NetnsCookie> = BTreeSet::new();
    match &node.socket_scope {
        SocketScope::All if node.exempt_addresses.is_empty() => (layout::SocketScope::All, &NONE),
        SocketScope::All => (layout::SocketScope::NotExempt, &NONE),
        SocketScope::Node => (layout::SocketScope::Node, &NONE),
        SocketScope::AllBut(exempt) => (layout::SocketScope::NotExempt, exempt),
    }
}

/// Returns the source addresses of the packets that the programs masquerade. The map is empty if
/// netfilter masquerades.
pub(crate) fn masquerade_addresses(node: &NodeView) -> BTreeMap<LinkSubnet, Addr> {
    let addresses = node.masquerade.iter().flat_map(|masquerade| &masquerade.addresses);
    addresses
        .map(|((link, subnet), address)| {
            (LinkSubnet { link: *link, prefix: Prefix::new(subnet) }, Addr::from(*address))
        })
        .collect()
}

/// Returns the links on which XDP programs forward packets: not those that refused one.
pub(crate) fn xdp_links(node: &NodeView, state: &State) -> BTreeMap<u32, XdpLinkValue> {
    let is_refused =
        |index: &u32, link: &XdpLink| state.xdp.get(index) == Some(&XdpState::Refused(link.mode));
    let links = node.xdp_links.iter();
    let forwarding = links.filter(|(index, link)| link.forwards && !is_refused(index, link));
    let value = |link: &XdpLink| XdpLinkValue {
        address: link.address.0,
        takes_frames: link.takes_frames.into(),
        redirects_to_itself: link.redirects_to_itself.into(),
    };
    forwarding.map(|(index, link)| (*index, value(link))).collect()
}

/// Returns the key of a frontend.
pub(crate) fn service_key(frontend: &Frontend, family: IpFamily, protocol: Protocol) -> ServiceKey {
    let addr = frontend.address.map_or(any(family), Addr::from);
    ServiceKey::new(addr, frontend.port.get(), protocol)
}

/// Returns what the programs know of the tunnel. Other nodes take packets only from the addresses
/// that this one announces.
pub(crate) fn tunnel(tunnel: &TunnelView) -> TunnelFields {
    let source = |family| {
        let address =
            tunnel.announcement.addresses.iter().map(SocketAddr::ip).find(|ip| IpFamily::of(*ip) == family);
        address.map_or(Addr::UNSPECIFIED_V6, Addr::from)
    };
    let (v4, v6) = (source(IpFamily::V4), source(IpFamily::V6));
    let link = if tunnel.is_up { tunnel.link } else { 0 };
    TunnelFields { link, mtu: tunnel.mtu, v4, v6, returns: tunnel.returns.into() }
}

/// Returns the addresses of nodes with the tunnel, each with its [`DsrAddress`].
pub(crate) fn dsr_nodes(tunnel: &TunnelView) -> BTreeMap<Addr, u8> {
    let all = tunnel.addresses_of_nodes.iter().map(|address| (address, DsrAddress::Other));
    let ends = tunnel.nodes.iter().map(|address| (address, DsrAddress::End));
    all.chain(ends).map(|(address, kind)| (Addr::from(*address), kind as u8)).collect()
}

/// Returns the keys of the frontends of a service port, with their kinds. With direct server
/// return, its external addresses have a second key, for packets that come through the tunnel.
pub(crate) fn frontends(
    port: &ResolvedPort,
    family: IpFamily,
    protocol: Protocol,
) -> Vec<(ServiceKey, FrontendKind)> {
    let key = |frontend: &Frontend| (service_key(frontend, family, protocol), frontend.kind);
    let mut frontends: Vec<_> = port.frontends.iter().map(key).collect();
    if port.forwarding == Forwarding::Dsr {
        let external = frontends.iter().filter(|(_, kind)| *kind != FrontendKind::ClusterIp);
        let tunneled: Vec<_> = external.map(|(key, kind)| (key.tunneled(), *kind)).collect();
        frontends.extend(tunneled);
    }
    frontends
}

/// Returns the value of a frontend for packets that come through the tunnel: its endpoints on this
/// node, which see the client's address. The other node knew of one. If it has gone meanwhile, the
/// packet is masqueraded to an endpoint on another node.
pub(crate) fn tunneled_value(
    value: ServiceValue,
    port: &ResolvedPort,
    table_size: TableSize,
) -> ServiceValue {
    let value = ServiceValue { flags: value.flags & !flags::DSR, ..value };
    if port.local_endpoints.is_empty() {
        return value;
    }
    let count = count(&port.local_endpoints);
    let of_cluster = flags::MASQUERADE_INSIDE | flags::MASQUERADE_OUTSIDE | flags::MAGLEV_SIZE;
    ServiceValue {
        inside_count: count,
        outside_count: count,
        inside_list: List::Local as u8,
        outside_list: List::Local as u8,
        flags: value.flags & !of_cluster | table_flags(port, TrafficPolicy::Local, table_size),
        ..value
    }
}

/// Returns the value of a frontend.
pub(crate) fn service_value(
    service: u32,
    generation: u32,
    port: &ResolvedPort,
    kind: FrontendKind,
    node: &NodeView,
    family: IpFamily,
    table_size: TableSize,
) -> ServiceValue {
    let inside = port.policy(kind, ClientLocation::Inside);
    let outside = port.policy(kind, ClientLocation::Outside);
    ServiceValue {
        service,
        generation,
        inside_count: count(port.endpoints(inside)),
        outside_count: count(port.endpoints(outside)),
        affinity_seconds: port.affinity_timeout.map_or(0, Into::into),
        inside_list: list(inside) as u8,
        outside_list: list(outside) as u8,
        flags: empty_flags(port)
            | range_flags(port, kind, node, family)
            | masquerade_flags(port, kind, node, family)
            | dsr_flags(port, kind, node, family)
            | table_flags(port, outside, table_size),
    }
}

/// Returns the endpoint lists that have slots, in the order of [`ResolvedPort`].
pub(crate) fn lists(port: &ResolvedPort) -> [(List, impl ExactSizeIterator<Item = Endpoint> + Clone); 2] {
    [TrafficPolicy::Cluster, TrafficPolicy::Local]
        .map(|policy| (list(policy), port.endpoints(policy).iter().map(address)))
}

/// Returns the members that a service port needs: with affinity those of its lists, and for UDP all
/// serving endpoints.
pub(crate) fn members(
    service: u32,
    protocol: Protocol,
    port: &ResolvedPort,
) -> impl Iterator<Item = MemberKey> {
    let sticky = port.affinity_timeout.is_some();
    let of_lists = [TrafficPolicy::Cluster, TrafficPolicy::Local]
        .into_iter()
        .filter(move |_| sticky)
        .flat_map(|policy| port.endpoints(policy).iter().map(move |e| (list(policy), address(e))));
    let serving = port
        .serving
        .iter()
        .filter(move |_| protocol == Protocol::Udp)
        .map(|endpoint| (List::Serving, address(endpoint)));
    of_lists.chain(serving).map(move |(list, endpoint)| MemberKey { service, list: list.number(), endpoint })
}

fn address(endpoint: &ResolvedEndpoint) -> Endpoint {
    Endpoint::new(endpoint.address.ip().into(), endpoint.address.port())
}

const fn list(policy: TrafficPolicy) -> List {
    match policy {
        TrafficPolicy::Cluster => List::Cluster,
        TrafficPolicy::Local => List::Local,
    }
}

fn count(endpoints: &[ResolvedEndpoint]) -> u32 {
    u32::try_from(endpoints.len()).unwrap_or(u32::MAX)
}

fn empty_flags(port: &ResolvedPort) -> u16 {
    match port.no_endpoint_verdict() {
        NoEndpointVerdict::Drop => flags::DROP_WHEN_EMPTY,
        NoEndpointVerdict::Refuse => 0,
    }
}

/// Masquerades as upstream does (`pkg/proxy/iptables/proxier.go` and
/// `pkg/proxy/nftables/proxier.go`, the rules of `internalTrafficChain` and
/// `externalTrafficChain`):
///
/// - Traffic to a cluster IP that is not from a local pod may leave this node again, and its
///   replies must come back here. The same holds for all traffic to external addresses with policy
///   Cluster.
/// - With policy Local, clients keep their source, because only endpoints of this node are chosen.
///   Pods that take the shortcut past the policy are not masqueraded either.
/// - The node's own traffic through that shortcut is masqueraded, but it is translated at its
///   sockets and never arrives on a link.
pub(crate) fn masquerades(
    port: &ResolvedPort,
    kind: FrontendKind,
    node: &NodeView,
    family: IpFamily,
) -> Masquerades {
    match kind {
        FrontendKind::ClusterIp => {
            let outside = node.masquerade_all || node.local_detector.is_implemented(family);
            Masquerades { inside: node.masquerade_all, outside }
        }
        FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp => {
            let may_leave = port.external_policy == TrafficPolicy::Cluster;
            Masquerades { inside: may_leave, outside: may_leave }
        }
    }
}

/// Which packets to a frontend are masqueraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Masquerades {
    /// Those of local pods, as local detection knows them.
    pub(crate) inside: bool,
    /// All others.
    pub(crate) outside: bool,
}

fn masquerade_flags(port: &ResolvedPort, kind: FrontendKind, node: &NodeView, family: IpFamily) -> u16 {
    let Masquerades { inside, outside } = masquerades(port, kind, node, family);
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    flag(inside, flags::MASQUERADE_INSIDE) | flag(outside, flags::MASQUERADE_OUTSIDE)
}

/// Without local detection, packets of pods are not told from those of clients outside. They stay
/// on the way on which policies and conntrack see both directions.
fn dsr_flags(port: &ResolvedPort, kind: FrontendKind, node: &NodeView, family: IpFamily) -> u16 {
    if sends_through_tunnel(port, kind, node, family) { flags::DSR } else { 0 }
}

/// Returns true if packets of clients outside to this kind of frontend go through the tunnel.
pub(crate) fn sends_through_tunnel(
    port: &ResolvedPort,
    kind: FrontendKind,
    node: &NodeView,
    family: IpFamily,
) -> bool {
    let is_wanted = port.forwarding == Forwarding::Dsr && kind != FrontendKind::ClusterIp;
    is_wanted && node.local_detector.is_implemented(family)
}

fn table_flags(port: &ResolvedPort, outside: TrafficPolicy, table_size: TableSize) -> u16 {
    match port.balance {
        Balance::Random => 0,
        Balance::Maglev => {
            table_size.for_endpoints(count(port.endpoints(outside))).map_or(0, TableSize::flags)
        }
    }
}

/// Returns how local clients are recognized, and their source ranges if they are recognized by
/// these.
pub(crate) fn local_detection(node: &NodeView) -> (LocalDetection, BTreeSet<Prefix>) {
    match &node.local_detector {
        LocalTrafficDetector::None => (LocalDetection::None, BTreeSet::new()),
        LocalTrafficDetector::Cidrs(cidrs) => {
            (LocalDetection::Source, cidrs.iter().map(Prefix::new).collect())
        }
        LocalTrafficDetector::BridgeInterface(_) | LocalTrafficDetector::InterfaceNamePrefix(_) => {
            (LocalDetection::Link, BTreeSet::new())
        }
    }
}

fn range_flags(port: &ResolvedPort, kind: FrontendKind, node: &NodeView, family: IpFamily) -> u16 {
    if kind != FrontendKind::ClusterIp && leaves_pods_to_links(port, node, family) {
        return flags::SOURCE_RANGES | flags::NODE_IN_RANGES;
    }
    if kind != FrontendKind::LoadBalancerIp || !has_ranges(port, family) {
        return 0;
    }
    let node_flag = node
        .primary_addresses
        .get(&family)
        .filter(|address| port.source_ranges.iter().any(|range| range.contains(*address)))
        .map_or(0, |_| flags::NODE_IN_RANGES);
    flags::SOURCE_RANGES | node_flag
}

/// Returns the ranges of sources that may reach a service port.
pub(crate) fn source_ranges(port: &ResolvedPort, node: &NodeView, family: IpFamily) -> BTreeSet<Prefix> {
    let every = Prefix { addr: any(family), prefix_len: if family == IpFamily::V4 { 96 } else { 0 } };
    let every = leaves_pods_to_links(port, node, family).then_some(every);
    port.source_ranges.iter().map(Prefix::new).chain(every).collect()
}

/// Returns true if sockets outside the node's network namespace leave the external addresses of a
/// service port to the links.
///
/// If it is not known which clients are pods of this node, policy Local applies to these pods as to
/// any other client, but never to the node itself: upstream adds the short cut of pods past the
/// policy only if `localDetector.IsImplemented()`. A socket program does not decide between pods
/// and the node. But with source ranges, here one of all addresses, it leaves an unbound socket of
/// a pod alone. So the packets get the answer that packets from outside get.
///
/// If the Service has source ranges of its own, they are not for all of its addresses, so this does
/// not work.
pub(crate) fn leaves_pods_to_links(port: &ResolvedPort, node: &NodeView, family: IpFamily) -> bool {
    port.external_policy == TrafficPolicy::Local
        && !node.local_detector.is_implemented(family)
        && !has_ranges(port, family)
}

/// Returns true if an unbound socket of a pod is left alone, because its packets decide on a link.
pub(crate) fn leaves_sockets_of_pods(
    port: &ResolvedPort,
    kind: FrontendKind,
    node: &NodeView,
    family: IpFamily,
) -> bool {
    range_flags(port, kind, node, family) & flags::SOURCE_RANGES != 0
}

/// Returns true if only the source of a packet decides whether it is allowed. A program at an
/// unbound socket does not know it, unless the socket is in the node's network namespace. Ranges of
/// pods do not help: containers that are no pods have network namespaces too.
pub(crate) fn depends_on_source(port: &ResolvedPort, family: IpFamily) -> bool {
    let applies = |frontend: &Frontend| frontend.kind == FrontendKind::LoadBalancerIp;
    has_ranges(port, family) && port.frontends.iter().any(applies)
}

/// Returns true if source ranges exclude an address of the family.
fn has_ranges(port: &ResolvedPort, family: IpFamily) -> bool {
    let holds_all = |range: &IpNet| range.prefix_len() == 0 && IpFamily::of(range.addr()) == family;
    !port.source_ranges.is_empty() && !port.source_ranges.iter().any(holds_all)
}

/// Returns the key of a VLAN whose link has programs.
pub(crate) const fn vlan(Vlan { link, id, protocol }: Vlan) -> VlanKey {
    VlanKey { link, id, protocol }
}

#[cfg(test)]
mod tests;
