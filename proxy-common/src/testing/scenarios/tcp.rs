//! TCP: a connection keeps its endpoint for life. A SYN from a reused client port opens a new one.

use std::vec::Vec;

use super::{Fixture, addr};
use crate::{
    Protocol::Tcp,
    layout::{Counter, Direction, flags, flow_state as state},
    packet::TcpFlags,
    testing::{TestNode, TestPacket},
};

fn reply_of_a_connection_has_the_vip_as_source(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    assert_eq!(node.counter(Counter::FlowsBegun), 1);
    assert_eq!(node.flow_count(), 2, "one entry for each direction");
}

fn connection_keeps_its_endpoint_when_the_service_changes_or_goes(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    let moved = fixture.service.clone().with_endpoints(&[addr(node.ip.other_pod, 8080)]);
    node.put_service(&moved);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
    node.remove_service(&moved);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
    let reply = fixture.reply().flags(TcpFlags::ACK_ALONE);
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
}

fn retransmitted_syn_goes_to_the_same_endpoint(node: &mut TestNode<'_>) {
    let mut fixture = Fixture::new(node, Tcp);
    let endpoints: Vec<_> = (1..=64).map(|port| addr(node.ip.pod, port)).collect();
    fixture.service = fixture.service.with_endpoints(&endpoints);
    node.put_service(&fixture.service);
    let one = node.ingress(&fixture.first);
    for _ in 0..5 {
        assert_eq!(node.ingress(&fixture.first).bytes, one.bytes);
    }
    assert_eq!((node.counter(Counter::FlowsBegun), node.flow_count()), (1, 2));
}

fn retransmitted_syn_refreshes_both_entries(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.wait(100);
    let before = node.flow(Direction::Reply, &fixture.reply()).expect("a flow");
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    let after = node.flow(Direction::Reply, &fixture.reply()).expect("a flow");
    assert!(after.used_ns >= before.used_ns + 100_000_000_000, "{before:?} {after:?}");
}

fn retransmitted_syn_moves_if_the_endpoints_changed(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    let other = addr(node.ip.other_pod, 8080);
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(other));
    let reply = fixture.reply_from(other);
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
    node.egress(&fixture.reply()).is_left_alone();
    assert_eq!(node.flow_count(), 2, "the entries of the first attempt are gone");
}

fn segments_update_the_state_of_both_entries(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let steps = [
        (Direction::Original, TcpFlags::SYN_ALONE, 0),
        (Direction::Reply, TcpFlags::SYN_ACK, state::REPLIED),
        (Direction::Original, TcpFlags::ACK_ALONE, state::REPLIED),
        (Direction::Original, TcpFlags::FIN_ACK, state::REPLIED | state::CLIENT_CLOSED),
        (Direction::Reply, TcpFlags::FIN_ACK, state::REPLIED | state::CLIENT_CLOSED | state::ENDPOINT_CLOSED),
        (
            Direction::Original,
            TcpFlags::RST_ALONE,
            state::REPLIED | state::CLIENT_CLOSED | state::ENDPOINT_CLOSED | state::RESET,
        ),
    ];
    for (direction, flags, expected) in steps {
        match direction {
            Direction::Original => node.ingress(&fixture.first.clone().flags(flags)),
            _ => node.egress(&fixture.reply().flags(flags)),
        };
        for (direction, packet) in
            [(Direction::Original, &fixture.first), (Direction::Reply, &fixture.reply())]
        {
            let flow = node.flow(direction, packet).expect("a flow");
            assert_eq!(state::observed(flow.state), expected, "{direction:?} after {flags:?}");
        }
    }
}

fn syn_after_both_sides_closed_opens_a_new_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK));
    node.ingress(&fixture.first);
    assert_eq!(node.counter(Counter::FlowsBegun), 1, "the endpoint has not closed its side");
    node.egress(&fixture.reply().flags(TcpFlags::FIN_ACK));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    assert_eq!(node.counter(Counter::FlowsBegun), 2);
    let flow = node.flow(Direction::Reply, &fixture.reply()).expect("a flow");
    assert_eq!(state::observed(flow.state), 0, "the new connection has no state yet");
}

