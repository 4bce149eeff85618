//! Measures the change path: shunt's own model, sync loop and dataplane run in an agent on the
//! node. The input is decoded events, the output is the kernel.

use std::{num::NonZeroU16, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::{TimeVal, TimeValLike as _},
    },
    time::{ClockId, clock_gettime},
};
use proxy_userspace::{
    assembly,
    config::{Config, Environment, Flags, ObjectSource},
    dataplane::{
        DataplaneRenderer, MapFill, Mode, RenderError, Renderer,
        ebpf::Ebpf,
        iptables::Iptables,
        ipvs::{self, Ipvs, LinkRemoval},
        nftables::Nftables,
    },
    health::{ProxyHealth, Status},
    kernel::{self, command::Launcher},
    metrics::Metrics,
    model::{Delta, Dirty, EndpointSlice, Service, Snapshot, WatchEvent},
    sync::{Inputs, Outputs, SyncLoop, SyncPeriods, SyncSettings},
    watch::ManifestSource,
};
use serde::Serialize;
use tokio::{
    sync::{Notify, mpsc, watch},
    time::timeout,
};

use tokio_util::sync::CancellationToken;

use super::{
    cluster::ENDPOINTS,
    load,
    protocol::{BenchRequest, BenchResponse, ChangeRequest, ChangeTimings, Sample},
    ratio::quantile,
};
use crate::{agent::Agent, deadline::Stopwatch};

const TOTAL_TIMEOUT: Duration = Duration::from_mins(3);
const CHANGE_TIMEOUT: Duration = Duration::from_mins(1);
/// The loop compares the kernel with the Snapshot only at the start.
const NEVER: Duration = Duration::from_hours(24);
const KINDS: usize = 3;
/// The distance between changed Services, so that changes spread over all of them.
const STRIDE: usize = 7919;

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ChangeKind {
    Endpoint,
    Scaled,
    Service,
    Everything,
}

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

impl ChangeKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Endpoint => "one endpoint",
            Self::Scaled => "one endpoint more or less",
            Self::Service => "one Service",
            Self::Everything => "first full sync",
        }
    }
}

/// Has an agent on the node measure the changes.
pub(super) fn measure_in_agent(
    agent: &mut Agent,
    services: usize,
    request: ChangeRequest,
) -> Result<Vec<ChangeResult>> {
    match agent.bench(BenchRequest::Changes(request), TOTAL_TIMEOUT)? {
        BenchResponse::Changes(ChangeTimings { first, endpoint, scaled, service }) => Ok(vec![
            summary(services, ChangeKind::Endpoint, &endpoint)?,
            summary(services, ChangeKind::Scaled, &scaled)?,
            summary(services, ChangeKind::Service, &service)?,
            summary(services, ChangeKind::Everything, &[first])?,
        ]),
        other => bail!("expected timings, but the agent answered {other:?}"),
    }
}

fn summary(services: usize, changed: ChangeKind, samples: &[Sample]) -> Result<ChangeResult> {
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
        changed,
        changes: samples.len(),
        median_us: of(&took, 50)?,
        p99_us: of(&took, 99)?,
        cpu_us: of(&cpu, 50)?,
        operations: (operations.clone().min().unwrap_or(0), operations.max().unwrap_or(0)),
    })
}

/// The maximum time for changes. Modes that run commands make fewer changes in that time.
const MAX_DURATION: Duration = Duration::from_mins(1);

/// Measures in the agent, on a new thread that does all of the work.
pub(super) fn measure(request: &ChangeRequest) -> Result<ChangeTimings> {
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
        let errors = clean_up(&config);
        ensure!(errors.is_empty(), "cleanup: {errors:?}");
        result
    });
    measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn renderer(config: &Config) -> Result<Box<dyn Renderer>> {
    let launcher = Launcher::default();
    match config.mode {
        Mode::Ebpf => Ok(Box::new(DataplaneRenderer::new(Ebpf::new(&assembly::ebpf(config, &launcher))?))),
        Mode::Nftables => {
            Ok(Box::new(DataplaneRenderer::new(Nftables::new(&assembly::nftables(config), Arc::default())?)))
        }
        Mode::Iptables => {
            Ok(Box::new(DataplaneRenderer::new(Iptables::new(assembly::iptables(config, &launcher))?)))
        }
        Mode::Ipvs => Ok(Box::new(DataplaneRenderer::new(Ipvs::new(assembly::ipvs(config, &launcher))?))),
    }
}

