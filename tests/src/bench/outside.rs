//! Measures ways of traffic from outside through the node, each against a clean connection of the
//! same length: routed through nodes that run no proxy and track no connections.
//!
//! The endpoint is a pod of the node ([`Length::ThisNode`]) or of another node
//! ([`Length::OtherNode`]). All ways are measured in one world, one after the other. A round of the
//! clean connection and one of the measured way follow each other.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    thread,
    time::Duration,
};

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Effort, cluster,
    floor::{Connection, Floor},
    paths::{self, NODE},
    protocol::{BenchResponse, Workload},
    ratio::Ratio,
    way::Way,
};
use crate::{
    runner::{Manifests, Proxy},
    world::{Host, World},
};

/// For three seconds after the start, no packet of the direct path goes to the peer of a link.
const SETTLING: Duration = Duration::from_secs(5);

/// The hosts of the world.
pub(super) const HOSTS: [Host; 7] =
    [Host::Node1, Host::A2, Host::Node2, Host::B1, Host::B2, Host::Client, Host::Router];

/// The hosts with servers.
const PODS: [Host; 3] = [Host::A2, Host::B1, Host::B2];

/// The endpoint on the node, a2, and the one on the other node, b1.
const ON_THIS_NODE: Ipv4Addr = cluster::SERVER;
const ON_OTHER_NODE: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 11);
/// Addresses of b2, which the client reaches through the router and node2, and through node1 and
/// node2.
const BEHIND_ROUTER: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 12);
const BEHIND_NODES: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 13);
/// The address from which the client connects to the node.
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 50);
/// The client's addresses for these: answers take the way of the questions.
const CLIENT_OF_ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 51);
const CLIENT_OF_NODES: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 52);
const NODE2: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 12);
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 13);

const FIRST_ENDPOINT_PORT: u16 = 9_000;
const FIRST_NODE_PORT: u16 = 30_000;
/// The distance between the node ports of two Services.
const NODE_PORTS: u16 = 10;

/// Where the endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Length {
    ThisNode,
    OtherNode,
}

/// The result for one way.
#[derive(Clone, Debug, Serialize)]
pub(super) struct OutsideResult {
    pub(super) way: Way,
    pub(super) length: Length,
    pub(super) workload: Workload,
    /// Operations a second, relative to the clean connection.
    pub(super) ratio: Option<Ratio>,
}

impl Length {
    pub(super) const ALL: [Self; 2] = [Self::ThisNode, Self::OtherNode];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::ThisNode => "endpoint on this node",
            Self::OtherNode => "endpoint on another node",
        }
    }

    const fn endpoint(self) -> Ipv4Addr {
        match self {
            Self::ThisNode => ON_THIS_NODE,
            Self::OtherNode => ON_OTHER_NODE,
        }
    }

    const fn node_port(self, workload: Workload) -> u16 {
        FIRST_NODE_PORT + self as u16 * NODE_PORTS + workload as u16
    }

    /// Returns the destination of the clean connection. One node is between the client and a pod of
    /// this node, two are before a pod of another node.
    fn clean(self, workload: Workload) -> SocketAddr {
        let pod = match self {
            Self::ThisNode => ON_OTHER_NODE,
            Self::OtherNode => BEHIND_ROUTER,
        };
        (pod, endpoint_port(workload)).into()
    }

    /// Returns where the client connects to.
    fn target(self, way: Way, workload: Workload) -> SocketAddr {
        match (way, self) {
            (way, Self::ThisNode) if way.is_foreign() => (ON_THIS_NODE, endpoint_port(workload)).into(),
            (way, Self::OtherNode) if way.is_foreign() => (BEHIND_NODES, endpoint_port(workload)).into(),
            _ => (NODE, self.node_port(workload)).into(),
        }
    }

    /// Returns the connection of the client, for programs without Services.
    const fn connection(self, workload: Workload) -> Connection {
        Connection {
            client: CLIENT,
            vip: SocketAddrV4::new(NODE, self.node_port(workload)),
            endpoint: SocketAddrV4::new(self.endpoint(), endpoint_port(workload)),
            next: match self {
                Self::ThisNode => Host::A2,
                Self::OtherNode => Host::Node2,
            },
            is_one_way: false,
        }
    }

    /// Returns a Service with one endpoint, and its EndpointSlice.
    fn objects(self) -> [Value; 2] {
        let (name, address, node) = match self {
            Self::ThisNode => ("this-node", "10.96.0.90", "node1"),
            Self::OtherNode => ("other-node", "10.96.0.91", "node2"),
        };
        let port_name = |workload| format!("p{}", workload as u16);
        let ports = Workload::ALL.map(|workload| {
            let (port, node_port) = (endpoint_port(workload), self.node_port(workload));
            json!({
                "name": port_name(workload), "protocol": workload.protocol(), "port": port, "nodePort": node_port
            })
        });
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            // Only for the way with direct server return.
            "metadata": {"name": name, "namespace": "default", "annotations": {"shunt.dev/forwarding": "dsr"}},
            "spec": {"type": "NodePort", "clusterIP": address, "clusterIPs": [address], "ports": ports},
        });
        let ports = Workload::ALL.map(|workload| {
            let port = endpoint_port(workload);
            json!({"name": port_name(workload), "protocol": workload.protocol(), "port": port})
        });
        let endpoints = json!([cluster::endpoint(self.endpoint(), node)]);
        let slice = cluster::endpoint_slice("default", name, name, &endpoints, &json!(ports));
        [service, slice]
    }
}

