//! Whole flows that are masqueraded: one translation, and two entries.

use std::net::SocketAddr;

use super::{AT, Direction, InputFrame, MILLISECOND, Node, OUTSIDE, PLAIN, Way};
use crate::{
    Protocol::{Tcp, Udp},
    flow::TwiceNat,
    layout::{Counter, Endpoint, Flow, FlowKey, flow_state},
    link::Outcome,
    packet::{TcpFlags, Tuple},
    testing::TestPacket,
};

impl Node {
    fn entries(&self) -> usize {
        self.maps.state.borrow().all_flows().count()
    }

    fn assured(&self) -> usize {
        self.maps.state.borrow().flows.len()
    }
}

#[test]
fn flow_has_two_entries_from_its_first_packet_to_its_last() {
    for protocol in [Tcp, Udp] {
        let mut node = Node::whole(protocol, true);
        for flags in [TcpFlags::SYN_ALONE, PLAIN, PLAIN, TcpFlags::FIN_ACK, PLAIN] {
            let answer = if flags == TcpFlags::SYN_ALONE { TcpFlags::SYN_ACK } else { flags };
            assert_eq!(node.send(&node.request(flags)), Way::Direct);
            assert_eq!(node.send(&node.reply(answer)), Way::Direct);
            assert_eq!(node.entries(), 2, "{flags:?}");
        }
        assert_eq!(node.assured(), 2);
        assert_eq!(node.maps.state.borrow().counters[Counter::FlowsBegun as usize], 1);
    }
}

#[test]
fn client_that_uses_its_port_again_keeps_entries_and_source() {
    let mut node = Node::whole(Tcp, true);
    for _ in 0..3 {
        for flags in [TcpFlags::SYN_ALONE, PLAIN, TcpFlags::FIN_ACK] {
            let answer = if flags == TcpFlags::SYN_ALONE { TcpFlags::SYN_ACK } else { flags };
            assert_eq!(node.send(&node.request(flags)), Way::Direct);
            assert_eq!(node.send(&node.reply(answer)), Way::Direct);
        }
        assert_eq!((node.entries(), node.assured()), (2, 2));
    }
}

#[test]
fn packet_that_must_go_through_the_stack_splits_its_flow() {
    for is_reply in [false, true] {
        let mut node = Node::whole(Tcp, true);
        assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Direct);
        assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Direct);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        let plain = if is_reply { node.reply(PLAIN) } else { node.request(PLAIN) };
        assert_eq!(node.send(&TestPacket { options: [1; 4].to_vec(), ..plain }), Way::Stack);
        assert_eq!((node.entries(), node.assured()), (4, 4));
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "its other packets need no stack");
        assert_eq!(node.exchange(TcpFlags::FIN_ACK), [Way::Direct; 2]);
        assert_eq!(node.entries(), 4);
    }
}

/// The sequence number of the endpoint's SYN-ACK is known after the split.
#[test]
fn flow_that_is_split_before_it_is_assured_is_assured_by_its_client() {
    let mut node = Node::whole(Tcp, true);
    assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Direct);
    assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Direct);
    node.maps.config.node.direct_epoch = 2;
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    assert_eq!((node.entries(), node.assured()), (4, 4));
}

#[test]
fn flow_without_a_route_gets_two_translations() {
    let mut node = Node::whole(Udp, true);
    node.has_routes = false;
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    assert_eq!(node.entries(), 4);
}

#[test]
fn flow_that_finds_no_port_is_dropped_as_one_with_two_translations() {
    let mut node = Node::whole(Udp, true);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    let other = node.request(PLAIN).from(SocketAddr::new(AT.other_client, 40_000));
    let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(other.to_frame()) };
    assert_eq!(node.outcome(frame), Outcome::Redirect, "the program where it leaves drops it");
    assert_eq!(node.entries(), 4);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

/// The endpoint may have it in TIME-WAIT.
#[test]
fn port_of_a_connection_that_has_just_closed_is_not_taken() {
    let mut node = Node::whole(Tcp, true);
    for flags in [TcpFlags::SYN_ALONE, PLAIN, TcpFlags::FIN_ACK] {
        let answer = if flags == TcpFlags::SYN_ALONE { TcpFlags::SYN_ACK } else { flags };
        assert_eq!(node.send(&node.request(flags)), Way::Direct);
        assert_eq!(node.send(&node.reply(answer)), Way::Direct);
    }
    let other = node.request(TcpFlags::SYN_ALONE).from(SocketAddr::new(AT.other_client, 40_000));
    let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(other.to_frame()) };
    assert_eq!(node.outcome(frame), Outcome::Redirect);
    assert_eq!(node.entries(), 4, "the other flow gets two translations, which try more ports");
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

/// An ICMP error or a fragment of the endpoint that the client had before finds it.
#[test]
fn entry_that_is_left_from_an_earlier_flow_is_not_split() {
    let mut node = Node::whole(Udp, true);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    let before = node.maps.state.borrow().clone();
    let client = Endpoint::from(SocketAddr::new(AT.client, 40_000));
    for flow in node.maps.state.borrow_mut().all_flows_mut().filter(|flow| flow.destination != client) {
        flow.destination.port = 9;
    }
    let changed = node.maps.state.borrow().clone();
    assert_ne!(before, changed);
    let reply = TestPacket { options: [1; 4].to_vec(), ..node.reply(PLAIN) };
    let frame = InputFrame { link: super::POD, ..InputFrame::new(reply.to_frame()) };
    assert_eq!(node.outcome(frame), Outcome::Drop);
    assert_eq!(node.entries(), 2);
}

