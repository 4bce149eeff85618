//! Entries of flows: the sweep of silent ones, and the copy to new maps.

use std::{
    net::{SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use aya::maps::{Array, HashMap, MapData};
use proxy_common::{
    Addr,
    layout::{
        Direction, Endpoint, Flow, FlowKey, LAYOUT_VERSION, NodeValue, STATE_LAYOUT_VERSION, flow_state,
    },
    prefilter::PrefilterBit,
};
use proxy_userspace::{
    dataplane::Dataplane as _,
    kernel::clock,
    model::{Dirty, Protocol},
};
use shunt_tests::{deadline::Deadline, process::run_with_timeout};

use crate::bench::{Bench, tcp_server};

const UDP: u8 = 17;

fn flow(client_port: u16, used_ns: u64) -> (FlowKey, Flow) {
    let source = Endpoint::new(Addr::from_v4([192, 0, 2, 1]), client_port);
    let destination = Endpoint::new(Addr::from_v4([10, 96, 0, 1]), 53);
    let key = FlowKey { source, destination, proto: UDP, direction: Direction::Original as u8, zero: 0 };
    let destination = Endpoint::new(Addr::from_v4([10, 244, 1, 11]), 53);
    let state = flow_state::REPLIED;
    (key, Flow { source, destination, service: 1, generation: 1, state, acknowledged: 0, used_ns })
}

fn now_ns() -> u64 {
    u64::try_from(clock::monotonic().expect("a clock").as_nanos()).expect("fits")
}

fn flows(bench: &Bench) -> HashMap<MapData, FlowKey, Flow> {
    bench.pinned("flows")
}

#[test]
fn silent_flow_is_removed_and_active_flow_stays() {
    let mut bench = Bench::new();
    bench.sync(&Dirty::everything());
    let mut map = flows(&bench);
    let (silent, silent_flow) = flow(1000, now_ns().saturating_sub(600_000_000_000).max(1));
    let (busy, busy_flow) = flow(2000, now_ns());
    map.insert(silent, silent_flow, 0).expect("room");
    map.insert(busy, busy_flow, 0).expect("room");
    let removed = Deadline::after(Duration::from_mins(1)).poll(|| map.get(&silent, 0).err());
    assert!(removed.is_some(), "the silent flow is still there");
    assert_eq!(map.get(&busy, 0).expect("still there"), busy_flow);
}

fn prefilter_contains(bench: &Bench, PrefilterBit { word, mask }: PrefilterBit) -> bool {
    let prefilter: Array<MapData, u64> = bench.pinned("prefilter");
    prefilter.get(&word, 0).expect("in it") & mask != 0
}

/// Returns the prefilter bit of a frontend.
fn service_bit(address: SocketAddr) -> PrefilterBit {
    PrefilterBit::of_service(&address.ip().into(), address.port())
}

#[test]
fn prefilter_bits_stay_while_flows_and_sockets_need_them() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let (_other_server, other_endpoint) = tcp_server("127.0.0.1:0");
    let [stays, goes, has_flow, has_socket] =
        ["10.96.0.41:80", "10.96.0.42:80", "10.96.0.1:53", "10.96.0.44:80"].map(|address| {
            let endpoint = if address == "10.96.0.44:80" { other_endpoint } else { endpoint };
            bench.serve(Protocol::Tcp, address, &[endpoint])
        });
    let client = TcpStream::connect(has_socket).expect("connect");
    // Its last packet is in the future, so it does not expire during the test.
    let (key, noted) = flow(4000, now_ns() + 600_000_000_000);
    assert_eq!(key.destination, Endpoint::new(has_flow.ip().into(), has_flow.port()));
    flows(&bench).insert(key, noted, 0).expect("room");
    bench.snapshot.ports.retain(|_, port| port.frontends[0].address == Some(stays.ip()));
    bench.sync(&Dirty::everything());
    let endpoint_place = |at: SocketAddr| PrefilterBit::of_endpoint(&at.ip().into(), at.port());
    let all = [
        service_bit(stays),
        service_bit(goes),
        service_bit(has_flow),
        endpoint_place(endpoint),
        endpoint_place(other_endpoint),
    ];
    assert_eq!(all.map(|place| prefilter_contains(&bench, place)), [true; 5], "they may have flows");
    // Every syncPeriod does this.
    let mut verify = || {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(bench.verify(), 0);
        (!prefilter_contains(&bench, service_bit(goes))).then_some(())
    };
    assert!(Deadline::after(Duration::from_mins(1)).poll(&mut verify).is_some(), "the bit is never cleared");
    assert_eq!(all.map(|place| prefilter_contains(&bench, place)), [true, false, true, true, true]);
    assert_eq!(client.peer_addr().expect("peer"), has_socket);
    bench.serve(Protocol::Tcp, "10.96.0.42:80", &[endpoint]);
    assert!(prefilter_contains(&bench, service_bit(goes)), "it is back");
    TcpStream::connect(goes).expect("and works");
    let fill = bench.dataplane.as_ref().expect("running").map_fill(&bench.state);
    let entries = |map: &str| fill.iter().find(|fill| fill.map == map).map(|fill| fill.entries);
    assert_eq!((entries("flows"), entries("fragments")), (Some(1), Some(0)));
    assert!(entries("tcp_connections").is_some_and(|entries| entries >= 1), "{fill:?}");
}

#[test]
fn flows_and_connections_survive_new_maps() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.31:80", &[endpoint]);
    let client = TcpStream::connect(vip).expect("connect");
    let (key, noted) = flow(3000, now_ns());
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
            run_with_timeout(Path::new("bpftool"), &arguments, Duration::from_secs(10)).expect("bpftool");
        assert!(ran.status.success(), "{line}: {}", ran.stderr);
    }
}
