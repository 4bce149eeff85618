//! Puts the stages together and runs them until a signal comes or one of them fails for good.
#![forbid(unsafe_code)]

mod chosen;
mod parts;
mod reload;
mod succession;

use std::{
    net::SocketAddr,
    path::Path,
    process::{self, ExitCode},
    sync::Arc,
    thread,
    time::Duration,
};

pub(crate) use self::{chosen::Chosen, reload::LogFilter};
use self::{
    reload::{Asked, Reload},
    succession::Successor,
};
use anyhow::Context as _;
use axum::Router;
use proxy_userspace::{
    causes::with_causes,
    config::{Config, Mode, Note, ProbeOutput},
    dataplane::{Renderer, ebpf::EbpfError, ipvs::Ipvs},
    health::{self, Introspection, PortFailureEvents, ProxyHealth},
    kernel::{
        self, KernelError,
        command::{self, SearchPath},
        end_signals::EndSignals,
    },
    metrics::Metrics,
    node::{self, NodeEvent, NodeEvents},
    probe,
    sync::{Inputs, Outputs, SyncError, SyncLoop, SyncSettings},
};
use tokio::{
    sync::{Mutex, Notify, mpsc, oneshot, watch},
    task::JoinSet,
};

/// Events that may wait for the loop; a source that is faster waits too.
const EVENTS_QUEUED: usize = 4096;

/// How long a command that runs has to end after a signal. What iptables-restore waits for the lock is less.
const COMMANDS_END_WITHIN: Duration = Duration::from_secs(8);
/// When the process ends after a signal, whatever it does: well before a kubelet kills it, which is after 30 s.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// Events that wait to be written, whichever mode runs.
type Told = Arc<Mutex<mpsc::Receiver<NodeEvent>>>;

/// Everything that runs beside the sync loop. None of it is meant to end.
type Tasks = JoinSet<anyhow::Result<()>>;

/// How a mode ended.
enum Ended {
    /// By a signal.
    Stopped,
    /// It does not work any more, or never did. What ran can still clean up.
    Broken(anyhow::Error, Option<Box<dyn Renderer>>),
    /// The configuration changed.
    Changed(Asked),
}

/// Told when a signal came.
pub(crate) type Stopping = oneshot::Receiver<()>;

/// Why the proxy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A signal came.
    Signal,
    /// The configuration changed: the program is to be started anew.
    Restart,
}

/// Runs the proxy, until SIGTERM, SIGINT or a configuration that needs another process; what is in the kernel then stays
/// there.
pub(crate) async fn run(
    mut chosen: Chosen,
    set_log_filter: LogFilter,
    stopping: Stopping,
) -> anyhow::Result<End> {
    if command::is_ending() {
        return Ok(End::Signal);
    }
    let shutdown = async {
        let _ = stopping.await;
    };
    tokio::pin!(shutdown);
    announce(&chosen.config, &chosen.why);
    let (events, told) = NodeEvents::channel();
    let told = Arc::new(Mutex::new(told));
    set_up_node(&chosen.config, &events);
    events.normal("Starting", format!("shunt in the mode {}, {}", chosen.config.mode.name(), chosen.why));
    let outputs = outputs(&chosen.config, events);
    let mut endpoints = Tasks::new();
    let mut before = None;
    let mut reload = Reload::new(&chosen, set_log_filter, outputs.health.clone());
    start_endpoints(&chosen.config, &outputs, reload.effective.subscribe(), &mut endpoints);
    loop {
        let settings = reload.settings.subscribe();
        let ended = tokio::select! {
            biased;
            ended = first_ended(&mut endpoints) => ended.map(|()| Ended::Stopped),
            ended = run_mode(&chosen, outputs.clone(), settings, &told, before.take(), &mut shutdown) => ended,
            asked = reload.follow() => Ok(Ended::Changed(asked)),
        };
        if is_stopping(&ended) {
            return Ok(End::Signal);
        }
        chosen.config = reload.config.clone();
        match ended? {
            Ended::Stopped => return Ok(End::Signal),
            Ended::Changed(Asked::Restart) => return Ok(End::Restart),
            Ended::Changed(Asked::Rebuild) => {}
            Ended::Broken(error, ran) => {
                before = ran;
                if let Some(end) = follow(&mut chosen, error, &outputs)? {
                    return Ok(end);
                }
                reload.runs(chosen.config.clone());
            }
        }
    }
}

