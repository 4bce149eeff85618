//! Random frames and Services. They have few addresses and ports, so that they often match.

use std::{boxed::Box, net::SocketAddr, vec, vec::Vec};

use proptest::{collection::vec as vec_of, prelude::*, sample::select};

use super::{Addresses, ChecksumState, ConfigMaps, Extension, Hook, InputFrame, LO, Payload, TestPacket};
use crate::{
    Protocol,
    layout::{
        Endpoint, EndpointKey, EndpointValue, List, LocalDetection, MaglevKey, MaglevPage, MemberKey,
        ServiceKey, ServiceValue, XdpLinkValue, flags,
    },
    maglev::TableSize,
    packet::TcpFlags,
};

/// An event on a node.
#[derive(Clone, Debug)]
pub enum Step {
    /// A frame passes a hook.
    Pass(Hook, InputFrame),
    /// Seconds pass.
    Wait(u64),
    /// Userspace writes the maps.
    Configure(Box<ConfigMaps>),
}

/// Generates a node with Services, and the events on it.
pub fn case() -> impl Strategy<Value = (ConfigMaps, Vec<Step>)> {
    select(&Addresses::BOTH[..])
        .prop_flat_map(|ip| (config(ip), vec_of(step(ip), 1..24)))
        .prop_map(|(config, steps)| (config, steps))
}

fn step(ip: Addresses) -> impl Strategy<Value = Step> {
    prop_oneof![
        16 => (hook(), input(ip)).prop_map(|(hook, input)| Step::Pass(hook, input)),
        1 => select(&[1, 25, 100][..]).prop_map(Step::Wait),
        1 => config(ip).prop_map(|config| Step::Configure(Box::new(config))),
    ]
}

/// Generates a hook. XDP passes all frames here, because no flow is on the direct path.
pub fn hook() -> impl Strategy<Value = Hook> {
    select(&[Hook::Ingress, Hook::Ingress, Hook::Egress, Hook::Egress, Hook::Xdp][..])
}

/// Generates a frame: a packet, a damaged packet, or random bytes.
pub fn input(ip: Addresses) -> impl Strategy<Value = InputFrame> {
    let frame = prop_oneof![
        6 => packet(ip).prop_map(|packet| packet.to_frame()),
        2 => damaged(ip),
        1 => vec_of(any::<u8>(), 15..200),
    ];
    (
        frame,
        select(&[0u32, 0, 0, 0x4000, 0x8001, 0xc000][..]),
        select(&[ChecksumState::None, ChecksumState::None, ChecksumState::Complete][..]),
    )
        .prop_map(|(bytes, mark, checksum)| InputFrame { mark, checksum, ..InputFrame::new(bytes) })
}

/// Generates a packet that is cut short or has some bytes changed.
fn damaged(ip: Addresses) -> impl Strategy<Value = Vec<u8>> {
    (packet(ip), vec_of((any::<prop::sample::Index>(), any::<u8>()), 0..4), 0..60usize).prop_map(
        |(packet, changes, cut)| {
            let mut bytes = packet.to_frame();
            bytes.truncate((bytes.len() - cut.min(bytes.len())).max(15));
            for (index, byte) in changes {
                let index = index.index(bytes.len());
                bytes[index] = byte;
            }
            bytes
        },
    )
}

/// Generates a packet or a fragment.
pub fn packet(ip: Addresses) -> impl Strategy<Value = TestPacket> {
    let plain = transport(ip);
    let error = (kind(ip), host(ip), host(ip), transport(ip), 0..80usize).prop_map(
        |(kind, from, to, inner, bytes)| {
            let mut error = TestPacket::icmp_error(kind, from.ip(), to.ip(), inner);
            if let Payload::Icmp { length, .. } = &mut error.payload {
                *length = bytes;
            }
            error
        },
    );
    (prop_oneof![4 => plain, 1 => error], headers(ip), part()).prop_map(|(packet, headers, part)| {
        let (to_mac, vlan_tags, options, extensions) = headers;
        let packet = TestPacket { to_mac, vlan_tags, options, extensions, ..packet };
        match part {
            Some((id, start, end)) => packet.fragment(id, start..end),
            None => packet,
        }
    })
}

type Headers = ([u8; 6], Vec<u16>, Vec<u8>, Vec<Extension>);

