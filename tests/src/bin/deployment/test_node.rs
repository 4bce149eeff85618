//! A node with pods and a Service, and the proxy on it under a number of capabilities.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, GetRequest, Protocol},
    deadline::{Deadline, scaled},
    process::ChildProcess,
    runner::{Manifests, compose},
    small_cluster::{CLUSTER_IP, DNS_PORT, HOSTS, NODE, NODE_PORT, SERVICES, Slices, WEB_PORT},
    world::{Host, World},
};

const HEALTHZ: &str = "http://127.0.0.1:10256/healthz";
const PROXY_MODE: &str = "http://127.0.0.1:10249/proxyMode";
const TIMEOUT: Duration = Duration::from_secs(20);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// More than the time after which TCP sends its first segment again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A container's way to a process with fewer capabilities: the bounding set is what root gets by execve(2).
const SETPRIV: &str = "/usr/bin/setpriv";

/// The world, with the proxy or without it.
pub(crate) struct TestNode {
    pub(crate) world: World,
    shunt: PathBuf,
    manifests: Manifests,
    running: Option<ChildProcess>,
    version: u32,
}

impl TestNode {
    /// A Service `web` with endpoints on node1, and no proxy yet.
    pub(crate) fn build(shunt: &Path) -> Result<Self> {
        let world = World::build(&HOSTS, &std::env::current_exe()?)?;
        let manifests = Manifests::create(world.directory())?;
        manifests.place("node.yaml", NODE)?;
        manifests.place("services.yaml", SERVICES)?;
        let mut slices = Slices::default();
        slices.add("web", false, WEB_PORT, &[Host::A1, Host::A2]);
        slices.add("dns", false, DNS_PORT, &[Host::A1]);
        slices.place(&manifests)?;
        Ok(Self { world, shunt: shunt.to_owned(), manifests, running: None, version: 0 })
    }

    /// The mount of a `ConfigMap`: the file is a link into a directory that a link names, which is replaced in one step.
    fn mount(&self) -> PathBuf {
        self.world.directory().join("config-map")
    }

    /// Puts a configuration there as the kubelet does, with these fields over the base.
    pub(crate) fn configure(&mut self, mode: &str, fields: &str) -> Result<()> {
        let mut fields: Mapping = serde_yaml_ng::from_str(fields).context("fields")?;
        fields.insert("mode".into(), mode.into());
        let text = compose(&fields, mode)?;
        self.place(&text)
    }

