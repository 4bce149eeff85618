//! Measures the data path: each path to a Service, compared with the direct connection to the same
//! pod.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::{Result, bail};
use serde::Serialize;

use super::{
    Effort,
    cluster::{self, CLUSTER_IP, MeasuredPort, SERVER},
    protocol::{BenchRequest, BenchResponse, Comparison, Workload},
    ratio::Ratio,
};
use crate::world::{Host, World};

pub(super) const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 11);
/// The time for the attempts before the first round, and for everything outside of rounds.
const OVERHEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// A path to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// From a pod of the node, compared with a connection from that pod to the other pod.
    PodToClusterIp,
    /// From the node itself, compared with a connection from the node to the pod.
    NodeToClusterIp,
    /// From outside to a node port, compared with a connection that is routed through the node to
    /// the pod.
    ClientToNodePort,
    /// No Service: from outside to the pod, masqueraded by a single rule of the kernel. This part
    /// of the node port path is done by the kernel in every mode.
    ClientMasqueraded,
    /// No Service: from outside to a port of the node. Two rules of the kernel translate and
    /// masquerade.
    ClientToKernelNat,
}

/// The result for one path.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PathResult {
    pub(super) path: Path,
    pub(super) workload: Workload,
    pub(super) services: usize,
    /// Operations a second, relative to the direct connection. None if the Service does not answer.
    pub(super) ratio: Option<Ratio>,
    /// The direct connection compared with itself in the same rounds: the noise of the other
    /// ratios.
    pub(super) control: Option<Ratio>,
    /// Why there is no ratio.
    pub(super) not_served: Option<String>,
}

impl Path {
    /// All paths.
    pub const ALL: [Self; 5] = [
        Self::PodToClusterIp,
        Self::NodeToClusterIp,
        Self::ClientToNodePort,
        Self::ClientMasqueraded,
        Self::ClientToKernelNat,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::PodToClusterIp => "pod to ClusterIP",
            Self::NodeToClusterIp => "node to ClusterIP",
            Self::ClientToNodePort => "client to NodePort",
            Self::ClientMasqueraded => "kernel: masqueraded",
            Self::ClientToKernelNat => "kernel: two NAT rules",
        }
    }

    const fn from(self) -> Host {
        match self {
            Self::PodToClusterIp => Host::A1,
            Self::NodeToClusterIp => Host::Node1,
            Self::ClientToNodePort | Self::ClientMasqueraded | Self::ClientToKernelNat => Host::Client,
        }
    }

    fn measured_port(self, workload: Workload) -> MeasuredPort {
        MeasuredPort::new(self as u16, workload)
    }

    /// Returns true for a path that rules of the kernel translate, without a Service.
    pub(super) const fn is_of_kernel(self) -> bool {
        matches!(self, Self::ClientMasqueraded | Self::ClientToKernelNat)
    }

    /// Returns the destinations of the translated path.
    fn translated(self, port: MeasuredPort) -> Vec<SocketAddr> {
        match self {
            Self::PodToClusterIp | Self::NodeToClusterIp => vec![(CLUSTER_IP, port.port()).into()],
            Self::ClientToNodePort => vec![(NODE, port.node_port()).into()],
            Self::ClientMasqueraded => endpoints(port),
            Self::ClientToKernelNat => vec![(NODE, kernel_nat_port(port)).into()],
        }
    }

    /// Returns the port whose endpoints the direct connection uses. The endpoints of the kernel's
    /// own paths are translated, so these paths use spare ports.
    fn direct_port(self, workload: Workload) -> MeasuredPort {
        if self.is_of_kernel() { MeasuredPort::spare(workload) } else { self.measured_port(workload) }
    }
}

pub(super) fn endpoints(port: MeasuredPort) -> Vec<SocketAddr> {
    port.endpoint_ports().map(|port| (SERVER, port).into()).collect()
}

/// Returns a port of the node that belongs to no Service.
fn kernel_nat_port(port: MeasuredPort) -> u16 {
    port.node_port() + 1_000
}

/// Returns the nftables rules for the kernel's own paths, as few as possible.
fn kernel_nat() -> String {
    let ports = |path: Path| Workload::ALL.map(|workload| path.measured_port(workload));
    let joined = |list: &mut dyn Iterator<Item = String>| list.collect::<Vec<_>>().join(", ");
    let masqueraded = [Path::ClientMasqueraded, Path::ClientToKernelNat].into_iter().flat_map(ports);
    let masqueraded =
        joined(&mut masqueraded.flat_map(endpoints).map(|endpoint| endpoint.port().to_string()));
    let dnat_rule = |port: MeasuredPort| {
        let chosen = joined(
            &mut endpoints(port).iter().enumerate().map(|(slot, to)| format!("{slot} : {}", to.port())),
        );
        let count = endpoints(port).len();
        let protocol = port.workload.protocol().to_lowercase();
        let from = kernel_nat_port(port);
        format!(
            "ip daddr {NODE} {protocol} dport {from} dnat to {SERVER} : numgen random mod {count} map {{ {chosen} }}; "
        )
    };
    let dnat_rules: String = ports(Path::ClientToKernelNat).into_iter().map(dnat_rule).collect();
    nat_table(&dnat_rules, &format!("ip daddr {SERVER} th dport {{ {masqueraded} }}"))
}

