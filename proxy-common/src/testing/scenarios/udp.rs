//! UDP: flows move if their endpoint or Service goes. Replies to datagrams of the node are not
//! taken for datagrams of clients.

use super::{Fixture, addr, any};
use crate::{
    Protocol::{Tcp, Udp},
    layout::{Counter, Direction, NewFlows, flow_state as state},
    packet::TcpFlags,
    testing::{TestNode, TestPacket},
};

fn reply_to_a_datagram_has_the_vip_as_source(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    assert_eq!((node.counter(Counter::FlowsBegun), node.flow_count()), (1, 2));
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert_eq!(state::observed(flow.state), state::REPLIED);
}

fn datagrams_keep_a_serving_endpoint(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let mut moved = fixture.service.clone().with_endpoints(&[addr(node.ip.other_pod, 8080)]);
    moved.serving.push(fixture.endpoint);
    node.put_service(&moved);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn datagrams_move_if_the_endpoint_is_not_serving(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    let other = addr(node.ip.other_pod, 8080);
    node.put_service(&fixture.service.clone().with_endpoints(&[other]));
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(other));
    let reply = fixture.reply_from(other);
    node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
    node.egress(&fixture.reply()).is_left_alone();
    assert_eq!(node.flow_count(), 2);
}

fn datagrams_of_a_removed_service_are_left_alone(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    node.remove_service(&fixture.service);
    node.ingress(&fixture.first).is_left_alone();
    assert_eq!(node.flow_count(), 0);
    node.put_service(&fixture.service);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn refused_datagrams_find_the_first_endpoint(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.put_service(&fixture.service.clone().with_endpoints(&[]));
    node.ingress(&fixture.first).is_refused();
    assert_eq!(node.flow_count(), 0, "a refused datagram leaves no flow");
    let again = fixture.service.clone().with_endpoints(&[]).with_endpoints(&[fixture.endpoint]);
    node.put_service(&again);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint)).is_marked(0);
}

fn silent_client_gets_a_new_flow(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.ingress(&fixture.first);
    node.wait(20);
    node.ingress(&fixture.first);
    assert_eq!(node.counter(Counter::FlowsBegun), 0, "since the wait");
    node.wait(31);
    node.ingress(&fixture.first);
    assert_eq!(node.counter(Counter::FlowsBegun), 1, "a flow without a reply expires after 30 seconds");
    node.egress(&fixture.reply());
    node.wait(100);
    node.ingress(&fixture.first);
    assert_eq!(node.counter(Counter::FlowsBegun), 0, "since the wait");
    node.wait(121);
    node.ingress(&fixture.first);
    assert_eq!(node.counter(Counter::FlowsBegun), 1, "a flow with replies expires after 2 minutes");
}

fn evicted_entry_returns_with_a_datagram_of_the_opposite_direction(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    fixture.establish(node);
    node.wait(2);
    node.evict_flow(Direction::Reply, &fixture.reply());
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
    node.wait(2);
    node.evict_flow(Direction::Original, &fixture.first);
    node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
    let flow = node.flow(Direction::Original, &fixture.first).expect("a new entry");
    assert_eq!(state::observed(flow.state), state::REPLIED);
}

/// Returns a query of the node to a server elsewhere. Its source port is a node port.
fn query_from_a_node_port(node: &mut TestNode<'_>) -> (Fixture, TestPacket) {
    let ip = node.ip;
    let vip = addr(ip.node, 30_053);
    let fixture = Fixture::at(node, Udp, vip, addr(any(ip.node), 30_053));
    let question = TestPacket::udp(vip, addr(ip.router, 53));
    (fixture, question)
}

fn replies_to_datagrams_of_the_node_are_left_alone(node: &mut TestNode<'_>) {
    let (fixture, question) = query_from_a_node_port(node);
    node.egress(&question).is_left_alone();
    node.ingress(&question.clone().reversed()).is_left_alone();
    node.ingress(&question.clone().reversed()).is_left_alone();
    fixture.establish(node);
    assert_eq!(node.counter(Counter::FlowsBegun), 1, "a client's datagrams are still translated");
}

