//! TCP connections to Services, and source ranges.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    num::NonZeroU32,
};

use aya::maps::{Array, HashMap, MapData};
use proxy_common::layout::{Connection, NodeValue};
use proxy_userspace::model::{Dirty, FrontendKind, IpFamily, Protocol, ResolvedPort, TrafficPolicy};
use socket2::{Domain, Socket, Type};

use crate::bench::{Bench, failure, tcp_server, udp_socket};

#[test]
fn tcp_connection_reaches_the_endpoint_and_its_peer_is_the_vip() {
    let mut bench = Bench::new();
    for (service, local) in [("10.96.0.1:80", "127.0.0.1:0"), ("[fd96::1]:80", "[::1]:0")] {
        let (server, endpoint) = tcp_server(local);
        let vip = bench.serve(Protocol::Tcp, service, &[endpoint]);
        let mut client = TcpStream::connect(vip).expect("connect");
        assert_eq!(client.peer_addr().expect("peer"), vip);
        let (mut accepted, _) = server.accept().expect("accept");
        accepted.write_all(b"x").expect("answer");
        let mut answer = [0];
        client.read_exact(&mut answer).expect("answer");
    }
}

#[test]
fn closed_tcp_socket_leaves_no_entry_and_open_one_keeps_it() {
    let mut bench = Bench::new();
    let known: HashMap<MapData, u64, Connection> = bench.pinned("tcp_connections");
    for (service, local) in [
        ("10.96.0.1:80", "127.0.0.1:0"),
        ("[fd96::1]:80", "[::1]:0"),
        ("[::ffff:10.96.0.1]:80", "127.0.0.1:0"),
    ] {
        let (_server, endpoint) = tcp_server(local);
        let vip: SocketAddr = service.parse().expect("address");
        bench.serve(Protocol::Tcp, &SocketAddr::new(vip.ip().to_canonical(), 80).to_string(), &[endpoint]);
        let stays = TcpStream::connect(vip).expect("connect");
        let closes: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(vip).expect("connect")).collect();
        assert_eq!(known.keys().count(), 6, "{service}");
        drop(closes);
        let left: Vec<Connection> = known.iter().map(|entry| entry.expect("read").1).collect();
        assert_eq!(left.len(), 1, "{service}");
        assert_eq!(left[0].endpoint.port, endpoint.port());
        assert_eq!(stays.peer_addr().expect("peer"), vip);
    }
}

#[test]
fn getpeername_is_right_after_a_reconnect_past_the_service() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    let client = TcpStream::connect(vip).expect("connect");
    rustix::net::connect_unspec(&client).expect("disconnect");
    rustix::net::connect(&client, &endpoint).expect("connect again");
    assert_eq!(client.peer_addr().expect("peer"), endpoint);
}

#[test]
fn ipv4_mapped_address_on_an_ipv6_socket_is_the_ipv4_service() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    let mapped: SocketAddr = "[::ffff:10.96.0.1]:80".parse().expect("address");
    let client = TcpStream::connect(mapped).expect("connect");
    assert_eq!(client.peer_addr().expect("peer"), mapped);

    let (server, endpoint) = udp_socket("127.0.0.1:0");
    bench.serve(Protocol::Udp, "10.96.0.1:53", &[endpoint]);
    let (client, _) = udp_socket("[::]:0");
    let mapped: SocketAddr = "[::ffff:10.96.0.1]:53".parse().expect("address");
    client.send_to(b"q", mapped).expect("send");
    let mut buffer = [0; 8];
    let (_, from) = server.recv_from(&mut buffer).expect("question");
    server.send_to(b"a", from).expect("answer");
    assert_eq!(client.recv_from(&mut buffer).expect("answer").1, mapped);
}

#[test]
fn connect_and_send_are_refused_without_endpoints() {
    let mut bench = Bench::new();
    let vip = bench.serve(Protocol::Tcp, "10.96.0.2:80", &[]);
    assert_eq!(
        TcpStream::connect(vip).expect_err("no endpoint").kind(),
        failure(ErrorKind::ConnectionRefused)
    );
    let vip = bench.serve(Protocol::Udp, "10.96.0.2:53", &[]);
    let (client, _) = udp_socket("0.0.0.0:0");
    assert_eq!(
        client.send_to(b"q", vip).expect_err("no endpoint").kind(),
        failure(ErrorKind::ConnectionRefused)
    );
}

#[test]
fn connections_are_spread_evenly_over_the_endpoints() {
    let mut bench = Bench::new();
    let servers: Vec<_> = (0..3).map(|_| tcp_server("127.0.0.1:0")).collect();
    let mut endpoints: Vec<SocketAddr> = servers.iter().map(|(_, address)| *address).collect();
    endpoints.sort();
    let vip = bench.serve(Protocol::Tcp, "10.96.0.8:80", &endpoints);
    let mut accepted = [0; 3];
    // No more at a time than a listener's backlog.
    for _ in 0..3 {
        for _ in 0..100 {
            TcpStream::connect(vip).expect("connect");
        }
        for ((server, _), accepted) in servers.iter().zip(&mut accepted) {
            server.set_nonblocking(true).expect("nonblocking");
            *accepted += std::iter::from_fn(|| server.accept().ok()).count();
        }
    }
    // Six standard deviations around 100.
    assert!(accepted.iter().all(|accepted| (51..150).contains(accepted)), "{accepted:?} of 300");
}

