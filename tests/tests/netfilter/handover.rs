//! Connections that are handed over to conntrack while it has others with the same addresses.

use std::{net::SocketAddr, time::Duration};

use proxy_userspace::{
    kernel::conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection, Translator},
    model::{IpFamily, Protocol},
};

use crate::node::Node;

const FAMILY: IpFamily = IpFamily::V4;

/// Hands everything over, and counts the connections that go on as before.
#[derive(Default)]
struct All {
    restored: usize,
}

impl Translator for All {
    fn untranslated(&self, _: &TrackedConnection) -> Option<AddressPair> {
        None
    }

    fn hold(&mut self, _: &Connection) -> bool {
        true
    }

    fn release(&mut self, _: &Connection) {}

    fn restore(&mut self, _: &Connection) {
        self.restored += 1;
    }
}

fn pair(source: &str, destination: &str) -> AddressPair {
    let [source, destination]: [SocketAddr; 2] =
        [source, destination].map(|text| text.parse().expect("an address"));
    AddressPair { source, destination }
}

const CLIENT: &str = "192.0.2.1:40000";
const VIP: &str = "10.96.0.80:80";

/// Returns a connection of the client to the VIP that the programs lead to this endpoint.
fn led_to(endpoint: &str, is_assured: bool) -> Connection {
    led(VIP, endpoint, is_assured)
}

fn led(vip: &str, endpoint: &str, is_assured: bool) -> Connection {
    connection(Protocol::Udp, vip, endpoint, is_assured, false)
}

/// Returns a TCP connection of the client to the VIP. Conntrack has a closed one in `TIME_WAIT`.
fn tcp(endpoint: &str, is_closed: bool) -> Connection {
    connection(Protocol::Tcp, VIP, endpoint, true, is_closed)
}

fn connection(
    protocol: Protocol,
    vip: &str,
    endpoint: &str,
    is_assured: bool,
    is_closed: bool,
) -> Connection {
    let (original, untranslated) = (pair(CLIENT, endpoint), pair(CLIENT, vip));
    let tracked = TrackedConnection { protocol, original, reply: original.swapped(), is_dnat: false };
    let expires_after = Duration::from_mins(10);
    Connection::untracked(tracked, untranslated, original.swapped(), expires_after, is_assured, is_closed)
}

fn hand_over(node: &Node, connection: &Connection) -> (HandoverCounts, usize) {
    let mut all = All::default();
    let connections = std::slice::from_ref(connection);
    let counts = node.within(|| conntrack::hand_over_untracked(FAMILY, connections, &mut all));
    (counts, all.restored)
}

fn entries(node: &Node, protocol: Protocol) -> Vec<Connection> {
    let mut found = Vec::new();
    let each = &mut |connection: &Connection| found.push(connection.clone());
    node.within(|| conntrack::for_each_connection(FAMILY, protocol, each));
    found
}

/// Returns the endpoints to which conntrack leads the client.
fn endpoints(node: &Node) -> Vec<String> {
    entries(node, Protocol::Udp).iter().map(|entry| entry.tracked.reply.source.to_string()).collect()
}

fn counts(connections: usize, lost: usize) -> HandoverCounts {
    HandoverCounts { connections, lost }
}

/// A node whose kernel has connection tracking.
fn node() -> Node {
    let node = Node::new();
    node.run(
        "nft",
        &["-f", "-"],
        "table inet t { chain c { type filter hook output priority 0; ct state new; }; }",
    );
    node
}

#[test]
fn connection_that_netfilter_translates_is_not_replaced_by_one_with_the_same_addresses() {
    let node = node();
    assert_eq!(hand_over(&node, &led_to("10.1.0.1:8080", true)), (counts(1, 0), 0));
    assert_eq!(hand_over(&node, &led_to("10.1.0.2:8080", true)), (counts(0, 1), 1));
    assert_eq!(endpoints(&node), ["10.1.0.1:8080"]);
}

/// A packet that was not held back found rules, and nothing or a wrong endpoint answered.
#[test]
fn entry_of_a_packet_that_was_not_held_back_is_replaced() {
    let node = node();
    hand_over(&node, &led_to("10.1.0.1:8080", false));
    assert_eq!(hand_over(&node, &led_to("10.1.0.2:8080", true)), (counts(1, 0), 0));
    assert_eq!(endpoints(&node), ["10.1.0.2:8080"]);
    let same = led_to("10.1.0.2:8080", true);
    assert_eq!(hand_over(&node, &same), (counts(1, 0), 0), "conntrack has it already");
}

/// The entry that was read is gone, and conntrack has another one with the same addresses.
#[test]
fn entry_that_replaced_the_one_that_was_read_stays() {
    let node = node();
    let direct = led_to("10.1.0.1:8080", true);
    node.within(|| conntrack::track(FAMILY, std::slice::from_ref(&direct)));
    let to_vip = |_: &TrackedConnection| Some(pair(CLIENT, VIP));
    let read = node.within(|| conntrack::find_connections(FAMILY, Protocol::Udp, &mut { to_vip }));
    assert_eq!(read.len(), 1);
    assert_eq!(hand_over(&node, &direct), (counts(1, 0), 0));
    // The client takes the endpoint's address for a VIP, which conntrack translates.
    assert_eq!(hand_over(&node, &led("10.1.0.1:8080", "10.1.0.9:8080", true)), (counts(1, 0), 0));
    node.within(|| conntrack::replace_entries(FAMILY, &read));
    let mut left = endpoints(&node);
    left.sort();
    assert_eq!(left, ["10.1.0.1:8080", "10.1.0.9:8080"]);
}

/// Returns the endpoints to which conntrack leads the client's TCP connections, and whether these
/// are over.
fn connections(node: &Node) -> Vec<(String, bool)> {
    let entries = entries(node, Protocol::Tcp);
    entries.iter().map(|entry| (entry.tracked.reply.source.to_string(), entry.is_over())).collect()
}

/// The client used its port again.
#[test]
fn an_entry_in_time_wait_does_not_keep_a_connection_from_its_handover() {
    let node = node();
    assert_eq!(hand_over(&node, &tcp("10.1.0.1:8080", true)), (counts(1, 0), 0));
    assert_eq!(connections(&node), [("10.1.0.1:8080".to_owned(), true)]);
    assert_eq!(hand_over(&node, &tcp("10.1.0.2:8080", false)), (counts(1, 0), 0));
    assert_eq!(connections(&node), [("10.1.0.2:8080".to_owned(), false)]);
    assert_eq!(hand_over(&node, &tcp("10.1.0.1:8080", true)), (counts(0, 1), 1), "the live one stays");
    assert_eq!(connections(&node), [("10.1.0.2:8080".to_owned(), false)]);
}

/// The last segments of both sides may still come.
#[test]
fn a_connection_in_time_wait_is_handed_over_as_one_that_is_over() {
    let node = node();
    let closed = tcp("10.1.0.1:8080", true);
    node.within(|| conntrack::track(FAMILY, std::slice::from_ref(&closed)));
    let to_vip = |_: &TrackedConnection| Some(pair(CLIENT, VIP));
    let read = node.within(|| conntrack::find_connections(FAMILY, Protocol::Tcp, &mut { to_vip }));
    assert_eq!(read.len(), 1);
    assert_eq!(node.within(|| conntrack::replace_entries(FAMILY, &read)), counts(1, 0));
    assert_eq!(connections(&node), [("10.1.0.1:8080".to_owned(), true)]);
    let entry = &entries(&node, Protocol::Tcp)[0].tracked;
    assert!(entry.is_dnat && entry.original == pair(CLIENT, VIP), "{entry:?}");
}
