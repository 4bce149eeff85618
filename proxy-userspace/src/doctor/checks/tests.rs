//! Each fault gives its finding, and a healthy node gives none.

use proxy_common::layout::{MAPS, MapDeclaration};

use super::{
    super::{
        Severity,
        catalog::{self, Kind},
        facts::{Daemon, Facts, Pins, Sysctls},
    },
    judge,
};
use crate::{
    dataplane::Mode,
    health::{NodeReport, ReportedMap, WatchReport},
    inspect::{DriftRow, LeftOutRow, NamedPort},
    link_path::{
        Evidence,
        ruleset::{Family, Source},
        save,
    },
    net::IpFamily,
    probe::{Evaluation, Lack, ModeSupport},
};

fn report() -> NodeReport {
    NodeReport {
        version: env!("CARGO_PKG_VERSION").into(),
        mode: Some("ebpf".into()),
        maps: vec![ReportedMap { name: "services".into(), entries: 79, capacity: 100 }],
        oldest_pending_seconds: Some(29),
        clock_ahead_seconds: Some(9),
        second_shunt_seconds_ago: Some(900),
        watches: vec![watch(1199)],
        pin_directory: "/sys/fs/bpf/shunt".into(),
        ..NodeReport::default()
    }
}

fn healthy() -> Facts {
    let support = |mode| ModeSupport { mode, missing: Vec::new(), limits: Vec::new() };
    Facts {
        daemon: Daemon::Running(report().into()),
        left_out_ports: Vec::new(),
        drift: Vec::new(),
        evaluation: Evaluation {
            modes: Mode::ALL.iter().map(|mode| support(*mode)).collect(),
            auto: Some(Mode::Ebpf),
            why: "it is the preferred mode".into(),
        },
        kube_proxies: Vec::new(),
        rules: Vec::new(),
        pins: Pins {
            directory: "/sys/fs/bpf/shunt".into(),
            links: 9,
            maps: Vec::new(),
            unfinished: Vec::new(),
        },
        sysctls: Sysctls {
            forwards_ipv4: Some(1),
            forwards_ipv6: Some(1),
            conntrack_entries: Some(79),
            conntrack_max: Some(100),
            rp_filter: [("all".into(), 2), ("eth0".into(), 1)].into(),
            route_localnet: [("all".into(), 0), ("eth0".into(), 0), ("lo".into(), 1)].into(),
        },
        evidence: Some(Evidence::default()),
        is_root: true,
        confinement: None,
        unread: Vec::new(),
    }
}

fn found(facts: &Facts) -> Vec<(&'static str, String)> {
    judge(facts).findings.into_iter().map(|finding| (finding.id, finding.message)).collect()
}

/// A change of the facts.
type Fault = fn(&mut Facts);

fn report_of(facts: &mut Facts) -> &mut NodeReport {
    match &mut facts.daemon {
        Daemon::Running(report) => report,
        other => panic!("{other:?}"),
    }
}

fn drift(difference: &str) -> DriftRow {
    DriftRow { port: None, difference: difference.into(), not_compared: false }
}

fn rules(lines: &str, table: &str) -> Evidence {
    let saved = format!("*{table}\n{lines}\nCOMMIT\n");
    let tables = save::parse(&saved, Source::IptablesNft, Family::Ip);
    Evidence { tables, ..Evidence::default() }
}

fn lack(feature: crate::kernel::probe::Feature) -> Lack {
    Lack {
        any_of: vec![feature],
        reason: "it is not there".into(),
        without: String::new(),
        remedy: "add it".into(),
    }
}

