//! Floods of packets with forged sources: they take entries of unassured flows only.

use super::{Fixture, addr};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, Direction},
    packet::TcpFlags,
    testing::{TestNode, TestPacket},
};

/// Returns packets like this one from other client ports.
fn forged(packet: &TestPacket) -> impl Iterator<Item = TestPacket> {
    (1..=20).map(|port| packet.clone().from(addr(packet.from.ip(), port)))
}

/// Returns what the endpoint answers to the client.
fn answer(fixture: &Fixture, packet: &TestPacket) -> TestPacket {
    packet.clone().to(fixture.endpoint).reversed().flags(TcpFlags::SYN_ACK)
}

fn answered_syns_with_forged_sources_are_not_assured(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    for syn in forged(&fixture.first) {
        node.ingress(&syn).becomes(&syn.clone().to(fixture.endpoint));
        let answer = answer(&fixture, &syn);
        node.egress(&answer).becomes(&answer.clone().from(fixture.vip));
    }
    assert_eq!((node.flow_count(), node.assured_flow_count()), (40, 0));
}

fn segment_that_does_not_acknowledge_the_syn_ack_does_not_assure(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first);
    node.egress(&fixture.reply().sequence(1 << 20));
    for number in [0, 1 << 19, (1 << 20) - 1, (1 << 20) + (1 << 16), 1 << 31, u32::MAX] {
        let guess = fixture.next().acknowledgement(number);
        node.ingress(&guess).becomes(&guess.clone().to(fixture.endpoint));
        node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK).acknowledgement(number));
    }
    assert_eq!(node.assured_flow_count(), 0);
    node.ingress(&fixture.next().acknowledgement((1 << 20) + 1));
    assert_eq!((node.flow_count(), node.assured_flow_count()), (2, 2));
}

fn syn_data_or_reset_of_the_client_does_not_assure(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first);
    node.ingress(&fixture.next());
    assert_eq!(node.assured_flow_count(), 0, "the endpoint has not answered");
    node.egress(&fixture.reply());
    node.ingress(&fixture.first);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE));
    assert_eq!(node.assured_flow_count(), 0);
}

fn acknowledgements_after_a_reset_of_the_endpoint_do_not_assure(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first);
    node.egress(&fixture.reply().flags(TcpFlags::RST_ALONE));
    for number in [0, 1, 1] {
        node.ingress(&fixture.next().acknowledgement(number));
    }
    assert_eq!(node.assured_flow_count(), 0);
}

fn handshake_assures_a_connection_and_moves_both_entries(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    assert_eq!((node.flow_count(), node.assured_flow_count()), (2, 2));
    let [original, reply] = [(Direction::Original, &fixture.first), (Direction::Reply, &fixture.reply())]
        .map(|(direction, packet)| node.flow(direction, packet).expect("a flow"));
    assert!(original.is_assured() && reply.is_assured());
    assert!(reply.is_next(fixture.next().sequence), "a reset of the client still counts: {reply:?}");
    assert!(!reply.is_expired(Tcp, reply.used_ns + 80_000_000_000_000));
}

fn handshake_without_its_end_expires_after_two_minutes(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first);
    node.egress(&fixture.reply());
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert!(flow.is_expired(Tcp, flow.used_ns + 121_000_000_000));
}

fn handshake_works_after_one_entry_was_evicted(node: &mut TestNode<'_>) {
    for direction in [Direction::Original, Direction::Reply] {
        let fixture = Fixture::new(node, Tcp);
        node.ingress(&fixture.first);
        node.egress(&fixture.reply());
        let packet = if direction == Direction::Original { fixture.first.clone() } else { fixture.reply() };
        node.wait(2);
        node.evict_flow(direction, &packet);
        if direction == Direction::Original {
            node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
        }
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
        assert_eq!(node.assured_flow_count(), 2, "{direction:?}");
        node.egress(&fixture.reply().flags(TcpFlags::RST_ALONE));
    }
}

fn reused_client_port_stays_among_the_assured_flows(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    for connection in 1..4 {
        fixture.establish(node);
        assert_eq!((node.flow_count(), node.assured_flow_count()), (2, 2), "connection {connection}");
        node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK));
        node.egress(&fixture.reply().flags(TcpFlags::FIN_ACK));
    }
    assert_eq!(node.counter(Counter::FlowsBegun), 3);
}

fn datagrams_with_forged_sources_are_not_assured_even_if_they_are_answered(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    for datagram in forged(&fixture.first) {
        node.ingress(&datagram).becomes(&datagram.clone().to(fixture.endpoint));
        node.ingress(&datagram);
        node.egress(&answer(&fixture, &datagram));
    }
    assert_eq!((node.flow_count(), node.assured_flow_count()), (40, 0));
}

fn datagram_after_an_answer_assures_the_flow(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    assert_eq!((node.flow_count(), node.assured_flow_count()), (2, 2));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
    assert_eq!((node.flow_count(), node.assured_flow_count()), (2, 2));
}

super::scenarios! {
    answered_syns_with_forged_sources_are_not_assured,
    segment_that_does_not_acknowledge_the_syn_ack_does_not_assure,
    syn_data_or_reset_of_the_client_does_not_assure,
    acknowledgements_after_a_reset_of_the_endpoint_do_not_assure,
    handshake_assures_a_connection_and_moves_both_entries,
    handshake_without_its_end_expires_after_two_minutes,
    handshake_works_after_one_entry_was_evicted,
    reused_client_port_stays_among_the_assured_flows,
    datagrams_with_forged_sources_are_not_assured_even_if_they_are_answered,
    datagram_after_an_answer_assures_the_flow,
}
