//! How long the programs remember routes of whole flows, and for which packets.

use proptest::{collection::vec, prelude::*, sample::select};

use super::{Hook, InputFrame, MAC_OF_NEXT, MAC_OF_NODE, MILLISECOND, Node, OUTSIDE, PLAIN, POD, Way};
use crate::{
    Protocol::{self, Tcp, Udp},
    layout::{DirectWatch, KnownRoute},
    link::{
        Outcome,
        direct::{LEARN_AFTER_NS, LEASE_NS},
    },
    packet::TcpFlags,
    testing::{FrameResult, Payload, TestPacket},
};

impl Node {
    /// Returns a node with a whole flow whose routes it remembers. The kernel then tells none.
    fn remembering(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::knowing_next_hops(protocol, is_masqueraded);
        assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Direct; 2]);
        node.has_routes = false;
        node
    }

    /// Returns a node whose kernel knows the Ethernet addresses of next hops.
    fn knowing_next_hops(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::whole(protocol, is_masqueraded);
        node.hardware = [MAC_OF_NEXT, MAC_OF_NODE].concat().try_into().expect("12 bytes");
        node
    }

    /// Returns a node that may hand packets to the peer of the pod's link.
    fn with_peer(protocol: Protocol, is_masqueraded: bool) -> Self {
        let mut node = Self::knowing_next_hops(protocol, is_masqueraded);
        node.maps.config.peer_links.insert(POD);
        node.watch(LEASE_NS);
        node
    }

    /// Returns true if a packet of the client leaves directly.
    fn knows_route_of(&mut self, packet: &TestPacket) -> bool {
        let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(packet.to_frame()) };
        self.run(Hook::Ingress, frame).outcome == Outcome::Redirect
    }

    /// Returns the result of a packet of the client, whose route the kernel tells.
    fn routed(&mut self, flags: TcpFlags) -> FrameResult {
        let frame = InputFrame { link: OUTSIDE, ..InputFrame::new(self.request(flags).to_frame()) };
        self.came_in(frame)
    }
}

#[test]
fn remembered_routes_lead_packets_with_ethernet_addresses() {
    for (protocol, is_masqueraded) in [(Tcp, false), (Tcp, true), (Udp, false), (Udp, true)] {
        let mut node = Node::remembering(protocol, is_masqueraded);
        // `send` compares the whole frame.
        assert_eq!([(); 2].map(|()| node.exchange(PLAIN)), [[Way::Direct; 2]; 2], "{protocol}");
    }
}

/// A datagram of a flow without twice NAT may need the program on the link where it leaves.
#[test]
fn packet_that_is_translated_once_goes_to_the_peer_of_the_link_if_that_may() {
    for (protocol, is_masqueraded) in [(Tcp, false), (Tcp, true), (Udp, false), (Udp, true)] {
        let mut node = Node::with_peer(protocol, is_masqueraded);
        assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Direct; 2], "the kernel tells the route");
        let way = if is_masqueraded || protocol == Tcp { Way::Peer } else { Way::Direct };
        assert_eq!([(); 3].map(|()| node.exchange(PLAIN)), [[way, Way::Direct]; 3], "{protocol}");
    }
}

#[test]
fn packet_does_not_go_to_the_peer_with_a_mark_or_while_nobody_watches() {
    let mut node = Node::with_peer(Udp, true);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    let request = node.request(PLAIN);
    let mark = node.maps.config.node.masquerade_mark;
    let marked = InputFrame { mark, ..InputFrame::new(request.to_frame()) };
    assert_eq!(node.send_frame(&request, marked), Way::Direct);
    assert_eq!(node.send(&request), Way::Peer);
    node.maps.config.direct_watch = DirectWatch::NONE;
    node.pass(LEASE_NS);
    assert_eq!([(); 2].map(|()| node.send(&request)), [Way::Direct; 2]);
}

proptest! {
    /// While the programs know the route, a function of its own handles most segments.
    #[test]
    fn segments_leave_the_same_state_whether_the_route_is_known_or_not(
        segments in vec((any::<bool>(), select(&SEGMENTS[..]), 0..3_u64), 1..16),
    ) {
        let state = |mut node: Node| {
            let first = [(false, TcpFlags::SYN_ALONE, 0), (true, TcpFlags::SYN_ACK, 0)];
            for &(is_reply, flags, milliseconds) in first.iter().chain(&segments) {
                let packet = if is_reply { node.reply(flags) } else { node.request(flags) };
                let link = if is_reply { POD } else { OUTSIDE };
                node.came_in(InputFrame { link, ..InputFrame::new(packet.to_frame()) });
                node.pass(milliseconds * MILLISECOND);
            }
            node.maps.state.into_inner()
        };
        let by_general_code = state(Node::whole(Tcp, true));
        prop_assert_eq!(state(Node::knowing_next_hops(Tcp, true)), by_general_code);
    }
}

/// The flags of segments after the first two. The last one, with SYN, ACK and FIN, has no
/// function of its own.
pub(super) const SEGMENTS: [TcpFlags; 7] = [
    PLAIN,
    PLAIN,
    TcpFlags::FIN_ACK,
    TcpFlags::SYN_ACK,
    TcpFlags::SYN_ALONE,
    TcpFlags::RST_ALONE,
    TcpFlags(0x13),
];

