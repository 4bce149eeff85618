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
    cluster::MeasuredPort,
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
    /// True if the server's port is an endpoint of a Service too.
    pub(super) to_endpoint: bool,
    /// True if the node tracked connections without the proxy too.
    pub(super) tracked: bool,
    /// Operations a second with the proxy, relative to those without it.
    pub(super) ratio: Option<Ratio>,
}

/// Measures these workloads, and leaves the proxy removed.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    services: usize,
    (workloads, effort): (&[Workload], Effort),
) -> Result<Vec<ForeignResult>> {
    let mut compare = |world: &mut World, tracked| {
        let turns = Turns::run(world, proxy, (workloads, effort))?;
        let result = |(at, (workload, to_endpoint))| ForeignResult {
            workload,
            services,
            to_endpoint,
            tracked,
            ratio: turns.ratio(at),
        };
        anyhow::Ok(measured(workloads).enumerate().map(result).collect::<Vec<_>>())
    };
    let untracked = compare(world, false)?;
    world.run(Host::Node1, &format!("nft '{TRACKING}'"))?;
    Ok([untracked, compare(world, true)?].concat())
}

/// The minimal firewall of a node.
const TRACKING: &str = "table inet firewall { chain forward { type filter hook forward priority filter; ct state invalid drop; }; \
     chain postrouting { type nat hook postrouting priority srcnat; }; }";

/// Returns what is measured: each workload to a port that is an endpoint, and to another one.
fn measured(workloads: &[Workload]) -> impl Iterator<Item = (Workload, bool)> {
    workloads.iter().flat_map(|&workload| [false, true].map(|to_endpoint| (workload, to_endpoint)))
}

/// Operations a second for each that is [`measured`], turn by turn.
struct Turns {
    with: Vec<Vec<f64>>,
    /// Before, between and after those with the proxy.
    without: Vec<Vec<f64>>,
}

impl Turns {
    fn run(world: &mut World, proxy: &mut Proxy, load: (&[Workload], Effort)) -> Result<Self> {
        let mut turns = Self { with: Vec::new(), without: vec![rates(world, load)?] };
        for _ in 0..load.1.turns {
            proxy.start(world)?;
            turns.with.push(rates(world, load)?);
            proxy.stop()?;
            proxy.clean_up(world)?;
            turns.without.push(rates(world, load)?);
        }
        Ok(turns)
    }

    /// Returns the ratio for what is [`measured`] with this number.
    fn ratio(&self, at: usize) -> Option<Ratio> {
        let pairs = self.with.iter().zip(self.without.windows(2));
        let around = |turns: &[Vec<f64>]| turns.iter().map(|rates| rates[at]).sum::<f64>() / 2.0;
        Ratio::of(pairs.map(|(with, without)| (with[at], around(without))))
    }
}

/// Returns the medians of a few rounds.
fn rates(world: &mut World, (workloads, effort): (&[Workload], Effort)) -> Result<Vec<f64>> {
    let mut rates = Vec::new();
    for (workload, to_endpoint) in measured(workloads) {
        let targets = vec![if to_endpoint {
            paths::direct(Path::ClientToNodePort, workload)
        } else {
            paths::endpoints(MeasuredPort::foreign(workload))
        }];
        let rounds = effort.pairs.div_ceil(6);
        let outcome = paths::load(world, Host::Client, workload, targets, effort, rounds)?;
        let BenchResponse::Rates(rounds) = outcome else { bail!("routed traffic: {outcome:?}") };
        let mut values: Vec<f64> = rounds.into_iter().flatten().collect();
        values.sort_by(f64::total_cmp);
        rates.push(quantile(&values, 50).context("no rounds")?);
    }
    Ok(rates)
}
