//! The cost of a change depends neither on the number of Services nor on that of endpoints.

use std::net::SocketAddr;

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{EndpointKey, EndpointValue};
use proxy_userspace::model::{Dirty, Protocol, ServicePortKey};

use crate::bench::{Bench, key, port};

const CHANGED: &str = "10.96.0.1:80";

#[test]
fn endpoint_change_costs_the_same_with_many_services() {
    for others in [1, 50] {
        let mut bench = among(others);
        let mut endpoints = endpoints(0);
        endpoints[2] = address("10.9.9.9:8080");
        // A slot and the frontend: one bpf(2) call each.
        assert_eq!(change(&mut bench, &endpoints), 1 + 1, "among {others}");
        assert_eq!(slots(&bench), (others + 1) * 4);
        endpoints.remove(1);
        assert_eq!(change(&mut bench, &endpoints), 1 + 1 + 1, "the last one moves, and its slot is removed");
        assert_eq!(slots(&bench), (others + 1) * 4 - 1, "no old slot is left");
    }
}

#[test]
fn list_that_fills_its_map_can_change() {
    let mut bench = among(0);
    let mut endpoints: Vec<_> = (0..=255).map(|host| address(&format!("10.2.0.{host}:8080"))).collect();
    change(&mut bench, &endpoints);
    assert_eq!(slots(&bench), 256, "the size of the map");
    endpoints[7] = address("10.9.9.9:8080");
    assert_eq!(change(&mut bench, &endpoints), 1 + 1);
}

#[test]
fn port_change_costs_the_new_and_the_old_frontend() {
    for others in [1, 50] {
        let mut bench = among(others);
        let moved = port(address("10.96.0.1:81"), &endpoints(0));
        bench.snapshot.ports.insert(changed(), moved.into());
        assert_eq!(sync(&mut bench), 1 + 1, "among {others}");
    }
}

#[test]
fn dirty_but_unchanged_service_costs_nothing() {
    let mut bench = among(50);
    assert_eq!(change(&mut bench, &endpoints(0)), 0);
}

/// Returns a bench with a Service and `others` more, all with four endpoints.
fn among(others: usize) -> Bench {
    let mut bench = Bench::new();
    for number in 0..=others {
        let service = address(&format!("10.96.0.{}:80", number + 1));
        let name = key(&service.to_string(), Protocol::Tcp, service.ip());
        bench.snapshot.ports.insert(name, port(service, &endpoints(number)).into());
    }
    bench.sync(&Dirty::everything());
    bench
}

fn endpoints(service: usize) -> Vec<SocketAddr> {
    (0..4).map(|number| address(&format!("10.1.{service}.{}:8080", number + 1))).collect()
}

fn changed() -> ServicePortKey {
    key(CHANGED, Protocol::Tcp, address(CHANGED).ip())
}

fn change(bench: &mut Bench, endpoints: &[SocketAddr]) -> usize {
    bench.snapshot.ports.insert(changed(), port(address(CHANGED), endpoints).into());
    sync(bench)
}

/// Syncs, and returns the number of changes to the kernel.
fn sync(bench: &mut Bench) -> usize {
    bench.sync(&Dirty { ports: [changed()].into(), ..Dirty::default() })
}

fn slots(bench: &Bench) -> usize {
    let map: HashMap<MapData, EndpointKey, EndpointValue> = bench.pinned("endpoints");
    map.keys().filter_map(Result::ok).count()
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("address")
}
