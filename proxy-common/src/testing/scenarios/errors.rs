//! ICMP errors: the sender of a packet gets errors about the packet that it sent.

use std::{net::IpAddr, vec::Vec};

use super::{Fixture, PROTOCOLS, addr, any};
use crate::{
    Protocol::{Tcp, Udp},
    testing::{Addresses, Extension, Payload, TestNode, TestPacket},
};

/// Types and codes of errors. The first is that of path MTU discovery.
pub(super) fn kinds(ip: &Addresses) -> [[u8; 2]; 5] {
    if ip.node.is_ipv4() {
        [[3, 4], [3, 3], [4, 0], [11, 0], [12, 0]]
    } else {
        [[2, 0], [1, 4], [1, 0], [3, 0], [4, 1]]
    }
}

/// Returns an error about a packet. It holds this number of bytes after the IP header of the inner
/// packet.
pub(super) fn error_about(
    kind: [u8; 2],
    from: IpAddr,
    to: IpAddr,
    inner: TestPacket,
    bytes: usize,
) -> TestPacket {
    let header = if from.is_ipv4() { 20 } else { 40 };
    let mut error = TestPacket::icmp_error(kind, from, to, inner);
    if let Payload::Icmp { length, .. } = &mut error.payload {
        *length = bytes.saturating_add(header);
    }
    error
}

/// Returns a packet with the transport checksum of another, because programs do not change the
/// checksum of an inner packet.
pub(super) fn with_checksum_of(packet: TestPacket, other: &TestPacket) -> TestPacket {
    let sum = if packet.protocol() == 6 { 16 } else { 6 };
    let carried = other.payload_bytes();
    TestPacket { checksum: Some([carried[sum], carried[sum + 1]]), ..packet }
}

const LENGTHS: [usize; 4] = [4, 8, 20, usize::MAX];

fn client_gets_errors_about_the_packet_that_it_sent(node: &mut TestNode<'_>) {
    let ip = node.ip;
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        let packet = fixture.next();
        let translated = with_checksum_of(packet.clone().to(fixture.endpoint), &packet);
        for (from, translated_from) in
            [(ip.router, ip.router), (ip.node, ip.node), (fixture.endpoint.ip(), fixture.vip.ip())]
        {
            for (kind, bytes) in kinds(&ip).into_iter().flat_map(|kind| LENGTHS.map(|length| (kind, length)))
            {
                let error = error_about(kind, from, ip.client, translated.clone(), bytes);
                let expected = error_about(kind, translated_from, ip.client, packet.clone(), bytes);
                node.egress(&error).becomes(&expected).is_marked(0);
            }
        }
    }
}

fn endpoint_gets_errors_about_the_reply_that_it_sent(node: &mut TestNode<'_>) {
    let ip = node.ip;
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        let packet = fixture.reply();
        let translated = with_checksum_of(packet.clone().from(fixture.vip), &packet);
        for from in [ip.router, ip.client] {
            for (kind, bytes) in kinds(&ip).into_iter().flat_map(|kind| LENGTHS.map(|length| (kind, length)))
            {
                let error = error_about(kind, from, fixture.vip.ip(), translated.clone(), bytes);
                let expected = error_about(kind, from, fixture.endpoint.ip(), packet.clone(), bytes);
                node.ingress(&error).becomes(&expected).is_marked(0);
            }
        }
    }
}

fn error_for_another_host_keeps_its_destination(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let packet = fixture.reply();
    let translated = with_checksum_of(packet.clone().from(fixture.vip), &packet);
    let error = error_about(kinds(&ip)[0], ip.router, ip.node, translated, 8);
    node.ingress(&error).becomes(&error_about(kinds(&ip)[0], ip.router, ip.node, packet, 8));
}

fn errors_about_unknown_flows_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let other = fixture.first.clone().from(addr(ip.client, 41_000));
    for kind in kinds(&ip) {
        let back = error_about(kind, ip.router, ip.client, other.clone().to(fixture.endpoint), 8);
        node.egress(&back).is_left_alone();
        let forth = error_about(kind, ip.router, fixture.vip.ip(), other.clone().reversed(), 8);
        node.ingress(&forth).is_left_alone();
        // About a packet that was translated back, on a link above the first one.
        node.egress(&error_about(kind, ip.router, ip.client, fixture.first.clone(), 8)).is_left_alone();
    }
}

