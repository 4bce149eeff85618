//! Traces the first packet of every flow of the conformance cases through the rules.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use shunt_tests::{
    agent::protocol::{ConnectRequest, Protocol},
    case::{Action, Case, Expectation, Flow, Source},
    runner::cases_directory,
    world::Host,
};

use crate::{
    scene::Scene,
    trace::{Fate, Node, Packet},
};

#[test]
fn first_packet_of_every_flow_goes_where_the_case_says() {
    let mut traced = 0;
    let mut wrong = Vec::new();
    let is_for_this_mode =
        |case: &Case| case.modes.is_empty() || case.modes.iter().any(|mode| mode == "iptables");
    let cases = Case::read_directory(cases_directory(), &[]).expect("cases");
    for case in cases.into_iter().filter(is_for_this_mode) {
        let mut scene = Scene::new(&case).expect("a scene");
        for (number, step) in case.steps.iter().enumerate() {
            scene
                .apply_step(step)
                .unwrap_or_else(|error| panic!("{} step {}: {error:#}", case.name, number + 1));
            for flow in &step.flows {
                if let Some(result) = trace(&case, flow, &scene) {
                    traced += 1;
                    wrong.extend(result.err().map(|why| format!("{} step {}: {why}", case.name, number + 1)));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {traced} flows:\n{}", wrong.len(), wrong.join("\n"));
    assert!(traced > 200, "only {traced} flows were traced");
}

fn trace(case: &Case, flow: &Flow, scene: &Scene) -> Option<Result<(), String>> {
    let Action::Connect(connect) = &flow.action else { return None };
    let is_through_node1 = |host: Host| host == Host::Node1 || host.node() == Some(Host::Node1);
    let passes_by =
        !is_through_node1(flow.from) && !Host::Node1.owns(connect.to.ip()) && is_a_host(connect.to.ip());
    if case.needs_own_world() || passes_by {
        return None;
    }
    let addresses: Vec<IpAddr> =
        Host::Node1.addresses().into_iter().chain(Host::Node1.gateways()).map(|net| net.addr()).collect();
    let tables = &scene.tables[usize::from(connect.to.is_ipv6())];
    let node = Node { tables, addresses: &addresses };
    let fates: BTreeSet<Fate> = sources(flow.from, connect)
        .into_iter()
        .flat_map(|source| node.fates(packet(flow.from, source, connect)))
        .collect();
    let held = holds(&flow.expect, &fates);
    held.map(|held| if held { Ok(()) } else { Err(format!("{flow:?}\n    {fates:?}")) })
}

fn packet(from: Host, source: IpAddr, connect: &ConnectRequest) -> Packet {
    Packet {
        source,
        to: connect.to,
        protocol: match connect.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        },
        link: match (from, from.node()) {
            (Host::Node1, _) => None,
            (pod, Some(Host::Node1)) => Some(pod.node_link()),
            _ => Some("eth0".into()),
        },
        mark: 0,
        is_translated: false,
        is_masqueraded: false,
    }
}

/// Returns the source addresses that a host's kernel uses: the destination itself if it is an
/// address of the host.
fn sources(from: Host, connect: &ConnectRequest) -> Vec<IpAddr> {
    let to = connect.to.ip();
    if from == Host::Node1 && (to.is_loopback() || from.owns(to)) {
        return vec![to];
    }
    if !connect.sources.is_empty() {
        return connect.sources.clone();
    }
    let of_family = |address: &IpAddr| address.is_ipv4() == to.is_ipv4();
    from.addresses().into_iter().map(|net| net.addr()).filter(of_family).take(1).collect()
}

fn is_a_host(address: IpAddr) -> bool {
    Host::ALL.into_iter().any(|host| host.owns(address))
}

/// Returns true if the fates are as expected, or `None` if a first packet cannot show it.
fn holds(expect: &Expectation, fates: &BTreeSet<Fate>) -> Option<bool> {
    let reached = |fate: &Fate| match fate {
        Fate::Passes(packet) => host_at(packet.to),
        Fate::Refused | Fate::Dropped => None,
    };
    match expect {
        Expectation::Reach(answers) => {
            let hosts: Option<BTreeSet<Host>> = fates.iter().map(reached).collect();
            let Some(hosts) = hosts else { return Some(false) };
            let is_node = |source: IpAddr| Host::Node1.owns(source) || source.is_loopback();
            let sources = fates.iter().all(|fate| match (fate, answers.source) {
                (Fate::Passes(packet), Some(Source::Node)) => packet.is_masqueraded || is_node(packet.source),
                (Fate::Passes(packet), Some(Source::Client)) => !packet.is_masqueraded,
                _ => true,
            });
            Some(hosts == answers.hosts && sources)
        }
        // If no process listens, the host itself refuses.
        Expectation::Refused => Some(fates.iter().all(|fate| *fate == Fate::Refused || is_closed(fate))),
        Expectation::Blocked | Expectation::Silent => Some(fates.iter().all(|fate| reached(fate).is_none())),
        Expectation::Reset | Expectation::TooBig | Expectation::Page(_) => None,
    }
}

fn is_closed(fate: &Fate) -> bool {
    matches!(fate, Fate::Passes(packet) if is_a_host(packet.to.ip()) && host_at(packet.to).is_none())
}

fn host_at(to: SocketAddr) -> Option<Host> {
    // Only these ports have a listener.
    let listens = [8080, 8081, 5353].contains(&to.port());
    Host::ALL.into_iter().find(|host| listens && host.owns(to.ip()))
}
