//! The proxy under test: the real binary as a process on a node.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_yaml_ng::Mapping;

use super::{config::compose, objects::ObjectSource};
use crate::{
    agent::protocol::GetRequest,
    deadline::{Deadline, Stopwatch, scaled},
    process::{ChildProcess, describe_status},
    world::{Host, World},
};

const HEALTHZ: &str = "http://127.0.0.1:10256/healthz";
const HEALTH_TIMEOUT: Duration = Duration::from_mins(1);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// A proxy that restores the chains of 10,000 Services with iptables may finish that first.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
const CLEANUP_TIMEOUT: Duration = Duration::from_mins(1);

/// How to run the proxy, and its process while it runs.
pub struct Proxy {
    node: Host,
    program: PathBuf,
    arguments: Vec<String>,
    pin_directory: PathBuf,
    log: PathBuf,
    config: PathBuf,
    running: Option<ChildProcess>,
}

impl Proxy {
    /// Creates a proxy for a node without starting it. Writes its configuration file, with these
    /// fields over the base. The base has the name of node1, so another node has a flag.
    pub fn new(
        node: Host,
        world: &World,
        program: &Path,
        mode: &str,
        source: &impl ObjectSource,
        fields: &Mapping,
    ) -> Result<Self> {
        let file = |name: &str| match node {
            Host::Node1 => world.directory().join(name),
            _ => world.directory().join(format!("{node}-{name}")),
        };
        let config = file("config.yaml");
        let path = |path: &Path| path.display().to_string();
        let arguments = [
            ("--mode", mode.to_owned()),
            source.flag(),
            ("--config", path(&config)),
            ("--cgroup-root", path(&world.cgroup_of(node))),
            ("--bpf-pin-dir", path(&world.pins_of(node))),
        ];
        let mut this = Self {
            node,
            program: program.to_owned(),
            arguments: arguments.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect(),
            pin_directory: world.pins_of(node),
            log: file("proxy.log"),
            running: None,
            config,
        };
        if node != Host::Node1 {
            this.set_flag("--hostname-override", node.name());
        }
        this.configure(mode, fields)?;
        Ok(this)
    }

    /// Returns the node on which it runs.
    pub fn node(&self) -> Host {
        self.node
    }

    /// Returns the flags of the proxy.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Returns its process identifier. None while it does not run.
    pub fn process_id(&self) -> Option<u32> {
        self.running.as_ref().map(ChildProcess::id)
    }

    /// From the next start on, the proxy watches the API server at this URL instead of the
    /// manifests.
    pub fn watch_api(&mut self, url: &str) {
        if let Some(flag) = self.arguments.iter().position(|argument| argument == "--manifests") {
            self.arguments.splice(flag..flag + 2, ["--master".to_owned(), url.to_owned()]);
        }
    }

    /// Starts its process.
    pub fn spawn(&mut self, world: &World) -> Result<()> {
        ensure!(self.running.is_none(), "the proxy is already running");
        self.running = Some(world.spawn(self.node, &self.program, &self.arguments, &self.open_log()?)?);
        Ok(())
    }

    /// Starts the proxy and waits until /healthz answers 200, which means that the first full sync
    /// is in the kernel.
    pub fn start(&mut self, world: &mut World) -> Result<()> {
        self.start_measured(world).map(drop)
    }

    /// Like [`Self::start`]. Returns how long it took from the start of the program.
    pub fn start_measured(&mut self, world: &mut World) -> Result<Duration> {
        self.spawn(world)?;
        let began = Stopwatch::start();
        let get = GetRequest { url: HEALTHZ.to_owned(), timeout: scaled(REQUEST_TIMEOUT) };
        let mut last = "no answer".to_owned();
        let healthy =
            Deadline::after(HEALTH_TIMEOUT).try_poll(|| self.check_health(world, &get, &mut last))?;
        healthy.with_context(|| {
            format!("the proxy is not healthy after {HEALTH_TIMEOUT:?}: {HEALTHZ}: {last}")
        })?;
        Ok(began.elapsed())
    }

