//! Scenarios of lists of `shunt get` that show what the kernel holds.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::Deadline,
    small_cluster::{Slices, WEB_PORT},
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A Service with affinity.
const STICKY: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: sticky, namespace: default}\n\
                      spec: {type: NodePort, clusterIP: 10.96.0.81, sessionAffinity: ClientIP, \
                      sessionAffinityConfig: {clientIP: {timeoutSeconds: 500}}, \
                      ports: [{port: 80, nodePort: 30081, targetPort: 8080}]}\n";

/// A client outside, and in the ebpf mode a process of the node, have affinity after a connection.
pub(crate) fn clients_with_affinity_are_listed(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.cluster.apply_all(STICKY)?;
    let mut slices = Slices::for_all_services(&[Host::A1, Host::A2]);
    slices.add("sticky", false, WEB_PORT, &[Host::A1, Host::A2]);
    node.cluster.apply_all(slices.text())?;
    let outside = affinity_after(&mut node, setup, Host::Client, "192.168.57.11:30081", "192.168.57.50")?;
    ensure!((480..=500).contains(&outside["remainingSeconds"].as_u64().unwrap_or_default()), "{outside}");
    // Packets of the node itself have the source that the route to the VIP gives them.
    let (client, of) = if setup.mode == "ebpf" { ("node", "sockets") } else { ("192.168.57.11", "packets") };
    let own = affinity_after(&mut node, setup, Host::Node1, "10.96.0.81:80", client)?;
    ensure!(own["of"] == of, "{own}");
    let others = get(&node, setup, "affinity web")?;
    ensure!(others.is_empty(), "web has no affinity: {others:?}");
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
fn get(node: &TestNode, setup: &Setup, what: &str) -> Result<Vec<Value>> {
    let text = node.world.run(Host::Node1, &format!("{} get {what} -o json", setup.shunt.display()))?;
    let list: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}
