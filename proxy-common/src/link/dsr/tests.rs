//! Tests of packets that come through the tunnel. The kernel cannot run a program over a packet of a
//! tunnel that it did not receive, so these run on the host.

use std::{
    net::{IpAddr, SocketAddr},
    vec,
    vec::Vec,
};

use crate::{
    Protocol,
    checksum::Difference,
    layout::{Counter, DirectScope, Masquerading, NodeValue, ServiceKey, flags},
    link::Outcome,
    packet::{Route, TcpFlags},
    testing::{Addresses, FrameResult, Hook, InputFrame, MemoryMaps, Payload, Service, TestNode, TestPacket},
};

/// Runs a test on nodes of both families, whose tunnel takes packets of the router.
fn on_nodes(test: impl Fn(&mut TestNode<'_>)) {
    for addresses in Addresses::BOTH {
        let mut maps = MemoryMaps::default();
        let mut node = TestNode::new(&mut maps, addresses);
        node.config.node.tunnel_link = 9;
        node.config.node.tunnel_mtu = 1_500;
        node.config.dsr_nodes.insert(addresses.router.into());
        test(&mut node);
    }
}

/// Adds a Service, and the same address for packets that come through the tunnel.
fn add_service(node: &mut TestNode<'_>, frontend: IpAddr) -> Service {
    let frontend = SocketAddr::new(frontend, 30_080);
    let endpoint = SocketAddr::new(node.ip.pod, 8080);
    let service = node.add_service(Protocol::Tcp, &[frontend], &[endpoint]);
    let key = ServiceKey::new(frontend.ip().into(), frontend.port(), Protocol::Tcp);
    let value = node.config.services[&key];
    node.config.services.insert(key.tunneled(), value);
    node.write_maps();
    service
}

fn syn(node: &TestNode<'_>, to: IpAddr) -> TestPacket {
    let from = SocketAddr::new(node.ip.client, 40_000);
    TestPacket::tcp(TcpFlags::SYN_ALONE, from, SocketAddr::new(to, 30_080))
}

fn tunneled(node: &mut TestNode<'_>, packet: &TestPacket, from: IpAddr) -> FrameResult {
    let frame = InputFrame { tunnel_source: Some(from.into()), ..InputFrame::new(packet.to_frame()) };
    node.run(Hook::Tunnel, &frame).expect("the host runs all frames")
}

#[test]
fn endpoint_of_this_node_gets_the_packet_with_its_source_and_answers_the_client() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        let packet = syn(node, vip);
        let endpoint = service.outside[0];
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(endpoint)).is_marked(0);
        let reply = packet.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(packet.to)).is_marked(0);
        let later = packet.clone().flags(TcpFlags::ACK_ALONE);
        tunneled(node, &later, ip.router).becomes(&later.clone().to(endpoint)).is_marked(0);
    });
}

#[test]
fn node_port_has_an_address_of_the_other_node() {
    on_nodes(|node| {
        let any: IpAddr = if node.ip.node.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let service = add_service(node, any);
        let packet = syn(node, node.ip.router);
        tunneled(node, &packet, node.ip.router).becomes(&packet.clone().to(service.outside[0]));
        node.ingress(&packet).is_left_alone();
    });
}

#[test]
fn packets_of_unknown_nodes_and_for_no_service_are_dropped() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        add_service(node, vip);
        let packet = syn(node, vip);
        tunneled(node, &packet, node.ip.other_client).is_dropped();
        let elsewhere = syn(node, node.ip.other_pod);
        tunneled(node, &elsewhere, router).is_dropped();
        let other = TestPacket::udp(packet.from, packet.to);
        tunneled(node, &other, router).is_dropped();
        assert_eq!(node.counter(Counter::TunnelRefused), 3);
    });
}

#[test]
fn packet_does_not_go_through_the_tunnel_again() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        let key = ServiceKey::new(vip.into(), 30_080, Protocol::Tcp).tunneled();
        let value = node.config.services.get_mut(&key).expect("added");
        value.flags |= flags::DSR | flags::MASQUERADE_OUTSIDE;
        let number = value.service;
        let endpoint = crate::layout::DsrKey { service: number, addr: service.outside[0].ip().into() };
        node.config.dsr_endpoints.insert(endpoint, ip.router.into());
        node.write_maps();
        let packet = syn(node, vip);
        let result = tunneled(node, &packet, ip.router);
        result.becomes(&packet.clone().to(service.outside[0])).is_marked(NodeValue::MASQUERADE_MARK);
    });
}

