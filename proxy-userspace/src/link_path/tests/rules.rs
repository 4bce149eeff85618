//! Single rules, filters and policies.

use std::net::Ipv4Addr;

use super::{
    super::{
        Evidence,
        ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule, Source, Table},
        save,
        shapes::is_allowed_chain,
    },
    OWN_MARKS, evidence, why,
};
use crate::kernel::{bpf::tc, foreign_filters::LinkFilter, xfrm::Policy};

/// Judges rules of one iptables table. Chains are declared by the rules.
fn iptables(table: &str, rules: &str) -> Option<String> {
    let declared = [":PREROUTING", ":INPUT", ":FORWARD", ":OUTPUT", ":POSTROUTING"].join(" ACCEPT [0:0]\n");
    let saved =
        format!("*{table}\n{declared} ACCEPT [0:0]\n:mine - [0:0]\n:KUBE-FORWARD - [0:0]\n{rules}\nCOMMIT\n");
    why(&evidence(save::parse(&saved, Source::IptablesLegacy, Family::Ip)))
}

/// Judges one rule of nft, in a chain at a hook.
fn nft(family: Family, hook: Hook, priority: i32, found: Match) -> Option<String> {
    let rule = Rule { matches: vec![found], actions: vec![Action::Drop], text: "a rule".into() };
    let base = BaseChain { hook, is_nat: false, priority, accepts: true };
    let chain = Chain { name: "c".into(), base: Some(base), rules: vec![rule] };
    why(&evidence(vec![Table {
        source: Source::Nft,
        family,
        name: "t".into(),
        chains: [("c".into(), chain)].into(),
    }]))
}

#[test]
fn the_destination_matters_only_before_netfilters_translation() {
    let drop = "-d 10.0.0.1/32 -j DROP";
    for table in ["raw", "mangle"] {
        assert!(iptables(table, &format!("-A PREROUTING {drop}")).is_some(), "{table}");
    }
    for (table, chain) in [("filter", "FORWARD"), ("mangle", "POSTROUTING"), ("raw", "OUTPUT")] {
        assert_eq!(iptables(table, &format!("-A {chain} {drop}")), None, "{table}");
    }
    assert!(nft(Family::Inet, Hook::Prerouting, -100, Match::Destination).is_some());
    assert!(nft(Family::Netdev, Hook::Ingress, 0, Match::Destination).is_some());
    assert_eq!(nft(Family::Inet, Hook::Prerouting, -99, Match::Destination), None);
}

#[test]
fn the_source_matters_only_after_netfilter_translated_answers() {
    assert_eq!(iptables("raw", "-A PREROUTING -s 10.0.0.1/32 -j DROP"), None);
    assert_eq!(nft(Family::Inet, Hook::Postrouting, 99, Match::Source), None);
    assert!(nft(Family::Inet, Hook::Postrouting, 100, Match::Source).is_some());
    assert!(nft(Family::Netdev, Hook::Egress, 0, Match::Source).is_some());
}

#[test]
fn rules_about_bridges_and_at_hooks_that_are_not_known_matter() {
    assert!(nft(Family::Bridge, Hook::Forward, 0, Match::Plain).is_some());
    assert!(nft(Family::Inet, Hook::Unknown, 0, Match::Plain).is_some());
    assert_eq!(nft(Family::Arp, Hook::Input, 0, Match::Unknown("arp".into())), None);
}

#[test]
fn rules_without_effect_do_not_matter() {
    for rules in [
        "-A PREROUTING -d 10.0.0.1/32",
        "-A PREROUTING -d 10.0.0.1/32 -j mine",
        "-A PREROUTING -m bpf --bytecode 1 -j mine\n-A mine -d 10.0.0.2/32 -j RETURN",
        "-A PREROUTING -d 10.0.0.1/32 -j ACCEPT",
        "-A mine -d 10.0.0.1/32 -j DROP",
    ] {
        assert_eq!(iptables("raw", rules), None, "{rules}");
    }
    let accepted_before_a_drop =
        "-A PREROUTING -d 10.0.0.1/32 -j ACCEPT\n-A PREROUTING -s 10.0.0.0/8 -j DROP";
    assert!(iptables("raw", accepted_before_a_drop).is_some());
    let returned_before_a_drop =
        "-A PREROUTING -j mine\n-A mine -d 10.0.0.1/32 -j RETURN\n-A mine -i eth0 -j DROP";
    assert!(iptables("raw", returned_before_a_drop).is_some());
}

