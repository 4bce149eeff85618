//! Frames and Services that nobody thought of, out of few addresses and ports, so that they often meet.

use std::{net::SocketAddr, vec, vec::Vec};

use proptest::{collection::vec as vec_of, prelude::*, sample::select};

use super::{Carries, Extension, Given, Hook, Places, Sent, Sum, World};
use crate::{
    Protocol,
    layout::{Endpoint, EndpointKey, List, LocalDetection, MemberKey, ServiceKey, ServiceValue, flags},
    packet::TcpFlags,
};

/// What happens to a node.
#[derive(Clone, Debug)]
pub enum Step {
    /// A frame passes.
    Pass(Hook, Given),
    /// So many seconds do.
    Wait(u64),
    /// Userspace writes other maps.
    Configure(World),
}

/// A node with some Services, and what then happens to it.
pub fn case() -> impl Strategy<Value = (World, Vec<Step>)> {
    select(&Places::BOTH[..])
        .prop_flat_map(|at| (world(at), vec_of(step(at), 1..24)))
        .prop_map(|(world, steps)| (world, steps))
}

fn step(at: Places) -> impl Strategy<Value = Step> {
    prop_oneof![
        16 => (hook(), given(at)).prop_map(|(hook, given)| Step::Pass(hook, given)),
        1 => select(&[1, 25, 100][..]).prop_map(Step::Wait),
        1 => world(at).prop_map(Step::Configure),
    ]
}

/// One of the two.
pub fn hook() -> impl Strategy<Value = Hook> {
    select(&[Hook::Ingress, Hook::Egress][..])
}

/// A frame: a packet, a packet with something changed, or noise.
pub fn given(at: Places) -> impl Strategy<Value = Given> {
    let frame = prop_oneof![
        6 => sent(at).prop_map(|sent| sent.bytes()),
        2 => damaged(at),
        1 => vec_of(any::<u8>(), 15..200),
    ];
    (
        frame,
        select(&[0u32, 0, 0, 0x4000, 0x8001, 0xc000][..]),
        select(&[Sum::None, Sum::None, Sum::Complete][..]),
    )
        .prop_map(|(bytes, mark, sum)| Given { mark, sum, ..Given::new(bytes) })
}

/// A packet, cut short or with some bytes changed.
fn damaged(at: Places) -> impl Strategy<Value = Vec<u8>> {
    (sent(at), vec_of((any::<prop::sample::Index>(), any::<u8>()), 0..4), 0..60usize).prop_map(
        |(sent, changes, cut)| {
            let mut bytes = sent.bytes();
            bytes.truncate((bytes.len() - cut.min(bytes.len())).max(15));
            for (index, byte) in changes {
                let index = index.index(bytes.len());
                bytes[index] = byte;
            }
            bytes
        },
    )
}

/// A packet or a fragment.
pub fn sent(at: Places) -> impl Strategy<Value = Sent> {
    let plain = transport(at);
    let error = (kind(at), host(at), host(at), transport(at), 0..80usize).prop_map(
        |(kind, from, to, told, bytes)| {
            let mut error = Sent::error(kind, from.ip(), to.ip(), told);
            if let Carries::Icmp { length, .. } = &mut error.carries {
                *length = bytes;
            }
            error
        },
    );
    (prop_oneof![4 => plain, 1 => error], headers(at), part()).prop_map(|(sent, headers, part)| {
        let (to_mac, tags, options, extensions) = headers;
        let sent = Sent { to_mac, tags, options, extensions, ..sent };
        match part {
            Some((id, start, end)) => sent.part(id, start..end),
            None => sent,
        }
    })
}

type Headers = ([u8; 6], Vec<u16>, Vec<u8>, Vec<Extension>);

