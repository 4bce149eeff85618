//! Scenarios of the pages of the metrics server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::world::Host;

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_mins(1);
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

pub(crate) fn statusz_names_mode_link_path_and_socket_scope(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    let page = node.page("/statusz")?;
    ensure!(page.status == 200, "/statusz: {}", page.status);
    let body = page.body;
    let value_of = |key: &str| body.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
    ensure!(value_of("Mode") == Some(&setup.mode) && value_of("Ready") == Some("yes"), "{body}");
    ensure!(value_of("Failing") == Some("none"), "{body}");
    let is_ebpf = setup.mode == "ebpf";
    // What else runs on this machine decides about the values.
    let is_path = |path| ["programs", "direct", "netfilter"].contains(&path);
    ensure!(value_of("Link path").is_some_and(is_path) == is_ebpf, "{body}");
    let is_scope = |scope: &str| scope.starts_with("all");
    ensure!(value_of("Socket scope").is_some_and(is_scope) == is_ebpf, "{body}");
    node.end()
}
