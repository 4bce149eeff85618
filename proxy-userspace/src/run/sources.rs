//! Runs the sources of the sync loop: objects, facts about this node, and signs of drift.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use jiff::Timestamp;
use proxy_userspace::{
    causes::with_causes,
    config::{Config, ObjectSource},
    dataplane::{Mode, ebpf, iptables, ipvs},
    health::{WatchReport, Watches},
    kernel,
    metrics::WatchedKind,
    model::WatchEvent,
    net::ProxyVariables,
    sync::{Inputs, Inspector, Outputs, SyncSettings},
    watch::{
        self, ApiRequest, ApiSource, KindStatus, ManifestSource, ObjectReader, OnApiRequest, Timing,
        WatchError, WatchStatus,
    },
};
use tokio::{
    sync::{Notify, mpsc, watch as channel},
    time::timeout,
};

use super::{EventQueue, ModeChoice, Tasks, node_facts};

/// How many events may wait for the sync loop. A faster source waits, too.
const MAX_QUEUED: usize = 4096;

/// The longest time until a response whose date is compared with the clock.
const PROMPT: Duration = Duration::from_secs(2);

/// How long the end of the process may wait until its last Events are written. After an error they
/// may tell the cause.
const LAST_EVENTS: Duration = Duration::from_secs(2);
const LAST_EVENTS_AFTER_ERROR: Duration = Duration::from_secs(5);

/// What fails if the source of objects fails.
pub(super) const CANNOT_WATCH: &str = "cannot watch Services, EndpointSlices and Nodes";

/// Starts all sources.
pub(super) fn start(
    ModeChoice { config, environment, launcher, reader, .. }: &ModeChoice,
    outputs: &Outputs,
    settings: channel::Receiver<SyncSettings>,
    inspector: &Inspector,
    node_events: &EventQueue,
    tasks: &mut Tasks,
) -> Inputs {
    let (to_loop, events) = mpsc::channel(MAX_QUEUED);
    let objects = objects(
        config.clone(),
        environment.proxies.clone(),
        outputs.clone(),
        Arc::clone(node_events),
        reader.clone(),
        to_loop,
    );
    tasks.spawn(async move { objects.await.context(CANNOT_WATCH) });
    let drift = Arc::new(Notify::new());
    let node_facts = node_facts::start(config, launcher, &drift, outputs, tasks);
    tasks.spawn(report_removals(config.mode, Arc::clone(&drift)));
    Inputs { events, node_facts, drift, settings, requests: inspector.open() }
}

/// Sends objects to the loop.
async fn objects(
    config: Config,
    proxies: ProxyVariables,
    outputs: Outputs,
    node_events: EventQueue,
    reader: ObjectReader,
    to: mpsc::Sender<WatchEvent>,
) -> anyhow::Result<()> {
    match &config.source {
        ObjectSource::Manifests(directory) => {
            let source = ManifestSource::new(directory);
            let status = source.status();
            measured(Box::pin(source.run(to)), status, &outputs).await
        }
        ObjectSource::Api { kubeconfig, servers, content_types } => {
            let on_request = count_requests(&outputs);
            let client = watch::kube_client(kubeconfig.as_deref(), servers, &proxies, &on_request).await?;
            reader.set_client(&client);
            let source = ApiSource::new(client.clone(), &*config.model.node_name)
                .with_content_types(content_types.clone());
            // Only the nftables mode has rules about Service CIDRs.
            let needs_cidrs = config.mode == Mode::Nftables;
            let source = if needs_cidrs { source.with_service_cidrs() } else { source };
            let needs_nodes = config.model.dsr_port.is_some();
            let source = if needs_nodes { source.with_all_nodes() } else { source };
            let status = source.status();
            outputs.status.set_watches(watch_reports(&status));
            let mut node_events = node_events.lock().await;
            // The end of the recording must not end the source.
            let recording = async {
                watch::record_events(&client, &config.model.node_name, &mut node_events).await;
                std::future::pending::<()>().await;
            };
            // On a node without a tunnel, this only removes an earlier announcement.
            let announcement = async {
                let wanted = outputs.dsr_announcement.subscribe();
                watch::announce_dsr(&client, &config.model.node_name, Timing::default(), wanted).await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                ended = measured(Box::pin(source.run(to)), status, &outputs) => ended,
                () = recording => Ok(()),
                () = announcement => Ok(()),
            }
        }
    }
}

