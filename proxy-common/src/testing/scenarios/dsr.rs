//! Direct server return: packets for endpoints on other nodes go through the tunnel, unchanged.

use std::{net::IpAddr, vec, vec::Vec};

use super::{
    Fixture, PROTOCOLS, addr,
    errors::{error_about, kinds},
};
use crate::{
    Protocol::{self, Tcp, Udp},
    layout::{Counter, Direction, DsrKey, List, MaglevKey, MaglevPage, flags, flow_state},
    maglev::TableSize,
    packet::TcpFlags,
    testing::{FrameResult, Hook, InputFrame, Payload, TestNode, TestPacket},
};

/// The interface index of the tunnel.
pub(super) const TUNNEL: u32 = 9;

/// The longest packet that fits, which the tests' ICMP errors name.
pub(super) const LONGEST: usize = 1_300;

/// Sets up the tunnel.
pub(super) fn set_tunnel(node: &mut TestNode<'_>) {
    let headers = if node.ip.node.is_ipv4() { 36 } else { 56 };
    node.config.node.tunnel_link = TUNNEL;
    node.config.node.tunnel_mtu = u32::try_from(LONGEST).expect("short") + headers;
}

/// Adds a Service whose endpoint is on another node, at the address of the router.
fn add_service(node: &mut TestNode<'_>, protocol: Protocol) -> Fixture {
    let mut fixture = Fixture::new(node, protocol);
    fixture.service = fixture.service.with_flags(flags::DSR | flags::MASQUERADE_OUTSIDE);
    set_tunnel(node);
    take_tunnel(node, &fixture, fixture.endpoint.ip(), node.ip.router);
    fixture
}

/// Makes an endpoint one on a node that takes packets of the tunnel.
fn take_tunnel(node: &mut TestNode<'_>, fixture: &Fixture, endpoint: IpAddr, other: IpAddr) {
    let key = DsrKey { service: fixture.service.value.service, addr: endpoint.into() };
    node.config.dsr_endpoints.insert(key, other.into());
    node.put_service(&fixture.service);
}

/// Asserts that a packet goes through the tunnel.
#[track_caller]
fn is_tunneled(result: &FrameResult, packet: &TestPacket) {
    result.is_redirected_as(packet);
    result.is_marked(0);
}

fn packets_of_clients_go_through_the_tunnel_unchanged(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        is_tunneled(&node.ingress(&fixture.first), &fixture.first);
        is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
        let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
        assert_eq!(flow.state & (flow_state::DSR | flow_state::MASQUERADE), flow_state::DSR);
        assert_eq!((flow.source.addr, flow.destination), (node.ip.router.into(), fixture.endpoint.into()));
        assert_eq!(node.flow(Direction::Reply, &fixture.reply()), None, "replies come another way");
        let bytes = node.service_counts(flow.service).bytes_to_endpoints;
        assert_eq!(bytes, 2 * u64::try_from(fixture.first.to_ip_packet().len()).expect("short"));
    }
    assert_eq!(node.counter(Counter::SentThroughTunnel), 4);
    assert_eq!(node.flow_count(), 2);
}

fn endpoints_on_nodes_without_the_tunnel_are_masqueraded(node: &mut TestNode<'_>) {
    let mark = node.config.node.masquerade_mark;
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        node.config.dsr_endpoints.clear();
        node.put_service(&fixture.service);
        node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(mark);
        assert_eq!(node.flow_count(), 2);
        node.set_state(&crate::testing::StateMaps::default());
    }
}

fn connection_stays_at_its_node_when_endpoints_change(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Tcp);
    node.ingress(&fixture.first);
    is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
    let other = addr(node.ip.other_pod, 8080);
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
    // Anybody may have sent these, and waited in between.
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    let reset = fixture.next().flags(TcpFlags::RST_ALONE);
    is_tunneled(&node.ingress(&reset), &reset);
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    node.wait(10);
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    node.wait(3_600);
    is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
}

fn datagrams_leave_an_endpoint_that_serves_no_more(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Udp);
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    let other = addr(node.ip.other_pod, 8080);
    let mark = node.config.node.masquerade_mark;
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(other)).is_marked(mark);
}

fn nothing_new_goes_to_a_node_that_takes_no_packets_any_more(node: &mut TestNode<'_>) {
    let mark = node.config.node.masquerade_mark;
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        is_tunneled(&node.ingress(&fixture.first), &fixture.first);
        node.config.dsr_endpoints.clear();
        node.put_service(&fixture.service);
        if protocol == Tcp {
            is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
        }
        // A retransmission, or the next datagram.
        node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(mark);
    }
}

fn nothing_goes_into_a_tunnel_whose_link_is_gone(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Udp);
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    node.config.node.tunnel_link = 0;
    node.write_maps();
    let translated = fixture.first.clone().to(fixture.endpoint);
    node.ingress(&fixture.first).becomes(&translated).is_marked(node.config.node.masquerade_mark);
}

