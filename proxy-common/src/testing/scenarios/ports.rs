//! Addresses and ports: node ports, several addresses, and clients that would look alike behind them.

use super::{PROTOS, Served, addr, any, first};
use crate::{
    Protocol,
    layout::{Counter, Direction, flow_state},
    packet::TcpFlags,
    testing::{Carries, Ran, Scene, Sent},
};

fn a_node_port_is_served_at_the_nodes_addresses(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let (node, port) = (scene.at.node, 30_080);
        let served = Served::at(scene, proto, addr(node, port), addr(any(node), port));
        served.begin(scene);
    }
}

fn a_node_port_is_not_served_elsewhere(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let (at, port) = (scene.at, 30_080);
        let served = Served::at(scene, proto, addr(at.node, port), addr(any(at.node), port));
        let loopback: std::net::IpAddr =
            if at.node.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() };
        scene.world.node_addresses.insert(loopback.into());
        scene.configure();
        for other in [at.cluster_ip, at.other_client, any(at.node), loopback] {
            scene.enters(&served.first.clone().to(addr(other, port))).is_left_alone();
        }
    }
}

fn protocols_have_ports_of_their_own(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let other = PROTOS.into_iter().find(|other| *other != proto).expect("there are two");
        scene.enters(&first(other, served.first.from, served.vip)).is_left_alone();
        scene.remove(&served.service);
    }
    let vip = addr(scene.at.cluster_ip, 80);
    scene.serve(Protocol::Sctp, &[vip], &[addr(scene.at.pod, 80)]);
    let bytes = [0x9c, 0x40, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    let sctp = Sent::new(addr(scene.at.client, 0), vip, Carries::Other { proto: 132, bytes });
    scene.enters(&sctp).is_left_alone();
}

fn two_clients_on_one_port_are_kept_apart(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        served.begin(scene);
        let other = served.first.clone().from(addr(scene.at.other_client, served.first.from.port()));
        scene.enters(&other).becomes(&other.clone().to(served.endpoint));
        let answer = other.to(served.endpoint).reversed().flags(TcpFlags::SYN_ACK);
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
        served.begin(scene);
    }
}

/// The source port that came out.
fn port(ran: &Ran) -> u16 {
    let header = if ran.bytes[12..14] == [0x86, 0xdd] { 40 } else { 20 };
    u16::from_be_bytes([ran.bytes[14 + header], ran.bytes[15 + header]])
}

/// One client has a flow, and another to the same endpoint through another address from the same port. Returns what the
/// client sends to the other, and from which address the endpoint gets it.
fn through_two_addresses(scene: &mut Scene<'_>, proto: Protocol) -> (Served, Sent, std::net::SocketAddr) {
    let served = Served::new(scene, proto);
    served.begin(scene);
    let other = served.first.clone().to(addr(scene.at.external_ip, 443));
    scene.serve(proto, &[other.to], &[served.endpoint]);
    let came = scene.enters(&other);
    let source = addr(scene.at.client, port(&came));
    came.becomes(&other.clone().from(source).to(served.endpoint));
    (served, other, source)
}

fn two_addresses_with_one_endpoint_keep_a_clients_flows_apart(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let (served, other, source) = through_two_addresses(scene, proto);
        assert_ne!(source.port(), other.from.port(), "the endpoint could not tell the flows apart");
        assert!(source.port() >= 1024);
        let answer = Sent { from: served.endpoint, to: source, ..other.clone() }.flags(TcpFlags::SYN_ACK);
        scene.leaves(&answer).becomes(&answer.clone().from(other.to).to(other.from));
        let next = other.flags(TcpFlags::ACK_ALONE);
        scene.enters(&next).becomes(&next.clone().from(source).to(served.endpoint));
        scene.leaves(&served.answer()).becomes(&served.answer().from(served.vip));
        scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
        // The next protocol finds nothing of this one.
        for service in scene.world.services.clone().into_values() {
            scene.world.services.retain(|_, value| value.service != service.service);
        }
    }
}

fn a_flow_that_is_over_gives_its_client_port_to_another(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Protocol::Udp);
    served.begin(scene);
    scene.wait(121);
    let other = served.first.clone().to(addr(scene.at.external_ip, 443));
    scene.serve(Protocol::Udp, &[other.to], &[served.endpoint]);
    scene.enters(&other).becomes(&other.clone().to(served.endpoint));
    scene.leaves(&served.answer()).becomes(&served.answer().from(other.to));
    assert!(scene.flow(Direction::Original, &served.first).is_none(), "its answers would go astray");
}

fn a_closed_connection_gives_its_client_port_to_another(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Protocol::Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::RST_ALONE));
    let other = served.first.clone().to(addr(scene.at.external_ip, 443));
    scene.serve(Protocol::Tcp, &[other.to], &[served.endpoint]);
    scene.enters(&other).becomes(&other.clone().to(served.endpoint));
    scene.leaves(&served.answer()).becomes(&served.answer().from(other.to));
    assert_eq!(scene.flows(), 2);
}

fn an_error_about_a_flow_with_another_client_port_names_the_clients_own(scene: &mut Scene<'_>) {
    let (served, other, source) = through_two_addresses(scene, Protocol::Udp);
    let at = scene.at;
    let kind = if at.node.is_ipv4() { [3, 1] } else { [1, 3] };
    let told = Sent { checksum: other.carried().get(6..8).map(|sum| [sum[0], sum[1]]), ..other };
    let inner = told.clone().from(source).to(served.endpoint);
    let error = Sent::error(kind, at.router, at.client, inner);
    scene.leaves(&error).becomes(&Sent::error(kind, at.router, at.client, told));
}

fn an_endpoint_that_dials_itself_is_masqueraded(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        let own = served.first.clone().from(addr(served.endpoint.ip(), 40_000));
        let masquerade = scene.world.node.masquerade_mark;
        scene.enters(&own).becomes(&own.clone().to(served.endpoint)).is_marked(masquerade);
        let next = own.clone().flags(TcpFlags::ACK_ALONE);
        scene.enters(&next).becomes(&next.clone().to(served.endpoint)).is_marked(masquerade);
        let flow = scene.flow(Direction::Original, &own).expect("noted");
        assert_eq!(flow.state & flow_state::MASQUERADE, flow_state::MASQUERADE);
    }
    assert_eq!(scene.count(Counter::FlowsBegun), 2);
}

super::scenarios! {
    a_node_port_is_served_at_the_nodes_addresses,
    a_node_port_is_not_served_elsewhere,
    protocols_have_ports_of_their_own,
    two_clients_on_one_port_are_kept_apart,
    two_addresses_with_one_endpoint_keep_a_clients_flows_apart,
    a_flow_that_is_over_gives_its_client_port_to_another,
    a_closed_connection_gives_its_client_port_to_another,
    an_error_about_a_flow_with_another_client_port_names_the_clients_own,
    an_endpoint_that_dials_itself_is_masqueraded,
}
