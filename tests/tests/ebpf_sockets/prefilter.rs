//! The prefilter of a process: which bits it clears, and how its size follows the Services.

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use aya::maps::MapData;
use proxy_common::{
    layout::Endpoint,
    prefilter::{
        MIN_WORDS, PrefilterItem, PrefilterTable,
        sized::{PrefilterMemory as _, words_in_use},
    },
};
use proxy_userspace::{
    dataplane::Dataplane as _,
    kernel::bpf::MappedWords,
    model::{Dirty, Protocol},
};
use shunt_tests::deadline::Deadline;

use crate::{
    bench::{Bench, key, port, tcp_server},
    flows::{flow, flows, now_ns},
};

fn prefilter(bench: &Bench) -> MappedWords {
    let map = MapData::from_pin(bench.settings.pin_dir.join("prefilter")).expect("pinned");
    MappedWords::new(map.fd(), PrefilterTable::LENGTH).expect("it can be mapped")
}

fn prefilter_contains(bench: &Bench, item: PrefilterItem) -> bool {
    contains(&prefilter(bench), item)
}

fn contains(prefilter: &MappedWords, item: PrefilterItem) -> bool {
    prefilter.word(item.index(words_in_use(prefilter) - 1)) & item.bits() == item.bits()
}

/// Returns the item of a frontend.
fn service_item(address: SocketAddr) -> PrefilterItem {
    PrefilterItem::of_service(&address.ip().into(), address.port())
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
    let all = [
        service_item(stays),
        service_item(goes),
        service_item(has_flow),
        endpoint_item(endpoint),
        endpoint_item(other_endpoint),
    ];
    assert_eq!(all.map(|place| prefilter_contains(&bench, place)), [true; 5], "they may have flows");
    // Every syncPeriod does this.
    let mut verify = || {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(bench.verify(), 0);
        (!prefilter_contains(&bench, service_item(goes))).then_some(())
    };
    assert!(Deadline::after(Duration::from_mins(1)).poll(&mut verify).is_some(), "the bit is never cleared");
    assert_eq!(all.map(|place| prefilter_contains(&bench, place)), [true, false, true, true, true]);
    assert_eq!(client.peer_addr().expect("peer"), has_socket);
    bench.serve(Protocol::Tcp, "10.96.0.42:80", &[endpoint]);
    assert!(prefilter_contains(&bench, service_item(goes)), "it is back");
    TcpStream::connect(goes).expect("and works");
    let fill = bench.dataplane.as_ref().expect("running").map_fill(&bench.state);
    let entries = |map: &str| fill.iter().find(|fill| fill.map == map).map(|fill| fill.entries);
    assert_eq!((entries("flows"), entries("fragments")), (Some(1), Some(0)));
    assert!(entries("tcp_connections").is_some_and(|entries| entries >= 1), "{fill:?}");
}

fn endpoint_item(address: SocketAddr) -> PrefilterItem {
    PrefilterItem::of_endpoint(&address.ip().into(), address.port())
}

const SERVICES: u16 = 3_000;

/// Returns a bench with room for so many Services.
fn large_bench() -> Bench {
    let mut bench = Bench::new();
    bench.settings.map_sizes.services = u32::from(SERVICES) * 2;
    bench.settings.map_sizes.endpoints = u32::from(SERVICES) * 2;
    bench.restart();
    bench.sync(&Dirty::everything());
    bench
}

fn vip(number: u16) -> SocketAddr {
    let [high, low] = number.to_be_bytes();
    ([10, 97, high, low], 80).into()
}

/// Adds some of the Services to the Snapshot.
fn add(bench: &mut Bench, numbers: std::ops::Range<u16>, endpoint: SocketAddr) {
    for vip in numbers.map(vip) {
        let name = key(&vip.to_string(), Protocol::Tcp, vip.ip());
        bench.snapshot.ports.insert(name, port(vip, &[endpoint]).into());
    }
}