const fn endpoint_port(workload: Workload) -> u16 {
    FIRST_ENDPOINT_PORT + workload as u16
}

/// Writes the objects of the cluster.
pub(super) fn place(manifests: &Manifests) -> Result<()> {
    let objects: Vec<Value> = Length::ALL.into_iter().flat_map(Length::objects).chain(nodes()).collect();
    cluster::place(manifests, &objects)
}

/// Returns both nodes, which announce that they take packets for direct server return.
fn nodes() -> [Value; 2] {
    [("node1", NODE, "10.244.1.0/24"), ("node2", NODE2, "10.244.2.0/24")].map(|(name, address, pods)| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "annotations": {"shunt.dev/dsr": format!("{address}:4790")}},
            "spec": {"podCIDRs": [pods]},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]},
        })
    })
}

/// Measures these ways with these workloads. `other` is the proxy of node2.
pub(super) fn measure(
    world: &mut World,
    (proxy, other): (&mut Proxy, &mut Proxy),
    (ways, workloads): (&[Way], &[Workload]),
    effort: Effort,
) -> Result<Vec<OutsideResult>> {
    let effort = with_long_rounds(effort);
    PODS.into_iter().try_for_each(|pod| paths::keep_no_time_wait(world, pod))?;
    set_up(world)?;
    let mut results = Vec::new();
    for &way in ways.iter().filter(|way| !way.is_xdp() && way.is_possible()) {
        turn_on(world, way, proxy)?;
        let of_other = way.proxy()?.filter(|_| way.is_dsr());
        if let Some((mode, fields)) = &of_other {
            other.set_mode(mode, fields)?;
            other.start(world)?;
            thread::sleep(SETTLING);
        }
        let _programs = (way == Way::FloorForeign).then(|| Floor::letting_pass(world)).transpose()?;
        let lengths = Length::ALL.into_iter();
        for length in lengths.filter(|length| !way.is_dsr() || *length == Length::OtherNode) {
            for &workload in workloads {
                let floor =
                    way.floor().map(|kind| Floor::translating(world, kind, &length.connection(workload)));
                let _floor = floor.transpose()?;
                let ratio = compare(world, way, length, workload, effort)?;
                results.push(OutsideResult { way, length, workload, ratio });
            }
        }
        if of_other.is_some() {
            other.stop()?;
            other.clean_up(world)?;
        }
        turn_off(world, way, proxy)?;
        paths::wait_for_forgetting(world)?;
    }
    Ok(results)
}