/// Writes the Events that wait, before this process ends. Gives up after a few seconds. If none
/// waits, this does nothing.
pub(super) async fn write_last_events(
    ModeChoice { config, environment, reader, .. }: &ModeChoice,
    pending: &EventQueue,
    ends_well: bool,
) {
    let ObjectSource::Api { kubeconfig, servers, .. } = &config.source else { return };
    let write = async {
        let mut events = pending.lock().await;
        if !events.close() {
            return;
        }
        let on_request: OnApiRequest = Arc::new(|_| {});
        let client = match reader.client() {
            Some(client) => Ok(client),
            None => {
                watch::kube_client(kubeconfig.as_deref(), servers, &environment.proxies, &on_request).await
            }
        };
        match client {
            Ok(client) => watch::record_events(&client, &config.model.node_name, &mut events).await,
            Err(error) => tracing::debug!(error = with_causes(&error), "cannot write the last Events"),
        }
    };
    // The cause is in the log, too.
    let limit = if ends_well { LAST_EVENTS } else { LAST_EVENTS_AFTER_ERROR };
    let _in_time = timeout(limit, write).await;
}

/// Returns a receiver of requests that counts them, and compares the clocks.
fn count_requests(Outputs { metrics, status: facts, .. }: &Outputs) -> OnApiRequest {
    let (metrics, facts) = (metrics.clone(), facts.clone());
    Arc::new(move |&ApiRequest { method, host, status, took, date }| {
        metrics.api_request_answered(method.as_str(), host, status.map(|status| status.as_u16()), took);
        // A response that came late says little about the clock.
        if let Some(date) = date.filter(|_| took <= PROMPT) {
            facts.set_clock_ahead(Timestamp::now().as_second() - date.as_second());
        }
    })
}

/// Returns what reads the state of the watches.
fn watch_reports(status: &channel::Receiver<WatchStatus>) -> Watches {
    let status = status.clone();
    Watches::new(move || {
        let WatchStatus { services, endpoint_slices, nodes, .. } = status.borrow().clone();
        let kinds = [("Services", services), ("EndpointSlices", endpoint_slices), ("Nodes", nodes)];
        kinds.into_iter().map(|(kind, status)| watch_report(kind, &status)).collect()
    })
}

fn watch_report(kind: &str, status: &KindStatus) -> WatchReport {
    let since_event = status.last_event.map(|last| Timestamp::now().as_second() - last.as_second());
    WatchReport {
        kind: kind.to_owned(),
        connected: status.connected_since.is_some(),
        seconds_since_event: since_event.map(|seconds| u64::try_from(seconds).unwrap_or(0)),
    }
}

/// Runs a source and keeps its metrics up to date.
async fn measured(
    mut source: impl Future<Output = Result<(), WatchError>> + Unpin,
    mut status: channel::Receiver<WatchStatus>,
    Outputs { metrics, status: facts, .. }: &Outputs,
) -> anyhow::Result<()> {
    loop {
        let WatchStatus { services, endpoint_slices, nodes, manifest_errors, .. } =
            status.borrow_and_update().clone();
        metrics.set_watch_connected(WatchedKind::Service, services.connected_since.is_some());
        metrics.set_watch_connected(WatchedKind::EndpointSlice, endpoint_slices.connected_since.is_some());
        metrics.set_watch_connected(WatchedKind::Node, nodes.connected_since.is_some());
        facts.set_watch_errors(watch_errors(&[
            ("Services", &services),
            ("EndpointSlices", &endpoint_slices),
            ("Nodes", &nodes),
        ]));
        metrics.set_manifest_errors(manifest_errors.count);
        facts.set_unreadable_manifests(manifest_errors.texts);
        tokio::select! {
            ended = &mut source => return Ok(ended?),
            Ok(()) = status.changed() => {}
        }
    }
}

/// Returns the kinds that are not up to date, each with its error.
fn watch_errors(kinds: &[(&str, &KindStatus)]) -> Vec<String> {
    let error =
        |(kind, status): &(&str, &KindStatus)| Some(format!("{kind}: {}", status.last_error.as_ref()?));
    kinds.iter().filter_map(error).collect()
}

/// Notifies the loop if others remove rules of this mode. Otherwise only a full sync finds that.
async fn report_removals(mode: Mode, drift: Arc<Notify>) -> anyhow::Result<()> {
    let names: &[&str] = match mode {
        Mode::Ebpf => &ebpf::RULE_NAMES,
        // The nftables mode watches every change of its tables.
        Mode::Nftables => return std::future::pending().await,
        Mode::Iptables => &iptables::RULE_NAMES,
        Mode::Ipvs => &ipvs::RULE_NAMES,
    };
    if let Err(error) = kernel::ruleset_changes::report_removals(names, drift).await {
        tracing::info!(%error, "cannot watch netfilter rules for removals: shunt compares them every syncPeriod");
    }
    std::future::pending().await
}
