//! What takes the direct path from the first packet of a flow on.

use std::net::SocketAddr;

use super::{AT, Hook, InputFrame, LEASE_NS, Masquerading, Node, OUTSIDE, PLAIN, POD, Way};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{DirectKey, DirectScope, Direction, Flow, FlowKey, flow_state},
    link::Outcome,
    packet::{Route, TcpFlags, Tuple},
    testing::{FrameResult, TestPacket},
};

impl Node {
    /// Returns a node on which whole flows take the direct path.
    pub(super) fn whole(protocol: crate::Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::without_flow(protocol, is_masqueraded);
        node.maps.config.node.direct_scope = DirectScope::Whole as u16;
        node.has_routes = true;
        node
    }

    pub(super) fn outcome(&mut self, frame: InputFrame) -> Outcome {
        self.came_in(frame).outcome
    }

    /// Returns the result at ingress.
    pub(super) fn came_in(&mut self, frame: InputFrame) -> FrameResult {
        let link = if frame.link == POD { OUTSIDE } else { POD };
        let route = self.has_routes.then(|| Route {
            link,
            next_hop: self.endpoint.ip().into(),
            hardware: self.hardware,
            ..Route::NONE
        });
        self.run(Hook::Ingress, InputFrame { route, ..frame })
    }
}

#[test]
fn every_packet_of_a_whole_flow_takes_the_direct_path() {
    for is_masqueraded in [false, true] {
        let mut node = Node::whole(Tcp, is_masqueraded);
        assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Direct);
        assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Direct);
        for flags in [PLAIN, PLAIN, PLAIN, TcpFlags::FIN_ACK, PLAIN, TcpFlags::RST_ALONE] {
            assert_eq!(node.exchange(flags), [Way::Direct; 2], "{flags:?}");
        }
        let mut node = Node::whole(Udp, is_masqueraded);
        assert_eq!([(); 2].map(|()| node.exchange(PLAIN)), [[Way::Direct; 2]; 2]);
    }
}

#[test]
fn whole_flow_goes_through_the_stack_without_a_route() {
    for is_masqueraded in [false, true] {
        let mut node = Node::whole(Tcp, is_masqueraded);
        node.has_routes = false;
        assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Stack);
        assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Stack);
        node.has_routes = true;
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

#[test]
fn unusual_packets_of_a_whole_flow_go_through_the_stack() {
    let mut node = Node::whole(Tcp, false);
    assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Direct; 2]);
    let plain = node.request(PLAIN);
    assert_eq!(node.send(&TestPacket { options: [1; 4].to_vec(), ..plain.clone() }), Way::Stack);
    let frame = |packet: &TestPacket| InputFrame { link: OUTSIDE, ..InputFrame::new(packet.to_frame()) };
    assert_eq!(node.outcome(frame(&plain)), Outcome::Redirect);
    let last_hop = TestPacket { hops: 1, ..plain.clone() };
    assert_eq!(node.outcome(frame(&last_hop)), Outcome::Proceed, "the stack answers with an error");
    let marked = InputFrame { mark: 0x10_0000, ..frame(&plain) };
    assert_eq!(node.outcome(marked), Outcome::Proceed, "rules may look at the mark");
    let elsewhere = InputFrame { link: 7, ..frame(&plain) };
    assert_eq!(node.outcome(elsewhere), Outcome::Proceed, "programs of others may be on the link");
    node.maps.config.direct_links.remove(&POD);
    assert_eq!(node.outcome(frame(&plain)), Outcome::Proceed, "no program may be where it leaves");
}

