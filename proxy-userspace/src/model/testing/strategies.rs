//! Generators for a small world: few names, addresses and ports, so that objects often belong
//! together, conflict or repeat. Some objects are such that the API would reject them.

use std::{collections::BTreeSet, fmt::Debug, net::IpAddr, num::NonZeroU32, sync::Arc, time::Duration};

use glob::Pattern;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{THIS_NODE, World, cidrs, facts, ip, link, node, port_number, valid_name};
use crate::{
    model::{
        AddressType, Balance, Delta, DetectLocalMode, Dirty, DsrAnnouncement, EndpointSlice, Forwarding,
        Hints, InterfaceGlobs, Link, LinkAddress, LinkHeader, LinkPath, LoadBalancerIngress,
        LoadBalancerIpMode, MacAddress, ModelSettings, Name, NamespacedName, Node, NodeAddressType,
        NodeFacts, NodePortAddresses, Placement, PortRange, Protocol, Service, ServicePort, ServiceType,
        SessionAffinity, SliceEndpoint, SlicePort, Snapshot, SocketScope, SourceAddress, TrafficPolicy,
        UnixNanos, Vlan, WatchEvent, XdpPolicy,
    },
    net::{DirectScope, NetnsCookie, TUNNEL_LINK},
};

const CLUSTER_IPS: [&str; 6] =
    ["10.96.0.1", "10.96.0.2", "10.96.0.3", "fd96::1", "fd96::2", "::ffff:10.96.0.3"];
const OUTER_IPS: [&str; 4] = ["198.51.100.1", "198.51.100.2", "2001:db8::1", "10.96.0.1"];
const ENDPOINT_IPS: [&str; 8] = [
    "10.244.1.1",
    "10.244.1.2",
    "10.244.2.1",
    "10.244.2.2",
    "fd44:1::1",
    "fd44:2::1",
    "0.0.0.0",
    "::ffff:10.244.1.1",
];
const RANGES: [&str; 5] = ["0.0.0.0/0", "192.0.2.7/24", "203.0.113.0/25", "::/0", "2001:db8::/32"];

/// Generates a few objects, most of them valid for the API.
pub fn world() -> impl Strategy<Value = World> {
    (vec(any_service(), 1..8), vec(any_slice(), 2..14), vec(any_node(), 0..3)).prop_map(
        |(services, slices, nodes)| {
            let mut world = World::default();
            world.apply(WatchEvent::Services(Delta::Replace(services)));
            world.apply(WatchEvent::EndpointSlices(Delta::Replace(slices)));
            world.apply(WatchEvent::Nodes(Delta::Replace(nodes)));
            world
        },
    )
}

