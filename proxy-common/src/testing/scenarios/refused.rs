//! Packets that the programs refuse themselves, because no rule of netfilter does: they become the
//! answer.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    vec,
    vec::Vec,
};

use super::{Fixture, errors::error_about};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, Refusing, flags},
    packet::TcpFlags,
    testing::{
        ChecksumState, FrameResult, Hook, InputFrame, Payload, TestNode, TestPacket, has_correct_checksums,
    },
};

/// Returns a Service without endpoints, on a node whose programs refuse packets.
fn without_endpoints(node: &mut TestNode<'_>, protocol: crate::Protocol) -> Fixture {
    node.config.node.refusing = Refusing::Programs as u32;
    let fixture = Fixture::new(node, protocol);
    node.put_service(&fixture.service.clone().with_endpoints(&[]));
    fixture
}

const HOPS: u8 = 64;

/// The reset that answers a segment: its sequence number and, with ACK, its acknowledgement number.
fn reset(packet: &TestPacket, sequence: u32, acknowledgement: Option<u32>) -> TestPacket {
    let flags = TcpFlags(if acknowledgement.is_some() { 0x14 } else { 4 });
    let payload = Payload::Tcp { flags, data: Vec::new() };
    let answer = TestPacket::new(packet.to, packet.from, payload)
        .sequence(sequence)
        .acknowledgement(acknowledgement.unwrap_or(0));
    back(answer, packet)
}

/// Returns an answer with the headers of one on its way back.
fn back(answer: TestPacket, packet: &TestPacket) -> TestPacket {
    TestPacket { hops: HOPS, window: 0, to_mac: packet.from_mac, from_mac: packet.to_mac, ..answer }
}

/// The ICMP error about a datagram, which repeats its headers without the checksum.
fn unreachable(packet: &TestPacket) -> TestPacket {
    let kind = if packet.to.is_ipv4() { [3, 3] } else { [1, 4] };
    let inner = TestPacket { checksum: Some([0; 2]), ..packet.clone() };
    back(error_about(kind, packet.to.ip(), packet.from.ip(), inner, 8), packet)
}

fn reset_acknowledges_what_the_segment_has(node: &mut TestNode<'_>) {
    let fixture = without_endpoints(node, Tcp);
    let syn = TestPacket {
        payload: Payload::Tcp { flags: TcpFlags::SYN_ALONE, data: vec![] },
        ..fixture.first.clone()
    };
    for sequence in [7, u32::MAX] {
        let syn = syn.clone().sequence(sequence);
        node.ingress(&syn).is_redirected_as(&reset(&syn, 0, Some(sequence.wrapping_add(1))));
    }
    let with_data = TestPacket { payload: Payload::Tcp { flags: TcpFlags(1), data: vec![5; 9] }, ..syn };
    node.ingress(&with_data).is_redirected_as(&reset(&with_data, 0, Some(7 + 9 + 1)));
    assert_eq!(node.counter(Counter::Refused), 2);
    assert_eq!(node.counter(Counter::UnknownConnection), 1);
    assert_eq!(node.flow_count(), 0);
}

fn reset_has_the_sequence_number_that_the_client_expects(node: &mut TestNode<'_>) {
    let fixture = without_endpoints(node, Tcp);
    for flags in [TcpFlags::ACK_ALONE, TcpFlags::FIN_ACK] {
        let segment = fixture.next().flags(flags).acknowledgement(0x0102_0304);
        node.ingress(&segment).is_redirected_as(&reset(&segment, 0x0102_0304, None));
    }
    assert_eq!(node.counter(Counter::UnknownConnection), 2);
}

fn datagram_gets_an_error_with_its_headers(node: &mut TestNode<'_>) {
    let fixture = without_endpoints(node, Udp);
    for data in [&b""[..], b"x", &[7; 1_400]] {
        let packet = TestPacket { payload: Payload::Udp { data: data.to_vec() }, ..fixture.first.clone() };
        node.ingress(&packet).is_redirected_as(&unreachable(&packet));
    }
    assert_eq!(node.counter(Counter::Refused), 3);
}