fn clean_up(config: &Config) -> Vec<String> {
    let launcher = Launcher::default();
    let iptables = assembly::iptables(config, &launcher);
    match config.mode {
        Mode::Ebpf => Ebpf::cleanup_at(&config.ebpf.pin_dir).iter().map(ToString::to_string).collect(),
        Mode::Nftables => Nftables::cleanup_tables().iter().map(ToString::to_string).collect(),
        Mode::Iptables => Iptables::remove(&iptables).iter().map(ToString::to_string).collect(),
        Mode::Ipvs => {
            let rules = Iptables::remove(&iptables).into_iter().map(|error| error.to_string());
            let others = ipvs::remove(&assembly::ipvs(config, &launcher), LinkRemoval::Now);
            rules.chain(others.into_iter().map(|error| error.to_string())).collect()
        }
    }
}

async fn run(config: &Config, changes: usize) -> Result<ChangeTimings> {
    let objects = Objects::read(config).await?;
    let mut running = RunningLoop::start(config).await?;
    let first = running.time(objects.all()).await.context("the first sync")?;
    let mut endpoint = Vec::with_capacity(changes);
    let mut scaled = Vec::with_capacity(changes);
    let mut service = Vec::with_capacity(changes);
    let Objects { mut services, mut slices, .. } = objects;
    let began = Stopwatch::start();
    let is_time_left = |number: &usize| *number == 0 || began.elapsed() < MAX_DURATION;
    for number in (0..changes).map(|number| number * STRIDE).take_while(is_time_left) {
        let slice = number % slices.len();
        replace_endpoint(&mut slices[slice]).context("a slice without endpoints")?;
        let event = WatchEvent::EndpointSlices(Delta::Apply(slices[slice].clone()));
        endpoint.push(running.time(vec![event]).await.context("a change of one endpoint")?);
        scale(&mut slices[slice]).context("a slice without endpoints")?;
        let event = WatchEvent::EndpointSlices(Delta::Apply(slices[slice].clone()));
        scaled.push(running.time(vec![event]).await.context("an endpoint more or less")?);
        let index = number % services.len();
        change_port(&mut services[index]).context("a Service without ports")?;
        let event = WatchEvent::Services(Delta::Apply(services[index].clone()));
        service.push(running.time(vec![event]).await.context("a change of one Service")?);
    }
    running.stop().await?;
    Ok(ChangeTimings { first, endpoint, scaled, service })
}

/// Replaces the first endpoint address by another one, or restores it.
fn replace_endpoint(slice: &mut EndpointSlice) -> Option<()> {
    if let std::net::IpAddr::V4(ip) = slice.endpoints.first_mut()?.address.as_mut()? {
        *ip = (ip.to_bits() ^ 1 << 15).into();
    }
    Some(())
}

/// Adds an endpoint, or removes the added one.
fn scale(slice: &mut EndpointSlice) -> Option<()> {
    if slice.endpoints.len() > usize::from(ENDPOINTS) {
        slice.endpoints.pop();
        return Some(());
    }
    let mut more = slice.endpoints.first()?.clone();
    if let std::net::IpAddr::V4(ip) = more.address.as_mut()? {
        *ip = (ip.to_bits() ^ 1 << 14).into();
    }
    slice.endpoints.push(more);
    Some(())
}

fn change_port(service: &mut Service) -> Option<()> {
    let port = service.ports.first_mut()?;
    port.port = NonZeroU16::new(port.port.get() ^ 1 << 14)?;
    Some(())
}

/// The decoded objects of the manifests.
struct Objects {
    events: Vec<WatchEvent>,
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
}

impl Objects {
    async fn read(config: &Config) -> Result<Self> {
        let ObjectSource::Manifests(directory) = &config.source else { bail!("no --manifests") };
        let (to, mut from) = mpsc::channel(KINDS);
        let source = tokio::spawn(ManifestSource::new(directory).run(to));
        let mut objects = Self { events: Vec::new(), services: Vec::new(), slices: Vec::new() };
        for _ in 0..KINDS {
            let event = from.recv().await.context("the manifest source ended early")?;
            // The Service under load differs from all others. Only the others are changed.
            let is_changeable = |namespace: &str| namespace != "bench";
            match &event {
                WatchEvent::Services(Delta::Replace(list)) => {
                    let changeable = list.iter().filter(|service| is_changeable(&service.name.namespace));
                    objects.services.extend(changeable.cloned());
                }
                WatchEvent::EndpointSlices(Delta::Replace(list)) => {
                    let changeable = list.iter().filter(|slice| is_changeable(&slice.name.namespace));
                    objects.slices.extend(changeable.cloned());
                }
                _ => {}
            }
            objects.events.push(event);
        }
        drop(from);
        source.await??;
        ensure!(
            !objects.services.is_empty() && !objects.slices.is_empty(),
            "there is nothing to change: at least two Services are needed"
        );
        Ok(objects)
    }

