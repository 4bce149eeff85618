//! The choice of an endpoint by a Maglev table.

use std::{collections::BTreeSet, net::SocketAddr, vec::Vec};

use super::{Fixture, PROTOCOLS, addr, first, ports};
use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, Endpoint, List, LocalDetection, MaglevKey, MaglevPage},
    maglev::TableSize,
    packet::TcpFlags,
    testing::{StateMaps, TestNode, TestPacket},
};

/// The number of endpoints: so many that random choices differ.
const ENDPOINTS: u16 = 100;

fn small() -> TableSize {
    TableSize::of_entries(251).expect("a size")
}

/// Adds a service port of many endpoints for clients outside, whose table has this slot in each
/// entry. The table of its other list has another.
fn add_service(node: &mut TestNode<'_>, protocol: Protocol, slot_of: impl Fn(u32) -> u16) -> Fixture {
    let mut fixture = Fixture::new(node, protocol);
    let endpoints: Vec<_> = (0..ENDPOINTS).map(|slot| addr(node.ip.pod, 1000 + slot)).collect();
    fixture.service = fixture.service.with_outside(&endpoints).with_flags(small().flags());
    let service = fixture.service.value.service;
    for page in 0..small().pages() {
        let mut own = MaglevPage::EMPTY;
        for (entry, slot) in (page * MaglevPage::SLOTS..small().entries()).zip(&mut own.slots) {
            *slot = slot_of(entry);
        }
        let key = MaglevKey { service, list: List::Local.number(), size: small().entries(), page };
        let other = MaglevPage { slots: [ENDPOINTS - 1; MaglevPage::SLOTS as usize] };
        let others = [
            MaglevKey { list: List::Cluster.number(), ..key },
            MaglevKey { size: 509, ..key },
            MaglevKey { service: service + 1, ..key },
        ];
        node.config.maglev.extend(others.map(|key| (key, other)));
        node.config.maglev.insert(key, own);
    }
    node.put_service(&fixture.service);
    fixture
}

/// Returns the endpoints of new flows from many ports of a client.
fn endpoints_of(node: &mut TestNode<'_>, protocol: Protocol, fixture: &Fixture) -> Vec<Endpoint> {
    let endpoint = |port| {
        let packet = first(protocol, addr(node.ip.client, port), fixture.vip);
        endpoint_of(node, &packet)
    };
    (40_000..40_040).map(endpoint).collect()
}

fn endpoint_of(node: &mut TestNode<'_>, packet: &TestPacket) -> Endpoint {
    node.ingress(packet);
    let flow = node.flow(Direction::Original, packet).expect("a flow");
    // The next packet of the client begins a flow again.
    node.evict_flow(Direction::Original, packet);
    let reply = packet.clone().to(flow.destination.into()).reversed();
    node.evict_flow(Direction::Reply, &reply);
    flow.destination
}

fn client_gets_the_slot_that_the_table_names(node: &mut TestNode<'_>) {
    for protocol in PROTOCOLS {
        for slot in [0, 7, ENDPOINTS - 1] {
            let fixture = add_service(node, protocol, |_| slot);
            let expected = Endpoint::from(addr(node.ip.pod, 1000 + slot));
            let endpoints = endpoints_of(node, protocol, &fixture);
            assert!(endpoints.iter().all(|endpoint| *endpoint == expected), "{endpoints:?}");
        }
    }
}

fn each_client_has_its_own_place_and_finds_it_again(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |entry| u16::try_from(entry).unwrap_or(0) % ENDPOINTS);
    let endpoints = endpoints_of(node, Protocol::Tcp, &fixture);
    assert_eq!(endpoints_of(node, Protocol::Tcp, &fixture), endpoints);
    let different: BTreeSet<_> = endpoints.iter().collect();
    assert!(different.len() > 20, "40 ports have {} endpoints", different.len());
}

/// A page may be missing, and a slot may be gone, while userspace writes the table.
fn client_gets_an_endpoint_of_the_list_without_its_table(node: &mut TestNode<'_>) {
    for slot in [ENDPOINTS, MaglevPage::NO_SLOT] {
        let fixture = add_service(node, Protocol::Udp, |_| slot);
        let endpoints = endpoints_of(node, Protocol::Udp, &fixture);
        node.config.maglev.clear();
        node.write_maps();
        assert_eq!(endpoints_of(node, Protocol::Udp, &fixture), endpoints, "the client decides");
        let different: BTreeSet<_> = endpoints.iter().collect();
        assert!(different.len() > 20, "40 ports have {} endpoints", different.len());
    }
}

fn with_affinity_all_ports_of_a_client_have_one_place(node: &mut TestNode<'_>) {
    let mut fixture = add_service(node, Protocol::Tcp, |entry| u16::try_from(entry).unwrap_or(0) % ENDPOINTS);
    fixture.service.value.affinity_seconds = 60;
    node.put_service(&fixture.service);
    let of_port = |node: &mut TestNode<'_>, port| {
        node.wait(61);
        endpoint_of(node, &fixture.first.clone().from(addr(node.ip.client, port)))
    };
    let one = of_port(node, 40_000);
    for port in 40_001..40_010 {
        assert_eq!(of_port(node, port), one, "after the timeout, as at another node");
    }
}

