//! The data path: each way to a Service against the direct connection to the same pod.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
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

const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 11);
/// What the tries before the first round may take, and what surrounds a round.
const BESIDE_ROUNDS: Duration = Duration::from_secs(30);

/// A way to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// From a pod of the node, against that pod to the other pod.
    PodToClusterIp,
    /// From the node itself, against the node to the pod.
    NodeToClusterIp,
    /// From outside to a port of the node, against the pod reached by a route through the node.
    ClientToNodePort,
    /// No Service: from outside to the pod, which a single rule of the kernel's masquerades. That much of the way to a node port
    /// is the kernel's in every mode.
    ClientMasqueraded,
    /// No Service: from outside to a port of the node, which two rules of the kernel's lead to the pod and masquerade.
    ClientToKernelNat,
}

/// How one way compares.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PathResult {
    pub(super) path: Path,
    pub(super) workload: Workload,
    pub(super) services: usize,
    /// Operations a second against those of the direct connection; none where the Service does not answer.
    pub(super) ratio: Option<Ratio>,
    /// The direct connection against itself, measured in the same rounds: how far off 1 the rest may be by chance.
    pub(super) control: Option<Ratio>,
    /// Why there is no ratio.
    pub(super) not_served: Option<String>,
}

impl Path {
    /// All of them.
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

    fn measured(self, workload: Workload) -> MeasuredPort {
        MeasuredPort::new(self as u16, workload)
    }

    /// The destination for the translated way.
    fn translated(self, port: MeasuredPort) -> Vec<SocketAddr> {
        match self {
            Self::PodToClusterIp | Self::NodeToClusterIp => vec![(CLUSTER_IP, port.port()).into()],
            Self::ClientToNodePort => vec![(NODE, port.node_port()).into()],
            Self::ClientMasqueraded => endpoints(port),
            Self::ClientToKernelNat => vec![(NODE, kernel_nat_port(port)).into()],
        }
    }

    /// The port whose endpoints the direct connection goes to. Those of the kernel's own ways are translated.
    fn untranslated(self, workload: Workload) -> MeasuredPort {
        match self {
            Self::ClientMasqueraded | Self::ClientToKernelNat => MeasuredPort::spare(workload),
            served => served.measured(workload),
        }
    }
}

fn endpoints(port: MeasuredPort) -> Vec<SocketAddr> {
    port.endpoint_ports().map(|port| (SERVER, port).into()).collect()
}

/// A port of the node that is no Service's.
fn kernel_nat_port(port: MeasuredPort) -> u16 {
    port.node_port() + 1_000
}

/// Rules of the kernel's own, as few as can do it.
fn kernel_nat() -> String {
    let ports = |path: Path| Workload::ALL.map(|workload| path.measured(workload));
    let joined = |list: &mut dyn Iterator<Item = String>| list.collect::<Vec<_>>().join(", ");
    let masqueraded = [Path::ClientMasqueraded, Path::ClientToKernelNat].into_iter().flat_map(ports);
    let masqueraded =
        joined(&mut masqueraded.flat_map(endpoints).map(|endpoint| endpoint.port().to_string()));
    let lead = |port: MeasuredPort| {
        let chosen = joined(
            &mut endpoints(port).iter().enumerate().map(|(slot, to)| format!("{slot} : {}", to.port())),
        );
        let count = endpoints(port).len();
        let protocol = port.protocol().to_lowercase();
        let from = kernel_nat_port(port);
        format!(
            "ip daddr {NODE} {protocol} dport {from} dnat to {SERVER} : numgen random mod {count} map {{ {chosen} }}; "
        )
    };
    let leading: String = ports(Path::ClientToKernelNat).into_iter().map(lead).collect();
    format!(
        "table ip bench {{ \
         chain prerouting {{ type nat hook prerouting priority dstnat; {leading}}}; \
         chain postrouting {{ type nat hook postrouting priority srcnat; \
         ip daddr {SERVER} th dport {{ {masqueraded} }} masquerade fully-random; }}; }}"
    )
}

/// Starts the servers, and gives the client a route to the pods behind the node.
pub(super) fn serve(world: &mut World) -> Result<()> {
    world.route(Host::Client, IpAddr::from(SERVER).into(), NODE.into())?;
    world.run(Host::Node1, &format!("nft '{}'", kernel_nat()))?;
    // The node masquerades with ports that it chooses by chance. Of thousands a second some meet a connection that waits in the
    // server's `TIME_WAIT`, and the client then tries again after a second: what that costs has nothing to do with CPU.
    world.run(Host::A2, "sysctl -qw net.ipv4.tcp_max_tw_buckets=0")?;
    match world.agent(Host::A2)?.bench(BenchRequest::Serve(cluster::server_ports()), BESIDE_ROUNDS)? {
        BenchResponse::Done => Ok(()),
        other => bail!("expected the servers to be up, the agent says {other:?}"),
    }
}

/// Where a direct connection goes: the endpoints of the Service, each as often.
pub(super) fn direct(path: Path, workload: Workload) -> Vec<SocketAddr> {
    endpoints(path.untranslated(workload))
}

/// Measures ways with workloads.
pub(super) fn measure(
    world: &mut World,
    services: usize,
    (paths, workloads): (&[Path], &[Workload]),
    effort: Effort,
) -> Result<Vec<PathResult>> {
    let mut results = Vec::new();
    for &path in paths {
        for &workload in workloads {
            let translated = path.translated(path.measured(workload));
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
    let timeout = turn * turns * 2 + BESIDE_ROUNDS;
    world.agent(from)?.bench(BenchRequest::Compare(Comparison { workload, targets, rounds, turn }), timeout)
}

/// Of each round a target and the direct connection.
fn pairs(rates: &[Vec<f64>], target: usize) -> impl Iterator<Item = (f64, f64)> {
    rates.iter().filter_map(move |round| Some((*round.get(target)?, *round.first()?)))
}
