//! What is learned from packets that went through the stack, and what takes the direct path then.

mod route;
mod segment;
mod twice_nat;
mod whole;

use std::{net::SocketAddr, vec::Vec};

use super::{LEASE_NS, Outcome, UNSETTLED_NS};
use crate::{
    Addr,
    Protocol::{self, Tcp, Udp},
    checksum::Difference,
    layout::{DirectWatch, Direction, Masquerading, flags, flow_state},
    packet::{Route, TcpFlags},
    testing::{Addresses, FrameRunner as _, Hook, InputFrame, MemoryMaps, TestNode, TestPacket},
};

const AT: Addresses = Addresses::BOTH[0];
/// The link of the client, and that of the endpoint.
const OUTSIDE: u32 = 2;
const POD: u32 = 3;
const MAC_OF_NODE: [u8; 6] = [2, 0, 0, 0, 0, 9];
const MAC_OF_NEXT: [u8; 6] = [2, 0, 0, 0, 0, 7];
const MILLISECOND: u64 = 1_000_000;
const PLAIN: TcpFlags = TcpFlags::ACK_ALONE;

/// How a packet passed the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Stack,
    Direct,
    /// As [`Self::Direct`], and the program on the link where it leaves did not see it.
    Peer,
    /// A firewall of the stack dropped it.
    Dropped,
}

/// A node with one Service, and a client that has a flow to it.
struct Node {
    maps: MemoryMaps,
    protocol: Protocol,
    vip: SocketAddr,
    endpoint: SocketAddr,
    /// The source that the endpoint sees.
    source: SocketAddr,
    /// The stack drops packets.
    drops: bool,
    /// The kernel tells routes.
    has_routes: bool,
    /// The Ethernet addresses of routes, or zeros if the kernel does not know them.
    hardware: [u8; 12],
}

