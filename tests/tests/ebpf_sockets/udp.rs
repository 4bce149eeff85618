//! UDP: conversations of unconnected sockets, and connected ones whose endpoint leaves.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{Endpoint, MemberKey, SocketPeer};
use proxy_userspace::model::{Protocol, ResolvedEndpoint};

use crate::bench::{Bench, soon, udp_socket};

#[test]
fn answers_to_an_unconnected_udp_socket_come_from_the_address_that_was_asked() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.3:53", &[endpoint]);
    let (client, _) = udp_socket("0.0.0.0:0");
    let mut buffer = [0; 8];
    for _ in 0..3 {
        client.send_to(b"q", vip).expect("send");
        let (_, from) = server.recv_from(&mut buffer).expect("question");
        server.send_to(b"a", from).expect("answer");
        assert_eq!(client.recv_from(&mut buffer).expect("answer").1, vip);
    }
    server
        .send_to(
            b"a",
            client
                .local_addr()
                .map(|a| SocketAddr::new(IpAddr::from([127, 0, 0, 1]), a.port()))
                .expect("bound"),
        )
        .expect("send");
    assert_eq!(
        client.recv_from(&mut buffer).expect("answer").1,
        vip,
        "the endpoint keeps the name it was asked by"
    );
}

#[test]
fn a_udp_conversation_stays_with_its_endpoint_until_that_leaves() {
    let mut bench = Bench::new();
    let servers: Vec<_> = (0..3).map(|_| udp_socket("127.0.0.1:0")).collect();
    let addresses: Vec<SocketAddr> = servers.iter().map(|(_, address)| *address).collect();
    let mut sorted = addresses.clone();
    sorted.sort();
    let vip = bench.serve(Protocol::Udp, "10.96.0.4:53", &sorted[..2]);
    let (client, _) = udp_socket("0.0.0.0:0");
    let ask = || {
        client.send_to(b"q", vip).expect("send");
        next_asked(&servers)
    };
    let first = ask();
    assert!((0..8).all(|_| ask() == first), "the conversation stays");
    bench.serve(Protocol::Udp, "10.96.0.4:53", &sorted);
    assert!((0..8).all(|_| ask() == first), "another endpoint does not matter");
    let rest: Vec<SocketAddr> = sorted.iter().copied().filter(|address| *address != first).collect();
    bench.serve(Protocol::Udp, "10.96.0.4:53", &rest);
    assert_ne!(ask(), first, "it moves at the next datagram");
}

#[test]
fn a_connected_udp_socket_is_destroyed_when_its_endpoint_leaves_and_an_unconnected_one_is_not() {
    let mut bench = Bench::new();
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.5:53", &[endpoint]);
    let (connected, _) = udp_socket("0.0.0.0:0");
    connected.connect(vip).expect("connect");
    assert_eq!(connected.peer_addr().expect("peer"), vip);
    connected.send(b"q").expect("send");
    let (unconnected, _) = udp_socket("0.0.0.0:0");
    unconnected.send_to(b"q", vip).expect("send");

    let (_other, replacement) = udp_socket("127.0.0.1:0");
    bench.serve(Protocol::Udp, "10.96.0.5:53", &[replacement]);
    assert!(soon(|| connected.send(b"q").is_err()), "the application is told");
    unconnected.send_to(b"q", vip).expect("an unconnected socket lives on");
}

#[test]
fn a_connected_udp_socket_is_destroyed_by_the_next_process_when_this_one_had_no_time_for_it() {
    let mut bench = Bench::new();
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.22:53", &[endpoint]);
    let (connected, _) = udp_socket("0.0.0.0:0");
    connected.connect(vip).expect("connect");
    bench.dataplane = None;
    // As a process leaves the maps that is killed between its last write and its look at the sockets.
    let mut members: HashMap<MapData, MemberKey, u8> = bench.pinned("members");
    let keys: Vec<MemberKey> = members.keys().map(|key| key.expect("read")).collect();
    for key in keys {
        members.remove(&key).expect("was there");
    }
    let (_other, replacement) = udp_socket("127.0.0.1:0");
    bench.restart();
    bench.serve(Protocol::Udp, "10.96.0.22:53", &[replacement]);
    assert!(soon(|| connected.send(b"q").is_err()), "the application is told");
}

#[test]
fn answers_keep_their_name_when_the_map_dropped_it_to_make_room() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.23:53", &[endpoint]);
    let (client, _) = udp_socket("0.0.0.0:0");
    client.send_to(b"q", vip).expect("send");
    assert_eq!(answered(&server, &client), vip);
    let mut names: HashMap<MapData, SocketPeer, Endpoint> = bench.pinned("udp_replies");
    let keys: Vec<SocketPeer> = names.keys().map(|key| key.expect("read")).collect();
    for key in keys {
        names.remove(&key).expect("was there");
    }
    client.send_to(b"q", vip).expect("send");
    assert_eq!(answered(&server, &client), vip);
}

