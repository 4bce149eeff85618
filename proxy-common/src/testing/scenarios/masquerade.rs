//! Masquerading by the programs: what leaves for an endpoint has an address and port of the node,
//! and the replies find the client.

use std::{net::SocketAddr, vec::Vec};

use super::{
    Fixture, PROTOCOLS, addr, any,
    errors::{error_about, kinds, with_checksum_of},
    first,
};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, Direction, Masquerading, flags},
    maglev::TableSize,
    packet::TcpFlags,
    testing::{FrameResult, Hook, InputFrame, Payload, Service, TestNode, TestPacket},
};

/// The link of all frames.
const LINK: u32 = 1;

/// A node port whose flows the programs masquerade, with ports from this range.
pub(super) fn masqueraded(
    node: &mut TestNode<'_>,
    protocol: crate::Protocol,
    (first, last): (u16, u16),
) -> Fixture {
    node.config.node.masquerading = Masquerading::Programs as u16;
    (node.config.node.first_port, node.config.node.last_port) = (first, last);
    let range = if node.ip.node.is_ipv4() { 96 } else { 0 };
    let subnet = (LINK, any(node.ip.node).into(), range);
    node.config.masquerade_addresses.insert(subnet, node.ip.node.into());
    let fixture = Fixture::at(node, protocol, addr(node.ip.node, 30_080), addr(any(node.ip.node), 30_080));
    node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE));
    fixture
}

pub(super) const PORTS: (u16, u16) = (1_024, 29_999);

/// Sends a packet of a client through the node. Returns the result at egress, where the mark stands
/// for the note: no test can leave that.
#[track_caller]
fn forward(node: &mut TestNode<'_>, packet: &TestPacket, endpoint: SocketAddr) -> FrameResult {
    let translated = packet.clone().to(endpoint);
    node.ingress(packet).becomes(&translated);
    leave(node, &translated)
}

/// Does what is done at egress to a packet that is to be masqueraded.
#[track_caller]
pub(super) fn leave(node: &mut TestNode<'_>, translated: &TestPacket) -> FrameResult {
    let mark = node.config.node.masquerade_mark;
    let frame = InputFrame { mark, ..InputFrame::new(translated.to_frame()) };
    let result = node.run(Hook::Egress, &frame).expect("a plain frame always runs");
    assert_eq!(result.mark, 0, "{result:?}");
    result
}

/// Returns the source that the flow of a client's packet got.
#[track_caller]
fn source_of(node: &mut TestNode<'_>, packet: &TestPacket, endpoint: SocketAddr) -> SocketAddr {
    let flow = node.flow(Direction::Masquerade, &packet.clone().to(endpoint)).expect("a masqueraded flow");
    let source = addr(flow.source.addr.into(), flow.source.port);
    assert_eq!(source.ip(), node.ip.node);
    assert!((node.config.node.first_port..=node.config.node.last_port).contains(&source.port()));
    source
}

impl Fixture {
    /// Exchanges packets between a client and the endpoint. Returns the source of the flow.
    #[track_caller]
    pub(super) fn exchange(&self, node: &mut TestNode<'_>, first: &TestPacket) -> SocketAddr {
        let sent = forward(node, first, self.endpoint);
        let source = source_of(node, first, self.endpoint);
        sent.becomes(&first.clone().to(self.endpoint).from(source));
        let reply = first.clone().to(self.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        node.ingress(&reply.clone().to(source)).becomes(&reply).is_marked(0);
        node.egress(&reply).becomes(&reply.clone().from(self.vip)).is_marked(0);
        let next = first.clone().flags(TcpFlags::ACK_ALONE);
        forward(node, &next, self.endpoint).becomes(&next.to(self.endpoint).from(source));
        source
    }

    /// Closes the connection from both sides.
    #[track_caller]
    fn close(&self, node: &mut TestNode<'_>, first: &TestPacket) {
        let source = source_of(node, first, self.endpoint);
        let last = first.clone().flags(TcpFlags::FIN_ACK);
        forward(node, &last, self.endpoint).becomes(&last.clone().to(self.endpoint).from(source));
        let reply = last.to(self.endpoint).reversed();
        node.ingress(&reply.clone().to(source)).becomes(&reply);
        node.egress(&reply).becomes(&reply.clone().from(self.vip));
    }
}

fn endpoint_sees_the_node_and_its_replies_reach_the_client(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        fixture.exchange(node, &fixture.first);
        assert_eq!(node.counter(Counter::FlowsBegun), 1, "a masqueraded flow is one flow");
        node.wait(0);
    }
}