/// Gives the node what the way has: the proxy, or rules of the kernel. Programs without a proxy
/// need the connection, so they are not attached.
pub(super) fn turn_on(world: &mut World, way: Way, proxy: &mut Proxy) -> Result<()> {
    if way == Way::KernelNat {
        world.run(Host::Node1, &format!("nft '{}'", kernel_nat()))?;
    }
    if let Some((mode, fields)) = way.proxy()? {
        proxy.set_mode(mode, &fields)?;
        proxy.start(world)?;
        thread::sleep(SETTLING);
    }
    Ok(())
}

/// Removes what [`turn_on`] made.
pub(super) fn turn_off(world: &World, way: Way, proxy: &mut Proxy) -> Result<()> {
    if way == Way::KernelNat {
        world.run(Host::Node1, "nft delete table ip bench")?;
    }
    if way.proxy()?.is_some() {
        proxy.stop()?;
        proxy.clean_up(world)?;
    }
    Ok(())
}

/// Returns fewer rounds, of three times the length: a connection that lives longer begins with each
/// round, and its first milliseconds are not what is measured.
fn with_long_rounds(effort: Effort) -> Effort {
    Effort { pairs: effort.pairs.div_ceil(2), round_ms: 3 * effort.round_ms, ..effort }
}

/// Starts the servers, and adds the routes. Clean connections do not pass node1.
pub(super) fn set_up(world: &mut World) -> Result<()> {
    world.add_addresses(Host::Client, &[CLIENT_OF_ROUTER.into(), CLIENT_OF_NODES.into()])?;
    world.add_addresses(Host::B2, &[BEHIND_NODES.into()])?;
    world.run(Host::Node2, &format!("ip route add {BEHIND_NODES} dev {}", Host::B2.node_link()))?;
    for (to, via, from) in [
        (ON_THIS_NODE, NODE, None),
        (ON_OTHER_NODE, NODE2, None),
        (BEHIND_ROUTER, ROUTER, Some(CLIENT_OF_ROUTER)),
        (BEHIND_NODES, NODE, Some(CLIENT_OF_NODES)),
    ] {
        let source = from.map_or_else(String::new, |from| format!("src {from}"));
        world.run(Host::Client, &format!("ip route add {to} via {via} {source}"))?;
        if let Some(from) = from {
            world.route(Host::Node2, IpAddr::from(from).into(), via.into())?;
        }
    }
    // b2 answers from the address that was asked.
    let gateway = "$(ip -4 route show default | cut -d ' ' -f 3)";
    world.run(Host::B2, &format!("ip route add {CLIENT_OF_NODES} via {gateway} src {BEHIND_NODES}"))?;
    paths::forget_closed_connections(world)?;
    let ports: Vec<_> =
        Workload::ALL.into_iter().map(|workload| (workload, endpoint_port(workload))).collect();
    PODS.into_iter().try_for_each(|pod| paths::serve_ports(world, pod, ports.clone()))
}

/// Returns nftables rules for both endpoints, as few as possible.
fn kernel_nat() -> String {
    let ports = |length: Length| Workload::ALL.map(|workload| (length, workload));
    let rules = Length::ALL
        .into_iter()
        .flat_map(ports)
        .map(|(length, workload)| {
            let (from, to) = (length.node_port(workload), length.endpoint());
            let (protocol, port) = (workload.protocol().to_lowercase(), endpoint_port(workload));
            format!("ip daddr {NODE} {protocol} dport {from} dnat to {to}:{port}; ")
        })
        .collect::<Vec<_>>()
        .concat();
    let all = Length::ALL.map(|length| length.endpoint().to_string()).join(", ");
    paths::nat_table(&rules, &format!("ip daddr {{ {all} }}"))
}

/// Compares the way with the clean connection, in turns.
pub(super) fn compare(
    world: &mut World,
    way: Way,
    length: Length,
    workload: Workload,
    effort: Effort,
) -> Result<Option<Ratio>> {
    let targets = vec![vec![length.clean(workload)], vec![length.target(way, workload)]];
    match paths::load(world, Host::Client, workload, targets, effort, effort.pairs)? {
        BenchResponse::Rates(rates) => Ok(Ratio::of(paths::pairs(&rates, 1))),
        other => bail!("{}, {}, {}: {other:?}", way.name(), length.name(), workload.name()),
    }
}