#[test]
fn the_policy_of_a_chain_gives_accepting_an_effect() {
    let saved = "*raw\n:PREROUTING DROP [0:0]\n-A PREROUTING -d 10.0.0.1/32 -j ACCEPT\n";
    assert!(why(&evidence(save::parse(saved, Source::IptablesNft, Family::Ip))).is_some());
}

#[test]
fn chains_that_call_each_other_deeply_matter() {
    let chain = |depth: usize| format!("-A c{depth} -i eth0 -j c{}", depth + 1);
    let calls: Vec<String> = (0..100_000).map(chain).collect();
    let declared: Vec<String> = (0..=100_000).map(|depth| format!(":c{depth} - [0:0]")).collect();
    let (declared, calls) = (declared.join("\n"), calls.join("\n"));
    let saved = format!("*raw\n:PREROUTING ACCEPT [0:0]\n{declared}\n-A PREROUTING -j c0\n{calls}\n");
    let found = why(&evidence(save::parse(&saved, Source::IptablesLegacy, Family::Ip)));
    assert!(found.expect("it matters").contains("more than 64 chains in a row"));
}

#[test]
fn the_jump_that_looks_at_the_destination_is_named() {
    let why = iptables("raw", "-A PREROUTING -d 10.0.0.1/32 -j mine\n-A mine -i eth0 -j DROP");
    let expected = "a rule of others looks at the destination before shunt's rules could translate it: \
                    iptables-legacy raw PREROUTING `-d 10.0.0.1/32 -j mine`";
    assert_eq!(why.as_deref(), Some(expected));
}

#[test]
fn translations_of_others_matter_unless_they_are_for_published_ports() {
    let local = "-m addrtype --dst-type LOCAL";
    for (rule, matters) in [
        (format!("{local} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80"), false),
        (format!("{local} -p tcp -m multiport --dports 80,443 -j REDIRECT --to-ports 1"), false),
        (format!("{local} -p tcp -m tcp --dport 30080 -j DNAT --to-destination 172.17.0.2:80"), true),
        (format!("{local} -p tcp -m tcp --dport 1:65535 -j DNAT --to-destination 172.17.0.2:80"), true),
        (format!("{local} -j DNAT --to-destination 172.17.0.2"), true),
        ("-p tcp -m tcp --dport 80 -j REDIRECT --to-ports 8080".into(), true),
        ("-s 10.0.0.0/8 -j DNAT --to-destination 172.17.0.2".into(), true),
        ("-d 10.0.0.1/32 -j MARK --set-xmark 0x1/0x1".into(), true),
        ("-i eth0 -j MARK --set-xmark 0x1/0x1".into(), false),
    ] {
        assert_eq!(iptables("nat", &format!("-A PREROUTING {rule}")).is_some(), matters, "{rule}");
    }
    let output = "-A OUTPUT -d 169.254.20.10/32 -j DNAT --to-destination 10.0.0.1";
    assert_eq!(iptables("nat", output), None);
}

#[test]
fn own_mark_bits_matter_except_for_the_first_packet_after_routing() {
    for rule in [
        "-A PREROUTING -m mark --mark 0x4000/0x4000 -j DROP",
        "-A PREROUTING -m mark --mark 0x1 -j DROP",
        "-A PREROUTING -j MARK --set-xmark 0x0/0xffffffff",
        "-A PREROUTING -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
    ] {
        assert!(iptables("mangle", rule).expect(rule).contains("a mark bit of shunt (0xc000)"));
    }
    assert_eq!(iptables("mangle", "-A PREROUTING -j MARK --set-xmark 0x1/0x3fff"), None);
    assert_eq!(iptables("nat", "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE"), None);
}