/// Has the next mode take over from one that does not work any more, unless the process is to end; fails as the mode did where none is
/// left.
fn follow(chosen: &mut Chosen, error: anyhow::Error, outputs: &Outputs) -> anyhow::Result<Option<End>> {
    let broken = chosen.config.mode.name();
    let why = with_causes(error.as_ref());
    let is_followed = chosen.next_mode(&why);
    if command::is_ending() {
        return Ok(Some(End::Signal));
    }
    if !is_followed? {
        return Err(error);
    }
    outputs.metrics.mode_broke(broken);
    let mode = chosen.config.mode.name();
    outputs
        .events
        .warning("ModeBroke", format!("the mode {broken} does not work any more, {mode} takes over: {why}"));
    tracing::error!(broken, mode, error = why, "THE MODE DOES NOT WORK ANY MORE; another one takes over");
    Ok(None)
}

fn outputs(config: &Config, events: NodeEvents) -> Outputs {
    Outputs {
        events,
        metrics: Metrics::default(),
        health: ProxyHealth::new(config.sync_period * 2),
        health_checks: watch::Sender::default(),
    }
}

/// Whether a signal came. Whatever ended then did so at the right time: without commands no mode works, and no other process is to
/// follow.
fn is_stopping(ended: &anyhow::Result<Ended>) -> bool {
    let is_ending = command::is_ending();
    if is_ending && let Err(error) | Ok(Ended::Broken(error, _)) = ended {
        tracing::debug!(error = with_causes(error.as_ref()), "this failed before the end");
    }
    is_ending
}

/// Runs one mode until it breaks. What it put into the kernel stays, for the next one to remove once it serves everything.
async fn run_mode(
    chosen: &Chosen,
    outputs: Outputs,
    settings: watch::Receiver<SyncSettings>,
    told: &Told,
    before: Option<Box<dyn Renderer>>,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<Ended> {
    let config = &chosen.config;
    parts::check_capabilities(config.mode)?;
    outputs.metrics.set_mode(config.mode.name(), &chosen.why);
    let mut tasks = Tasks::new();
    let inputs = start_sources(config, outputs.metrics.clone(), settings, told, &mut tasks);
    let renderer = match parts::renderer(config, &inputs.disturbed) {
        Ok(renderer) => renderer,
        Err(error) if chosen.has_others() && !is_in_use(&error) => return Ok(Ended::Broken(error, before)),
        Err(error) => return Err(error),
    };
    let mut renderer: Box<dyn Renderer> = Box::new(Successor::new(renderer, before, config));
    outputs.metrics.set_kernel_counts(renderer.kernel_counts());
    outputs.metrics.set_readings(renderer.readings());
    let SyncSettings { model, periods } = reload::settings(config, chosen.give_up_after());
    let mut sync = SyncLoop::new(model, periods, renderer, outputs);
    tokio::select! {
        // An ended task closes its channel too; what it says is worth more than that it has ended.
        biased;
        ended = first_ended(&mut tasks) => ended.map(|()| Ended::Stopped),
        done = sync.run_until_broken(inputs, shutdown) => match done {
            Ok(()) => Ok(Ended::Stopped),
            Err(error @ SyncError::Broken { .. }) => Ok(Ended::Broken(error.into(), Some(sync.into_renderer()))),
            Err(error) => Err(error.into()),
        },
    }
}

/// Waits for what is not meant to end.
async fn first_ended(tasks: &mut Tasks) -> anyhow::Result<()> {
    match tasks.join_next().await {
        Some(ended) => ended?.and_then(|()| anyhow::bail!("a part of the proxy ended by itself")),
        None => anyhow::bail!("all parts of the proxy ended by themselves"),
    }
}

/// Another process of ours is at work: no mode would be right beside it.
fn is_in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(EbpfError::Kernel(KernelError::PinsInUse { .. })))
}

/// Writes the configuration in effect, as kube-proxy does: its own fields with their defaults, ours where they were given.
pub(crate) fn write_config(config: &Config, path: &Path) -> anyhow::Result<()> {
    let text = serde_yaml_ng::to_string(&config.effective.document())?;
    std::fs::write(path, text).with_context(|| format!("--write-config-to: {}", path.display()))?;
    tracing::info!(file = %path.display(), "the configuration is written");
    Ok(())
}