    /// Stops the proxy with SIGTERM. What it programmed stays.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else {
            return Ok(());
        };
        if let Some(status) = running.exit_status()? {
            bail!("the proxy had already ended with {}", describe_status(status));
        }
        let status = running.terminate(STOP_TIMEOUT)?;
        ensure!(status.success(), "the proxy ended with {} on SIGTERM", describe_status(status));
        Ok(())
    }

    /// Kills the proxy with SIGKILL. What it programmed stays.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else {
            return Ok(());
        };
        running.signal(Signal::SIGKILL)?;
        running.wait(STOP_TIMEOUT)?.context("the proxy does not end on SIGKILL")?;
        Ok(())
    }

    /// Waits until the proxy ends by itself.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        let mut running = self.running.take().context("the proxy does not run")?;
        running.wait(STOP_TIMEOUT)?.context("the proxy does not end by itself")
    }

    /// Sets the mode and the configuration fields for the next start.
    pub fn set_mode(&mut self, mode: &str, fields: &Mapping) -> Result<()> {
        self.set_flag("--mode", mode);
        self.configure(mode, fields)
    }

    /// Sets the value of a flag for the next start.
    pub fn set_flag(&mut self, flag: &str, value: &str) {
        match self.arguments.iter().position(|argument| argument == flag) {
            Some(at) => value.clone_into(&mut self.arguments[at + 1]),
            None => self.arguments.extend([flag.to_owned(), value.to_owned()]),
        }
    }

    /// Returns how many packets left before the stack.
    pub fn sent_before_stack(&self, world: &World) -> Result<u64> {
        let line = "curl -s localhost:10249/metrics | sed -n 's/.*fate=\"sent_before_stack\"} //p'";
        world.run(self.node, line)?.trim().parse().context("the count of packets that left before the stack")
    }

    /// Writes the configuration file with these fields.
    pub fn configure(&self, mode: &str, fields: &Mapping) -> Result<()> {
        let path = &self.config;
        fs::write(path, compose(fields, mode)?).with_context(|| format!("write {}", path.display()))
    }

    /// Runs the proxy with `--cleanup`, and checks that its pin directory is gone.
    pub fn clean_up(&self, world: &World) -> Result<()> {
        let mut arguments = self.arguments.clone();
        arguments.push("--cleanup".to_owned());
        let mut running = world.spawn(self.node, &self.program, &arguments, &self.open_log()?)?;
        let Some(status) = running.wait(CLEANUP_TIMEOUT)? else {
            bail!("--cleanup did not end within {CLEANUP_TIMEOUT:?} and was killed");
        };
        ensure!(status.success(), "--cleanup ended with {}", describe_status(status));
        if self.pin_directory.exists() {
            bail!("--cleanup left {} with {}", self.pin_directory.display(), listing(&self.pin_directory));
        }
        Ok(())
    }

    /// Truncates the log of earlier proxies.
    pub fn clear_log(&self) -> Result<()> {
        File::create(&self.log).with_context(|| format!("create {}", self.log.display()))?;
        Ok(())
    }

    /// Returns the last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        last_lines(&self.log(), lines)
    }

    /// Returns its log.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Returns `Some` if the proxy is healthy, and an error if it has ended.
    fn check_health(&mut self, world: &mut World, get: &GetRequest, last: &mut String) -> Result<Option<()>> {
        if let Some(running) = &mut self.running
            && let Some(status) = running.exit_status()?
        {
            self.running = None;
            let (status, log) = (describe_status(status), self.log_tail(15));
            bail!("the proxy ended with {status} before it was healthy; the end of its log:\n{log}");
        }
        match world.agent(self.node)?.get(get.clone())? {
            Ok(page) if page.status == 200 => return Ok(Some(())),
            Ok(page) => *last = format!("status {}: {}", page.status, page.body),
            Err(failure) => *last = failure.message,
        }
        Ok(None)
    }

    fn open_log(&self) -> Result<File> {
        let log = File::options().create(true).append(true).open(&self.log);
        log.with_context(|| format!("open {}", self.log.display()))
    }
}

fn listing(directory: &Path) -> String {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if names.is_empty() { "nothing in it".to_owned() } else { names.join(", ") }
}

/// Returns the last lines of a text.
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    let tail = all.get(all.len().saturating_sub(lines)..).unwrap_or_default();
    tail.join("\n")
}
