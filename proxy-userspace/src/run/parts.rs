//! Which source and which dataplane a configuration stands for.

use std::sync::Arc;

use proxy_userspace::{
    config::{Config, Mode, ObjectSource},
    dataplane::{
        RenderError, Renderer, Rendering,
        ebpf::{Ebpf, RULE_NAMES},
        iptables::{self, Iptables},
        ipvs::{self, Ipvs},
        nftables::{self, Nftables},
    },
    kernel::{
        self, KernelError, capabilities,
        command::SearchPath,
        ruleset_changes::{TableChangeFlag, TableChanges},
    },
    metrics::{Metrics, WatchedKind},
    model::{NodeFacts, WatchEvent},
    node::NodeEvent,
    probe,
    watch::{self, ApiSource, ManifestSource, WatchError, WatchStatus},
};
use tokio::sync::{Mutex, Notify, mpsc, watch as channel};

/// Fails where no mode could work, and tells what will not, for want of capabilities.
pub(super) fn check_capabilities(mode: Mode) -> Result<(), KernelError> {
    capabilities::check_net_admin()?;
    let wanted = match mode {
        Mode::Ebpf => (
            capabilities::SYS_ADMIN,
            "CAP_SYS_ADMIN is missing: UDP sockets of pods that are connected to an endpoint that is gone are left as they are",
        ),
        Mode::Nftables => return Ok(()),
        Mode::Iptables | Mode::Ipvs => (
            capabilities::NET_RAW,
            "CAP_NET_RAW is missing: the old iptables, if this node uses it, cannot be used",
        ),
    };
    if !capabilities::is_held(wanted.0)? {
        tracing::warn!("{}", wanted.1);
    }
    Ok(())
}

/// The dataplane of the configured mode. `disturbed` is told when others change what it put into the kernel.
pub(super) fn renderer(config: &Config, disturbed: &Arc<Notify>) -> anyhow::Result<Box<dyn Renderer>> {
    match config.mode {
        Mode::Ebpf => {
            Ok(Box::new(Rendering::new(Ebpf::new(&config.ebpf).map_err(|e| explained(e, config))?)))
        }
        Mode::Nftables => {
            refuse_without_needs(config)?;
            let touched = Arc::new(TableChangeFlag::default());
            let dataplane = Nftables::new(&config.nftables, Arc::clone(&touched))?;
            let changes = TableChanges::open(nftables::TABLE, dataplane.port(), touched)?;
            tokio::spawn(follow(changes, Arc::clone(disturbed)));
            Ok(Box::new(Rendering::new(dataplane)))
        }
        Mode::Iptables => {
            let iptables = Iptables::new(config.iptables.clone()).map_err(|e| explained(e, config))?;
            Ok(Box::new(Rendering::new(iptables)))
        }
        Mode::Ipvs => {
            let ipvs = Ipvs::new(config.ipvs.clone()).map_err(|e| explained(e, config))?;
            Ok(Box::new(Rendering::new(ipvs)))
        }
    }
}

/// A kernel that lacks something would refuse only the rule that needs it, when there is one.
fn refuse_without_needs(config: &Config) -> anyhow::Result<()> {
    let missing = missing(config);
    anyhow::ensure!(
        missing.is_empty(),
        "the mode {} does not work here: {}",
        config.mode.name(),
        missing.join("; ")
    );
    Ok(())
}

async fn follow(changes: TableChanges, disturbed: Arc<Notify>) {
    if let Err(error) = changes.report(disturbed).await {
        tracing::warn!(%error, "cannot follow what others do to our tables; they are read every syncPeriod");
    }
}

/// An error of the kernel's own seldom says what is missing: what trying everything shows is said with it.
fn explained(error: impl std::error::Error + Send + Sync + 'static, config: &Config) -> anyhow::Error {
    let missing = missing(config);
    let error = anyhow::Error::new(error);
    if missing.is_empty() {
        return error;
    }
    error.context(format!("the mode {} does not work here: {}", config.mode.name(), missing.join("; ")))
}

fn missing(config: &Config) -> Vec<String> {
    let verdict = probe::evaluate(&kernel::probe::facts(&SearchPath::default()));
    let of_mode = verdict.modes.into_iter().find(|mode| mode.mode == config.mode.name());
    of_mode.into_iter().flat_map(|mode| mode.missing).map(|lack| lack.to_string()).collect()
}

/// Removes what any mode ever put into the kernel, and kube-proxy before; goes on past errors.
pub(super) fn cleanup(config: &Config) -> Vec<RenderError> {
    let mut errors = of_ebpf(config);
    errors.extend(told(Nftables::cleanup_tables()));
    errors.extend(told(Iptables::remove(&config.iptables)));
    // After the chains that use its sets.
    errors.extend(told(Ipvs::remove(&config.ipvs)));
    errors
}

/// Removes what modes other than the configured one, and kube-proxy before, put into the kernel; goes on past errors. Connections
/// that netfilter translates stay with conntrack.
pub(super) fn remove_other_modes(config: &Config) -> Vec<RenderError> {
    let mut errors = if config.mode == Mode::Ebpf { Vec::new() } else { of_ebpf(config) };
    if config.mode != Mode::Nftables {
        errors.extend(told(Nftables::cleanup_tables()));
    }
    errors.extend(told(match config.mode {
        Mode::Iptables => Iptables::remove_others(&config.iptables),
        Mode::Ipvs => Iptables::remove_beside_ipvs(&config.iptables),
        Mode::Ebpf | Mode::Nftables => Iptables::remove(&config.iptables),
    }));
    if config.mode != Mode::Ipvs {
        errors.extend(told(Ipvs::remove_unused(&config.ipvs)));
    }
    errors
}

fn of_ebpf(config: &Config) -> Vec<RenderError> {
    let mut errors = Ebpf::cleanup_at(&config.ebpf.pin_dir);
    errors.extend(Ebpf::remove_rules(&config.ebpf));
    told(errors)
}

fn told<E: std::error::Error + Send + Sync + 'static>(errors: Vec<E>) -> Vec<RenderError> {
    errors.into_iter().map(|source| RenderError::Cleanup { source: source.into() }).collect()
}

/// Feeds the loop with objects.
pub(super) async fn objects(
    config: Config,
    metrics: Metrics,
    events: Arc<Mutex<mpsc::Receiver<NodeEvent>>>,
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
            let source = ApiSource::new(client.clone(), &*config.model.node_name);
            // No other mode has rules about them.
            let is_used = config.mode == Mode::Nftables;
            let source = if is_used { source.with_service_cidrs() } else { source };
            let status = source.status();
            let mut events = events.lock().await;
            // Does not end the source, should it end.
            let recording = async {
                watch::record_events(&client, &config.model.node_name, &mut events).await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                ended = measured(Box::pin(source.run(to)), status, &metrics) => ended,
                () = recording => Ok(()),
            }
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
        let WatchStatus { services, endpoint_slices, nodes, .. } = status.borrow_and_update().clone();
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
        // Its tables are followed change by change.
        Mode::Nftables => return std::future::pending().await,
        Mode::Iptables => &iptables::RULE_NAMES,
        Mode::Ipvs => &ipvs::RULE_NAMES,
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
    Ok(kernel::links::report(ipvs::DUMMY_LINK, to, disturbed).await?)
}