/// Establishes a connection with one of 64 endpoints, and returns it.
fn establish_with_one_of_64(node: &mut TestNode<'_>) -> (Fixture, std::net::SocketAddr) {
    let mut fixture = Fixture::new(node, Tcp);
    let endpoints: Vec<_> = (1..=64).map(|port| addr(node.ip.pod, port)).collect();
    fixture.service = fixture.service.with_endpoints(&endpoints);
    node.put_service(&fixture.service);
    node.ingress(&fixture.first);
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    let endpoint = addr(node.ip.pod, flow.destination.port);
    node.egress(&fixture.reply_from(endpoint)).becomes(&fixture.reply_from(endpoint).from(fixture.vip));
    (fixture, endpoint)
}

fn close(node: &mut TestNode<'_>, fixture: &Fixture, endpoint: std::net::SocketAddr) {
    node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK));
    node.egress(&fixture.reply_from(endpoint).flags(TcpFlags::FIN_ACK));
}

fn reused_client_port_after_a_close_reuses_the_entries(node: &mut TestNode<'_>) {
    let (fixture, endpoint) = establish_with_one_of_64(node);
    for connection in 2..6 {
        close(node, &fixture, endpoint);
        node.ingress(&fixture.first).becomes(&fixture.first.clone().to(endpoint));
        node.egress(&fixture.reply_from(endpoint)).becomes(&fixture.reply_from(endpoint).from(fixture.vip));
        assert_eq!((node.counter(Counter::FlowsBegun), node.flow_count()), (connection, 2));
    }
}

fn reused_client_port_goes_to_a_current_endpoint(node: &mut TestNode<'_>) {
    let (fixture, endpoint) = establish_with_one_of_64(node);
    close(node, &fixture, endpoint);
    let other = addr(node.ip.other_pod, 8080);
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(other));
    node.egress(&fixture.reply_from(endpoint)).is_left_alone();
    assert_eq!(node.flow_count(), 2);
}

fn reused_client_port_is_masqueraded_by_the_current_flags(node: &mut TestNode<'_>) {
    let (fixture, endpoint) = establish_with_one_of_64(node);
    close(node, &fixture, endpoint);
    node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE));
    let masquerade = node.config.node.masquerade_mark;
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(endpoint)).is_marked(masquerade);
}

fn reused_client_port_works_after_one_entry_was_evicted(node: &mut TestNode<'_>) {
    let (fixture, endpoint) = establish_with_one_of_64(node);
    for direction in [Direction::Original, Direction::Reply] {
        let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
        let endpoint = addr(endpoint.ip(), flow.destination.port);
        close(node, &fixture, endpoint);
        let evicted = if direction == Direction::Original {
            fixture.first.clone()
        } else {
            fixture.reply_from(endpoint)
        };
        node.evict_flow(direction, &evicted);
        node.ingress(&fixture.first);
        let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
        let endpoint = addr(endpoint.ip(), flow.destination.port);
        let reply = fixture.reply_from(endpoint);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
        assert_eq!(state::observed(flow.state), 0);
    }
}

fn syn_after_a_reset_opens_a_new_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.egress(&fixture.reply().flags(TcpFlags::RST_ALONE));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    assert_eq!(node.counter(Counter::FlowsBegun), 2);
    assert_eq!(node.flow_count(), 2);
}

fn direct_connection_from_a_reused_port_is_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE));
    node.ingress(&fixture.first.clone().to(fixture.endpoint)).is_left_alone();
    node.egress(&fixture.reply()).is_left_alone();
    let reply = fixture.reply().flags(TcpFlags::ACK_ALONE);
    node.egress(&reply).is_left_alone();
}

