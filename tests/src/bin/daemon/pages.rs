//! A scenario of the pages of the metrics server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::world::Host;

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Names from upstream that promtool complains about.
const UPSTREAM_NAMES: [&str; 1] = ["kubeproxy_sync_proxy_rules_no_local_endpoints_total"];

pub(crate) fn metrics_are_valid_and_configz_shows_the_configuration(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{enableProfiling: true, oomScoreAdj: 123}")?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let metrics = node.page("/metrics")?.body;
    // The wait for a healthy proxy has requested /healthz.
    let indicators = node.page("/metrics/slis")?.body;
    ensure!(indicators.contains("kubernetes_healthcheck{name=\"sync\",type=\"healthz\"} 1"), "{indicators}");
    let metrics = metrics + &indicators;
    let file = node.world.directory().join("metrics.txt");
    std::fs::write(&file, &metrics)?;
    // promtool exits with 3 if it complains about names, and with 1 if it cannot parse a line.
    let line = format!("promtool check metrics < {} 2>&1 || [ $? = 3 ]", file.display());
    let output = node.world.run(Host::Node1, &line).context("promtool (of the package prometheus)")?;
    let faults = output.lines().filter(|line| !UPSTREAM_NAMES.iter().any(|name| line.starts_with(name)));
    let faults: Vec<&str> = faults.collect();
    ensure!(faults.is_empty(), "promtool: {faults:?}");
    let shown: serde_json::Value = serde_json::from_str(&node.page("/configz")?.body)?;
    let config = &shown["kubeproxy.config.k8s.io"];
    ensure!(config["oomScoreAdj"] == 123 && config["clusterCIDR"].is_string(), "/configz: {shown}");
    let threads = node.page("/debug/pprof/threads")?;
    ensure!(threads.status == 200 && threads.body.contains("tokio-"), "{}", threads.body);
    ensure!(node.page("/debug/pprof/memory")?.body.contains("Rss:"));
    ensure!(!node.proxy.log().contains(" ebpf: "), "trace events are logged although tracing is off");
    node.end()?;
    let mut without = TestNode::started(setup, &setup.mode, "{}")?;
    ensure!(without.page("/debug/pprof/")?.status == 404, "profiling answers without its flag");
    without.end()
}
