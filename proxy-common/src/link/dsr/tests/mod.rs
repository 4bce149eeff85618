//! Tests of packets that come through the tunnel. The kernel cannot run a program over a packet of
//! a tunnel that it did not receive, so these run on the host.

mod returns;
mod whole;

use std::net::{IpAddr, SocketAddr};

use crate::{
    Protocol,
    layout::{Counter, Direction, Flow, FlowKey, Masquerading, NodeValue, ServiceKey, flags, flow_state},
    link::Outcome,
    packet::{TcpFlags, Tuple},
    testing::{
        Addresses, FrameResult, Hook, InputFrame, MemoryMaps, Payload, Service, TUNNEL_PORT, TestNode,
        TestPacket,
    },
};

/// Runs a test on nodes of both families, whose tunnel takes packets of the router.
fn on_nodes(test: impl Fn(&mut TestNode<'_>)) {
    for addresses in Addresses::BOTH {
        let mut maps = MemoryMaps::default();
        let mut node = TestNode::new(&mut maps, addresses);
        node.config.node.tunnel_link = 9;
        node.config.node.tunnel_mtu = 1_500;
        node.config.dsr_nodes.insert(addresses.router.into());
        test(&mut node);
    }
}

/// Adds a Service, and the same address for packets that come through the tunnel.
fn add_service(node: &mut TestNode<'_>, frontend: IpAddr) -> Service {
    let frontend = SocketAddr::new(frontend, 30_080);
    let endpoint = SocketAddr::new(node.ip.pod, 8080);
    let service = node.add_service(Protocol::Tcp, &[frontend], &[endpoint]);
    let key = ServiceKey::new(frontend.ip().into(), frontend.port(), Protocol::Tcp);
    let value = node.config.services[&key];
    node.config.services.insert(key.tunneled(), value);
    node.write_maps();
    service
}

fn syn(node: &TestNode<'_>, to: IpAddr) -> TestPacket {
    let from = SocketAddr::new(node.ip.client, 40_000);
    TestPacket::tcp(TcpFlags::SYN_ALONE, from, SocketAddr::new(to, 30_080))
}

fn tunneled(node: &mut TestNode<'_>, packet: &TestPacket, from: IpAddr) -> FrameResult {
    let frame = InputFrame { tunnel_source: Some(from.into()), ..InputFrame::new(packet.to_frame()) };
    node.run(Hook::Tunnel, &frame).expect("the host runs all frames")
}

#[test]
fn endpoint_of_this_node_gets_the_packet_with_its_source_and_answers_the_client() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        let packet = syn(node, vip);
        let endpoint = service.outside[0];
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(endpoint)).is_marked(0);
        let reply = packet.clone().to(endpoint).reversed().flags(TcpFlags::SYN_ACK);
        node.egress(&reply).becomes(&reply.clone().from(packet.to)).is_marked(0);
        let later = packet.clone().flags(TcpFlags::ACK_ALONE);
        tunneled(node, &later, ip.router).becomes(&later.clone().to(endpoint)).is_marked(0);
    });
}

#[test]
fn node_port_has_an_address_of_the_other_node() {
    on_nodes(|node| {
        let any: IpAddr = if node.ip.node.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let service = add_service(node, any);
        let packet = syn(node, node.ip.router);
        tunneled(node, &packet, node.ip.router).becomes(&packet.clone().to(service.outside[0]));
        node.ingress(&packet).is_left_alone();
    });
}

#[test]
fn packets_of_unknown_nodes_and_for_no_service_are_dropped() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        add_service(node, vip);
        let packet = syn(node, vip);
        tunneled(node, &packet, node.ip.other_client).is_dropped();
        let elsewhere = syn(node, node.ip.other_pod);
        tunneled(node, &elsewhere, router).is_dropped();
        let other = TestPacket::udp(packet.from, packet.to);
        tunneled(node, &other, router).is_dropped();
        node.config.dsr_others.insert(node.ip.other_client.into());
        node.write_maps();
        tunneled(node, &packet, node.ip.other_client).is_dropped();
        assert_eq!(node.counter(Counter::TunnelRefused), 4);
    });
}

/// Where a node masquerades its pods, the other node would take such a packet for one of that node.
#[test]
fn packets_of_pods_to_the_tunnel_of_another_node_are_dropped() {
    on_nodes(|node| {
        let ip = node.ip;
        node.config.dsr_nodes.insert(ip.other_client.into());
        node.write_maps();
        let to = |port| SocketAddr::new(ip.router, port);
        let of_pod = TestPacket::udp(SocketAddr::new(ip.pod, 40_000), to(TUNNEL_PORT));
        node.ingress(&of_pod).is_dropped();
        assert_eq!(node.counter(Counter::TunnelRefused), 1);
        node.ingress(&TestPacket { to: to(TUNNEL_PORT + 1), ..of_pod.clone() }).is_left_alone();
        let to_no_node = SocketAddr::new(ip.other_pod, TUNNEL_PORT);
        node.ingress(&TestPacket { to: to_no_node, ..of_pod.clone() }).is_left_alone();
        // This node may route packets of others.
        let of_node = SocketAddr::new(ip.other_client, 40_000);
        node.ingress(&TestPacket { from: of_node, ..of_pod }).is_left_alone();
    });
}