fn evicted_entry_returns_with_a_packet_of_the_opposite_direction(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    let reply = fixture.reply().flags(TcpFlags::ACK_ALONE);
    for _ in 0..2 {
        node.wait(2);
        node.evict_flow(Direction::Original, &fixture.first);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        node.wait(2);
        node.evict_flow(Direction::Reply, &fixture.reply());
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
    }
    assert_eq!(node.flow_count(), 2);
}

fn evicted_reply_entry_returns_with_the_retransmitted_syn(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first);
    node.wait(2);
    node.evict_flow(Direction::Reply, &fixture.reply());
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
}

fn packets_of_no_service_are_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let elsewhere = fixture.first.clone().to(addr(node.ip.cluster_ip, 81));
    node.ingress(&elsewhere).is_left_alone();
    node.egress(&elsewhere).is_left_alone();
    node.egress(&fixture.first).is_left_alone();
    node.ingress(&fixture.first.clone().to(fixture.endpoint)).is_left_alone();
    node.egress(&fixture.reply()).is_left_alone();
    assert_eq!(node.flow_count(), 0);
}

fn syn_on_a_live_connection_keeps_its_endpoint(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.put_service(
        &fixture.service.clone().with_endpoints(&[fixture.endpoint, addr(node.ip.other_pod, 8080)]),
    );
    node.put_service(&fixture.service.clone().with_endpoints(&[addr(node.ip.other_pod, 8080)]));
    node.ingress(&fixture.first);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
}

fn forged_reset_does_not_shorten_a_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE));
    for _ in 0..3 {
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        node.egress(&fixture.reply().flags(TcpFlags::ACK_ALONE));
    }
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert!(
        !flow.is_expired(Tcp, flow.used_ns + 121_000_000_000),
        "expires after 2 min although packets followed: {flow:?}"
    );
}

/// Resets that anyone can send: without the sequence number that the endpoint expects.
fn forged_resets(fixture: &Fixture) -> [TestPacket; 3] {
    [fixture.first.sequence + (1 << 16), 1 << 31, u32::MAX]
        .map(|sequence| fixture.first.clone().flags(TcpFlags::RST_ALONE).sequence(sequence))
}

fn reset_with_another_sequence_number_passes_and_changes_nothing(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    let before = node.flow(Direction::Original, &fixture.first).expect("a flow");
    for reset in forged_resets(&fixture) {
        node.ingress(&reset).becomes(&reset.clone().to(fixture.endpoint));
    }
    assert_eq!(node.flow(Direction::Original, &fixture.first), Some(before));
    assert!(!before.is_expired(Tcp, before.used_ns + 80_000_000_000_000), "{before:?}");
}

fn forged_reset_and_syns_do_not_move_a_connection(node: &mut TestNode<'_>) {
    for silence_seconds in [0, 100, 50_000] {
        let fixture = Fixture::new(node, Tcp);
        fixture.establish(node);
        let other = addr(node.ip.other_pod, 8080);
        node.put_service(&fixture.service.clone().with_endpoints(&[other]));
        node.wait(silence_seconds);
        for reset in forged_resets(&fixture) {
            node.ingress(&reset);
        }
        for sequence in [1, 1 << 31] {
            let syn = fixture.first.clone().sequence(sequence);
            node.ingress(&syn).becomes(&syn.clone().to(fixture.endpoint));
            // The endpoint challenges it.
            let challenge = fixture.reply().flags(TcpFlags::ACK_ALONE);
            node.egress(&challenge).becomes(&challenge.clone().from(fixture.vip));
            node.wait(10);
        }
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        let reply = fixture.reply().flags(TcpFlags::ACK_ALONE);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
        node.egress(&fixture.reply().flags(TcpFlags::RST_ALONE));
    }
}

