//! A node with a proxy that watches an API server, and clients.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{Dial, Get, Page, Protocol, Try},
    deadline::Deadline,
    runner::{Cluster, Proxy},
    small_cluster::{CLUSTER_IP, HOSTS, NODE, SERVICES, Slices},
    traffic::{Clients, Load},
    world::{Host, World},
};

const METRICS: &str = "http://127.0.0.1:10249";
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// Enough to meet every endpoint, but for once in a thousand million times.
const LOOKS: usize = 40;
const LOG_LINES: usize = 15;

/// What is under test.
pub(crate) struct Setting {
    pub(crate) shunt: PathBuf,
    pub(crate) mode: String,
}

/// The node, in the order in which its parts have to go.
pub(crate) struct Bed {
    pub(crate) proxy: Proxy,
    pub(crate) cluster: Cluster,
    pub(crate) world: World,
}

impl Bed {
    /// A node whose proxy has not started yet, with these fields of the configuration. a1 and a2 serve.
    pub(crate) fn new(setting: &Setting, mode: &str, fields: &str) -> Result<Self> {
        let world = World::build(&HOSTS, &std::env::current_exe()?)?;
        let cluster = Cluster::start(&world)?;
        cluster.apply_all(NODE)?;
        cluster.apply_all(SERVICES)?;
        let fields: Mapping = serde_yaml_ng::from_str(fields).context("fields of the configuration")?;
        let proxy = Proxy::new(&world, &setting.shunt, mode, &cluster, &fields)?;
        let bed = Self { proxy, cluster, world };
        bed.serve(&[Host::A1, Host::A2])?;
        Ok(bed)
    }

    /// The same with the proxy up.
    pub(crate) fn started(setting: &Setting, mode: &str, fields: &str) -> Result<Self> {
        let mut bed = Self::new(setting, mode, fields)?;
        bed.proxy.start(&mut bed.world)?;
        Ok(bed)
    }

    /// Has the cluster say that these pods serve.
    pub(crate) fn serve(&self, pods: &[Host]) -> Result<()> {
        self.cluster.apply_all(Slices::of_all(pods).text())
    }

    /// Waits until node1 reaches these pods, and no others.
    pub(crate) fn wait_until_served(&mut self, pods: &[Host], within: Duration) -> Result<()> {
        let mut wanted: Vec<&str> = pods.iter().map(|pod| pod.name()).collect();
        wanted.sort_unstable();
        let mut seen = Vec::new();
        let mut look = || match self.reached() {
            Ok(reached) => {
                seen = reached;
                (seen == wanted).then_some(Ok(()))
            }
            Err(error) => Some(Err(error)),
        };
        match Deadline::after(within).poll(&mut look) {
            Some(result) => result,
            None => bail!("after {within:?}, node1 reaches {seen:?} and not {wanted:?}"),
        }
    }

    /// The pods that node1 reaches through the Service, sorted; and what fails.
    fn reached(&mut self) -> Result<Vec<String>> {
        let dial = Dial { timeout: ANSWERED_WITHIN, ..Dial::new(CLUSTER_IP.parse()?, Protocol::Tcp, LOOKS) };
        let tries = self.world.agent(Host::Node1)?.dial(dial)?;
        let mut names: Vec<String> = tries
            .into_iter()
            .map(|one| match one {
                Try::Answered(answer) => answer.host,
                Try::Failed(failure) => format!("{}: {}", failure.doing, failure.message),
            })
            .collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// A page of the metrics server.
    pub(crate) fn page(&mut self, path: &str) -> Result<Page> {
        let get = Get { url: format!("{METRICS}{path}"), timeout: ANSWERED_WITHIN };
        match self.world.agent(Host::Node1)?.get(get)? {
            Ok(page) => Ok(page),
            Err(failure) => bail!("{path}: {}", failure.message),
        }
    }

    /// Waits until a line of /metrics begins so.
    pub(crate) fn wait_for_metric(&mut self, line: &str, within: Duration) -> Result<()> {
        let mut look = || self.page("/metrics").ok()?.body.lines().any(|l| l.starts_with(line)).then_some(());
        Deadline::after(within).poll(&mut look).with_context(|| format!("no {line} after {within:?}"))
    }

    /// Waits until the log has this.
    pub(crate) fn wait_for_log(&self, text: &str, within: Duration) -> Result<()> {
        let look = || self.proxy.log().contains(text).then_some(());
        Deadline::after(within).poll(look).with_context(|| {
            format!("the log does not say {text:?} after {within:?}:\n{}", self.proxy.log_tail(LOG_LINES))
        })
    }

    /// Does something while all clients dial: no connection may fail, and those that were open before live on.
    pub(crate) fn under_load(&mut self, job: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let mut clients = Clients::take(&mut self.world)?;
        let process = self.proxy.process_id();
        let loads = clients
            .dial_while(|| job(self))
            .with_context(|| format!("the end of the log:\n{}", self.proxy.log_tail(LOG_LINES)))?;
        ensure!(
            Load::report(&loads),
            "connections failed; the end of the log:\n{}",
            self.proxy.log_tail(LOG_LINES)
        );
        clients.ensure_held()?;
        ensure!(self.proxy.process_id() == process, "it is another process");
        Ok(())
    }

    /// Stops the proxy and has it clean up.
    pub(crate) fn end(mut self) -> Result<()> {
        self.proxy.stop()?;
        self.proxy.clean_up(&self.world)
    }
}
