//! Scenarios of `deploy/monitoring`: its dashboards and alerts with the real Prometheus.

mod load;
mod prometheus;
mod queries;
mod recording;

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::deadline::Deadline;

pub(crate) use self::recording::record;
use self::{prometheus::Prometheus, queries::Query};
use super::test_node::{Setup, TestNode};

/// Full syncs are frequent, so that their durations have data.
const OFTEN: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}}";
const ROUNDS: usize = 6;
/// The time until Prometheus has scraped a change and evaluated the rules.
const TIMEOUT: Duration = Duration::from_mins(1);
const JOBS: [&str; 2] = ["shunt", "kube-proxy"];

/// Each query of the dashboards and of kubernetes-mixin returns data, or none if that is said. The
/// alerts are silent, until the API server and then shunt are gone.
pub(crate) fn queries_have_data_and_alerts_react(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, OFTEN)?;
    load::prepare(&node)?;
    let prometheus = Prometheus::start(&mut node.world)?;
    wait_until_scraped(&prometheus, &mut node)?;
    for number in 0..ROUNDS {
        load::round(&mut node, number)?;
    }
    let of_dashboards =
        JOBS.iter().map(|job| queries::of_dashboards(job, queries::INTERVAL)).collect::<Result<Vec<_>>>()?;
    let all: Vec<Query> = of_dashboards.into_iter().flatten().chain(queries::of_mixin()?).collect();
    let mut wrong = problems(&prometheus, &mut node, &all, &setup.mode)?;
    // A scrape that a busy machine missed leaves a gap.
    let deadline = Deadline::after(TIMEOUT);
    for number in ROUNDS.. {
        if wrong.is_empty() || deadline.passed() {
            break;
        }
        load::round(&mut node, number)?;
        wrong = problems(&prometheus, &mut node, &all, &setup.mode)?;
    }
    ensure!(wrong.is_empty(), "{} of {} queries are wrong:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    println!("{} queries are as expected", all.len());
    alerts_react(node, &prometheus)
}

/// Waits until shunt is scraped as both jobs. Prometheus finds its targets after five seconds.
fn wait_until_scraped(prometheus: &Prometheus, node: &mut TestNode) -> Result<()> {
    let scraped = Deadline::after(TIMEOUT).try_poll(|| {
        let targets = prometheus.query(&mut node.world, "up{instance=\"node1\"} == 1")?;
        anyhow::Ok((targets.len() == JOBS.len()).then_some(()))
    })?;
    scraped.with_context(|| format!("Prometheus does not scrape shunt after {TIMEOUT:?}"))
}

/// Returns a line for each query whose answer is not as expected.
fn problems(
    prometheus: &Prometheus,
    node: &mut TestNode,
    queries: &[Query],
    mode: &str,
) -> Result<Vec<String>> {
    let lines = queries.iter().map(|query| problem(prometheus, node, query, mode));
    lines.filter_map(Result::transpose).collect()
}

/// Returns a line if the answer to a query is not as expected.
fn problem(
    prometheus: &Prometheus,
    node: &mut TestNode,
    query: &Query,
    mode: &str,
) -> Result<Option<String>> {
    let series = prometheus.query(&mut node.world, &query.expression)?;
    let what = match (query.must_have_data(mode), series.is_empty()) {
        (Some(true), true) => "no data",
        (Some(false), false) => "data, although it should have none",
        _ if !query.is_rare && series.iter().any(|series| series.value().is_nan()) => "not a number",
        _ => return Ok(None),
    };
    Ok(Some(format!("  {}: {}: {what}", query.panel, query.expression)))
}

fn alerts_react(mut node: TestNode, prometheus: &Prometheus) -> Result<()> {
    // A watch that the load interrupted may be away for a moment.
    wait_for_alerts(prometheus, &mut node, BTreeSet::is_empty).context("on a healthy node")?;
    node.cluster.down();
    wait_for_alerts(prometheus, &mut node, |alerts| alerts.contains("ShuntApiDisconnected"))
        .context("without API server")?;
    node.proxy.stop()?;
    wait_for_alerts(prometheus, &mut node, |alerts| alerts.contains("ShuntDown")).context("without shunt")?;
    node.end()
}

fn wait_for_alerts(
    prometheus: &Prometheus,
    node: &mut TestNode,
    is_right: impl Fn(&BTreeSet<String>) -> bool,
) -> Result<()> {
    let mut last = BTreeSet::new();
    let found = Deadline::after(TIMEOUT).try_poll(|| {
        last = alerts(prometheus, node)?;
        anyhow::Ok(is_right(&last).then_some(()))
    })?;
    found.with_context(|| format!("after {TIMEOUT:?} the alerts are {last:?}"))
}

/// Returns the names of the alerts that are pending or fire.
fn alerts(prometheus: &Prometheus, node: &mut TestNode) -> Result<BTreeSet<String>> {
    let series = prometheus.query(&mut node.world, "ALERTS")?;
    let name = |label: &serde_json::Value| label.as_str().unwrap_or_default().to_owned();
    Ok(series.iter().filter_map(|series| series.metric.get("alertname").map(name)).collect())
}