/// The last endpoint of this node is gone, and one has an address of the node that the client
/// reached.
#[test]
fn packet_may_keep_its_address_and_get_another_port() {
    on_nodes(|node| {
        let ip = node.ip;
        let endpoint = SocketAddr::new(ip.router, 8080);
        let frontend = SocketAddr::new(ip.router, 30_080);
        let service = node.add_service(Protocol::Tcp, &[frontend], &[endpoint]);
        let key = ServiceKey::new(ip.router.into(), 30_080, Protocol::Tcp);
        let value = node.config.services[&key];
        node.config.services.insert(key.tunneled(), value);
        node.write_maps();
        let packet = syn(node, ip.router);
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(service.outside[0]));
    });
}

#[test]
fn segment_of_an_unknown_connection_is_refused() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        add_service(node, vip);
        let packet = syn(node, vip).flags(TcpFlags::ACK_ALONE);
        let result = tunneled(node, &packet, router);
        assert_eq!(result.outcome, Outcome::Proceed);
        result.is_refused();
    });
}

/// The client reached this node before, which chose an endpoint on another one.
#[test]
fn packet_from_the_tunnel_does_not_follow_a_flow_into_the_tunnel() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip).with_flags(flags::DSR);
        let endpoint =
            crate::layout::DsrKey { service: service.value.service, addr: service.outside[0].ip().into() };
        node.config.dsr_endpoints.insert(endpoint, ip.router.into());
        node.put_service(&service);
        let key = ServiceKey::new(vip.into(), 30_080, Protocol::Tcp);
        let value = node.config.services[&key];
        node.config.services.insert(key.tunneled(), value);
        node.write_maps();
        let packet = syn(node, vip);
        node.ingress(&packet).is_redirected_as(&packet);
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(service.outside[0]));
    });
}

/// Replies go back through the tunnel.
fn return_replies(node: &mut TestNode<'_>) {
    node.config.node.tunnel_returns = 1;
    node.write_maps();
}

/// Returns a frame with the option for the maximum segment size.
fn with_segment_size(packet: &TestPacket, size: u16) -> Vec<u8> {
    let mut packet = packet.clone();
    let [high, low] = size.to_be_bytes();
    if let Payload::Tcp { data, .. } = &mut packet.payload {
        *data = vec![2, 4, high, low];
    }
    let mut frame = packet.to_frame();
    let tcp = frame.len() - 24;
    let change = Difference::of_bytes([frame[tcp + 12], 0], [0x60, 0]);
    frame[tcp + 12] = 0x60;
    let sum = change.apply([frame[tcp + 16], frame[tcp + 17]]);
    frame[tcp + 16..tcp + 18].copy_from_slice(&sum);
    frame
}

fn frame_from_tunnel(node: &mut TestNode<'_>, bytes: Vec<u8>) -> FrameResult {
    let (link, next_hop) = (3, node.ip.client.into());
    let frame = InputFrame {
        tunnel_source: Some(node.ip.router.into()),
        route: Some(Route { link, next_hop }),
        ..InputFrame::new(bytes)
    };
    node.run(Hook::Tunnel, &frame).expect("the host runs all frames")
}

#[test]
fn reply_goes_back_to_the_node_that_the_last_packet_came_from() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        node.config.dsr_nodes.insert(ip.other_client.into());
        node.write_maps();
        let packet = syn(node, vip);
        let reply = packet.clone().to(service.outside[0]).reversed().flags(TcpFlags::SYN_ACK);
        for from in [ip.router, ip.other_client, ip.other_client] {
            tunneled(node, &packet, from).becomes(&packet.clone().to(service.outside[0]));
            let result = node.egress(&reply);
            result.is_redirected_as(&reply.clone().from(packet.to));
            assert_eq!((result.tunneled_to, result.redirected_to), (Some(from.into()), 9));
        }
    });
}

#[test]
fn segments_of_both_sides_are_limited_by_the_tunnel() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip);
        return_replies(node);
        let limit = if vip.is_ipv4() { 1_500 - 36 - 40 } else { 1_500 - 56 - 60 };
        let packet = syn(node, vip);
        let translated = packet.clone().to(service.outside[0]);
        for (size, expected) in [(1_460, limit), (limit, limit), (536, 536)] {
            let result = frame_from_tunnel(node, with_segment_size(&packet, size));
            assert_eq!(result.bytes, with_segment_size(&translated, expected), "{size}");
        }
        let answer = packet.reversed().flags(TcpFlags::SYN_ACK);
        add_client(node);
        let forwarded = TestPacket { hops: answer.hops - 1, ..answer.clone() };
        for (size, expected) in [(1_460, limit), (536, 536)] {
            let result = frame_from_tunnel(node, with_segment_size(&answer, size));
            assert_eq!(result.bytes, with_segment_size(&forwarded, expected), "{size}");
        }
    });
}

/// Makes this node the one that the client reached.
fn add_client(node: &mut TestNode<'_>) {
    let key = ServiceKey::new(node.ip.external_ip.into(), 30_080, Protocol::Tcp);
    node.config.services.get_mut(&key).expect("added").flags |= flags::DSR;
    node.write_maps();
}

