//! Fragments: only the first has ports. The others go where it went.

use super::{Fixture, PROTOCOLS, addr, any, first};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, flags},
    packet::TcpFlags,
    testing::{Payload, TestNode, TestPacket},
};

/// Returns the packet with enough data for four fragments.
fn long(mut packet: TestPacket) -> TestPacket {
    if let Payload::Tcp { data, .. } | Payload::Udp { data } = &mut packet.payload {
        *data = (0..100).collect();
    }
    packet
}

const PARTS: [std::ops::Range<usize>; 4] = [0..40, 40..64, 64..72, 72..usize::MAX];

fn fragments_go_where_the_first_fragment_went(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let (first, reply) = (long(fixture.first.clone()), long(fixture.reply()));
        for part in PARTS {
            let packet = first.clone().fragment(77, part.clone());
            node.ingress(&packet).becomes(&packet.clone().to(fixture.endpoint)).is_marked(0);
        }
        for part in PARTS {
            let packet = reply.clone().fragment(77, part);
            node.egress(&packet).becomes(&packet.clone().from(fixture.vip)).is_marked(0);
        }
    }
    assert_eq!(node.counter(Counter::FlowsBegun), 2);
}

fn later_fragments_are_masqueraded_like_the_first(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE));
    let mark = node.config.node.masquerade_mark;
    for part in PARTS {
        let packet = long(fixture.first.clone()).fragment(0xffff, part);
        node.ingress(&packet).becomes(&packet.clone().to(fixture.endpoint)).is_marked(mark);
    }
}

fn later_fragments_without_a_first_fragment_are_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    let first = long(fixture.first.clone());
    let later = first.clone().fragment(1, PARTS[1].clone());
    node.ingress(&later).is_left_alone();
    node.ingress(&first.clone().fragment(1, PARTS[0].clone()));
    node.ingress(&later).becomes(&later.clone().to(fixture.endpoint));
    node.ingress(&later.clone().fragment(2, PARTS[1].clone())).is_left_alone();
    node.ingress(&later.clone().from(addr(node.ip.other_client, 40_000))).is_left_alone();
    node.egress(&later).is_left_alone();
    node.egress(&later.clone().to(fixture.endpoint).reversed()).is_left_alone();
    let mut tcp = long(super::first(Tcp, first.from, first.to)).fragment(1, PARTS[1].clone());
    node.ingress(&tcp).is_left_alone();
    tcp.payload = later.payload.clone();
    node.ingress(&tcp).becomes(&tcp.clone().to(fixture.endpoint));
}

fn fragments_of_a_refused_datagram_are_not_translated(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.put_service(&fixture.service.clone().with_endpoints(&[]));
    node.ingress(&long(fixture.first.clone()).fragment(5, PARTS[0].clone())).is_refused();
    node.ingress(&long(fixture.first.clone()).fragment(5, PARTS[1].clone())).is_left_alone();
}

fn fragments_of_replies_to_the_node_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let own = addr(ip.node, 30_053);
    Fixture::at(node, Udp, own, addr(any(ip.node), 30_053));
    let question = long(TestPacket::udp(own, addr(ip.router, 53)));
    node.egress(&question.clone().fragment(9, PARTS[0].clone())).is_left_alone();
    node.egress(&question.clone().fragment(9, PARTS[1].clone())).is_left_alone();
    for part in PARTS {
        node.ingress(&question.clone().reversed().fragment(10, part)).is_left_alone();
    }
}

fn first_fragment_with_a_truncated_tcp_header_is_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let syn = long(fixture.first.clone());
    // The first has ports but no flags, the second has flags but no checksum.
    for length in [8, 16] {
        node.ingress(&syn.clone().fragment(6, 0..length)).is_left_alone();
        node.ingress(&syn.clone().fragment(6, length..24)).is_left_alone();
    }
    assert_eq!(node.flow_count(), 0);
    let fixture = Fixture::new(node, Udp);
    let datagram = long(fixture.first.clone()).fragment(8, 0..8);
    node.ingress(&datagram).becomes(&datagram.clone().to(fixture.endpoint));
}

fn reused_identification_follows_the_newest_first_fragment(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    let other = addr(node.ip.other_pod, 8080);
    for endpoint in [fixture.endpoint, other] {
        node.put_service(&fixture.service.clone().with_endpoints(&[endpoint]));
        for part in PARTS {
            let packet = long(first(Udp, fixture.first.from, fixture.vip)).fragment(3, part);
            node.ingress(&packet).becomes(&packet.clone().to(endpoint));
        }
    }
    let segment = long(fixture.first.clone().flags(TcpFlags::ACK_ALONE));
    node.ingress(&segment).becomes(&segment.clone().to(other));
}

fn reused_identification_of_another_datagram_ends_the_translation(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let own = addr(ip.node, 30_080);
    let fixture = Fixture::at(node, Udp, own, addr(any(ip.node), 30_080));
    let one = long(fixture.first.clone());
    for part in PARTS {
        let packet = one.clone().fragment(77, part);
        node.ingress(&packet).becomes(&packet.clone().to(fixture.endpoint));
    }
    node.wait(600);
    // A datagram to another port of the node, which is no VIP. The identification was reused.
    let mut other = one;
    other.to = addr(ip.node, 4500);
    node.ingress(&other.clone().fragment(77, PARTS[0].clone())).is_left_alone();
    node.ingress(&other.clone().fragment(77, PARTS[1].clone())).is_left_alone();
}

super::scenarios! {
    reused_identification_of_another_datagram_ends_the_translation,
    fragments_go_where_the_first_fragment_went,
    later_fragments_are_masqueraded_like_the_first,
    later_fragments_without_a_first_fragment_are_left_alone,
    fragments_of_a_refused_datagram_are_not_translated,
    fragments_of_replies_to_the_node_are_left_alone,
    first_fragment_with_a_truncated_tcp_header_is_left_alone,
    reused_identification_follows_the_newest_first_fragment,
}
