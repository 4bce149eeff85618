//! What the link programs still translate after their flows are handed over to conntrack: nothing.

use std::{fs, thread, time::Duration};

use aya::maps::{Array, HashMap, Map, MapData};
use proxy_common::{
    layout::{
        Direction, Endpoint, Flow, FlowKey, LAYOUT_VERSION, NodeValue, STATE_LAYOUT_VERSION, ServiceKey,
        ServiceValue, flow_state,
    },
    packet::Tuple,
};
use proxy_userspace::{
    dataplane::ebpf::{Ebpf, LinkAttachment},
    kernel::{
        clock,
        conntrack::{self, AddressPair},
    },
    model::{IpFamily, Protocol},
};

use crate::bench::{Bench, run};

type Flows = HashMap<MapData, FlowKey, Flow>;

/// Opens a map of flows.
fn flows(bench: &Bench, map: &str) -> Flows {
    let data = MapData::from_pin(bench.settings.pin_dir.join(map)).expect("pinned");
    Map::from_map_data(data).and_then(Flows::try_from).expect("a map of flows")
}

fn endpoint(text: &str) -> Endpoint {
    Endpoint::from(text.parse::<std::net::SocketAddr>().expect("an address and port"))
}

/// Writes both entries of a flow that was silent for this long. Returns their keys.
fn put_flow(bench: &Bench, protocol: Protocol, client: &str, silent: Duration, state: u32) -> [FlowKey; 2] {
    let now = clock::monotonic().expect("the clock");
    put_flow_used_at(bench, protocol, client, now.saturating_sub(silent), state)
}

fn put_flow_used_at(
    bench: &Bench,
    protocol: Protocol,
    client: &str,
    used: Duration,
    state: u32,
) -> [FlowKey; 2] {
    let [client, vip, backend] = [client, "10.96.0.80:80", "10.1.0.1:8080"].map(endpoint);
    let tuple = Tuple { source: client, destination: vip };
    let of_client = FlowKey::new(Direction::Original, protocol, tuple);
    let used_ns = clock::nanos(used).max(1);
    let flow = Flow { source: client, destination: backend, service: 1, state, used_ns, ..Flow::NONE };
    let of_endpoint = flow.opposite_key(&of_client);
    let map = if state & flow_state::ASSURED == 0 { "unassured_flows" } else { "flows" };
    let mut flows = flows(bench, map);
    flows.insert(of_client, flow, 0).expect("inserted");
    flows.insert(of_endpoint, flow.opposite(&of_client), 0).expect("inserted");
    [of_client, of_endpoint]
}

/// Waits until a flow may have been silent for this long. Only the kernel of a guest is that young.
fn wait_for_uptime(uptime: Duration) {
    thread::sleep(uptime.saturating_sub(clock::monotonic().expect("the clock")));
}

/// Returns the state of an entry in either map.
fn state_of(bench: &Bench, key: &FlowKey) -> Option<u32> {
    ["flows", "unassured_flows"]
        .iter()
        .find_map(|map| flows(bench, map).get(key, 0).ok())
        .map(|flow| flow.state)
}

/// A client may use the port of a conversation that ended for another one. With the entries of the
/// first one, the programs would translate the second one until they leave the link, and netfilter
/// would then give it another endpoint.
#[test]
fn flows_that_stay_behind_are_removed_so_that_later_packets_find_netfilter() {
    const OPEN: u32 = flow_state::REPLIED | flow_state::ASSURED;
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let seconds = Duration::from_secs;
    let put = |protocol, client, silent, state| put_flow(&bench, protocol, client, seconds(silent), state);
    wait_for_uptime(seconds(40));
    let ended = put(Protocol::Udp, "192.0.2.1:40001", 40, OPEN);
    let unanswered = put(Protocol::Udp, "192.0.2.1:40002", 5, 0);
    let forged = put(Protocol::Tcp, "192.0.2.1:40003", 5, 0);
    let recent = put(Protocol::Udp, "192.0.2.1:40004", 1, OPEN);
    let idle = put(Protocol::Tcp, "192.0.2.1:40005", 600, OPEN);
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (2, 0));
    for key in [ended, unanswered, forged].as_flattened() {
        assert_eq!(state_of(&bench, key), None, "{key:?}");
    }
    for [of_client, _] in [recent, idle] {
        let state = state_of(&bench, &of_client).expect("an entry");
        assert!(state & flow_state::PASS != 0 && state & flow_state::HELD == 0, "{state:#x}");
    }
}

/// A segment of the endpoint restores the entry.
#[test]
fn connection_whose_entry_for_replies_was_evicted_is_handed_over() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let open = flow_state::REPLIED | flow_state::ASSURED;
    let [of_client, of_endpoint] =
        put_flow(&bench, Protocol::Tcp, "192.0.2.1:40001", Duration::from_secs(1), open);
    flows(&bench, "flows").remove(&of_endpoint).expect("removed");
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (1, 0));
    assert!(state_of(&bench, &of_client).is_some_and(|state| state & flow_state::PASS != 0));
}

/// The map of assured flows may be full and evict its entry. One in the other map would count then.
#[test]
fn flow_that_conntrack_has_has_no_entry_among_those_that_are_not_assured() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let [of_client, _] =
        put_flow(&bench, Protocol::Udp, "192.0.2.1:40001", Duration::from_secs(1), flow_state::REPLIED);
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (1, 0));
    assert!(flows(&bench, "flows").get(&of_client, 0).is_ok_and(|flow| flow.state & flow_state::PASS != 0));
    assert!(flows(&bench, "unassured_flows").get(&of_client, 0).is_err());
}

