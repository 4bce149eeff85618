//! A private containerd: its files are in the directory of the world, its mounts in a mount
//! namespace of its own, and its processes and containers in the cgroup of the world. They end with
//! the world.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use shunt_tests::{
    deadline::Deadline,
    process::{self, ChildProcess},
    world::{Host, World},
};

const UNSHARE: &str = "/usr/bin/unshare";
const NSENTER: &str = "/usr/bin/nsenter";
/// The entry point of the image. ctr replaces it by the arguments.
pub(crate) const PROGRAM: &str = "/usr/local/bin/shunt";
const CTR: &str = "/usr/bin/ctr";
/// The parent of directories that the shims of every containerd use.
const SHIMS: &str = "/run/containerd";
const LIMIT: Duration = Duration::from_mins(1);
/// Starts containerd. The default directories of its shims are hidden from other containerds, and
/// runc sees cgroup version 2 alone, so that a container is in the cgroup of the world.
const START: &str = "mkdir -p /run/containerd && mount -t tmpfs shunt-test /run/containerd && \
                     umount --recursive --lazy /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && \
                     exec /usr/bin/containerd --config \"$0\"";

/// A running containerd with the image.
pub(crate) struct Runtime {
    daemon: ChildProcess,
    socket: PathBuf,
    /// The name of the image.
    reference: String,
    /// The name of the container, and of its cgroup.
    container: String,
    cgroup: String,
    /// True if the machine has no directory for shims of its own.
    removes_shims: bool,
}

impl Runtime {
    /// Starts containerd in the network namespace of node1, and imports the archive of an image.
    pub(crate) fn start(world: &World, image: &Path) -> Result<Self> {
        let directory = world.directory().join("containerd");
        fs::create_dir_all(&directory)?;
        let (config, socket) = (directory.join("config.toml"), directory.join("socket"));
        fs::write(&config, configuration(&directory, &socket))?;
        let removes_shims = !Path::new(SHIMS).exists();
        let log_path = directory.join("log");
        let log = File::options().create(true).append(true).open(&log_path)?;
        let arguments =
            ["--mount", "--propagation", "slave", "/bin/sh", "-c", START, &config.display().to_string()]
                .map(str::to_owned);
        let daemon = world.spawn(Host::Node1, Path::new(UNSHARE), &arguments, &log)?;
        let container = world.name().to_owned();
        let cgroup = format!("/{container}/container");
        let reference = String::new();
        let mut runtime = Self { daemon, socket, reference, container, cgroup, removes_shims };
        runtime.wait_until_ready().with_context(|| {
            format!("containerd does not start:\n{}", fs::read_to_string(&log_path).unwrap_or_default())
        })?;
        runtime.ctr(&["images", "import", &image.display().to_string()])?;
        let images = runtime.ctr(&["images", "list", "--quiet"])?;
        let [reference] = images.lines().collect::<Vec<_>>()[..] else { bail!("one image: {images}") };
        reference.clone_into(&mut runtime.reference);
        Ok(runtime)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let ready = Deadline::after(LIMIT).try_poll(|| {
            if let Some(status) = self.daemon.exit_status()? {
                bail!("it ended with {status}");
            }
            Ok(self.ctr(&["version"]).ok())
        });
        ready?.context("it does not answer").map(drop)
    }

    /// Runs a command of ctr to its end.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> Result<String> {
        let words = self.command(arguments);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let finished = process::run_with_timeout(Path::new(words[0]), &words[1..], LIMIT)?;
        ensure!(finished.status.success(), "ctr {}: {}", arguments.join(" "), finished.stderr);
        Ok(finished.stdout)
    }

    /// Returns a command of ctr, which runs beside containerd.
    fn command(&self, arguments: &[&str]) -> Vec<String> {
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.daemon.id());
        let socket = self.socket.display().to_string();
        let start = [NSENTER, &namespace, CTR, "--address", &socket];
        start.iter().chain(arguments).map(ToString::to_string).collect()
    }

    /// Returns the command that runs the container in the foreground, in a network namespace. It
    /// passes signals on.
    pub(crate) fn run(&self, network: &Path, options: &[String], arguments: &[String]) -> Vec<String> {
        let network = format!("network:{}", network.display());
        // ctr limits the CPU otherwise, which needs a controller of cgroup version 2.
        let start = ["run", "--rm", "--cpu-shares", "0", "--cgroup", &self.cgroup, "--with-ns", &network];
        let mut command = self.command(&start);
        command.extend_from_slice(options);
        command.extend([&self.reference, &self.container, PROGRAM].map(str::to_owned));
        command.extend_from_slice(arguments);
        command
    }

    /// Runs a command in the container, and returns its output.
    pub(crate) fn exec(&self, words: &[&str]) -> Result<String> {
        let start = ["tasks", "exec", "--exec-id", "command", &self.container];
        self.ctr(&[&start, words].concat())
    }

    /// Returns the process identifier of the container's first process.
    pub(crate) fn process(&self) -> Result<String> {
        let tasks = self.ctr(&["tasks", "list"])?;
        let line =
            tasks.lines().find(|line| line.starts_with(&self.container)).context("no container runs")?;
        Ok(line.split_whitespace().nth(1).context("no process identifier")?.to_owned())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.removes_shims {
            // It is empty: what is mounted there is in the mount namespace of containerd.
            let _kept_if_in_use = fs::remove_dir(SHIMS);
        }
    }
}

/// Returns a configuration without the plugin of the kubelet.
fn configuration(directory: &Path, socket: &Path) -> String {
    let (directory, socket) = (directory.display(), socket.display());
    format!(
        "version = 2\nroot = \"{directory}/root\"\nstate = \"{directory}/state\"\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
         [grpc]\naddress = \"{socket}\"\n[ttrpc]\naddress = \"{socket}.ttrpc\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{directory}/opt\"\n"
    )
}