fn headers(ip: Addresses) -> impl Strategy<Value = Headers> {
    let plain = Just(([0; 6], Vec::new(), Vec::new(), Vec::new()));
    let is_v4 = ip.node.is_ipv4();
    let others = (
        select(&[[0; 6], [0; 6], [0; 6], [2; 6]][..]),
        vec_of(select(&[0x8100u16, 0x88a8][..]), 0..4),
        (0..=10usize).prop_map(|words| [1].repeat(words * 4)),
        vec_of((select(&[0u8, 43, 60, 51][..]), 1..=4u8), 0..8),
    )
        .prop_map(move |(to_mac, vlan_tags, options, extensions)| {
            let extensions =
                extensions.into_iter().map(|(kind, units)| Extension { kind, length: units * 8 });
            let extensions = if is_v4 { Vec::new() } else { extensions.collect() };
            (to_mac, vlan_tags, if is_v4 { options } else { Vec::new() }, extensions)
        });
    prop_oneof![3 => plain, 1 => others]
}

fn part() -> impl Strategy<Value = Option<(u32, usize, usize)>> {
    let part = (0..3u32, 0..4usize, 1..6usize).prop_map(|(id, start, length)| {
        let end = if length == 5 { usize::MAX } else { (start + length) * 8 };
        Some((id, start * 8, end))
    });
    prop_oneof![4 => Just(None), 1 => part]
}

/// Generates a TCP segment or UDP datagram.
pub fn transport(ip: Addresses) -> impl Strategy<Value = TestPacket> {
    (ends(ip), any::<bool>(), any::<u8>(), 0..40usize, any::<bool>()).prop_map(
        |((from, to), is_tcp, flags, length, has_sum)| {
            let data = vec![flags; length];
            if is_tcp {
                // Most segments have common flags.
                let usual = [2, 2, 0x12, 0x10, 0x10, 0x11, 4];
                let flags = usual.get(usize::from(flags % 8)).copied().unwrap_or(flags & 0x1f);
                let packet = TestPacket::new(from, to, Payload::Tcp { flags: TcpFlags(flags), data });
                // Some acknowledge what the endpoint has not sent.
                if has_sum { packet } else { packet.acknowledgement(1 << 30) }
            } else {
                let is_unsummed = !has_sum && flags < 64 && from.is_ipv4();
                let checksum = is_unsummed.then_some([0, 0]);
                TestPacket { checksum, ..TestPacket::new(from, to, Payload::Udp { data }) }
            }
        },
    )
}

/// Generates source and destination: client and Service, client and endpoint, endpoint and client,
/// or any.
fn ends(ip: Addresses) -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
    let clients = [ip.client, ip.client, ip.other_client, ip.pod];
    let client =
        (select(clients.to_vec()), select(&[40_000u16, 40_000, 40_001][..])).prop_map(SocketAddr::from);
    let endpoint = select(endpoints(ip).to_vec());
    let service = select(vip(ip).to_vec());
    prop_oneof![
        4 => (client.clone(), service),
        1 => (client.clone(), endpoint.clone()),
        3 => (endpoint, client),
        2 => (host(ip), host(ip)),
    ]
}

fn host(ip: Addresses) -> impl Strategy<Value = SocketAddr> {
    let hosts =
        [ip.client, ip.other_client, ip.node, ip.cluster_ip, ip.external_ip, ip.pod, ip.other_pod, ip.router];
    (select(hosts.to_vec()), select(&[80u16, 443, 8080, 30_053, 40_000][..])).prop_map(SocketAddr::from)
}

fn kind(ip: Addresses) -> impl Strategy<Value = [u8; 2]> {
    let kinds = if ip.node.is_ipv4() { [3, 4, 5, 8, 11, 12] } else { [1, 2, 3, 4, 128, 137] };
    (select(kinds.to_vec()), 0..5u8).prop_map(|(kind, code)| [kind, code])
}

const fn endpoints(ip: Addresses) -> [SocketAddr; 2] {
    [SocketAddr::new(ip.pod, 8080), SocketAddr::new(ip.other_pod, 80)]
}

const fn vip(ip: Addresses) -> [SocketAddr; 4] {
    [
        SocketAddr::new(ip.cluster_ip, 80),
        SocketAddr::new(ip.external_ip, 443),
        SocketAddr::new(ip.node, 30_053),
        SocketAddr::new(ip.node, 443),
    ]
}

