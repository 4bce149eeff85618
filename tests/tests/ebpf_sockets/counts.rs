//! The counts of each Service, with real sockets.

use std::net::{SocketAddr, TcpStream};

use proxy_userspace::{
    dataplane::{Dataplane as _, KernelCounts, ServiceCount},
    model::{Dirty, Protocol, TrafficPolicy},
};

use crate::bench::{Bench, key, tcp_server, udp_socket};

/// Returns connections, refusals and drops of a service port: zeros if it was not used.
fn counts(reader: &dyn KernelCounts, name: &str, protocol: Protocol, address: SocketAddr) -> [u64; 3] {
    let port = Some(key(name, protocol, address.ip()));
    reader.services().iter().find(|count| count.port == port).map_or([0; 3], tried)
}

/// Returns the same of all service ports that are not counted individually.
fn others(reader: &dyn KernelCounts) -> [u64; 3] {
    let counts = reader.services();
    tried(counts.iter().find(|count| count.port.is_none()).expect("they are always reported"))
}

fn tried(count: &ServiceCount) -> [u64; 3] {
    [count.counts.connections, count.counts.refusals, count.counts.drops]
}

fn reader(bench: &mut Bench) -> Box<dyn KernelCounts> {
    bench.dataplane().kernel_counts().expect("it counts")
}

fn connect(address: SocketAddr, times: usize) {
    for _ in 0..times {
        let _ = TcpStream::connect(address);
    }
}

#[test]
fn connections_refusals_and_drops_count_for_their_service() {
    let mut bench = Bench::new();
    let reader = reader(&mut bench);
    for (service, empty, local, loopback) in [
        ("10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80", "127.0.0.1:0"),
        ("[fd96::1]:80", "[fd96::2]:80", "[fd96::3]:80", "[::1]:0"),
    ] {
        let (_server, endpoint) = tcp_server(loopback);
        let served = bench.serve(Protocol::Tcp, service, &[endpoint]);
        let refused = bench.serve(Protocol::Tcp, empty, &[]);
        let dropped = bench.serve_as(Protocol::Tcp, local, &[endpoint], |port| {
            port.internal_policy = TrafficPolicy::Local;
        });
        connect(served, 7);
        connect(refused, 4);
        connect(dropped, 3);
        assert_eq!(counts(&*reader, service, Protocol::Tcp, served), [7, 0, 0]);
        assert_eq!(counts(&*reader, empty, Protocol::Tcp, refused), [0, 4, 0]);
        assert_eq!(counts(&*reader, local, Protocol::Tcp, dropped), [0, 0, 3]);
    }
    assert_eq!(others(&*reader), [0; 3]);
    assert!(reader.errors().iter().all(|error| error.count == 0), "{:?}", reader.errors());
}

#[test]
fn udp_conversation_counts_once() {
    let mut bench = Bench::new();
    let reader = reader(&mut bench);
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let service = bench.serve(Protocol::Udp, "10.96.0.1:53", &[endpoint]);
    for _ in 0..3 {
        let (unconnected, _) = udp_socket("127.0.0.1:0");
        for _ in 0..5 {
            assert_eq!(unconnected.send_to(b"?", service).expect("send"), 1);
        }
        let (connected, _) = udp_socket("127.0.0.1:0");
        connected.connect(service).expect("connect");
        for _ in 0..5 {
            assert_eq!(connected.send(b"?").expect("send"), 1);
        }
    }
    assert_eq!(counts(&*reader, "10.96.0.1:53", Protocol::Udp, service), [6, 0, 0]);
}

#[test]
fn counts_survive_a_restart_and_start_at_zero_for_the_next_service() {
    let mut bench = Bench::new();
    // One slot for one Service, the other for all others: the next Service gets the same slot.
    bench.settings.map_sizes.counted_services = 1;
    bench.restart();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let service = bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    connect(service, 5);
    bench.restart();
    bench.sync(&Dirty::everything());
    let reader = reader(&mut bench);
    connect(service, 1);
    assert_eq!(counts(&*reader, "10.96.0.1:80", Protocol::Tcp, service), [6, 0, 0]);
    bench.snapshot.ports.clear();
    bench.sync(&Dirty::everything());
    let next = bench.serve(Protocol::Tcp, "10.96.0.9:80", &[endpoint]);
    connect(next, 2);
    assert_eq!(counts(&*reader, "10.96.0.9:80", Protocol::Tcp, next), [2, 0, 0]);
    assert_eq!(counts(&*reader, "10.96.0.1:80", Protocol::Tcp, service), [0; 3], "it is gone");
}

#[test]
fn services_over_the_limit_are_counted_together() {
    let mut bench = Bench::new();
    bench.settings.map_sizes.counted_services = 1;
    bench.restart();
    let reader = reader(&mut bench);
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let services = ["10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80"];
    let addresses = services.map(|service| bench.serve(Protocol::Tcp, service, &[endpoint]));
    for address in addresses {
        connect(address, 2);
    }
    assert_eq!(counts(&*reader, services[0], Protocol::Tcp, addresses[0]), [2, 0, 0]);
    assert_eq!(others(&*reader), [4, 0, 0]);
    assert_eq!(reader.services().len(), 2);
}

#[test]
fn nothing_is_counted_if_counting_is_off() {
    let mut bench = Bench::new();
    bench.settings.map_sizes.counted_services = 0;
    bench.restart();
    let reader = reader(&mut bench);
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let service = bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    connect(service, 1);
    assert!(reader.services().is_empty());
}
