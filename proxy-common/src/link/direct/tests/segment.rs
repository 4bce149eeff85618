//! Plain packets of known flows have functions of their own. They do what the general code does
//! with the same packets with IP options, which are not plain.

use std::vec::Vec;

use proptest::{collection::vec, prelude::*, sample::select};

use super::{Hook, InputFrame, MILLISECOND, Node, OUTSIDE, POD, forward, route::SEGMENTS};
use crate::{
    Protocol::{Tcp, Udp},
    link::Outcome,
    packet::TcpFlags,
    testing::{StateMaps, TestPacket},
};

/// The offsets of the addresses of an IPv4 header, and of what follows a header without options.
const ADDRESSES: usize = 26;
const PAYLOAD: usize = 34;

/// What happened to a packet: the outcome of each hook, and the frame that left.
#[derive(Debug, PartialEq)]
struct Passed {
    outcomes: Vec<Outcome>,
    bytes: Vec<u8>,
}

/// An IP option without effect, four times.
const OPTIONS: [u8; 4] = [1; 4];

impl Node {
    /// Sends a packet through the stack.
    fn send_through(&mut self, packet: &TestPacket) -> Passed {
        let is_reply = packet.from == self.endpoint;
        let (link, out) = if is_reply { (POD, OUTSIDE) } else { (OUTSIDE, POD) };
        let came_in = self.run(Hook::Ingress, InputFrame { link, ..InputFrame::new(packet.to_frame()) });
        if came_in.outcome != Outcome::Proceed {
            return Passed { outcomes: [came_in.outcome].to_vec(), bytes: came_in.bytes };
        }
        let mut bytes = came_in.bytes;
        forward(&mut bytes);
        let leaving =
            InputFrame { link: out, note: came_in.note, ingress_link: link, ..InputFrame::new(bytes) };
        let left = self.run(Hook::Egress, leaving);
        Passed { outcomes: [came_in.outcome, left.outcome].to_vec(), bytes: left.bytes }
    }
}

/// A packet, and what happens after it.
#[derive(Clone, Copy, Debug)]
struct Step {
    is_reply: bool,
    flags: TcpFlags,
    milliseconds: u64,
    event: Event,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    None,
    /// No endpoint serves from then on.
    EndOfService,
    /// One of the entries of the flow is evicted.
    Eviction(usize),
}

impl Step {
    const FIRST: [Self; 2] = [
        Self { is_reply: false, flags: TcpFlags::SYN_ALONE, milliseconds: 0, event: Event::None },
        Self { is_reply: true, flags: TcpFlags::SYN_ACK, milliseconds: 0, event: Event::None },
    ];
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => Just(Event::None),
        1 => Just(Event::EndOfService),
        2 => (0..4_usize).prop_map(Event::Eviction),
    ]
}

/// Returns the state of the flows after these packets, and what happened to each of them. The
/// options are left out.
fn passed(mut node: Node, steps: &[Step], options: &[u8]) -> (StateMaps, Vec<Passed>) {
    // Nothing is learned: packets with options never leave directly.
    node.maps.config.node.direct_epoch = 0;
    let mut results = Vec::new();
    for &Step { is_reply, flags, milliseconds, event } in steps {
        let packet = if is_reply { node.reply(flags) } else { node.request(flags) };
        let mut passed = node.send_through(&TestPacket { options: options.to_vec(), ..packet });
        passed.bytes = [&passed.bytes[ADDRESSES..PAYLOAD], &passed.bytes[PAYLOAD + options.len()..]].concat();
        results.push(passed);
        node.pass(milliseconds * MILLISECOND);
        match event {
            Event::None => {}
            Event::EndOfService => node.maps.config.members.clear(),
            Event::Eviction(index) => {
                let flows = &mut node.maps.state.get_mut().flows;
                let key = flows.keys().nth(index).copied();
                key.and_then(|key| flows.remove(&key));
            }
        }
    }
    let StateMaps { flows, unassured_flows, .. } = node.maps.state.into_inner();
    (StateMaps { flows, unassured_flows, ..StateMaps::default() }, results)
}

fn segment() -> impl Strategy<Value = Step> {
    let (flags, pauses) = (select(&SEGMENTS[..]), select(&[0, 3, 1_500][..]));
    (any::<bool>(), flags, pauses, event()).prop_map(|(is_reply, flags, milliseconds, event)| Step {
        is_reply,
        flags,
        milliseconds,
        event,
    })
}

/// A flow of datagrams expires after 30 or 120 seconds.
fn datagram() -> impl Strategy<Value = Step> {
    let pauses = select(&[0, 3, 1_500, 31_000, 121_000][..]);
    (any::<bool>(), pauses, event()).prop_map(|(is_reply, milliseconds, event)| Step {
        is_reply,
        flags: TcpFlags(0),
        milliseconds,
        event,
    })
}

proptest! {
    #[test]
    fn segment_is_translated_as_by_the_general_code_and_leaves_the_same_flows(
        segments in vec(segment(), 1..16),
        is_masqueraded: bool,
    ) {
        let steps = [&Step::FIRST[..], &segments].concat();
        let through = |options| passed(Node::without_flow(Tcp, is_masqueraded), &steps, options);
        prop_assert_eq!(through(&[]), through(&OPTIONS));
    }

    #[test]
    fn datagram_is_translated_as_by_the_general_code_and_leaves_the_same_flows(
        datagrams in vec(datagram(), 1..16),
        is_masqueraded: bool,
    ) {
        let through = |options| passed(Node::without_flow(Udp, is_masqueraded), &datagrams, options);
        prop_assert_eq!(through(&[]), through(&OPTIONS));
    }
}
