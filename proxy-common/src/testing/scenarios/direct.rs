//! The direct path: what packets of learned flows become. [`crate::link::direct`] tests what is
//! learned, because no test frame can have a note in the kernel.

use super::{Fixture, PROTOCOLS, scenarios};
use crate::{
    Protocol,
    checksum::Difference,
    layout::{
        DirectFlow, DirectKey, DirectPath, DirectScope, DirectWatch, Endpoint, ServiceCounts, XdpLinkValue,
        direct_flags,
    },
    link::Outcome,
    packet::{TcpFlags, Tuple},
    testing::{ChecksumState, Extension, Hook, InputFrame, LO, TestNode, TestPacket},
};

const EPOCH: u32 = 7;
const SERVICE: u32 = 42;
const TO: [u8; 6] = [2, 1, 2, 3, 4, 5];
const FROM: [u8; 6] = [2, 6, 7, 8, 9, 10];

/// Returns the entry with which packets as `before` become packets as `after`.
fn entry(before: &TestPacket, after: &TestPacket) -> (DirectKey, DirectFlow) {
    let protocol = Protocol::from_number(before.protocol()).expect("the protocol of a flow");
    let tuple = Tuple { source: before.from.into(), destination: before.to.into() };
    let [source, destination] = [after.from, after.to].map(Endpoint::from);
    let addresses = Difference::of_addresses(&tuple.source.addr, &source.addr)
        .and(Difference::of_addresses(&tuple.destination.addr, &destination.addr));
    let ports = Difference::of_ports(tuple.source.port, source.port)
        .and(Difference::of_ports(tuple.destination.port, destination.port));
    let mut hardware = [0; 12];
    hardware[..6].copy_from_slice(&after.to_mac);
    hardware[6..].copy_from_slice(&after.from_mac);
    let path = DirectPath {
        until_ns: u64::MAX,
        hardware,
        in_link: LO,
        out_link: 4_711,
        service: SERVICE,
        priority: 0,
        acknowledged: 0,
        epoch: EPOCH,
        source_port: source.port,
        destination_port: destination.port,
        addresses: addresses.folded(),
        ports: ports.folded(),
        longest: 1_500,
        traffic_class: 0,
        flags: direct_flags::APPROVED | direct_flags::TO_ENDPOINT,
    };
    let flow = DirectFlow { source: source.addr, destination: destination.addr, path };
    (DirectKey::new(protocol, tuple), flow)
}

/// Returns a packet of a client on the direct path, and what it becomes. Every field changes.
fn learned(node: &mut TestNode<'_>, protocol: Protocol) -> (TestPacket, TestPacket) {
    let fixture = Fixture::new(node, protocol);
    learned_of(node, &fixture)
}

fn learned_of(node: &mut TestNode<'_>, fixture: &Fixture) -> (TestPacket, TestPacket) {
    node.config.node.direct_epoch = EPOCH.into();
    node.write_maps();
    let before = fixture.next();
    let source = super::addr(node.ip.node, 2_001);
    let after = TestPacket { to_mac: TO, from_mac: FROM, hops: before.hops - 1, ..before.clone() };
    let after = after.from(source).to(fixture.endpoint);
    let (key, flow) = entry(&before, &after);
    node.set_direct_flow(key, flow);
    (before, after)
}

fn packets_of_a_learned_flow_leave_on_another_link(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned(node, protocol);
        node.ingress(&before).is_redirected_as(&after);
        let bytes_to_endpoints = before.to_ip_packet().len() as u64;
        let counts = ServiceCounts { bytes_to_endpoints, ..ServiceCounts::NONE };
        assert_eq!(node.service_counts(SERVICE), counts);
        node.wait(0);
    }
}

fn sum_of_the_hardware_stays_correct_on_the_direct_path(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned(node, protocol);
        let frame = InputFrame { checksum: ChecksumState::Complete, ..InputFrame::new(before.to_frame()) };
        // Kernels before 6.18 accept no such frame.
        if let Some(result) = node.run(Hook::Ingress, &frame) {
            result.is_redirected_as(&after);
        }
    }
}

