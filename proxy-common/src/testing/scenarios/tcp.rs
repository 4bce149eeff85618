//! Connections: pinned to their endpoint for life, and a client's port used anew begins another.

use std::vec::Vec;

use super::{Served, addr};
use crate::{
    Protocol::Tcp,
    layout::{Counter, Direction, flags, flow_state as state},
    packet::TcpFlags,
    testing::Scene,
};

fn a_connection_goes_to_an_endpoint_and_answers_come_from_the_vip(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    assert_eq!(scene.count(Counter::FlowsBegun), 1);
    assert_eq!(scene.flows(), 2, "one entry a direction");
}

fn a_connection_stays_with_its_endpoint_when_the_service_has_others_or_is_gone(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    let moved = served.service.clone().moved_to(&[addr(scene.at.other_pod, 8080)]);
    scene.put(&moved);
    scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
    scene.remove(&moved);
    scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
    let answer = served.answer().flags(TcpFlags::ACK_ALONE);
    scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
}

fn a_repeated_syn_goes_where_the_first_one_went(scene: &mut Scene<'_>) {
    let mut served = Served::new(scene, Tcp);
    let endpoints: Vec<_> = (1..=64).map(|port| addr(scene.at.pod, port)).collect();
    served.service = served.service.moved_to(&endpoints);
    scene.put(&served.service);
    let one = scene.enters(&served.first);
    for _ in 0..5 {
        assert_eq!(scene.enters(&served.first).bytes, one.bytes);
    }
    assert_eq!((scene.count(Counter::FlowsBegun), scene.flows()), (1, 2));
}

fn a_repeated_syn_keeps_its_flow_from_being_forgotten(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    scene.wait(100);
    let before = scene.flow(Direction::Reply, &served.answer()).expect("noted");
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    let after = scene.flow(Direction::Reply, &served.answer()).expect("noted");
    assert!(after.used_ns >= before.used_ns + 100_000_000_000, "{before:?} {after:?}");
}

fn a_repeated_syn_goes_to_another_endpoint_when_those_of_the_service_changed(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    let other = addr(scene.at.other_pod, 8080);
    scene.put(&served.service.clone().moved_to(&[other]));
    scene.enters(&served.first).becomes(&served.first.clone().to(other));
    let answer = served.answer_from(other);
    scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
    scene.leaves(&served.answer()).is_left_alone();
    assert_eq!(scene.flows(), 2, "nothing is left of the first try");
}

fn packets_tell_how_far_a_connection_is(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let steps = [
        (Direction::Original, TcpFlags::SYN_ALONE, 0),
        (Direction::Reply, TcpFlags::SYN_ACK, state::REPLIED),
        (Direction::Original, TcpFlags::ACK_ALONE, state::REPLIED),
        (Direction::Original, TcpFlags::FIN_ACK, state::REPLIED | state::CLIENT_CLOSED),
        (Direction::Reply, TcpFlags::FIN_ACK, state::REPLIED | state::CLIENT_CLOSED | state::ENDPOINT_CLOSED),
        (
            Direction::Original,
            TcpFlags::RST_ALONE,
            state::REPLIED | state::CLIENT_CLOSED | state::ENDPOINT_CLOSED | state::RESET,
        ),
    ];
    for (direction, flags, wanted) in steps {
        match direction {
            Direction::Original => scene.enters(&served.first.clone().flags(flags)),
            Direction::Reply => scene.leaves(&served.answer().flags(flags)),
        };
        for (direction, sent) in [(Direction::Original, &served.first), (Direction::Reply, &served.answer())]
        {
            let flow = scene.flow(direction, sent).expect("noted");
            assert_eq!(flow.state, wanted, "{direction:?} after {flags:?}");
        }
    }
}

fn a_syn_begins_another_connection_once_both_sides_have_closed(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::FIN_ACK));
    scene.enters(&served.first);
    assert_eq!(scene.count(Counter::FlowsBegun), 1, "the endpoint may still have something to say");
    scene.leaves(&served.answer().flags(TcpFlags::FIN_ACK));
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    assert_eq!(scene.count(Counter::FlowsBegun), 2);
    let flow = scene.flow(Direction::Reply, &served.answer()).expect("noted");
    assert_eq!(flow.state, 0, "of the new connection nothing is known yet");
}

