//! Runs the proxy: connects the stages and runs them until a signal arrives or one of them fails.
#![forbid(unsafe_code)]

mod dataplane;
mod deprecation;
mod endpoints;
mod leftovers;
mod mode_choice;
mod node_facts;
mod offline;
mod one_shot;
mod other_proxy;
mod others;
mod reload;
mod sources;
mod standard_error;
mod start_check;
mod takeover;
mod top;
mod trace;
mod verbs;

use std::{process, sync::Arc, thread, time::Duration};

pub(crate) use self::{
    mode_choice::ModeChoice,
    one_shot::{cleanup, cleanup_own, doctor, generate, init_only, probe, write_config},
    reload::SetLogFilter,
    standard_error::tell,
    top::top,
    verbs::verb,
};
use self::{
    reload::{Reload, ReloadAction},
    takeover::Takeover,
};
use anyhow::Context as _;
use proxy_userspace::{
    causes::with_causes,
    config::{Config, FeatureGate, FeatureGates, IneffectiveSetting},
    dataplane::{Mode, Renderer, ebpf::EbpfError},
    health::{self, LocalListener},
    inspect,
    kernel::{KernelError, end_signals::EndSignals, own_process},
    metrics::Metrics,
    node::{self, NodeEvents, PendingEvents},
    sync::{Inspector, Outputs, SyncError, SyncLoop, SyncSettings},
    trace::remove_tables,
};
use tokio::{
    sync::{Mutex, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// When the process exits after a signal, even if it is still busy. A kubelet kills it after 30 s.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(20);

/// Kubernetes Events that wait to be written. Every mode uses the same queue.
type EventQueue = Arc<Mutex<PendingEvents>>;

/// Everything that runs besides the sync loop. No task should end.
type Tasks = JoinSet<anyhow::Result<()>>;

/// How the run of a mode ended.
enum ModeOutcome {
    ShutDown,
    /// The mode does not work. The dataplanes that ran before can still clean up, oldest first.
    Broken(anyhow::Error, Vec<Box<dyn Renderer>>),
    Reload(ReloadAction),
}

/// Why the proxy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// A signal arrived.
    Shutdown,
    /// The configuration changed: the program must be started again.
    Restart,
}

/// Runs the proxy until a signal or a new configuration ends it. The kernel then keeps its state.
/// Fails if another shunt runs here.
pub(crate) async fn run(
    choice: ModeChoice,
    set_log_filter: SetLogFilter,
    shutdown: CancellationToken,
) -> anyhow::Result<Exit> {
    let (source, proxies) = (&choice.config.source, &choice.environment.proxies);
    start_check::check_path(source, proxies).await.context(sources::CANNOT_WATCH)?;
    let local = tokio::select! {
        biased;
        () = shutdown.cancelled() => return Ok(Exit::Shutdown),
        listener = health::listen_local(inspect::SOCKET) => listener?,
    };
    let end = Box::pin(run_alone(choice, local, set_log_filter, shutdown)).await;
    // Traces that have not ended remove their tables only if their tasks still get the time.
    remove_tables();
    end
}

async fn run_alone(
    mut choice: ModeChoice,
    local: Option<LocalListener>,
    set_log_filter: SetLogFilter,
    shutdown: CancellationToken,
) -> anyhow::Result<Exit> {
    log_start(&choice);
    let (events, pending) = NodeEvents::channel();
    let pending = Arc::new(Mutex::new(PendingEvents::new(pending)));
    set_up_node(&choice.config, &events);
    report_start(&choice, &events);
    // They answer until the last Events are written: another shunt waits for the local socket.
    let mut servers = Tasks::new();
    let modes = run_modes(&mut choice, local, set_log_filter, events, &pending, &shutdown, &mut servers);
    let end = Box::pin(modes).await;
    sources::write_last_events(&choice, &pending, end.is_ok()).await;
    end
}

/// Runs one mode after the other until the process is to end.
async fn run_modes(
    choice: &mut ModeChoice,
    local: Option<LocalListener>,
    set_log_filter: SetLogFilter,
    events: NodeEvents,
    pending: &EventQueue,
    shutdown: &CancellationToken,
    servers: &mut Tasks,
) -> anyhow::Result<Exit> {
    let outputs = Outputs {
        metrics: metrics(&choice.config.feature_gates),
        ..Outputs::new(choice.config.sync_period * 2, events)
    };
    let mut broken = Vec::new();
    let mut reload = Reload::new(choice, Arc::clone(&set_log_filter), &outputs)?;
    let introspection =
        endpoints::introspection(choice, &outputs, reload.effective.subscribe(), set_log_filter);
    let inspector = endpoints::start(choice, local, &outputs, introspection, servers);
    loop {
        let settings = reload.settings.subscribe();
        let before = std::mem::take(&mut broken);
        let outcome = tokio::select! {
            biased;
            error = first_ended(servers) => Err(error),
            outcome = run_mode(choice, outputs.clone(), settings, &inspector, pending, before, shutdown) => outcome,
            action = reload.watch() => Ok(ModeOutcome::Reload(action)),
        };
        if shutdown.is_cancelled() {
            // Without commands no mode works, so an error means nothing now.
            if let Err(error) | Ok(ModeOutcome::Broken(error, _)) = outcome {
                tracing::debug!(error = with_causes(error.as_ref()), "a part failed during the shutdown");
            }
            return Ok(Exit::Shutdown);
        }
        choice.config = reload.config.clone();
        match outcome? {
            ModeOutcome::ShutDown => return Ok(Exit::Shutdown),
            ModeOutcome::Reload(ReloadAction::Restart) => return Ok(Exit::Restart),
            ModeOutcome::Reload(ReloadAction::RebuildDataplane) => {}
            ModeOutcome::Broken(error, renderers) => {
                broken = renderers;
                switch_mode(choice, error, &outputs)?;
                if shutdown.is_cancelled() {
                    return Ok(Exit::Shutdown);
                }
                reload.set_config(choice.config.clone());
            }
        }
    }
}

/// Switches to the next mode. If there is none, returns the error of the mode that broke.
fn switch_mode(choice: &mut ModeChoice, error: anyhow::Error, outputs: &Outputs) -> anyhow::Result<()> {
    let broken = choice.config.mode;
    let why = with_causes(error.as_ref());
    let has_next = choice.next_mode(&why);
    if choice.launcher.is_shutting_down() {
        return Ok(());
    }
    if !has_next? {
        return Err(error);
    }
    let mode = choice.config.mode;
    outputs.metrics.mode_broke(broken.name());
    outputs
        .events
        .warning("ModeBroke", format!("mode {broken} stopped working ({why}); mode {mode} replaces it"));
    tracing::error!(%broken, %mode, error = why, "the mode does not work any more: another mode replaces it");
    Ok(())
}

/// Runs one mode until it breaks. Its rules stay until the next mode serves all Services.
async fn run_mode(
    choice: &ModeChoice,
    outputs: Outputs,
    settings: watch::Receiver<SyncSettings>,
    inspector: &Inspector,
    node_events: &EventQueue,
    broken: Vec<Box<dyn Renderer>>,
    shutdown: &CancellationToken,
) -> anyhow::Result<ModeOutcome> {
    let ModeChoice { config, launcher, why, .. } = choice;
    dataplane::check_capabilities(config.mode)?;
    outputs.metrics.set_mode(config.mode.name(), why);
    outputs.metrics.set_fallback(choice.fallback());
    outputs.status.set_mode(config.mode, why);
    let mut tasks = Tasks::new();
    let inputs = sources::start(choice, &outputs, settings, inspector, node_events, &mut tasks);
    let give_up_after = choice.give_up_after();
    let had_programs = other_proxy::has_programs(config);
    let mut renderer = match dataplane::renderer(config, launcher, &inputs.drift) {
        Ok(renderer) => renderer,
        Err(error) if give_up_after.is_some() && !is_in_use(&error) => {
            return Ok(ModeOutcome::Broken(error, broken));
        }
        Err(error) => return Err(error),
    };
    outputs.metrics.set_kernel_counts(renderer.kernel_counts());
    outputs.metrics.set_mode_metrics(renderer.mode_metrics());
    let mut takeover = Takeover::new(broken, config, launcher, had_programs);
    let mut sync =
        SyncLoop::new(reload::settings(config, give_up_after), renderer, outputs, shutdown.clone());
    tokio::select! {
        // A task that ends also closes its channel. Its error is the better one, so it comes first.
        biased;
        error = first_ended(&mut tasks) => Err(error),
        done = sync.run(inputs, &mut takeover) => match done {
            Ok(()) => Ok(ModeOutcome::ShutDown),
            Err(error @ SyncError::Broken { .. }) => {
                let mut broken = takeover.broken;
                broken.push(sync.into_renderer());
                Ok(ModeOutcome::Broken(error.into(), broken))
            }
            Err(error) => Err(error.into()),
        },
    }
}

/// Waits until a task ends, which none should, and returns its error.
async fn first_ended(tasks: &mut Tasks) -> anyhow::Error {
    match tasks.join_next().await {
        Some(Ok(Err(error))) => error,
        Some(Err(panic)) => panic.into(),
        Some(Ok(Ok(()))) | None => anyhow::anyhow!("a part of shunt ended unexpectedly"),
    }
}

/// Returns true if another process of shunt uses the pins. No other mode may run beside it.
fn is_in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(EbpfError::Kernel(KernelError::PinsInUse { .. })))
}