const OF_THE_DAEMON: &[(&Kind, Fault, &str)] = &[
    (&catalog::DAEMON_SILENT, |facts| facts.daemon = Daemon::Silent("late".into()), "not answer: late"),
    (&catalog::NOT_READY, |facts| report_of(facts).not_ready.push("a change waits".into()), "a change waits"),
    (
        &catalog::SYNC_FAILING,
        |facts| report_of(facts).failing.push("cannot program".into()),
        "cannot program",
    ),
    (&catalog::CHANGES_PENDING, |facts| report_of(facts).oldest_pending_seconds = Some(30), "waits for 30 s"),
    (&catalog::WATCH_FAILING, |facts| report_of(facts).watch_errors.push("Nodes: 403".into()), "Nodes: 403"),
    (
        &catalog::CONFIGURATION_REFUSED,
        |facts| report_of(facts).configuration_refused = Some("mode: unknown".into()),
        "mode: unknown",
    ),
    (
        &catalog::MANIFESTS_UNREADABLE,
        |facts| report_of(facts).unreadable_manifests.push("web.yaml: line 3".into()),
        "web.yaml",
    ),
    (&catalog::LINK_LEFT_OUT, |facts| report_of(facts).left_out_links.push("eth1".into()), "eth1"),
    (
        &catalog::LINK_DISPLACED,
        |facts| report_of(facts).displaced_links.push("eth0 by cni".into()),
        "eth0 by cni",
    ),
    (
        &catalog::NETFILTER_ON_LINKS,
        |facts| report_of(facts).netfilter_on_links = Some("a rule of others".into()),
        "a rule of others",
    ),
    (
        &catalog::OTHERS_UNREADABLE,
        |facts| {
            let why = "shunt cannot read what other programs set up: nft was ended by a signal";
            report_of(facts).netfilter_on_links = Some(why.into());
        },
        "nft was ended by a signal",
    ),
    (
        &catalog::SOCKETS_LEFT_ALONE,
        |facts| report_of(facts).sockets_left_alone = Some("as configured".into()),
        "as configured",
    ),
    (&catalog::MAP_NEARLY_FULL, |facts| report_of(facts).maps[0].entries = 80, "services has 80 of 100"),
    (&catalog::OTHER_VERSION, |facts| report_of(facts).version = "9.9.9".into(), "the daemon is 9.9.9"),
    (&catalog::DRIFT, |facts| facts.drift.push(drift("a chain is missing")), "a chain is missing"),
    (
        &catalog::SECOND_SHUNT,
        |facts| report_of(facts).second_shunt_seconds_ago = Some(899),
        "another shunt tried to run on this node 899 s ago",
    ),
    (&catalog::CLOCK_SKEWED, |facts| report_of(facts).clock_ahead_seconds = Some(-10), "10 s behind"),
    (
        &catalog::WATCH_SILENT,
        |facts| report_of(facts).watches.push(watch(1200)),
        "Services: no change and no bookmark for 1200 s",
    ),
    (
        &catalog::CONFINED,
        |facts| report_of(facts).confined_by = Some(("the profile p".into(), "unload it".into())),
        "the profile p confines shunt",
    ),
    (
        &catalog::SERVICE_LEFT_OUT,
        |facts| facts.left_out_ports = left_out(1),
        "shop/web http (IPv4): no room: full",
    ),
];

const OF_THE_NODE: &[(&Kind, Fault, &str)] = &[
    (
        &catalog::FEATURE_MISSING,
        |facts| facts.evaluation.modes[0].missing.push(lack(crate::kernel::probe::Feature::Bpffs)),
        "it is not there",
    ),
    (
        &catalog::FEATURE_LIMITED,
        |facts| facts.evaluation.modes[0].limits.push(lack(crate::kernel::probe::Feature::SetRetval)),
        "it is not there",
    ),
    (&catalog::OTHER_PROXY, |facts| facts.kube_proxies.push(7), "the process 7"),
    (&catalog::OTHER_RULES, |facts| facts.rules.push(Mode::Iptables), "the mode iptables"),
    (
        &catalog::PINS_UNFINISHED,
        |facts| facts.pins.unfinished.push("/sys/fs/bpf/shunt-next".into()),
        "/sys/fs/bpf/shunt-next exists",
    ),
    (&catalog::NOT_FORWARDING, |facts| facts.sysctls.forwards_ipv4 = Some(0), "net.ipv4.ip_forward is 0"),
    (&catalog::NOT_FORWARDING_IPV6, |facts| facts.sysctls.forwards_ipv6 = Some(0), "forwarding is 0"),
    (
        &catalog::STRICT_RP_FILTER,
        |facts| facts.sysctls.rp_filter = [("all".into(), 0), ("eth0".into(), 1)].into(),
        "rp_filter is 1 on eth0",
    ),
    (
        &catalog::ROUTE_LOCALNET,
        |facts| facts.sysctls.route_localnet = [("all".into(), 1), ("eth0".into(), 0)].into(),
        "route_localnet is 1 on eth0",
    ),
    (
        &catalog::FORWARD_DROPPED,
        |facts| facts.evidence = Some(rules(":FORWARD DROP [0:0]", "filter")),
        "iptables-nft filter FORWARD has the policy drop, and no rule",
    ),
    (
        &catalog::FORWARD_FILTERED,
        |facts| facts.evidence = Some(rules(":FORWARD DROP [0:0]\n-A FORWARD -i cni0 -j ACCEPT", "filter")),
        "after rules that accept some connections",
    ),
    (
        &catalog::NODE_PORTS_DROPPED,
        |facts| {
            facts.evidence = Some(rules(
                ":PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -m tcp --dport 30080 -j DROP",
                "raw",
            ));
        },
        "iptables-nft raw PREROUTING",
    ),
    (&catalog::CONNTRACK_NEARLY_FULL, |facts| facts.sysctls.conntrack_entries = Some(80), "has 80 of 100"),
    (&catalog::CHECK_FAILED, |facts| facts.unread.push("cannot read it".into()), "cannot read it"),
];

