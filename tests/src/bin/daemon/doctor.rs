//! A scenario of `shunt doctor`: it finds the faults that are made on a node, and none on a healthy
//! one.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{apiserver::Interruption, deadline::Deadline, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);

/// A fault: what it is, how it is made, what ends it, and the finding.
struct Fault {
    finding: &'static str,
    make: &'static str,
    end: &'static str,
}

const fn fault(finding: &'static str, make: &'static str, end: &'static str) -> Fault {
    Fault { finding, make, end }
}

/// Faults of the node, beside a daemon that runs in any mode. The process is a copy of sleep,
/// because the kernel names it after its file.
const FAULTS: [Fault; 7] = [
    fault("ForwardDropped", "iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT"),
    fault(
        "NodePortsDropped",
        "iptables -t raw -I PREROUTING -p tcp --dport 30999 -j DROP",
        "iptables -t raw -D PREROUTING -p tcp --dport 30999 -j DROP",
    ),
    fault("NotForwarding", "sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1"),
    fault(
        "NotForwardingIPv6",
        "sysctl -qw net.ipv6.conf.all.forwarding=0",
        "sysctl -qw net.ipv6.conf.all.forwarding=1",
    ),
    fault(
        "StrictReversePath",
        "sysctl -qw net.ipv4.conf.all.rp_filter=1",
        "sysctl -qw net.ipv4.conf.all.rp_filter=0",
    ),
    fault(
        "OtherProxyRunning",
        "cp /bin/sleep $DIR/kube-proxy; $DIR/kube-proxy 60 >/dev/null 2>&1 & echo $! > $DIR/kube-proxy.pid",
        "kill $(cat $DIR/kube-proxy.pid)",
    ),
    fault("PinsUnfinished", "mkdir $PINS-next", "rmdir $PINS-next"),
];

/// The iptables mode sets it itself, with a rule.
const ROUTE_LOCALNET: Fault = fault(
    "RouteLocalnet",
    "sysctl -qw net.ipv4.conf.all.route_localnet=1",
    "sysctl -qw net.ipv4.conf.all.route_localnet=0",
);

/// Rules of another mode than the one that runs.
const IPTABLES_RULES: Fault =
    fault("OtherProxyRules", "iptables -t nat -N KUBE-SERVICES", "iptables -t nat -X KUBE-SERVICES");
const NFTABLES_RULES: Fault =
    fault("OtherProxyRules", "nft add table ip kube-proxy", "nft delete table ip kube-proxy");

/// What only the ebpf mode judges.
const OTHER_RULES_ON_LINKS: Fault = fault(
    "NetfilterOnLinks",
    "nft add table ip other-firewall; nft 'add chain ip other-firewall c { type filter hook prerouting priority -300; }'; \
     nft add rule ip other-firewall c ip daddr 10.96.0.99 counter drop",
    "nft delete table ip other-firewall",
);

pub(crate) fn doctor_finds_each_fault_and_none_on_a_healthy_node(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    check_healthy(&node, setup)?;
    let of_mode: &[Fault] = match setup.mode.as_str() {
        "ebpf" => &[ROUTE_LOCALNET, IPTABLES_RULES, OTHER_RULES_ON_LINKS],
        "nftables" => &[ROUTE_LOCALNET, IPTABLES_RULES],
        _ => &[NFTABLES_RULES],
    };
    for Fault { finding, make, end } in FAULTS.iter().chain(of_mode) {
        run(&node, make)?;
        let found = wait_for(&node, setup, |found| has(found, finding)).with_context(|| *finding);
        run(&node, end)?;
        found?;
        wait_for(&node, setup, |found| !has(found, finding))
            .with_context(|| format!("the end of {finding}"))?;
    }
    check_healthy(&node, setup)?;
    let found = doctor(&node, setup, UNPRIVILEGED)?;
    ensure!(has(&found, "DaemonSilent") && found.exit_code == 2, "without privileges: {found:?}");
    if setup.mode == "ebpf" {
        node.proxy.configure(&setup.mode, &serde_yaml_ng::from_str(NODE_SOCKETS)?)?;
        wait_for(&node, setup, |found| has(found, "SocketsLeftAlone")).context(NODE_SOCKETS)?;
    }
    the_clock_differs(&node, setup)?;
    drift_is_found(&node, setup)?;
    node.cluster.down();
    wait_for(&node, setup, |found| has(found, "WatchFailing")).context("without an API server")?;
    node.proxy.stop()?;
    let found = doctor(&node, setup, "")?;
    ensure!(has(&found, "DaemonNotRunning") && found.exit_code == 2, "without a daemon: {found:?}");
    let left = if setup.mode == "ebpf" { "PinsWithoutDaemon" } else { "OtherProxyRules" };
    ensure!(has(&found, left) && !has(&found, "CheckFailed"), "without a daemon: {found:?}");
    let found = doctor(&node, setup, UNPRIVILEGED)?;
    ensure!(!has(&found, "NoModeWorks") && has(&found, "CheckFailed"), "without privileges: {found:?}");
    node.proxy.clean_up(&node.world)?;
    drop(node);
    if setup.mode == "ebpf" { full_maps_are_found(setup) } else { Ok(()) }
}

