//! A node with pods and a Service, and a proxy that can run with few capabilities.

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
const TIMEOUT: Duration = Duration::from_mins(1);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than the time after which TCP retransmits its first segment.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
/// Starts a process with fewer capabilities, as a container runtime does: root gets the bounding
/// set on execve(2).
const SETPRIV: &str = "/usr/bin/setpriv";

/// Returns a command that executes a program with these capabilities only.
fn with_capabilities(capabilities: &[String]) -> Vec<String> {
    let set = capabilities.iter().fold("-all".to_owned(), |set, name| set + ",+" + &name.to_lowercase());
    vec![SETPRIV.to_owned(), "--bounding-set".to_owned(), set]
}

/// The world, with or without a running proxy.
pub(crate) struct TestNode {
    pub(crate) world: World,
    shunt: PathBuf,
    manifests: Manifests,
    running: Option<ChildProcess>,
    version: u32,
}

impl TestNode {
    /// Creates a Service `web` with endpoints on node1, without a proxy.
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

    /// Returns the mount of a `ConfigMap`: the file is a symbolic link into a directory. That
    /// directory is named by another link, which the kubelet replaces in one step.
    pub(crate) fn mount(&self) -> PathBuf {
        self.world.directory().join("config-map")
    }

    /// Writes a configuration as the kubelet does, with these fields over the base.
    pub(crate) fn configure(&mut self, mode: &str, fields: &str) -> Result<()> {
        let mut fields: Mapping = serde_yaml_ng::from_str(fields).context("fields")?;
        fields.insert("mode".into(), mode.into());
        let text = compose(&fields, mode)?;
        self.write_config(&text)
    }

    /// Writes this text as the configuration file, as the kubelet does.
    pub(crate) fn write_config(&mut self, text: &str) -> Result<()> {
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

    /// Returns the directory of the manifests that the proxy reads.
    pub(crate) fn manifests(&self) -> &Path {
        self.manifests.directory()
    }

    fn log_path(&self) -> PathBuf {
        self.world.directory().join("proxy.log")
    }

    /// Returns the log of the proxy.
    pub(crate) fn log(&self) -> Result<String> {
        fs::read_to_string(self.log_path()).context("the proxy's log")
    }

    /// Starts the proxy. With `capabilities`, it gets no others.
    pub(crate) fn spawn(&mut self, capabilities: Option<&[String]>, flags: &[&str]) -> Result<()> {
        self.spawn_wrapped(capabilities.map(with_capabilities).unwrap_or_default(), flags)
    }

    /// Starts the proxy with these capabilities only, under an AppArmor profile that is loaded.
    pub(crate) fn spawn_confined(&mut self, profile: &str, capabilities: &[String]) -> Result<()> {
        let enter = format!("echo exec {profile} >/proc/self/attr/exec && exec \"$0\" \"$@\"");
        let wrapper = ["/bin/bash".to_owned(), "-c".into(), enter].into();
        self.spawn_wrapped([wrapper, with_capabilities(capabilities)].concat(), &[])
    }

    /// Starts the proxy with these capabilities only, by a command that executes the program in its
    /// last arguments. The flags override others.
    pub(crate) fn spawn_within(
        &mut self,
        command: &[&str],
        capabilities: &[String],
        flags: &[&str],
    ) -> Result<()> {
        let command: Vec<String> = command.iter().map(ToString::to_string).collect();
        self.spawn_wrapped([command, with_capabilities(capabilities)].concat(), flags)
    }

    /// Starts the proxy by a command that executes the program in its last arguments.
    fn spawn_wrapped(&mut self, mut command: Vec<String>, flags: &[&str]) -> Result<()> {
        let path = |path: &Path| path.display().to_string();
        command.extend([
            path(&self.shunt),
            "--manifests".to_owned(),
            path(self.manifests.directory()),
            "--config".to_owned(),
            path(&self.mount().join("config.conf")),
            "--cgroup-root".to_owned(),
            path(&self.world.cgroup_root()),
            "--bpf-pin-dir".to_owned(),
            path(&self.world.pin_directory()),
        ]);
        command.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self.spawn_command(command)
    }

    /// Starts the proxy by a command that has all arguments.
    pub(crate) fn spawn_command(&mut self, mut command: Vec<String>) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log_path())?;
        let program = PathBuf::from(command.remove(0));
        self.running = Some(self.world.spawn(Host::Node1, &program, &command, &log)?);
        Ok(())
    }

    /// Returns the proxy's process identifier.
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

    /// Returns the answer of /proxyMode. Empty if the proxy does not answer.
    pub(crate) fn mode(&mut self) -> Result<String> {
        let get = GetRequest { url: PROXY_MODE.to_owned(), timeout: scaled(ANSWER_TIMEOUT) };
        Ok(self.world.agent(Host::Node1)?.get(get)?.map(|page| page.body).unwrap_or_default())
    }

    /// Waits until the proxy has ended. Returns true if it ended with an error.
    pub(crate) fn wait_for_exit(&mut self) -> Result<bool> {
        let Some(mut running) = self.running.take() else { bail!("the proxy does not run") };
        let status = running.wait(scaled(TIMEOUT))?.context("the proxy still runs")?;
        Ok(!status.success())
    }

    /// Waits until the log contains a text.
    pub(crate) fn wait_for_log(&mut self, text: &str) -> Result<()> {
        self.wait_until(&format!("{text:?} in the log"), |node| Ok(node.log()?.contains(text)))
    }

    /// Waits until a check returns true.
    pub(crate) fn wait_until(
        &mut self,
        what: &str,
        mut check: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let result = Deadline::after(scaled(TIMEOUT)).try_poll(|| anyhow::Ok(check(self)?.then_some(())));
        result
            .and_then(|done| done.with_context(|| format!("not {what} within {TIMEOUT:?}")))
            .with_context(|| format!("the log of the proxy:\n{}", self.log().unwrap_or_default()))
    }

    /// Returns true if a host reaches an address over TCP.
    pub(crate) fn reaches(&mut self, from: Host, to: &str) -> Result<bool> {
        self.reaches_within(from, to, REQUEST_TIMEOUT)
    }

    fn reaches_within(&mut self, from: Host, to: &str, timeout: Duration) -> Result<bool> {
        let request = ConnectRequest::new(to.parse()?, Protocol::Tcp, 1).with_timeout(scaled(timeout));
        Ok(self.world.agent(from)?.connect(request)?.iter().all(Attempt::is_answered))
    }

    /// Checks that a pod and the node reach the cluster IP, and an outside client the node port.
    pub(crate) fn check_served(&mut self) -> Result<()> {
        for (from, to) in [(Host::A3, CLUSTER_IP), (Host::Node1, CLUSTER_IP), (Host::Client, NODE_PORT)] {
            let reached = self.reaches_within(from, to, ANSWER_TIMEOUT)?;
            ensure!(reached, "{from} does not reach {to}; the log of the proxy:\n{}", self.log()?);
        }
        Ok(())
    }

    /// Stops the proxy with SIGTERM.
    pub(crate) fn stop(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let status = running.terminate(scaled(TIMEOUT))?;
        ensure!(status.success(), "the proxy ended with {status}; its log:\n{}", self.log()?);
        Ok(())
    }
}
