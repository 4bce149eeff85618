//! Puts the stages together and runs them until a signal comes or one of them fails for good.
#![forbid(unsafe_code)]

mod parts;
mod succession;

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use self::succession::Successor;
use anyhow::Context as _;
use axum::Router;
use proxy_userspace::{
    causes::with_causes,
    config::{Config, ConfigError, Environment, Flags, ProbeOutput},
    dataplane::Renderer,
    health::{self, ProxyHealth},
    inspect,
    kernel::{self, command::SearchPath},
    metrics::Metrics,
    node,
    sync::{Inputs, Outputs, SyncLoop, SyncPeriods},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{Notify, mpsc, watch},
    task::JoinSet,
};

/// Events that may wait for the loop; a source that is faster waits too.
const EVENTS_QUEUED: usize = 4096;

/// Everything that runs beside the sync loop. None of it is meant to end.
type Tasks = JoinSet<anyhow::Result<()>>;

/// Runs the proxy. `Ok` after SIGTERM or SIGINT; what is in the kernel then stays there.
/// `why` tells why the mode is what it is.
pub(crate) async fn run(config: Config, why: &str) -> anyhow::Result<()> {
    // First of all: from here on a signal ends the process in order.
    let shutdown = shutdown(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    announce(&config, why);
    set_up_node(&config);
    let metrics = Metrics::default();
    metrics.set_mode(config.mode.name());
    let health = ProxyHealth::new(config.sync_period * 2);
    let outputs = Outputs { metrics, health, health_checks: watch::Sender::default() };
    let mut tasks = Tasks::new();
    start_endpoints(&config, &outputs, &mut tasks);
    let inputs = start_sources(&config, outputs.metrics.clone(), &mut tasks);
    let renderer = parts::renderer(&config, &inputs.disturbed)?;
    let mut renderer: Box<dyn Renderer> = Box::new(Successor::new(renderer, &config));
    if let Some(counts) = renderer.packet_counts() {
        outputs.metrics.set_packet_counts(counts);
    }
    if let Some(readings) = renderer.readings() {
        outputs.metrics.set_readings(readings);
    }
    let periods = SyncPeriods { min_sync_period: config.min_sync_period, sync_period: config.sync_period };
    let sync = SyncLoop::new(config.model, periods, renderer, outputs);
    tokio::select! {
        // An ended task closes its channel too; what it says is worth more than that it has ended.
        biased;
        ended = tasks.join_next() => match ended {
            Some(ended) => ended?.and_then(|()| anyhow::bail!("a part of the proxy ended by itself")),
            None => anyhow::bail!("all parts of the proxy ended by themselves"),
        },
        done = sync.run(inputs, shutdown) => Ok(done?),
    }
}

/// The configuration, of the mode that `auto` stands for here, and why it is that one.
pub(crate) fn configure(flags: &Flags, environment: &Environment) -> Result<(Config, String), ConfigError> {
    let config = Config::load(flags, environment)?;
    if flags.cleanup {
        return Ok((config, String::new()));
    }
    let (mode, why) = parts::choose_mode(&config);
    let config = if mode == config.mode { config } else { Config::load_with_auto(flags, environment, mode)? };
    Ok((config, why))
}

/// Removes what any process of ours put into the kernel. Every error is reported, not just the first.
pub(crate) fn cleanup(config: &Config) -> anyhow::Result<()> {
    let errors = parts::cleanup(config);
    let count = errors.len();
    for error in errors {
        tracing::error!(error = with_causes(&error), "cleanup");
    }
    anyhow::ensure!(count == 0, "cleanup left something behind: {count} errors");
    tracing::info!("everything is removed");
    Ok(())
}

/// Tells what this machine offers to each mode, on standard output.
pub(crate) fn probe(output: ProbeOutput) -> ExitCode {
    let facts = kernel::probe::facts(&SearchPath::default());
    let verdict = inspect::probe::judge(&facts);
    match output {
        ProbeOutput::Table => print!("{}", inspect::probe::table(&facts, &verdict)),
        ProbeOutput::Json => match inspect::probe::json(&facts, &verdict) {
            Ok(json) => println!("{json}"),
            Err(error) => eprintln!("shunt: cannot write the report: {error}"),
        },
    }
    if verdict.auto.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn announce(config: &Config, why: &str) {
    let version = env!("CARGO_PKG_VERSION");
    let mode = config.mode.name();
    let node = &*config.model.node_name;
    tracing::info!(version, mode, why, node, source = ?config.source, "starting");
    if !config.unread_fields.is_empty() {
        let fields = config.unread_fields.join(", ");
        tracing::warn!(fields, "these fields of the configuration file have no effect in this mode");
    }
}

/// What cannot be set is told and no reason to stop: a container often has a read-only `/proc/sys`.
fn set_up_node(config: &Config) {
    for error in node::set_up(&config.node) {
        tracing::warn!(error = with_causes(&error), "a setting of the node stays as it was");
    }
}

async fn shutdown(mut terminate: Signal, mut interrupt: Signal) {
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    tracing::info!(signal = name, "stopping; Services go on working as they are");
}

fn start_endpoints(config: &Config, outputs: &Outputs, tasks: &mut Tasks) {
    let Outputs { metrics, health, health_checks } = outputs;
    let hard_fail = config.bind_address_hard_fail;
    let mut serve = |server: &'static str, address: Option<SocketAddr>, routes: Router| {
        if let Some(address) = address {
            tasks.spawn(async move {
                health::serve(server, address, routes, hard_fail)
                    .await
                    .map(|never| match never {})
                    .map_err(Into::into)
            });
        }
    };
    serve("healthz", config.healthz_bind_address, health::healthz_routes(health.clone(), metrics.clone()));
    serve("metrics", config.metrics_bind_address, health::metrics_routes(metrics, config.mode.name()));
    let answering = health::answer_health_checks(health_checks.subscribe(), health.clone());
    tasks.spawn(async move {
        answering.await;
        Ok(())
    });
}

fn start_sources(config: &Config, metrics: Metrics, tasks: &mut Tasks) -> Inputs {
    let (to_sync, events) = mpsc::channel(EVENTS_QUEUED);
    let objects = parts::objects(config.clone(), metrics, to_sync);
    tasks.spawn(async move { objects.await.context("cannot watch Services, EndpointSlices and Nodes") });
    let (to_sync, node_facts) = watch::channel(None);
    let disturbed = Arc::new(Notify::new());
    let facts = parts::node_facts(to_sync, Arc::clone(&disturbed));
    tasks.spawn(async move { facts.await.context("cannot follow this node's links and addresses") });
    tasks.spawn(parts::removals(config.mode, Arc::clone(&disturbed)));
    Inputs { events, node_facts, disturbed }
}