/// Any of 64 endpoints: which one it was, of what came out.
fn begin_at_any(scene: &mut Scene<'_>) -> (Served, std::net::SocketAddr) {
    let mut served = Served::new(scene, Tcp);
    let endpoints: Vec<_> = (1..=64).map(|port| addr(scene.at.pod, port)).collect();
    served.service = served.service.moved_to(&endpoints);
    scene.put(&served.service);
    scene.enters(&served.first);
    let flow = scene.flow(Direction::Original, &served.first).expect("noted");
    let endpoint = addr(scene.at.pod, flow.destination.port);
    scene.leaves(&served.answer_from(endpoint)).becomes(&served.answer_from(endpoint).from(served.vip));
    (served, endpoint)
}

fn close(scene: &mut Scene<'_>, served: &Served, endpoint: std::net::SocketAddr) {
    scene.enters(&served.first.clone().flags(TcpFlags::FIN_ACK));
    scene.leaves(&served.answer_from(endpoint).flags(TcpFlags::FIN_ACK));
}

fn a_client_port_used_anew_after_an_orderly_end_leads_there_again_in_the_entries_that_there_are(
    scene: &mut Scene<'_>,
) {
    let (served, endpoint) = begin_at_any(scene);
    for connection in 2..6 {
        close(scene, &served, endpoint);
        scene.enters(&served.first).becomes(&served.first.clone().to(endpoint));
        scene.leaves(&served.answer_from(endpoint)).becomes(&served.answer_from(endpoint).from(served.vip));
        assert_eq!((scene.count(Counter::FlowsBegun), scene.flows()), (connection, 2));
    }
}

fn a_client_port_used_anew_is_led_by_the_service_as_it_is_by_then(scene: &mut Scene<'_>) {
    let (served, endpoint) = begin_at_any(scene);
    close(scene, &served, endpoint);
    let other = addr(scene.at.other_pod, 8080);
    scene.put(&served.service.clone().moved_to(&[other]));
    scene.enters(&served.first).becomes(&served.first.clone().to(other));
    scene.leaves(&served.answer_from(endpoint)).is_left_alone();
    assert_eq!(scene.flows(), 2);
}

fn a_client_port_used_anew_is_masqueraded_if_the_service_says_so_by_then(scene: &mut Scene<'_>) {
    let (served, endpoint) = begin_at_any(scene);
    close(scene, &served, endpoint);
    scene.put(&served.service.clone().flagged(flags::MASQUERADE_OUTSIDE));
    let masquerade = scene.world.node.masquerade_mark;
    scene.enters(&served.first).becomes(&served.first.clone().to(endpoint)).is_marked(masquerade);
}

fn a_client_port_used_anew_works_though_a_full_map_forgot_one_direction(scene: &mut Scene<'_>) {
    let (served, endpoint) = begin_at_any(scene);
    for direction in [Direction::Original, Direction::Reply] {
        let flow = scene.flow(Direction::Original, &served.first).expect("noted");
        let endpoint = addr(endpoint.ip(), flow.destination.port);
        close(scene, &served, endpoint);
        let forgotten = if direction == Direction::Original {
            served.first.clone()
        } else {
            served.answer_from(endpoint)
        };
        scene.forget(direction, &forgotten);
        scene.enters(&served.first);
        let flow = scene.flow(Direction::Original, &served.first).expect("noted");
        let endpoint = addr(endpoint.ip(), flow.destination.port);
        let answer = served.answer_from(endpoint);
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
        assert_eq!(flow.state, 0);
    }
}

fn a_syn_begins_another_connection_after_a_reset(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.leaves(&served.answer().flags(TcpFlags::RST_ALONE));
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    assert_eq!(scene.count(Counter::FlowsBegun), 2);
    assert_eq!(scene.flows(), 2);
}

fn a_client_that_goes_past_the_service_from_an_old_port_is_answered_by_the_endpoint_itself(
    scene: &mut Scene<'_>,
) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::RST_ALONE));
    scene.enters(&served.first.clone().to(served.endpoint)).is_left_alone();
    scene.leaves(&served.answer()).is_left_alone();
    let answer = served.answer().flags(TcpFlags::ACK_ALONE);
    scene.leaves(&answer).is_left_alone();
}