/// The prefilter has false positives, and userspace inserts clients while it hands flows over.
#[test]
fn reply_to_a_client_that_may_be_a_vip_takes_the_direct_path() {
    let mut node = Node::whole(Udp, false);
    let (client, other) = (SocketAddr::new(AT.client, 40_000), SocketAddr::new(AT.pod, 9));
    let tuple = Tuple { source: other.into(), destination: client.into() };
    let passed = Flow { state: flow_state::PASS | flow_state::ASSURED, used_ns: 1, ..Flow::NONE };
    let key = FlowKey::new(Direction::Original, Udp, tuple);
    node.maps.state.borrow_mut().flows.insert(key, passed);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

#[test]
fn packet_of_an_endpoint_that_belongs_to_no_flow_goes_through_the_stack() {
    let mut node = Node::whole(Tcp, false);
    let own = InputFrame { link: POD, ..InputFrame::new(node.reply(TcpFlags::SYN_ALONE).to_frame()) };
    assert_eq!(node.outcome(own), Outcome::Proceed);
}

#[test]
fn flow_that_began_in_the_stack_stays_there() {
    for (protocol, is_masqueraded) in [(Tcp, false), (Tcp, true), (Udp, false), (Udp, true)] {
        let mut node = Node::whole(protocol, is_masqueraded);
        node.maps.config.node.direct_scope = DirectScope::Learned as u16;
        assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Stack; 2]);
        node.maps.config.node.direct_scope = DirectScope::Whole as u16;
        assert_eq!([(); 2].map(|()| node.exchange(PLAIN)), [[Way::Stack; 2]; 2]);
    }
}

#[test]
fn whole_flow_goes_through_the_stack_when_the_setting_changes() {
    for is_masqueraded in [false, true] {
        let mut node = Node::whole(Tcp, is_masqueraded);
        assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Direct; 2]);
        node.maps.config.node.direct_epoch = 2;
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    }
}

#[test]
fn whole_flows_need_programs_that_masquerade() {
    let mut node = Node::whole(Tcp, false);
    node.maps.config.node.masquerading = Masquerading::KnownFlows as u16;
    assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Stack; 2]);
}

/// Returns a node for whole flows with a flow that was learned before. It goes through the stack
/// where it has no entry.
fn node_with_entries() -> Node {
    let mut node = Node::learned(Tcp, false);
    node.maps.config.node.direct_scope = DirectScope::Whole as u16;
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    node
}

#[test]
fn entry_of_a_connection_counts_as_long_as_it_has_its_hint() {
    let mut node = node_with_entries();
    let hints = node.maps.direct_hints.take();
    assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Stack, "it removes no such entry");
    node.maps.direct_hints.replace(hints);
    assert_eq!(node.send(&node.request(PLAIN)), Way::Direct);
    assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Stack);
    assert_eq!(node.send(&node.request(PLAIN)), Way::Stack, "the entry is removed");
}

#[test]
fn entry_without_a_hint_gives_its_length_to_the_same_endpoint_and_its_approval_to_whole_flows() {
    const LONGEST: u16 = 9_000;
    for (endpoint, state, keeps_length, keeps_approval) in [
        (AT.pod, flow_state::WHOLE, true, true),
        // Conntrack may have this one, so userspace approves it again.
        (AT.pod, 0, true, false),
        (AT.node, flow_state::WHOLE, false, false),
    ] {
        let mut node = node_with_entries();
        let packet = node.request(PLAIN);
        let tuple = Tuple { source: packet.from.into(), destination: packet.to.into() };
        let key = DirectKey::new(Tcp, tuple);
        if let Some(flow) = node.maps.state.borrow_mut().direct_flows.get_mut(&key) {
            (flow.destination, flow.path.longest) = (endpoint.into(), LONGEST);
        }
        node.maps.state.borrow_mut().flows.values_mut().for_each(|flow| flow.state |= state);
        node.maps.direct_hints.take();
        node.pass(LEASE_NS);
        assert_eq!(node.send(&packet), Way::Stack, "it is learned from");
        let path = node.maps.state.borrow().direct_flows[&key].path;
        assert_eq!((path.longest == LONGEST, path.is_approved()), (keeps_length, keeps_approval));
        assert_eq!(node.maps.direct_requests.borrow().is_empty(), keeps_approval);
    }
}