fn datagram_without_a_checksum_gets_none_when_it_is_masqueraded(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Udp, PORTS);
    fixture.exchange(node, &TestPacket { checksum: Some([0; 2]), ..fixture.first.clone() });
}

/// A pod may leave the note on its own packets. The mark stands for it.
fn packet_to_no_endpoint_never_gets_an_address_of_the_node(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let mark = node.config.node.masquerade_mark;
        let elsewhere = fixture.first.clone().to(addr(fixture.endpoint.ip(), 81));
        for flags in [TcpFlags::SYN_ALONE, TcpFlags::ACK_ALONE] {
            let packet = elsewhere.clone().flags(flags);
            let frame = InputFrame { mark, ..InputFrame::new(packet.to_frame()) };
            node.run(Hook::Egress, &frame).expect("a plain frame always runs").becomes(&packet);
            assert_eq!(node.flow_count(), 0);
        }
    }
}

fn segment_whose_entries_are_lost_is_dropped_until_the_endpoint_sends(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    let source = fixture.exchange(node, &fixture.first);
    let (next, reply) = (fixture.next(), fixture.reply().flags(TcpFlags::ACK_ALONE));
    node.evict_flow(Direction::Masquerade, &next.clone().to(fixture.endpoint));
    node.evict_flow(Direction::Reply, &fixture.reply());
    let translated = next.clone().to(fixture.endpoint);
    node.ingress(&next).becomes(&translated);
    let mark = node.config.node.masquerade_mark;
    let frame = InputFrame { mark, ..InputFrame::new(translated.to_frame()) };
    node.run(Hook::Egress, &frame).expect("a plain frame always runs").is_dropped();
    node.wait(2);
    node.ingress(&next).becomes(&translated);
    node.ingress(&reply.clone().to(source)).becomes(&reply);
    forward(node, &next, fixture.endpoint).becomes(&translated.from(source));
}

/// Such a filter may take the note away, but not the mark.
fn packets_have_the_mark_on_links_where_a_filter_of_another_program_comes_later(node: &mut TestNode<'_>) {
    node.config.node.direct_epoch = 1;
    let fixture = masqueraded(node, Udp, PORTS);
    fixture.exchange(node, &fixture.first);
    let mark = node.config.node.masquerade_mark;
    node.ingress(&fixture.first).is_marked(mark);
    node.config.direct_links.insert(LINK);
    node.write_maps();
    node.ingress(&fixture.first).is_marked(0);
}

fn client_port_in_the_range_is_kept(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let first = fixture.first.clone().from(addr(node.ip.client, 20_000));
        assert_eq!(fixture.exchange(node, &first).port(), 20_000);
        let other = first.from(addr(node.ip.other_client, 20_000));
        assert_ne!(fixture.exchange(node, &other).port(), 20_000);
    }
}

fn client_keeps_its_port_when_it_repeats_its_first_packet_and_when_it_connects_again(
    node: &mut TestNode<'_>,
) {
    let fixture = masqueraded(node, Tcp, PORTS);
    forward(node, &fixture.first, fixture.endpoint);
    let source = source_of(node, &fixture.first, fixture.endpoint);
    forward(node, &fixture.first, fixture.endpoint)
        .becomes(&fixture.first.clone().to(fixture.endpoint).from(source));
    for _ in 0..2 {
        assert_eq!(fixture.exchange(node, &fixture.first), source);
        fixture.close(node, &fixture.first);
    }
}

fn port_that_another_flow_has_is_not_taken(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, (2_000, 2_000));
        let dropped = node.counter(Counter::NotMasqueraded);
        assert_eq!(fixture.exchange(node, &fixture.first).port(), 2_000);
        let other = first(protocol, addr(node.ip.other_client, 40_000), fixture.vip);
        forward(node, &other, fixture.endpoint).is_dropped();
        assert_eq!(node.counter(Counter::NotMasqueraded), dropped + 1);
        fixture.exchange(node, &fixture.first.clone().flags(TcpFlags::ACK_ALONE));
    }
}

fn port_of_a_connection_in_time_wait_is_taken_last(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, (2_000, 2_001));
    let source = fixture.exchange(node, &fixture.first);
    fixture.close(node, &fixture.first);
    let others = [40_001, 40_002].map(|port| first(Tcp, addr(node.ip.other_client, port), fixture.vip));
    assert_ne!(fixture.exchange(node, &others[0]), source);
    assert_eq!(fixture.exchange(node, &others[1]), source);
}

