//! Packets that get no endpoint: they are refused or dropped, counted, and marked for netfilter.

use super::{Fixture, PROTOCOLS, addr, any};
use crate::{
    Protocol::Tcp,
    layout::{Counter, NodeValue, flags},
    packet::TcpFlags,
    testing::{Hook, InputFrame, TestNode, TestPacket},
};

fn service_without_endpoints_refuses_clients(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        node.put_service(&fixture.service.clone().with_endpoints(&[]));
        node.ingress(&fixture.first).is_refused();
    }
    assert_eq!(node.counter(Counter::Refused), 2);
    assert_eq!(node.flow_count(), 0);
}

fn service_without_local_endpoints_drops_packets(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        node.put_service(&fixture.service.clone().with_outside(&[]).with_flags(flags::DROP_WHEN_EMPTY));
        node.ingress(&fixture.first).is_dropped();
    }
    assert_eq!(node.counter(Counter::NoLocalEndpoint), 2);
    assert_eq!(node.flow_count(), 0);
}

fn packet_is_dropped_if_the_chosen_slot_is_empty(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        node.config.endpoints.clear();
        node.write_maps();
        node.ingress(&fixture.first).is_dropped();
    }
    assert_eq!(node.counter(Counter::FlowNotRecorded), 2);
    assert_eq!(node.flow_count(), 0);
}

fn closed_flow_is_removed_if_the_client_is_refused(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE));
    node.put_service(&fixture.service.clone().with_endpoints(&[]));
    node.ingress(&fixture.first).is_refused();
    assert_eq!(node.flow_count(), 0);
}

fn unknown_connection_to_a_cluster_ip_is_refused(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    for flags in [TcpFlags::ACK_ALONE, TcpFlags::FIN_ACK, TcpFlags::SYN_ACK] {
        node.ingress(&fixture.first.clone().flags(flags)).is_refused();
    }
    assert_eq!(node.counter(Counter::UnknownConnection), 3);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE)).is_left_alone();
    assert_eq!(node.flow_count(), 0);
}

fn unknown_connection_to_a_node_port_goes_to_the_node(node: &mut TestNode<'_>) {
    let (address, port) = (node.ip.node, 30_080);
    let fixture = Fixture::at(node, Tcp, addr(address, port), addr(any(address), port));
    node.ingress(&fixture.next()).is_left_alone();
    assert_eq!(node.counter(Counter::UnknownConnection), 0);
}

fn other_bits_of_the_mark_are_kept(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE));
    let input = InputFrame { mark: 0xa000_0001, ..InputFrame::new(fixture.first.to_frame()) };
    let result = node.run(Hook::Ingress, &input).expect("this frame always runs");
    result.becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(NodeValue::MASQUERADE_MARK);
}

fn egress_clears_the_mark_bits_for_netfilter(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let packet = TestPacket::udp(addr(ip.client, 1), addr(ip.router, 2));
    let both = NodeValue::MASQUERADE_MARK | NodeValue::REJECT_MARK;
    for (mark, left) in [(both, 0), (NodeValue::MASQUERADE_MARK | 1, 1), (NodeValue::REJECT_MARK, 0), (6, 6)]
    {
        let result = node.run(Hook::Egress, &InputFrame { mark, ..InputFrame::new(packet.to_frame()) });
        let result = result.expect("this frame always runs");
        assert_eq!((result.mark, result.becomes(&packet).input.mark), (left, mark));
    }
}

super::scenarios! {
    service_without_endpoints_refuses_clients,
    service_without_local_endpoints_drops_packets,
    packet_is_dropped_if_the_chosen_slot_is_empty,
    closed_flow_is_removed_if_the_client_is_refused,
    unknown_connection_to_a_cluster_ip_is_refused,
    unknown_connection_to_a_node_port_goes_to_the_node,
    other_bits_of_the_mark_are_kept,
    egress_clears_the_mark_bits_for_netfilter,
}