fn errors_with_a_truncated_inner_packet_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let header = if ip.node.is_ipv4() { 20 } else { 40 };
    for length in 0..header + 4 {
        let mut error = TestPacket::icmp_error(
            kinds(&ip)[0],
            ip.router,
            ip.client,
            fixture.first.clone().to(fixture.endpoint),
        );
        if let Payload::Icmp { length: kept, .. } = &mut error.payload {
            *kept = length;
        }
        node.egress(&error).is_left_alone();
    }
}

fn errors_about_later_fragments_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let mut inner = fixture.first.clone().to(fixture.endpoint);
    // The later fragment begins with bytes that look like the ports of the flow.
    let ports = [40_000u16, 8080].map(u16::to_be_bytes).concat();
    inner.payload = Payload::Udp { data: ports.repeat(16) };
    let later = inner.clone().fragment(4, 16..32);
    node.egress(&error_about(kinds(&ip)[0], ip.router, ip.client, later, 64)).is_left_alone();
    let first = with_checksum_of(inner.clone().fragment(4, 0..32), &inner);
    let packet = with_checksum_of(first.clone().to(fixture.vip), &inner);
    let error = error_about(kinds(&ip)[0], ip.router, ip.client, first, 64);
    node.egress(&error).becomes(&error_about(kinds(&ip)[0], ip.router, ip.client, packet, 64));
}

fn icmp_messages_that_are_not_errors_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    // Echo, echo reply and redirect. A redirect would lead a client past the node.
    let kinds = if ip.node.is_ipv4() { [[8, 0], [0, 0], [5, 1]] } else { [[128, 0], [129, 0], [137, 0]] };
    for kind in kinds {
        let inner = fixture.first.clone().to(fixture.endpoint);
        node.egress(&error_about(kind, ip.router, ip.client, inner, 8)).is_left_alone();
        let inner = fixture.first.clone().reversed();
        node.ingress(&error_about(kind, ip.router, fixture.vip.ip(), inner, 8)).is_left_alone();
    }
}

fn icmp_of_the_other_family_is_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let protocol = if ip.node.is_ipv4() { 58 } else { 1 };
    let disguised = |error: TestPacket| {
        let bytes = error.payload_bytes();
        TestPacket { payload: Payload::Other { protocol, bytes }, ..error }
    };
    let inner = fixture.first.clone().to(fixture.endpoint);
    node.egress(&disguised(error_about(kinds(&ip)[0], ip.router, ip.client, inner, 8))).is_left_alone();
    let inner = fixture.first.clone().reversed();
    let error = error_about(kinds(&ip)[0], ip.router, fixture.vip.ip(), inner, 8);
    node.ingress(&disguised(error)).is_left_alone();
}

fn errors_about_datagrams_of_the_node_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let own = addr(ip.node, 30_053);
    Fixture::at(node, Udp, own, addr(any(ip.node), 30_053));
    let question = TestPacket::udp(own, addr(ip.other_client, 53));
    node.egress(&question).is_left_alone();
    for kind in kinds(&ip) {
        node.ingress(&error_about(kind, ip.router, ip.node, question.clone(), 8)).is_left_alone();
    }
}

fn errors_about_packets_with_options_or_extensions_are_translated(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    let mut packet = fixture.next();
    if ip.node.is_ipv4() {
        packet.options = Vec::from([1; 12]);
    } else {
        packet.extensions = Vec::from([Extension { kind: 0, length: 16 }, Extension { kind: 60, length: 8 }]);
    }
    let kind = kinds(&ip)[0];
    let outer = |error: TestPacket| TestPacket {
        options: packet.options.clone(),
        extensions: packet.extensions.clone(),
        ..error
    };
    let translated = with_checksum_of(packet.clone().to(fixture.endpoint), &packet);
    let error = outer(error_about(kind, ip.router, ip.client, translated, 64));
    node.egress(&error).becomes(&outer(error_about(kind, ip.router, ip.client, packet.clone(), 64)));
}

super::scenarios! {
    client_gets_errors_about_the_packet_that_it_sent,
    endpoint_gets_errors_about_the_reply_that_it_sent,
    error_for_another_host_keeps_its_destination,
    errors_about_unknown_flows_are_left_alone,
    errors_with_a_truncated_inner_packet_are_left_alone,
    errors_about_later_fragments_are_left_alone,
    icmp_messages_that_are_not_errors_are_left_alone,
    icmp_of_the_other_family_is_left_alone,
    errors_about_datagrams_of_the_node_are_left_alone,
    errors_about_packets_with_options_or_extensions_are_translated,
}