fn server_of_the_node_becomes_a_client_after_the_timeout(node: &mut TestNode<'_>) {
    let (fixture, question) = query_from_a_node_port(node);
    node.egress(&question).is_left_alone();
    node.wait(100);
    node.ingress(&question.clone().reversed()).is_left_alone();
    node.wait(100);
    node.egress(&question).is_left_alone();
    node.wait(100);
    node.ingress(&question.clone().reversed()).is_left_alone();
    node.wait(121);
    let datagram = question.reversed();
    node.ingress(&datagram).becomes(&datagram.clone().to(fixture.endpoint));
}

fn replies_to_a_load_balancer_address_of_the_node_are_left_alone(node: &mut TestNode<'_>) {
    // A load-balancer IP can be an address of the node.
    let ip = node.ip;
    let vip = addr(ip.node, 40_053);
    let fixture = Fixture::at(node, Udp, vip, vip);
    let question = TestPacket::udp(vip, addr(ip.router, 53));
    node.egress(&question).is_left_alone();
    node.ingress(&question.clone().reversed()).is_left_alone();
    fixture.establish(node);
}

fn replies_to_connections_of_the_node_are_left_alone(node: &mut TestNode<'_>) {
    let ip = node.ip;
    let vip = addr(ip.node, 40_080);
    for frontend in [vip, addr(any(ip.node), 40_080)] {
        let fixture = Fixture::at(node, Tcp, vip, frontend);
        let syn = TestPacket::tcp(TcpFlags::SYN_ALONE, vip, addr(ip.router, 80));
        node.egress(&syn).is_left_alone();
        node.ingress(&syn.clone().reversed().flags(TcpFlags::SYN_ACK)).is_left_alone();
        node.ingress(&syn.reversed().flags(TcpFlags::ACK_ALONE)).is_left_alone();
        node.remove_service(&fixture.service);
    }
}

