//! Trace events of the eBPF programs in the daemon's log.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
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
    wait_for_node_port(&mut node, |one| matches!(one, Attempt::Answered(_)))?;
    expect_event(&node, "shunt_in_eth", "translated", &format!(" vip={NODE_PORT} endpoint=10.244.1."))?;
    ensure!(has_event(&node, "shunt_in_eth", "translated", " source=192.168.57."), "{}", node.proxy.log());
    node.serve(&[])?;
    wait_for_node_port(&mut node, |one| matches!(one, Attempt::Failed(_)))?;
    expect_event(&node, "shunt_in_eth", "refused", &format!(" vip={NODE_PORT} "))?;
    node.end()
}

/// Dials the Service's port of the node until that ends so.
fn wait_for_node_port(node: &mut TestNode, is_wanted: impl Fn(&Attempt) -> bool) -> Result<()> {
    let mut last = None;
    let mut look = || match dial_node_port(node) {
        Ok(one) => {
            let found = is_wanted(&one).then_some(Ok(()));
            last = Some(one);
            found
        }
        Err(error) => Some(Err(error)),
    };
    let found = Deadline::after(TIMEOUT).poll(&mut look);
    found.with_context(|| format!("the node port goes on with {last:?}"))?
}

/// Dials the Service's port of the node from outside the cluster, once.
fn dial_node_port(node: &mut TestNode) -> Result<Attempt> {
    let request = ConnectRequest {
        timeout: scaled(ANSWER_TIMEOUT),
        ..ConnectRequest::new(NODE_PORT.parse()?, Protocol::Tcp, 1)
    };
    let mut attempts = node.world.agent(Host::Client)?.connect(request)?;
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
