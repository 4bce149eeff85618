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
fn replies_to_an_unconnected_socket_come_from_the_vip() {
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
    assert_eq!(client.recv_from(&mut buffer).expect("answer").1, vip, "the endpoint's replies keep the VIP");
}

#[test]
fn udp_conversation_stays_until_its_endpoint_leaves() {
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
fn connected_udp_socket_is_destroyed_with_its_endpoint_and_unconnected_stays() {
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
    assert!(soon(|| connected.send(b"q").is_err()), "the application sees an error");
    unconnected.send_to(b"q", vip).expect("an unconnected socket keeps working");
}

#[test]
fn next_process_destroys_sockets_that_the_last_one_left() {
    let mut bench = Bench::new();
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.22:53", &[endpoint]);
    let (connected, _) = udp_socket("0.0.0.0:0");
    connected.connect(vip).expect("connect");
    bench.dataplane = None;
    // The maps of a process that was killed between its last write and the walk over sockets.
    let mut members: HashMap<MapData, MemberKey, u8> = bench.pinned("members");
    let keys: Vec<MemberKey> = members.keys().map(|key| key.expect("read")).collect();
    for key in keys {
        members.remove(&key).expect("was there");
    }
    let (_other, replacement) = udp_socket("127.0.0.1:0");
    bench.restart();
    bench.serve(Protocol::Udp, "10.96.0.22:53", &[replacement]);
    assert!(soon(|| connected.send(b"q").is_err()), "the application sees an error");
}

#[test]
fn replies_keep_the_vip_after_lru_eviction() {
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
fn reconnected_udp_socket_sees_the_right_source() {
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
    assert_eq!(heard_from(client.send_to(b"q", vip)), vip, "disconnected, sent to the VIP");
    client.connect(endpoint).expect("connect");
    assert_eq!(heard_from(client.send(b"q")), endpoint, "connected to the endpoint itself");
}

#[test]
fn endpoint_of_two_services_replies_from_the_vip_of_each_question() {
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
fn udp_conversation_leaves_an_endpoint_that_stops_serving() {
    let mut bench = Bench::new();
    let (drained, old) = udp_socket("127.0.0.1:0");
    let (server, new) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.16:53", &[old]);
    let (client, _) = udp_socket("0.0.0.0:0");
    client.send_to(b"q", vip).expect("send");
    answered(&drained, &client);
    // The endpoint terminates: it gets no new conversation, and existing ones continue.
    bench.serve_as(Protocol::Udp, "10.96.0.16:53", &[new], |port| {
        port.serving.push(ResolvedEndpoint { address: old, is_local: true });
    });
    client.send_to(b"q", vip).expect("send");
    answered(&drained, &client);
    // The list of eligible endpoints does not change.
    bench.serve(Protocol::Udp, "10.96.0.16:53", &[new]);
    client.send_to(b"q", vip).expect("send");
    answered(&server, &client);
}

#[test]
fn connected_udp_socket_sends_to_its_endpoint_even_if_it_names_the_vip() {
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
        let mut questions = [0; 4];
        let both_came = soon(|| {
            for (questions, (server, _)) in questions.iter_mut().zip(&servers) {
                server.set_nonblocking(true).expect("nonblocking");
                *questions += std::iter::from_fn(|| server.recv_from(&mut [0; 8]).ok()).count();
            }
            questions.iter().sum::<usize>() == 2
        });
        assert!(both_came && questions.contains(&2), "both are at one endpoint: {questions:?}");
    }
}

#[test]
fn formerly_connected_udp_socket_sees_the_vip_it_sends_to_now() {
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

/// Receives one question on any of the servers, and returns the server's address.
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
    panic!("no server received the question")
}

/// Receives one question, answers it, and returns the source that the client sees.
fn answered(server: &UdpSocket, client: &UdpSocket) -> SocketAddr {
    let mut buffer = [0; 8];
    let (_, from) = server.recv_from(&mut buffer).expect("question");
    server.send_to(b"a", from).expect("answer");
    client.recv_from(&mut buffer).expect("answer").1
}
