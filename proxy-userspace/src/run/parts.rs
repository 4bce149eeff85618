//! Which source and which dataplane a configuration stands for.

use std::sync::Arc;

use proxy_userspace::{
    config::{Config, Mode, ObjectSource},
    dataplane::{
        RenderError, Renderer, Rendering,
        ebpf::{Ebpf, RULE_NAMES},
        iptables::{self, Iptables},
        leftovers,
    },
    inspect,
    kernel::{self, command::SearchPath},
    metrics::{Metrics, WatchedKind},
    model::{NodeFacts, WatchEvent},
    watch::{self, ApiSource, ManifestSource, WatchError, WatchStatus},
};
use tokio::sync::{Notify, mpsc, watch as channel};

/// Decides what `auto` stands for here, and says why the mode is what it is. Where nothing works, starting the preferred mode
/// tells what is missing.
pub(super) fn choose_mode(config: &mut Config) -> String {
    if !config.mode_is_auto {
        return "as configured".into();
    }
    let verdict = inspect::probe::judge(&kernel::probe::facts(&SearchPath::default()));
    let found = verdict.auto.and_then(|name| Mode::ALL.into_iter().find(|mode| mode.name() == name));
    config.mode = found.unwrap_or(config.mode);
    format!("auto: {}", verdict.why)
}

/// The dataplane of the configured mode.
pub(super) fn renderer(config: &Config) -> anyhow::Result<Box<dyn Renderer>> {
    match config.mode {
        Mode::Ebpf => {
            Ok(Box::new(Rendering::new(Ebpf::new(&config.ebpf).map_err(|e| explained(e, config))?)))
        }
        Mode::Iptables => {
            let iptables = Iptables::new(config.iptables.clone()).map_err(|e| explained(e, config))?;
            Ok(Box::new(Rendering::new(iptables)))
        }
    }
}

/// An error of the kernel's own seldom says what is missing: what trying everything shows is said with it.
fn explained(error: impl std::error::Error + Send + Sync + 'static, config: &Config) -> anyhow::Error {
    let verdict = inspect::probe::judge(&kernel::probe::facts(&SearchPath::default()));
    let of_mode = verdict.modes.into_iter().find(|mode| mode.mode == config.mode.name());
    let missing: Vec<_> =
        of_mode.into_iter().flat_map(|mode| mode.missing).map(|lack| lack.to_string()).collect();
    let error = anyhow::Error::new(error);
    if missing.is_empty() {
        return error;
    }
    error.context(format!("the mode {} does not work here: {}", config.mode.name(), missing.join("; ")))
}

/// Removes what any mode ever put into the kernel; goes on past errors.
pub(super) fn cleanup(config: &Config) -> Vec<RenderError> {
    let mut errors = of_ebpf(config);
    errors.extend(told(Iptables::remove(&config.iptables)));
    errors.extend(of_other_proxies(config));
    errors
}

/// Removes what modes other than the configured one, and kube-proxy before, put into the kernel; goes on past errors. Connections
/// that netfilter translates stay with conntrack.
pub(super) fn remove_other_modes(config: &Config) -> Vec<RenderError> {
    let mut errors = match config.mode {
        Mode::Ebpf => told(Iptables::remove(&config.iptables)),
        Mode::Iptables => {
            let mut errors = of_ebpf(config);
            errors.extend(told(Iptables::remove_others(&config.iptables)));
            errors
        }
    };
    errors.extend(of_other_proxies(config));
    errors
}

fn of_ebpf(config: &Config) -> Vec<RenderError> {
    let mut errors = Ebpf::cleanup_at(&config.ebpf.pin_dir);
    errors.extend(Ebpf::remove_rules(&config.ebpf));
    told(errors)
}

/// After the chains that use the sets.
fn of_other_proxies(config: &Config) -> Vec<RenderError> {
    let path = &config.iptables.path;
    let mut errors = leftovers::remove_nftables(path);
    errors.extend(leftovers::remove_ipvs(path));
    told(errors)
}

fn told<E: std::error::Error + Send + Sync + 'static>(errors: Vec<E>) -> Vec<RenderError> {
    errors.into_iter().map(|source| RenderError::Cleanup { source: source.into() }).collect()
}

/// Feeds the loop with objects.
pub(super) async fn objects(
    config: Config,
    metrics: Metrics,
    to: mpsc::Sender<WatchEvent>,
) -> anyhow::Result<()> {
    match config.source {
        ObjectSource::Manifests(directory) => {
            let source = ManifestSource::new(directory);
            let status = source.status();
            measured(Box::pin(source.run(to)), status, &metrics).await
        }
        ObjectSource::Api { kubeconfig, master } => {
            let client = watch::kube_client(kubeconfig.as_deref(), master.as_deref()).await?;
            let source = ApiSource::new(client, &*config.model.node_name);
            let status = source.status();
            measured(Box::pin(source.run(to)), status, &metrics).await
        }
    }
}

/// Runs a source and keeps its metrics up to date meanwhile.
async fn measured(
    mut source: impl Future<Output = Result<(), WatchError>> + Unpin,
    mut status: channel::Receiver<WatchStatus>,
    metrics: &Metrics,
) -> anyhow::Result<()> {
    loop {
        let WatchStatus { services, endpoint_slices, nodes } = status.borrow_and_update().clone();
        metrics.set_watch_connected(WatchedKind::Service, services.connected_since.is_some());
        metrics.set_watch_connected(WatchedKind::EndpointSlice, endpoint_slices.connected_since.is_some());
        metrics.set_watch_connected(WatchedKind::Node, nodes.connected_since.is_some());
        tokio::select! {
            ended = &mut source => return Ok(ended?),
            Ok(()) = status.changed() => {}
        }
    }
}

/// Tells the loop when someone else takes away what it put into the kernel. Without, that shows when all is compared.
pub(super) async fn removals(mode: Mode, disturbed: Arc<Notify>) -> anyhow::Result<()> {
    let names: &[&str] = match mode {
        Mode::Ebpf => &RULE_NAMES,
        Mode::Iptables => &iptables::RULE_NAMES,
    };
    let ended = kernel::ruleset_changes::report_removals(names, disturbed).await;
    if let Err(error) = ended {
        tracing::info!(%error, "cannot follow changes of netfilter rules; they are compared every syncPeriod");
    }
    std::future::pending().await
}

/// Feeds the loop with this node's links and addresses, and tells it when it should look at the kernel.
pub(super) async fn node_facts(
    to: channel::Sender<Option<NodeFacts>>,
    disturbed: Arc<Notify>,
) -> anyhow::Result<()> {
    Ok(kernel::links::report(to, disturbed).await?)
}