impl Node {
    /// Returns a node whose flow is established for 10 milliseconds.
    fn new(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::without_flow(protocol, is_masqueraded);
        assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Stack);
        assert_eq!(node.send(&node.reply(TcpFlags::SYN_ACK)), Way::Stack);
        assert_eq!(node.send(&node.request(PLAIN)), Way::Stack);
        node.pass(10 * MILLISECOND);
        node
    }

    fn without_flow(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut maps = MemoryMaps { random_step: 0, ..MemoryMaps::default() };
        let client = SocketAddr::new(AT.client, 40_000);
        let [vip, endpoint] = [SocketAddr::new(AT.external_ip, 80), SocketAddr::new(AT.pod, 8080)];
        let mut node = TestNode::new(&mut maps, AT);
        let config = &mut node.config;
        config.node.direct_epoch = 1;
        config.direct_links.extend([OUTSIDE, POD]);
        config.node.masquerading = Masquerading::Programs as u16;
        (config.node.first_port, config.node.last_port) = (2_000, 2_000);
        config.masquerade_addresses.insert((POD, Addr::UNSPECIFIED_V4, 96), AT.node.into());
        let service = node.add_service(protocol, &[vip], &[endpoint]);
        if is_masqueraded {
            node.put_service(&service.with_flags(flags::MASQUERADE_OUTSIDE));
        }
        let source = if is_masqueraded { SocketAddr::new(AT.node, 2_000) } else { client };
        Self { maps, protocol, vip, endpoint, source, drops: false, has_routes: false, hardware: [0; 12] }
    }

    /// Returns a node that has learned both directions.
    fn learned(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::new(protocol, is_masqueraded);
        node.exchange(PLAIN);
        node.approve();
        node.exchange(PLAIN);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        node
    }

    /// Watches for changes from now on, and without an end.
    fn watch(&mut self, lease_ns: u64) {
        let config = &mut self.maps.config;
        config.node.direct_lease_ns = lease_ns;
        config.direct_watch = DirectWatch { until_ns: u64::MAX, ..DirectWatch::NONE };
    }

    fn pass(&self, ns: u64) {
        self.maps.now_ns.set(self.maps.now_ns.get() + ns);
    }

    /// Approves what the programs asked, as userspace does.
    fn approve(&self) {
        assert!(self.maps.approve_direct_flows(1), "they are pending");
    }

    fn packet(&self, flags: TcpFlags, from: SocketAddr, to: SocketAddr) -> TestPacket {
        match self.protocol {
            Udp => TestPacket::udp(from, to),
            _ => TestPacket::tcp(flags, from, to),
        }
    }

    fn request(&self, flags: TcpFlags) -> TestPacket {
        self.packet(flags, SocketAddr::new(AT.client, 40_000), self.vip)
    }

    fn reply(&self, flags: TcpFlags) -> TestPacket {
        self.packet(flags, self.endpoint, self.source)
    }

    /// Sends a packet in each direction.
    fn exchange(&mut self, flags: TcpFlags) -> [Way; 2] {
        [self.request(flags), self.reply(flags)].map(|packet| self.send(&packet))
    }

    /// Sends a packet, which must leave as it does without the direct path.
    fn send(&mut self, packet: &TestPacket) -> Way {
        self.send_frame(packet, InputFrame::new(packet.to_frame()))
    }

    fn send_frame(&mut self, packet: &TestPacket, frame: InputFrame) -> Way {
        let is_reply = packet.from == self.endpoint;
        let (link, out) = if is_reply { (POD, OUTSIDE) } else { (OUTSIDE, POD) };
        let segments = frame.segments;
        let (next_hop, hardware) = (packet.to.ip().into(), self.hardware);
        let route = self.has_routes.then_some(Route { link: out, next_hop, hardware, ..Route::NONE });
        let came_in = self.run(Hook::Ingress, InputFrame { link, route, ..frame });
        let (way, mut bytes, ingress_link) = match came_in.outcome {
            Outcome::Redirect => {
                assert_eq!(came_in.redirected_to, out);
                let mut bytes = came_in.bytes;
                if came_in.is_headed_by_kernel {
                    write_hardware(&mut bytes);
                }
                (if came_in.is_for_peer { Way::Peer } else { Way::Direct }, bytes, link)
            }
            Outcome::Proceed if self.drops => return Way::Dropped,
            Outcome::Proceed => (Way::Stack, came_in.bytes, link),
            Outcome::Drop | Outcome::Forward | Outcome::Transmit | Outcome::Refuse => {
                panic!("dropped: {packet:?}")
            }
        };
        if way == Way::Stack {
            forward(&mut bytes);
        }
        let left =
            InputFrame { link: out, note: came_in.note, ingress_link, segments, ..InputFrame::new(bytes) };
        let (bytes, note) = if way == Way::Peer {
            (left.bytes, left.note)
        } else {
            let left = self.run(Hook::Egress, left);
            assert_eq!(left.outcome, Outcome::Proceed);
            (left.bytes, left.note)
        };
        assert_eq!(note, 0);
        let (from, to) = if is_reply {
            (self.vip, SocketAddr::new(AT.client, 40_000))
        } else {
            (self.source, self.endpoint)
        };
        let (to_mac, from_mac, hops) = (MAC_OF_NEXT, MAC_OF_NODE, packet.hops - 1);
        let expected = TestPacket { from, to, to_mac, from_mac, hops, ..packet.clone() };
        assert_eq!(bytes, expected.to_frame(), "{way:?}");
        way
    }

    /// Runs a hook. The mark for netfilter is of no interest here.
    fn run(&mut self, hook: Hook, frame: InputFrame) -> crate::testing::FrameResult {
        let mark = if hook == Hook::Egress { 0 } else { frame.mark };
        self.maps.run(hook, &InputFrame { mark, ..frame }).expect("memory runs every frame")
    }
}

fn write_hardware(bytes: &mut [u8]) {
    bytes[..12].copy_from_slice(&[MAC_OF_NEXT, MAC_OF_NODE].concat());
}

