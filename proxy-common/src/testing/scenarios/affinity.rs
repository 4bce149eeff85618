//! Session affinity by client address.

use std::vec::Vec;

use super::{Fixture, PROTOCOLS, addr};
use crate::{
    Protocol::Tcp,
    layout::{Counter, Flow},
    packet::TcpFlags,
    testing::{TestNode, TestPacket},
};

/// Adds a service port with affinity. It has so many endpoints that a random choice does not hit
/// the same one again.
fn add_sticky(node: &mut TestNode<'_>, protocol: crate::Protocol) -> Fixture {
    let mut fixture = Fixture::new(node, protocol);
    let endpoints: Vec<_> = (1..=200).map(|port| addr(node.ip.pod, 1000 + port)).collect();
    fixture.service = fixture.service.with_endpoints(&endpoints);
    fixture.service.value.affinity_seconds = 60;
    node.put_service(&fixture.service);
    fixture
}

/// Sends a packet of the client, and returns its flow.
fn flow_of(node: &mut TestNode<'_>, packet: &TestPacket) -> Flow {
    node.ingress(packet);
    node.flow(crate::layout::Direction::Original, packet).expect("a flow")
}

fn client_with_affinity_returns_to_its_endpoint(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_sticky(node, protocol);
        let one = flow_of(node, &fixture.first);
        for port in 41_000..41_005 {
            node.wait(50);
            let again = fixture.first.clone().from(addr(node.ip.client, port));
            assert_eq!(
                flow_of(node, &again).destination,
                one.destination,
                "each connection restarts the timeout"
            );
        }
    }
}

fn affinity_ends_after_the_timeout_or_without_the_endpoint(node: &mut TestNode<'_>) {
    let mut fixture = add_sticky(node, Tcp);
    node.ingress(&fixture.first);
    let others: Vec<_> = (1..=200).map(|port| addr(node.ip.other_pod, 1000 + port)).collect();
    fixture.service = fixture.service.with_endpoints(&others);
    node.put_service(&fixture.service);
    let again = fixture.first.clone().from(addr(node.ip.client, 41_000));
    let moved_flow = flow_of(node, &again);
    assert_eq!(moved_flow.destination.addr, node.ip.other_pod.into(), "the first endpoint is gone");
    let once_more = fixture.first.clone().from(addr(node.ip.client, 41_001));
    assert_eq!(flow_of(node, &once_more).destination, moved_flow.destination);
    // 20 random choices among 200 endpoints do not all hit the same one.
    let mut moved = 0;
    for port in 42_000..42_020 {
        node.wait(61);
        let again = fixture.first.clone().from(addr(node.ip.client, port));
        moved += u32::from(flow_of(node, &again).destination != moved_flow.destination);
    }
    assert!(moved > 10, "{moved} of 20");
}

fn existing_connection_ignores_affinity(node: &mut TestNode<'_>) {
    let fixture = add_sticky(node, Tcp);
    let one = flow_of(node, &fixture.first);
    node.wait(61);
    let next = fixture.first.clone().flags(TcpFlags::ACK_ALONE);
    assert_eq!(flow_of(node, &next).destination, one.destination);
    assert_eq!(node.counter(Counter::FlowsBegun), 0, "since the wait");
}

super::scenarios! {
    client_with_affinity_returns_to_its_endpoint,
    affinity_ends_after_the_timeout_or_without_the_endpoint,
    existing_connection_ignores_affinity,
}
