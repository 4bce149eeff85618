//! Datagrams: they move on when their endpoint or Service goes, and answers to the node's own are not taken for a client's.

use super::{Served, addr, any};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, Direction, flow_state as state},
    packet::TcpFlags,
    testing::{Scene, Sent},
};

fn datagrams_go_to_one_endpoint_and_answers_come_from_the_vip(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    served.begin(scene);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    assert_eq!((scene.count(Counter::FlowsBegun), scene.flows()), (1, 2));
    let flow = scene.flow(Direction::Original, &served.first).expect("noted");
    assert_eq!(flow.state, state::REPLIED);
}

fn datagrams_stay_with_an_endpoint_that_still_serves(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let mut moved = served.service.clone().moved_to(&[addr(scene.at.other_pod, 8080)]);
    moved.serving.push(served.endpoint);
    scene.put(&moved);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
}

fn datagrams_move_on_when_their_endpoint_serves_no_more(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    served.begin(scene);
    let other = addr(scene.at.other_pod, 8080);
    scene.put(&served.service.clone().moved_to(&[other]));
    scene.enters(&served.first).becomes(&served.first.clone().to(other));
    let answer = served.answer_from(other);
    scene.leaves(&answer).becomes(&answer.clone().from(served.vip));
    scene.leaves(&served.answer()).is_left_alone();
    assert_eq!(scene.flows(), 2);
}

fn datagrams_of_a_service_that_is_gone_go_on_as_they_are(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    served.begin(scene);
    scene.remove(&served.service);
    scene.enters(&served.first).is_left_alone();
    assert_eq!(scene.flows(), 0);
    scene.put(&served.service);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
}

fn datagrams_of_a_service_that_had_no_endpoint_find_the_first_one(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.put(&served.service.clone().moved_to(&[]));
    scene.enters(&served.first).is_refused();
    assert_eq!(scene.flows(), 0, "nothing is remembered of what went nowhere");
    let again = served.service.clone().moved_to(&[]).moved_to(&[served.endpoint]);
    scene.put(&again);
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint)).is_marked(0);
}

fn a_client_that_was_silent_for_too_long_is_placed_anew(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    scene.enters(&served.first);
    scene.wait(29);
    scene.enters(&served.first);
    assert_eq!(scene.count(Counter::FlowsBegun), 0, "since the wait");
    scene.wait(31);
    scene.enters(&served.first);
    assert_eq!(scene.count(Counter::FlowsBegun), 1, "half a minute without an answer is the end");
    scene.leaves(&served.answer());
    scene.wait(119);
    scene.enters(&served.first);
    assert_eq!(scene.count(Counter::FlowsBegun), 0, "since the wait");
    scene.wait(121);
    scene.enters(&served.first);
    assert_eq!(scene.count(Counter::FlowsBegun), 1, "two minutes after answers are");
}

fn what_a_full_map_forgot_comes_back_with_a_datagram_the_other_way(scene: &mut Scene<'_>) {
    let served = Served::new(scene, Udp);
    served.begin(scene);
    scene.wait(2);
    scene.forget(Direction::Reply, &served.answer());
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
    scene.leaves(&served.answer()).becomes(&served.answer().from(served.vip));
    scene.wait(2);
    scene.forget(Direction::Original, &served.first);
    scene.leaves(&served.answer()).becomes(&served.answer().from(served.vip));
    let flow = scene.flow(Direction::Original, &served.first).expect("made anew");
    assert_eq!(flow.state, state::REPLIED);
}

/// The node asks a server elsewhere from a port that is a node port's number, too.
fn asks_from_a_node_port(scene: &mut Scene<'_>) -> (Served, Sent) {
    let at = scene.at;
    let vip = addr(at.node, 30_053);
    let served = Served::at(scene, Udp, vip, addr(any(at.node), 30_053));
    let question = Sent::udp(vip, addr(at.router, 53));
    (served, question)
}

fn answers_to_the_nodes_own_datagrams_are_left_alone(scene: &mut Scene<'_>) {
    let (served, question) = asks_from_a_node_port(scene);
    scene.leaves(&question).is_left_alone();
    scene.enters(&question.clone().reversed()).is_left_alone();
    scene.enters(&question.clone().reversed()).is_left_alone();
    served.begin(scene);
    assert_eq!(scene.count(Counter::FlowsBegun), 1, "a client's datagrams are still translated");
}

