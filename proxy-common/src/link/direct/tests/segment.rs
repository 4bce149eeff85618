//! Plain segments of known connections have functions of their own. They do what the general code
//! does with the same segments in packets with IP options, which are not plain.

use std::vec::Vec;

use proptest::{collection::vec, prelude::*, sample::select};

use super::{Hook, InputFrame, MILLISECOND, Node, OUTSIDE, POD, forward, route::SEGMENTS};
use crate::{
    Protocol::Tcp,
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

/// Returns the state of the flows after these segments, and what happened to each of them. The
/// options are left out.
fn passed(
    segments: &[(bool, TcpFlags, u64)],
    is_masqueraded: bool,
    options: &[u8],
) -> (StateMaps, Vec<Passed>) {
    let mut node = Node::without_flow(Tcp, is_masqueraded);
    let first = [(false, TcpFlags::SYN_ALONE, 0), (true, TcpFlags::SYN_ACK, 0)];
    let mut results = Vec::new();
    for &(is_reply, flags, milliseconds) in first.iter().chain(segments) {
        let packet = if is_reply { node.reply(flags) } else { node.request(flags) };
        let mut passed = node.send_through(&TestPacket { options: options.to_vec(), ..packet });
        passed.bytes = [&passed.bytes[ADDRESSES..PAYLOAD], &passed.bytes[PAYLOAD + options.len()..]].concat();
        results.push(passed);
        node.pass(milliseconds * MILLISECOND);
    }
    let StateMaps { flows, unassured_flows, .. } = node.maps.state.into_inner();
    (StateMaps { flows, unassured_flows, ..StateMaps::default() }, results)
}

proptest! {
    #[test]
    fn segment_is_translated_as_by_the_general_code_and_leaves_the_same_flows(
        segments in vec((any::<bool>(), select(&SEGMENTS[..]), select(&[0, 3, 1_500][..])), 1..16),
        is_masqueraded: bool,
    ) {
        let by_general_code = passed(&segments, is_masqueraded, &OPTIONS);
        prop_assert_eq!(passed(&segments, is_masqueraded, &[]), by_general_code);
    }
}
