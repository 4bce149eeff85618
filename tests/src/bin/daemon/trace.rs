//! Trace events of the eBPF programs in the daemon's log.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, FailureKind, Protocol},
    deadline::{Deadline, scaled},
    small_cluster::{CLUSTER_IP, NODE_PORT},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) fn connections_are_logged_where_tracing_is_on(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{shunt: {ebpf: {log: debug}}}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    expect_event(&node, "shunt_connect4", "translated", &format!(" vip={CLUSTER_IP} endpoint=10.244.1."))?;
    wait_for_node_port(&mut node, Attempt::is_answered)?;
    expect_event(&node, "shunt_in_eth", "translated", &format!(" vip={NODE_PORT} endpoint=10.244.1."))?;
    ensure!(has_event(&node, "shunt_in_eth", "translated", " source=192.168.57."), "{}", node.proxy.log());
    node.set_endpoints(&[])?;
    wait_for_node_port(
        &mut node,
        |attempt| matches!(attempt, Attempt::Failed(failure) if failure.kind == FailureKind::Refused),
    )?;
    expect_event(&node, "shunt_in_eth", "refused", &format!(" vip={NODE_PORT} "))?;
    node.end()
}

/// Connects to the Service's node port until the attempt ends as expected.
fn wait_for_node_port(node: &mut TestNode, is_expected: impl Fn(&Attempt) -> bool) -> Result<()> {
    let mut last = None;
    let found = Deadline::after(TIMEOUT).try_poll(|| {
        let attempt = last.insert(connect_to_node_port(node)?);
        anyhow::Ok(is_expected(attempt).then_some(()))
    })?;
    found.with_context(|| format!("the last connection to the node port: {last:?}"))
}

/// Connects once to the Service's node port from outside the cluster.
fn connect_to_node_port(node: &mut TestNode) -> Result<Attempt> {
    let request = ConnectRequest::new(NODE_PORT.parse()?, Protocol::Tcp, 1);
    let mut attempts =
        node.world.agent(Host::Client)?.connect(request.with_timeout(scaled(ANSWER_TIMEOUT)))?;
    ensure!(attempts.len() == 1, "{attempts:?}");
    Ok(attempts.remove(0))
}

/// Waits until a line of this event is in the log.
fn expect_event(node: &TestNode, program: &str, verdict: &str, rest: &str) -> Result<()> {
    let found = Deadline::after(TIMEOUT).poll(|| has_event(node, program, verdict, rest).then_some(()));
    ensure!(found.is_some(), "no event {verdict} of {program} with {rest:?}:\n{}", node.proxy.log());
    Ok(())
}

fn has_event(node: &TestNode, program: &str, verdict: &str, rest: &str) -> bool {
    let words = format!(" program=\"{program}\" verdict=\"{verdict}\" protocol=\"TCP\"");
    node.proxy.log().lines().any(|line| line.contains(&words) && line.contains(rest))
}