/// In the kernel, no test frame has such a checksum.
fn checksum_that_hardware_completes_stays_correct_on_the_direct_path(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned(node, protocol);
        let [before, after] = [before, after].map(TestPacket::with_sum_of_pseudo_header);
        let input = InputFrame { checksum: ChecksumState::Partial, ..InputFrame::new(before.to_frame()) };
        let Some(result) = node.run(Hook::Ingress, &input) else { return };
        result.is_redirected_as(&after);
        node.wait(0);
    }
}

fn datagram_without_a_checksum_gets_none_on_the_direct_path(node: &mut TestNode<'_>) {
    let (before, after) = learned(node, Protocol::Udp);
    let without = |packet: TestPacket| TestPacket { checksum: Some([0; 2]), ..packet };
    node.ingress(&without(before)).is_redirected_as(&without(after));
}

fn unusual_packets_of_a_learned_flow_are_translated_and_go_through_the_stack(node: &mut TestNode<'_>) {
    let (before, after) = learned(node, Protocol::Udp);
    let to = after.to;
    let translated = |packet: &TestPacket| packet.clone().to(to);
    for packet in [
        TestPacket { hops: 1, ..before.clone() },
        TestPacket { traffic_class: 0xb8, ..before.clone() },
        TestPacket { vlan_tags: [0x8100].to_vec(), ..before.clone() },
        before.clone().fragment(7, 0..16),
    ] {
        node.ingress(&packet).becomes(&translated(&packet));
    }
    let longer = InputFrame { segments: Some((1_473, 2)), ..InputFrame::new(before.to_frame()) };
    if let Some(result) = node.run(Hook::Ingress, &longer) {
        result.becomes(&translated(&before));
    }
    node.ingress(&before).is_redirected_as(&after);
}

/// Acknowledgements without data are not ECN-capable; segments with data are.
fn packets_with_any_code_of_ecn_take_the_direct_path(node: &mut TestNode<'_>) {
    let (before, after) = learned(node, Protocol::Tcp);
    for traffic_class in 0..4 {
        let with = |packet: &TestPacket| TestPacket { traffic_class, ..packet.clone() };
        node.ingress(&with(&before)).is_redirected_as(&with(&after));
    }
}

fn end_of_a_connection_ends_its_direct_path(node: &mut TestNode<'_>) {
    let (before, after) = learned(node, Protocol::Tcp);
    let begin = before.clone().flags(TcpFlags::SYN_ALONE);
    node.ingress(&begin).becomes(&begin.clone().to(after.to));
    node.ingress(&before).becomes(&before.to(after.to));
}

const XDP_LINK: XdpLinkValue = XdpLinkValue { address: [0; 6], takes_frames: 0, redirects_to_itself: 0 };

/// Returns the same with a link that has an XDP program, on which packets leave too.
pub(super) fn learned_by_xdp(node: &mut TestNode<'_>, protocol: Protocol) -> (TestPacket, TestPacket) {
    let learned = learned(node, protocol);
    leave_by_xdp(node);
    learned
}

/// Makes packets of learned flows leave before the stack.
fn leave_by_xdp(node: &mut TestNode<'_>) {
    node.config.xdp_links.insert(LO, XDP_LINK);
    node.change_direct_flows(|flow| flow.path.out_link = LO);
    node.write_maps();
}

fn packets_of_a_learned_flow_leave_before_the_stack(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned_by_xdp(node, protocol);
        node.xdp(&before).is_transmitted_as(&after);
        node.ingress(&before).is_redirected_as(&after);
        let bytes_to_endpoints = 2 * before.to_ip_packet().len() as u64;
        let counts = ServiceCounts { bytes_to_endpoints, ..ServiceCounts::NONE };
        assert_eq!(node.service_counts(SERVICE), counts);
        node.wait(0);
    }
}

