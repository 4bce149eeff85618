//! Floods of packets with forged sources, far more than the maps have entries.

use std::net::SocketAddr;

use proxy_common::{
    Protocol,
    layout::flags,
    packet::TcpFlags,
    testing::{Addresses, FrameRunner as _, TestNode, TestPacket},
};

use crate::kernel::{FLOWS, Kernel};

/// The tests.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("floods::answered_syns_evict_no_connection", answered_syns_evict_no_connection),
    ("floods::datagrams_evict_no_connection", datagrams_evict_no_connection),
];

const AT: Addresses = Addresses::BOTH[0];

fn answered_syns_evict_no_connection() {
    idle_connections_survive(Protocol::Tcp);
}

fn datagrams_evict_no_connection() {
    idle_connections_survive(Protocol::Udp);
}

/// Floods a Service, and checks that each connection that began before still has its endpoint.
fn idle_connections_survive(flood: Protocol) {
    let mut kernel = Kernel::lock();
    let mut node = TestNode::new(&mut *kernel, AT);
    let vip = SocketAddr::new(AT.cluster_ip, 80);
    let endpoint = SocketAddr::new(AT.pod, 8080);
    let service = node.add_service(Protocol::Tcp, &[vip], &[endpoint]);
    node.add_service(Protocol::Udp, &[vip], &[endpoint]);
    let clients: Vec<_> = (40_000..40_100).map(|port| SocketAddr::new(AT.client, port)).collect();
    let first = |client| TestPacket::tcp(TcpFlags::SYN_ALONE, client, vip);
    let next = |client| first(client).flags(TcpFlags::ACK_ALONE);
    for client in &clients {
        node.ingress(&first(*client));
        let answer = next(*client).to(endpoint).reversed();
        node.egress(&answer.clone().flags(TcpFlags::SYN_ACK));
        node.ingress(&next(*client)).becomes(&next(*client).to(endpoint));
    }
    for source in 0..FLOWS * 4 {
        let [a, b, c, _] = source.to_le_bytes();
        let forged = SocketAddr::from(([203, a, b, c], 1_024));
        let packet = match flood {
            Protocol::Udp => TestPacket::udp(forged, vip),
            _ => first(forged),
        };
        node.ingress(&packet);
        node.egress(&packet.to(endpoint).reversed().flags(TcpFlags::SYN_ACK));
    }
    node.put_service(&service.with_endpoints(&[]).with_flags(flags::DROP_WHEN_EMPTY));
    for client in clients {
        node.ingress(&next(client)).becomes(&next(client).to(endpoint));
        let answer = next(client).to(endpoint).reversed();
        node.egress(&answer).becomes(&answer.clone().from(vip));
    }
    let state = kernel.state();
    assert_eq!(state.flows.len(), 200, "two entries for each connection");
    assert!(state.unassured_flows.len() <= FLOWS as usize, "the flood stays within its map");
}
