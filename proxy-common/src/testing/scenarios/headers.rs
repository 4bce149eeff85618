//! Unusual headers and frames: options, extension headers, VLAN tags, segmentation, checksums, and
//! truncated frames.

use std::{net::IpAddr, vec::Vec};

use super::{Fixture, PROTOCOLS, addr};
use crate::{
    Protocol::{Tcp, Udp},
    testing::{ChecksumState, Extension, Hook, InputFrame, Payload, TestNode, TestPacket},
};

/// Asserts that a first packet and its reply are translated after this change to their headers.
#[track_caller]
fn check_translated(node: &mut TestNode<'_>, change: impl Fn(TestPacket) -> TestPacket) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let (first, reply) = (change(fixture.first.clone()), change(fixture.reply()));
        node.ingress(&first).becomes(&first.clone().to(fixture.endpoint));
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
    }
}

/// Asserts that a first packet and its reply are left alone after this change to their headers.
#[track_caller]
fn check_left_alone(node: &mut TestNode<'_>, change: impl Fn(TestPacket) -> TestPacket) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        node.ingress(&change(fixture.first.clone())).is_left_alone();
        node.ingress(&fixture.first);
        node.egress(&change(fixture.reply())).is_left_alone();
        node.ingress(&change(fixture.first)).is_left_alone();
    }
}

fn ip_options_and_extension_headers_are_skipped(node: &mut TestNode<'_>) {
    if node.ip.node.is_ipv4() {
        for length in [4, 20, 40] {
            check_translated(node, |packet| TestPacket { options: [1].repeat(length), ..packet });
        }
        return;
    }
    let [hop_by_hop, destination, routing, authentication] =
        [(0, 8), (60, 248), (43, 24), (51, 24)].map(|(kind, length)| Extension { kind, length });
    for extensions in [
        Vec::from([hop_by_hop]),
        Vec::from([destination]),
        Vec::from([routing]),
        Vec::from([authentication]),
        Vec::from([hop_by_hop, destination, routing, authentication, destination, destination]),
    ] {
        check_translated(node, |packet| TestPacket { extensions: extensions.clone(), ..packet });
    }
}

fn packet_with_too_many_extension_headers_is_left_alone(node: &mut TestNode<'_>) {
    if node.ip.node.is_ipv6() {
        let extensions = [Extension { kind: 60, length: 8 }].repeat(7);
        check_left_alone(node, |packet| TestPacket { extensions: extensions.clone(), ..packet });
    }
}

fn fragment_with_a_whole_datagram_is_translated(node: &mut TestNode<'_>) {
    check_translated(node, |packet| packet.fragment(12, 0..usize::MAX));
    if node.ip.node.is_ipv6() {
        let extensions = [Extension { kind: 0, length: 8 }, Extension { kind: 60, length: 16 }];
        check_translated(node, |packet| {
            TestPacket { extensions: extensions.to_vec(), ..packet }.fragment(12, 0..usize::MAX)
        });
    }
}

fn vlan_tags_are_skipped(node: &mut TestNode<'_>) {
    for vlan_tags in [Vec::from([0x8100]), Vec::from([0x88a8]), Vec::from([0x88a8, 0x8100])] {
        check_translated(node, |packet| TestPacket { vlan_tags: vlan_tags.clone(), ..packet });
    }
    check_left_alone(node, |packet| TestPacket { vlan_tags: Vec::from([0x88a8, 0x88a8, 0x8100]), ..packet });
    check_left_alone(node, |packet| TestPacket { vlan_tags: Vec::from([0x8847]), ..packet });
}

fn frames_for_another_host_are_left_alone(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        for to_mac in [[2, 0, 0, 0, 0, 9], [0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            node.ingress(&TestPacket { to_mac, ..fixture.first.clone() }).is_left_alone();
        }
        assert_eq!(node.flow_count(), 0);
        node.remove_service(&fixture.service);
    }
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let reply = TestPacket { to_mac: [2, 0, 0, 0, 0, 9], ..fixture.reply() };
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
}

