//! Flows with twice NAT whose packets must go through the stack: they get two translations.

use std::net::SocketAddr;

use super::{
    Fixture, PROTOCOLS, addr,
    errors::{error_about, kinds, with_checksum_of},
    masquerade::{PORTS, leave, masqueraded},
};
use crate::{
    Protocol::{self, Tcp},
    layout::{Direction, Endpoint, Flow, FlowKey, flow_state},
    packet::{TcpFlags, Tuple},
    testing::{StateMaps, TestNode, TestPacket},
};

/// Returns a fixture with a flow that began with twice NAT, on a node where no packet takes the
/// direct path any more, and the source of the flow.
fn with_twice_nat(node: &mut TestNode<'_>, protocol: Protocol) -> (Fixture, SocketAddr) {
    let fixture = masqueraded(node, protocol, PORTS);
    let source = fixture.exchange(node, &fixture.first);
    let mut state = node.state();
    join(&mut state, &fixture.first, source);
    node.set_state(&state);
    (fixture, source)
}

/// Replaces the four entries of the flow of a packet by two.
fn join(state: &mut StateMaps, packet: &TestPacket, source: SocketAddr) {
    let protocol = Protocol::from_number(packet.protocol()).expect("a protocol with flows");
    let [client, vip, source] = [packet.from, packet.to, source].map(Endpoint::from);
    let original = FlowKey::new(Direction::Original, protocol, Tuple { source: client, destination: vip });
    let before = *state.flow_mut(&original).expect("the flow of the client");
    let bits = flow_state::TWICE_NAT | flow_state::WHOLE | before.state;
    let flow = Flow { source, state: bits, ..before };
    let replies = Tuple { source: flow.destination, destination: client };
    let reply = FlowKey::new(Direction::Reply, protocol, replies);
    let masquerade = FlowKey::new(Direction::Masquerade, protocol, replies.swapped());
    assert!([reply, masquerade].iter().all(|key| state.remove_flow(key)));
    state.flows.insert(original, flow);
    state.flows.insert(flow.opposite_key(&original), flow.opposite(&original));
}

/// Exchanges packets through the stack. `inside` is the client between the translations.
#[track_caller]
fn exchange(node: &mut TestNode<'_>, fixture: &Fixture, inside: SocketAddr, source: SocketAddr) {
    let next = fixture.next().from(inside).to(fixture.endpoint);
    node.ingress(&fixture.next()).becomes(&next);
    leave(node, &next).becomes(&next.clone().from(source));
    reply(node, fixture, inside, source);
}

/// Sends a reply through the stack.
#[track_caller]
fn reply(node: &mut TestNode<'_>, fixture: &Fixture, inside: SocketAddr, source: SocketAddr) {
    let reply = fixture.reply().flags(TcpFlags::ACK_ALONE).to(inside);
    node.ingress(&reply.clone().to(source)).becomes(&reply);
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip).to(fixture.first.from));
}

fn flow_goes_on_with_two_translations(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (fixture, source) = with_twice_nat(node, protocol);
        let entries = node.flow_count();
        for _ in 0..2 {
            exchange(node, &fixture, fixture.first.from, source);
            assert_eq!(node.flow_count(), entries + 2);
        }
        node.wait(0);
        let (fixture, source) = with_twice_nat(node, protocol);
        reply(node, &fixture, fixture.first.from, source);
        exchange(node, &fixture, fixture.first.from, source);
        node.wait(0);
    }
}

/// It has the entry that the flow would get for replies.
fn another_flow_of_the_client_to_the_endpoint_keeps_its_entries(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (fixture, source) = with_twice_nat(node, protocol);
        let other = Fixture::at(node, protocol, addr(node.ip.external_ip, 81), addr(node.ip.external_ip, 81));
        other.establish(node);
        exchange(node, &fixture, SocketAddr::new(node.ip.client, source.port()), source);
        other.establish(node);
        exchange(node, &fixture, SocketAddr::new(node.ip.client, source.port()), source);
        node.wait(0);
    }
}

fn errors_reach_who_sent_the_packet(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let kind = kinds(&ip)[0];
    for protocol in PROTOCOLS {
        for from in [ip.router, addr(ip.pod, 0).ip()] {
            let (fixture, source) = with_twice_nat(node, protocol);
            let packet = fixture.next().to(fixture.endpoint);
            let sent = with_checksum_of(packet.clone().from(source), &packet);
            let error = error_about(kind, from, ip.node, sent, 8);
            let inside = error_about(kind, from, ip.client, packet.clone(), 8);
            node.ingress(&error).becomes(&inside);
            let outside = with_checksum_of(fixture.next(), &packet);
            let from = if from == ip.router { from } else { fixture.vip.ip() };
            node.egress(&inside).becomes(&error_about(kind, from, ip.client, outside, 8));
            exchange(node, &fixture, fixture.first.from, source);
            node.wait(0);
        }
    }
}

/// It tells a reset of the client from one that anybody may have sent.
fn acknowledgement_of_the_endpoint_is_kept(node: &mut TestNode<'_>) {
    let (fixture, source) = with_twice_nat(node, Tcp);
    exchange(node, &fixture, fixture.first.from, source);
    let entries = node.state();
    let acknowledged = entries.all_flows().filter(|(_, flow)| flow.acknowledged != 0).count();
    assert_eq!(acknowledged, 2, "both entries for replies have it");
}

super::scenarios! {
    flow_goes_on_with_two_translations,
    another_flow_of_the_client_to_the_endpoint_keeps_its_entries,
    errors_reach_who_sent_the_packet,
    acknowledgement_of_the_endpoint_is_kept,
}