fn process_of_a_node_with_the_tunnel_is_masqueraded(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        node.config.dsr_nodes.insert(node.ip.client.into());
        node.write_maps();
        let translated = fixture.first.clone().to(fixture.endpoint);
        node.ingress(&fixture.first).becomes(&translated).is_marked(node.config.node.masquerade_mark);
        node.config.dsr_nodes.clear();
        node.set_state(&crate::testing::StateMaps::default());
        node.config.dsr_others.insert(node.ip.client.into());
        node.write_maps();
        node.ingress(&fixture.first).becomes(&translated).is_marked(node.config.node.masquerade_mark);
        node.config.dsr_others.clear();
        node.set_state(&crate::testing::StateMaps::default());
    }
}

/// The table leads to the only endpoint.
fn forgotten_connection_goes_to_the_node_of_its_table_also_from_a_node_port(node: &mut TestNode<'_>) {
    for address in [node.ip.external_ip, node.ip.node] {
        let port = if address == node.ip.node { 30_080 } else { 80 };
        let vip = addr(address, port);
        let frontend = if port == 80 { vip } else { addr(super::any(address), port) };
        let mut fixture = Fixture::at(node, Tcp, vip, frontend);
        fixture.service =
            fixture.service.with_flags(flags::DSR | TableSize::of_entries(251).expect("a size").flags());
        let (service, list) = (fixture.service.value.service, List::Local.number());
        for page in 0..2 {
            let key = MaglevKey { service, list, size: 251, page };
            node.config.maglev.insert(key, MaglevPage { slots: [0; MaglevPage::SLOTS as usize] });
        }
        node.config.node.tunnel_link = TUNNEL;
        node.config.node.tunnel_mtu = 1_500;
        take_tunnel(node, &fixture, fixture.endpoint.ip(), node.ip.router);
        is_tunneled(&node.ingress(&fixture.next()), &fixture.next());
    }
}

fn syn_on_a_closed_connection_opens_it_at_its_node(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Tcp);
    node.ingress(&fixture.first);
    node.ingress(&fixture.next());
    node.ingress(&fixture.next().flags(TcpFlags::FIN_ACK));
    let closed = |node: &mut TestNode<'_>| {
        let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
        flow.state & flow_state::CLIENT_CLOSED != 0
    };
    assert!(closed(node));
    is_tunneled(&node.ingress(&fixture.first), &fixture.first);
    assert!(!closed(node));
}

fn all_fragments_go_through_the_tunnel(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        let mut packet = fixture.first.clone();
        if let Payload::Tcp { data, .. } | Payload::Udp { data } = &mut packet.payload {
            *data = (0..100).collect();
        }
        for part in [0..40, 40..64, 64..usize::MAX] {
            let fragment = packet.clone().fragment(77, part);
            is_tunneled(&node.ingress(&fragment), &fragment);
        }
    }
}

fn errors_about_replies_go_through_the_tunnel(node: &mut TestNode<'_>) {
    let ip = node.ip;
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        node.ingress(&fixture.first);
        let reply = fixture.first.clone().reversed();
        for kind in kinds(&ip) {
            let error = error_about(kind, ip.router, fixture.vip.ip(), reply.clone(), 8);
            is_tunneled(&node.ingress(&error), &error);
            let other = reply.clone().to(addr(ip.client, 40_001));
            let error = error_about(kind, ip.router, fixture.vip.ip(), other, 8);
            node.ingress(&error).is_left_alone();
        }
    }
}

/// Returns a packet of this length, from its IP header on.
pub(super) fn of_length(mut packet: TestPacket, length: usize) -> TestPacket {
    let headers = packet.to_ip_packet().len();
    if let Payload::Tcp { data, .. } | Payload::Udp { data } = &mut packet.payload {
        let more: Vec<u8> = vec![0; length - headers];
        data.extend(more);
    }
    packet
}

fn senders_of_packets_that_are_too_long_for_the_tunnel_are_told(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        let fits = of_length(fixture.first.clone(), LONGEST);
        is_tunneled(&node.ingress(&fits), &fits);
        let packet = of_length(fixture.first.clone(), LONGEST + 1);
        let (kind, bytes) = (kinds(&node.ip)[0], 28);
        let error = error_about(kind, packet.to.ip(), packet.from.ip(), packet.clone(), bytes);
        let error = TestPacket { hops: 64, to_mac: packet.from_mac, from_mac: packet.to_mac, ..error };
        node.ingress(&packet).is_redirected_as(&error);
    }
    assert_eq!(node.counter(Counter::TooLongForTunnel), 2);
}