fn ipv6_packets_with_mapped_addresses_are_left_alone(node: &mut TestNode<'_>) {
    let mapped = |address: std::net::SocketAddr| match address.ip() {
        IpAddr::V4(v4) => addr(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    };
    if node.ip.node.is_ipv4() {
        check_left_alone(node, |packet| {
            let (from, to) = (mapped(packet.from), mapped(packet.to));
            packet.from(from).to(to)
        });
    }
}

fn datagram_without_a_checksum_gets_none(node: &mut TestNode<'_>) {
    let unsummed = |packet: TestPacket| TestPacket { checksum: Some([0, 0]), ..packet };
    let fixture = Fixture::new(node, Udp);
    node.ingress(&unsummed(fixture.first.clone()))
        .becomes(&unsummed(fixture.first.clone().to(fixture.endpoint)));
    node.egress(&unsummed(fixture.reply())).becomes(&unsummed(fixture.reply().from(fixture.vip)));
    // A sum of the hardware is updated.
    let input = InputFrame {
        checksum: ChecksumState::Complete,
        ..InputFrame::new(unsummed(fixture.first.clone()).to_frame())
    };
    if let Some(result) = node.run(Hook::Ingress, &input) {
        result.becomes(&unsummed(fixture.first.clone().to(fixture.endpoint)));
    }
}

fn zero_checksum_is_written_as_all_ones(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    let tries = (1024..=u16::MAX).map(|port| fixture.first.clone().from(addr(node.ip.client, port)));
    let ones = tries
        .map(|packet| (packet.clone(), packet.to(fixture.endpoint)))
        .find(|(_, translated)| translated.payload_bytes()[6..8] == [0xff; 2]);
    let (packet, translated) = ones.expect("one in 65536 has it");
    node.ingress(&packet).becomes(&translated);
}

fn sum_of_the_hardware_stays_correct(node: &mut TestNode<'_>) {
    let completed = |packet: &TestPacket| InputFrame {
        checksum: ChecksumState::Complete,
        ..InputFrame::new(packet.to_frame())
    };
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let translated = fixture.first.clone().to(fixture.endpoint);
        let translated_reply = fixture.reply().from(fixture.vip);
        let (kind, router) = (if node.ip.node.is_ipv4() { [3, 4] } else { [2, 0] }, node.ip.router);
        let inner = |packet: &TestPacket| TestPacket { checksum: Some([1, 2]), ..packet.clone() };
        let inward = |packet: &TestPacket, to| TestPacket::icmp_error(kind, router, to, inner(packet));
        let mut long = fixture.first.clone();
        long.payload = match long.payload {
            Payload::Tcp { flags, .. } => Payload::Tcp { flags, data: [7; 100].to_vec() },
            _ => Payload::Udp { data: [7; 100].to_vec() },
        };
        let [start, rest] = [0..48, 48..usize::MAX].map(|range| long.clone().fragment(1, range));
        for (hook, packet, expected) in [
            (Hook::Ingress, fixture.first.clone(), translated.clone()),
            (Hook::Egress, fixture.reply(), translated_reply.clone()),
            (Hook::Ingress, start.clone(), start.to(fixture.endpoint)),
            (Hook::Ingress, rest.clone(), rest.to(fixture.endpoint)),
            (
                Hook::Ingress,
                inward(&translated_reply, fixture.vip.ip()),
                inward(&fixture.reply(), fixture.endpoint.ip()),
            ),
            (Hook::Egress, inward(&translated, node.ip.client), inward(&fixture.first, node.ip.client)),
        ] {
            let Some(result) = node.run(hook, &completed(&packet)) else { return };
            result.becomes(&expected);
        }
    }
}

