//! Tests of packets that go back through the tunnel.

use std::{collections::BTreeMap, net::SocketAddr, vec, vec::Vec};

use super::{add_service, on_nodes, syn, tunneled};
use crate::{
    Protocol,
    checksum::Difference,
    layout::{Counter, DirectScope, Masquerading, ServiceKey, flags},
    link::Outcome,
    packet::{Route, TcpFlags},
    testing::{FrameResult, Hook, InputFrame, Payload, StateMaps, TestNode, TestPacket},
};

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
        route: Some(Route { link, next_hop, ..Route::NONE }),
        ..InputFrame::new(bytes)
    };
    node.run(Hook::Tunnel, &frame).expect("the host runs all frames")
}

/// Runs a test with the SYN of a client, which may come from two nodes, and with the answer of the
/// endpoint.
fn from_two_nodes(test: impl Fn(&mut TestNode<'_>, &TestPacket, &TestPacket)) {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip);
        return_replies(node);
        node.config.dsr_nodes.insert(node.ip.other_client.into());
        node.write_maps();
        let packet = syn(node, vip);
        let reply = packet.clone().to(service.outside[0]).reversed().flags(TcpFlags::SYN_ACK);
        test(node, &packet, &reply);
    });
}

#[test]
fn reply_goes_back_to_the_node_that_the_last_packet_came_from() {
    from_two_nodes(|node, packet, reply| {
        let ip = node.ip;
        for from in [ip.router, ip.other_client, ip.other_client] {
            tunneled(node, packet, from).becomes(&packet.clone().to(reply.from));
            let result = node.egress(reply);
            result.is_redirected_as(&reply.clone().from(packet.to));
            assert_eq!((result.tunneled_to, result.redirected_to), (Some(from.into()), 9));
        }
    });
}

/// The first node may be gone.
#[test]
fn new_connection_from_the_same_port_goes_back_to_the_node_that_it_came_from() {
    from_two_nodes(|node, packet, reply| {
        let ip = node.ip;
        for from in [ip.router, ip.other_client] {
            tunneled(node, packet, from);
            assert_eq!(node.egress(reply).tunneled_to, Some(from.into()));
            for _ in 0..2 {
                tunneled(node, &packet.clone().flags(TcpFlags::ACK_ALONE), from);
                assert_eq!(node.egress(reply).tunneled_to, Some(from.into()));
            }
            let state = node.state();
            node.set_state(&StateMaps { flows: BTreeMap::new(), unassured_flows: BTreeMap::new(), ..state });
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

/// Two nodes would send it to each other until its hop limit ends.
#[test]
fn packet_from_one_vip_to_another_is_no_reply() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        let service = add_service(node, vip);
        add_client(node);
        let packet = syn(node, vip);
        let packet = packet.clone().from(packet.to);
        let result = frame_from_tunnel(node, packet.to_frame());
        result.becomes(&packet.clone().to(service.outside[0]));
        assert_eq!(node.counter(Counter::ReplyForwarded), 0);
    });
}

#[test]
fn reply_does_not_go_to_a_pod() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        add_service(node, vip);
        add_client(node);
        let reply = syn(node, vip).reversed().flags(TcpFlags::ACK_ALONE);
        // `frame_from_tunnel` has a route to this link.
        node.config.local_links.insert(3);
        node.write_maps();
        frame_from_tunnel(node, reply.to_frame()).is_dropped();
        let counts = [Counter::TunnelRefused, Counter::ReplyForwarded].map(|counter| node.counter(counter));
        assert_eq!(counts, [1, 0]);
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
        let input = InputFrame {
            route: Some(Route { link: 3, next_hop, ..Route::NONE }),
            ..InputFrame::new(reply.to_frame())
        };
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

#[test]
fn next_connection_from_the_same_port_goes_back_through_the_tunnel_too() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        let packet = syn(node, vip);
        let endpoint = packet.clone().to(service.outside[0]).reversed();
        let connect = |node: &mut TestNode<'_>| {
            tunneled(node, &packet, router);
            let result = node.egress(&endpoint.clone().flags(TcpFlags::SYN_ACK));
            assert_eq!((result.outcome, result.tunneled_to), (Outcome::Redirect, Some(router.into())));
        };
        connect(node);
        tunneled(node, &packet.clone().flags(TcpFlags::ACK_ALONE).acknowledgement(8), router);
        tunneled(node, &packet.clone().flags(TcpFlags::FIN_ACK), router);
        node.egress(&endpoint.clone().flags(TcpFlags::FIN_ACK));
        connect(node);
    });
}

