//! Measures foreign traffic, which is not for a Service: routed through the node from the client to
//! a pod, with the proxy and without it.
//!
//! The measurement uses one world in which the proxy starts and stops. Two worlds would differ in
//! the memory addresses of their sockets and routes, and that effect is larger than the one
//! measured here. A turn with the proxy is compared with the mean of the turns before and after it
//! without the proxy, so that a change of the machine's speed does not favour either.
//!
//! Most nodes track connections with or without the proxy, because of their firewall or network
//! plugin. The first rule that needs conntrack makes the kernel track connections, which costs more
//! than everything measured here. One figure is what the proxy adds on such a node. The other is
//! its cost on a node that did not track connections before.

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

/// The cost of the proxy for foreign traffic.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ForeignResult {
    pub(super) workload: Workload,
    pub(super) services: usize,
    /// True if the node tracked connections without the proxy too.
    pub(super) tracked: bool,
    /// Operations a second with the proxy, relative to those without it.
    pub(super) ratio: Option<Ratio>,
}

/// Measures every workload, and leaves the proxy removed.
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

/// The minimal firewall of a node.
const TRACKING: &str = "table inet firewall { chain forward { type filter hook forward priority filter; ct state invalid drop; }; \
     chain postrouting { type nat hook postrouting priority srcnat; }; }";

/// Operations a second for each workload.
type Rates = [f64; Workload::ALL.len()];

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
            let of = |rates: &Rates| rates[workload as usize];
            let pairs = with.iter().zip(without.windows(2));
            let pairs = pairs.map(|(with, around)| (of(with), around.iter().map(of).sum::<f64>() / 2.0));
            ForeignResult { workload, services, tracked, ratio: Ratio::of(pairs) }
        })
        .collect())
}

/// Returns the medians of a few rounds.
fn rates(world: &mut World, effort: Effort) -> Result<Rates> {
    let mut rates = Rates::default();
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