    /// Puts a text there.
    pub(crate) fn place(&mut self, text: &str) -> Result<()> {
        self.version += 1;
        let version = format!("..{}", self.version);
        let directory = self.mount().join(&version);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("config.conf"), text)?;
        symlink(&version, self.mount().join("..data_tmp"))?;
        fs::rename(self.mount().join("..data_tmp"), self.mount().join("..data"))?;
        if self.version == 1 {
            symlink("..data/config.conf", self.mount().join("config.conf"))?;
        }
        Ok(())
    }

    fn log_path(&self) -> PathBuf {
        self.world.directory().join("proxy.log")
    }

    /// What the proxy has said.
    pub(crate) fn log(&self) -> Result<String> {
        fs::read_to_string(self.log_path()).context("the proxy's log")
    }

    /// Starts the proxy; with `capabilities`, under those alone.
    pub(crate) fn spawn(&mut self, capabilities: Option<&[String]>, flags: &[&str]) -> Result<()> {
        let path = |path: &Path| path.display().to_string();
        let mut arguments = vec![
            "--manifests".to_owned(),
            path(self.manifests.directory()),
            "--config".to_owned(),
            path(&self.mount().join("config.conf")),
            "--cgroup-root".to_owned(),
            path(&self.world.cgroup_root()),
            "--bpf-pin-dir".to_owned(),
            path(&self.world.pin_directory()),
        ];
        arguments.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let mut program = self.shunt.clone();
        if let Some(capabilities) = capabilities {
            let set =
                capabilities.iter().fold("-all".to_owned(), |set, name| set + ",+" + &name.to_lowercase());
            let before = ["--bounding-set".to_owned(), set, path(&self.shunt)];
            arguments.splice(0..0, before);
            program = SETPRIV.into();
        }
        let log = File::options().create(true).append(true).open(self.log_path())?;
        self.running = Some(self.world.spawn(Host::Node1, &program, &arguments, &log)?);
        Ok(())
    }

    /// The proxy's process id.
    pub(crate) fn process_id(&self) -> Option<u32> {
        self.running.as_ref().map(ChildProcess::id)
    }

    /// Waits until /healthz answers 200.
    pub(crate) fn wait_until_healthy(&mut self) -> Result<()> {
        let get = GetRequest { url: HEALTHZ.to_owned(), timeout: scaled(REQUEST_TIMEOUT) };
        self.wait_until("healthy", |node| {
            if let Some(status) = node.running.as_mut().map(ChildProcess::exit_status).transpose()?.flatten()
            {
                bail!("the proxy has ended with {status}");
            }
            Ok(node.world.agent(Host::Node1)?.get(get.clone())?.is_ok_and(|page| page.status == 200))
        })
    }

    /// What /proxyMode says; empty where nobody answers.
    pub(crate) fn mode(&mut self) -> Result<String> {
        let get = GetRequest { url: PROXY_MODE.to_owned(), timeout: scaled(REQUEST_TIMEOUT) };
        Ok(self.world.agent(Host::Node1)?.get(get)?.map(|page| page.body).unwrap_or_default())
    }

    /// Waits until the proxy has ended, and returns whether it did so with an error.
    pub(crate) fn wait_for_exit(&mut self) -> Result<bool> {
        let Some(mut running) = self.running.take() else { bail!("the proxy does not run") };
        let status = running.wait(scaled(TIMEOUT))?.context("the proxy goes on")?;
        Ok(!status.success())
    }

    /// Waits until it says so.
    pub(crate) fn wait_for_log(&mut self, what: &str) -> Result<()> {
        self.wait_until(&format!("said {what:?}"), |node| Ok(node.log()?.contains(what)))
    }

    /// Waits until it is so.
    pub(crate) fn wait_until(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let mut last = Ok(());
        let ended = Deadline::after(scaled(TIMEOUT)).poll(|| match is_so(self) {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        });
        if ended.is_none() {
            last = Err(anyhow::anyhow!("not {what} within {TIMEOUT:?}"));
        }
        ended.unwrap_or(last).with_context(|| format!("the proxy said:\n{}", self.log().unwrap_or_default()))
    }

    /// Whether a host reaches an address by TCP.
    pub(crate) fn reaches(&mut self, from: Host, to: &str) -> Result<bool> {
        self.answers(from, to, REQUEST_TIMEOUT)
    }

    fn answers(&mut self, from: Host, to: &str, timeout: Duration) -> Result<bool> {
        let request =
            ConnectRequest { timeout: scaled(timeout), ..ConnectRequest::new(to.parse()?, Protocol::Tcp, 1) };
        Ok(self.world.agent(from)?.connect(request)?.iter().all(|one| matches!(one, Attempt::Answered(_))))
    }

    /// A pod and the node reach the cluster IP, and a client outside the node port.
    pub(crate) fn check_served(&mut self) -> Result<()> {
        for (from, to) in [(Host::A3, CLUSTER_IP), (Host::Node1, CLUSTER_IP), (Host::Client, NODE_PORT)] {
            let reached = self.answers(from, to, ANSWER_TIMEOUT)?;
            ensure!(reached, "{from} does not reach {to}; the proxy said:\n{}", self.log()?);
        }
        Ok(())
    }

    /// Ends the proxy by SIGTERM.
    pub(crate) fn stop(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let status = running.terminate(scaled(TIMEOUT))?;
        ensure!(status.success(), "the proxy ended with {status}; it said:\n{}", self.log()?);
        Ok(())
    }
}