fn replies_to_a_port_that_netfilter_took_after_its_flow_ended_are_left_alone(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, (2_000, 2_000));
    let source = fixture.exchange(node, &fixture.first);
    fixture.close(node, &fixture.first);
    let reply = fixture.first.clone().to(fixture.endpoint).reversed().to(source);
    node.ingress(&reply.clone().flags(TcpFlags::SYN_ACK)).is_left_alone();
    node.ingress(&reply.flags(TcpFlags::ACK_ALONE)).is_left_alone();
}

fn port_that_netfilter_has_is_not_taken_and_its_replies_are_left_alone(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, (2_000, 2_001));
        let source = fixture.exchange(node, &fixture.first);
        let reply =
            fixture.first.clone().to(fixture.endpoint).reversed().flags(TcpFlags::ACK_ALONE).to(source);
        node.pass_masquerade_reply(&reply);
        node.ingress(&reply).is_left_alone();
        let other = first(protocol, addr(node.ip.other_client, 40_000), fixture.vip);
        assert_ne!(fixture.exchange(node, &other), source);
        node.wait(0);
    }
}

fn endpoints_share_the_ports(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Udp, (2_000, 2_000));
    fixture.exchange(node, &fixture.first);
    let other = addr(node.ip.other_pod, 8_080);
    node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE).with_endpoints(&[other]));
    let first = first(Udp, addr(node.ip.other_client, 40_000), fixture.vip);
    forward(node, &first, other);
    assert_eq!(source_of(node, &first, other).port(), 2_000);
}

fn segment_of_an_unknown_connection_is_dropped(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    fixture.exchange(node, &fixture.first);
    node.evict_flow(Direction::Masquerade, &fixture.first.clone().to(fixture.endpoint));
    forward(node, &fixture.next(), fixture.endpoint).is_dropped();
}

/// The kernel lets no test leave the note, so only the host goes to the end.
fn adopted_connection_gets_its_source_again(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    let vip = addr(node.ip.external_ip, 80);
    let service = Service { frontends: Vec::from([vip]), ..fixture.service.clone() };
    let table = TableSize::default().flags();
    node.put_service(&service.with_flags(flags::MASQUERADE_OUTSIDE | table));
    let first = fixture.first.clone().to(vip);
    forward(node, &first, fixture.endpoint);
    let source = source_of(node, &first, fixture.endpoint);
    let translated = first.clone().to(fixture.endpoint);
    node.evict_flow(Direction::Original, &first);
    node.evict_flow(Direction::Reply, &translated.clone().reversed());
    node.evict_flow(Direction::Masquerade, &translated);
    node.evict_flow(Direction::MasqueradeReply, &translated.from(source).reversed());
    let next = first.flags(TcpFlags::ACK_ALONE);
    let adopted = node.ingress(&next);
    adopted.becomes(&next.clone().to(fixture.endpoint));
    let of_others = 1;
    let frame = InputFrame { note: adopted.note | of_others, ..InputFrame::new(adopted.bytes.clone()) };
    let Some(sent) = node.run(Hook::Egress, &frame) else { return };
    sent.becomes(&next.clone().to(fixture.endpoint).from(source));
    assert_eq!(sent.note, of_others, "all notes are taken");
    let answer = next.clone().to(fixture.endpoint).reversed();
    node.ingress(&answer.clone().to(source)).becomes(&answer);
    node.egress(&answer).becomes(&answer.clone().from(vip));
    forward(node, &next, fixture.endpoint).becomes(&next.clone().to(fixture.endpoint).from(source));
    assert_eq!(node.assured_flow_count(), 4, "the client acknowledged as much as before");
}

/// Without the program the node would reset the connection: it has no socket with this port.
fn segment_to_a_source_port_is_dropped_while_flows_may_be_missing(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    let reply = fixture.reply().to(addr(node.ip.node, 20_000));
    let outside = fixture.reply().to(addr(node.ip.node, PORTS.1 + 1));
    node.ingress(&reply).becomes(&reply);
    node.config.node.settling_until_ns = u64::MAX;
    node.write_maps();
    node.ingress(&reply).is_dropped();
    node.ingress(&outside).becomes(&outside);
}

fn what_netfilter_masqueraded_keeps_its_source(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let packet = fixture.first.clone().from(addr(node.ip.node, 50_000)).to(fixture.endpoint);
        for packet in [packet.clone(), packet.flags(TcpFlags::ACK_ALONE)] {
            let mark = node.config.node.masquerade_mark;
            let frame = InputFrame { mark, ..InputFrame::new(packet.to_frame()) };
            node.run(Hook::Egress, &frame).expect("it runs").becomes(&packet);
        }
    }
}