fn make_client_local(node: &mut TestNode<'_>) {
    node.config.node.local_detection = LocalDetection::Source as u32;
    node.config.local_sources.insert((Addr::from(node.ip.client), Addr::BITS));
    node.write_maps();
}

fn local_clients_do_not_use_the_table(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    make_client_local(node);
    assert_eq!(endpoint_of(node, &fixture.first), fixture.endpoint.into(), "the only one of the other list");
}

/// Opens a connection, and returns its endpoint.
fn established(node: &mut TestNode<'_>, fixture: &Fixture) -> SocketAddr {
    node.ingress(&fixture.first);
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    let endpoint = flow.destination.into();
    let answer = fixture.reply_from(endpoint);
    node.egress(&answer).becomes(&answer.clone().from(fixture.vip));
    node.ingress(&fixture.next()).becomes(&fixture.next().to(endpoint));
    assert_eq!(node.assured_flow_count(), 2);
    endpoint
}

/// Makes the node one that does not know any flow.
fn forget_flows(node: &mut TestNode<'_>) {
    node.set_state(&StateMaps::default());
}

fn connection_goes_on_after_its_flow_is_lost(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |entry| u16::try_from(entry).unwrap_or(0) % ENDPOINTS);
    let endpoint = established(node, &fixture);
    forget_flows(node);
    let next = fixture.next();
    node.ingress(&next).becomes(&next.clone().to(endpoint)).is_marked(0);
    assert_eq!(node.assured_flow_count(), 0, "anybody may have sent the segment");
    let answer = fixture.reply_from(endpoint).flags(TcpFlags::ACK_ALONE);
    node.egress(&answer).becomes(&answer.clone().from(fixture.vip));
    node.ingress(&next).becomes(&next.clone().to(endpoint));
    assert_eq!(node.assured_flow_count(), 2, "the client acknowledged as much as before");
    assert_eq!(node.counter(Counter::UnknownConnection), 0);
}

/// The last acknowledgement of a client, for instance, while its connection is in `LAST_ACK`.
fn closed_connection_of_conntrack_goes_on_with_its_client_port(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    let endpoint = established(node, &fixture);
    ports::hand_over_closed(node);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(endpoint));
}

fn endpoint_that_does_not_know_an_adopted_connection_resets_it(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    let endpoint = addr(node.ip.pod, 1007);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(endpoint));
    let reset = fixture.reply_from(endpoint).flags(TcpFlags::RST_ALONE);
    node.egress(&reset).becomes(&reset.clone().from(fixture.vip));
    let flow = node.flow(Direction::Original, &fixture.first).expect("a flow");
    assert!(flow.is_closed(), "{flow:?}");
    node.ingress(&fixture.next());
    assert_eq!(node.assured_flow_count(), 0, "anybody may have sent both segments");
}

fn only_segments_with_an_acknowledgement_are_adopted(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    for flags in [TcpFlags::SYN_ACK, TcpFlags(0), TcpFlags(0x08)] {
        node.ingress(&fixture.first.clone().flags(flags)).is_refused();
    }
    assert_eq!(node.flow_count(), 0);
}

fn unknown_connection_to_the_only_endpoint_is_adopted(node: &mut TestNode<'_>) {
    let mut fixture = add_service(node, Protocol::Tcp, |_| 0);
    fixture.service = fixture.service.with_outside(&[fixture.endpoint]);
    node.config.maglev.clear();
    node.put_service(&fixture.service);
    node.ingress(&fixture.next()).becomes(&fixture.next().to(fixture.endpoint));
}

fn reset_of_an_unknown_connection_begins_no_flow(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    node.ingress(&fixture.first.clone().flags(TcpFlags::RST_ALONE)).is_left_alone();
    assert_eq!(node.flow_count(), 0);
}

fn unknown_connection_of_a_local_client_is_refused(node: &mut TestNode<'_>) {
    let fixture = add_service(node, Protocol::Tcp, |_| 7);
    make_client_local(node);
    node.ingress(&fixture.next()).is_refused();
    assert_eq!(node.flow_count(), 0);
}

super::scenarios! {
    client_gets_the_slot_that_the_table_names,
    each_client_has_its_own_place_and_finds_it_again,
    client_gets_an_endpoint_of_the_list_without_its_table,
    with_affinity_all_ports_of_a_client_have_one_place,
    local_clients_do_not_use_the_table,
    connection_goes_on_after_its_flow_is_lost,
    closed_connection_of_conntrack_goes_on_with_its_client_port,
    endpoint_that_does_not_know_an_adopted_connection_resets_it,
    reset_of_an_unknown_connection_begins_no_flow,
    unknown_connection_of_a_local_client_is_refused,
    only_segments_with_an_acknowledgement_are_adopted,
    unknown_connection_to_the_only_endpoint_is_adopted,
}
