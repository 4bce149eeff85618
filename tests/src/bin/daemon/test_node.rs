//! A node with a proxy that watches an API server, and clients.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, GetRequest, Page, Protocol},
    deadline::Deadline,
    runner::{Cluster, Proxy},
    small_cluster::{CLUSTER_IP, HOSTS, NODE, SERVICES, Slices},
    traffic::{ClientResult, Clients},
    world::{Host, World},
};

const METRICS: &str = "http://127.0.0.1:10249";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Enough to meet every endpoint, but for once in a thousand million times.
const LOOKS: usize = 40;
const LOG_LINES: usize = 15;

/// What is under test.
pub(crate) struct Setup {
    pub(crate) shunt: PathBuf,
    pub(crate) mode: String,
}

/// The node, in the order in which its parts have to go.
pub(crate) struct TestNode {
    pub(crate) proxy: Proxy,
    pub(crate) cluster: Cluster,
    pub(crate) world: World,
}

impl TestNode {
    /// A node whose proxy has not started yet, with these fields of the configuration. a1 and a2 serve.
    pub(crate) fn new(setup: &Setup, mode: &str, fields: &str) -> Result<Self> {
        let world = World::build(&HOSTS, &std::env::current_exe()?)?;
        let cluster = Cluster::start(&world)?;
        cluster.apply_all(NODE)?;
        cluster.apply_all(SERVICES)?;
        let fields: Mapping = serde_yaml_ng::from_str(fields).context("fields of the configuration")?;
        let proxy = Proxy::new(&world, &setup.shunt, mode, &cluster, &fields)?;
        let node = Self { proxy, cluster, world };
        node.serve(&[Host::A1, Host::A2])?;
        Ok(node)
    }

    /// The same with the proxy up.
    pub(crate) fn started(setup: &Setup, mode: &str, fields: &str) -> Result<Self> {
        let mut node = Self::new(setup, mode, fields)?;
        node.proxy.start(&mut node.world)?;
        Ok(node)
    }

    /// Has the cluster say that these pods serve.
    pub(crate) fn serve(&self, pods: &[Host]) -> Result<()> {
        self.cluster.apply_all(Slices::for_all_services(pods).text())
    }

    /// Waits until node1 reaches these pods, and no others.
    pub(crate) fn wait_until_served(&mut self, pods: &[Host], timeout: Duration) -> Result<()> {
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
        match Deadline::after(timeout).poll(&mut look) {
            Some(result) => result,
            None => bail!("after {timeout:?}, node1 reaches {seen:?} and not {wanted:?}"),
        }
    }

    /// The pods that node1 reaches through the Service, sorted; and what fails.
    fn reached(&mut self) -> Result<Vec<String>> {
        let request = ConnectRequest {
            timeout: ANSWER_TIMEOUT,
            ..ConnectRequest::new(CLUSTER_IP.parse()?, Protocol::Tcp, LOOKS)
        };
        let attempts = self.world.agent(Host::Node1)?.connect(request)?;
        let mut names: Vec<String> = attempts
            .into_iter()
            .map(|one| match one {
                Attempt::Answered(answer) => answer.host,
                Attempt::Failed(failure) => format!("{}: {}", failure.operation, failure.message),
            })
            .collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// A page of the metrics server.
    pub(crate) fn page(&mut self, path: &str) -> Result<Page> {
        let get = GetRequest { url: format!("{METRICS}{path}"), timeout: ANSWER_TIMEOUT };
        match self.world.agent(Host::Node1)?.get(get)? {
            Ok(page) => Ok(page),
            Err(failure) => bail!("{path}: {}", failure.message),
        }
    }

    /// Waits until a line of /metrics begins so.
    pub(crate) fn wait_for_metric(&mut self, line: &str, timeout: Duration) -> Result<()> {
        let mut look = || self.page("/metrics").ok()?.body.lines().any(|l| l.starts_with(line)).then_some(());
        Deadline::after(timeout).poll(&mut look).with_context(|| format!("no {line} after {timeout:?}"))
    }

    /// Waits until the log has this.
    pub(crate) fn wait_for_log(&self, text: &str, timeout: Duration) -> Result<()> {
        let look = || self.proxy.log().contains(text).then_some(());
        Deadline::after(timeout).poll(look).with_context(|| {
            format!("the log does not say {text:?} after {timeout:?}:\n{}", self.proxy.log_tail(LOG_LINES))
        })
    }

    /// Does something while all clients dial: no connection may fail, and those that were open before live on.
    pub(crate) fn under_load(&mut self, job: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let mut clients = Clients::from_world(&mut self.world)?;
        let process = self.proxy.process_id();
        let loads = clients
            .connect_during(|| job(self))
            .with_context(|| format!("the end of the log:\n{}", self.proxy.log_tail(LOG_LINES)))?;
        ensure!(
            ClientResult::report(&loads),
            "connections failed; the end of the log:\n{}",
            self.proxy.log_tail(LOG_LINES)
        );
        clients.check_open_connections()?;
        ensure!(self.proxy.process_id() == process, "it is another process");
        Ok(())
    }

    /// Stops the proxy and has it clean up.
    pub(crate) fn end(mut self) -> Result<()> {
        self.proxy.stop()?;
        self.proxy.clean_up(&self.world)
    }
}
