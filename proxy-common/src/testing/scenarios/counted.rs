//! What is counted of each Service, and of what went wrong in a program.

use super::{PROTOS, Served, addr};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{ProgramError, ServiceCounts, flags},
    packet::TcpFlags,
    testing::{Given, Hook, Scene, Sent},
};

/// The bytes of a frame that are IP's.
fn ip_bytes(frames: &[&Sent]) -> u64 {
    frames.iter().map(|sent| sent.bytes().len() as u64 - 14).sum()
}

fn a_connection_is_counted_once_and_its_packets_by_their_bytes(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        served.begin(scene);
        let counted = scene.counts_of(served.service.value.service);
        let wanted = ServiceCounts {
            connections: 1,
            bytes_to_endpoints: ip_bytes(&[&served.first, &served.next()]),
            bytes_to_clients: ip_bytes(&[&served.answer()]),
            ..ServiceCounts::NONE
        };
        assert_eq!(counted, wanted, "{proto:?}");
        scene.remove(&served.service);
    }
}

fn a_connection_from_a_port_that_is_used_anew_is_another_one(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::FIN_ACK));
    scene.leaves(&served.answer().flags(TcpFlags::FIN_ACK));
    scene.enters(&served.first);
    assert_eq!(scene.counts_of(served.service.value.service).connections, 2);
}

fn each_service_is_counted_by_itself(scene: &mut Scene<'_>) {
    let one = Served::new(scene, Tcp);
    let other = Served::at(scene, Tcp, addr(scene.at.external_ip, 80), addr(scene.at.external_ip, 80));
    for port in 40_000..40_003 {
        scene.enters(&one.first.clone().from(addr(scene.at.client, port)));
    }
    scene.enters(&other.first);
    let connections = [one, other].map(|served| scene.counts_of(served.service.value.service).connections);
    assert_eq!(connections, [3, 1]);
}

fn tries_that_are_refused_or_dropped_are_counted_each(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let service = served.service.value.service;
        scene.put(&served.service.clone().moved_to(&[]));
        scene.enters(&served.first).is_refused();
        scene.enters(&served.first).is_refused();
        assert_eq!(scene.counts_of(service), ServiceCounts { refusals: 2, ..ServiceCounts::NONE });
        scene.put(&served.service.clone().with_outside(&[]).flagged(flags::DROP_WHEN_EMPTY));
        scene.enters(&served.first).is_dropped();
        assert_eq!(scene.counts_of(service), ServiceCounts { refusals: 2, drops: 1, ..ServiceCounts::NONE });
        scene.remove(&served.service);
    }
}

fn a_segment_of_an_unknown_connection_is_counted_as_refused(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    scene.enters(&served.first.clone().flags(TcpFlags::ACK_ALONE)).is_refused();
    assert_eq!(scene.counts_of(served.service.value.service).refusals, 1);
}

fn an_endpoint_that_is_missing_is_an_error_of_the_program(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.world.endpoints.clear();
    scene.configure();
    scene.enters(&served.first).is_dropped();
    assert_eq!(scene.errors(ProgramError::EndpointMissing), 1);
    assert_eq!(scene.counts_of(served.service.value.service).drops, 1);
}

fn a_segment_to_a_service_that_is_cut_short_is_left_alone_and_counted(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let whole = served.first.bytes();
    let given = Given::new(whole[..whole.len() - 10].to_vec());
    scene.passes(Hook::Ingress, &given).expect("anything can be given plain").is_left_alone();
    assert_eq!(scene.errors(ProgramError::Malformed), 1);
}

super::scenarios! {
    a_connection_is_counted_once_and_its_packets_by_their_bytes,
    a_connection_from_a_port_that_is_used_anew_is_another_one,
    each_service_is_counted_by_itself,
    tries_that_are_refused_or_dropped_are_counted_each,
    a_segment_of_an_unknown_connection_is_counted_as_refused,
    an_endpoint_that_is_missing_is_an_error_of_the_program,
    a_segment_to_a_service_that_is_cut_short_is_left_alone_and_counted,
}