#[test]
fn a_udp_socket_that_was_disconnected_or_connected_past_the_service_hears_the_endpoint_by_its_own_address() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.14:53", &[endpoint]);
    let (client, _) = udp_socket("127.0.0.1:0");
    let mut buffer = [0; 8];
    let mut heard_from = |sent: std::io::Result<usize>| {
        sent.expect("send");
        let (_, from) = server.recv_from(&mut buffer).expect("question");
        server.send_to(b"a", from).expect("answer");
        client.recv_from(&mut buffer).expect("answer").1
    };
    client.connect(vip).expect("connect");
    assert_eq!(heard_from(client.send(b"q")), vip);
    rustix::net::connect_unspec(&client).expect("disconnect");
    assert_eq!(heard_from(client.send_to(b"q", endpoint)), endpoint, "disconnected");
    assert_eq!(heard_from(client.send_to(b"q", vip)), vip, "disconnected, asked by the Service's address");
    client.connect(endpoint).expect("connect");
    assert_eq!(heard_from(client.send(b"q")), endpoint, "connected to the endpoint itself");
}

#[test]
fn an_endpoint_of_two_services_answers_each_question_from_the_address_that_was_asked() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let one = bench.serve(Protocol::Udp, "10.96.0.14:53", &[endpoint]);
    let other = bench.serve(Protocol::Udp, "10.96.0.15:53", &[endpoint]);
    let (client, _) = udp_socket("0.0.0.0:0");
    for asked in [one, other, one, other] {
        client.send_to(b"q", asked).expect("send");
        assert_eq!(answered(&server, &client), asked);
    }
}

#[test]
fn a_udp_conversation_leaves_an_endpoint_that_drained_and_then_stopped_serving() {
    let mut bench = Bench::new();
    let (drained, old) = udp_socket("127.0.0.1:0");
    let (server, new) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.16:53", &[old]);
    let (client, _) = udp_socket("0.0.0.0:0");
    client.send_to(b"q", vip).expect("send");
    answered(&drained, &client);
    // It terminates: no new conversation, but those it has go on.
    bench.serve_as(Protocol::Udp, "10.96.0.16:53", &[new], |port| {
        port.serving.push(ResolvedEndpoint { address: old, is_local: true });
    });
    client.send_to(b"q", vip).expect("send");
    answered(&drained, &client);
    // The list of those that may be chosen stays as it is.
    bench.serve(Protocol::Udp, "10.96.0.16:53", &[new]);
    client.send_to(b"q", vip).expect("send");
    answered(&server, &client);
}

#[test]
fn a_connected_udp_socket_that_names_the_service_in_a_datagram_reaches_the_endpoint_it_is_connected_to() {
    let mut bench = Bench::new();
    let servers: Vec<_> = (0..4).map(|_| udp_socket("127.0.0.1:0")).collect();
    let mut endpoints: Vec<SocketAddr> = servers.iter().map(|(_, address)| *address).collect();
    endpoints.sort();
    let vip = bench.serve(Protocol::Udp, "10.96.0.15:53", &endpoints);
    for _ in 0..16 {
        let (client, _) = udp_socket("127.0.0.1:0");
        client.connect(vip).expect("connect");
        client.send(b"q").expect("send");
        client.send_to(b"q", vip).expect("send");
        let questions = servers.iter().map(|(server, _)| {
            server.set_nonblocking(true).expect("nonblocking");
            std::iter::from_fn(|| server.recv_from(&mut [0; 8]).ok()).count()
        });
        assert_eq!(questions.max(), Some(2), "both are in one place");
    }
}

#[test]
fn a_udp_socket_that_was_connected_once_has_its_answers_named_by_what_it_asks_now() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let (neighbour, other_endpoint) = udp_socket("127.0.0.1:0");
    let first = bench.serve(Protocol::Udp, "10.96.0.18:53", &[endpoint]);
    let second = bench.serve(Protocol::Udp, "10.96.0.19:53", &[endpoint]);
    let third = bench.serve(Protocol::Udp, "10.96.0.20:53", &[other_endpoint]);
    let (client, _) = udp_socket("0.0.0.0:0");
    client.connect(first).expect("connect");
    rustix::net::connect_unspec(&client).expect("disconnect");
    for (asked, server) in [(second, &server), (third, &neighbour)] {
        client.send_to(b"q", asked).expect("send");
        assert_eq!(answered(server, &client), asked);
    }
    client.connect(first).expect("connect");
    rustix::net::connect_unspec(&client).expect("disconnect");
    client.send_to(b"q", first).expect("send");
    bench.serve(Protocol::Udp, "10.96.0.18:53", &[other_endpoint]);
    client.send_to(b"q", first).expect("send");
    assert_eq!(answered(&neighbour, &client), first, "it is free to move");
}

/// Takes one question from any of the servers and returns the address of the one that had it.
fn next_asked(servers: &[(UdpSocket, SocketAddr)]) -> SocketAddr {
    for _ in 0..1000 {
        for (server, address) in servers {
            server.set_nonblocking(true).expect("nonblocking");
            if server.recv_from(&mut [0; 8]).is_ok() {
                return *address;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("nobody was asked")
}

/// Takes one question, answers it, and returns whom the client has the answer from.
fn answered(server: &UdpSocket, client: &UdpSocket) -> SocketAddr {
    let mut buffer = [0; 8];
    let (_, from) = server.recv_from(&mut buffer).expect("question");
    server.send_to(b"a", from).expect("answer");
    client.recv_from(&mut buffer).expect("answer").1
}