/// `--init-only`: what a process with few privileges cannot do later: conntrack's settings and those of the ipvs mode.
/// `route_localnet` is not set here: without the rules that come with it, others could reach what listens on loopback.
pub(crate) fn init_only(config: &Config) -> anyhow::Result<()> {
    let mut errors: Vec<String> =
        node::set_up_kernel(&config.node).iter().map(|error| with_causes(error)).collect();
    if config.mode == Mode::Ipvs {
        errors.extend(Ipvs::set_up_kernel(&config.ipvs).iter().map(|error| with_causes(error)));
    }
    let count = errors.len();
    for error in errors {
        tracing::error!(error, "a setting of the node stays as it was");
    }
    anyhow::ensure!(count == 0, "not all that needs privileges is done: {count} errors");
    tracing::info!("what needs privileges is done");
    Ok(())
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
    let verdict = probe::evaluate(&facts);
    match output {
        ProbeOutput::Table => print!("{}", probe::table(&facts, &verdict)),
        ProbeOutput::Json => match probe::json(&facts, &verdict) {
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
    tell_what_is_in_vain(config);
}

/// One line each, so that nobody waits for an effect that does not come.
pub(super) fn tell_what_is_in_vain(config: &Config) {
    for Note { setting, why } in &config.notes {
        tracing::warn!(setting, why, "this setting has no effect");
    }
}

/// Only the ipvs mode changes it, as with kube-proxy: whether a node routes is for those to say who give pods their network.
const NOT_FORWARDING: &str = "net.ipv4.ip_forward is 0: this node passes no IPv4 packets on, so that clients outside do not reach pods through it";

/// What cannot be set is told and no reason to stop: a container often has a read-only `/proc/sys`.
fn set_up_node(config: &Config, events: &NodeEvents) {
    let errors: Vec<String> = node::set_up(&config.node).iter().map(|error| with_causes(error)).collect();
    for error in &errors {
        tracing::warn!(error, "a setting of the node stays as it was");
    }
    // The ipvs mode turns it on itself.
    if config.mode != Mode::Ipvs && matches!(node::forwards(), Ok(false)) {
        tracing::warn!("{NOT_FORWARDING}");
        events.warning("NotForwarding", NOT_FORWARDING);
    }
    if !errors.is_empty() {
        events.warning(
            "SettingsRefused",
            format!("settings of the node stay as they were: {}", errors.join("; ")),
        );
    }
}

/// From here on a signal ends the process in order. A thread of its own waits for it: the main one is not free while it programs the
/// kernel, or looks at what that offers. To be called before there is another thread.
///
/// Commands that run then may end. What takes longer is left where it is, and nothing that was to come after it is done: every
/// beginning of a plan is as good as all of it, but no other part is.
pub(crate) fn await_signals() -> anyhow::Result<Stopping> {
    let signals = EndSignals::hold()?;
    let (tell, told) = oneshot::channel();
    let wait = move || {
        let came = signals.wait();
        command::end_all_within(COMMANDS_END_WITHIN);
        match came {
            Ok(signal) => tracing::info!(signal, "stopping; Services go on working as they are"),
            Err(error) => tracing::error!(error = with_causes(&error), "stopping"),
        }
        // Nobody waits for it where the end is near anyway.
        let _ = tell.send(());
        thread::sleep(ENDS_WITHIN);
        tracing::warn!(
            "what this process does, be it a change of the kernel, takes too long; it is left where it is"
        );
        process::exit(0);
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(told)
}

fn start_endpoints(
    config: &Config,
    outputs: &Outputs,
    effective: watch::Receiver<serde_json::Value>,
    tasks: &mut Tasks,
) {
    let Outputs { metrics, health, health_checks, events } = outputs;
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
    let introspection = Introspection { config: effective, profiling: config.profiling };
    let routes = health::metrics_routes(metrics).merge(health::introspection_routes(introspection));
    serve("metrics", config.metrics_bind_address, routes);
    let port_failures =
        PortFailureEvents { events: events.clone(), node_name: config.model.node_name.clone() };
    let answering = health::serve_health_checks(health_checks.subscribe(), health.clone(), port_failures);
    tasks.spawn(async move {
        answering.await;
        Ok(())
    });
}

fn start_sources(
    config: &Config,
    metrics: Metrics,
    settings: watch::Receiver<SyncSettings>,
    told: &Told,
    tasks: &mut Tasks,
) -> Inputs {
    let (to_sync, events) = mpsc::channel(EVENTS_QUEUED);
    let objects = parts::objects(config.clone(), metrics, Arc::clone(told), to_sync);
    tasks.spawn(async move { objects.await.context("cannot watch Services, EndpointSlices and Nodes") });
    let (to_sync, node_facts) = watch::channel(None);
    let disturbed = Arc::new(Notify::new());
    let facts = parts::node_facts(to_sync, Arc::clone(&disturbed));
    tasks.spawn(async move { facts.await.context("cannot follow this node's links and addresses") });
    tasks.spawn(parts::removals(config.mode, Arc::clone(&disturbed)));
    Inputs { events, node_facts, disturbed, settings }
}
