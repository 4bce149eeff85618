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
/// The timeout of connections that are tried again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of a page, which must come.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// With this number of connections, the chance to miss an endpoint is one in a thousand million.
const CONNECTIONS: usize = 40;
const LOG_LINES: usize = 15;

/// The proxy under test.
pub(crate) struct Setup {
    pub(crate) shunt: PathBuf,
    pub(crate) mode: String,
}

/// The node. The fields are dropped in this order.
pub(crate) struct TestNode {
    pub(crate) proxy: Proxy,
    pub(crate) cluster: Cluster,
    pub(crate) world: World,
}

impl TestNode {
    /// Creates a node whose proxy has these configuration fields and is not started yet. The
    /// endpoints are a1 and a2.
    pub(crate) fn new(setup: &Setup, mode: &str, fields: &str) -> Result<Self> {
        let world = World::build(&HOSTS, &std::env::current_exe()?)?;
        let cluster = Cluster::start(&world)?;
        cluster.apply_all(NODE)?;
        cluster.apply_all(SERVICES)?;
        let fields: Mapping = serde_yaml_ng::from_str(fields).context("fields of the configuration")?;
        let proxy = Proxy::new(Host::Node1, &world, &setup.shunt, mode, &cluster, &fields)?;
        let node = Self { proxy, cluster, world };
        node.set_endpoints(&[Host::A1, Host::A2])?;
        Ok(node)
    }

    /// Creates the same node and starts the proxy.
    pub(crate) fn started(setup: &Setup, mode: &str, fields: &str) -> Result<Self> {
        let mut node = Self::new(setup, mode, fields)?;
        node.proxy.start(&mut node.world)?;
        Ok(node)
    }

    /// Makes these pods the endpoints of the Services.
    pub(crate) fn set_endpoints(&self, pods: &[Host]) -> Result<()> {
        self.cluster.apply_all(Slices::for_all_services(pods).text())
    }

    /// Waits until node1 reaches these pods and no others.
    pub(crate) fn wait_until_served(&mut self, pods: &[Host], timeout: Duration) -> Result<()> {
        let mut expected: Vec<&str> = pods.iter().map(|pod| pod.name()).collect();
        expected.sort_unstable();
        let mut reached = Vec::new();
        let served = Deadline::after(timeout).try_poll(|| {
            reached = self.reached()?;
            anyhow::Ok((reached == expected).then_some(()))
        })?;
        served
            .with_context(|| format!("after {timeout:?}, node1 reaches {reached:?} instead of {expected:?}"))
    }

    /// Returns the pods that node1 reaches through the Service, and the failures, sorted.
    fn reached(&mut self) -> Result<Vec<String>> {
        let request = ConnectRequest::new(CLUSTER_IP.parse()?, Protocol::Tcp, CONNECTIONS);
        let attempts = self.world.agent(Host::Node1)?.connect(request.with_timeout(ANSWER_TIMEOUT))?;
        let names = attempts.into_iter().map(|attempt| match attempt {
            Attempt::Answered(answer) => answer.host,
            Attempt::Failed(failure) => failure.to_string(),
        });
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Fetches a page of the metrics server.
    pub(crate) fn page(&mut self, path: &str) -> Result<Page> {
        let get = GetRequest { url: format!("{METRICS}{path}"), timeout: PAGE_TIMEOUT };
        match self.world.agent(Host::Node1)?.get(get)? {
            Ok(page) => Ok(page),
            Err(failure) => bail!("{path}: {}", failure.message),
        }
    }

    /// Waits until a line of /metrics begins with `line`.
    pub(crate) fn wait_for_metric(&mut self, line: &str, timeout: Duration) -> Result<()> {
        let check = || self.page("/metrics").ok()?.body.lines().any(|l| l.starts_with(line)).then_some(());
        Deadline::after(timeout).poll(check).with_context(|| format!("no {line} after {timeout:?}"))
    }

    /// Waits until the log contains a text.
    pub(crate) fn wait_for_log(&self, text: &str, timeout: Duration) -> Result<()> {
        let check = || self.proxy.log().contains(text).then_some(());
        let found = Deadline::after(timeout).poll(check);
        found
            .with_context(|| format!("the log does not contain {text:?} after {timeout:?}{}", self.log_end()))
    }

    /// Runs `job` while all clients connect. No connection may fail, and open connections must
    /// continue to work.
    pub(crate) fn under_load(&mut self, job: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let mut clients = Clients::from_world(&mut self.world)?;
        let process = self.proxy.process_id();
        let results =
            clients.connect_during(|| job(self)).with_context(|| format!("under load{}", self.log_end()))?;
        ensure!(ClientResult::report(&results), "connections failed{}", self.log_end());
        clients.check_open_connections()?;
        ensure!(self.proxy.process_id() == process, "the proxy is another process");
        Ok(())
    }

    fn log_end(&self) -> String {
        format!("; the end of the log:\n{}", self.proxy.log_tail(LOG_LINES))
    }

    /// Stops the proxy and has it clean up.
    pub(crate) fn end(mut self) -> Result<()> {
        self.proxy.stop()?;
        self.proxy.clean_up(&self.world)
    }
}