/// Generates a sequence of events.
pub fn events(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<WatchEvent>> {
    vec(event(), count)
}

/// Generates an event, most often about one object.
pub fn event() -> impl Strategy<Value = WatchEvent> {
    prop_oneof![
        6 => delta(any_service().boxed(), service_name().boxed()).prop_map(WatchEvent::Services),
        6 => delta(any_slice().boxed(), slice_name().boxed()).prop_map(WatchEvent::EndpointSlices),
        1 => delta(any_node().boxed(), node_name().prop_map(|name| NamespacedName::from(valid_name(&name))).boxed())
            .prop_map(WatchEvent::Nodes),
    ]
}

/// Generates the Snapshot of some objects. It keeps all promises of [`crate::model::Model`].
pub fn snapshot() -> impl Strategy<Value = Snapshot> {
    snapshot_change().prop_map(|(snapshot, _, _)| snapshot)
}

/// Generates a Snapshot, the next one, and their differences.
pub fn snapshot_change() -> impl Strategy<Value = (Snapshot, Snapshot, Dirty)> {
    (world(), any_settings(), (any_facts(), any_facts()), events(0..6)).prop_map(
        |(world, settings, (facts, next_facts), events)| {
            let mut model = world.model(&settings, &facts);
            let before = model.snapshot().clone();
            for event in events {
                model.apply(event);
            }
            model.set_node_facts(next_facts);
            let dirty = model.resolve();
            (before, model.snapshot().clone(), dirty)
        },
    )
}

/// Generates a configuration, always on [`THIS_NODE`].
pub fn any_settings() -> impl Strategy<Value = ModelSettings> {
    let detect_local = prop_oneof![
        Just(DetectLocalMode::ClusterCidr),
        Just(DetectLocalMode::NodeCidr),
        Just(DetectLocalMode::BridgeInterface("cbr0".into())),
        Just(DetectLocalMode::InterfaceNamePrefix("veth".into())),
    ];
    let node_port_addresses = prop_oneof![
        3 => Just(NodePortAddresses::All),
        1 => node_ranges().prop_map(|cidrs| NodePortAddresses::Primary { cidrs }),
        1 => node_ranges().prop_map(NodePortAddresses::Cidrs),
    ];
    (detect_local, node_port_addresses, any::<[bool; 7]>(), interface_globs()).prop_map(
        |(
            detect_local,
            node_port_addresses,
            [masquerade_all, leaves, masquerades, with_direct_path, loopback, xdp, dsr],
            interfaces,
        )| {
            ModelSettings {
                bind_address: None,
                node_name: THIS_NODE.into(),
                cluster_cidrs: cidrs(&["10.244.0.0/16", "fd44::/16"]),
                detect_local,
                node_port_addresses,
                masquerade_all,
                masquerade_ports: masquerades.then_some(PortRange { first: 1_024, last: 29_999 }),
                masquerades_with_direct_path: with_direct_path,
                loopback_node_ports: loopback,
                ignores_external_ips: false,
                leaves_cluster_ips_of_links: leaves,
                balance: Balance::Random,
                xdp: if xdp { XdpPolicy::Generic } else { XdpPolicy::Off },
                dsr_port: dsr.then_some(port_number(4_790)),
                dsr_returns: dsr && leaves,
                interfaces,
            }
        },
    )
}

/// Generates addresses and links of this node.
pub fn any_facts() -> impl Strategy<Value = NodeFacts> {
    let addresses = [
        ("lo", "127.0.0.1/8"),
        ("lo", "::1/128"),
        ("eth0", "192.168.57.11/24"),
        ("eth0", "fd57::11/64"),
        ("veth1", "10.244.1.1/32"),
    ];
    let addresses = proptest::sample::subsequence(addresses.to_vec(), 0..=addresses.len());
    let served = (any_links(), any_link_path(), any_socket_scope(), any_exempt_addresses());
    let former_ports = option::of(Just(PortRange { first: 1_024, last: 29_999 }));
    (addresses, served, former_ports).prop_map(
        |(addresses, (links, link_path, socket_scope, exempt_addresses), former_programs_ports)| {
            let facts = facts(&addresses);
            let source_addresses = facts.addresses.iter().filter_map(|address| {
                let link = links.iter().find(|link| link.name == address.link && !link.is_loopback)?;
                let LinkAddress { address, prefix_len, .. } = *address;
                Some(SourceAddress { link: link.index, address, prefix_len })
            });
            let source_addresses = source_addresses.collect();
            NodeFacts {
                source_addresses,
                links,
                former_programs_ports,
                link_path,
                socket_scope,
                exempt_addresses,
                ..facts
            }
        },
    )
}

fn any_link_path() -> impl Strategy<Value = LinkPath> {
    let netfilter = LinkPath::Netfilter { why: "a rule of others".into() };
    let direct = |scope, without: &[&str]| LinkPath::Direct {
        scope,
        lease: Duration::from_secs(8),
        without: without.iter().map(|link| Arc::from(*link)).collect(),
        filtered: BTreeSet::new(),
    };
    let filtered = LinkPath::Direct {
        scope: DirectScope::Learned,
        lease: Duration::ZERO,
        without: BTreeSet::new(),
        filtered: BTreeSet::from(["eth0".into()]),
    };
    let learned = direct(DirectScope::Learned, &[]);
    let without = direct(DirectScope::Learned, &["veth1"]);
    select(vec![LinkPath::Programs, learned, without, filtered, direct(DirectScope::Whole, &[]), netfilter])
}

fn any_socket_scope() -> impl Strategy<Value = SocketScope> {
    let cookies = proptest::sample::subsequence(vec![1, 2, 3], 0..=3);
    (cookies, one_of(&[true, false])).prop_map(|(cookies, is_node)| match (&*cookies, is_node) {
        ([], true) => SocketScope::Node,
        ([], false) => SocketScope::All,
        (cookies, _) => SocketScope::AllBut(cookies.iter().copied().map(NetnsCookie).collect()),
    })
}

fn any_exempt_addresses() -> impl Strategy<Value = BTreeSet<IpAddr>> {
    let addresses = vec![ip("10.244.1.9"), ip("fd00:10:244:1::9")];
    proptest::sample::subsequence(addresses, 0..=2).prop_map(|some| some.into_iter().collect())
}

/// Generates links. The same index may be another link the next time.
fn any_links() -> impl Strategy<Value = Vec<Link>> {
    let headers =
        one_of(&[LinkHeader::Ethernet, LinkHeader::Ethernet, LinkHeader::Ip, LinkHeader::Other(32)]);
    let names = one_of(&["eth0", "cbr0", "veth1", "veth2", "wg0", TUNNEL_LINK]);
    let addresses = option::of((0..2_u8).prop_map(|last| MacAddress([2, 0, 0, 0, 0, last])));
    let vlans = option::of((2..4_u32, 10..12_u16).prop_map(|(link, id)| Vlan { link, id, protocol: 0x8100 }));
    let any_link = (2..7_u32, names, headers, option::of(2..4_u32), addresses, vlans, any::<bool>())
        .prop_map(|(index, name, header, master, bridge_address, vlan, is_bond)| Link {
            master,
            header,
            bridge_address,
            is_bond,
            vlan,
            hands_to_peer: index > 3,
            ..link(index, name)
        });
    vec(any_link, 0..6).prop_map(|mut links| {
        links.push(Link { is_loopback: true, ..link(1, "lo") });
        links.sort();
        links.dedup_by_key(|link| link.index);
        links
    })
}

fn interface_globs() -> impl Strategy<Value = InterfaceGlobs> {
    let globs = |choices: &[&'static str]| {
        let globs = choices.iter().filter_map(|glob| Pattern::new(glob).ok()).collect::<Vec<_>>();
        proptest::sample::subsequence(globs.clone(), 0..=globs.len())
    };
    let only = prop_oneof![3 => Just(Vec::new()), 1 => globs(&["eth*", "veth?", "cbr0"])];
    (only, globs(&["*2", "wg*"])).prop_map(|(only, except)| InterfaceGlobs { only, except })
}

/// Generates a Service.
pub fn any_service() -> impl Strategy<Value = Service> {
    let service_type = one_of(&[
        ServiceType::ClusterIp,
        ServiceType::ClusterIp,
        ServiceType::NodePort,
        ServiceType::NodePort,
        ServiceType::LoadBalancer,
        ServiceType::LoadBalancer,
        ServiceType::ExternalName,
    ]);
    let identity = (service_name(), service_type, prop::bool::weighted(0.05));
    let addresses = (
        prop_oneof![1 => vec(address(&CLUSTER_IPS), 0), 15 => vec(address(&CLUSTER_IPS), 1..4)],
        vec(address(&OUTER_IPS), 0..3),
        vec(ingress(), 0..3),
        vec(one_of(&RANGES).prop_map(|range| cidrs(&[range])[0]), 0..3),
    );
    let policies = (session_affinity(), policy(), policy(), option::of(port(32_000..32_002)), ways());
    (identity, addresses, vec(any_service_port(), 1..4), policies).prop_map(
        |((name, service_type, excluded_by_label), addresses, ports, policies)| Service {
            name,
            service_type,
            cluster_ips: addresses.0,
            external_ips: addresses.1,
            load_balancer_ingress: addresses.2,
            load_balancer_source_ranges: addresses.3,
            ports,
            session_affinity: policies.0,
            internal_traffic_policy: policies.1,
            external_traffic_policy: policies.2,
            health_check_node_port: policies.3,
            excluded_by_label,
            balance: policies.4.0,
            forwarding: policies.4.1,
        },
    )
}

/// Generates an EndpointSlice.
pub fn any_slice() -> impl Strategy<Value = EndpointSlice> {
    let address_type =
        prop_oneof![6 => Just(AddressType::Ipv4), 3 => Just(AddressType::Ipv6), 1 => Just(AddressType::Fqdn)];
    let owner = option::weighted(0.95, one_of(&["x", "x", "x", "y", "z"]));
    let time = option::of((1..1_000_u64).prop_map(UnixNanos));
    (slice_name(), owner, address_type, vec(any_endpoint(), 0..6), vec(any_slice_port(), 1..4), time)
        .prop_map(|(name, service, address_type, endpoints, ports, last_change_trigger_time)| EndpointSlice {
            pods: endpoints.iter().map(|endpoint| endpoint.ready.then(|| "x-1".into())).collect(),
            name,
            service: service.map(Name::from),
            address_type,
            endpoints,
            ports: ports.into(),
            last_change_trigger_time,
        })
}

/// Generates a Node, most often this one.
pub fn any_node() -> impl Strategy<Value = Node> {
    let ranges = proptest::sample::subsequence(vec!["10.244.1.0/24", "fd44:1::/64"], 0..=2);
    let address_type = one_of(&[NodeAddressType::InternalIp, NodeAddressType::ExternalIp]);
    let address = address(&["192.168.57.11", "fd57::11", "203.0.113.9", "127.0.0.1"]);
    let dsr_addresses = ["192.168.57.12:4790", "[fd57::12]:4790", "192.168.57.13:4791"];
    let dsr_addresses = dsr_addresses.map(|address| address.parse().expect("an address"));
    let dsr_addresses = proptest::sample::subsequence(dsr_addresses.to_vec(), 0..=2);
    let others = vec!["192.168.57.13", "10.0.0.12", "fd57::13"].into_iter().map(ip).collect::<Vec<_>>();
    let dsr = (dsr_addresses, proptest::sample::subsequence(others, 0..=2))
        .prop_map(|(addresses, others)| DsrAnnouncement { addresses, others: others.into_iter().collect() });
    let place = (option::of(zone()), ranges, vec((address_type, address), 0..4));
    (node_name(), place, any::<bool>(), dsr).prop_map(
        |(name, (zone, ranges, addresses), being_deleted, dsr)| Node {
            zone,
            pod_cidrs: cidrs(&ranges),
            addresses,
            being_deleted,
            dsr,
            ..node(&name)
        },
    )
}

fn any_service_port() -> impl Strategy<Value = ServicePort> {
    (port_name(), protocol(), port(80..83), option::of(port(30_001..30_004)))
        .prop_map(|(name, protocol, port, node_port)| ServicePort { name, protocol, port, node_port })
}

fn any_slice_port() -> impl Strategy<Value = SlicePort> {
    (port_name(), protocol(), option::weighted(0.9, port(8080..8082)))
        .prop_map(|(name, protocol, port)| SlicePort { name, protocol, port })
}

fn any_endpoint() -> impl Strategy<Value = SliceEndpoint> {
    let conditions = (prop::bool::weighted(0.6), any::<bool>(), prop::bool::weighted(0.3));
    let hints = (vec(zone(), 0..3), vec(node_name(), 0..2));
    (address(&ENDPOINT_IPS), conditions, option::weighted(0.8, node_name()), hints).prop_map(
        |(address, (ready, serving, terminating), node_name, (zones, nodes))| {
            let hints = Hints { zones: zones.into(), nodes: nodes.into() };
            let hints = (hints != Hints::default()).then(|| hints.into());
            let placement = Placement { node_name, hints }.into();
            SliceEndpoint { address, ready, serving, terminating, placement }
        },
    )
}

fn ingress() -> impl Strategy<Value = LoadBalancerIngress> {
    let ip_mode = one_of(&[LoadBalancerIpMode::Vip, LoadBalancerIpMode::Vip, LoadBalancerIpMode::Proxy]);
    (address(&OUTER_IPS), ip_mode).prop_map(|(ip, ip_mode)| LoadBalancerIngress { ip, ip_mode })
}

fn delta<T: Debug + Clone + 'static>(
    object: BoxedStrategy<T>,
    name: BoxedStrategy<NamespacedName>,
) -> impl Strategy<Value = Delta<T>> {
    prop_oneof![
        8 => object.clone().prop_map(Delta::Apply),
        3 => name.prop_map(Delta::Delete),
        1 => vec(object, 0..4).prop_map(Delta::Replace),
    ]
}