/// Its last entry was not written: the kernel had no memory, or userspace ended.
#[test]
fn flow_that_is_half_split_is_split_again() {
    let mut node = Node::whole(Udp, true);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    let before = node.maps.state.borrow().clone();
    let options = |packet: TestPacket| TestPacket { options: [1; 4].to_vec(), ..packet };
    assert_eq!(node.send(&options(node.request(PLAIN))), Way::Stack);
    let restore = |(key, flow): (&FlowKey, &Flow), state: &mut crate::testing::StateMaps| {
        state.remove_flow(key);
        let flows = if flow.is_assured() { &mut state.flows } else { &mut state.unassured_flows };
        flows.insert(*key, *flow);
    };
    let original = |(key, _): &(&FlowKey, &Flow)| key.direction == Direction::Original as u8;
    restore(before.all_flows().find(original).expect("an entry"), &mut node.maps.state.borrow_mut());
    assert_eq!(node.send(&options(node.request(PLAIN))), Way::Stack);
    assert_eq!(node.entries(), 4);
    assert!(!node.maps.state.borrow().all_flows().any(|(_, flow)| flow.has_twice_nat()));
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

/// Userspace does so for a handover, while a packet is on its way.
#[test]
fn packet_of_a_flow_that_is_held_by_now_is_dropped_and_the_entry_stays() {
    let mut node = Node::whole(Tcp, true);
    assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Direct);
    assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Direct);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    node.maps.on_random.set(Some(|maps| {
        let mut state = maps.state.borrow_mut();
        for flow in state.flows.values_mut() {
            flow.state = flow.state & !flow_state::TWICE_NAT | flow_state::HELD | flow_state::PASS;
        }
    }));
    node.pass(10 * MILLISECOND);
    let packet = TestPacket { options: [1; 4].to_vec(), ..node.request(PLAIN) };
    let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(packet.to_frame()) };
    assert_eq!(node.outcome(frame), Outcome::Drop);
    assert_eq!(node.entries(), 2);
}

/// So a connection whose entries were lost is adopted with the source that it had.
#[test]
fn source_is_the_one_that_two_translations_would_choose() {
    let sources = [true, false].map(|has_routes| {
        let mut node = Node::whole(Tcp, true);
        (node.maps.config.node.first_port, node.maps.config.node.last_port) = (1_024, 29_999);
        node.has_routes = has_routes;
        let frame =
            InputFrame { link: OUTSIDE, ..InputFrame::new(node.request(TcpFlags::SYN_ALONE).to_frame()) };
        let came_in = node.came_in(frame);
        let left = InputFrame { link: super::POD, note: came_in.note, ..InputFrame::new(came_in.bytes) };
        node.run(super::Hook::Egress, left).bytes[26..36].to_vec()
    });
    assert_eq!(sources[0], sources[1]);
}

#[test]
fn old_flow_is_learned_where_its_packets_leave() {
    let mut node = Node::whole(Udp, true);
    assert_eq!([(); 2].map(|()| node.exchange(PLAIN)), [[Way::Direct; 2]; 2]);
    assert_eq!(node.maps.state.borrow().direct_flows.len(), 0);
    node.pass(10 * MILLISECOND);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    assert_eq!(node.maps.state.borrow().direct_flows.len(), 2);
    node.has_routes = false;
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "the kernel is not asked for the route");
}

#[test]
fn entries_of_a_split_flow_are_those_of_two_translations() {
    let end = |last, port| Endpoint::new(crate::Addr::from_v4([10, 0, 0, last]), port);
    let tuple = Tuple { source: end(1, 40_000), destination: end(2, 80) };
    let key = FlowKey::new(Direction::Original, Tcp, tuple);
    let state = flow_state::TWICE_NAT | flow_state::MASQUERADE | flow_state::of_list(2);
    let flow = Flow {
        source: end(3, 61_000),
        destination: end(4, 8080),
        service: 7,
        generation: 3,
        state,
        used_ns: 1,
        ..Flow::NONE
    };
    let (reply_key, reply) = (flow.opposite_key(&key), flow.opposite(&key));
    assert_eq!((reply.opposite_key(&reply_key), reply.opposite(&reply_key)), (key, flow));
    for (is_original, key, flow) in [(true, &key, &flow), (false, &reply_key, &reply)] {
        let twice = TwiceNat { is_original, key, flow, port: 50_000 };
        for [there, back] in
            [[Direction::Original, Direction::Reply], [Direction::Masquerade, Direction::MasqueradeReply]]
        {
            let entry = twice.flow(there, 0);
            assert_eq!(entry.opposite_key(&twice.key(there)), twice.key(back));
            assert_eq!(entry.opposite(&twice.key(there)), twice.flow(back, 0));
        }
        let inside = twice.flow(Direction::Original, 0).tuple();
        assert_eq!(inside, twice.key(Direction::Masquerade).tuple());
        assert_eq!(
            twice.flow(Direction::Masquerade, 0).tuple(),
            Tuple { source: end(3, 61_000), destination: end(4, 8080) }
        );
        assert_eq!(twice.flow(Direction::Original, 0).service, 7);
        assert_eq!(twice.flow(Direction::Masquerade, 0).state, 0);
    }
}