#[test]
fn packet_that_the_node_learns_from_does_not_go_to_the_peer() {
    let mut node = Node::with_peer(Tcp, true);
    assert_eq!(node.exchange(TcpFlags::SYN_ALONE), [Way::Direct; 2]);
    assert_eq!(node.exchange(PLAIN), [Way::Peer, Way::Direct]);
    node.pass(2 * LEARN_AFTER_NS);
    node.maps.random.set(0);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "it is learned from");
    node.approve();
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2], "it is written");
    assert_eq!(node.exchange(PLAIN), [Way::Peer, Way::Direct], "it is learned");
}

/// So the kernel keeps its entry for the next hop current.
#[test]
fn first_packet_of_each_half_second_leaves_by_the_kernels_next_hop() {
    for is_masqueraded in [false, true] {
        let mut node = Node::knowing_next_hops(Udp, is_masqueraded);
        for round in 0..2 {
            let by_kernel = [(); 3].map(|()| node.routed(PLAIN).is_headed_by_kernel);
            assert_eq!(by_kernel, [true, false, false], "{round}");
            node.pass(LEASE_NS);
        }
    }
}

#[test]
fn kernel_is_asked_again_after_half_a_second() {
    let mut node = Node::remembering(Udp, false);
    // No packet is learned from.
    node.maps.random.set(1);
    node.pass(LEASE_NS - 1);
    assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
    node.pass(1);
    assert_eq!(node.exchange(PLAIN), [Way::Stack; 2]);
}

#[test]
fn kernel_is_asked_again_after_a_change() {
    let mut node = Node::remembering(Udp, false);
    let began_ns = node.maps.now_ns.get();
    let mut watch = |since_ns| {
        node.maps.config.direct_watch = DirectWatch { since_ns, until_ns: u64::MAX, portless_until_ns: 0 };
        node.exchange(PLAIN)
    };
    assert_eq!(watch(began_ns), [Way::Direct; 2]);
    assert_eq!(watch(began_ns + 1), [Way::Stack; 2]);
}

#[test]
fn kernel_is_asked_for_a_packet_that_is_longer() {
    let mut node = Node::remembering(Udp, false);
    let plain = node.request(PLAIN);
    let longer = TestPacket { payload: Payload::Udp { data: [0; 100].to_vec() }, ..plain.clone() };
    assert!(!node.knows_route_of(&longer), "the route may have a smaller MTU");
    assert!(node.knows_route_of(&plain));
}

/// A place has the route of another flow, or rules look at what differs.
#[test]
fn route_is_of_packets_with_the_same_ends_protocol_class_and_link() {
    const CHANGES: [fn(&mut KnownRoute); 7] = [
        |route| route.source.addr.octets[15] ^= 1,
        |route| route.source.port ^= 1,
        |route| route.destination.addr.octets[15] ^= 1,
        |route| route.destination.port ^= 1,
        |route| route.proto ^= 1,
        |route| route.in_link ^= 1,
        |route| route.traffic_class ^= 1 << 2,
    ];
    for (at, change) in CHANGES.iter().enumerate() {
        let mut node = Node::remembering(Udp, false);
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        node.maps.routes.borrow_mut().values_mut().for_each(change);
        assert_eq!(node.exchange(PLAIN), [Way::Stack; 2], "{at}");
    }
}

/// No rule looks at ports, and no route has several next hops by ports.
#[test]
fn routes_that_do_not_depend_on_ports_are_those_of_all_flows_between_two_addresses() {
    for portless_until_ns in [0, u64::MAX / 2] {
        let mut node = Node::knowing_next_hops(Udp, false);
        node.maps.config.direct_watch = DirectWatch { portless_until_ns, ..DirectWatch::NONE };
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        node.has_routes = false;
        let mut other = node.request(PLAIN);
        other.from.set_port(other.from.port() ^ 1);
        assert_eq!(node.knows_route_of(&other), portless_until_ns != 0);
        let places = node.maps.routes.borrow().len();
        assert_eq!(places, 2, "one for each direction");
    }
}

/// Acknowledgements without data are not ECN-capable; segments with data are.
#[test]
fn route_is_the_same_for_all_codes_of_ecn() {
    let mut node = Node::remembering(Udp, false);
    for traffic_class in 0..4 {
        let packet = TestPacket { traffic_class, ..node.request(PLAIN) };
        assert!(node.knows_route_of(&packet), "{traffic_class}");
    }
}

#[test]
fn ports_matter_again_when_userspace_ceases_to_watch() {
    let watch = DirectWatch { portless_until_ns: 7, ..DirectWatch::NONE };
    assert_eq!([watch.port_mask(6), watch.port_mask(7)], [0, u16::MAX]);
}

/// Kernels before 6.3 tell the source although the destination is not known.
#[test]
fn route_whose_next_hop_the_kernel_does_not_know_is_not_remembered() {
    for source in [[0; 6], MAC_OF_NODE] {
        let mut node = Node::knowing_next_hops(Udp, false);
        node.hardware = [[0; 6], source].concat().try_into().expect("12 bytes");
        assert_eq!(node.exchange(PLAIN), [Way::Direct; 2]);
        assert!(node.maps.routes.borrow().is_empty());
    }
}

#[test]
fn remembered_route_to_a_pod_is_not_that_of_its_replies() {
    let node = Node::remembering(Udp, false);
    let links: std::vec::Vec<_> =
        node.maps.routes.borrow().values().map(|route| (route.in_link, route.out_link)).collect();
    assert!(links.contains(&(OUTSIDE, POD)) && links.contains(&(POD, OUTSIDE)), "{links:?}");
}
