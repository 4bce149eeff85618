//! Judges the rulesets of known programs, and single rules at each stage.

mod kernel;
mod rules;

use std::time::Duration;

use super::{
    Evidence, drops_before_services, forward_drops, judge,
    judge::forwarding_rule,
    nft_json,
    report::{DirectPath, Settings, choose},
    ruleset::{Family, Source, Table},
    save,
};
use crate::net::{DirectScope, LinkPath};

/// shunt's mark bits with the default settings.
const OWN_MARKS: u32 = 0xc000;

/// A ruleset, what wrote it, and a part of the reason for netfilter; `None` for the programs.
type Known = (&'static str, &'static str, Option<&'static str>);

macro_rules! known {
    ($($file:literal => $why:expr,)*) => {
        &[$(($file, include_str!(concat!("../rulesets/", $file)), $why),)*]
    };
}

const RULESETS: &[Known] = known! {
    "aws-vpc-cni.save" => Some("before shunt's rules could translate it: iptables-nft mangle PREROUTING `-i eth0"),
    "aws-vpc-cni-nft.json" => Some("nft ip aws-cni nat-prerouting `fib daddr type local return`"),
    "calico.save" => None,
    "calico-prednat.save" => Some("iptables-nft mangle cali-failsafe-in `-p tcp"),
    "calico-vxlan.save" => Some("(NOTRACK): iptables-nft raw cali-OUTPUT `-p udp"),
    "cilium.save" => Some("(socket): iptables-nft mangle CILIUM_PRE_mangle `! -o lo -m socket --transparent"),
    "connmark.save" => Some("before shunt's rules could translate it: iptables-nft mangle PREROUTING `-i eth0"),
    "ct-status-dnat.json" => Some("netfilter translated from other connections: nft inet filter forward `ct status dnat accept`"),
    "ctorigdst.save" => Some("iptables-nft filter FORWARD `-s 192.0.2.0/24 -m conntrack --ctorigdst"),
    "docker.save" => None,
    "docker-28.save" => None,
    "docker-28-published.save" => Some("iptables-nft raw PREROUTING `-d 172.17.0.2/32 ! -i docker0 -j DROP`"),
    "docker-node-port.save" => Some("iptables-nft nat DOCKER `! -i docker0 -p tcp -m tcp --dport 30080 -j DNAT"),
    "docker-published.save" => None,
    "firewalld.json" => Some("nft inet firewalld filter_FORWARD `ct status dnat accept`"),
    "flannel.save" => None,
    "kindnet.save" => None,
    "kindnet-policies.json" => Some("(queue): nft inet kindnet-network-policies prerouting `ip saddr @podips-v4 queue`"),
    "kube-proxy.save" => None,
    "kube-router.save" => None,
    "kubelet.save" => None,
    "kubelet-1.27.save" => None,
    "portmap.save" => None,
    "raw-drop.save" => Some("iptables-nft raw PREROUTING `-p tcp -m tcp --dport 30080 -j DROP`"),
    "ufw.v4.save" => None,
    "ufw.v6.save" => None,
};

fn evidence(tables: Vec<Table>) -> Evidence {
    Evidence { tables, own_marks: OWN_MARKS, ..Evidence::default() }
}

fn tables(file: &str, text: &str) -> Vec<Table> {
    let family = if file.contains(".v6.") { Family::Ip6 } else { Family::Ip };
    if !text.contains("\n{\"nftables\":") {
        return save::parse(text, Source::IptablesNft, family);
    }
    let json: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    nft_json::parse(&json.concat()).expect("JSON of nft")
}

/// Returns the reason for netfilter; `None` for the programs.
fn why(evidence: &Evidence) -> Option<String> {
    match judge(evidence) {
        LinkPath::Programs | LinkPath::Direct { .. } => None,
        LinkPath::Netfilter { why } => Some(why.to_string()),
    }
}

#[test]
fn known_rulesets_have_the_path_that_they_need() {
    for (file, text, expected) in RULESETS {
        let found = why(&evidence(tables(file, text)));
        match (&found, expected) {
            (None, None) => {}
            (Some(found), Some(expected)) if found.contains(expected) => {}
            _ => panic!("{file}: expected {expected:?}, found {found:?}"),
        }
    }
}

#[test]
fn every_ruleset_says_where_it_is_from_and_has_rules() {
    for (file, text, _) in RULESETS {
        assert!(text.starts_with("# "), "{file}");
        assert!(tables(file, text).iter().any(|table| !table.chains.is_empty()), "{file}");
    }
}

#[test]
fn rules_that_see_only_first_packets_leave_learned_flows_the_direct_path() {
    let has = |rules: &str, scope| forwarding_rule(&evidence(tables("case.save", rules)), scope).is_some();
    let in_table = |table: &str, chain: &str, rule: &str| {
        format!("# case\n*{table}\n:{chain} ACCEPT [0:0]\n-A {chain} {rule}\nCOMMIT\n")
    };
    let nat = in_table("nat", "POSTROUTING", "-s 10.244.0.0/16 ! -d 10.244.0.0/16 -j MASQUERADE");
    let forward = in_table("filter", "FORWARD", "-s 10.244.0.0/16 -j ACCEPT");
    let input = in_table("filter", "INPUT", "-p tcp --dport 22 -j ACCEPT");
    let [learned, whole] = [DirectScope::Learned, DirectScope::Whole];
    assert_eq!([&nat, &forward, &input].map(|rules| has(rules, learned)), [false, true, false]);
    assert_eq!([&nat, &forward, &input].map(|rules| has(rules, whole)), [true, true, false]);
}

#[test]
fn path_names_the_setting_or_the_rule_that_decided() {
    let rule = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -s 10.244.0.0/16 -j ACCEPT\nCOMMIT\n";
    let ruled = evidence(tables("case.save", rule));
    let firewall = evidence(tables("ct-status-dnat.json", include_str!("../rulesets/ct-status-dnat.json")));
    let choose = |evidence: &Evidence, direct| {
        let settings = Settings {
            own_marks: OWN_MARKS,
            sync_period: Duration::from_secs(30),
            direct,
            scope: DirectScope::Learned,
        };
        let chosen = choose(evidence, settings);
        (chosen.path.name(), chosen.why.to_string())
    };
    let forwarding = "a rule of others looks at forwarded packets: iptables-nft filter FORWARD `-s 10.244.0.0/16 -j ACCEPT`";
    let by_setting = format!("shunt.links.path is direct; {forwarding}");
    for (evidence, direct, path, why) in [
        (
            &Evidence::default(),
            DirectPath::IfNoRules,
            "direct",
            "no rule of others looks at forwarded packets",
        ),
        (&Evidence::default(), DirectPath::Never, "programs", "so there is no direct path"),
        (&Evidence::default(), DirectPath::Always, "direct", "shunt.links.path is direct"),
        (&ruled, DirectPath::IfNoRules, "programs", forwarding),
        (&ruled, DirectPath::Always, "direct", &by_setting),
        (&firewall, DirectPath::IfNoRules, "netfilter", "`ct status dnat accept`"),
    ] {
        let (chosen, reason) = choose(evidence, direct);
        assert!(chosen == path && reason.ends_with(why), "{path} {why}: {chosen} {reason}");
    }
}

/// A CNI or a firewall that accepts its own pods is no fault of a node.
#[test]
fn known_rulesets_drop_no_node_ports_and_accept_some_of_what_they_forward() {
    for (file, text, _) in RULESETS {
        let evidence = evidence(tables(file, text));
        let drops_all: Vec<_> =
            forward_drops(&evidence).into_iter().filter(|chain| !chain.accepts_some).collect();
        assert_eq!(drops_all, [], "{file}");
        let drops = drops_before_services(&evidence, false);
        assert_eq!(!drops.is_empty(), *file == "raw-drop.save", "{file}: {drops:?}");
    }
}