/// Does what the stack does with an IPv4 packet.
fn forward(bytes: &mut [u8]) {
    write_hardware(bytes);
    let before = [bytes[22], bytes[23]];
    bytes[22] -= 1;
    let difference = Difference::of_bytes(before, [bytes[22], bytes[23]]);
    let checksum = difference.apply([bytes[24], bytes[25]]);
    bytes[24..26].copy_from_slice(&checksum);
}

#[test]
fn packet_of_a_learned_flow_goes_to_the_peer_of_the_link_if_that_may() {
    for is_masqueraded in [false, true] {
        let mut node = Node::learned(Tcp, is_masqueraded);
        node.maps.config.peer_links.insert(POD);
        node.watch(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "it was learned before");
        node.pass(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
        assert_eq!(node.exchange(PLAIN), [Way::Peer, Way::Direct], "replies leave the node");
        // Something changes, which may be a qdisc on the link.
        node.maps.config.direct_watch.since_ns = node.maps.now_ns.get();
        for (passed_ns, way) in [(LEASE_NS, Way::Direct), (UNSETTLED_NS - LEASE_NS, Way::Peer)] {
            node.pass(passed_ns);
            assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
            assert_eq!(node.exchange(PLAIN), [way, Way::Direct]);
        }
        node.maps.config.peer_links.clear();
        node.pass(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

#[test]
fn connection_takes_the_direct_path_after_userspace_approved_it() {
    for is_masqueraded in [false, true] {
        let mut node = Node::new(Tcp, is_masqueraded);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2], "it is learned from");
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2], "it is pending");
        assert_eq!(node.maps.direct_requests.borrow().len(), 2, "one request for each direction");
        node.approve();
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2], "it is learned from again");
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