#[test]
fn replies_go_to_the_client_itself_once_its_packets_come_directly() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        let packet = syn(node, vip);
        let reply = packet.clone().to(service.outside[0]).reversed().flags(TcpFlags::ACK_ALONE);
        tunneled(node, &packet, router);
        node.egress(&reply).is_redirected_as(&reply.clone().from(packet.to));
        node.ingress(&packet).becomes(&packet.clone().to(service.outside[0]));
        node.egress(&reply).becomes(&reply.clone().from(packet.to));
    });
}

/// The port of the client is also the node port of a Service.
#[test]
fn reply_to_the_port_of_a_service_is_sent_on() {
    on_nodes(|node| {
        let vip = node.ip.external_ip;
        add_service(node, vip);
        add_client(node);
        let any = if vip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        add_service(node, any);
        let mut reply = syn(node, vip).reversed().flags(TcpFlags::ACK_ALONE);
        reply.to = SocketAddr::new(reply.to.ip(), 30_080);
        let forwarded = TestPacket { hops: reply.hops - 1, ..reply.clone() };
        frame_from_tunnel(node, reply.to_frame()).is_redirected_as(&forwarded);
    });
}

#[test]
fn nothing_is_sent_on_to_pods_and_nodes() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        add_service(node, vip);
        add_client(node);
        node.config.node_addresses.insert(ip.node.into());
        node.write_maps();
        let reply = syn(node, vip).reversed().flags(TcpFlags::ACK_ALONE);
        for other in [ip.node, ip.router] {
            let reply = reply.clone().to(SocketAddr::new(other, 40_000));
            frame_from_tunnel(node, reply.to_frame()).is_dropped();
        }
        let kind = if vip.is_ipv4() { [3, 3] } else { [1, 4] };
        let error = TestPacket::icmp_error(kind, vip, ip.other_client, reply.reversed());
        frame_from_tunnel(node, error.to_frame()).is_dropped();
    });
}

#[test]
fn error_of_a_router_goes_back_with_the_vip_as_its_source() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        let packet = syn(node, vip);
        tunneled(node, &packet, ip.router);
        let kind = if vip.is_ipv4() { [3, 4] } else { [2, 0] };
        let translated =
            TestPacket { checksum: Some(sum_of(&packet)), ..packet.clone().to(service.outside[0]) };
        let error = TestPacket::icmp_error(kind, ip.node, ip.client, translated.clone());
        node.egress(&error).is_redirected_as(&TestPacket::icmp_error(kind, vip, ip.client, packet));
        let to_another = TestPacket::icmp_error(kind, ip.node, ip.other_client, translated);
        assert_eq!(node.egress(&to_another).outcome, Outcome::Proceed);
    });
}

/// Programs do not change the checksum of a packet within an error.
fn sum_of(packet: &TestPacket) -> [u8; 2] {
    let bytes = packet.payload_bytes();
    [bytes[16], bytes[17]]
}

#[test]
fn floods_do_not_evict_the_nodes_of_assured_flows() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        let service = add_service(node, vip);
        return_replies(node);
        let packet = syn(node, vip);
        tunneled(node, &packet, router);
        let reply = packet.clone().to(service.outside[0]).reversed();
        node.egress(&reply.clone().flags(TcpFlags::SYN_ACK));
        let assuring = packet.clone().flags(TcpFlags::ACK_ALONE).acknowledgement(8);
        tunneled(node, &assuring, router);
        tunneled(node, &assuring, router);
        let mut state = node.state();
        assert_eq!((state.dsr_returns.len(), state.dsr_new_returns.len()), (1, 1));
        state.dsr_new_returns.clear();
        node.set_state(&state);
        let reply = reply.flags(TcpFlags::ACK_ALONE);
        node.egress(&reply).is_redirected_as(&reply.clone().from(packet.to));
    });
}
