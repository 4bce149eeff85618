//! How long the programs remember routes of whole flows, and for which packets.

use super::{Hook, InputFrame, MAC_OF_NEXT, MAC_OF_NODE, Node, OUTSIDE, PLAIN, POD, Way};
use crate::{
    Protocol::{self, Tcp, Udp},
    layout::{DirectWatch, KnownRoute},
    link::{Outcome, direct::LEASE_NS},
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