/// IPv6 packets of 1,280 bytes must fit, because their sender would ignore the error.
fn tunnel_without_room_is_used_for_ipv4_only(node: &mut TestNode<'_>) {
    let mark = node.config.node.masquerade_mark;
    for protocol in PROTOCOLS {
        let fixture = add_service(node, protocol);
        let packet = &fixture.first;
        node.config.node.tunnel_mtu = if node.ip.node.is_ipv4() { 612 } else { 1_279 + 56 };
        node.write_maps();
        let result = node.ingress(packet);
        if node.ip.node.is_ipv4() {
            is_tunneled(&result, packet);
        } else {
            result.becomes(&packet.clone().to(fixture.endpoint)).is_marked(mark);
        }
        node.config.node.tunnel_mtu = 1_280 + 56;
        node.write_maps();
        let other = packet.clone().from(addr(node.ip.client, 40_001));
        is_tunneled(&node.ingress(&other), &other);
    }
}

/// RFC 1122, section 3.2.2.
fn nobody_is_told_of_packets_from_addresses_of_no_host(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Udp);
    let source: [&str; 2] = ["224.0.0.1", "ff02::1"];
    let source = source[usize::from(node.ip.node.is_ipv6())].parse().expect("an address");
    let packet = of_length(fixture.first.clone().from(addr(source, 40_000)), LONGEST + 1);
    node.ingress(&packet).is_dropped();
    assert_eq!(node.counter(Counter::TooLongForTunnel), 1);
}

fn nobody_is_told_of_errors_that_are_too_long(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Udp);
    node.ingress(&fixture.first);
    let about = of_length(fixture.first.reversed(), LONGEST);
    let error = error_about(kinds(&node.ip)[0], node.ip.client, fixture.vip.ip(), about, LONGEST);
    node.ingress(&error).is_dropped();
    assert_eq!(node.counter(Counter::TooLongForTunnel), 1);
}

/// Returns the folded sum of the words of these bytes.
pub(super) fn sum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| (*low).into()));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    u16::try_from((folded & 0xffff) + (folded >> 16)).expect("folded")
}

/// The kernel completes the checksum of the packet within the error, because hardware or GRO put
/// the packet together.
fn error_is_right_after_a_checksum_is_completed(node: &mut TestNode<'_>) {
    let header = if node.ip.node.is_ipv4() { 20 } else { 40 };
    for (protocol, field) in [(Tcp, 16), (Udp, 6)] {
        let fixture = add_service(node, protocol);
        let packet = of_length(fixture.first.clone(), LONGEST + 100).with_sum_of_pseudo_header();
        let segments = Some((u32::try_from(LONGEST).expect("short") - 10, 2));
        let input = InputFrame { segments, ..InputFrame::new(packet.to_frame()) };
        let mut error = node.run(Hook::Ingress, &input).expect("a segmented packet").bytes;
        let (icmp, inner) = (14 + header, 14 + header + 8 + header);
        let completed = !sum(&error[inner..]);
        error[inner + field..inner + field + 2].copy_from_slice(&completed.to_be_bytes());
        let pseudo_header = if header == 20 {
            0
        } else {
            let (length, next) = (u16::try_from(error.len() - icmp).expect("short"), 58_u16);
            sum(&[&error[22..54], &length.to_be_bytes(), &next.to_be_bytes()].concat())
        };
        let all = [&error[icmp..], &pseudo_header.to_be_bytes()].concat();
        assert_eq!(sum(&all), 0xffff, "{protocol}");
    }
}

fn kernel_may_cut_packets_whose_sender_permits_it(node: &mut TestNode<'_>) {
    if node.ip.node.is_ipv6() {
        return;
    }
    let fixture = add_service(node, Udp);
    let packet = of_length(fixture.first.clone(), LONGEST + 100);
    let whole = packet.to_ip_packet().len() - 20;
    let permitted = packet.clone().fragment(0, 0..whole);
    is_tunneled(&node.ingress(&permitted), &permitted);
}

super::scenarios! {
    packets_of_clients_go_through_the_tunnel_unchanged,
    endpoints_on_nodes_without_the_tunnel_are_masqueraded,
    connection_stays_at_its_node_when_endpoints_change,
    datagrams_leave_an_endpoint_that_serves_no_more,
    nothing_new_goes_to_a_node_that_takes_no_packets_any_more,
    nothing_goes_into_a_tunnel_whose_link_is_gone,
    process_of_a_node_with_the_tunnel_is_masqueraded,
    forgotten_connection_goes_to_the_node_of_its_table_also_from_a_node_port,
    syn_on_a_closed_connection_opens_it_at_its_node,
    all_fragments_go_through_the_tunnel,
    errors_about_replies_go_through_the_tunnel,
    senders_of_packets_that_are_too_long_for_the_tunnel_are_told,
    tunnel_without_room_is_used_for_ipv4_only,
    nobody_is_told_of_packets_from_addresses_of_no_host,
    nobody_is_told_of_errors_that_are_too_long,
    error_is_right_after_a_checksum_is_completed,
    kernel_may_cut_packets_whose_sender_permits_it,
}