#[test]
fn node_that_the_client_reached_sends_the_reply_on() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        add_service(node, vip);
        let reply = syn(node, vip).reversed().flags(TcpFlags::ACK_ALONE);
        let frame = reply.to_frame();
        frame_from_tunnel(node, frame.clone()).is_dropped();
        add_client(node);
        let result = frame_from_tunnel(node, frame);
        result.is_redirected_as(&TestPacket { hops: reply.hops - 1, ..reply.clone() });
        assert_eq!(result.redirected_to, 3);
        let counts = [Counter::TunnelRefused, Counter::ReplyForwarded].map(|counter| node.counter(counter));
        assert_eq!(counts, [1, 1]);
        let last = TestPacket { hops: 1, ..reply };
        frame_from_tunnel(node, last.to_frame()).becomes(&last);
    });
}

#[test]
fn node_sends_fragments_and_errors_on_and_nothing_else() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        add_service(node, vip);
        add_client(node);
        let mut reply = syn(node, vip).reversed().flags(TcpFlags::ACK_ALONE);
        if let Payload::Tcp { data, .. } = &mut reply.payload {
            *data = (0..100).collect();
        }
        let forwarded = TestPacket { hops: reply.hops - 1, ..reply.clone() };
        for part in [0..40, 40..usize::MAX] {
            let fragment = reply.clone().fragment(7, part.clone()).to_frame();
            frame_from_tunnel(node, fragment).is_redirected_as(&forwarded.clone().fragment(7, part));
        }
        frame_from_tunnel(node, reply.clone().fragment(8, 40..64).to_frame()).is_dropped();
        let kind = if vip.is_ipv4() { [3, 3] } else { [1, 4] };
        let error = TestPacket::icmp_error(kind, vip, ip.client, reply.clone().reversed());
        let sent_on = TestPacket { hops: error.hops - 1, ..error.clone() };
        frame_from_tunnel(node, error.to_frame()).is_redirected_as(&sent_on);
        let about_others = TestPacket::icmp_error(kind, vip, ip.client, reply);
        frame_from_tunnel(node, about_others.to_frame()).is_dropped();
    });
}

#[test]
fn endpoint_is_told_that_its_packet_is_too_long_for_the_tunnel() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        let packet = syn(node, vip);
        tunneled(node, &packet, ip.router);
        let mut reply = packet.to(service.outside[0]).reversed().flags(TcpFlags::ACK_ALONE);
        if let Payload::Tcp { data, .. } = &mut reply.payload {
            *data = vec![0; 1_461];
        }
        let (next_hop, kind) = (ip.pod.into(), if vip.is_ipv4() { [3, 4] } else { [2, 0] });
        let input =
            InputFrame { route: Some(Route { link: 3, next_hop }), ..InputFrame::new(reply.to_frame()) };
        let result = node.run(Hook::Egress, &input).expect("the host runs all frames");
        let mut error = TestPacket::icmp_error(kind, ip.client, ip.pod, reply.clone());
        if let Payload::Icmp { length, .. } = &mut error.payload {
            *length = if vip.is_ipv4() { 48 } else { 68 };
        }
        let (to_mac, from_mac) = (reply.from_mac, reply.to_mac);
        let length = if vip.is_ipv4() { 1_464_u32 } else { 1_444 };
        let mut expected = TestPacket { hops: 64, to_mac, from_mac, ..error }.to_frame();
        let icmp = expected.len() - if vip.is_ipv4() { 56 } else { 76 };
        let size = length.to_be_bytes();
        let before = [expected[icmp + 6], expected[icmp + 7]];
        let sum =
            Difference::of_bytes(before, [size[2], size[3]]).apply([expected[icmp + 2], expected[icmp + 3]]);
        expected[icmp + 2..icmp + 4].copy_from_slice(&sum);
        expected[icmp + 6..icmp + 8].copy_from_slice(&size[2..]);
        assert_eq!((result.outcome, result.redirected_to), (Outcome::Redirect, 3));
        assert_eq!(result.bytes, expected);
        let without_route = InputFrame::new(reply.to_frame());
        node.run(Hook::Egress, &without_route).expect("the host runs all frames").is_dropped();
    });
}

#[test]
fn packets_of_whole_flows_are_delivered_without_the_stack() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip);
        node.config.node.masquerading = Masquerading::Programs as u16;
        node.config.node.direct_scope = DirectScope::Whole as u16;
        node.config.node.direct_epoch = 1;
        node.write_maps();
        let packet = syn(node, vip);
        let translated = packet.clone().to(service.outside[0]);
        frame_from_tunnel(node, packet.to_frame()).becomes(&translated);
        node.config.direct_links.insert(3);
        node.write_maps();
        let result = frame_from_tunnel(node, packet.to_frame());
        result.is_redirected_as(&TestPacket { hops: packet.hops - 1, ..translated });
        assert_eq!(result.redirected_to, 3);
    });
}
