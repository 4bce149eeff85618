//! Tests of segments that go into the tunnel and out of it without the kernel's link, on nodes
//! with whole flows.

use std::{
    net::{IpAddr, SocketAddr},
    vec::Vec,
};

use super::{add_service, on_nodes, syn};
use crate::{
    AddrV4,
    layout::{Counter, DirectScope, DirectWatch, Direction, DsrKey, Masquerading, flags, flow_state},
    link::Outcome,
    packet::{PlainPacket, Route, TcpFlags, TunnelStart},
    testing::{
        FrameResult, Hook, InputFrame, MemoryFrame, Payload, Service, TUNNEL_PORT, TestNode, TestPacket,
    },
};

const UPLINK: u32 = 2;
const POD: u32 = 3;
const ID: [u8; 2] = [0x34, 0x12];
const HARDWARE: [u8; 12] = [2, 0, 0, 0, 0, 7, 2, 0, 0, 0, 0, 9];

/// Runs a test on a node of IPv4 whose whole flows take the direct path.
fn on_whole_node(test: impl Fn(&mut TestNode<'_>)) {
    on_nodes(|node| {
        if node.ip.node.is_ipv6() {
            return;
        }
        let config = &mut node.config;
        config.node.masquerading = Masquerading::Programs as u16;
        config.node.direct_scope = DirectScope::Whole as u16;
        config.node.direct_epoch = 1;
        config.node.tunnel_v4 = node.ip.node.into();
        config.direct_links.extend([UPLINK, POD]);
        let watch = DirectWatch { since_ns: 0, until_ns: u64::MAX, portless_until_ns: u64::MAX / 2 };
        config.direct_watch = watch;
        node.write_maps();
        test(node);
    });
}

/// Runs a test with a connection to an endpoint on the node of the router.
fn with_tunnel(test: impl Fn(&mut TestNode<'_>, &TestPacket)) {
    on_whole_node(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip).with_flags(flags::DSR | flags::MASQUERADE_OUTSIDE);
        let key = DsrKey { service: service.value.service, addr: node.ip.pod.into() };
        node.config.dsr_endpoints.insert(key, node.ip.router.into());
        node.put_service(&service);
        let syn = syn(node, vip);
        let result = arrive(node, syn.to_frame(), UPLINK);
        assert_eq!((result.outcome, result.redirected_to), (Outcome::Redirect, 9));
        test(node, &syn.flags(TcpFlags::ACK_ALONE));
    });
}

/// Runs a test with a connection that came through the tunnel to an endpoint of this node.
fn with_endpoint(test: impl Fn(&mut TestNode<'_>, &TestPacket, &Service)) {
    on_whole_node(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip);
        let syn = syn(node, vip);
        super::tunneled(node, &syn, node.ip.router).becomes(&syn.clone().to(service.outside[0]));
        test(node, &syn.flags(TcpFlags::ACK_ALONE).acknowledgement(1), &service);
    });
}

fn route(node: &TestNode<'_>, link: u32) -> Route {
    Route { link, next_hop: node.ip.router.into(), hardware: HARDWARE, to_peer: false }
}

fn arrive(node: &mut TestNode<'_>, bytes: Vec<u8>, out: u32) -> FrameResult {
    let route = Some(route(node, out));
    let frame = InputFrame { link: UPLINK, route, ..InputFrame::new(bytes) };
    node.run(Hook::Ingress, &frame).expect("the host runs all frames")
}

/// Returns the frame in which a packet goes through the tunnel.
fn in_tunnel(packet: &TestPacket, hardware: [u8; 12], [from, to]: [IpAddr; 2], id: [u8; 2]) -> Vec<u8> {
    let frame = MemoryFrame::<false>::new(&InputFrame::new(packet.to_frame()));
    let plain = PlainPacket::read(&frame).expect("a plain packet");
    let ends = [from, to].map(|address| AddrV4::last_of(&address.into()));
    let start = TunnelStart::new(&hardware, ends, TUNNEL_PORT, (id, &plain));
    [start.bytes().expect("all bytes"), &packet.to_ip_packet()[..]].concat()
}

/// Returns a packet of this length, from its IP header on.
fn of_length(mut packet: TestPacket, length: usize) -> TestPacket {
    let headers = packet.to_ip_packet().len();
    if let Payload::Tcp { data, .. } = &mut packet.payload {
        data.resize(data.len() + length - headers, 0);
    }
    packet
}

/// Lets a packet come through the tunnel from the router, to its endpoint's link.
fn come_through(node: &mut TestNode<'_>, packet: &TestPacket) -> FrameResult {
    let bytes = in_tunnel(packet, [0; 12], [node.ip.router, node.ip.node], ID);
    arrive(node, bytes, POD)
}