fn flow_of_a_client_is_not_taken_for_one_of_the_node(node: &mut TestNode<'_>) {
    let (fixture, _) = query_from_a_node_port(node);
    fixture.establish(node);
    // The translated reply leaves through a second link above the first.
    let reply = fixture.reply().from(fixture.vip);
    node.egress(&reply).is_left_alone();
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn flow_of_a_client_is_not_taken_for_one_of_the_node_after_its_eviction(node: &mut TestNode<'_>) {
    let (fixture, _) = query_from_a_node_port(node);
    fixture.establish(node);
    node.evict_flow(Direction::Original, &fixture.first);
    let reply = fixture.reply().from(fixture.vip);
    node.egress(&fixture.reply()).becomes(&reply);
    node.egress(&reply).is_left_alone();
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn only_datagrams_from_a_vip_get_a_pass_entry(node: &mut TestNode<'_>) {
    let (_, question) = query_from_a_node_port(node);
    let ip = node.ip;
    node.egress(&question.clone().from(addr(ip.node, 30_054))).is_left_alone();
    node.egress(&question.clone().from(addr(ip.other_pod, 30_053))).is_left_alone();
    assert_eq!(node.flow_count(), 0);
    node.egress(&question).is_left_alone();
    assert_eq!(node.flow_count(), 1);
}

fn pass_entry_is_assured_by_an_answer(node: &mut TestNode<'_>) {
    let (_served, question) = query_from_a_node_port(node);
    node.egress(&question).is_left_alone();
    node.egress(&question).is_left_alone();
    assert_eq!((node.flow_count(), node.assured_flow_count()), (1, 0));
    for _ in 0..2 {
        node.ingress(&question.clone().reversed()).is_left_alone();
        node.egress(&question).is_left_alone();
        assert_eq!((node.flow_count(), node.assured_flow_count()), (1, 1));
    }
}

fn pass_entry_takes_the_place_of_an_expired_flow_of_a_client(node: &mut TestNode<'_>) {
    let (fixture, question) = query_from_a_node_port(node);
    let of_client = question.clone().reversed();
    let answer = of_client.clone().to(fixture.endpoint).reversed();
    node.ingress(&of_client).becomes(&of_client.clone().to(fixture.endpoint));
    node.egress(&answer).becomes(&question.clone());
    node.ingress(&of_client).becomes(&of_client.clone().to(fixture.endpoint));
    assert_eq!(node.assured_flow_count(), 2);
    node.wait(121);
    node.egress(&question).is_left_alone();
    node.ingress(&of_client).is_left_alone();
}

fn pass_entry_survives_a_minute_of_silence(node: &mut TestNode<'_>) {
    let (_served, question) = query_from_a_node_port(node);
    for _ in 0..5 {
        node.egress(&question).is_left_alone();
        node.ingress(&question.clone().reversed()).is_left_alone();
    }
    node.wait(60);
    node.ingress(&question.clone().reversed()).is_left_alone();
}

/// The entry of conntrack may be gone, and a new conversation may have the same client port.
fn datagrams_without_replies_do_not_stay_with_conntrack(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.ingress(&fixture.first);
    node.pass_flow(&fixture.first);
    for _ in 0..2 {
        node.wait(14);
        node.ingress(&fixture.first).is_left_alone();
    }
    node.wait(3);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn replies_of_conntrack_keep_the_conversation_with_it(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    node.ingress(&fixture.first);
    node.pass_flow(&fixture.first);
    for _ in 0..3 {
        node.wait(14);
        node.ingress(&fixture.first).is_left_alone();
        node.egress(&fixture.reply().from(fixture.vip)).is_left_alone();
    }
}

fn set_new_flows(node: &mut TestNode<'_>, new_flows: NewFlows) {
    node.config.node.new_flows = new_flows as u16;
    node.write_maps();
}

/// Userspace lists the flows of conntrack before the programs take new flows. A flow may begin
/// after that.
fn conversation_that_netfilter_began_stays_with_it_when_programs_take_new_ones(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    set_new_flows(node, NewFlows::Leave);
    node.ingress(&fixture.first).is_left_alone();
    set_new_flows(node, NewFlows::Translate);
    node.ingress(&fixture.first).is_left_alone();
    assert_eq!(node.counter(Counter::FlowsBegun), 0);
    let another = fixture.first.clone().from(addr(node.ip.client, 40_001));
    node.ingress(&another).becomes(&another.clone().to(fixture.endpoint));
}

/// Conntrack may not translate it: the Service had no endpoints. Userspace removes the entry, or it
/// ends by itself.
fn conversation_that_userspace_does_not_find_in_conntrack_gets_an_endpoint(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Udp);
    set_new_flows(node, NewFlows::Leave);
    node.ingress(&fixture.first).is_left_alone();
    set_new_flows(node, NewFlows::Translate);
    node.wait(40);
    node.ingress(&fixture.first).is_left_alone();
    node.wait(40);
    node.ingress(&fixture.first).becomes(&fixture.first.clone().to(fixture.endpoint));
}

fn connection_that_netfilter_began_leaves_no_flow(node: &mut TestNode<'_>) {
    let fixture = Fixture::new(node, Tcp);
    set_new_flows(node, NewFlows::Leave);
    node.ingress(&fixture.first).is_left_alone();
    assert_eq!(node.flow_count(), 0);
}

super::scenarios! {
    datagrams_without_replies_do_not_stay_with_conntrack,
    replies_of_conntrack_keep_the_conversation_with_it,
    conversation_that_netfilter_began_stays_with_it_when_programs_take_new_ones,
    conversation_that_userspace_does_not_find_in_conntrack_gets_an_endpoint,
    connection_that_netfilter_began_leaves_no_flow,
    pass_entry_is_assured_by_an_answer,
    pass_entry_takes_the_place_of_an_expired_flow_of_a_client,
    pass_entry_survives_a_minute_of_silence,
    reply_to_a_datagram_has_the_vip_as_source,
    datagrams_keep_a_serving_endpoint,
    datagrams_move_if_the_endpoint_is_not_serving,
    datagrams_of_a_removed_service_are_left_alone,
    refused_datagrams_find_the_first_endpoint,
    silent_client_gets_a_new_flow,
    evicted_entry_returns_with_a_datagram_of_the_opposite_direction,
    replies_to_datagrams_of_the_node_are_left_alone,
    server_of_the_node_becomes_a_client_after_the_timeout,
    replies_to_a_load_balancer_address_of_the_node_are_left_alone,
    replies_to_connections_of_the_node_are_left_alone,
    flow_of_a_client_is_not_taken_for_one_of_the_node,
    flow_of_a_client_is_not_taken_for_one_of_the_node_after_its_eviction,
    only_datagrams_from_a_vip_get_a_pass_entry,
}
