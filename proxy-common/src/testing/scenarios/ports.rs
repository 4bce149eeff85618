//! Addresses and ports: node ports, Services with several VIPs, and colliding client ports.

use super::{Fixture, PROTOCOLS, addr, any, first};
use crate::{
    Protocol,
    layout::{Counter, Direction, SocketScope, flow_state},
    packet::TcpFlags,
    testing::{FrameResult, Payload, TestNode, TestPacket},
};

fn node_port_works_on_addresses_of_the_node(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (address, port) = (node.ip.node, 30_080);
        let fixture = Fixture::at(node, protocol, addr(address, port), addr(any(address), port));
        fixture.establish(node);
    }
}

fn node_port_does_not_work_on_other_addresses(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (ip, port) = (node.ip, 30_080);
        let fixture = Fixture::at(node, protocol, addr(ip.node, port), addr(any(ip.node), port));
        let loopback: std::net::IpAddr =
            if ip.node.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() };
        node.config.node_addresses.insert(loopback.into());
        node.write_maps();
        for other in [ip.cluster_ip, ip.other_client, any(ip.node), loopback] {
            node.ingress(&fixture.first.clone().to(addr(other, port))).is_left_alone();
        }
    }
}

fn each_protocol_has_its_own_ports(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let other = PROTOCOLS.into_iter().find(|other| *other != protocol).expect("there are two");
        node.ingress(&first(other, fixture.first.from, fixture.vip)).is_left_alone();
        node.remove_service(&fixture.service);
    }
    let vip = addr(node.ip.cluster_ip, 80);
    node.add_service(Protocol::Sctp, &[vip], &[addr(node.ip.pod, 80)]);
    let bytes = [0x9c, 0x40, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    let sctp = TestPacket::new(addr(node.ip.client, 0), vip, Payload::Other { protocol: 132, bytes });
    node.ingress(&sctp).is_left_alone();
}

fn two_clients_with_the_same_port_have_separate_flows(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        fixture.establish(node);
        let other = fixture.first.clone().from(addr(node.ip.other_client, fixture.first.from.port()));
        node.ingress(&other).becomes(&other.clone().to(fixture.endpoint));
        let reply = other.to(fixture.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
        fixture.establish(node);
    }
}

/// Makes the client a pod whose sockets are left alone.
fn exempt_client(node: &mut TestNode<'_>) {
    node.config.exempt_sources.insert(node.ip.client.into());
    node.config.node.socket_scope = SocketScope::NotExempt as u16;
    node.write_maps();
}

fn pod_that_is_exempt_may_connect_directly_from_the_port_of_a_flow(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        exempt_client(node);
        let flow_source = addr(node.ip.client, fixture.first.from.port() - 31_744);
        node.ingress(&fixture.first).becomes(&fixture.first.clone().from(flow_source).to(fixture.endpoint));
        let direct = fixture.first.clone().to(fixture.endpoint);
        node.ingress(&direct).is_left_alone();
        node.egress(&direct.reversed().flags(TcpFlags::SYN_ACK)).is_left_alone();
        let reply = fixture.first.clone().from(flow_source).to(fixture.endpoint).reversed();
        let reply = reply.flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip).to(fixture.first.from));
        node.remove_service(&fixture.service);
    }
}

fn port_that_an_exempt_pod_chose_itself_stays(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        exempt_client(node);
        let packet = fixture.first.clone().from(addr(node.ip.client, 5_060));
        node.ingress(&packet).becomes(&packet.clone().to(fixture.endpoint));
        node.remove_service(&fixture.service);
    }
}

/// Returns the source port after the hook.
fn source_port(result: &FrameResult) -> u16 {
    let header = if result.bytes[12..14] == [0x86, 0xdd] { 40 } else { 20 };
    u16::from_be_bytes([result.bytes[14 + header], result.bytes[15 + header]])
}

/// A client connects to one endpoint through two VIPs from the same port. Returns the packet to the
/// second VIP, and the source that the endpoint sees.
fn connect_through_two_vips(
    node: &mut TestNode<'_>,
    protocol: Protocol,
) -> (Fixture, TestPacket, std::net::SocketAddr) {
    let fixture = Fixture::new(node, protocol);
    fixture.establish(node);
    let other = fixture.first.clone().to(addr(node.ip.external_ip, 443));
    node.add_service(protocol, &[other.to], &[fixture.endpoint]);
    let output = node.ingress(&other);
    let source = addr(node.ip.client, source_port(&output));
    output.becomes(&other.clone().from(source).to(fixture.endpoint));
    (fixture, other, source)
}

