//! Clients: masquerading, inside and outside endpoints, and source ranges.

use super::{Fixture, PROTOCOLS, addr};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, LocalDetection, flags},
    packet::TcpFlags,
    testing::{TestNode, TestPacket},
};

/// Returns the first packet from another client.
fn by(fixture: &Fixture, client: std::net::SocketAddr) -> TestPacket {
    fixture.first.clone().from(client)
}

fn source_is_masqueraded_only_if_the_service_requires_it(node: &mut TestNode<'_>) {
    let masquerade = node.config.node.masquerade_mark;
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(0);
        node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_OUTSIDE));
        let other = by(&fixture, addr(node.ip.client, 40_001));
        node.ingress(&other).becomes(&other.clone().to(fixture.endpoint)).is_marked(masquerade);
        let next = other.clone().flags(TcpFlags::ACK_ALONE);
        node.ingress(&next).becomes(&next.clone().to(fixture.endpoint)).is_marked(masquerade);
        let reply = other.clone().to(fixture.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip)).is_marked(0);
        // Without local detection no client is inside.
        node.put_service(&fixture.service.clone().with_flags(flags::MASQUERADE_INSIDE));
        let third = by(&fixture, addr(node.ip.other_pod, 40_002));
        node.ingress(&third).becomes(&third.clone().to(fixture.endpoint)).is_marked(0);
    }
}

/// Asserts that the program takes a client for inside or outside.
fn check_client(node: &mut TestNode<'_>, local: bool) {
    let masquerade = node.config.node.masquerade_mark;
    let client = if local { node.ip.other_pod } else { node.ip.client };
    let outside = addr(node.ip.pod, 9090);
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let expected = if local { fixture.endpoint } else { outside };
        let mut port = 50_000;
        for (flag, marks) in [
            (0, 0),
            (flags::MASQUERADE_INSIDE, if local { masquerade } else { 0 }),
            (flags::MASQUERADE_OUTSIDE, if local { 0 } else { masquerade }),
        ] {
            node.put_service(&fixture.service.clone().with_outside(&[outside]).with_flags(flag));
            port += 1;
            let packet = by(&fixture, addr(client, port));
            node.ingress(&packet).becomes(&packet.clone().to(expected)).is_marked(marks);
        }
    }
}

fn client_is_inside_by_its_source_address(node: &mut TestNode<'_>) {
    node.config.node.local_detection = LocalDetection::Source as u32;
    let (pods, length) = node.ip.pods;
    node.config.local_sources.insert((pods.into(), length));
    // A local link does not count.
    node.config.local_links.insert(1);
    check_client(node, true);
    check_client(node, false);
}

fn client_is_inside_by_its_link(node: &mut TestNode<'_>) {
    node.config.node.local_detection = LocalDetection::Link as u32;
    // A local source does not count.
    node.config.local_sources.insert((node.ip.client.into(), 128));
    node.config.local_links.insert(2);
    check_client(node, false);
    node.config.local_links.insert(1);
    check_client(node, true);
}

fn all_clients_are_outside_without_local_detection(node: &mut TestNode<'_>) {
    node.config.local_sources.insert((node.ip.client.into(), 128));
    node.config.local_links.insert(1);
    check_client(node, false);
}

fn source_ranges_allow_only_their_clients(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let number = fixture.service.value.service;
        node.config.source_ranges.insert((number, node.ip.client.into(), 128));
        node.config.source_ranges.insert((number + 100, node.ip.other_client.into(), 128));
        node.put_service(&fixture.service.clone().with_flags(flags::SOURCE_RANGES));
        fixture.establish(node);
        let denied = by(&fixture, addr(node.ip.other_client, 40_000));
        node.ingress(&denied).is_dropped();
    }
    assert_eq!(node.counter(Counter::SourceNotAllowed), 2);
    assert_eq!(node.counter(Counter::FlowsBegun), 2);
}

fn source_ranges_match_by_prefix(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    let (pods, length) = node.ip.pods;
    node.config.source_ranges.insert((fixture.service.value.service, pods.into(), length));
    node.put_service(&fixture.service.clone().with_flags(flags::SOURCE_RANGES));
    let allowed = by(&fixture, addr(node.ip.other_pod, 40_000));
    node.ingress(&allowed).becomes(&allowed.clone().to(fixture.endpoint));
    node.ingress(&fixture.first).is_dropped();
}

fn allowed_client_is_refused_without_endpoints(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.config.source_ranges.insert((fixture.service.value.service, node.ip.client.into(), 128));
    node.put_service(&fixture.service.clone().with_endpoints(&[]).with_flags(flags::SOURCE_RANGES));
    node.ingress(&fixture.first).is_refused();
    node.ingress(&by(&fixture, addr(node.ip.other_client, 1))).is_dropped();
}

super::scenarios! {
    source_is_masqueraded_only_if_the_service_requires_it,
    client_is_inside_by_its_source_address,
    client_is_inside_by_its_link,
    all_clients_are_outside_without_local_detection,
    source_ranges_allow_only_their_clients,
    source_ranges_match_by_prefix,
    allowed_client_is_refused_without_endpoints,
}
