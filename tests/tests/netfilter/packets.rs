//! What becomes of packets, with the rules in nftables or in iptables, and beside what others have in FORWARD.

use proxy_userspace::dataplane::ebpf::MASQUERADED_PORTS;
use shunt_tests::{agent::protocol::Protocol, world::Host};

use crate::node::{MASQUERADED, Node, PLAIN, REFUSED, Seen};

/// The commands of one iptables backend, with nothing else.
fn iptables(backend: &str) -> Vec<String> {
    let verbs = ["save", "restore"].into_iter();
    verbs
        .flat_map(|verb| ["iptables", "ip6tables"].map(|plain| format!("{plain}-{backend}-{verb}")))
        .collect()
}

fn only(commands: &[String]) -> (tempfile::TempDir, Node) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let names: Vec<&str> = commands.iter().map(String::as_str).collect();
    let node = Node::with_only(&names, directory.path());
    (directory, node)
}

#[test]
fn marked_packets_are_masqueraded_or_refused_and_others_are_left_alone() {
    let mut node = Node::new();
    let (mut rules, before) = (node.rules(), node.everything());
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        assert_eq!(node.try_both_families(protocol, MASQUERADED), Seen::AsNode2, "no rules yet");
    }
    node.put(&mut rules);
    node.assert_served(&Seen::AsNode2);
    assert!(!node.everything().contains("SHUNT"), "nothing rules FORWARD, so that nothing is needed there");
    node.remove(&mut rules);
    assert_eq!(node.everything(), before);
}

#[test]
fn without_nftables_iptables_does_the_same() {
    for backend in ["nft", "legacy"] {
        let (_directory, mut node) = only(&iptables(backend));
        let mut rules = node.rules();
        node.put(&mut rules);
        node.assert_served(&Seen::AsNode2);
        assert!(!node.everything().contains("table inet shunt"));
        node.both_families(&format!("iptables-{backend} -P FORWARD DROP"));
        node.assert_served(&Seen::Silence);
        node.remove(&mut rules);
        assert!(!node.everything().contains("SHUNT"), "{}", node.everything());
        assert_eq!(node.try_both_families(Protocol::Udp, MASQUERADED), Seen::Silence, "the policy stays");
    }
}

#[test]
fn masqueraded_datagrams_leave_from_ports_that_are_no_node_ports() {
    let backends = [vec!["nft".into()], iptables("nft"), iptables("legacy")];
    for commands in &backends {
        let (_directory, mut node) = only(commands);
        let mut rules = node.rules();
        node.put(&mut rules);
        for family in [0, 1] {
            for seen in node.seen_of_datagrams(MASQUERADED, family, 16) {
                assert!(Host::Node1.owns(seen.ip()), "{commands:?}: {seen}");
                assert!(MASQUERADED_PORTS.contains(&seen.port()), "{commands:?}: {seen}");
            }
        }
        node.remove(&mut rules);
    }
}

#[test]
fn where_iptables_drops_forwarded_packets_those_of_services_pass() {
    for backends in [&["nft"][..], &["legacy"], &["nft", "legacy"]] {
        let mut node = Node::new();
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -P FORWARD DROP"));
        }
        let (mut rules, before) = (node.rules(), node.everything());
        assert_eq!(node.try_both_families(Protocol::Tcp, MASQUERADED), Seen::Silence);
        node.put(&mut rules);
        node.assert_served(&Seen::Silence);
        // Answers to what pods begin are let through, as upstream does; what they send first is others' to accept.
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -A FORWARD -p udp --dport {PLAIN} -j ACCEPT"));
        }
        assert_eq!(node.try_both_families(Protocol::Udp, PLAIN), Seen::AsNode2, "{backends:?}");
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -D FORWARD -p udp --dport {PLAIN} -j ACCEPT"));
        }
        node.remove(&mut rules);
        assert_eq!(node.everything(), before, "{backends:?}");
    }
}

#[test]
fn a_forward_chain_that_only_nft_can_reach_lets_services_pass_too() {
    let (_directory, mut node) = only(&["nft".into()]);
    node.both_families("iptables-nft -P FORWARD DROP");
    let (mut rules, before) = (node.rules(), node.everything());
    node.put(&mut rules);
    node.assert_served(&Seen::Silence);
    node.remove(&mut rules);
    assert_eq!(node.everything(), before);
}

#[test]
fn the_other_commands_of_a_node_without_any_are_named_in_the_error() {
    let (_directory, node) = only(&[]);
    let mut rules = node.rules();
    let error = node.within(|| Ok(rules.put().expect_err("nothing to do it with").to_string()));
    assert!(error.contains("nft is not installed") && error.contains("iptables is not installed"), "{error}");
    assert!(!node.are_put(&mut rules));
    node.remove(&mut rules);
}

#[test]
fn refusing_needs_no_route_to_the_vip() {
    let mut node = Node::new();
    let mut rules = node.rules();
    node.put(&mut rules);
    // Where the pod is not reachable any more, refusal still comes from the node itself.
    node.run("ip", &["route", "replace", "blackhole", "10.244.1.11"], "");
    node.run("ip", &["-6", "route", "replace", "blackhole", "fd44:1::11"], "");
    assert_eq!(node.try_both_families(Protocol::Tcp, REFUSED), Seen::Refused);
    assert_eq!(node.try_both_families(Protocol::Udp, REFUSED), Seen::Refused);
}
