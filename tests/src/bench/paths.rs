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
    order::{Compare, Order, Outcome, Workload},
    ratio::Ratio,
};
use crate::world::{Host, World};

const NODE: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 11);
/// What the tries before the first round may take, and what surrounds a round.
const BESIDE_ROUNDS: Duration = Duration::from_secs(30);

/// A way to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Path {
    /// From a pod of the node, against that pod to the other pod.
    PodToClusterIp,
    /// From the node itself, against the node to the pod.
    NodeToClusterIp,
    /// From outside to a port of the node, against the pod reached by a route through the node.
    ClientToNodePort,
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
    pub(super) const ALL: [Self; 3] = [Self::PodToClusterIp, Self::NodeToClusterIp, Self::ClientToNodePort];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::PodToClusterIp => "pod to ClusterIP",
            Self::NodeToClusterIp => "node to ClusterIP",
            Self::ClientToNodePort => "client to NodePort",
        }
    }

    const fn from(self) -> Host {
        match self {
            Self::PodToClusterIp => Host::A1,
            Self::NodeToClusterIp => Host::Node1,
            Self::ClientToNodePort => Host::Client,
        }
    }

    fn measured(self, workload: Workload) -> MeasuredPort {
        MeasuredPort::new(self as u16, workload)
    }

    fn service(self, port: MeasuredPort) -> SocketAddr {
        match self {
            Self::PodToClusterIp | Self::NodeToClusterIp => (CLUSTER_IP, port.port()).into(),
            Self::ClientToNodePort => (NODE, port.node_port()).into(),
        }
    }
}

/// Starts the servers, and gives the client a route to the pods behind the node.
pub(super) fn serve(world: &mut World) -> Result<()> {
    world.route(Host::Client, IpAddr::from(SERVER).into(), NODE.into())?;
    match world.agent(Host::A2)?.bench(Order::Serve(cluster::server_ports()), BESIDE_ROUNDS)? {
        Outcome::Done => Ok(()),
        other => bail!("expected the servers to be up, the agent says {other:?}"),
    }
}

/// Where a direct connection goes: the endpoints of the Service, each as often.
pub(super) fn direct(path: Path, workload: Workload) -> Vec<SocketAddr> {
    path.measured(workload).endpoint_ports().map(|port| (SERVER, port).into()).collect()
}

/// Measures every way with every workload.
pub(super) fn measure(world: &mut World, services: usize, effort: Effort) -> Result<Vec<PathResult>> {
    let mut results = Vec::new();
    for path in Path::ALL {
        for workload in Workload::ALL {
            let service = path.service(path.measured(workload));
            let targets = vec![direct(path, workload), vec![service], direct(path, workload)];
            let outcome = load(world, path.from(), workload, targets, effort, effort.pairs)?;
            let (ratio, control, not_served) = match outcome {
                Outcome::Rates(rates) => (Ratio::of(pairs(&rates, 1)), Ratio::of(pairs(&rates, 2)), None),
                Outcome::NotServed { target: 1, why } => (None, None, Some(why)),
                Outcome::NotServed { why, .. } => bail!("{}: no direct connection: {why}", path.name()),
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
) -> Result<Outcome> {
    let turn = Duration::from_millis(effort.round_ms);
    let turns = u32::try_from(rounds * targets.len())?;
    let within = turn * turns * 2 + BESIDE_ROUNDS;
    world.agent(from)?.bench(Order::Compare(Compare { workload, targets, rounds, turn }), within)
}

/// Of each round a target and the direct connection.
fn pairs(rates: &[Vec<f64>], target: usize) -> impl Iterator<Item = (f64, f64)> {
    rates.iter().filter_map(move |round| Some((*round.get(target)?, *round.first()?)))
}