/// Returns the table `bench` with DNAT rules, and a rule that masquerades the packets of an
/// expression.
pub(super) fn nat_table(dnat_rules: &str, masqueraded: &str) -> String {
    format!(
        "table ip bench {{ \
         chain prerouting {{ type nat hook prerouting priority dstnat; {dnat_rules}}}; \
         chain postrouting {{ type nat hook postrouting priority srcnat; \
         {masqueraded} masquerade fully-random; }}; }}"
    )
}

/// Starts the servers, and adds a route to the pods behind the node to the client.
pub(super) fn serve(world: &mut World) -> Result<()> {
    world.route(Host::Client, IpAddr::from(SERVER).into(), NODE.into())?;
    keep_no_time_wait(world, Host::A2)?;
    serve_ports(world, Host::A2, cluster::server_ports())
}

/// Adds the rules for the kernel's own paths. The proxy must not see them: where other programs
/// translate packets, netfilter serves the Services too.
pub(super) fn add_kernel_nat(world: &World) -> Result<()> {
    world.run(Host::Node1, &format!("nft '{}'", kernel_nat())).map(drop)
}

/// Lets the servers of a pod forget closed connections at once. netfilter masquerades with random
/// ports. Of thousands a second, some collide with a connection in the server's `TIME_WAIT`, and
/// the client retries after a second. That cost has nothing to do with CPU.
pub(super) fn keep_no_time_wait(world: &World, pod: Host) -> Result<()> {
    world.run(pod, "sysctl -qw net.ipv4.tcp_max_tw_buckets=0").map(drop)
}

/// Starts the servers of a pod.
pub(super) fn serve_ports(world: &mut World, pod: Host, ports: Vec<(Workload, u16)>) -> Result<()> {
    match world.agent(pod)?.bench(BenchRequest::Serve(ports), OVERHEAD_TIMEOUT)? {
        BenchResponse::Done => Ok(()),
        other => bail!("expected the servers of {pod} to run, but the agent answered {other:?}"),
    }
}

/// How long the node's conntrack remembers a connection that is closed or silent.
const REMEMBERED: Duration = Duration::from_secs(5);

/// Lets the node's conntrack forget closed and silent connections soon. Otherwise the connections
/// of a minute would fill the kernel's table, and the other figures would be of a full table.
pub(super) fn forget_closed_connections(world: &World) -> Result<()> {
    let seconds = REMEMBERED.as_secs();
    let timeouts = ["tcp_timeout_time_wait", "tcp_timeout_close", "udp_timeout", "udp_timeout_stream"];
    let sysctls = timeouts.map(|timeout| format!("net.netfilter.nf_conntrack_{timeout}={seconds}"));
    let command = format!("modprobe -q nf_conntrack || true; sysctl -qw {}", sysctls.join(" "));
    world.run(Host::Node1, &command).map(drop)
}

/// Waits until the node's conntrack has forgotten the connections of before, if it has any. While
/// it translates one, the next proxy would let it track all.
pub(super) fn wait_for_forgetting(world: &World) -> Result<()> {
    let count = world.run(Host::Node1, "cat /proc/sys/net/netfilter/nf_conntrack_count")?;
    if count.trim() != "0" {
        thread::sleep(REMEMBERED + Duration::from_secs(1));
    }
    Ok(())
}

/// Returns the destinations of direct connections: the endpoints of the Service, each equally
/// often.
pub(super) fn direct(path: Path, workload: Workload) -> Vec<SocketAddr> {
    endpoints(path.direct_port(workload))
}

/// Measures paths with workloads.
pub(super) fn measure(
    world: &mut World,
    services: usize,
    (paths, workloads): (&[Path], &[Workload]),
    effort: Effort,
) -> Result<Vec<PathResult>> {
    let mut results = Vec::new();
    for &path in paths {
        for &workload in workloads {
            let translated = path.translated(path.measured_port(workload));
            let targets = vec![direct(path, workload), translated, direct(path, workload)];
            let outcome = load(world, path.from(), workload, targets, effort, effort.pairs)?;
            let (ratio, control, not_served) = match outcome {
                BenchResponse::Rates(rates) => {
                    (Ratio::of(pairs(&rates, 1)), Ratio::of(pairs(&rates, 2)), None)
                }
                BenchResponse::NotServed { target: 1, why } => (None, None, Some(why)),
                BenchResponse::NotServed { why, .. } => bail!("{}: no direct connection: {why}", path.name()),
                other => bail!("{}: {other:?}", path.name()),
            };
            results.push(PathResult { path, workload, services, ratio, control, not_served });
        }
    }
    Ok(results)
}

/// Puts load on targets from a host.
pub(super) fn load(
    world: &mut World,
    from: Host,
    workload: Workload,
    targets: Vec<Vec<SocketAddr>>,
    effort: Effort,
    rounds: usize,
) -> Result<BenchResponse> {
    let turn = Duration::from_millis(effort.round_ms);
    let turns = u32::try_from(rounds * targets.len())?;
    let timeout = turn * turns * 2 + OVERHEAD_TIMEOUT;
    world.agent(from)?.bench(BenchRequest::Compare(Comparison { workload, targets, rounds, turn }), timeout)
}

/// Pairs the rates of a target and of the direct connection in each round.
pub(super) fn pairs(rates: &[Vec<f64>], target: usize) -> impl Iterator<Item = (f64, f64)> {
    rates.iter().filter_map(move |round| Some((*round.get(target)?, *round.first()?)))
}