#[test]
fn prefilter_doubles_under_connections_and_is_halved_after_a_restart() {
    let mut bench = large_bench();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let (_other_server, other_endpoint) = tcp_server("127.0.0.1:0");
    let served = bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    let gone = bench.serve(Protocol::Tcp, "10.96.0.1:53", &[other_endpoint]);
    let client = TcpStream::connect(gone).expect("connect");
    // Its last packet is in the future, so it does not expire during the test.
    let (flow_key, recorded) = flow(4000, now_ns() + 600_000_000_000);
    flows(&bench).insert(flow_key, recorded, 0).expect("room");
    bench.snapshot.ports.retain(|_, port| port.frontends[0].port.get() != gone.port());
    bench.sync(&Dirty::everything());
    assert_eq!(words_in_use(&prefilter(&bench)), MIN_WORDS);
    let needed =
        [service_item(served), endpoint_item(endpoint), service_item(gone), endpoint_item(other_endpoint)];
    for step in 0..4 {
        let first = SERVICES / 4 * step;
        add(&mut bench, first..first + SERVICES / 4, endpoint);
        bench.sync(&Dirty::everything());
        assert_eq!(needed.map(|item| prefilter_contains(&bench, item)), [true; 4], "step {step}");
        let mut all = (0..first + SERVICES / 4).map(vip).map(service_item);
        let prefilter = prefilter(&bench);
        assert!(all.all(|item| contains(&prefilter, item)), "step {step}");
        TcpStream::connect(vip(first)).expect("a new Service works");
        TcpStream::connect(served).expect("and an old one");
        assert_eq!(client.peer_addr().expect("peer"), gone);
    }
    assert_eq!(words_in_use(&prefilter(&bench)), 4 * MIN_WORDS);
    bench.snapshot.ports.retain(|_, port| port.frontends[0].address == Some(served.ip()));
    bench.sync(&Dirty::everything());
    let is_clear = |bench: &Bench| {
        let prefilter = prefilter(bench);
        !(0..SERVICES).map(vip).map(service_item).any(|item| contains(&prefilter, item))
    };
    let mut verify = || {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(bench.verify(), 0);
        is_clear(&bench).then_some(())
    };
    assert!(Deadline::after(Duration::from_mins(2)).poll(&mut verify).is_some(), "nothing is cleared");
    assert_eq!(words_in_use(&prefilter(&bench)), 4 * MIN_WORDS, "only a new process makes it smaller");
    bench.restart();
    bench.sync(&Dirty::everything());
    assert_eq!(words_in_use(&prefilter(&bench)), MIN_WORDS);
    assert_eq!(needed.map(|item| prefilter_contains(&bench, item)), [true; 4]);
    assert_eq!(client.peer_addr().expect("peer"), gone);
    TcpStream::connect(served).expect("still served");
}

#[test]
fn ratio_of_false_positives_is_counted() {
    let mut bench = large_bench();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let counts = bench.dataplane().kernel_counts().expect("once");
    assert!(counts.prefilter().expect("there is one").false_positive_ratio < 0.000_001);
    // A plan reserves room for its endpoints too, and here all are the same.
    for first in (0..1_150).step_by(50) {
        add(&mut bench, first..first + 50, endpoint);
        bench.sync(&Dirty::everything());
    }
    let fill = counts.prefilter().expect("there is one");
    assert_eq!(fill.bytes, 4_096);
    let others = (0..60_000).map(|number| vip(number).ip().into());
    let prefilter = prefilter(&bench);
    let passed = others.filter(|addr| contains(&prefilter, PrefilterItem::of_endpoint(addr, 443)));
    let measured = f64::from(u32::try_from(passed.count()).expect("few")) / 60_000.0;
    assert!((measured - fill.false_positive_ratio).abs() < 0.001, "{measured}, and {fill:?}");
    assert!(fill.false_positive_ratio > 0.001, "{fill:?}");
}
