//! Entries of flows: the sweep of silent ones, and the copy to new maps.

use std::{net::TcpStream, path::Path, time::Duration};

use aya::maps::{Array, HashMap, MapData};
use proxy_common::{
    Addr,
    layout::{
        Direction, Endpoint, Flow, FlowKey, LAYOUT_VERSION, NodeValue, STATE_LAYOUT_VERSION, flow_state,
    },
};
use proxy_userspace::{
    kernel::clock,
    model::{Dirty, Protocol},
};
use shunt_tests::{deadline::Deadline, process::run_with_timeout};

use crate::bench::{Bench, tcp_server};

const UDP: u8 = 17;

/// A flow that is used so much later does not expire during a test.
const AHEAD_NS: u64 = 600_000_000_000;

pub(crate) fn flow(client_port: u16, used_ns: u64) -> (FlowKey, Flow) {
    let source = Endpoint::new(Addr::from_v4([192, 0, 2, 1]), client_port);
    let destination = Endpoint::new(Addr::from_v4([10, 96, 0, 1]), 53);
    let key = FlowKey { source, destination, proto: UDP, direction: Direction::Original as u8, zero: 0 };
    let destination = Endpoint::new(Addr::from_v4([10, 244, 1, 11]), 53);
    let state = flow_state::REPLIED;
    (key, Flow { source, destination, service: 1, generation: 1, state, acknowledged: 0, used_ns })
}

pub(crate) fn now_ns() -> u64 {
    u64::try_from(clock::monotonic().expect("a clock").as_nanos()).expect("fits")
}

pub(crate) fn flows(bench: &Bench) -> HashMap<MapData, FlowKey, Flow> {
    bench.pinned("flows")
}

#[test]
fn silent_flow_is_removed_and_active_flow_stays() {
    let mut bench = Bench::new();
    bench.sync(&Dirty::everything());
    let mut map = flows(&bench);
    let (silent, silent_flow) = flow(1000, now_ns().saturating_sub(600_000_000_000).max(1));
    let (busy, busy_flow) = flow(2000, now_ns() + AHEAD_NS);
    map.insert(silent, silent_flow, 0).expect("room");
    map.insert(busy, busy_flow, 0).expect("room");
    let removed = Deadline::after(Duration::from_mins(1)).poll(|| map.get(&silent, 0).err());
    assert!(removed.is_some(), "the silent flow is still there");
    assert_eq!(map.get(&busy, 0).expect("still there"), busy_flow);
}

#[test]
fn flows_and_connections_survive_new_maps() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.31:80", &[endpoint]);
    let client = TcpStream::connect(vip).expect("connect");
    let (key, noted) = flow(3000, now_ns() + AHEAD_NS);
    flows(&bench).insert(key, noted, 0).expect("room");
    // First the size of another map, then that of the flow map.
    for change in [
        |bench: &mut Bench| bench.settings.map_sizes.services = 128,
        |bench: &mut Bench| {
            bench.settings.map_sizes.flows = 2048;
        },
        was_of_another_layout,
        pin_node_map_with_larger_value,
    ] {
        change(&mut bench);
        bench.restart();
        bench.sync(&Dirty::everything());
        assert_eq!(flows(&bench).get(&key, 0).expect("taken along"), noted);
        assert_eq!(client.peer_addr().expect("peer"), vip);
        let node: Array<MapData, NodeValue> = bench.pinned("node");
        assert_eq!(node.get(&0, 0).expect("written").layout, LAYOUT_VERSION);
    }
}

/// Leaves what a process of another layout leaves, whose state layout is the same.
fn was_of_another_layout(bench: &mut Bench) {
    let mut node: Array<MapData, NodeValue> = bench.pinned("node");
    let value = node.get(&0, 0).expect("written");
    node.set(0, NodeValue { layout: LAYOUT_VERSION + 1, ..value }, 0).expect("room");
}

fn pin_node_map_with_larger_value(bench: &mut Bench) {
    let pin = bench.settings.pin_dir.join("node");
    let pin_text = pin.display();
    let versions = [LAYOUT_VERSION + 1, STATE_LAYOUT_VERSION].map(u32::to_ne_bytes).concat();
    let value: Vec<String> = versions.iter().chain(&[0; 40]).map(u8::to_string).collect();
    std::fs::remove_file(&pin).expect("pinned");
    for line in [
        format!("map create {pin_text} type array key 4 value {} entries 1 name node", value.len()),
        format!("map update pinned {pin_text} key 0 0 0 0 value {}", value.join(" ")),
    ] {
        let arguments: Vec<&str> = line.split(' ').collect();
        let ran =
            run_with_timeout(Path::new("bpftool"), &arguments, Duration::from_mins(1)).expect("bpftool");
        assert!(ran.status.success(), "{line}: {}", ran.stderr);
    }
}