    fn all(&self) -> Vec<WatchEvent> {
        self.events.clone()
    }
}

/// The running sync loop.
struct RunningLoop {
    events: mpsc::Sender<WatchEvent>,
    rendered: mpsc::UnboundedReceiver<RenderResult>,
    shutdown: CancellationToken,
    looping: tokio::task::JoinHandle<Result<()>>,
}

/// The result of a kernel change.
struct RenderResult {
    result: Result<usize, String>,
    since: Stopwatch,
    cpu: Duration,
}

impl RunningLoop {
    async fn start(config: &Config) -> Result<Self> {
        let (to_loop, mut node_facts) = watch::channel(None);
        let disturbed = Arc::new(Notify::new());
        let report = kernel::links::report(ipvs::DUMMY_LINK, to_loop, Arc::clone(&disturbed));
        let _following = tokio::spawn(report);
        node_facts.wait_for(Option::is_some).await.context("the node's links and addresses")?;
        node_facts.mark_changed();
        let (done, rendered) = mpsc::unbounded_channel();
        let timed = Box::new(TimedRenderer { inner: renderer(config)?, done });
        let health = ProxyHealth::new(NEVER);
        let outputs = Outputs {
            metrics: Metrics::default(),
            health,
            health_checks: watch::Sender::default(),
            status: Status::default(),
            events: proxy_userspace::node::NodeEvents::default(),
        };
        let periods = SyncPeriods {
            min_sync_period: Duration::ZERO,
            sync_period: NEVER,
            give_up_after: None,
            wait_for_node: false,
        };
        let settings = SyncSettings { model: config.model.clone(), periods };
        let shutdown = CancellationToken::new();
        let mut sync = SyncLoop::new(settings.clone(), timed, outputs, shutdown.clone());
        let (_, settings) = watch::channel(settings);
        let (events, queue) = mpsc::channel(KINDS);
        let inputs = Inputs { events: queue, node_facts, drift: disturbed, settings };
        let looping = tokio::spawn(async move { Ok(sync.run(inputs, &mut ()).await?) });
        Ok(Self { events, rendered, shutdown, looping })
    }

    /// Measures the time from the first event to the changed kernel.
    async fn time(&mut self, events: Vec<WatchEvent>) -> Result<Sample> {
        let (began, cpu) = (Stopwatch::start(), thread_cpu()?);
        for event in events {
            self.events.send(event).await.context("the loop has ended")?;
        }
        let rendered = timeout(CHANGE_TIMEOUT, self.rendered.recv()).await;
        let rendered = rendered.context("the kernel was not changed")?.context("the loop has ended")?;
        let took = began.elapsed().saturating_sub(rendered.since.elapsed());
        match rendered.result {
            Ok(operations) => Ok(Sample { took, cpu: rendered.cpu.saturating_sub(cpu), operations }),
            Err(error) => bail!(error),
        }
    }

    async fn stop(self) -> Result<()> {
        self.shutdown.cancel();
        self.looping.await?
    }
}

/// A renderer that reports when it is done.
struct TimedRenderer {
    inner: Box<dyn Renderer>,
    done: mpsc::UnboundedSender<RenderResult>,
}

impl Renderer for TimedRenderer {
    fn observe(&mut self) -> Result<(), RenderError> {
        self.inner.observe()
    }

    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        let result = self.inner.render(snapshot, dirty);
        let cpu = thread_cpu().unwrap_or_default();
        let outcome = result
            .as_ref()
            .map(|operations| *operations)
            .map_err(|error| proxy_userspace::causes::with_causes(error));
        // The receiver is gone after all is measured.
        let _sent = self.done.send(RenderResult { result: outcome, since: Stopwatch::start(), cpu });
        result
    }

    fn cleanup(&mut self) -> Vec<RenderError> {
        self.inner.cleanup()
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.inner.map_fill()
    }
}

/// Returns the CPU time of this thread and of the commands that have ended.
fn thread_cpu() -> Result<Duration> {
    let own: Duration = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into();
    let children = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let of = |time: TimeVal| u64::try_from(time.num_microseconds()).map(Duration::from_micros);
    Ok(own + of(children.user_time())? + of(children.system_time())?)
}
