//! Scenarios of the pages of the metrics server.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{deadline::Deadline, world::Host};

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

/// A rule of others that counts forwarded packets costs the direct path, and nothing else.
pub(crate) fn log_event_metric_and_page_say_why_a_node_has_its_link_path(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, "ebpf", "{}")?;
    let says = |node: &mut TestNode, path: &str, why: &str| {
        let event = format!("packets that come in on links: {path}, because {why}");
        let has_event = || {
            let is_it = |found: &serde_json::Value| {
                let text = found["note"].as_str().unwrap_or_default();
                found["reason"] == "LinkPath" && text.starts_with(&event)
            };
            node.cluster.server().events().iter().any(is_it).then_some(())
        };
        Deadline::after(TIMEOUT).poll(has_event).with_context(|| {
            format!("no Event `{event}`: {:?}\n{}", node.cluster.server().events(), node.proxy.log_tail(30))
        })?;
        node.wait_for_log(&format!("the link path of this node path=\"{path}\" why={why}"), TIMEOUT)?;
        node.wait_for_metric(&format!("shunt_link_path_info{{path=\"{path}\",why=\"{why}"), TIMEOUT)?;
        let page = node.page("/statusz")?.body;
        ensure!(page.contains(&format!("Link path: {path}\nLink path reason: {why}")), "{page}");
        Ok(())
    };
    says(&mut node, "direct", "no rule of others looks at forwarded packets")?;
    let rules = "table inet watcher { chain forward { type filter hook forward priority 0; tcp dport 45999 counter; }; }";
    node.world.run(Host::Node1, &format!("nft '{rules}'"))?;
    let why =
        "a rule of others looks at forwarded packets: nft inet watcher forward `tcp dport 45999 counter`";
    says(&mut node, "programs", why)?;
    node.world.run(Host::Node1, "nft delete table inet watcher")?;
    node.wait_for_metric("shunt_link_path_info{path=\"direct\"", TIMEOUT)?;
    node.end()
}
