//! The test world without a proxy: which host reaches which, from which address, and that nothing
//! of it stays. Needs root.

use std::{net::SocketAddr, path::Path};

use shunt_tests::{
    agent::protocol::{Answer, Attempt, ConnectRequest, FailureKind, Protocol, SendRequest},
    world::{Host, RESERVED_PORTS, World, leftover_paths},
};

fn build(hosts: &[Host]) -> World {
    World::build(hosts, Path::new(env!("CARGO_BIN_EXE_conformance"))).expect("build the world")
}

fn connect(world: &mut World, from: Host, request: ConnectRequest) -> Vec<Attempt> {
    world.agent(from).and_then(|agent| agent.connect(request)).expect("the agent answers")
}

/// Returns the results of one attempt to each address of a host.
fn answers(world: &mut World, from: Host, to: Host, protocol: Protocol, port: u16) -> Vec<Answer> {
    let mut answers = Vec::new();
    for address in to.addresses() {
        let address = SocketAddr::new(address.addr(), port);
        for unconnected in [false, true].into_iter().take(if protocol == Protocol::Udp { 2 } else { 1 }) {
            let attempts = connect(
                world,
                from,
                ConnectRequest { unconnected, ..ConnectRequest::new(address, protocol, 1) },
            );
            match attempts.as_slice() {
                [Attempt::Answered(answer)] => answers.push(answer.clone()),
                other => panic!("{from} to {to} at {protocol:?} {address}: {other:?}"),
            }
        }
    }
    answers
}

#[test]
fn hosts_reach_each_other_and_see_their_own_addresses() {
    let mut world = build(&Host::ALL);
    // The client has no routes to pods. Nodes and pods can reach all others.
    let pairs = [
        (Host::A1, Host::A2),
        (Host::A1, Host::B1),
        (Host::B2, Host::A3),
        (Host::A2, Host::Node1),
        (Host::Node1, Host::A1),
        (Host::Node1, Host::B1),
        (Host::Node1, Host::Node2),
        (Host::Client, Host::Node1),
        (Host::Node2, Host::A1),
    ];
    for (from, to) in pairs {
        for (protocol, port) in [(Protocol::Tcp, 8080), (Protocol::Tcp, 8081), (Protocol::Udp, 5353)] {
            for answer in answers(&mut world, from, to, protocol, port) {
                assert_eq!(answer.host, to.name());
                assert!(from.owns(answer.client.ip()), "{to} saw {} in place of {from}", answer.client);
                assert_eq!(answer.peer, answer.destination);
            }
        }
    }
}

#[test]
fn closed_port_refuses_and_unused_address_is_silent() {
    let mut world = build(&Host::ALL);
    let kinds = |attempts: Vec<Attempt>| -> Vec<_> {
        attempts
            .into_iter()
            .map(|one| match one {
                Attempt::Failed(failure) => failure.kind,
                Attempt::Answered(answer) => panic!("{answer:?}"),
            })
            .collect()
    };
    for unconnected in [false, true] {
        let closed = ConnectRequest {
            unconnected,
            ..ConnectRequest::new("10.244.2.11:9".parse().unwrap(), Protocol::Udp, 2)
        };
        assert_eq!(kinds(connect(&mut world, Host::A1, closed)), [FailureKind::Refused; 2]);
    }
    let closed = ConnectRequest::new("[fd44:2::11]:9".parse().unwrap(), Protocol::Tcp, 2);
    assert_eq!(kinds(connect(&mut world, Host::A1, closed)), [FailureKind::Refused; 2]);
    let timeout = std::time::Duration::from_millis(300);
    let silent =
        ConnectRequest { timeout, ..ConnectRequest::new("10.96.0.10:80".parse().unwrap(), Protocol::Tcp, 2) };
    assert_eq!(kinds(connect(&mut world, Host::A1, silent)), [FailureKind::TimedOut; 2]);
}

#[test]
fn requested_source_ports_and_addresses_are_used() {
    let mut world = build(&Host::ALL);
    let own: Vec<_> = ["192.168.57.60", "192.168.57.61"].iter().map(|text| text.parse().unwrap()).collect();
    world.add_addresses(Host::Client, &own).unwrap();
    world.add_addresses(Host::Client, &own).expect("addresses that are there already are fine");
    let to = "192.168.57.11:5353".parse().unwrap();
    let asked = ConnectRequest {
        sources: own.clone(),
        source_port: Some(40_001),
        order: shunt_tests::agent::protocol::Order::UntilFailure,
        ..ConnectRequest::new(to, Protocol::Udp, 4)
    };
    let seen: Vec<_> = connect(&mut world, Host::Client, asked)
        .into_iter()
        .map(|one| match one {
            Attempt::Answered(answer) => answer.client,
            Attempt::Failed(failure) => panic!("{failure:?}"),
        })
        .collect();
    let wanted: Vec<_> = own.iter().cycle().take(4).map(|own| SocketAddr::new(*own, 40_001)).collect();
    assert_eq!(seen, wanted);
}