#[test]
fn affinity_keeps_connections_of_a_netns_on_one_endpoint() {
    let mut bench = Bench::new();
    let servers: Vec<_> = (0..4).map(|_| tcp_server("127.0.0.1:0")).collect();
    let mut endpoints: Vec<SocketAddr> = servers.iter().map(|(_, address)| *address).collect();
    endpoints.sort();
    let used = |vip| {
        let _ = (0..20).map(|_| TcpStream::connect(vip).expect("connect")).collect::<Vec<_>>();
        let accepting = servers.iter().filter(|(server, _)| {
            server.set_nonblocking(true).expect("nonblocking");
            std::iter::from_fn(|| server.accept().ok()).count() > 0
        });
        accepting.map(|(_, address)| *address).collect::<Vec<_>>()
    };
    let sticky = |port: &mut ResolvedPort| port.affinity_timeout = NonZeroU32::new(10_800);
    let vip = bench.serve_as(Protocol::Tcp, "10.96.0.9:80", &endpoints, sticky);
    let first = used(vip);
    assert_eq!(first.len(), 1, "one of four endpoints");
    endpoints.retain(|address| !first.contains(address));
    bench.serve_as(Protocol::Tcp, "10.96.0.9:80", &endpoints, sticky);
    let second = used(vip);
    assert_eq!(second.len(), 1, "one other endpoint");
    assert_ne!(first, second);
}

#[test]
fn node_port_answers_on_node_addresses_and_loopback_only() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    bench.snapshot.node.node_port_addresses =
        ["127.0.0.1", "192.0.2.7"].map(|a| a.parse().expect("address")).into();
    bench.serve_as(Protocol::Tcp, "10.96.0.10:30080", &[endpoint], as_node_port);
    for address in ["127.0.0.1:30080", "127.9.9.9:30080", "192.0.2.7:30080", "0.0.0.0:30080"] {
        let client = TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        assert_eq!(client.peer_addr().expect("peer").to_string(), address);
    }
    assert_eq!(
        TcpStream::connect("[::1]:30080").expect_err("the Service is IPv4").kind(),
        ErrorKind::ConnectionRefused
    );
    bench.snapshot.node.node_port_addresses.remove(&IpAddr::from([127, 0, 0, 1]));
    bench.sync(&Dirty { node: true, ..Default::default() });
    assert_eq!(
        TcpStream::connect("127.0.0.1:30080").expect_err("no longer served").kind(),
        ErrorKind::ConnectionRefused
    );
}

#[test]
fn node_netns_is_the_initial_one_if_its_cookie_is_unknown() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    bench.snapshot.node.node_port_addresses = [IpAddr::from([127, 0, 0, 1])].into();
    bench.serve_as(Protocol::Tcp, "10.96.0.21:30081", &[endpoint], as_node_port);
    let mut node: Array<MapData, NodeValue> = bench.pinned("node");
    let known: NodeValue = node.get(&0, 0).expect("written at start");
    // Userspace writes this on kernels before 5.14. These tests run in the initial namespace.
    node.set(0, NodeValue { netns: NodeValue::NETNS_UNKNOWN, ..known }, 0).expect("write");
    TcpStream::connect("127.0.0.1:30081").expect("loopback is the node's");
    node.set(0, NodeValue { netns: known.netns + 1, ..known }, 0).expect("write");
    let error = TcpStream::connect("127.0.0.1:30081").expect_err("loopback is a pod's own");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

/// Turns a service port into a node port.
fn as_node_port(port: &mut ResolvedPort) {
    port.frontends[0].kind = FrontendKind::NodePort;
    port.frontends[0].address = None;
}

#[test]
fn connect_fails_under_policy_local_without_local_endpoint() {
    let mut bench = Bench::new();
    let (server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve_as(Protocol::Tcp, "10.96.0.11:80", &[endpoint], |port| {
        port.internal_policy = TrafficPolicy::Local;
    });
    let error = TcpStream::connect(vip).expect_err("no local endpoint");
    assert_eq!(error.kind(), failure(ErrorKind::HostUnreachable));
    server.set_nonblocking(true).expect("nonblocking");
    assert!(server.accept().is_err());
}

#[test]
fn source_ranges_apply_to_the_bound_address_or_the_nodes() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    bench.snapshot.node.primary_addresses = [(IpFamily::V4, IpAddr::from([192, 0, 2, 7]))].into();
    let connect_from = |source: &str, vip: SocketAddr| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("socket");
        let source: SocketAddr = source.parse().expect("address");
        socket.bind(&source.into()).expect("loopback");
        socket.connect(&vip.into()).map_err(|error| error.kind())
    };
    let ranged = |bench: &mut Bench, range: &str| {
        bench.serve_as(Protocol::Tcp, "198.51.100.1:80", &[endpoint], |port| {
            port.frontends[0].kind = FrontendKind::LoadBalancerIp;
            port.source_ranges = vec![range.parse().expect("range")];
        })
    };
    let vip = ranged(&mut bench, "127.5.0.0/16");
    assert_eq!(connect_from("127.5.5.5:0", vip), Ok(()));
    assert_eq!(connect_from("127.6.6.6:0", vip), Err(failure(ErrorKind::HostUnreachable)));
    let unbound = || TcpStream::connect(vip).map(drop).map_err(|error| error.kind());
    assert_eq!(unbound(), Err(failure(ErrorKind::HostUnreachable)), "the node's address is not in the range");
    ranged(&mut bench, "192.0.2.0/24");
    assert_eq!(unbound(), Ok(()), "the node's address is in the range");
}