#[test]
fn datagrams_take_the_direct_path_without_approval() {
    for is_masqueraded in [false, true] {
        let mut node = Node::new(Udp, is_masqueraded);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

#[test]
fn new_flow_is_not_learned() {
    let mut node = Node::new(Udp, false);
    node.pass(119_000 * MILLISECOND);
    node.maps.state.borrow_mut().flows.values_mut().for_each(|flow| flow.used_ns = node.maps.now_ns.get());
    assert_eq!([(); 3].map(|()| node.exchange(PLAIN)), [[Way::Stack; 2]; 3]);
}

/// Its client's next packet may come through the tunnel, and replies follow it.
#[test]
fn flow_whose_replies_return_through_the_tunnel_is_not_learned() {
    for protocol in [Tcp, Udp] {
        let mut node = Node::new(protocol, false);
        node.maps.state.borrow_mut().all_flows_mut().for_each(|flow| flow.state |= flow_state::RETURN);
        assert_eq!([(); 3].map(|()| node.exchange(PLAIN)), [[Way::Stack; 2]; 3]);
        assert!(node.maps.direct_requests.borrow().is_empty(), "{protocol:?}: something is pending");
    }
}

#[test]
fn packet_that_renews_the_time_of_its_flow_is_learned_from() {
    for protocol in [Tcp, Udp] {
        let mut node = Node::new(protocol, true);
        node.pass(1_500 * MILLISECOND);
        let request = node.request(PLAIN);
        assert_eq!(node.send(&request), Way::Stack);
        node.approve();
        assert_eq!(node.send(&request), if protocol == Tcp { Way::Stack } else { Way::Direct });
        assert_eq!(node.send(&request), Way::Direct);
    }
}

#[test]
fn packet_goes_through_the_stack_twice_a_second() {
    let mut node = Node::learned(Tcp, true);
    for _ in 0..3 {
        node.pass(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

/// The lease of the tests: sixteen times that without userspace.
const LONG_LEASE_NS: u64 = 16 * LEASE_NS;

#[test]
fn while_nothing_changes_fewer_packets_go_through_the_stack() {
    let mut node = Node::learned(Tcp, true);
    node.watch(LONG_LEASE_NS);
    for _ in 0..3 {
        for _ in 0..15 {
            node.pass(LEASE_NS);
            assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        }
        node.pass(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    }
}

#[test]
fn after_a_change_a_packet_goes_through_the_stack() {
    let mut node = Node::learned(Tcp, false);
    node.watch(LONG_LEASE_NS);
    node.pass(LEASE_NS);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    node.maps.config.direct_watch.since_ns = node.maps.now_ns.get();
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    node.pass(LEASE_NS);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "nothing changed since then");
}

#[test]
fn without_a_watch_or_with_rules_of_others_the_time_is_half_a_second() {
    type Change = fn(&mut Node);
    let changes: [Change; 2] = [
        |node| node.maps.config.direct_watch.until_ns = node.maps.now_ns.get() + LEASE_NS,
        |node| node.maps.config.node.direct_lease_ns = 0,
    ];
    for change in changes {
        let mut node = Node::learned(Udp, false);
        node.watch(LONG_LEASE_NS);
        change(&mut node);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        node.pass(LEASE_NS);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    }
}

#[test]
fn firewall_of_the_stack_ends_the_direct_path() {
    let mut node = Node::learned(Tcp, false);
    node.drops = true;
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    node.pass(LEASE_NS);
    assert_eq!([(); 3].map(|()| node.exchange(PLAIN)), [[Way::Dropped; 2]; 3]);
    node.drops = false;
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

#[test]
fn segments_that_begin_or_end_a_connection_go_through_the_stack_and_end_its_direct_path() {
    for flags in [TcpFlags::SYN_ALONE, TcpFlags::SYN_ACK, TcpFlags::FIN_ACK, TcpFlags::RST_ALONE] {
        let mut node = Node::learned(Tcp, true);
        assert_eq!(node.exchange(flags), [Way::Stack; 2], "{flags:?}");
        assert!(node.maps.state.borrow().direct_flows.is_empty(), "{flags:?}");
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2], "{flags:?}");
    }
}

#[test]
fn answer_to_a_syn_or_an_accepted_reset_goes_through_the_stack() {
    for is_masqueraded in [false, true] {
        let mut node = Node::learned(Tcp, is_masqueraded);
        node.watch(LONG_LEASE_NS);
        assert_eq!(node.send(&node.request(TcpFlags::SYN_ALONE)), Way::Stack);
        assert_eq!(node.send(&node.reply(PLAIN)), Way::Stack, "it may be a challenge");

        let mut node = Node::learned(Tcp, is_masqueraded);
        node.watch(LONG_LEASE_NS);
        let next = 1 << 20;
        assert_eq!(node.send(&node.reply(PLAIN).acknowledgement(next)), Way::Direct);
        assert_eq!(node.send(&node.request(TcpFlags::RST_ALONE).sequence(next)), Way::Stack);
        assert_eq!(node.send(&node.reply(PLAIN)), Way::Stack, "the endpoint may go on");

        let mut node = Node::learned(Tcp, is_masqueraded);
        node.watch(LONG_LEASE_NS);
        let forged = node.request(TcpFlags::RST_ALONE).sequence(1 << 30);
        assert_eq!(node.send(&forged), Way::Stack);
        assert_eq!(node.send(&node.reply(PLAIN)), Way::Direct, "it changes nothing");
    }
}

#[test]
fn after_a_change_long_packets_go_through_the_stack_again() {
    let mut node = Node::learned(Udp, false);
    node.watch(LONG_LEASE_NS);
    let payload = crate::testing::Payload::Udp { data: std::vec![0; 500] };
    let long = TestPacket { payload, ..node.request(PLAIN) };
    assert_eq!([(); 2].map(|()| node.send(&long)), [Way::Stack, Way::Direct]);
    node.pass(LEASE_NS);
    node.maps.config.direct_watch.since_ns = node.maps.now_ns.get();
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    assert_eq!([(); 2].map(|()| node.send(&long)), [Way::Stack, Way::Direct]);
}

#[test]
fn unusual_packets_go_through_the_stack() {
    let mut node = Node::learned(Tcp, false);
    let plain = node.request(PLAIN);
    let unusual: Vec<TestPacket> = [
        TestPacket { options: [1; 4].to_vec(), ..plain.clone() },
        TestPacket { traffic_class: 0xb8, ..plain.clone() },
    ]
    .to_vec();
    assert_eq!(node.send(&unusual[0]), Way::Stack, "options");
    assert_eq!(node.send(&unusual[1]), Way::Stack, "the stack may treat another class in another way");
    assert_eq!(node.send(&unusual[1]), Way::Direct, "it did not");
    assert_eq!(node.send(&plain), Way::Stack);
    let last_hop = TestPacket { hops: 1, ..plain.clone() };
    let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(last_hop.to_frame()) };
    assert_eq!(node.run(Hook::Ingress, frame).outcome, Outcome::Proceed, "the stack answers with an error");
    let elsewhere = InputFrame { link: 7, ..InputFrame::new(plain.to_frame()) };
    assert_eq!(node.run(Hook::Ingress, elsewhere).outcome, Outcome::Proceed, "another link");
    let marked = InputFrame { link: OUTSIDE, mark: 0x10_0000, ..InputFrame::new(plain.to_frame()) };
    assert_eq!(node.run(Hook::Ingress, marked).outcome, Outcome::Proceed, "rules may look at the mark");
}

#[test]
fn packet_that_is_longer_than_all_before_goes_through_the_stack() {
    let mut node = Node::learned(Udp, false);
    let long = |length| {
        let payload = crate::testing::Payload::Udp { data: std::vec![0; length] };
        TestPacket { payload, ..node.request(PLAIN) }
    };
    let (long, longer) = (long(500), long(501));
    assert_eq!([&long, &long, &longer, &long].map(|packet| node.send(packet)), {
        [Way::Stack, Way::Direct, Way::Stack, Way::Direct]
    });
    let segmented = |size| InputFrame { segments: Some((size, 2)), ..InputFrame::new(longer.to_frame()) };
    assert_eq!(node.send_frame(&longer, segmented(400)), Way::Direct, "each segment is shorter");
    assert_eq!(node.send_frame(&longer, segmented(502)), Way::Stack, "a segment is longer");
}

#[test]
fn nothing_takes_the_direct_path_while_it_is_off_or_in_another_epoch() {
    let mut node = Node::learned(Udp, false);
    node.maps.config.node.direct_epoch = 2;
    assert_eq!([(); 2].map(|()| node.exchange(PLAIN)), [[Way::Stack; 2]; 2]);
    node.maps.config.node.direct_epoch = 3;
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
}

#[test]
fn flow_that_comes_in_on_a_link_with_programs_of_others_is_not_learned() {
    let mut node = Node::new(Udp, false);
    node.maps.config.direct_links.remove(&POD);
    node.exchange(PLAIN);
    assert_eq!(node.exchange(PLAIN), [Way::Direct, Way::Stack]);
}

#[test]
fn reset_that_follows_data_on_the_direct_path_ends_the_connection() {
    for is_masqueraded in [false, true] {
        let mut node = Node::learned(Tcp, is_masqueraded);
        let far = 1 << 20;
        let reply = node.reply(PLAIN).acknowledgement(far);
        assert_eq!(node.send(&reply), Way::Direct);
        let reset = node.request(TcpFlags::RST_ALONE).sequence(far);
        assert_eq!(node.send(&reset), Way::Stack);
        let flow = node
            .maps
            .state
            .borrow()
            .flows
            .iter()
            .find_map(|(key, flow)| (key.direction() == Some(Direction::Original)).then_some(*flow));
        assert!(flow.expect("the flow").is_closed());
    }
}