/// Sends the Events of the start.
fn report_start(ModeChoice { config, why, .. }: &ModeChoice, events: &NodeEvents) {
    events.normal("Starting", format!("shunt starts in the mode {}, {why}", config.mode));
    deprecation::warn(config, events);
}

fn log_start(ModeChoice { config, why, .. }: &ModeChoice) {
    let version = env!("CARGO_PKG_VERSION");
    let (mode, node) = (config.mode.name(), &*config.model.node_name);
    tracing::info!(version, mode, why, node, source = ?config.source, "starting");
    log_ineffective_settings(config);
}

/// Logs one line for each setting without an effect, so that nobody waits for the effect.
pub(super) fn log_ineffective_settings(config: &Config) {
    for IneffectiveSetting { setting, why } in &config.ineffective {
        tracing::warn!(setting, why, "this setting has no effect");
    }
}

/// Raises the limit of open files: in the ebpf mode, shunt keeps up to five files for each pod.
fn raise_file_limit() {
    if let Err(error) = own_process::raise_file_limit() {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

const NOT_FORWARDING: &str = "net.ipv4.ip_forward is 0: this node does not forward IPv4 packets, so clients \
     outside the node cannot reach its pods; the pod network usually sets it to 1";

/// Sets kernel settings of the node, and the limit of open files of this process. A setting that
/// cannot be changed is logged and does not stop the start: containers often have a read-only
/// `/proc/sys`.
fn set_up_node(config: &Config, events: &NodeEvents) {
    raise_file_limit();
    let errors: Vec<String> = node::set_up(&config.node).iter().map(|error| with_causes(error)).collect();
    for error in &errors {
        tracing::warn!(error, "cannot change a kernel setting: it keeps its value");
    }
    // As with kube-proxy, only the ipvs mode sets it. In other modes the pod network decides.
    if config.mode != Mode::Ipvs && matches!(node::lacks_ipv4_forwarding(), Ok(true)) {
        tracing::warn!("{NOT_FORWARDING}");
        events.warning("NotForwarding", NOT_FORWARDING);
    }
    if !errors.is_empty() {
        let note = format!("cannot change kernel settings: they keep their values: {}", errors.join("; "));
        events.warning("SettingsRefused", note);
    }
}

/// Cancels `shutdown` when a signal arrives. A thread of its own waits for the signal, because the
/// main thread may be busy programming or probing the kernel. Call this before other threads start.
///
/// Commands that run then may end. A longer change stays unfinished: every prefix of a plan is
/// safe.
pub(crate) fn cancel_on_signal(shutdown: CancellationToken) -> anyhow::Result<()> {
    let signals = EndSignals::block()?;
    let wait = move || {
        let received = signals.wait();
        shutdown.cancel();
        match received {
            Ok(signal) => tracing::info!(signal, "shutting down; Services keep working"),
            Err(error) => {
                tracing::error!(error = with_causes(&error), "cannot wait for signals: shutting down");
            }
        }
        thread::sleep(SHUTDOWN_LIMIT);
        tracing::warn!(
            "a change of the kernel takes too long: exiting without finishing it; the next start repairs it"
        );
        process::exit(0);
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

/// Creates the metrics, with the state of the feature gates.
fn metrics(gates: &FeatureGates) -> Metrics {
    let metrics = if gates.is_on(FeatureGate::NativeHistograms) {
        Metrics::with_native_histograms()
    } else {
        Metrics::default()
    };
    for gate in FeatureGate::ALL {
        metrics.set_feature(gate.name(), gate.stage(), gates.is_on(gate));
    }
    metrics
}
