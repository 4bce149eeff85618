//! Scenarios of `shunt explain` where it asks the kernel: affinity, and `--check`.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::{Deadline, scaled},
    world::Host,
};

use super::{
    lists::{Damage, add_sticky_service, damages, get},
    test_node::{Setup, TestNode},
};

const TIMEOUT: Duration = Duration::from_mins(1);
const CLIENT: &str = "192.168.57.50";

/// Runs `shunt explain` and returns its exit code and its answer.
fn explain(node: &TestNode, setup: &Setup, arguments: &str) -> Result<(i32, Value)> {
    let line = format!("{} explain {arguments} -o json 2>&1 && echo 0 || echo \"$?\"", setup.shunt.display());
    let text = node.world.run(Host::Node1, &line)?;
    let (answer, code) = text.trim_end().rsplit_once('\n').with_context(|| text.clone())?;
    Ok((code.parse()?, serde_json::from_str(answer).with_context(|| text.clone())?))
}

/// The client holds no endpoint, then the one that answered it, also for the model.
pub(crate) fn the_holder_of_affinity_is_named(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    add_sticky_service(&node)?;
    for (from, client, to) in
        [(Host::Client, CLIENT, "192.168.57.11:30081"), (Host::A3, "10.244.1.13", "10.96.0.81:80")]
    {
        let question = format!("{client} {to}");
        let has_endpoints = || {
            let answer = explain(&node, setup, &question).ok()?.1;
            (answer["verdict"] == "Translate").then_some(answer)
        };
        let before = Deadline::after(TIMEOUT).poll(has_endpoints).context("sticky is not served")?;
        ensure!(before["affinity"] == "holdsNone", "{before}");
        let request = ConnectRequest::new(to.parse()?, Protocol::Tcp, 3).with_timeout(TIMEOUT);
        let answers = node.world.agent(from)?.connect(request)?;
        let Some(Attempt::Answered(answer)) = answers.first() else { anyhow::bail!("{answers:?}") };
        let (_, explained) = explain(&node, setup, &question)?;
        let held = explained["affinity"]["holds"]["endpoint"].as_str().unwrap_or_default();
        ensure!(
            held == if answer.host == "a1" { "10.244.1.11:8080" } else { "10.244.1.12:8080" },
            "{explained}"
        );
        let remaining = explained["affinity"]["holds"]["remainingSeconds"].as_u64();
        ensure!(remaining.is_some_and(|seconds| (480..=500).contains(&seconds)), "{explained}");
        let reason = explained["reason"].as_str().unwrap_or_default();
        ensure!(reason == format!("the endpoint {held}, which holds the client's affinity"), "{reason}");
    }
    node.end()
}

/// Returns the counts of web after the last connection. In the ipvs mode there are none before
/// each virtual server has its owner. The kernel adds them up every two seconds (`ip_vs_est.c`).
fn settled_counts(node: &TestNode, setup: &Setup) -> Result<Value> {
    let is_ipvs = setup.mode == "ipvs";
    let pause =
        if is_ipvs { scaled(Duration::from_secs(1)).max(Duration::from_secs(3)) } else { Duration::ZERO };
    let mut last = Value::Null;
    let settled = Deadline::after(TIMEOUT).try_poll(|| {
        let now = counts(node, setup)?;
        let is_settled = !is_ipvs || !now.is_null() && now == last;
        last.clone_from(&now);
        if !is_settled {
            thread::sleep(pause);
        }
        anyhow::Ok(is_settled.then_some(now))
    })?;
    settled.with_context(|| format!("the counts of web do not settle: {last}"))
}

