//! Counts of each Service, and of the errors of programs.

use super::{Fixture, PROTOCOLS, addr};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{ProgramError, ServiceCounts, flags},
    packet::TcpFlags,
    testing::{Hook, InputFrame, TestNode, TestPacket},
};

/// Returns the number of bytes of the IP packets.
fn ip_bytes(frames: &[&TestPacket]) -> u64 {
    frames.iter().map(|packet| packet.to_frame().len() as u64 - 14).sum()
}

fn connection_counts_once_and_packets_count_by_bytes(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        let actual = node.service_counts(fixture.service.value.service);
        let expected = ServiceCounts {
            connections: 1,
            bytes_to_endpoints: ip_bytes(&[&fixture.first, &fixture.next()]),
            bytes_to_clients: ip_bytes(&[&fixture.reply()]),
            ..ServiceCounts::NONE
        };
        assert_eq!(actual, expected, "{protocol:?}");
        node.remove_service(&fixture.service);
    }
}

fn reused_client_port_counts_as_a_new_connection(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::FIN_ACK));
    node.egress(&fixture.reply().flags(TcpFlags::FIN_ACK));
    node.ingress(&fixture.first);
    assert_eq!(node.service_counts(fixture.service.value.service).connections, 2);
}

fn each_service_has_its_own_counts(node: &mut TestNode<'_>) {
    let one = Fixture::new(node, Tcp);
    let other = Fixture::at(node, Tcp, addr(node.ip.external_ip, 80), addr(node.ip.external_ip, 80));
    for port in 40_000..40_003 {
        node.ingress(&one.first.clone().from(addr(node.ip.client, port)));
    }
    node.ingress(&other.first);
    let connections =
        [one, other].map(|fixture| node.service_counts(fixture.service.value.service).connections);
    assert_eq!(connections, [3, 1]);
}

fn each_refused_or_dropped_attempt_is_counted(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let service = fixture.service.value.service;
        node.put_service(&fixture.service.clone().with_endpoints(&[]));
        node.ingress(&fixture.first).is_refused();
        node.ingress(&fixture.first).is_refused();
        assert_eq!(node.service_counts(service), ServiceCounts { refusals: 2, ..ServiceCounts::NONE });
        node.put_service(&fixture.service.clone().with_outside(&[]).with_flags(flags::DROP_WHEN_EMPTY));
        node.ingress(&fixture.first).is_dropped();
        assert_eq!(
            node.service_counts(service),
            ServiceCounts { refusals: 2, drops: 1, ..ServiceCounts::NONE }
        );
        node.remove_service(&fixture.service);
    }
}

fn segment_of_an_unknown_connection_counts_as_refused(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    node.ingress(&fixture.first.clone().flags(TcpFlags::ACK_ALONE)).is_refused();
    assert_eq!(node.service_counts(fixture.service.value.service).refusals, 1);
}

fn missing_endpoint_counts_as_a_program_error(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.config.endpoints.clear();
    node.write_maps();
    node.ingress(&fixture.first).is_dropped();
    assert_eq!(node.errors(ProgramError::EndpointMissing), 1);
    assert_eq!(node.service_counts(fixture.service.value.service).drops, 1);
}

fn truncated_segment_passes_and_counts_as_an_error(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let whole = fixture.first.to_frame();
    let input = InputFrame::new(whole[..whole.len() - 10].to_vec());
    node.run(Hook::Ingress, &input).expect("a plain frame always runs").is_left_alone();
    assert_eq!(node.errors(ProgramError::Malformed), 1);
}

super::scenarios! {
    connection_counts_once_and_packets_count_by_bytes,
    reused_client_port_counts_as_a_new_connection,
    each_service_has_its_own_counts,
    each_refused_or_dropped_attempt_is_counted,
    segment_of_an_unknown_connection_counts_as_refused,
    missing_endpoint_counts_as_a_program_error,
    truncated_segment_passes_and_counts_as_an_error,
}
