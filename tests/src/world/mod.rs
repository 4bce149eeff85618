//! The world in which cases run: hosts as network namespaces on one machine, joined by veth pairs,
//! each with an agent process that answers and opens connections. No packet leaves the world, and
//! nothing of it remains.

mod bpffs;
mod cgroup;
mod counters;
mod links;
mod netlink;
mod netns;
mod network;
mod run;
mod sysctl;
mod topology;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::{IpAddr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use proxy_userspace::{
    explain::{Explanation, NamedQuestion},
    inspect::Client,
    kernel::bpf::live_frames::SameForAll,
};
use tokio::runtime;

use self::{netlink::Netlink, netns::Netns, run::Run};
pub use self::{
    run::{leftover_paths, remove_leftovers, remove_live_runs},
    sysctl::{RESERVED_PORTS, is_valid_source_port},
    topology::{CgroupSubtree, Host, Route},
};
use crate::{
    agent::Agent,
    deadline::scaled,
    flood::{self, Sender},
    process::{ChildProcess, CommandOutput, HostContext, describe_status, run_with_timeout},
};

/// The link of every host, to the bridge or to its node.
const LINK: &str = "eth0";
/// Makes iptables wait for its lock, which all network namespaces and so all worlds share.
const WAIT_FOR_XTABLES: &str = "for command in ip{,6}tables{,-nft,-legacy}{,-restore}; do \
    eval \"$command() { command $command \\\"\\$@\\\" -w; }\"; done";
/// The time limit of a command of [`World::run`].
const COMMAND_TIMEOUT: Duration = Duration::from_mins(1);

/// Held for reading while namespaces or processes are created, and for writing by the thread that
/// removes everything on a signal.
pub(crate) static BUILD_LOCK: RwLock<()> = RwLock::new(());

/// The world. When it is dropped, its processes end and everything it made is removed.
pub struct World {
    // In the order of removal: the agents first, then everything with the run's name.
    agents: BTreeMap<Host, Agent>,
    namespaces: BTreeMap<Host, Netns>,
    ports: BTreeMap<Host, SameForAll>,
    links_segment: bool,
    cgroup: PathBuf,
    program: PathBuf,
    run: Run,
}

impl World {
    /// Builds a world with these hosts. Pods need their node. `program` is the executable of the
    /// agents; its `main` must call [`crate::process::run_as_host_process`].
    pub fn build(hosts: &[Host], program: &Path) -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "the test world needs root, for network namespaces, cgroups and BPF: run this as root (for instance with sudo)"
        );
        let _build_lock = BUILD_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        let run = Run::create()?;
        let cgroup = cgroup::create(run.name(), &run.private_cgroup2())?;
        let namespaces = network::build(run.name(), hosts).context("build the test world's network")?;
        let (agents, ports, program) = (BTreeMap::new(), BTreeMap::new(), program.to_owned());
        let mut world = Self { agents, namespaces, ports, links_segment: true, cgroup, program, run };
        for host in hosts {
            let agent =
                Agent::start(*host, &world.inside(*host)?).with_context(|| format!("agent of {host}"))?;
            world.agents.insert(*host, agent);
        }
        for (host, agent) in &mut world.agents {
            agent.wait_until_ready().with_context(|| format!("agent of {host}"))?;
        }
        Ok(world)
    }

    /// Returns the executable of the agents.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the name of the run, which is part of the name of everything in this world.
    pub fn name(&self) -> &str {
        self.run.name()
    }

    /// Returns the directory for the run's files. It is removed with the world.
    pub fn directory(&self) -> &Path {
        self.run.directory()
    }

    /// Returns the cgroup of the processes of node1 and its pods.
    pub fn cgroup_root(&self) -> PathBuf {
        self.cgroup_of(Host::Node1)
    }

    /// Returns the cgroup of the processes of a host.
    pub fn cgroup_of(&self, host: Host) -> PathBuf {
        self.cgroup.join(host.cgroup().name())
    }

    /// Returns the directory in which the proxy on node1 pins its maps and links. The proxy creates
    /// it.
    pub fn pin_directory(&self) -> PathBuf {
        self.pins_of(Host::Node1)
    }

    /// Returns the directory of pins for the proxy of a host. This is the proxy of the pod's node,
    /// and that of node1 for hosts without one.
    pub fn pins_of(&self, host: Host) -> PathBuf {
        let name = if host.cgroup() == CgroupSubtree::Node2 { "shunt-node2" } else { "shunt" };
        bpffs::directory(self.run.name()).join(name)
    }

    /// Returns the hosts of this world.
    pub fn hosts(&self) -> Vec<Host> {
        self.agents.keys().copied().collect()
    }

    /// Returns the agent of a host.
    pub fn agent(&mut self, host: Host) -> Result<&mut Agent> {
        self.agents.get_mut(&host).with_context(|| format!("{host} is not in this world"))
    }

    /// Takes the agent of a host out of the world. It must not outlive the world.
    pub fn take_agent(&mut self, host: Host) -> Result<Agent> {
        self.agents.remove(&host).with_context(|| format!("{host} is not in this world"))
    }

    /// Starts a program on a host, in its namespace and cgroup. Appends its output to `log`.
    pub fn spawn(
        &self,
        host: Host,
        program: &Path,
        arguments: &[String],
        log: &File,
    ) -> Result<ChildProcess> {
        let _build_lock = BUILD_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        self.inside(host)?.spawn(program, arguments, log)
    }

    /// Runs a shell command line on a host, in its namespace and cgroup. It must succeed.
    pub fn run(&self, host: Host, line: &str) -> Result<String> {
        let _build_lock = BUILD_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        let command = format!("{WAIT_FOR_XTABLES}\nPINS={}\n{line}", self.pins_of(host).display());
        let finished = self.inside(host)?.run_with_timeout(
            Path::new("/bin/bash"),
            &["-ec", &command],
            scaled(COMMAND_TIMEOUT),
        )?;
        output_of(finished, host.name(), line)
    }

    /// Runs a shell command line in the namespace of the bridge. Its ports have the names of the
    /// hosts.
    pub fn run_on_bridge(&self, line: &str) -> Result<String> {
        let namespace = format!("--net=/run/netns/{}-bridge", self.name());
        let finished = run_with_timeout(
            Path::new("nsenter"),
            &[&namespace, "/bin/bash", "-ec", line],
            scaled(COMMAND_TIMEOUT),
        )?;
        output_of(finished, "bridge", line)
    }

    /// Moves the agent of a host of node1 out of the proxy's cgroup. Sockets that it opens later do
    /// not belong to the cgroup.
    pub fn move_out_of_cgroup(&mut self, host: Host) -> Result<()> {
        let procs = self.cgroup.join(CgroupSubtree::Others.name()).join("cgroup.procs");
        let agent = self.agent(host)?.process_id();
        fs::write(&procs, agent.to_string()).with_context(|| format!("move {host} to {}", procs.display()))
    }

    /// Adds addresses to a host's link, unless the host has them already.
    pub fn add_addresses(&self, host: Host, addresses: &[IpAddr]) -> Result<()> {
        let namespace = self.namespace(host)?;
        namespace.run(|| {
            let netlink = Netlink::open()?;
            let absent = addresses.iter().filter(|address| !is_local(**address));
            absent.copied().try_for_each(|address| netlink.add_address(LINK, IpNet::from(address)))
        })
    }

    /// Returns a non-blocking socket that listens on a host, for a server in this process.
    pub fn listen(&self, host: Host, address: SocketAddr) -> Result<TcpListener> {
        self.namespace(host)?.run(|| {
            let listener = TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        })
    }

    /// Adds a route through a gateway to a host.
    pub fn route(&self, host: Host, to: IpNet, via: IpAddr) -> Result<()> {
        self.namespace(host)?.run(|| Netlink::open()?.add_route(Route { to, via }))
    }

    /// Returns the hardware address of a host's link.
    pub fn hardware_address(&self, host: Host) -> Result<[u8; 6]> {
        self.namespace(host)?.run(|| flood::hardware_address(LINK))
    }

    /// Returns a sender of packets from a host to node1.
    pub fn sender(&self, host: Host) -> Result<Sender> {
        let link = if host == Host::Client { LINK.to_owned() } else { host.node_link() };
        let gateway = self.namespace(Host::Node1)?.run(|| flood::hardware_address(&link))?;
        self.namespace(host)?.run(|| Sender::open(LINK, gateway)).with_context(|| host.name())
    }

    /// Asks the proxy on node1 what it does with a connection.
    pub fn explain(&self, request: &NamedQuestion) -> Result<Explanation> {
        self.namespace(Host::Node1)?.run(|| {
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async { Ok(Client::connect().await?.explain(request, false).await?) })
        })
    }

    /// Returns the path of a host's network namespace.
    pub fn namespace_path(&self, host: Host) -> Result<PathBuf> {
        Ok(self.namespace(host)?.path().to_owned())
    }

    /// Runs work in the network namespace of a host.
    pub fn in_namespace<T: Send>(&self, host: Host, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.namespace(host)?.run(work)
    }

    fn namespace(&self, host: Host) -> Result<&Netns> {
        self.namespaces.get(&host).with_context(|| format!("{host} is not in this world"))
    }

    fn inside(&self, host: Host) -> Result<HostContext> {
        Ok(HostContext {
            program: self.program.clone(),
            namespace: self.namespace(host)?.path().to_owned(),
            cgroup: self.cgroup_of(host),
        })
    }
}

/// Returns the text of `/proc/self/mounts`.
fn mounts() -> Result<String> {
    fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts")
}

/// Returns the mount points of file systems of this type in the text of `/proc/self/mounts`.
fn mounts_of_type<'a>(mounts: &'a str, kind: &'a str) -> impl Iterator<Item = &'a Path> {
    mounts.lines().filter_map(move |line| {
        let mut fields = line.split_whitespace().skip(1);
        let at = fields.next()?;
        (fields.next()? == kind).then(|| Path::new(at))
    })
}

fn is_local(address: IpAddr) -> bool {
    std::net::UdpSocket::bind((address, 0)).is_ok()
}

/// Returns the output of a shell command line, which must have succeeded.
fn output_of(finished: CommandOutput, place: &str, line: &str) -> Result<String> {
    ensure!(
        finished.status.success(),
        "{place}: {line}: {}: {}",
        describe_status(finished.status),
        finished.stderr.trim()
    );
    Ok(finished.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_their_type() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let of_type = |kind| mounts_of_type(mounts, kind).collect::<Vec<_>>();
        assert_eq!(of_type("cgroup2"), [Path::new("/sys/fs/cgroup/unified")]);
        assert!(of_type("bpf").is_empty());
    }
}