fn who_answered_the_node_is_a_client_again_after_a_while(scene: &mut Scene<'_>) {
    let (served, question) = asks_from_a_node_port(scene);
    scene.leaves(&question).is_left_alone();
    scene.wait(119);
    scene.enters(&question.clone().reversed()).is_left_alone();
    scene.wait(119);
    scene.leaves(&question).is_left_alone();
    scene.wait(119);
    scene.enters(&question.clone().reversed()).is_left_alone();
    scene.wait(121);
    let asked = question.reversed();
    scene.enters(&asked).becomes(&asked.clone().to(served.endpoint));
}

fn answers_to_the_nodes_own_datagrams_from_the_port_of_an_address_of_its_own_are_left_alone(
    scene: &mut Scene<'_>,
) {
    // A load balancer's address may be one of the node's.
    let at = scene.at;
    let vip = addr(at.node, 40_053);
    let served = Served::at(scene, Udp, vip, vip);
    let question = Sent::udp(vip, addr(at.router, 53));
    scene.leaves(&question).is_left_alone();
    scene.enters(&question.clone().reversed()).is_left_alone();
    served.begin(scene);
}

fn answers_to_the_nodes_own_connections_from_a_services_port_are_left_alone(scene: &mut Scene<'_>) {
    let at = scene.at;
    let vip = addr(at.node, 40_080);
    for known in [vip, addr(any(at.node), 40_080)] {
        let served = Served::at(scene, Tcp, vip, known);
        let syn = Sent::tcp(TcpFlags::SYN_ALONE, vip, addr(at.router, 80));
        scene.leaves(&syn).is_left_alone();
        scene.enters(&syn.clone().reversed().flags(TcpFlags::SYN_ACK)).is_left_alone();
        scene.enters(&syn.reversed().flags(TcpFlags::ACK_ALONE)).is_left_alone();
        scene.remove(&served.service);
    }
}

fn a_clients_flow_is_not_taken_for_the_nodes_own(scene: &mut Scene<'_>) {
    let (served, _) = asks_from_a_node_port(scene);
    served.begin(scene);
    // The translated answer leaves through another link on top of the first.
    let answer = served.answer().from(served.vip);
    scene.leaves(&answer).is_left_alone();
    scene.enters(&served.first).becomes(&served.first.clone().to(served.endpoint));
}

fn datagrams_from_other_ports_of_the_node_are_not_noted(scene: &mut Scene<'_>) {
    let (_, question) = asks_from_a_node_port(scene);
    let at = scene.at;
    scene.leaves(&question.clone().from(addr(at.node, 30_054))).is_left_alone();
    scene.leaves(&question.clone().from(addr(at.other_pod, 30_053))).is_left_alone();
    assert_eq!(scene.flows(), 0);
    scene.leaves(&question).is_left_alone();
    assert_eq!(scene.flows(), 1);
}

fn the_nodes_own_conversation_outlives_a_minute_of_silence(scene: &mut Scene<'_>) {
    let (_served, question) = asks_from_a_node_port(scene);
    for _ in 0..5 {
        scene.leaves(&question).is_left_alone();
        scene.enters(&question.clone().reversed()).is_left_alone();
    }
    scene.wait(60);
    scene.enters(&question.clone().reversed()).is_left_alone();
}

super::scenarios! {
    the_nodes_own_conversation_outlives_a_minute_of_silence,
    datagrams_go_to_one_endpoint_and_answers_come_from_the_vip,
    datagrams_stay_with_an_endpoint_that_still_serves,
    datagrams_move_on_when_their_endpoint_serves_no_more,
    datagrams_of_a_service_that_is_gone_go_on_as_they_are,
    datagrams_of_a_service_that_had_no_endpoint_find_the_first_one,
    a_client_that_was_silent_for_too_long_is_placed_anew,
    what_a_full_map_forgot_comes_back_with_a_datagram_the_other_way,
    answers_to_the_nodes_own_datagrams_are_left_alone,
    who_answered_the_node_is_a_client_again_after_a_while,
    answers_to_the_nodes_own_datagrams_from_the_port_of_an_address_of_its_own_are_left_alone,
    answers_to_the_nodes_own_connections_from_a_services_port_are_left_alone,
    a_clients_flow_is_not_taken_for_the_nodes_own,
    datagrams_from_other_ports_of_the_node_are_not_noted,
}