const WITHOUT_DAEMON: &[(&Kind, Fault, &str)] = &[
    (
        &catalog::MAP_NEARLY_FULL,
        |facts| facts.pins.maps = vec![ReportedMap { name: "flows".into(), entries: 9, capacity: 10 }],
        "the map flows has 9 of 10",
    ),
    (&catalog::PINS_WITHOUT_DAEMON, |_| {}, "9 programs are pinned in /sys/fs/bpf/shunt"),
    (&catalog::OTHER_RULES, |facts| facts.rules.push(Mode::Nftables), "the mode nftables"),
    (&catalog::NO_MODE_WORKS, |facts| facts.evaluation.auto = None, "it is the preferred mode"),
    (
        &catalog::CHECK_FAILED,
        |facts| (facts.evaluation.auto, facts.is_root) = (None, false),
        "what each mode needs: only root can",
    ),
    (
        &catalog::NETFILTER_ON_LINKS,
        |facts| {
            facts.evidence =
                Some(rules(":PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 10.96.0.1/32 -j DROP", "raw"));
        },
        "iptables-nft raw PREROUTING",
    ),
];

fn watch(seconds: u64) -> WatchReport {
    WatchReport { kind: "Services".into(), connected: true, seconds_since_event: Some(seconds) }
}

fn left_out(count: usize) -> Vec<LeftOutRow> {
    let port = NamedPort {
        namespace: "shop".into(),
        name: "web".into(),
        port_name: "http".into(),
        protocol: "TCP".into(),
        family: "IPv4".into(),
    };
    vec![LeftOutRow { port, reason: "no room".into(), message: "full".into() }; count]
}

#[test]
fn a_healthy_node_has_no_findings() {
    assert_eq!(found(&healthy()), []);
}

#[test]
fn each_fault_gives_its_finding_and_no_other() {
    for (kind, fault, message) in OF_THE_DAEMON.iter().chain(OF_THE_NODE) {
        let mut facts = healthy();
        fault(&mut facts);
        let found = found(&facts);
        let [(id, text)] = &found[..] else { panic!("{}: {found:?}", kind.id) };
        assert_eq!(*id, kind.id);
        assert!(text.contains(message), "{}: {text}", kind.id);
    }
}

#[test]
fn without_a_daemon_that_is_a_finding_and_the_other_checks_still_run() {
    for (kind, fault, message) in WITHOUT_DAEMON {
        let mut facts = Facts { daemon: Daemon::NotRunning, ..healthy() };
        fault(&mut facts);
        let found = found(&facts);
        assert!(found.iter().any(|(id, _)| *id == "DaemonNotRunning"), "{found:?}");
        let is_there = found.iter().any(|(id, text)| *id == kind.id && text.contains(message));
        assert!(is_there, "{}: {found:?}", kind.id);
    }
}

#[test]
fn a_user_who_may_not_look_is_not_told_that_no_mode_works() {
    let mut facts = Facts { daemon: Daemon::Silent("refused".into()), is_root: false, ..healthy() };
    facts.evaluation.auto = None;
    let ids: Vec<_> = found(&facts).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["DaemonSilent", "CheckFailed"]);
}

#[test]
fn every_kind_has_a_fault_that_gives_it() {
    let faults = [OF_THE_DAEMON, OF_THE_NODE, WITHOUT_DAEMON].concat();
    for kind in catalog::ALL.iter().filter(|kind| kind.id != "DaemonNotRunning") {
        assert!(faults.iter().any(|(of, ..)| of.id == kind.id), "{}", kind.id);
    }
}

