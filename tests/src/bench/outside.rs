//! Measures ways of traffic from outside through the node, each against a clean connection of the
//! same length: routed through nodes that run no proxy and track no connections.
//!
//! The endpoint is a pod of the node ([`Length::ThisNode`]) or of another node
//! ([`Length::OtherNode`]). All ways are measured in one world, one after the other. A round of the
//! clean connection and one of the measured way follow each other.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use serde_yaml_ng::Mapping;

use super::{
    Effort, cluster,
    paths::{self, NODE},
    protocol::{BenchResponse, Workload},
    ratio::Ratio,
};
use crate::{
    runner::{Manifests, Proxy},
    world::{Host, World},
};

/// The hosts of the world.
pub(super) const HOSTS: [Host; 7] =
    [Host::Node1, Host::A2, Host::Node2, Host::B1, Host::B2, Host::Client, Host::Router];

/// The endpoint on the node, a2, and the one on the other node, b1.
const ON_THIS_NODE: Ipv4Addr = cluster::SERVER;
const ON_OTHER_NODE: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 11);
/// Addresses of b2, which the client reaches through the router and node2, and through node1 and
/// node2.
const BEHIND_ROUTER: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 12);
const BEHIND_NODES: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 13);
/// The client's addresses for these: answers take the way of the questions.
const CLIENT_OF_ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 51);
const CLIENT_OF_NODES: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 52);
const NODE2: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 12);
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 13);

const FIRST_ENDPOINT_PORT: u16 = 9_000;
const FIRST_NODE_PORT: u16 = 30_000;
/// The distance between the node ports of two Services.
const NODE_PORTS: u16 = 10;

/// A way from the client through the node to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// No Service, no proxy, no rules: what the ratios of the other ways would be if they cost
    /// nothing.
    Routed,
    /// Two rules of the kernel translate and masquerade.
    KernelNat,
    /// The proxy in mode nftables.
    Nftables,
    /// The proxy in mode ebpf with its default settings. On this node, packets of learned flows
    /// take the direct path.
    Default,
    /// The proxy in mode ebpf, with programs on links, and netfilter masquerades.
    Programs,
    /// The same, but the programs masquerade.
    Masquerading,
    /// The same, and packets of learned flows take the direct path.
    Direct,
    /// The same, and whole flows take the direct path.
    Whole,
    /// As [`Way::Direct`], with XDP in the kernel. Only for packets of the kernel: those of
    /// processes have no complete checksums here.
    XdpGeneric,
    /// The same, in the driver.
    XdpNative,
    /// No proxy: XDP sends frames back as they are. No XDP program can be faster here. Only for
    /// packets of the kernel.
    XdpBare,
    /// The proxy in mode ebpf on both nodes, with direct server return. Only for an endpoint on
    /// another node.
    Dsr,
    /// The same, and whole flows take the direct path.
    DsrWhole,
    /// As [`Way::Dsr`], and answers go back through the tunnel.
    DsrReturn,
}

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