/// Generates the maps that userspace writes. A list without a Maglev table has at most one
/// endpoint, so that random numbers decide nothing.
pub fn config(ip: Addresses) -> impl Strategy<Value = ConfigMaps> {
    let detection = [LocalDetection::None, LocalDetection::Source, LocalDetection::Link];
    let services = vec_of((any::<bool>(), service(ip)), 8);
    (services, select(detection.to_vec()), any::<bool>(), any::<bool>()).prop_map(
        move |(services, detection, has_link, refuses)| {
            let mut config = ConfigMaps::default();
            config.node.local_detection = detection as u32;
            config.node.refusing = u32::from(refuses);
            config.node_addresses.insert(ip.node.into());
            config.local_sources.insert((ip.pods.0.into(), ip.pods.1));
            if has_link {
                config.local_links.insert(1);
            }
            let protocols = [Protocol::Tcp, Protocol::Udp].into_iter();
            let keys = protocols.flat_map(|protocol| vip(ip).map(|vip| (protocol, vip)));
            for (number, ((protocol, vip), (is_served, service))) in (1..).zip(keys.zip(services)) {
                if is_served {
                    put(&mut config, number, protocol, vip, &service);
                }
            }
            config
                .xdp_links
                .insert(LO, XdpLinkValue { address: [0; 6], takes_frames: 0, redirects_to_itself: 0 });
            config.source_ranges.insert((1, ip.client.into(), 128));
            config.source_ranges.insert((6, ip.pods.0.into(), ip.pods.1));
            config
        },
    )
}

/// Endpoints for clients inside and outside, serving endpoints, flags, affinity and generation.
type Service = ([Option<SocketAddr>; 2], Vec<SocketAddr>, u16, u32, u32);

fn service(ip: Addresses) -> impl Strategy<Value = Service> {
    let endpoint = || prop::option::weighted(0.85, select(endpoints(ip).to_vec()));
    let flags = [
        0,
        0,
        flags::MASQUERADE_OUTSIDE,
        flags::MASQUERADE_INSIDE,
        flags::DROP_WHEN_EMPTY,
        flags::SOURCE_RANGES,
        SMALL_TABLE,
        SMALL_TABLE | flags::MASQUERADE_OUTSIDE,
    ];
    (
        [endpoint(), endpoint()],
        prop::sample::subsequence(endpoints(ip).to_vec(), 0..=2),
        select(flags.to_vec()),
        select(&[0u32, 0, 60][..]),
        0..3u32,
    )
}

/// The flags of the smallest Maglev table.
const SMALL_TABLE: u16 = 1 << 8;

/// Gives the list for clients outside a second endpoint, and a Maglev table without its second
/// page. Some entries of the first page have no slot.
fn put_table(config: &mut ConfigMaps, key: EndpointKey, first: EndpointValue) {
    let Endpoint { addr, port, .. } = first.endpoint;
    let second = EndpointValue { endpoint: Endpoint::new(addr, port + 1), ..first };
    config.endpoints.insert(EndpointKey { slot: 1, ..key }, second);
    config.members.insert(MemberKey { service: key.service, list: key.list, endpoint: second.endpoint });
    let size = TableSize::of_flags(SMALL_TABLE).expect("a size").entries();
    let slots = core::array::from_fn(|entry| [0, 1, MaglevPage::NO_SLOT][entry % 3]);
    let page = MaglevKey { service: key.service, list: key.list, size, page: 0 };
    config.maglev.insert(page, MaglevPage { slots });
}

fn put(config: &mut ConfigMaps, number: u32, protocol: Protocol, vip: SocketAddr, service: &Service) {
    let ([inside, outside], serving, flags, affinity_seconds, generation) = service.clone();
    let has_table = outside.is_some() && flags & SMALL_TABLE != 0;
    let value = ServiceValue {
        service: number,
        generation,
        inside_count: inside.is_some().into(),
        outside_count: if has_table { 2 } else { outside.is_some().into() },
        affinity_seconds,
        inside_list: List::Cluster as u8,
        outside_list: List::Local as u8,
        flags,
    };
    let is_node_port = vip.port() == 30_053;
    let addr: crate::Addr = vip.ip().into();
    let addr = if is_node_port { addr.any() } else { addr };
    config.services.insert(ServiceKey::new(addr, vip.port(), protocol), value);
    let lists = [(List::Cluster, inside), (List::Local, outside)];
    let in_slots = lists.into_iter().filter_map(|(list, endpoint)| Some((list.number(), endpoint?)));
    for (list, endpoint) in in_slots {
        let endpoint = Endpoint::new(endpoint.ip().into(), endpoint.port());
        let value = EndpointValue { endpoint, generation };
        let key = EndpointKey { service: number, list, slot: 0 };
        config.endpoints.insert(key, value);
        config.members.insert(MemberKey { service: number, list, endpoint });
        if has_table && list == List::Local.number() {
            put_table(config, key, value);
        }
    }
    for endpoint in serving {
        let endpoint = Endpoint::new(endpoint.ip().into(), endpoint.port());
        config.members.insert(MemberKey { service: number, list: List::Serving.number(), endpoint });
    }
}
