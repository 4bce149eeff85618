//! Measures the change path: shunt's own model, sync loop and dataplane run in an agent on the
//! node. The input is decoded events, the output is the kernel.

mod objects;
mod running;

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use proxy_userspace::config::{Config, Environment, Flags};
use serde::Serialize;

use self::{objects::Objects, running::RunningLoop};
use super::{
    load,
    protocol::{BenchRequest, BenchResponse, ChangeKind, ChangeRequest, ChangeTimings, Sample},
    ratio::quantile,
};
use crate::{agent::Agent, deadline::Stopwatch};

const TOTAL_TIMEOUT: Duration = Duration::from_mins(3);
/// The maximum time for changes. Modes that run commands make fewer changes in that time.
const MAX_DURATION: Duration = Duration::from_mins(1);
/// The distance between changed objects, so that changes spread over all of them.
const STRIDE: usize = 7919;

/// The cost of a kind of change.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ChangeResult {
    pub(super) services: usize,
    pub(super) changed: ChangeKind,
    pub(super) changes: usize,
    /// The median of microseconds from the decoded event to the changed kernel.
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    /// The median of CPU microseconds.
    pub(super) cpu_us: f64,
    /// The minimum and the maximum number of kernel changes.
    pub(super) operations: (usize, usize),
}

/// Has an agent on the node measure the changes.
pub(super) fn measure_in_agent(
    agent: &mut Agent,
    services: usize,
    request: ChangeRequest,
) -> Result<Vec<ChangeResult>> {
    match agent.bench(BenchRequest::Changes(request), TOTAL_TIMEOUT)? {
        BenchResponse::Changes(timings) => timings.iter().map(|timings| summary(services, timings)).collect(),
        other => bail!("expected timings, but the agent answered {other:?}"),
    }
}

fn summary(services: usize, timings: &ChangeTimings) -> Result<ChangeResult> {
    let ChangeTimings { changed, samples } = timings;
    let sorted = |value: fn(&Sample) -> Duration| {
        let mut values: Vec<Duration> = samples.iter().map(value).collect();
        values.sort_unstable();
        values
    };
    let (took, cpu) = (sorted(|sample| sample.took), sorted(|sample| sample.cpu));
    let of = |sorted: &[Duration], percent| {
        quantile(sorted, percent).map(|value| value.as_secs_f64() * 1e6).context("no changes")
    };
    let operations = samples.iter().map(|sample| sample.operations);
    Ok(ChangeResult {
        services,
        changed: *changed,
        changes: samples.len(),
        median_us: of(&took, 50)?,
        p99_us: of(&took, 99)?,
        cpu_us: of(&cpu, 50)?,
        operations: (operations.clone().min().unwrap_or(0), operations.max().unwrap_or(0)),
    })
}

/// Measures in the agent, on a new thread that does all of the work.
pub(super) fn measure(request: &ChangeRequest) -> Result<Vec<ChangeTimings>> {
    let words = std::iter::once("shunt").chain(request.arguments.iter().map(String::as_str));
    let flags = Flags::parse(words).context("the proxy's flags")?;
    let config =
        Config::load(&flags, &Environment::of_this_process()).context("the proxy's configuration")?;
    let changes = request.changes;
    let measuring = thread::spawn(move || {
        load::raise_priority();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(run(&config, changes));
        runtime.shutdown_background();
        let errors = running::clean_up(&config);
        ensure!(errors.is_empty(), "cleanup: {errors:?}");
        result
    });
    measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

async fn run(config: &Config, changes: usize) -> Result<Vec<ChangeTimings>> {
    let mut objects = Objects::read(config).await?;
    let mut running = RunningLoop::start(config).await?;
    let first = running.time(objects.first()).await.context("the first sync")?;
    let mut timings: Vec<ChangeTimings> =
        objects.kinds().map(|changed| ChangeTimings { changed, samples: Vec::new() }).collect();
    let began = Stopwatch::start();
    let is_time_left = |number: &usize| *number == 0 || began.elapsed() < MAX_DURATION;
    for number in (0..changes).map(|number| number * STRIDE).take_while(is_time_left) {
        for ChangeTimings { changed, samples } in &mut timings {
            let event = objects.change(*changed, number)?;
            samples.push(running.time(vec![event]).await.with_context(|| changed.name())?);
        }
    }
    running.stop().await?;
    timings.push(ChangeTimings { changed: ChangeKind::Everything, samples: vec![first] });
    Ok(timings)
}