/// A map is nearly full, with a daemon and, by its pins, without.
fn full_maps_are_found(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{shunt: {ebpf: {mapSizes: {services: 32}}}}")?;
    for number in 1..=25 {
        let service = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: many-{number}, namespace: default}}\n\
             spec: {{clusterIP: 10.96.1.{number}, ports: [{{port: 80}}]}}\n"
        );
        node.cluster.apply_all(&service)?;
    }
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    wait_for(&node, setup, |found| has(found, "MapNearlyFull")).context("with a daemon")?;
    node.proxy.stop()?;
    let found = doctor(&node, setup, "")?;
    ensure!(has(&found, "MapNearlyFull"), "without a daemon: {found:?}");
    node.proxy.clean_up(&node.world)
}

/// The API server says another time. New watches bring it.
fn the_clock_differs(node: &TestNode, setup: &Setup) -> Result<()> {
    let server = node.cluster.server();
    server.set_date(Some("Sun, 06 Nov 1994 08:49:37 GMT".parse()?));
    server.interrupt(Interruption::End);
    let found = wait_for(node, setup, |found| has(found, "ClockSkewed")).context("another time")?;
    ensure!(found.text.contains("ahead of that of the API server"), "{}", found.text);
    server.set_date(None);
    server.interrupt(Interruption::End);
    wait_for(node, setup, |found| !has(found, "ClockSkewed")).context("the right time")?;
    Ok(())
}

/// Another program removes what the mode needs. Modes that notice it at once repair it first.
fn drift_is_found(node: &TestNode, setup: &Setup) -> Result<()> {
    let damage = match setup.mode.as_str() {
        "ebpf" => {
            "bpftool map delete pinned $PINS/services key hex 00 00 00 00 00 00 00 00 00 00 ff ff 0a 60 00 50 50 00 06 00"
        }
        "iptables" => "iptables -t nat -F KUBE-MARK-MASQ",
        _ => return Ok(()),
    };
    // A full sync may repair it before the command looks.
    let found = Deadline::after(TIMEOUT).try_poll(|| {
        let _damaged = run(node, damage);
        anyhow::Ok(has(&doctor(node, setup, "")?, "Drift").then_some(()))
    })?;
    found.with_context(|| format!("no Drift after {damage}"))
}

/// Runs the command as a user who may do nothing.
const UNPRIVILEGED: &str = "setpriv --reuid 65534 --clear-groups ";
const NODE_SOCKETS: &str = "{shunt: {sockets: {scope: node}}}";

/// What the command printed.
#[derive(Debug)]
struct Found {
    exit_code: i32,
    /// Identifiers and severities.
    findings: Vec<(String, String)>,
    text: String,
}

fn has(found: &Found, finding: &str) -> bool {
    found.findings.iter().any(|(id, _)| id == finding)
}

fn check_healthy(node: &TestNode, setup: &Setup) -> Result<()> {
    let found = doctor(node, setup, "")?;
    let is_healthy = found.findings.iter().all(|(_, severity)| severity == "info");
    ensure!(is_healthy && found.exit_code == 0, "a healthy node: {}", found.text);
    Ok(())
}

fn run(node: &TestNode, line: &str) -> Result<()> {
    let directory = node.world.directory();
    node.world.run(Host::Node1, &format!("DIR={}\n{line}", directory.display())).map(drop)
}

fn wait_for(node: &TestNode, setup: &Setup, is_expected: impl Fn(&Found) -> bool) -> Result<Found> {
    let mut last = String::new();
    let found = Deadline::after(TIMEOUT).try_poll(|| {
        let found = doctor(node, setup, "")?;
        last.clone_from(&found.text);
        anyhow::Ok(is_expected(&found).then_some(found))
    })?;
    found.with_context(|| format!("the last report: {last}"))
}

/// Runs the command, with words before it.
fn doctor(node: &TestNode, setup: &Setup, before: &str) -> Result<Found> {
    let line = format!("{before}{} doctor -o json --bpf-pin-dir $PINS; echo $?", setup.shunt.display());
    // The shell ends at the first command that fails.
    let output = node.world.run(Host::Node1, &format!("set +e\n{line}"))?;
    let (text, exit_code) = output.trim_end().rsplit_once('\n').context("no report")?;
    let report: serde_json::Value = serde_json::from_str(text).with_context(|| output.clone())?;
    let findings = report["findings"].as_array().context("no findings")?;
    let text_of = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let findings =
        findings.iter().map(|finding| (text_of(&finding["id"]), text_of(&finding["severity"]))).collect();
    Ok(Found { exit_code: exit_code.parse()?, findings, text: text.to_owned() })
}