/// An endpoint answers one packet with a challenge ACK, and then none for half a second
/// (`tcp_invalid_ratelimit`).
fn syn_that_the_endpoint_did_not_challenge_does_not_move_a_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.put_service(&fixture.service.clone().with_endpoints(&[addr(node.ip.other_pod, 8080)]));
    let challenge = fixture.reply().flags(TcpFlags::ACK_ALONE);
    let forged = fixture.first.clone().sequence(1);
    for _ in 0..3 {
        node.ingress(&forged).becomes(&forged.clone().to(fixture.endpoint));
        node.egress(&challenge).becomes(&challenge.clone().from(fixture.vip));
        // Without an answer.
        node.ingress(&forged).becomes(&forged.clone().to(fixture.endpoint));
        node.wait(3);
        // The endpoint answers the first one, but not before the second and third come.
        for _ in 0..3 {
            node.ingress(&forged).becomes(&forged.clone().to(fixture.endpoint));
        }
        node.egress(&challenge).becomes(&challenge.clone().from(fixture.vip));
    }
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
}

fn client_that_lost_its_connection_gets_another_endpoint_if_the_old_one_is_gone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    let other = addr(node.ip.other_pod, 8080);
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.wait(1);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.wait(2);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(other));
    let reply = fixture.reply_from(other);
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
}

fn syn_on_a_silent_connection_of_conntrack_begins_a_new_one(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.pass_flow(&fixture.first);
    node.wait(50);
    node.ingress(&fixture.first).is_left_alone();
    node.put_service(&fixture.service.clone().with_endpoints(&[addr(node.ip.other_pod, 8080)]));
    node.wait(20);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(addr(node.ip.other_pod, 8080)));
}

fn fin_of_the_client_alone_does_not_shorten_a_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK));
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert!(!flow.is_expired(Tcp, flow.used_ns + 80_000_000_000_000), "{flow:?}");
    node.egress(&fixture.reply().flags(TcpFlags::FIN_ACK));
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert!(flow.is_expired(Tcp, flow.used_ns + 121_000_000_000), "{flow:?}");
}

fn held_flow_drops_packets_until_the_hold_expires(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.hold_flow(&fixture.first);
    node.wait(3);
    node.ingress(&fixture.next()).is_dropped();
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
    node.hold_flow(&fixture.first);
    node.wait(11);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
}

super::scenarios! {
    syn_on_a_live_connection_keeps_its_endpoint,
    reset_with_another_sequence_number_passes_and_changes_nothing,
    forged_reset_and_syns_do_not_move_a_connection,
    syn_that_the_endpoint_did_not_challenge_does_not_move_a_connection,
    client_that_lost_its_connection_gets_another_endpoint_if_the_old_one_is_gone,
    syn_on_a_silent_connection_of_conntrack_begins_a_new_one,
    fin_of_the_client_alone_does_not_shorten_a_connection,
    forged_reset_does_not_shorten_a_connection,
    reply_of_a_connection_has_the_vip_as_source,
    connection_keeps_its_endpoint_when_the_service_changes_or_goes,
    retransmitted_syn_goes_to_the_same_endpoint,
    retransmitted_syn_refreshes_both_entries,
    retransmitted_syn_moves_if_the_endpoints_changed,
    segments_update_the_state_of_both_entries,
    syn_after_both_sides_closed_opens_a_new_connection,
    reused_client_port_after_a_close_reuses_the_entries,
    reused_client_port_goes_to_a_current_endpoint,
    reused_client_port_is_masqueraded_by_the_current_flags,
    reused_client_port_works_after_one_entry_was_evicted,
    syn_after_a_reset_opens_a_new_connection,
    direct_connection_from_a_reused_port_is_left_alone,
    evicted_entry_returns_with_a_packet_of_the_opposite_direction,
    evicted_reply_entry_returns_with_the_retransmitted_syn,
    packets_of_no_service_are_left_alone,
    held_flow_drops_packets_until_the_hold_expires,
}
