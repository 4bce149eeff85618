//! Measures restarts: the proxy stops, starts again, and finds nothing to change.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{ratio::quantile, rollout::cpu_time};
use crate::{
    agent::protocol::GetRequest,
    runner::Proxy,
    world::{Host, World},
};

/// How long each process runs. The work that follows its first sync is then done.
const RUN_FOR: Duration = Duration::from_secs(1);
const METRICS: &str = "http://127.0.0.1:10249/metrics";
const METRICS_TIMEOUT: Duration = Duration::from_secs(5);
/// The sum of the durations of full syncs. A process that has just started had one.
const SYNC_SECONDS: &str = "kubeproxy_sync_full_proxy_rules_duration_seconds_sum";

/// The time of a restart.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Restart {
    pub(super) services: usize,
    pub(super) restarts: usize,
    /// The median of milliseconds from the start of the program until /healthz returns 200. It
    /// includes the time of the API server for its lists.
    pub(super) median_ms: f64,
    pub(super) max_ms: f64,
    /// The median of the CPU time of the process until then, in milliseconds. Unlike the other
    /// times, it hardly depends on other load of the machine.
    pub(super) cpu_ms: f64,
    /// The duration of the last first sync, the part that compares objects with the kernel, in
    /// milliseconds.
    pub(super) sync_ms: f64,
}

/// Starts the proxy, restarts it several times, and removes it.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    restarts: usize,
) -> Result<Restart> {
    proxy.start(world)?;
    let (mut took, mut cpu) = (Vec::with_capacity(restarts), Vec::with_capacity(restarts));
    for _ in 0..restarts {
        thread::sleep(RUN_FOR);
        proxy.stop()?;
        took.push(proxy.start_measured(world)?.as_secs_f64() * 1e3);
        cpu.push(cpu_time(proxy.process_id().context("the proxy does not run")?)? * 1e3);
    }
    let sync_ms = sync_seconds(world)? * 1e3;
    proxy.stop()?;
    proxy.clean_up(world)?;
    for values in [&mut took, &mut cpu] {
        values.sort_by(f64::total_cmp);
    }
    let of = |values: &[f64], percent| quantile(values, percent).context("no restarts");
    let (median_ms, max_ms, cpu_ms) = (of(&took, 50)?, of(&took, 100)?, of(&cpu, 50)?);
    Ok(Restart { services, restarts, median_ms, max_ms, cpu_ms, sync_ms })
}

fn sync_seconds(world: &mut World) -> Result<f64> {
    let get = GetRequest { url: METRICS.to_owned(), timeout: METRICS_TIMEOUT };
    let page = world.agent(Host::Node1)?.get(get)?;
    let page = page.map_err(|failure| anyhow::anyhow!("{METRICS}: {}", failure.message))?;
    largest(&page.body, SYNC_SECONDS).with_context(|| format!("no {SYNC_SECONDS} at {METRICS}"))
}

/// Returns the largest value of a metric over its labels. A sync of both IP families counts for
/// each of them.
fn largest(metrics: &str, name: &str) -> Option<f64> {
    let of_name = metrics.lines().filter_map(|line| line.strip_prefix(name));
    let values = of_name.filter(|rest| rest.starts_with(['{', ' ']));
    values.filter_map(|rest| rest.rsplit(' ').next()?.parse().ok()).max_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_value_of_all_labels_counts() {
        let text = "a_sum{ip_family=\"IPv4\"} 0.5\na_sum{ip_family=\"IPv6\"} 0.25\na_summary 9\nb_sum 3\n";
        assert_eq!(largest(text, "a_sum"), Some(0.5));
        assert_eq!(largest(text, "c_sum"), None);
    }
}
