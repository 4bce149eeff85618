//! The proxy's own sync loop and dataplane, as the agent runs them to time changes.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::{TimeVal, TimeValLike as _},
    },
    time::{ClockId, clock_gettime},
};
use proxy_userspace::{
    assembly,
    config::Config,
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
    model::{Dirty, Snapshot, WatchEvent},
    sync::{Inputs, Inspector, Outputs, SyncLoop, SyncPeriods, SyncSettings},
};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::super::protocol::Sample;
use crate::deadline::Stopwatch;

const CHANGE_TIMEOUT: Duration = Duration::from_mins(1);
/// The loop compares the kernel with the Snapshot only at the start.
const NEVER: Duration = Duration::from_hours(24);
/// The kinds of objects: a queue for the first list of each.
const KINDS: usize = 3;

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

pub(super) fn clean_up(config: &Config) -> Vec<String> {
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

/// The running sync loop.
pub(super) struct RunningLoop {
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
    pub(super) async fn start(config: &Config) -> Result<Self> {
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
            dsr_announcement: watch::Sender::default(),
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
        let inputs = Inputs {
            events: queue,
            node_facts,
            drift: disturbed,
            settings,
            requests: Inspector::default().open(),
        };
        let looping = tokio::spawn(async move { Ok(sync.run(inputs, &mut ()).await?) });
        Ok(Self { events, rendered, shutdown, looping })
    }

    /// Measures the time from the first event to the changed kernel.
    pub(super) async fn time(&mut self, events: Vec<WatchEvent>) -> Result<Sample> {
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

    pub(super) async fn stop(self) -> Result<()> {
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