#[test]
fn a_reverse_path_check_matters_if_routes_depend_on_the_source() {
    let saved = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m rpfilter --validmark --invert -j DROP\n";
    let tables = save::parse(saved, Source::IptablesNft, Family::Ip);
    let mut evidence = evidence(tables);
    assert_eq!(why(&evidence), None);
    evidence.routes_by_source = true;
    assert!(why(&evidence).expect("it matters").contains("a routing rule selects by source"));
}

#[test]
fn what_is_not_known_matters_everywhere() {
    for rule in ["-A FORWARD -m bpf --bytecode 1 -j DROP", "-A FORWARD -j NFQUEUE --queue-num 1"] {
        assert!(iptables("filter", rule).expect(rule).starts_with("shunt does not know"), "{rule}");
    }
    assert!(iptables("filter", "-A FORWARD -m conntrack --ctstatus DNAT -j DROP").is_some());
    assert!(iptables("raw", "-A OUTPUT -j CT --notrack").is_some());
    assert!(iptables("raw", "-A PREROUTING -j LOG").is_some());
    assert_eq!(iptables("filter", "-A FORWARD -j LOG"), None);
}

#[test]
fn chains_of_kube_proxy_are_allowed_and_similar_names_are_not() {
    let rules = "-A FORWARD -m conntrack --ctstate DNAT -j KUBE-FORWARD\n\
                 -A KUBE-FORWARD -m conntrack --ctorigdst 10.0.0.1 -j ACCEPT";
    assert_eq!(iptables("filter", rules), None);
    for name in ["SHUNT-FORWARD", "KUBE-SVC-FYZB2HTOW53NRIPL", "KUBE-FIREWALL", "KUBE-FW-FYZB2HTOW53NRIPL"] {
        assert!(is_allowed_chain(name), "{name}");
    }
    for name in [
        "KUBE-POD-FW-USM7NRBIRGTUOWVB",
        "KUBE-ROUTER-INPUT",
        "KUBE-SVC-",
        "KUBE-NWPLCY-COMMON",
        "cali-FORWARD",
    ] {
        assert!(!is_allowed_chain(name), "{name}");
    }
}

#[test]
fn filters_of_others_matter_unless_they_redirect_to_an_ifb_link() {
    let judged = |kind: &str, hook, to: Option<&str>| {
        let filter = LinkFilter {
            link: "eth0".into(),
            hook,
            kind: kind.into(),
            name: Some("theirs".into()),
            redirects_to: to.map(str::to_owned),
        };
        why(&Evidence { filters: vec![filter], own_marks: OWN_MARKS, ..Evidence::default() })
    };
    assert_eq!(judged("u32", tc::Hook::Ingress, Some("ifb")), None);
    assert_eq!(judged("matchall", tc::Hook::Ingress, Some("ifb")), None);
    assert!(judged("matchall", tc::Hook::Egress, Some("ifb")).is_some());
    assert!(judged("matchall", tc::Hook::Ingress, Some("veth")).is_some());
    assert!(judged("flower", tc::Hook::Ingress, Some("ifb")).is_some());
    let why = judged("tcx", tc::Hook::Ingress, None).expect("a program");
    assert!(why.ends_with(": tcx theirs at ingress of eth0"), "{why}");
}

#[test]
fn every_ipsec_policy_matters() {
    let policy = Policy {
        direction: "out",
        source: (Ipv4Addr::UNSPECIFIED.into(), 0),
        destination: (Ipv4Addr::new(192, 0, 2, 0).into(), 24),
    };
    let why = why(&Evidence { policies: vec![policy], ..Evidence::default() }).expect("it matters");
    assert!(why.ends_with(": src 0.0.0.0/0 dst 192.0.2.0/24 dir out"), "{why}");
}