#[test]
fn rules_of_the_running_mode_and_of_its_backstop_are_no_finding() {
    for (mode, backstop, rules) in [
        ("nftables", None, vec![Mode::Nftables]),
        ("iptables", None, vec![Mode::Iptables]),
        ("ipvs", None, vec![Mode::Iptables, Mode::Ipvs]),
        ("ebpf", Some("iptables"), vec![Mode::Iptables]),
    ] {
        let mut facts = Facts { rules, ..healthy() };
        let report = report_of(&mut facts);
        (report.mode, report.backstop) = (Some(mode.into()), backstop.map(Into::into));
        assert_eq!(found(&facts), [], "{mode}");
    }
}

#[test]
fn rules_of_before_are_no_finding_until_the_first_sync_is_complete() {
    let mut facts = Facts { rules: vec![Mode::Iptables], ..healthy() };
    report_of(&mut facts).not_ready.push("the first full sync is not complete".into());
    assert!(found(&facts).iter().all(|(id, _)| *id == "NotReady"));
}

#[test]
fn route_localnet_of_the_iptables_mode_is_no_finding() {
    let mut facts = healthy();
    facts.sysctls.route_localnet.insert("all".into(), 1);
    report_of(&mut facts).mode = Some("iptables".into());
    assert_eq!(found(&facts), []);
}

#[test]
fn many_service_ports_that_are_left_out_are_counted() {
    let found = found(&Facts { left_out_ports: left_out(1_000), ..healthy() });
    assert_eq!(found.len(), 11);
    assert_eq!(found[10].1, "and 990 more");
}

#[test]
fn the_remedy_of_a_missing_feature_is_that_of_the_probe() {
    let mut facts = healthy();
    facts.evaluation.modes[0].missing.push(lack(crate::kernel::probe::Feature::Bpffs));
    let report = judge(&facts);
    assert_eq!((report.findings[0].severity, &*report.findings[0].remedy), (Severity::Error, "add it"));
}

#[test]
fn a_conntrack_table_without_a_limit_is_never_full() {
    let mut facts = healthy();
    facts.sysctls.conntrack_max = Some(0);
    assert_eq!(found(&facts), []);
}

#[test]
fn a_family_that_fails_is_no_drift() {
    let unknown = DriftRow { not_compared: true, ..drift("IPv6: it is not known") };
    assert_eq!(found(&Facts { drift: vec![unknown], ..healthy() }), []);
}

#[test]
fn maps_that_are_full_on_every_busy_node_are_no_finding() {
    let full = |map: &MapDeclaration| ReportedMap { name: map.name.into(), entries: 100, capacity: 100 };
    let mut facts = healthy();
    report_of(&mut facts).maps = MAPS.iter().filter(|map| map.is_lru).map(full).collect();
    let maps: Vec<_> = found(&facts).into_iter().map(|(_, message)| message).collect();
    let expected = ["udp_sockets", "tcp_connections", "flows"];
    assert_eq!(maps, expected.map(|map| format!("the map {map} has 100 of 100 entries")));
}

#[test]
fn forwarding_is_judged_for_the_families_of_the_pods() {
    let found = |families: &[&str], off: IpFamily| {
        let mut facts = healthy();
        report_of(&mut facts).families = families.iter().map(|family| (*family).to_owned()).collect();
        match off {
            IpFamily::V4 => facts.sysctls.forwards_ipv4 = Some(0),
            IpFamily::V6 => facts.sysctls.forwards_ipv6 = Some(0),
        }
        let findings = judge(&facts).findings;
        findings.into_iter().map(|finding| (finding.id, finding.severity)).collect::<Vec<_>>()
    };
    let (error, info) = (("NotForwarding", Severity::Error), ("NotForwardingIPv6", Severity::Info));
    for families in [&[][..], &["IPv4"]] {
        assert_eq!((found(families, IpFamily::V4), found(families, IpFamily::V6)), (vec![error], vec![info]));
    }
    assert_eq!((found(&["IPv6"], IpFamily::V4), found(&["IPv6"], IpFamily::V6)), (vec![], vec![error]));
    let both = ["IPv4", "IPv6"];
    assert_eq!((found(&both, IpFamily::V4), found(&both, IpFamily::V6)), (vec![error], vec![error]));
}
