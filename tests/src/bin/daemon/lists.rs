//! Scenarios of lists of `shunt get` that show what the kernel holds.

use std::{fs::File, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::Deadline,
    small_cluster::{Slices, WEB_PORT},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);

/// A Service with affinity.
const STICKY: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: sticky, namespace: default}\n\
                      spec: {type: NodePort, clusterIP: 10.96.0.81, sessionAffinity: ClientIP, \
                      sessionAffinityConfig: {clientIP: {timeoutSeconds: 500}}, \
                      ports: [{port: 80, nodePort: 30081, targetPort: 8080}]}\n";

/// Adds a Service with affinity.
pub(super) fn add_sticky_service(node: &TestNode) -> Result<()> {
    node.cluster.apply_all(STICKY)?;
    let mut slices = Slices::for_all_services(&[Host::A1, Host::A2]);
    slices.add("sticky", false, WEB_PORT, &[Host::A1, Host::A2]);
    node.cluster.apply_all(slices.text())
}

/// A client outside, and in the ebpf mode a process of the node, have affinity after a connection.
pub(crate) fn clients_with_affinity_are_listed(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    add_sticky_service(&node)?;
    let outside = affinity_after(&mut node, setup, Host::Client, "192.168.57.11:30081", "192.168.57.50")?;
    ensure!((480..=500).contains(&outside["remainingSeconds"].as_u64().unwrap_or_default()), "{outside}");
    // Packets of the node itself have the source that the route to the VIP gives them. In the ipvs
    // mode the VIP is an address of the node.
    let (client, of) = match setup.mode.as_str() {
        "ebpf" => ("node", "sockets"),
        "ipvs" => ("10.96.0.81", "packets"),
        _ => ("192.168.57.11", "packets"),
    };
    let own = affinity_after(&mut node, setup, Host::Node1, "10.96.0.81:80", client)?;
    ensure!(own["of"] == of, "{own}");
    let others = get(&node, setup, "affinity web")?;
    ensure!(others.is_empty(), "web has no affinity: {others:?}");
    node.end()
}

/// Connections of sockets in the ebpf mode, of the node and of a pod; flows by Service, by the time
/// without packets, and in other modes by their age.
pub(crate) fn connections_and_flows_are_selected(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.world.run(Host::Node1, "sysctl -qw net.netfilter.nf_conntrack_timestamp=1")?;
    let request = ConnectRequest::new("192.168.57.11:30080".parse()?, Protocol::Tcp, 1).with_timeout(TIMEOUT);
    let answers = node.world.agent(Host::Client)?.connect(request)?;
    ensure!(matches!(answers[..], [Attempt::Answered(_)]), "{answers:?}");
    let count = |what: &str| Ok::<_, anyhow::Error>(get(&node, setup, what)?.len());
    ensure!(count("flows web --client 192.168.57.50")? > 0, "no flow of web");
    ensure!(count("flows dns --client 192.168.57.50")? == 0, "dns has a flow of web");
    let (new, old) = match setup.mode.as_str() {
        "ebpf" => ("--max-idle 1h", "--min-idle 1h"),
        _ => ("--max-age 1h", "--min-age 1h"),
    };
    ensure!(count(&format!("flows web {new}"))? > 0, "no new flow");
    ensure!(count(&format!("flows web {old}"))? == 0, "an old flow");
    if setup.mode == "ebpf" {
        for (from, owner) in [(Host::Node1, "node"), (Host::A3, "10.244.1.13")] {
            let line = "exec 3<>/dev/tcp/10.96.0.80/80; sleep 60";
            let log = File::create(node.world.directory().join(format!("open-{owner}")))?;
            let arguments = ["-c".to_owned(), line.to_owned()];
            let _open = node.world.spawn(from, Path::new("/bin/bash"), &arguments, &log)?;
            let is_listed = || {
                let rows = get(&node, setup, "connections web --state established")?;
                let of_owner = |row: &&Value| {
                    let is_owner =
                        row["owner"].as_str().is_some_and(|text| text.split(',').any(|o| o == owner));
                    is_owner && row["vip"] == "10.96.0.80:80" && row["service"] == "default/web"
                };
                anyhow::Ok(rows.iter().find(of_owner).map(|_| ()))
            };
            let listed = Deadline::after(TIMEOUT).try_poll(is_listed)?;
            listed.with_context(|| {
                format!("no connection of {owner}: {:?}", get(&node, setup, "connections"))
            })?;
        }
    }
    node.end()
}