fn answer_is_marked_as_refused_and_the_program_at_egress_takes_the_mark(node: &mut TestNode<'_>) {
    for protocol in super::PROTOCOLS {
        let fixture = without_endpoints(node, protocol);
        let refused = run(node, Hook::Ingress, &InputFrame::new(fixture.first.to_frame()));
        refused.is_marked(node.config.node.reject_mark);
        let FrameResult { bytes, mark, note, .. } = refused;
        let left = run(node, Hook::Egress, &InputFrame { mark, note, ..InputFrame::new(bytes) });
        assert_eq!((left.mark, left.note, &left.bytes), (0, 0, &left.input.bytes));
    }
}

/// The kernel completes the checksum as the packet leaves. It runs no program over such a frame in
/// a test: the flows of pods in the case `refused-by-programs` have such packets.
fn checksum_that_is_completed_later_is_right_then(node: &mut TestNode<'_>) {
    for protocol in super::PROTOCOLS {
        let fixture = without_endpoints(node, protocol);
        let packet = fixture.first.clone().with_sum_of_pseudo_header();
        let input = InputFrame { checksum: ChecksumState::Partial, ..InputFrame::new(packet.to_frame()) };
        let Some(refused) = node.run(Hook::Ingress, &input) else { continue };
        if protocol == Tcp {
            let expected = reset(&packet, 0, Some(7 + 7 + 1)).with_sum_of_pseudo_header();
            refused.is_redirected_as(&expected);
        } else {
            let headers = if packet.to.is_ipv4() { 20 } else { 40 };
            let inner = 14 + headers + 8 + headers;
            let mut bytes = refused.bytes;
            let completed = !super::dsr::sum(&bytes[inner..]);
            bytes[inner + 6..inner + 8].copy_from_slice(&completed.to_be_bytes());
            assert_eq!(has_correct_checksums(&bytes), Some(true), "{bytes:x?}");
        }
    }
}

fn what_cannot_be_answered_is_dropped(node: &mut TestNode<'_>) {
    let strangers: &[IpAddr] = if node.ip.node.is_ipv4() {
        &[[239, 0, 0, 1].into(), [127, 0, 0, 1].into(), [0; 4].into(), [255; 4].into()]
    } else {
        &[[0; 16].into(), [0xff; 16].into(), Ipv6Addr::LOCALHOST.into()]
    };
    let fixture = without_endpoints(node, Udp);
    for from in strangers {
        node.ingress(&fixture.first.clone().from(SocketAddr::new(*from, 9))).is_dropped();
    }
    // Behind a translator (RFC 6052), and in the former class E.
    let known: IpAddr =
        if node.ip.node.is_ipv4() { [240, 0, 0, 1].into() } else { [0, 0x64, 0xff9b, 0, 0, 0, 0, 1].into() };
    let packet = fixture.first.clone().from(SocketAddr::new(known, 9));
    node.ingress(&packet).is_redirected_as(&unreachable(&packet));
    let options = if node.ip.node.is_ipv4() { vec![1; 4] } else { Vec::new() };
    if !options.is_empty() {
        node.ingress(&TestPacket { options, ..fixture.first.clone() }).is_dropped();
    }
    let fixture = without_endpoints(node, Tcp);
    node.ingress(&fixture.next().flags(TcpFlags::RST_ALONE)).is_left_alone();
}

fn packets_that_are_dropped_get_no_answer(node: &mut TestNode<'_>) {
    for protocol in super::PROTOCOLS {
        let fixture = without_endpoints(node, protocol);
        node.put_service(&fixture.service.clone().with_outside(&[]).with_flags(flags::DROP_WHEN_EMPTY));
        node.ingress(&fixture.first).is_dropped();
    }
}

fn run(node: &mut TestNode<'_>, hook: Hook, input: &InputFrame) -> FrameResult {
    node.run(hook, input).expect("this frame always runs")
}

super::scenarios! {
    reset_acknowledges_what_the_segment_has,
    reset_has_the_sequence_number_that_the_client_expects,
    datagram_gets_an_error_with_its_headers,
    answer_is_marked_as_refused_and_the_program_at_egress_takes_the_mark,
    checksum_that_is_completed_later_is_right_then,
    what_cannot_be_answered_is_dropped,
    packets_that_are_dropped_get_no_answer,
}
