//! Scenarios about a changed configuration file while shunt serves traffic.

use std::{path::Path, time::Duration};

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::protocol::{ConnectRequest, Protocol},
    small_cluster::CLUSTER_IP,
    world::Host,
};

use crate::test_node::TestNode;

const OPEN_CONNECTION: &str = "open";
/// A node port at the node's second address.
const OTHER_NODE_PORT: &str = "192.168.57.111:30080";

fn start(shunt: &Path, mode: &str, fields: &str) -> Result<TestNode> {
    let mut node = TestNode::build(shunt)?;
    node.configure(mode, fields)?;
    node.spawn(None, &[])?;
    node.wait_until_healthy()?;
    node.check_served()?;
    let request = ConnectRequest::new(CLUSTER_IP.parse()?, Protocol::Tcp, 1);
    node.world.agent(Host::A3)?.open(OPEN_CONNECTION, request)?;
    Ok(node)
}

fn check_open_connection(node: &mut TestNode) -> Result<()> {
    node.world.agent(Host::A3)?.check_open(OPEN_CONNECTION, Duration::from_secs(30))
}

fn starts(node: &TestNode) -> Result<usize> {
    Ok(node.log()?.matches("starting version").count())
}

/// The log level, the node port addresses and larger maps change in one process.
pub(crate) fn settings_change_without_a_restart(shunt: &Path) -> Result<()> {
    let mut node = start(shunt, "ebpf", "{}")?;
    node.wait_until("on all addresses at first", |node| node.reaches(Host::Client, OTHER_NODE_PORT))?;
    ensure!(!node.log()?.contains("DEBUG"), "the log has debug messages from the start");
    let narrow = "{logging: {verbosity: 5}, nodePortAddresses: [192.168.57.11/32]}";
    node.configure("ebpf", narrow)?;
    node.wait_for_log("applied without a restart settings=\"logging.verbosity, nodePortAddresses\"")?;
    node.wait_until("without the second address", |node| Ok(!node.reaches(Host::Client, OTHER_NODE_PORT)?))?;
    node.wait_for_log("DEBUG")?;
    node.check_served()?;
    let wide = "{logging: {verbosity: 5}, shunt: {ebpf: {mapSizes: {services: 200000}}}}";
    node.configure("ebpf", wide)?;
    node.wait_until("with the second address", |node| node.reaches(Host::Client, OTHER_NODE_PORT))?;
    node.wait_for_log("shunt.ebpf.mapSizes.services")?;
    let pinned = node.world.pin_directory().join("services");
    node.wait_until("larger", |node| {
        let shown = node.world.run(Host::Node1, &format!("bpftool map show pinned {}", pinned.display()));
        Ok(shown?.contains("max_entries 200000"))
    })?;
    node.wait_until_healthy()?;
    node.check_served()?;
    check_open_connection(&mut node)?;
    ensure!(starts(&node)? == 1, "the proxy restarted; its log:\n{}", node.log()?);
    node.stop()
}

/// With another mode, the process executes itself again under the same identifier. Before that,
/// invalid files have no effect.
pub(crate) fn a_new_mode_restarts_and_a_bad_file_changes_nothing(shunt: &Path) -> Result<()> {
    let mut node = start(shunt, "nftables", "{}")?;
    let id = node.process_id();
    node.write_config("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftable\noomScoreAdj: 5000\n")?;
    node.wait_for_log("the settings stay as they are")?;
    let log = node.log()?;
    ensure!(
        log.contains("nftable") && log.contains("oomScoreAdj: 5000"),
        "the log does not name all errors:\n{log}"
    );
    node.check_served()?;
    ensure!(starts(&node)? == 1, "an invalid file restarts the proxy");
    node.configure("nftables", "{clusterCIDR: '10.0.0.0/8,fd44::/16'}")?;
    node.wait_for_log("has changed: restarting")?;
    node.wait_until("restarted", |node| Ok(starts(node)? == 2))?;
    node.wait_until_healthy()?;
    node.check_served()?;
    check_open_connection(&mut node)?;
    node.configure("iptables", "{}")?;
    node.wait_until("in the other mode", |node| Ok(node.mode()? == "iptables"))?;
    node.wait_until_healthy()?;
    node.check_served()?;
    check_open_connection(&mut node)?;
    ensure!(node.process_id() == id, "the process identifier changed");
    node.stop()
}
