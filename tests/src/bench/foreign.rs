//! Traffic that is none of the proxy's: routed through the node from the client to a pod, with the proxy and without.
//!
//! One world in which the proxy comes and goes, rather than two worlds side by side: two worlds differ in where their
//! sockets and routes lie in memory, which is more than what is looked for here. A turn with the proxy is compared with the
//! mean of those before and after it without, so that a machine that gets slower or faster meanwhile favours neither.
//!
//! A node tracks connections with or without the proxy, since its firewall or its network plugin does: the first such rule makes
//! the kernel do so, and costs more than all that is looked for here. What the proxy adds to that is one figure; what it
//! costs on a node where it is the first is the other.

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::{
    Effort,
    paths::{self, Path},
    protocol::{BenchResponse, Workload},
    ratio::{Ratio, quantile},
};
use crate::{
    runner::Proxy,
    world::{Host, World},
};

/// How routed traffic compares.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ForeignResult {
    pub(super) workload: Workload,
    pub(super) services: usize,
    /// The node tracked connections without the proxy too.
    pub(super) tracked: bool,
    /// Operations a second with the proxy against those without.
    pub(super) ratio: Option<Ratio>,
}

/// Measures with every workload, and leaves the proxy removed.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    effort: Effort,
) -> Result<Vec<ForeignResult>> {
    let mut results = compare(world, proxy, services, effort, false)?;
    world.run(Host::Node1, &format!("nft '{TRACKING}'"))?;
    results.extend(compare(world, proxy, services, effort, true)?);
    Ok(results)
}

/// The least that a node's firewall has.
const TRACKING: &str = "table inet firewall { chain forward { type filter hook forward priority filter; ct state invalid drop; }; \
     chain postrouting { type nat hook postrouting priority srcnat; }; }";

fn compare(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    effort: Effort,
    tracked: bool,
) -> Result<Vec<ForeignResult>> {
    let mut without = vec![rates(world, effort)?];
    let mut with = Vec::new();
    for _ in 0..effort.turns {
        proxy.start(world)?;
        with.push(rates(world, effort)?);
        proxy.stop()?;
        proxy.clean_up(world)?;
        without.push(rates(world, effort)?);
    }
    Ok(Workload::ALL
        .into_iter()
        .map(|workload| {
            let of = |rates: &[f64; 3]| rates[workload as usize];
            let pairs = with.iter().zip(without.windows(2));
            let pairs = pairs.map(|(with, around)| (of(with), around.iter().map(of).sum::<f64>() / 2.0));
            ForeignResult { workload, services, tracked, ratio: Ratio::of(pairs) }
        })
        .collect())
}

/// Operations a second of each workload: the medians of a few rounds.
fn rates(world: &mut World, effort: Effort) -> Result<[f64; 3]> {
    let mut rates = [0.0; 3];
    for (workload, rate) in Workload::ALL.into_iter().zip(&mut rates) {
        let targets = vec![paths::direct(Path::ClientToNodePort, workload)];
        let rounds = effort.pairs.div_ceil(6);
        let outcome = paths::load(world, Host::Client, workload, targets, effort, rounds)?;
        let BenchResponse::Rates(rounds) = outcome else { bail!("routed traffic: {outcome:?}") };
        let mut values: Vec<f64> = rounds.into_iter().flatten().collect();
        values.sort_by(f64::total_cmp);
        *rate = quantile(&values, 50).context("no rounds")?;
    }
    Ok(rates)
}