/// A packet that comes after a change of routes goes through the stack.
fn flow_may_move_between_xdp_and_traffic_control_and_the_stack_at_every_packet(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        node.wait(0);
        let (before, after) = learned_of(node, &fixture);
        leave_by_xdp(node);
        let translated = before.clone().to(after.to);
        let set_epoch = |node: &mut TestNode<'_>, epoch: u32| {
            node.config.node.direct_epoch = epoch.into();
            node.write_maps();
        };
        for _ in 0..4 {
            node.xdp(&before).is_transmitted_as(&after);
            set_epoch(node, EPOCH + 2);
            node.xdp(&before).is_left_alone();
            node.ingress(&before).becomes(&translated);
            set_epoch(node, EPOCH);
            node.ingress(&before).is_redirected_as(&after);
        }
        let state = node.state();
        let counted: u64 = state.services.values().map(|counts| counts.bytes_to_endpoints).sum();
        assert_eq!(counted, 12 * before.to_ip_packet().len() as u64, "each packet is counted once");
        node.wait(0);
    }
}

/// The scenario writes the entry, and no hint.
fn with_whole_flows_the_entry_of_a_connection_needs_a_hint(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned_by_xdp(node, protocol);
        node.config.node.direct_scope = DirectScope::Whole as u16;
        node.write_maps();
        if protocol == Protocol::Tcp && before.from.is_ipv4() {
            node.xdp(&before).is_left_alone();
            node.ingress(&before).is_refused();
        } else {
            node.xdp(&before).is_transmitted_as(&after);
            node.ingress(&before).is_redirected_as(&after);
        }
        node.wait(0);
    }
}

/// An entry that was written at the time zero is older than any change.
fn flow_whose_time_is_over_takes_the_direct_path_while_nothing_changes(node: &mut TestNode<'_>) {
    let (before, after) = learned_by_xdp(node, Protocol::Udp);
    node.change_direct_flows(|flow| flow.path.until_ns = 1);
    let watch = DirectWatch { until_ns: u64::MAX, ..DirectWatch::NONE };
    for (watch, lease_ns, is_direct) in [
        (watch, u64::MAX, true),
        (DirectWatch { since_ns: 1, ..watch }, u64::MAX, false),
        (DirectWatch { until_ns: 1, ..watch }, u64::MAX, false),
        (watch, 1, false),
    ] {
        (node.config.direct_watch, node.config.node.direct_lease_ns) = (watch, lease_ns);
        node.write_maps();
        if is_direct {
            node.xdp(&before).is_transmitted_as(&after);
            node.ingress(&before).is_redirected_as(&after);
        } else {
            node.xdp(&before).is_left_alone();
            node.ingress(&before).becomes(&before.clone().to(after.to));
        }
    }
}

fn datagram_without_a_checksum_gets_none_before_the_stack(node: &mut TestNode<'_>) {
    let (before, after) = learned_by_xdp(node, Protocol::Udp);
    let without = |packet: TestPacket| TestPacket { checksum: Some([0; 2]), ..packet };
    node.xdp(&without(before)).is_transmitted_as(&without(after));
}

fn packets_for_hardware_that_completes_their_checksum_go_to_the_stack(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned_by_xdp(node, protocol);
        node.xdp(&before.clone().with_sum_of_pseudo_header()).is_left_alone();
        node.xdp(&before).is_transmitted_as(&after);
        node.wait(0);
    }
}

/// Returns a packet with IPv4 options, or with an IPv6 extension header.
fn with_more_headers(packet: TestPacket) -> TestPacket {
    let hop_by_hop = Extension { kind: 0, length: 8 };
    TestPacket { options: [1, 1, 1, 0].to_vec(), extensions: [hop_by_hop].to_vec(), ..packet }
}

