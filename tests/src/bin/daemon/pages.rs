//! What the metrics server answers.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::world::Host;

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(10);
/// What promtool finds fault with in names that are upstream's.
const OF_UPSTREAM: [&str; 1] = ["kubeproxy_sync_proxy_rules_no_local_endpoints_total"];

pub(crate) fn metrics_are_valid_and_the_configuration_is_shown(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{enableProfiling: true, oomScoreAdj: 123}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let metrics = node.page("/metrics")?.body;
    // Waiting until it is healthy has asked /healthz.
    let indicators = node.page("/metrics/slis")?.body;
    ensure!(indicators.contains("kubernetes_healthcheck{name=\"sync\",type=\"healthz\"} 1"), "{indicators}");
    let metrics = metrics + &indicators;
    let file = node.world.directory().join("metrics.txt");
    std::fs::write(&file, &metrics)?;
    // It ends with 3 where it has something to say of names, and with 1 where it cannot read a line.
    let line = format!("promtool check metrics < {} 2>&1 || [ $? = 3 ]", file.display());
    let said = node.world.run(Host::Node1, &line).context("promtool (of the package prometheus)")?;
    let faults = said.lines().filter(|line| !OF_UPSTREAM.iter().any(|name| line.starts_with(name)));
    let faults: Vec<&str> = faults.collect();
    ensure!(faults.is_empty(), "promtool: {faults:?}");
    let shown: serde_json::Value = serde_json::from_str(&node.page("/configz")?.body)?;
    let config = &shown["kubeproxy.config.k8s.io"];
    ensure!(config["oomScoreAdj"] == 123 && config["clusterCIDR"].is_string(), "/configz: {shown}");
    let threads = node.page("/debug/pprof/threads")?;
    ensure!(threads.status == 200 && threads.body.contains("tokio-"), "{}", threads.body);
    ensure!(node.page("/debug/pprof/memory")?.body.contains("Rss:"));
    ensure!(!node.proxy.log().contains(" ebpf: "), "programs tell what nobody asked for");
    node.end()?;
    let mut without = TestNode::started(setup, &setup.mode, "{}")?;
    ensure!(without.page("/debug/pprof/")?.status == 404, "profiling answers without its flag");
    without.end()
}