fn headers(at: Places) -> impl Strategy<Value = Headers> {
    let plain = Just(([0; 6], Vec::new(), Vec::new(), Vec::new()));
    let is_v4 = at.node.is_ipv4();
    let others = (
        select(&[[0; 6], [0; 6], [0; 6], [2; 6]][..]),
        vec_of(select(&[0x8100u16, 0x88a8][..]), 0..4),
        (0..=10usize).prop_map(|words| [1].repeat(words * 4)),
        vec_of((select(&[0u8, 43, 60, 51][..]), 1..=4u8), 0..8),
    )
        .prop_map(move |(to_mac, tags, options, extensions)| {
            let extensions =
                extensions.into_iter().map(|(kind, units)| Extension { kind, length: units * 8 });
            let extensions = if is_v4 { Vec::new() } else { extensions.collect() };
            (to_mac, tags, if is_v4 { options } else { Vec::new() }, extensions)
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

/// A segment or datagram.
pub fn transport(at: Places) -> impl Strategy<Value = Sent> {
    (ends(at), any::<bool>(), any::<u8>(), 0..40usize, any::<bool>()).prop_map(
        |((from, to), is_tcp, flags, length, has_sum)| {
            let data = vec![flags; length];
            if is_tcp {
                // Most segments have one of the usual sets of flags.
                let usual = [2, 2, 0x12, 0x10, 0x10, 0x11, 4];
                let flags = usual.get(usize::from(flags % 8)).copied().unwrap_or(flags & 0x1f);
                Sent::new(from, to, Carries::Tcp { flags: TcpFlags(flags), data })
            } else {
                let is_unsummed = !has_sum && flags < 64 && from.is_ipv4();
                let checksum = is_unsummed.then_some([0, 0]);
                Sent { checksum, ..Sent::new(from, to, Carries::Udp { data }) }
            }
        },
    )
}

/// Two that may speak: a client and a Service, one and an endpoint, or any.
fn ends(at: Places) -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
    let clients = [at.client, at.client, at.other_client, at.pod];
    let client =
        (select(clients.to_vec()), select(&[40_000u16, 40_000, 40_001][..])).prop_map(SocketAddr::from);
    let endpoint = select(endpoints(at).to_vec());
    let service = select(vip(at).to_vec());
    prop_oneof![
        4 => (client.clone(), service),
        1 => (client.clone(), endpoint.clone()),
        3 => (endpoint, client),
        2 => (host(at), host(at)),
    ]
}

fn host(at: Places) -> impl Strategy<Value = SocketAddr> {
    let hosts =
        [at.client, at.other_client, at.node, at.cluster_ip, at.external_ip, at.pod, at.other_pod, at.router];
    (select(hosts.to_vec()), select(&[80u16, 443, 8080, 30_053, 40_000][..])).prop_map(SocketAddr::from)
}

fn kind(at: Places) -> impl Strategy<Value = [u8; 2]> {
    let kinds = if at.node.is_ipv4() { [3, 4, 5, 8, 11, 12] } else { [1, 2, 3, 4, 128, 137] };
    (select(kinds.to_vec()), 0..5u8).prop_map(|(kind, code)| [kind, code])
}

const fn endpoints(at: Places) -> [SocketAddr; 2] {
    [SocketAddr::new(at.pod, 8080), SocketAddr::new(at.other_pod, 80)]
}

const fn vip(at: Places) -> [SocketAddr; 4] {
    [
        SocketAddr::new(at.cluster_ip, 80),
        SocketAddr::new(at.external_ip, 443),
        SocketAddr::new(at.node, 30_053),
        SocketAddr::new(at.node, 443),
    ]
}

/// What maps hold. A list has one endpoint at most: chance decides nothing.
pub fn world(at: Places) -> impl Strategy<Value = World> {
    let detection = [LocalDetection::None, LocalDetection::Source, LocalDetection::Link];
    let services = vec_of((any::<bool>(), service(at)), 8);
    (services, select(detection.to_vec()), any::<bool>()).prop_map(move |(services, detection, has_link)| {
        let mut world = World::default();
        world.node.local_detection = detection as u32;
        world.node_addresses.insert(at.node.into());
        world.local_sources.insert((at.pods.0.into(), at.pods.1));
        if has_link {
            world.local_links.insert(1);
        }
        let protos = [Protocol::Tcp, Protocol::Udp].into_iter();
        let keys = protos.flat_map(|proto| vip(at).map(|vip| (proto, vip)));
        for (number, ((proto, vip), (is_served, service))) in (1..).zip(keys.zip(services)) {
            if is_served {
                put(&mut world, number, proto, vip, &service);
            }
        }
        world.source_ranges.insert((1, at.client.into(), 128));
        world.source_ranges.insert((6, at.pods.0.into(), at.pods.1));
        world
    })
}

/// Endpoints for callers inside and outside, those that serve, flags, affinity and generation.
type Service = ([Option<SocketAddr>; 2], Vec<SocketAddr>, u16, u32, u32);

fn service(at: Places) -> impl Strategy<Value = Service> {
    let endpoint = || prop::option::weighted(0.85, select(endpoints(at).to_vec()));
    let flags = [
        0,
        0,
        flags::MASQUERADE_OUTSIDE,
        flags::MASQUERADE_INSIDE,
        flags::DROP_WHEN_EMPTY,
        flags::SOURCE_RANGES,
    ];
    (
        [endpoint(), endpoint()],
        prop::sample::subsequence(endpoints(at).to_vec(), 0..=2),
        select(flags.to_vec()),
        select(&[0u32, 0, 60][..]),
        0..3u32,
    )
}

fn put(world: &mut World, number: u32, proto: Protocol, vip: SocketAddr, service: &Service) {
    let ([inside, outside], serving, flags, affinity_seconds, generation) = service.clone();
    let value = ServiceValue {
        service: number,
        generation,
        inside_count: inside.is_some().into(),
        outside_count: outside.is_some().into(),
        affinity_seconds,
        inside_list: List::Cluster as u8,
        outside_list: List::Local as u8,
        flags,
    };
    let is_node_port = vip.port() == 30_053;
    let addr: crate::Addr = vip.ip().into();
    let addr = if is_node_port { addr.any() } else { addr };
    world.services.insert(ServiceKey::new(addr, vip.port(), proto), value);
    let lists = [(List::Cluster, inside), (List::Local, outside)];
    let in_slots = lists.into_iter().filter_map(|(list, endpoint)| Some((list.number(), endpoint?)));
    for (list, endpoint) in in_slots {
        let endpoint = Endpoint::new(endpoint.ip().into(), endpoint.port());
        world.endpoints.insert(EndpointKey { service: number, generation, slot: 0, list }, endpoint);
        world.members.insert(MemberKey { service: number, list, endpoint });
    }
    for endpoint in serving {
        let endpoint = Endpoint::new(endpoint.ip().into(), endpoint.port());
        world.members.insert(MemberKey { service: number, list: List::Serving.number(), endpoint });
    }
}