fn what_is_not_as_the_learned_packets_goes_to_the_stack_unchanged(node: &mut TestNode<'_>) {
    let (before, after) = learned_by_xdp(node, Protocol::Tcp);
    for packet in [
        TestPacket { hops: 1, ..before.clone() },
        TestPacket { traffic_class: 0xb8, ..before.clone() },
        TestPacket { vlan_tags: [0x8100].to_vec(), ..before.clone() },
        with_more_headers(before.clone()),
        TestPacket { to_mac: TO, ..before.clone() },
        before.clone().fragment(7, 0..16),
        before.clone().fragment(7, 16..24),
        before.clone().flags(TcpFlags::SYN_ALONE),
        before.clone().to(after.to),
    ] {
        node.xdp(&packet).is_left_alone();
    }
    node.xdp(&before).is_transmitted_as(&after);
    node.config.xdp_links.clear();
    node.write_maps();
    node.xdp(&before).is_left_alone();
    node.ingress(&before).is_redirected_as(&after);
}

fn link_that_cannot_send_frames_back_gets_them_by_redirection(node: &mut TestNode<'_>) {
    let (before, after) = learned_by_xdp(node, Protocol::Udp);
    node.config.xdp_links.insert(LO, XdpLinkValue { redirects_to_itself: 1, ..XDP_LINK });
    node.write_maps();
    node.xdp(&before).is_redirected_as(&after);
}

fn padding_of_a_short_frame_does_not_make_its_packet_longer(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (before, after) = learned_by_xdp(node, protocol);
        let length = u16::try_from(before.to_ip_packet().len()).expect("short");
        node.change_direct_flows(|flow| flow.path.longest = length);
        let padded = |packet: &TestPacket| [packet.to_frame(), [0; 9].to_vec()].concat();
        for (hook, outcome) in [(Hook::Xdp, Outcome::Transmit), (Hook::Ingress, Outcome::Redirect)] {
            let result =
                node.run(hook, &InputFrame::new(padded(&before))).expect("a plain frame always runs");
            assert_eq!(result.outcome, outcome, "{result:?}");
            assert_eq!(result.bytes, padded(&after));
        }
        node.wait(0);
    }
}

fn flow_that_leaves_on_a_link_without_xdp_goes_to_the_stack(node: &mut TestNode<'_>) {
    let (before, after) = learned_by_xdp(node, Protocol::Udp);
    node.change_direct_flows(|flow| flow.path.out_link = 4_711);
    node.xdp(&before).is_left_alone();
    let takes_none = XdpLinkValue { address: TO, ..XDP_LINK };
    node.config.xdp_links.insert(4_711, takes_none);
    node.write_maps();
    node.xdp(&before).is_left_alone();
    node.config.xdp_links.insert(4_711, XdpLinkValue { takes_frames: 1, ..takes_none });
    node.write_maps();
    node.xdp(&before).is_redirected_as(&after);
}

scenarios! {
    packets_of_a_learned_flow_leave_before_the_stack,
    flow_may_move_between_xdp_and_traffic_control_and_the_stack_at_every_packet,
    with_whole_flows_the_entry_of_a_connection_needs_a_hint,
    datagram_without_a_checksum_gets_none_before_the_stack,
    packets_for_hardware_that_completes_their_checksum_go_to_the_stack,
    what_is_not_as_the_learned_packets_goes_to_the_stack_unchanged,
    link_that_cannot_send_frames_back_gets_them_by_redirection,
    padding_of_a_short_frame_does_not_make_its_packet_longer,
    flow_that_leaves_on_a_link_without_xdp_goes_to_the_stack,
    packets_of_a_learned_flow_leave_on_another_link,
    sum_of_the_hardware_stays_correct_on_the_direct_path,
    checksum_that_hardware_completes_stays_correct_on_the_direct_path,
    datagram_without_a_checksum_gets_none_on_the_direct_path,
    unusual_packets_of_a_learned_flow_are_translated_and_go_through_the_stack,
    packets_with_any_code_of_ecn_take_the_direct_path,
    end_of_a_connection_ends_its_direct_path,
    flow_whose_time_is_over_takes_the_direct_path_while_nothing_changes,
}
