//! What the metrics server answers.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::world::Host;

use super::bed::{Bed, Setting};

const SOON: Duration = Duration::from_secs(10);
/// What promtool finds fault with in names that are upstream's.
const OF_UPSTREAM: [&str; 1] = ["kubeproxy_sync_proxy_rules_no_local_endpoints_total"];

pub(crate) fn metrics_are_valid_and_the_configuration_is_shown(setting: &Setting) -> Result<()> {
    let mut bed = Bed::started(setting, &setting.mode, "{enableProfiling: true, oomScoreAdj: 123}")?;
    bed.wait_until_served(&[Host::A1, Host::A2], SOON)?;
    let metrics = bed.page("/metrics")?.body;
    // Waiting until it is healthy has asked /healthz.
    let indicators = bed.page("/metrics/slis")?.body;
    ensure!(indicators.contains("kubernetes_healthcheck{name=\"sync\",type=\"healthz\"} 1"), "{indicators}");
    let metrics = metrics + &indicators;
    let file = bed.world.directory().join("metrics.txt");
    std::fs::write(&file, &metrics)?;
    // It ends with 3 where it has something to say of names, and with 1 where it cannot read a line.
    let line = format!("promtool check metrics < {} 2>&1 || [ $? = 3 ]", file.display());
    let said = bed.world.run(Host::Node1, &line).context("promtool (of the package prometheus)")?;
    let faults = said.lines().filter(|line| !OF_UPSTREAM.iter().any(|name| line.starts_with(name)));
    let faults: Vec<&str> = faults.collect();
    ensure!(faults.is_empty(), "promtool: {faults:?}");
    let shown: serde_json::Value = serde_json::from_str(&bed.page("/configz")?.body)?;
    let config = &shown["kubeproxy.config.k8s.io"];
    ensure!(config["oomScoreAdj"] == 123 && config["clusterCIDR"].is_string(), "/configz: {shown}");
    let threads = bed.page("/debug/pprof/threads")?;
    ensure!(threads.status == 200 && threads.body.contains("tokio-"), "{}", threads.body);
    ensure!(bed.page("/debug/pprof/memory")?.body.contains("Rss:"));
    ensure!(!bed.proxy.log().contains(" ebpf: "), "programs tell what nobody asked for");
    bed.end()?;
    let mut without = Bed::started(setting, &setting.mode, "{}")?;
    ensure!(without.page("/debug/pprof/")?.status == 404, "profiling answers without its flag");
    without.end()
}