fn what_a_full_map_forgot_of_a_connection_comes_back_with_a_packet_the_other_way(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    let answer = served.answer().flags(TcpFlags::ACK_ALONE);
    for _ in 0..2 {
        scene.wait(2);
        scene.forget(Direction::Original, &served.first);
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
        scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
        scene.wait(2);
        scene.forget(Direction::Reply, &served.answer());
        scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
        scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
    }
    assert_eq!(scene.flows(), 2);
}

fn what_a_full_map_forgot_of_an_opening_comes_back_with_the_repeated_syn(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    scene.enters(&served.first);
    scene.wait(2);
    scene.forget(Direction::Reply, &served.answer());
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    scene.leaves(&served.answer()).becomes(&served.answer().from(served.vip));
}

fn packets_that_are_nobodys_are_left_alone(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    let elsewhere = served.first.clone().to(addr(scene.at.cluster_ip, 81));
    scene.enters(&elsewhere).is_left_alone();
    scene.leaves(&elsewhere).is_left_alone();
    scene.leaves(&served.first).is_left_alone();
    scene.enters(&served.first.clone().to(served.endpoint)).is_left_alone();
    scene.leaves(&served.answer()).is_left_alone();
    assert_eq!(scene.flows(), 0);
}

fn an_old_syn_does_not_move_a_connection(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.put(&served.service.clone().moved_to(&[served.endpoint, addr(scene.at.other_pod, 8080)]));
    scene.put(&served.service.clone().moved_to(&[addr(scene.at.other_pod, 8080)]));
    scene.enters(&served.first);
    scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
}

fn a_forged_reset_does_not_shorten_a_connection(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.enters(&served.first.clone().flags(TcpFlags::RST_ALONE));
    for _ in 0..3 {
        scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
        scene.leaves(&served.answer().flags(TcpFlags::ACK_ALONE));
    }
    let flow = scene.flow(Direction::Original, &served.first).expect("noted");
    assert!(
        !flow.is_over(Tcp, flow.used_ns + 121_000_000_000),
        "over after 2 min although it went on: {flow:?}"
    );
}

fn what_is_kept_back_is_dropped_and_goes_on_should_nobody_end_that(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Tcp);
    served.begin(scene);
    scene.hold(&served.first);
    scene.wait(3);
    scene.enters(&served.next()).is_dropped();
    scene.leaves(&served.answer()).becomes(&served.answer().from(served.vip));
    scene.hold(&served.first);
    scene.wait(11);
    scene.enters(&served.next()).becomes(&served.next().to(served.endpoint));
}

super::scenarios! {
    an_old_syn_does_not_move_a_connection,
    a_forged_reset_does_not_shorten_a_connection,
    a_connection_goes_to_an_endpoint_and_answers_come_from_the_vip,
    a_connection_stays_with_its_endpoint_when_the_service_has_others_or_is_gone,
    a_repeated_syn_goes_where_the_first_one_went,
    a_repeated_syn_keeps_its_flow_from_being_forgotten,
    a_repeated_syn_goes_to_another_endpoint_when_those_of_the_service_changed,
    packets_tell_how_far_a_connection_is,
    a_syn_begins_another_connection_once_both_sides_have_closed,
    a_client_port_used_anew_after_an_orderly_end_leads_there_again_in_the_entries_that_there_are,
    a_client_port_used_anew_is_led_by_the_service_as_it_is_by_then,
    a_client_port_used_anew_is_masqueraded_if_the_service_says_so_by_then,
    a_client_port_used_anew_works_though_a_full_map_forgot_one_direction,
    a_syn_begins_another_connection_after_a_reset,
    a_client_that_goes_past_the_service_from_an_old_port_is_answered_by_the_endpoint_itself,
    what_a_full_map_forgot_of_a_connection_comes_back_with_a_packet_the_other_way,
    what_a_full_map_forgot_of_an_opening_comes_back_with_the_repeated_syn,
    packets_that_are_nobodys_are_left_alone,
    what_is_kept_back_is_dropped_and_goes_on_should_nobody_end_that,
}