#[test]
fn segments_after_the_first_get_the_headers_of_the_tunnel() {
    with_tunnel(|node, segment| {
        let ends = [node.ip.node, node.ip.router];
        for (by_kernel, flags) in [
            (true, TcpFlags::ACK_ALONE),
            (false, TcpFlags::ACK_ALONE),
            (false, TcpFlags::FIN_ACK),
            (false, TcpFlags::ACK_ALONE),
        ] {
            let segment = segment.clone().flags(flags);
            let result = arrive(node, segment.to_frame(), UPLINK);
            assert_eq!((result.outcome, result.redirected_to), (Outcome::Redirect, UPLINK));
            assert_eq!(result.tunneled_to, None, "the kernel's link does not get it");
            assert_eq!(result.is_headed_by_kernel, by_kernel);
            let id = [result.bytes[18], result.bytes[19]];
            assert_eq!(result.bytes, in_tunnel(&segment, HARDWARE, ends, id));
        }
        let flow = node.flow(Direction::Original, segment).expect("a flow");
        let seen = flow_state::REPLIED | flow_state::CLIENT_CLOSED;
        assert_eq!(flow.state & (seen | flow_state::ASSURED), seen);
        assert_eq!(node.counter(Counter::SentThroughTunnel), 5);
        let bytes = node.service_counts(flow.service).bytes_to_endpoints;
        assert_eq!(bytes, 5 * u64::try_from(segment.to_ip_packet().len()).expect("short"));
    });
}

#[test]
fn other_packets_enter_the_kernels_link_unchanged() {
    with_tunnel(|node, segment| {
        let client = segment.clone();
        for packet in [
            client.clone().flags(TcpFlags::SYN_ALONE),
            client.clone().flags(TcpFlags::RST_ALONE),
            TestPacket { options: [1; 4].to_vec(), ..client.clone() },
            TestPacket { vlan_tags: [0x8100].to_vec(), ..client.clone() },
        ] {
            let result = arrive(node, packet.to_frame(), UPLINK);
            result.is_redirected_as(&packet);
            assert_eq!(result.tunneled_to, Some(node.ip.router.into()), "{packet:?}");
        }
        let cut = InputFrame {
            segments: Some((10, 2)),
            link: UPLINK,
            route: Some(route(node, UPLINK)),
            ..InputFrame::new(client.to_frame())
        };
        let result = node.run(Hook::Ingress, &cut).expect("the host runs all frames");
        assert_eq!(result.tunneled_to, Some(node.ip.router.into()), "the kernel will cut it");
        let marked = InputFrame { mark: 1, link: UPLINK, ..InputFrame::new(client.to_frame()) };
        let frame = InputFrame { route: Some(route(node, UPLINK)), ..marked };
        let result = node.run(Hook::Ingress, &frame).expect("the host runs all frames");
        assert_eq!(result.tunneled_to, Some(node.ip.router.into()));
    });
}

/// The kernel has no route, or its link is none of the direct path, or rules look at ports.
#[test]
fn segments_enter_the_kernels_link_where_the_programs_may_not_send_them_on() {
    const CHANGES: [fn(&mut TestNode<'_>); 4] = [
        |node| {
            node.config.direct_links.remove(&UPLINK);
        },
        |node| node.config.direct_watch.portless_until_ns = 0,
        |node| node.config.node.tunnel_v4 = crate::Addr::UNSPECIFIED_V6,
        |node| node.config.node.direct_scope = DirectScope::Learned as u16,
    ];
    for change in CHANGES {
        with_tunnel(|node, segment| {
            change(node);
            node.write_maps();
            let result = arrive(node, segment.to_frame(), UPLINK);
            result.is_redirected_as(segment);
            assert_eq!(result.tunneled_to, Some(node.ip.router.into()));
        });
    }
    with_tunnel(|node, segment| {
        let frame = InputFrame { link: UPLINK, ..InputFrame::new(segment.to_frame()) };
        let result = node.run(Hook::Ingress, &frame).expect("the host runs all frames");
        assert_eq!(result.tunneled_to, Some(node.ip.router.into()));
    });
}

#[test]
fn segment_that_is_too_long_for_the_tunnel_is_answered() {
    with_tunnel(|node, segment| {
        let longest = 1_500 - 36;
        let fits = of_length(segment.clone(), longest);
        assert_eq!(arrive(node, fits.to_frame(), UPLINK).redirected_to, UPLINK);
        let too_long = of_length(segment.clone(), longest + 1);
        arrive(node, too_long.to_frame(), UPLINK);
        assert_eq!(node.counter(Counter::TooLongForTunnel), 1);
        assert_eq!(node.counter(Counter::SentThroughTunnel), 2);
    });
}

#[test]
fn segments_that_come_through_the_tunnel_go_to_their_endpoint_at_once() {
    with_endpoint(|node, segment, service| {
        let endpoint = service.outside[0];
        let answer = segment.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK).sequence(0);
        node.egress(&answer);
        for (by_kernel, flags) in
            [(true, TcpFlags::ACK_ALONE), (false, TcpFlags::ACK_ALONE), (false, TcpFlags::FIN_ACK)]
        {
            let segment = segment.clone().flags(flags);
            let result = come_through(node, &segment);
            let (to_mac, from_mac) =
                ([0, 6]).map(|at| *HARDWARE[at..].first_chunk().expect("6 bytes")).into();
            let delivered = TestPacket { hops: segment.hops - 1, to_mac, from_mac, ..segment.to(endpoint) };
            assert_eq!((result.outcome, result.redirected_to), (Outcome::Redirect, POD));
            assert_eq!((result.bytes, result.is_headed_by_kernel), (delivered.to_frame(), by_kernel));
        }
        let flow = node.flow(Direction::Original, segment).expect("a flow");
        let seen = flow_state::ASSURED | flow_state::CLIENT_CLOSED;
        assert_eq!(flow.state & seen, seen);
        let bytes = node.service_counts(flow.service).bytes_to_endpoints;
        assert_eq!(bytes, 4 * u64::try_from(segment.to_ip_packet().len()).expect("short"));
    });
}