/// Connects, and returns the row of the client, whose endpoint is the one that answered.
fn affinity_after(node: &mut TestNode, setup: &Setup, from: Host, to: &str, client: &str) -> Result<Value> {
    let request = ConnectRequest::new(to.parse()?, Protocol::Tcp, 1).with_timeout(TIMEOUT);
    let answer = Deadline::after(TIMEOUT).try_poll(|| {
        let answers = node.world.agent(from)?.connect(request.clone())?;
        anyhow::Ok(answers.into_iter().find_map(|attempt| match attempt {
            Attempt::Answered(answer) => Some(answer),
            Attempt::Failed(_) => None,
        }))
    })?;
    let answer = answer.with_context(|| format!("no answer of {to}"))?;
    let rows = get(node, setup, "affinity sticky")?;
    let row = rows.iter().find(|row| row["client"] == client);
    let row = row.with_context(|| format!("no client {client}: {rows:?}"))?;
    let host = if row["endpoint"] == "10.244.1.11:8080" { "a1" } else { "a2" };
    ensure!(answer.host == host, "{} answered, but {row}", answer.host);
    Ok(row.clone())
}

/// Returns the items of a list.
pub(super) fn get(node: &TestNode, setup: &Setup, what: &str) -> Result<Vec<Value>> {
    let text = node.world.run(Host::Node1, &format!("{} get {what} -o json", setup.shunt.display()))?;
    let list: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// What somebody changes, and what shows it.
pub(super) struct Damage {
    pub(super) line: String,
    pub(super) shown: &'static str,
    /// It is of the Service `web`, not of what all Services share.
    pub(super) is_of_web: bool,
    /// The next periodic look repairs it.
    is_repaired: bool,
}

/// What somebody else changes in the kernel is named before shunt repairs it, and no more after it.
pub(crate) fn drift_is_named(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let healthy = get(&node, setup, "drift")?;
    ensure!(healthy.is_empty(), "without a change: {healthy:?}");
    for Damage { line, shown, is_of_web, is_repaired } in damages(&setup.mode, &node) {
        node.world.run(Host::Node1, &line).with_context(|| line.clone())?;
        let found = get(&node, setup, "drift")?;
        let is_it = |row: &&Value| {
            row["difference"].as_str().is_some_and(|text| text.contains(shown))
                && (row["name"] == "web") == is_of_web
        };
        ensure!(found.iter().any(|row| is_it(&row)), "after {line}: {found:?}");
        if is_of_web {
            let others = found.iter().find(|row| row["name"] != "web");
            ensure!(others.is_none(), "after {line}: {others:?}");
            let differs = drift_of_web(&node, setup)?.is_some_and(|differences| differences > 0);
            ensure!(differs, "after {line}, services --drift shows nothing");
        }
        let is_gone = || {
            let is_same = drift_of_web(&node, setup)? == Some(0) && get(&node, setup, "drift")?.is_empty();
            anyhow::Ok(is_same.then_some(()))
        };
        if is_repaired {
            let gone = Deadline::after(LOOK).try_poll(is_gone)?;
            gone.with_context(|| format!("not repaired: {line}: {:?}", get(&node, setup, "drift")))?;
        }
    }
    node.end()
}

/// Returns the number of differences of `web`; `None` if it changes at the moment.
fn drift_of_web(node: &TestNode, setup: &Setup) -> Result<Option<usize>> {
    let rows = get(node, setup, "services web --drift")?;
    Ok(rows.first().and_then(|row| Some(row["drift"].as_array()?.len())))
}

/// The longest time until the next periodic look.
const LOOK: Duration = Duration::from_secs(50);

pub(super) fn damages(mode: &str, node: &TestNode) -> Vec<Damage> {
    let pins = node.world.pin_directory();
    let pins = pins.display();
    let of_web = |line: String, shown, is_repaired| Damage { line, shown, is_of_web: true, is_repaired };
    let of_all = |line: &str, shown| Damage { line: line.into(), shown, is_of_web: false, is_repaired: true };
    match mode {
        "ebpf" => vec![of_web(
            // 10.96.0.80, port 80, TCP.
            format!(
                "bpftool map delete pinned {pins}/services key hex 00 00 00 00 00 00 00 00 00 00 ff ff 0a 60 00 50 50 00 06 00"
            ),
            "services 10.96.0.80:80/TCP is missing",
            true,
        )],
        // The kernel notifies about the first change, and shunt compares all. The next time is a
        // second later.
        "nftables" => vec![
            of_all(
                "nft add chain ip kube-proxy other; sleep 0.3; nft flush chain ip kube-proxy services",
                "the chain services has 0 rules",
            ),
            of_web(
                "nft add chain ip kube-proxy other; sleep 0.3; nft delete element ip kube-proxy service-ips-2 { 10.96.0.80 . tcp . 80 }"
                    .into(),
                "service-ips-2 { 10.96.0.80 . tcp . 80 ",
                true,
            ),
        ],
        "ipvs" => vec![of_web(
            "ip address delete 10.96.0.80/32 dev kube-ipvs0".into(),
            "the address 10.96.0.80 of the link kube-ipvs0 is missing",
            true,
        )],
        _ => vec![
            // As with upstream, a single rule that is missing is not seen soon. The first line of
            // -S is the chain.
            of_web(
                "iptables -t nat -D KUBE-SERVICES $(($(iptables -t nat -S KUBE-SERVICES | grep -nF 10.96.0.80/32 | cut -d: -f1) - 1))"
                    .into(),
                "10.96.0.80/32",
                false,
            ),
        ],
    }
}