/// A healthy node has no difference, and a check leaves nothing behind. What somebody changes in
/// the kernel is named, with exit code 3.
pub(crate) fn a_check_names_where_the_kernel_differs(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let before = settled_counts(&node, setup)?;
    let questions = [
        (format!("{CLIENT} 192.168.57.11:30080"), true),
        (format!("{CLIENT} 10.96.0.80:80"), true),
        (format!("{CLIENT} 10.96.0.80:81"), true),
        (format!("{CLIENT} 10.96.0.53:53/udp"), true),
        ("node web".to_owned(), false),
        ("pod/a1 web".to_owned(), false),
    ];
    let is_ebpf = setup.mode == "ebpf";
    for (question, is_on_link) in &questions {
        // A pod of a test that runs at the same time has the address of this one. For a moment it
        // may redirect its packets, and is then served on its link.
        let answered = Deadline::after(TIMEOUT).try_poll(|| {
            let (code, answer) = explain(&node, setup, &format!("{question} --check"))?;
            let no_difference = answer["check"]["differences"].as_array().is_some_and(Vec::is_empty);
            ensure!(code == 0 && no_difference, "{question}: exit code {code}: {answer}");
            let has_run = answer["check"]["compared"].to_string().contains("a copy of the link program");
            Ok((has_run == (is_ebpf && *is_on_link)).then_some(()))
        })?;
        answered.with_context(|| format!("{question}: the program was run, or not, against expectation"))?;
    }
    ensure!(counts(&node, setup)? == before, "a check counts: {before} before");
    ensure!(get(&node, setup, &format!("flows --client {CLIENT}"))?.is_empty(), "a check leaves a flow");
    for Damage { line, shown, .. } in damages(&setup.mode, &node).into_iter().filter(|it| it.is_of_web) {
        // In the nftables mode shunt may have repaired it already.
        let damaged = Deadline::after(TIMEOUT).try_poll(|| {
            node.world.run(Host::Node1, &line).with_context(|| line.clone())?;
            let (code, answer) = explain(&node, setup, &format!("{CLIENT} 10.96.0.80:80 --check"))?;
            anyhow::Ok((code != 0).then_some((code, answer)))
        })?;
        let (code, answer) = damaged.with_context(|| format!("no difference after {line}"))?;
        let differences = answer["check"]["differences"].to_string();
        ensure!(code == 3 && differences.contains(shown), "after {line}: exit code {code}: {answer}");
        let passes = differences.contains("the link program passes it unchanged");
        ensure!(passes == is_ebpf, "after {line}: {answer}");
    }
    node.end()
}

/// A table of somebody else: a drop of one endpoint, one of another address, and one of sockets.
const OTHERS: &str = "nft add table inet others
    nft add chain inet others forwarded '{ type filter hook forward priority 5; policy accept; }'
    nft add rule inet others forwarded ip daddr 10.244.1.11 tcp dport 8080 drop
    nft add rule inet others forwarded ip daddr 10.99.0.0/16 drop
    nft add chain inet others sent '{ type filter hook output priority 0; policy accept; }'
    nft add rule inet others sent udp dport 5353 reject";

pub(crate) fn rules_of_others_on_the_way_are_named(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let others = |node: &TestNode, question: &str| {
        let (_, answer) = explain(node, setup, question)?;
        let others = answer["others"].as_array().with_context(|| answer.to_string())?;
        let of_table = others.iter().filter_map(Value::as_str).filter(|text| text.contains("inet others"));
        anyhow::Ok(of_table.map(ToOwned::to_owned).collect::<Vec<_>>())
    };
    let outside = format!("{CLIENT} 192.168.57.11:30080");
    ensure!(others(&node, &outside)?.is_empty(), "before there is a table");
    node.world.run(Host::Node1, OTHERS)?;
    let found = others(&node, &outside)?;
    let expected = "nft inet others, chain forwarded (forward, priority 5) may drop or reject it";
    ensure!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");
    ensure!(others(&node, "node web")?.is_empty(), "TCP of a process of the node");
    node.world.run(Host::Node1, "nft delete table inet others")?;
    node.end()
}

/// Returns what was counted for the Service `web`, except bytes: in the ipvs mode, the last packets
/// of earlier connections still arrive.
fn counts(node: &TestNode, setup: &Setup) -> Result<Value> {
    let mut counts = get(node, setup, "services web")?.first().map(|row| row["counts"].clone());
    if let Some(Value::Object(fields)) = &mut counts {
        fields.retain(|name, _| !name.starts_with("bytes"));
    }
    Ok(counts.unwrap_or_default())
}
