//! A changed configuration file, with traffic going on.

use std::path::Path;

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol, SendRequest},
    small_cluster::CLUSTER_IP,
    world::Host,
};

use crate::test_node::TestNode;

const HELD: &str = "held";
/// The node's second address.
const OTHER_NODE_PORT: &str = "192.168.57.111:30080";

fn start(shunt: &Path, mode: &str, fields: &str) -> Result<TestNode> {
    let mut node = TestNode::build(shunt)?;
    node.configure(mode, fields)?;
    node.spawn(None, &[])?;
    node.wait_until_healthy()?;
    node.check_served()?;
    let request = ConnectRequest {
        hold: Some(HELD.into()),
        ..ConnectRequest::new(CLUSTER_IP.parse()?, Protocol::Tcp, 1)
    };
    let attempts = node.world.agent(Host::A3)?.connect(request)?;
    ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "the first connection fails: {attempts:?}");
    Ok(node)
}

fn is_held(node: &mut TestNode) -> Result<()> {
    let timeout = std::time::Duration::from_secs(2);
    let answer =
        node.world.agent(Host::A3)?.send(SendRequest { id: HELD.into(), size: 1, answer: 0, timeout })?;
    ensure!(matches!(answer, Attempt::Answered(_)), "an established connection has ended: {answer:?}");
    Ok(())
}

fn starts(node: &TestNode) -> Result<usize> {
    Ok(node.log()?.matches("starting version").count())
}

/// Log level, node port addresses and growing maps, in one process.
pub(crate) fn what_can_be_taken_on_in_place_is(shunt: &Path) -> Result<()> {
    let mut node = start(shunt, "ebpf", "{}")?;
    ensure!(node.reaches(Host::Client, OTHER_NODE_PORT)?, "node ports are not on all addresses at first");
    ensure!(!node.log()?.contains("DEBUG"), "logs are at debug from the start");
    let narrow = "{logging: {verbosity: 5}, nodePortAddresses: [192.168.57.11/32]}";
    node.configure("ebpf", narrow)?;
    node.wait_for_log("applied without a restart settings=\"logging.verbosity, nodePortAddresses\"")?;
    node.wait_until("narrowed", |node| Ok(!node.reaches(Host::Client, OTHER_NODE_PORT)?))?;
    node.wait_for_log("DEBUG")?;
    node.check_served()?;
    let wide = "{logging: {verbosity: 5}, shunt: {ebpf: {mapSizes: {services: 200000}}}}";
    node.configure("ebpf", wide)?;
    node.wait_until("widened", |node| node.reaches(Host::Client, OTHER_NODE_PORT))?;
    node.wait_for_log("shunt.ebpf.mapSizes.services")?;
    let pinned = node.world.pin_directory().join("services");
    node.wait_until("grown", |node| {
        let shown = node.world.run(Host::Node1, &format!("bpftool map show pinned {}", pinned.display()));
        Ok(shown?.contains("max_entries 200000"))
    })?;
    node.wait_until_healthy()?;
    node.check_served()?;
    is_held(&mut node)?;
    ensure!(starts(&node)? == 1, "it was started anew; it said:\n{}", node.log()?);
    node.stop()
}

/// Another mode: the process starts anew under its number. Before that, files that cannot be used.
pub(crate) fn what_cannot_starts_the_program_anew_and_bad_files_change_nothing(shunt: &Path) -> Result<()> {
    let mut node = start(shunt, "nftables", "{}")?;
    let id = node.process_id();
    node.place("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftable\noomScoreAdj: 5000\n")?;
    node.wait_for_log("the settings stay as they are")?;
    let said = node.log()?;
    ensure!(said.contains("nftable") && said.contains("oomScoreAdj: 5000"), "not all is said:\n{said}");
    node.check_served()?;
    ensure!(starts(&node)? == 1, "a bad file starts it anew");
    node.configure("nftables", "{clusterCIDR: '10.0.0.0/8,fd44::/16'}")?;
    node.wait_for_log("has changed: restarting")?;
    node.wait_until("started anew", |node| Ok(starts(node)? == 2))?;
    node.wait_until_healthy()?;
    node.check_served()?;
    is_held(&mut node)?;
    node.configure("iptables", "{}")?;
    node.wait_until("in the other mode", |node| Ok(node.mode()? == "iptables"))?;
    node.wait_until_healthy()?;
    node.check_served()?;
    is_held(&mut node)?;
    ensure!(node.process_id() == id, "another process");
    node.stop()
}
