//! The fate of packets with the rules in nftables or in iptables, beside foreign rules in FORWARD.

use proxy_userspace::dataplane::ebpf::MASQUERADED_PORTS;
use shunt_tests::{agent::protocol::Protocol, world::Host};

use crate::node::{AttemptResult, MASQUERADED, Node, PLAIN, REFUSED};

/// Returns the commands of one iptables backend.
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
fn marked_packets_are_masqueraded_or_rejected_and_others_pass() {
    let mut node = Node::new();
    let (mut rules, before) = (node.rules(), node.everything());
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        assert_eq!(node.try_both_families(protocol, MASQUERADED), AttemptResult::AsNode2, "no rules yet");
    }
    node.put(&mut rules);
    node.assert_served(&AttemptResult::AsNode2);
    assert!(!node.everything().contains("SHUNT"), "nothing filters FORWARD, so no rule is needed there");
    node.remove(&mut rules);
    assert_eq!(node.everything(), before);
}

#[test]
fn iptables_does_the_same_without_nftables() {
    for backend in ["nft", "legacy"] {
        let (_directory, mut node) = only(&iptables(backend));
        let mut rules = node.rules();
        node.put(&mut rules);
        node.assert_served(&AttemptResult::AsNode2);
        assert!(!node.everything().contains("table inet shunt"));
        node.both_families(&format!("iptables-{backend} -P FORWARD DROP"));
        node.assert_served(&AttemptResult::Silence);
        node.remove(&mut rules);
        assert!(!node.everything().contains("SHUNT"), "{}", node.everything());
        assert_eq!(
            node.try_both_families(Protocol::Udp, MASQUERADED),
            AttemptResult::Silence,
            "the policy stays"
        );
    }
}

#[test]
fn masqueraded_datagrams_never_leave_from_node_ports() {
    let backends = [vec!["nft".into()], iptables("nft"), iptables("legacy")];
    for commands in &backends {
        let (_directory, mut node) = only(commands);
        let mut rules = node.rules();
        node.put(&mut rules);
        for family in [0, 1] {
            for seen in node.datagram_sources(MASQUERADED, family, 16) {
                assert!(Host::Node1.owns(seen.ip()), "{commands:?}: {seen}");
                assert!(MASQUERADED_PORTS.contains(&seen.port()), "{commands:?}: {seen}");
            }
        }
        node.remove(&mut rules);
    }
}

#[test]
fn service_packets_pass_where_iptables_drops_forwarded_packets() {
    for backends in [&["nft"][..], &["legacy"], &["nft", "legacy"]] {
        let mut node = Node::new();
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -P FORWARD DROP"));
        }
        let (mut rules, before) = (node.rules(), node.everything());
        assert_eq!(node.try_both_families(Protocol::Tcp, MASQUERADED), AttemptResult::Silence);
        node.put(&mut rules);
        node.assert_served(&AttemptResult::Silence);
        // Replies to connections of pods are accepted, as upstream does. Their first packets are
        // not ours to accept.
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -A FORWARD -p udp --dport {PLAIN} -j ACCEPT"));
        }
        assert_eq!(node.try_both_families(Protocol::Udp, PLAIN), AttemptResult::AsNode2, "{backends:?}");
        for backend in backends {
            node.both_families(&format!("iptables-{backend} -D FORWARD -p udp --dport {PLAIN} -j ACCEPT"));
        }
        node.remove(&mut rules);
        assert_eq!(node.everything(), before, "{backends:?}");
    }
}

#[test]
fn forward_chain_without_iptables_command_accepts_services() {
    let (_directory, mut node) = only(&["nft".into()]);
    node.both_families("iptables-nft -P FORWARD DROP");
    let (mut rules, before) = (node.rules(), node.everything());
    node.put(&mut rules);
    node.assert_served(&AttemptResult::Silence);
    node.remove(&mut rules);
    assert_eq!(node.everything(), before);
}

#[test]
fn error_names_all_missing_commands() {
    let (_directory, node) = only(&[]);
    let mut rules = node.rules();
    let error = node.within(|| Ok(rules.install().expect_err("no command is installed").to_string()));
    assert!(error.contains("nft is not installed") && error.contains("iptables is not installed"), "{error}");
    assert!(!node.are_installed(&mut rules));
    node.remove(&mut rules);
}

#[test]
fn rejecting_needs_no_route_to_the_vip() {
    let mut node = Node::new();
    let mut rules = node.rules();
    node.put(&mut rules);
    // The node itself rejects, even if the pod is no longer reachable.
    node.run("ip", &["route", "replace", "blackhole", "10.244.1.11"], "");
    node.run("ip", &["-6", "route", "replace", "blackhole", "fd44:1::11"], "");
    assert_eq!(node.try_both_families(Protocol::Tcp, REFUSED), AttemptResult::Refused);
    assert_eq!(node.try_both_families(Protocol::Udp, REFUSED), AttemptResult::Refused);
}