#[test]
fn ephemeral_ports_are_never_ports_of_cases() {
    let mut world = build(&Host::ALL);
    // All but two of these are ports of cases.
    world.run(Host::Client, "sysctl -qw net.ipv4.ip_local_port_range='45000 45401'").unwrap();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for to in ["192.168.57.11", "fd57::11"] {
            let port = if protocol == Protocol::Tcp { 8080 } else { 5353 };
            let to = SocketAddr::new(to.parse().unwrap(), port);
            let attempts = connect(&mut world, Host::Client, ConnectRequest::new(to, protocol, 1));
            let [Attempt::Answered(answer)] = &attempts[..] else { panic!("{attempts:?}") };
            let is_named = RESERVED_PORTS.iter().any(|range| range.contains(&answer.client.port()));
            assert!(!is_named, "{protocol:?} to {to} from {}", answer.client);
        }
    }
}

#[test]
fn large_datagrams_and_kept_connections_work() {
    let mut world = build(&Host::ALL);
    let large = ConnectRequest {
        size: 4000,
        ..ConnectRequest::new("10.244.2.11:5353".parse().unwrap(), Protocol::Udp, 3)
    };
    assert!(connect(&mut world, Host::A1, large).iter().all(|one| matches!(one, Attempt::Answered(_))));
    let kept = ConnectRequest {
        hold: Some("c".to_owned()),
        ..ConnectRequest::new("10.244.2.11:8080".parse().unwrap(), Protocol::Tcp, 1)
    };
    assert!(matches!(connect(&mut world, Host::A1, kept).as_slice(), [Attempt::Answered(_)]));
    let send = |id: &str| SendRequest {
        id: id.to_owned(),
        size: 3000,
        answer: 0,
        timeout: std::time::Duration::from_secs(30),
    };
    let agent = world.agent(Host::A1).unwrap();
    for _ in 0..2 {
        assert!(matches!(agent.send(send("c")).unwrap(), Attempt::Answered(answer) if answer.host == "b1"));
    }
    assert!(agent.send(send("other")).unwrap_err().to_string().contains("no connection is kept"));
}

#[test]
fn processes_run_in_cgroup_and_netns_of_their_host() {
    let world = build(&[Host::Node1, Host::A1]);
    let procs = std::fs::read_to_string(world.cgroup_root().join("cgroup.procs")).unwrap();
    assert_eq!(procs.lines().count(), 2, "one agent for node1 and one for a1: {procs}");
    let mut namespaces: Vec<_> =
        procs.lines().map(|pid| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap()).collect();
    namespaces.push(std::fs::read_link("/proc/self/ns/net").unwrap());
    namespaces.sort();
    namespaces.dedup();
    assert_eq!(namespaces.len(), 3, "the two hosts' and the test's own: {namespaces:?}");
}

#[test]
fn dropped_world_leaves_nothing() {
    let world = build(&[Host::Node1, Host::A1]);
    let name = world.name().to_owned();
    assert!(
        leftover_paths(&name).len() >= 4,
        "namespaces, cgroup, pins and directory: {:?}",
        leftover_paths(&name)
    );
    drop(world);
    assert_eq!(leftover_paths(&name), Vec::<std::path::PathBuf>::new());
}

#[test]
fn world_leaves_nothing_after_a_panic() {
    let (sender, name) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let world = build(&[Host::Node1, Host::A1]);
        sender.send(world.name().to_owned()).unwrap();
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    assert_eq!(leftover_paths(&name.recv().unwrap()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn two_worlds_exist_at_the_same_time() {
    let (mut one, other) = (build(&[Host::Node1, Host::A1]), build(&[Host::Node1, Host::A1]));
    assert_ne!(one.name(), other.name());
    drop(other);
    assert_eq!(
        answers(&mut one, Host::A1, Host::Node1, Protocol::Tcp, 8080).len(),
        Host::Node1.addresses().len()
    );
}