fn known_flows_go_on_when_netfilter_masquerades_again(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    let source = fixture.exchange(node, &fixture.first);
    node.config.node.masquerading = Masquerading::KnownFlows as u16;
    node.write_maps();
    assert_eq!(fixture.exchange(node, &fixture.next()), source);
    let other = first(Tcp, addr(node.ip.other_client, 40_000), fixture.vip);
    forward(node, &other, fixture.endpoint).becomes(&other.clone().to(fixture.endpoint));
}

fn only_packets_before_the_reply_have_the_mark(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let mark = node.config.node.masquerade_mark;
        node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(mark);
        fixture.exchange(node, &fixture.first);
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint)).is_marked(0);
    }
}

fn packets_without_the_mark_keep_their_source(node: &mut TestNode<'_>) {
    let fixture = masqueraded(node, Tcp, PORTS);
    fixture.exchange(node, &fixture.first);
    node.egress(&fixture.first.clone().to(fixture.endpoint)).is_left_alone();
}

fn fragments_are_masqueraded_like_the_first(node: &mut TestNode<'_>) {
    const PARTS: [std::ops::Range<usize>; 2] = [0..40, 40..usize::MAX];
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let mut packet = fixture.first.clone();
        if let Payload::Tcp { data, .. } | Payload::Udp { data } = &mut packet.payload {
            *data = (0..100).collect();
        }
        let reply = packet.clone().to(fixture.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        for part in PARTS {
            let part = packet.clone().fragment(77, part);
            let sent = forward(node, &part, fixture.endpoint);
            let source = source_of(node, &packet, fixture.endpoint);
            sent.becomes(&part.to(fixture.endpoint).from(source));
        }
        let source = source_of(node, &packet, fixture.endpoint);
        for part in PARTS {
            let part = reply.clone().fragment(78, part);
            node.ingress(&part.clone().to(source)).becomes(&part);
        }
    }
}

fn errors_reach_who_sent_the_packet(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let kind = kinds(&ip)[0];
    for protocol in PROTOCOLS {
        let fixture = masqueraded(node, protocol, PORTS);
        let source = fixture.exchange(node, &fixture.first);
        // About a packet to the endpoint: from a router, and from the endpoint itself.
        let packet = fixture.next().to(fixture.endpoint);
        let sent = with_checksum_of(packet.clone().from(source), &packet);
        for from in [ip.router, fixture.endpoint.ip()] {
            let error = error_about(kind, from, ip.node, sent.clone(), 8);
            let expected = error_about(kind, from, ip.client, packet.clone(), 8);
            node.ingress(&error).becomes(&expected);
        }
        // About a reply: from a router, and from the client itself.
        let reply = fixture.reply();
        let received = with_checksum_of(reply.clone().to(source), &reply);
        for (from, translated) in [(ip.router, ip.router), (ip.client, ip.node)] {
            let error = error_about(kind, from, fixture.endpoint.ip(), reply.clone(), 8);
            let expected = error_about(kind, translated, fixture.endpoint.ip(), received.clone(), 8);
            node.egress(&error).becomes(&expected);
        }
    }
}

super::scenarios! {
    packets_have_the_mark_on_links_where_a_filter_of_another_program_comes_later,
    packet_to_no_endpoint_never_gets_an_address_of_the_node,
    segment_whose_entries_are_lost_is_dropped_until_the_endpoint_sends,
    endpoint_sees_the_node_and_its_replies_reach_the_client,
    datagram_without_a_checksum_gets_none_when_it_is_masqueraded,
    client_port_in_the_range_is_kept,
    client_keeps_its_port_when_it_repeats_its_first_packet_and_when_it_connects_again,
    port_that_another_flow_has_is_not_taken,
    port_of_a_connection_in_time_wait_is_taken_last,
    replies_to_a_port_that_netfilter_took_after_its_flow_ended_are_left_alone,
    port_that_netfilter_has_is_not_taken_and_its_replies_are_left_alone,
    endpoints_share_the_ports,
    segment_of_an_unknown_connection_is_dropped,
    adopted_connection_gets_its_source_again,
    segment_to_a_source_port_is_dropped_while_flows_may_be_missing,
    what_netfilter_masqueraded_keeps_its_source,
    known_flows_go_on_when_netfilter_masquerades_again,
    only_packets_before_the_reply_have_the_mark,
    packets_without_the_mark_keep_their_source,
    fragments_are_masqueraded_like_the_first,
    errors_reach_who_sent_the_packet,
}