/// Generates how clients get an endpoint, and how packets reach it.
fn ways() -> impl Strategy<Value = (Option<Balance>, Forwarding)> {
    let balance = option::of(select(vec![Balance::Random, Balance::Maglev]));
    (balance, one_of(&[Forwarding::Nat, Forwarding::Dsr]))
}

fn session_affinity() -> impl Strategy<Value = SessionAffinity> {
    let client_ip =
        |more: u32| SessionAffinity::ClientIp { timeout_seconds: NonZeroU32::MIN.saturating_add(more) };
    one_of(&[SessionAffinity::None, SessionAffinity::None, client_ip(10_799), client_ip(59)])
}

fn node_ranges() -> impl Strategy<Value = Vec<ipnet::IpNet>> {
    let ranges = vec!["192.168.57.0/24", "127.0.0.0/8", "fd57::/64", "0.0.0.0/0"];
    proptest::sample::subsequence(ranges, 0..3).prop_map(|ranges| cidrs(&ranges))
}

fn service_name() -> impl Strategy<Value = NamespacedName> {
    (one_of(&["a", "a", "a", "a", "b"]), one_of(&["x", "x", "x", "y", "z"]))
        .prop_map(|(namespace, name)| NamespacedName::new(namespace, name))
}

fn slice_name() -> impl Strategy<Value = NamespacedName> {
    (one_of(&["a", "a", "a", "a", "b"]), one_of(&["s1", "s2", "s3", "s4", "s5", "s6", "s7"]))
        .prop_map(|(namespace, name)| NamespacedName::new(namespace, name))
}

fn node_name() -> impl Strategy<Value = Arc<str>> {
    one_of(&[THIS_NODE, THIS_NODE, "n2"]).prop_map(Arc::from)
}

fn zone() -> impl Strategy<Value = Arc<str>> {
    one_of(&["east", "west"]).prop_map(Arc::from)
}

fn port_name() -> impl Strategy<Value = Name> {
    one_of(&["", "", "", "p"]).prop_map(Name::from)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![5 => Just(Protocol::Tcp), 4 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    one_of(&[TrafficPolicy::Cluster, TrafficPolicy::Local])
}

fn port(range: std::ops::Range<u16>) -> impl Strategy<Value = std::num::NonZeroU16> {
    range.prop_map(port_number)
}

fn address(pool: &'static [&'static str]) -> impl Strategy<Value = IpAddr> {
    select(pool).prop_map(ip)
}

fn one_of<T: Clone + Debug + 'static, const N: usize>(
    choices: &[T; N],
) -> impl Strategy<Value = T> + use<T, N> {
    select(choices.to_vec())
}
