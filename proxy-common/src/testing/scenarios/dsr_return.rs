//! Direct server return: packets of endpoints go back through the tunnel, to the node that the
//! client reached. The kernel cannot run a packet that came through the tunnel, so the entries
//! that such a packet leaves are written here.

use std::vec::Vec;

use super::{
    Fixture, PROTOCOLS,
    dsr::{LONGEST, of_length, set_tunnel},
    errors::{error_about, kinds, with_checksum_of},
};
use crate::{
    Protocol::{self, Tcp, Udp},
    layout::{Counter, FlowKey, flow_state},
    testing::{Payload, TestNode, TestPacket},
};

/// Adds a flow whose client reached the router, which is a node.
fn add_flow(node: &mut TestNode<'_>, protocol: Protocol) -> Fixture {
    let fixture = Fixture::new(node, protocol);
    set_tunnel(node);
    node.write_maps();
    node.ingress(&fixture.first);
    let mut state = node.state();
    state.all_flows_mut().for_each(|flow| flow.state |= flow_state::RETURN);
    let router = node.ip.router.into();
    let keys: Vec<FlowKey> = state.unassured_flows.keys().copied().collect();
    state.dsr_returns.extend(keys.into_iter().map(|key| (key, router)));
    node.set_state(&state);
    fixture
}

fn packets_of_endpoints_go_back_through_the_tunnel(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_flow(node, protocol);
        let reply = fixture.reply();
        node.egress(&reply).is_redirected_as(&reply.clone().from(fixture.vip));
        assert_eq!(node.counter(Counter::SentThroughTunnel), 1);
        let service = fixture.service.value.service;
        assert!(node.service_counts(service).bytes_to_clients > 0);
    }
}

fn packets_go_to_the_client_itself_if_its_node_is_forgotten(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_flow(node, protocol);
        let reply = fixture.reply();
        let mut state = node.state();
        state.dsr_returns.clear();
        node.set_state(&state);
        node.egress(&reply).becomes(&reply.clone().from(fixture.vip));
    }
}

fn packets_of_other_flows_do_not_go_through_the_tunnel(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        let fixture = add_flow(node, protocol);
        let mut state = node.state();
        state.all_flows_mut().for_each(|flow| flow.state &= !flow_state::RETURN);
        node.set_state(&state);
        node.egress(&fixture.reply()).becomes(&fixture.reply().from(fixture.vip));
    }
}

/// Returns a packet with so much data that it has fragments.
fn with_data(mut packet: TestPacket) -> TestPacket {
    if let Payload::Tcp { data, .. } | Payload::Udp { data } = &mut packet.payload {
        *data = (0..100).collect();
    }
    packet
}

fn all_fragments_of_endpoints_go_back_through_the_tunnel(node: &mut TestNode<'_>) {
    let fixture = add_flow(node, Udp);
    let reply = with_data(fixture.reply());
    let translated = reply.clone().from(fixture.vip);
    for part in [0..40, 40..64, 64..usize::MAX] {
        let fragment = reply.clone().fragment(77, part.clone());
        node.egress(&fragment).is_redirected_as(&translated.clone().fragment(77, part));
    }
    assert_eq!(node.counter(Counter::SentThroughTunnel), 3);
}

fn errors_of_endpoints_go_back_through_the_tunnel(node: &mut TestNode<'_>) {
    let ip = node.ip;
    for protocol in PROTOCOLS {
        let fixture = add_flow(node, protocol);
        let packet = fixture.next();
        let translated = with_checksum_of(packet.clone().to(fixture.endpoint), &packet);
        for kind in kinds(&ip) {
            let error = error_about(kind, fixture.endpoint.ip(), ip.client, translated.clone(), 8);
            let expected = error_about(kind, fixture.vip.ip(), ip.client, packet.clone(), 8);
            node.egress(&error).is_redirected_as(&expected);
        }
        let mut state = node.state();
        state.dsr_returns.clear();
        node.set_state(&state);
        let kind = kinds(&ip)[0];
        let error = error_about(kind, fixture.endpoint.ip(), ip.client, translated, 8);
        node.egress(&error).becomes(&error_about(kind, fixture.vip.ip(), ip.client, packet, 8));
    }
}

fn packets_that_just_fit_go_back_through_the_tunnel(node: &mut TestNode<'_>) {
    let fixture = add_flow(node, Tcp);
    let fits = of_length(fixture.reply(), LONGEST);
    node.egress(&fits).is_redirected_as(&fits.clone().from(fixture.vip));
    assert_eq!(node.counter(Counter::TooLongForTunnel), 0);
}

super::scenarios! {
    packets_of_endpoints_go_back_through_the_tunnel,
    packets_go_to_the_client_itself_if_its_node_is_forgotten,
    packets_of_other_flows_do_not_go_through_the_tunnel,
    all_fragments_of_endpoints_go_back_through_the_tunnel,
    errors_of_endpoints_go_back_through_the_tunnel,
    packets_that_just_fit_go_back_through_the_tunnel,
}