fn partial_checksum_for_the_hardware_stays_correct(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let (first, reply) = (partial(&fixture.first), partial(&fixture.reply()));
        let translated = partial(&fixture.first.clone().to(fixture.endpoint));
        let translated_reply = partial(&fixture.reply().from(fixture.vip));
        for (hook, packet, expected) in
            [(Hook::Ingress, first, translated), (Hook::Egress, reply, translated_reply)]
        {
            let input = InputFrame { checksum: ChecksumState::Partial, ..InputFrame::new(packet.to_frame()) };
            let Some(result) = node.run(hook, &input) else { return };
            result.becomes(&expected);
        }
    }
}

/// Returns the packet before the hardware computes its checksum: it holds the sum of the pseudo
/// header, not inverted.
fn partial(packet: &TestPacket) -> TestPacket {
    let payload = packet.payload_bytes();
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let protocol = [0, packet.protocol()];
    let header = [&octets(packet.from.ip())[..], &octets(packet.to.ip()), &length, &protocol].concat();
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let [.., high, low] = ((folded & 0xffff) + (folded >> 16)).to_be_bytes();
    TestPacket { checksum: Some([high, low]), ..packet.clone() }
}

fn packets_for_segmentation_are_translated(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let mut syn = fixture.first.clone();
    if let Payload::Tcp { data, .. } = &mut syn.payload {
        *data = [9].repeat(2_500);
    }
    let input = InputFrame { segments: Some((1_000, 3)), ..InputFrame::new(syn.to_frame()) };
    let result = node.run(Hook::Ingress, &input).expect("this frame always runs");
    result.becomes(&syn.to(fixture.endpoint));
}

fn truncated_frames_are_never_partly_changed(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        let inner = fixture.first.clone().to(fixture.endpoint);
        let kind = if node.ip.node.is_ipv4() { [3, 4] } else { [2, 0] };
        let error = TestPacket::icmp_error(kind, node.ip.router, node.ip.client, inner);
        for (hook, packet) in [
            (Hook::Ingress, fixture.first.clone()),
            (Hook::Ingress, fixture.next()),
            (Hook::Egress, fixture.reply()),
            (Hook::Ingress, TestPacket { vlan_tags: Vec::from([0x8100]), ..fixture.next() }),
            (Hook::Egress, error),
        ] {
            let bytes = packet.to_frame();
            for length in 15..bytes.len() {
                let Some(result) = node.run(hook, &InputFrame::new(bytes[..length].to_vec())) else {
                    continue;
                };
                // The frame is either unchanged or translated, with only the end of its data cut
                // off.
                let is_whole = result.bytes == result.input.bytes || {
                    let again =
                        node.run(hook, &InputFrame::new(bytes.clone())).expect("this frame always runs");
                    again.bytes[..length] == result.bytes
                };
                assert!(is_whole, "{result:?}");
            }
        }
        node.remove_service(&fixture.service);
    }
}

fn frames_of_other_protocols_are_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let arp = [&[0; 12][..], &[0x08, 0x06], &[0; 28]].concat();
    for hook in [Hook::Ingress, Hook::Egress] {
        node.run(hook, &InputFrame::new(arp.clone())).expect("this frame always runs").is_left_alone();
        for protocol in [47, 50, 132, 255, 2] {
            let bytes = fixture.first.payload_bytes();
            let packet = TestPacket { payload: Payload::Other { protocol, bytes }, ..fixture.first.clone() };
            node.run(hook, &InputFrame::new(packet.to_frame()))
                .expect("this frame always runs")
                .is_left_alone();
        }
    }
}

super::scenarios! {
    ip_options_and_extension_headers_are_skipped,
    packet_with_too_many_extension_headers_is_left_alone,
    fragment_with_a_whole_datagram_is_translated,
    vlan_tags_are_skipped,
    frames_for_another_host_are_left_alone,
    ipv6_packets_with_mapped_addresses_are_left_alone,
    datagram_without_a_checksum_gets_none,
    zero_checksum_is_written_as_all_ones,
    sum_of_the_hardware_stays_correct,
    partial_checksum_for_the_hardware_stays_correct,
    packets_for_segmentation_are_translated,
    truncated_frames_are_never_partly_changed,
    frames_of_other_protocols_are_left_alone,
}