fn flows_to_one_endpoint_through_two_vips_are_separate(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let (fixture, other, source) = connect_through_two_vips(node, protocol);
        assert_ne!(source.port(), other.from.port(), "the endpoint needs different sources");
        assert!(source.port() >= 1024);
        let reply =
            TestPacket { from: fixture.endpoint, to: source, ..other.clone() }.flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(other.to).to(other.from));
        let next = other.flags(TcpFlags::ACK_ALONE);
        node.ingress(&next).becomes(&next.clone().from(source).to(fixture.endpoint));
        node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
        node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
        // The next protocol starts without these Services.
        for service in node.config.services.clone().into_values() {
            node.config.services.retain(|_, value| value.service != service.service);
        }
    }
}

fn expired_flow_releases_its_client_port(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Protocol::Udp);
    fixture.establish(node);
    node.wait(121);
    let other = fixture.first.clone().to(addr(node.ip.external_ip, 443));
    node.add_service(Protocol::Udp, &[other.to], &[fixture.endpoint]);
    node.ingress(&other).becomes(&other.clone().to(fixture.endpoint));
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(other.to));
    assert!(node.flow(Direction::Original, &fixture.first).is_none(), "its entry for replies is replaced");
}

fn closed_connection_releases_its_client_port(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Protocol::Tcp);
    fixture.establish(node);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE));
    let other = fixture.first.clone().to(addr(node.ip.external_ip, 443));
    node.add_service(Protocol::Tcp, &[other.to], &[fixture.endpoint]);
    node.ingress(&other).becomes(&other.clone().to(fixture.endpoint));
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(other.to));
    assert_eq!(node.flow_count(), 2);
}

/// Conntrack would give a new flow another source port, without the programs.
/// Makes all connections closed ones of conntrack, as userspace writes them at a takeover.
pub(super) fn hand_over_closed(node: &mut TestNode<'_>) {
    const OF_CONNTRACK: u32 = flow_state::PASS | flow_state::REPLIED | flow_state::ASSURED;
    const CLOSED: u32 = flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED;
    let mut state = node.state();
    state.flows.retain(|key, _| key.direction == Direction::Reply as u8);
    for (key, flow) in &mut state.flows {
        (flow.source, flow.destination) = (key.source, key.destination);
        (flow.service, flow.state) = (0, OF_CONNTRACK | CLOSED);
    }
    node.set_state(&state);
}

fn closed_connection_of_conntrack_keeps_its_client_port(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Protocol::Tcp);
    fixture.establish(node);
    hand_over_closed(node);
    let state = node.state();
    let first = node.ingress(&fixture.first);
    let source = addr(node.ip.client, source_port(&first));
    assert_ne!(source, fixture.first.from);
    first.becomes(&fixture.first.clone().from(source).to(fixture.endpoint));
    node.set_state(&state);
    node.wait(121);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn error_about_a_flow_with_a_changed_port_names_the_original_port(node: &mut TestNode<'_>) {
    let (fixture, other, source) = connect_through_two_vips(node, Protocol::Udp);
    let ip = node.ip;
    let kind = if ip.node.is_ipv4() { [3, 1] } else { [1, 3] };
    let inner = TestPacket { checksum: other.payload_bytes().get(6..8).map(|sum| [sum[0], sum[1]]), ..other };
    let translated = inner.clone().from(source).to(fixture.endpoint);
    let error = TestPacket::icmp_error(kind, ip.router, ip.client, translated);
    node.egress(&error).becomes(&TestPacket::icmp_error(kind, ip.router, ip.client, inner));
}

fn hairpin_connection_is_masqueraded(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = Fixture::new(node, protocol);
        let own = fixture.first.clone().from(addr(fixture.endpoint.ip(), 40_000));
        let masquerade = node.config.node.masquerade_mark;
        node.ingress(&own).becomes(&own.clone().to(fixture.endpoint)).is_marked(masquerade);
        let next = own.clone().flags(TcpFlags::ACK_ALONE);
        node.ingress(&next).becomes(&next.clone().to(fixture.endpoint)).is_marked(masquerade);
        let flow = node.flow(Direction::Original, &own).expect("a flow");
        assert_eq!(flow.state & flow_state::MASQUERADE, flow_state::MASQUERADE);
    }
    assert_eq!(node.counter(Counter::FlowsBegun), 2);
}

super::scenarios! {
    node_port_works_on_addresses_of_the_node,
    node_port_does_not_work_on_other_addresses,
    each_protocol_has_its_own_ports,
    two_clients_with_the_same_port_have_separate_flows,
    flows_to_one_endpoint_through_two_vips_are_separate,
    expired_flow_releases_its_client_port,
    closed_connection_releases_its_client_port,
    closed_connection_of_conntrack_keeps_its_client_port,
    error_about_a_flow_with_a_changed_port_names_the_original_port,
    hairpin_connection_is_masqueraded,
    pod_that_is_exempt_may_connect_directly_from_the_port_of_a_flow,
    port_that_an_exempt_pod_chose_itself_stays,
}