/// Conntrack never had it: no packet of a whole flow goes through the stack.
#[test]
fn flow_with_twice_nat_is_handed_over_with_its_source() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let open = flow_state::REPLIED | flow_state::ASSURED | flow_state::MASQUERADE;
    let [of_client, of_endpoint] =
        put_flow(&bench, Protocol::Tcp, "192.0.2.1:40001", Duration::from_secs(1), open);
    let mut map = flows(&bench, "flows");
    let listed = map.get(&of_client, 0).expect("an entry");
    let twice = flow_state::WHOLE | flow_state::TWICE_NAT;
    let flow = Flow { source: endpoint("192.0.2.9:20001"), state: listed.state | twice, ..listed };
    let of_node = flow.opposite_key(&of_client);
    map.insert(of_client, flow, 0).expect("inserted");
    map.insert(of_node, flow.opposite(&of_client), 0).expect("inserted");
    map.remove(&of_endpoint).expect("removed");
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (1, 0));
    assert!(state_of(&bench, &of_client).is_some_and(|state| state & flow_state::PASS != 0));
    assert_eq!(state_of(&bench, &of_node), None, "conntrack translates the replies");
    let mut entries = Vec::new();
    conntrack::for_each_connection(IpFamily::V4, Protocol::Tcp, &mut |connection| {
        entries.push(connection.tracked);
    })
    .expect("conntrack is read");
    let pair = |source: &str, destination: &str| AddressPair {
        source: source.parse().expect("an address and port"),
        destination: destination.parse().expect("an address and port"),
    };
    let original = pair("192.0.2.1:40001", "10.96.0.80:80");
    let reply = pair("10.1.0.1:8080", "192.0.2.9:20001");
    assert!(entries.iter().any(|entry| (entry.original, entry.reply) == (original, reply)), "{entries:?}");
}

/// Conntrack has it in `TIME_WAIT`. The last segments of both sides may still come.
#[test]
fn connection_that_both_sides_have_just_closed_is_handed_over() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let open = flow_state::REPLIED | flow_state::ASSURED;
    let closed = open | flow_state::CLIENT_CLOSED | flow_state::ENDPOINT_CLOSED;
    // A time to come, so that two seconds of it are not over when the entries are read.
    let used = clock::monotonic().expect("the clock") + Duration::from_mins(1);
    let [of_client, _] = put_flow_used_at(&bench, Protocol::Tcp, "192.0.2.1:40001", used, closed);
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (1, 0));
    assert!(state_of(&bench, &of_client).is_some_and(|state| state & flow_state::PASS != 0));
}

/// An upgrade may change the mode too. The map `node` of an older version has another size.
#[test]
fn flows_of_programs_with_a_smaller_node_map_are_handed_over() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let open = flow_state::REPLIED | flow_state::ASSURED;
    let [of_client, _] = put_flow(&bench, Protocol::Tcp, "192.0.2.1:40001", Duration::from_secs(1), open);
    let node = bench.settings.pin_dir.join("node");
    fs::remove_file(&node).expect("pinned");
    let node = node.to_str().expect("a path");
    run(
        "bpftool",
        &["map", "create", node, "type", "array", "key", "4", "value", "56", "entries", "1", "name", "node"],
    );
    let mut value = [0; 56];
    value[..4].copy_from_slice(&(LAYOUT_VERSION - 1).to_ne_bytes());
    value[4..8].copy_from_slice(&STATE_LAYOUT_VERSION.to_ne_bytes());
    let bytes = value.map(|byte: u8| byte.to_string());
    let update = ["map", "update", "pinned", node, "key", "0", "0", "0", "0", "value"];
    run("bpftool", &update.into_iter().chain(bytes.iter().map(String::as_str)).collect::<Vec<_>>());
    let counts = Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!((counts.connections, counts.lost), (1, 0));
    assert!(state_of(&bench, &of_client).is_some_and(|state| state & flow_state::PASS != 0));
}

/// Another version may have other fields at the same place.
#[test]
fn node_map_of_another_version_is_not_written_and_its_services_are_removed() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.sync();
    let data = MapData::from_pin(bench.settings.pin_dir.join("node")).expect("pinned");
    let mut node: Array<MapData, NodeValue> =
        Map::from_map_data(data).and_then(Array::try_from).expect("the map node");
    let other = NodeValue { layout: LAYOUT_VERSION - 1, ..node.get(&0, 0).expect("a value") };
    node.set(0, other, 0).expect("written");
    let data = MapData::from_pin(bench.settings.pin_dir.join("services")).expect("pinned");
    let mut services: HashMap<MapData, ServiceKey, [u8; size_of::<ServiceValue>()]> =
        Map::from_map_data(data).and_then(HashMap::try_from).expect("the map services");
    let key = ServiceKey::new(endpoint("10.96.0.80:80").addr, 80, Protocol::Tcp);
    services.insert(key, [0; _], 0).expect("inserted");
    Ebpf::hand_over(&bench.settings.pin_dir).expect("handed over");
    assert_eq!(node.get(&0, 0).expect("a value"), other);
    assert_eq!(services.keys().count(), 0);
}