impl Way {
    /// All ways. Conntrack translates connections in the last three. Afterwards the kernel tracks
    /// connections for a while.
    pub const ALL: [Self; 14] = [
        Self::Routed,
        Self::Default,
        Self::Masquerading,
        Self::Direct,
        Self::Whole,
        Self::XdpGeneric,
        Self::XdpNative,
        Self::XdpBare,
        Self::Dsr,
        Self::DsrWhole,
        Self::DsrReturn,
        Self::KernelNat,
        Self::Nftables,
        Self::Programs,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed by the node",
            Self::KernelNat => "two NAT rules",
            Self::Nftables => "mode nftables",
            Self::Default => "mode ebpf, default",
            Self::Programs => "mode ebpf, programs",
            Self::Masquerading => "ebpf, masquerading",
            Self::Direct => "ebpf, direct",
            Self::Whole => "ebpf, direct, whole",
            Self::XdpGeneric => "ebpf, generic XDP",
            Self::XdpNative => "ebpf, native XDP",
            Self::XdpBare => "XDP, frames sent back",
            Self::Dsr => "ebpf, DSR",
            Self::DsrWhole => "ebpf, DSR, whole",
            Self::DsrReturn => "ebpf, DSR, return",
        }
    }

    const fn is_dsr(self) -> bool {
        matches!(self, Self::Dsr | Self::DsrWhole | Self::DsrReturn)
    }

    const fn is_xdp(self) -> bool {
        matches!(self, Self::XdpGeneric | Self::XdpNative | Self::XdpBare)
    }

    /// Returns mode and configuration of the proxy, unless this way has none.
    pub(super) fn proxy(self) -> Result<Option<(&'static str, Mapping)>> {
        let shunt = match self {
            Self::Routed | Self::KernelNat | Self::XdpBare => return Ok(None),
            Self::Nftables => return Ok(Some(("nftables", Mapping::new()))),
            Self::Default => return Ok(Some(("ebpf", Mapping::new()))),
            Self::Programs => "links: {path: programs}",
            Self::Masquerading => "links: {path: programs, masquerade: programs}",
            Self::Direct => "links: {path: direct, masquerade: programs}",
            Self::Whole => "links: {path: direct, direct: whole, masquerade: programs}",
            Self::XdpGeneric => "links: {path: direct, masquerade: programs, xdp: generic}",
            Self::XdpNative => "links: {path: direct, masquerade: programs, xdp: native}",
            Self::Dsr => "dsr: {enabled: true}",
            Self::DsrWhole => {
                "dsr: {enabled: true}, links: {path: direct, direct: whole, masquerade: programs}"
            }
            Self::DsrReturn => "dsr: {enabled: true, return: tunnel}",
        };
        Ok(Some(("ebpf", serde_yaml_ng::from_str(&format!("{{shunt: {{{shunt}}}}}"))?)))
    }

    /// Returns where the client connects to.
    fn target(self, length: Length, workload: Workload) -> SocketAddr {
        match (self, length) {
            (Self::Routed, Length::ThisNode) => (ON_THIS_NODE, endpoint_port(workload)).into(),
            (Self::Routed, Length::OtherNode) => (BEHIND_NODES, endpoint_port(workload)).into(),
            _ => (NODE, length.node_port(workload)).into(),
        }
    }
}

impl Length {
    const ALL: [Self; 2] = [Self::ThisNode, Self::OtherNode];

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
    set_up(world)?;
    let mut results = Vec::new();
    for &way in ways.iter().filter(|way| !way.is_xdp()) {
        let service = way.proxy()?;
        if way == Way::KernelNat {
            world.run(Host::Node1, &format!("nft '{}'", kernel_nat()))?;
        }
        if let Some((mode, fields)) = &service {
            proxy.set_mode(mode, fields)?;
            proxy.start(world)?;
            if way.is_dsr() {
                other.set_mode(mode, fields)?;
                other.start(world)?;
            }
        }
        let lengths = Length::ALL.into_iter();
        for length in lengths.filter(|length| !way.is_dsr() || *length == Length::OtherNode) {
            for &workload in workloads {
                let ratio = compare(world, way, length, workload, effort)?;
                results.push(OutsideResult { way, length, workload, ratio });
            }
        }
        if way == Way::KernelNat {
            world.run(Host::Node1, "nft delete table ip bench")?;
        }
        if way.is_dsr() {
            other.stop()?;
            other.clean_up(world)?;
        }
        if service.is_some() {
            proxy.stop()?;
            proxy.clean_up(world)?;
        }
    }
    Ok(results)
}

/// Starts the servers, and adds the routes. Clean connections do not pass node1.
fn set_up(world: &mut World) -> Result<()> {
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
    [Host::A2, Host::B1, Host::B2]
        .into_iter()
        .try_for_each(|pod| paths::serve_ports(world, pod, ports.clone()))
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

fn compare(
    world: &mut World,
    way: Way,
    length: Length,
    workload: Workload,
    effort: Effort,
) -> Result<Option<Ratio>> {
    let targets = vec![vec![length.clean(workload)], vec![way.target(length, workload)]];
    match paths::load(world, Host::Client, workload, targets, effort, effort.pairs)? {
        BenchResponse::Rates(rates) => Ok(Ratio::of(paths::pairs(&rates, 1))),
        other => bail!("{}, {}, {}: {other:?}", way.name(), length.name(), workload.name()),
    }
}
