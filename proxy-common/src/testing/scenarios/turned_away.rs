//! Packets that get no endpoint: refused or dropped, counted, and marked for netfilter.

use super::{PROTOS, Served, addr, any};
use crate::{
    Protocol::Tcp,
    layout::{Counter, NodeValue, flags},
    packet::TcpFlags,
    testing::{Given, Hook, Scene, Sent},
};

fn without_endpoints_callers_are_refused(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        scene.put(&served.service.clone().moved_to(&[]));
        scene.enters(&served.first).is_refused();
    }
    assert_eq!(scene.count(Counter::Refused), 2);
    assert_eq!(scene.flows(), 0);
}

fn without_local_endpoints_callers_hear_nothing(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        scene.put(&served.service.clone().with_outside(&[]).flagged(flags::DROP_WHEN_EMPTY));
        scene.enters(&served.first).is_dropped();
    }
    assert_eq!(scene.count(Counter::NoLocalEndpoint), 2);
    assert_eq!(scene.flows(), 0);
}

fn a_slot_that_is_gone_by_the_time_it_is_read_drops_the_packet(scene: &mut Scene<'_>) {
    for proto in PROTOS {
        let served = Served::new(scene, proto);
        scene.world.endpoints.clear();
        scene.configure();
        scene.enters(&served.first).is_dropped();
    }
    assert_eq!(scene.count(Counter::FlowNotRecorded), 2);
    assert_eq!(scene.flows(), 0);
}

fn a_closed_flow_is_forgotten_when_the_client_is_turned_away(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::RST_ALONE));
    scene.put(&served.service.clone().moved_to(&[]));
    scene.enters(&served.first).is_refused();
    assert_eq!(scene.flows(), 0);
}

fn segments_of_connections_nobody_knows_are_refused_at_a_services_own_address(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    for flags in [TcpFlags::ACK_ALONE, TcpFlags::FIN_ACK, TcpFlags::SYN_ACK] {
        scene.enters(&served.first.clone().flags(flags)).is_refused();
    }
    assert_eq!(scene.count(Counter::UnknownConnection), 3);
    scene.enters(&served.first.clone().flags(TcpFlags::RST_ALONE)).is_left_alone();
    assert_eq!(scene.flows(), 0);
}

fn segments_of_connections_nobody_knows_go_to_the_node_at_a_node_port(scene: &mut Scene<'_>) {
    let (node, port) = (scene.at.node, 30_080);
    let served = Served::at(scene, Tcp, addr(node, port), addr(any(node), port));
    scene.enters(&served.next()).is_left_alone();
    assert_eq!(scene.count(Counter::UnknownConnection), 0);
}

fn other_bits_of_a_mark_are_kept(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    scene.put(&served.service.clone().flagged(flags::MASQUERADE_OUTSIDE));
    let given = Given { mark: 0xa000_0001, ..Given::new(served.first.bytes()) };
    let ran = scene.passes(Hook::Ingress, &given).expect("can be given");
    ran.becomes(&served.first.clone().to(served.endpoint)).is_marked(NodeValue::MASQUERADE_MARK);
}

fn what_was_asked_of_netfilter_is_taken_off_what_leaves(scene: &mut Scene<'_>) {
    let at = scene.at;
    let sent = Sent::udp(addr(at.client, 1), addr(at.router, 2));
    let both = NodeValue::MASQUERADE_MARK | NodeValue::REJECT_MARK;
    for (mark, left) in [(both, 0), (NodeValue::MASQUERADE_MARK | 1, 1), (NodeValue::REJECT_MARK, 0), (6, 6)]
    {
        let ran = scene.passes(Hook::Egress, &Given { mark, ..Given::new(sent.bytes()) });
        let ran = ran.expect("can be given");
        assert_eq!((ran.mark, ran.becomes(&sent).given.mark), (left, mark));
    }
}

super::scenarios! {
    without_endpoints_callers_are_refused,
    without_local_endpoints_callers_hear_nothing,
    a_slot_that_is_gone_by_the_time_it_is_read_drops_the_packet,
    a_closed_flow_is_forgotten_when_the_client_is_turned_away,
    segments_of_connections_nobody_knows_are_refused_at_a_services_own_address,
    segments_of_connections_nobody_knows_go_to_the_node_at_a_node_port,
    other_bits_of_a_mark_are_kept,
    what_was_asked_of_netfilter_is_taken_off_what_leaves,
}