/// The kernel takes them out of the tunnel, or drops them.
#[test]
fn other_packets_of_the_tunnel_are_left_to_the_kernel() {
    with_endpoint(|node, segment, _| {
        let (router, own) = (node.ip.router, node.ip.node);
        let other_port = TestPacket { from: SocketAddr::new(segment.from.ip(), 1), ..segment.clone() };
        let to_node = |packet: &TestPacket| in_tunnel(packet, [0; 12], [router, own], ID);
        let with = |at: usize, byte| {
            let mut frame = to_node(segment);
            frame[at] = byte;
            frame
        };
        for (at, frame) in [
            to_node(&segment.clone().flags(TcpFlags::SYN_ALONE)),
            to_node(&segment.clone().flags(TcpFlags::RST_ALONE)),
            to_node(&TestPacket::udp(segment.from, segment.to)),
            to_node(&other_port),
            to_node(&TestPacket { hops: 1, ..segment.clone() }),
            in_tunnel(segment, [0; 12], [node.ip.other_client, own], ID),
            in_tunnel(segment, [0; 12], [router, node.ip.other_pod], ID),
            // A checksum, another network, and congestion on the way.
            with(40, 1),
            with(48, 1),
            with(15, 3),
        ]
        .into_iter()
        .enumerate()
        {
            let result = arrive(node, frame.clone(), POD);
            assert_eq!((result.outcome, result.bytes), (Outcome::Proceed, frame), "{at}");
        }
        let cut = InputFrame {
            link: UPLINK,
            route: Some(route(node, POD)),
            segments: Some((500, 2)),
            ..InputFrame::new(to_node(segment))
        };
        let result = node.run(Hook::Ingress, &cut).expect("the host runs all frames");
        assert_eq!(result.outcome, Outcome::Proceed, "the kernel put it together");
    });
}

/// The tunnel is down, the flow is held, or its replies go back through the tunnel.
#[test]
fn segments_of_the_tunnel_are_left_to_the_kernel_where_the_programs_may_not_take_them() {
    with_endpoint(|node, segment, _| {
        node.config.node.tunnel_link = 0;
        node.write_maps();
        assert_eq!(come_through(node, segment).outcome, Outcome::Proceed);
    });
    for state in [flow_state::HELD, flow_state::RETURN, flow_state::MASQUERADE, flow_state::RESET] {
        with_endpoint(|node, segment, _| {
            let mut maps = node.state();
            maps.unassured_flows.values_mut().for_each(|flow| flow.state |= state);
            node.set_state(&maps);
            let before = node.state();
            assert_eq!(come_through(node, segment).outcome, Outcome::Proceed, "{state:#x}");
            assert_eq!(node.state().unassured_flows, before.unassured_flows);
        });
    }
}

#[test]
fn answers_leave_for_the_client_on_the_link_where_they_come_in() {
    with_endpoint(|node, segment, service| {
        let endpoint = service.outside[0];
        let answer = segment.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK);
        for (at, flags) in [TcpFlags::SYN_ACK, TcpFlags::ACK_ALONE, TcpFlags::FIN_ACK].into_iter().enumerate()
        {
            let answer = answer.clone().flags(flags);
            let frame = InputFrame {
                link: POD,
                route: Some(route(node, UPLINK)),
                ..InputFrame::new(answer.to_frame())
            };
            let result = node.run(Hook::Ingress, &frame).expect("the host runs all frames");
            assert_eq!((result.outcome, result.redirected_to), (Outcome::Redirect, UPLINK));
            if at > 0 {
                let (to_mac, from_mac) =
                    ([0, 6]).map(|at| *HARDWARE[at..].first_chunk().expect("6 bytes")).into();
                let expected =
                    TestPacket { hops: answer.hops - 1, to_mac, from_mac, ..answer.from(segment.to) };
                assert_eq!(result.bytes, expected.to_frame());
            }
        }
        let flow = node.flow(Direction::Original, segment).expect("a flow");
        let seen = flow_state::REPLIED | flow_state::ENDPOINT_CLOSED;
        assert_eq!(flow.state & seen, seen);
    });
}