/// The flow may be one of a Service without direct server return.
#[test]
fn nothing_of_a_masqueraded_flow_comes_through_the_tunnel() {
    on_nodes(|node| {
        let ip = node.ip;
        node.config.node.masquerading = Masquerading::Programs as u16;
        (node.config.node.first_port, node.config.node.last_port) = (1_024, 1_024);
        node.write_maps();
        let [pod, source, client] =
            [(ip.pod, 53), (ip.node, 1_024), (ip.client, 40_000)].map(|(ip, port)| SocketAddr::new(ip, port));
        let reply = TestPacket::udp(pod, source);
        let tuple = Tuple { source: pod.into(), destination: source.into() };
        let key = FlowKey::new(Direction::MasqueradeReply, Protocol::Udp, tuple);
        let state = flow_state::REPLIED | flow_state::ASSURED;
        let flow = Flow { source: pod.into(), destination: client.into(), state, used_ns: 1, ..Flow::NONE };
        let mut maps = node.state();
        maps.flows.insert(key, flow);
        node.set_state(&maps);
        tunneled(node, &reply, ip.router).is_dropped();
        node.ingress(&reply).becomes(&reply.clone().to(client));

        let mut reply = reply;
        reply.payload = Payload::Udp { data: (0..100).collect() };
        let [first, later] = [0..40, 40..usize::MAX].map(|part| reply.clone().fragment(77, part));
        node.ingress(&first).becomes(&first.clone().to(client));
        tunneled(node, &later, ip.router).is_dropped();
        node.ingress(&later).becomes(&later.clone().to(client));

        let kind = if ip.node.is_ipv4() { [3, 3] } else { [1, 4] };
        let error = TestPacket::icmp_error(kind, ip.router, ip.node, TestPacket::udp(source, pod));
        tunneled(node, &error, ip.router).is_dropped();
        assert_eq!(node.counter(Counter::TunnelRefused), 3);
    });
}

#[test]
fn packet_does_not_go_through_the_tunnel_again() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip);
        let key = ServiceKey::new(vip.into(), 30_080, Protocol::Tcp).tunneled();
        let value = node.config.services.get_mut(&key).expect("added");
        value.flags |= flags::DSR | flags::MASQUERADE_OUTSIDE;
        let number = value.service;
        let endpoint = crate::layout::DsrKey { service: number, addr: service.outside[0].ip().into() };
        node.config.dsr_endpoints.insert(endpoint, ip.router.into());
        node.write_maps();
        let packet = syn(node, vip);
        let result = tunneled(node, &packet, ip.router);
        result.becomes(&packet.clone().to(service.outside[0])).is_marked(NodeValue::MASQUERADE_MARK);
    });
}

/// The last endpoint of this node is gone, and one has an address of the node that the client
/// reached.
#[test]
fn packet_may_keep_its_address_and_get_another_port() {
    on_nodes(|node| {
        let ip = node.ip;
        let endpoint = SocketAddr::new(ip.router, 8080);
        let frontend = SocketAddr::new(ip.router, 30_080);
        let service = node.add_service(Protocol::Tcp, &[frontend], &[endpoint]);
        let key = ServiceKey::new(ip.router.into(), 30_080, Protocol::Tcp);
        let value = node.config.services[&key];
        node.config.services.insert(key.tunneled(), value);
        node.write_maps();
        let packet = syn(node, ip.router);
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(service.outside[0]));
    });
}

#[test]
fn segment_of_an_unknown_connection_is_refused() {
    on_nodes(|node| {
        let (router, vip) = (node.ip.router, node.ip.external_ip);
        add_service(node, vip);
        let packet = syn(node, vip).flags(TcpFlags::ACK_ALONE);
        let result = tunneled(node, &packet, router);
        assert_eq!(result.outcome, Outcome::Proceed);
        result.is_refused();
    });
}

/// The client reached this node before, which chose an endpoint on another one.
#[test]
fn packet_from_the_tunnel_does_not_follow_a_flow_into_the_tunnel() {
    on_nodes(|node| {
        let (ip, vip) = (node.ip, node.ip.external_ip);
        let service = add_service(node, vip).with_flags(flags::DSR);
        let endpoint =
            crate::layout::DsrKey { service: service.value.service, addr: service.outside[0].ip().into() };
        node.config.dsr_endpoints.insert(endpoint, ip.router.into());
        node.put_service(&service);
        let key = ServiceKey::new(vip.into(), 30_080, Protocol::Tcp);
        let value = node.config.services[&key];
        node.config.services.insert(key.tunneled(), value);
        node.write_maps();
        let packet = syn(node, vip);
        node.ingress(&packet).is_redirected_as(&packet);
        tunneled(node, &packet, ip.router).becomes(&packet.clone().to(service.outside[0]));
    });
}
