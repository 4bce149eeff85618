//! The scenario of the rights at the API server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize as _;
use serde_json::{Value, json};
use serde_yaml_ng::Mapping;
use shunt_tests::{apiserver::KubernetesVersion, deadline::Deadline, world::Host};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);
const ROLES: &str = include_str!("../../../../deploy/kubernetes/rbac.yaml");
/// Its first block of YAML is the rule about pods.
const README: &str = include_str!("../../../../deploy/README.md");
/// A pod that is no endpoint.
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: job-1, namespace: jobs}\n\
                   spec: {nodeName: node1}\nstatus: {podIPs: [{ip: 10.244.1.99}]}\n";
/// Serves ServiceCIDRs, and does not stream lists: shunt lists and watches.
const LISTS: KubernetesVersion = KubernetesVersion(33);
/// Streams lists: shunt only watches.
const STREAMS: KubernetesVersion = KubernetesVersion(36);

/// The server refuses what the role does not grant, as RBAC does. In the nftables mode shunt reads
/// every kind that it reads in any mode.
pub(crate) fn the_role_of_the_manifests_has_the_rights_that_are_needed_and_no_more(
    setup: &Setup,
) -> Result<()> {
    let role = cluster_role()?;
    let mut node = TestNode::new(setup, "nftables", "{}")?;
    node.cluster.apply_all(POD)?;
    node.cluster.server().speak_as(LISTS);
    node.cluster.server().grant_only(&role)?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    every_right_is_used(&node)?;
    let refused = explain_a_pod(&node, setup)?;
    ensure!(refused.contains("readPods"), "{refused}");
    let of_server = node.cluster.server().refused_requests();
    ensure!(of_server == ["get pods of \"\" in jobs: job-1"], "refused: {of_server:?}");
    node.proxy.stop()?;

    node.cluster.server().grant_only(&with_pods(role)?)?;
    node.proxy.start(&mut node.world)?;
    let explained = explain_a_pod(&node, setup)?;
    ensure!(explained.contains("10.244.1.99"), "{explained}");
    every_right_is_used(&node)?;
    nothing_is_refused(&node)?;
    node.proxy.stop()?;

    node.cluster.server().speak_as(STREAMS);
    node.proxy.set_mode(&setup.mode, &Mapping::new())?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    nothing_is_refused(&node)?;
    node.end()
}

fn every_right_is_used(node: &TestNode) -> Result<()> {
    let unused = || node.cluster.server().unused_rights();
    let is_used = Deadline::after(TIMEOUT).poll(|| unused().is_empty().then_some(()));
    is_used.with_context(|| format!("nobody needs these rights: {:?}", unused()))
}

fn nothing_is_refused(node: &TestNode) -> Result<()> {
    let refused = node.cluster.server().refused_requests();
    ensure!(refused.is_empty(), "refused: {refused:?}");
    Ok(())
}

fn explain_a_pod(node: &TestNode, setup: &Setup) -> Result<String> {
    let line = format!("{} explain jobs/job-1 10.96.0.80:80 2>&1 || true", setup.shunt.display());
    node.world.run(Host::Node1, &line)
}

fn cluster_role() -> Result<Value> {
    let objects = serde_yaml_ng::Deserializer::from_str(ROLES).map(Value::deserialize);
    let objects = objects.collect::<Result<Vec<_>, _>>().context("rbac.yaml")?;
    objects.into_iter().find(|object| object["kind"] == "ClusterRole").context("no ClusterRole")
}

/// Adds the rule of the page about pods.
fn with_pods(mut role: Value) -> Result<Value> {
    let block = README.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    let rules: Vec<Value> = serde_yaml_ng::from_str(block.context("no rule in deploy/README.md")?)?;
    ensure!(rules == [json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]})], "{rules:?}");
    role["rules"].as_array_mut().context("rules")?.extend(rules);
    Ok(role)
}
