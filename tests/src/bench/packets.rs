//! Measures packets a second of one core: datagrams of many clients that come in on a link of the
//! node for an endpoint on another node, and leave on the same link.
//!
//! The kernel itself makes the packets (`BPF_PROG_TEST_RUN` with live frames), so that no sender
//! takes part of the time. Behind the link, the first thing drops them. Rounds of the node and of a
//! router that runs no proxy and tracks no connections follow each other.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd as _, OwnedFd},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::net::if_::if_nametoindex;
use proxy_userspace::kernel::bpf::{
    live_frames::{Datagrams, Fate, Generator, Receiver},
    programs,
};
use serde::Serialize;
use serde_json::{Value, json};
use serde_yaml_ng::Mapping;

use super::{
    Effort, cluster,
    floor::{self, Connection, Floor},
    paths::{self, NODE},
    protocol::{BenchRequest, BenchResponse, FrameReceiver, PacketBurst, Workload},
    ratio::{Ratio, quantile},
    way::Way,
};
use crate::{
    deadline::Stopwatch,
    flood::SOURCES,
    runner::{Manifests, Proxy},
    world::{Host, World},
};

/// The clients: a range for measurements (RFC 2544).
const FIRST_CLIENT: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Where their answers go.
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 168, 57, 50);
/// The endpoint, and an address that the router forwards to.
const ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 11);
const BEHIND_ROUTER: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 12);
/// An endpoint on the node.
const LOCAL_ENDPOINT: Ipv4Addr = cluster::SERVER;
/// The ports of the endpoints. The source ports of the node bound the flows to each of them.
const PORTS: std::ops::Range<u16> = 9_100..9_108;
const NODE_PORT: u16 = 30_100;
const RANDOM_NODE_PORT: u16 = 30_101;
const MAGLEV_NODE_PORT: u16 = 30_102;
/// The link of the nodes.
const LINK: &str = "eth0";
/// What programs without Services translate.
const CONNECTION: Connection = Connection {
    client: CLIENT,
    vip: SocketAddrV4::new(NODE, NODE_PORT),
    endpoint: SocketAddrV4::new(ENDPOINT, PORTS.start),
    next: Host::Node2,
    is_one_way: true,
};

/// Flows of the larger measurement.
const MANY: u32 = 100_000;
/// So many clients that each packet begins a flow.
const ALL_NEW: u32 = 1 << 30;
/// Packets of a round.
const ROUND: u32 = 100_000;
/// Rounds of many flows before those that count. The direct path learns from one of eight
/// packets of a new flow.
const LEARNING_ROUNDS: usize = 40;
/// Packets that the servers answer before the next ones come, while flows begin.
const BURST: u32 = 1_000;
const PAUSE: Duration = Duration::from_millis(8);
/// A flow is learned from the next tick of the kernel on.
const LEARNING: Duration = Duration::from_millis(700);
const TIMEOUT: Duration = Duration::from_mins(1);
/// The share of the packets that leave again. The kernel drops some if its queue is full.
const FORWARDED: f64 = 0.98;
/// How often a round is tried until so many are forwarded.
const ATTEMPTS: usize = 3;

/// Packets of a way.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PacketsResult {
    pub(super) way: Way,
    pub(super) flows: Flows,
    /// Packets a second.
    pub(super) per_second: f64,
    /// The same, relative to the router.
    pub(super) ratio: Option<Ratio>,
}

/// New flows with Maglev tables, relative to those with random endpoints.
#[derive(Clone, Debug, Serialize)]
pub(super) struct NewFlows {
    pub(super) per_second: f64,
    pub(super) ratio: Option<Ratio>,
}

/// The number of flows that the packets belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Flows {
    One,
    Many,
}

impl Flows {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::One => "1 flow",
            Self::Many => "100,000 flows",
        }
    }

    const fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Many => MANY,
        }
    }
}

/// Writes the objects of the cluster: a Service whose endpoint is on another node, and two with
/// policy Local, which are not masqueraded. Source ports do not bound their flows.
pub(super) fn place(manifests: &Manifests) -> Result<()> {
    let objects: Vec<Value> = [
        objects("random", "Cluster", NODE_PORT, (ENDPOINT, "node2")),
        objects("random", "Local", RANDOM_NODE_PORT, (LOCAL_ENDPOINT, "node1")),
        objects("maglev", "Local", MAGLEV_NODE_PORT, (LOCAL_ENDPOINT, "node1")),
    ]
    .concat();
    cluster::place(manifests, &[objects, vec![cluster::node()]].concat())
}

fn objects(balance: &str, policy: &str, node_port: u16, (endpoint, node): (Ipv4Addr, &str)) -> Vec<Value> {
    let name = format!("service-{node_port}");
    let address = format!("10.96.0.{}", node_port - 30_000);
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "annotations": {"shunt.dev/balance": balance}},
        "spec": {
            "type": "NodePort", "clusterIP": address, "clusterIPs": [address], "externalTrafficPolicy": policy,
            "ports": [{"name": "p", "protocol": "UDP", "port": 80, "nodePort": node_port}],
        },
    });
    let slice = |port: u16| {
        let endpoints = json!([cluster::endpoint(endpoint, node)]);
        let ports = json!([{"name": "p", "protocol": "UDP", "port": port}]);
        cluster::endpoint_slice("default", &name, &format!("{name}-{port}"), &endpoints, &ports)
    };
    [service].into_iter().chain(PORTS.map(slice)).collect()
}

/// Measures these ways. Also compares new flows with and without Maglev tables.
pub(super) fn measure(
    world: &mut World,
    proxy: &mut Proxy,
    ways: &[Way],
    effort: Effort,
) -> Result<(Vec<PacketsResult>, Option<NewFlows>)> {
    set_up(world)?;
    let (mut results, mut new_flows) = (Vec::new(), None);
    for &way in ways.iter().filter(|way| way.is_possible() && way.has_packets()) {
        let service = way.proxy()?;
        if way == Way::KernelNat {
            world.run(Host::Node1, &format!("nft '{}'", kernel_nat()))?;
        }
        if let Some((mode, fields)) = &service {
            proxy.set_mode(mode, &with_large_maps(fields)?)?;
            proxy.start(world)?;
        }
        let floor = way.floor().map(|kind| Floor::translating(world, kind, &CONNECTION)).transpose()?;
        let sender = Sender::to(world, way)?;
        if floor.is_some() {
            // The node would answer the endpoint's datagrams with ICMP errors.
            world.run_on_bridge(DROP)?;
        }
        sender.begin_flows(world)?;
        if floor.is_none() {
            world.run_on_bridge(DROP)?;
        }
        let sink = (sender.receiver != FrameReceiver::Stack)
            .then(|| world.attach_to_port(Host::Node1, Fate::Drop))
            .transpose()?;
        for flows in [Flows::Many, Flows::One] {
            results.push(sender.compare(world, way, flows, effort.pairs)?);
        }
        if way == Way::Default {
            new_flows = Some(sender.compare_new_flows(world, effort.pairs)?);
        }
        drop(sink);
        world.run_on_bridge(STOP_DROPPING)?;
        if way == Way::KernelNat {
            world.run(Host::Node1, "nft delete table ip bench")?;
        }
        if service.is_some() {
            proxy.stop()?;
            proxy.clean_up(world)?;
        }
    }
    Ok((results, new_flows))
}

/// Drops the datagrams of the node and of the router.
const DROP: &str = "nft 'table netdev bench { chain arriving { \
    type filter hook ingress devices = { node1, router } priority 0; ip protocol udp drop; }; }'";
/// The same for what comes in on a pod's link.
const DROP_IN_POD: &str = "nft 'table netdev bench { chain arriving { \
    type filter hook ingress device eth0 priority 0; ip protocol udp drop; }; }'";
const STOP_DROPPING: &str = "nft delete table netdev bench";

fn set_up(world: &mut World) -> Result<()> {
    // Without it, a veth takes no frames of drivers.
    world.run_on_bridge(&format!("ethtool -K {} gro on", Host::Node1))?;
    for host in [Host::Node1, Host::Router, Host::Node2] {
        world.route(host, SOURCES.parse()?, CLIENT.into())?;
    }
    let conntrack = "sysctl -qw net.netfilter.nf_conntrack_max=1048576 2> /dev/null || true";
    world.run(Host::Node1, conntrack)?;
    let servers = PORTS.map(|port| (Workload::UdpRequestResponse, port)).collect();
    world.run(Host::A2, DROP_IN_POD)?;
    paths::keep_no_time_wait(world, Host::B1)?;
    paths::serve_ports(world, Host::B1, servers)
}

/// Adds maps with room for all flows to a configuration of the proxy. A flow has up to four
/// entries.
fn with_large_maps(fields: &Mapping) -> Result<Mapping> {
    let mut fields = fields.clone();
    let sizes = "{mapSizes: {flows: 1048576, unassuredFlows: 524288, directFlows: 524288}}";
    let shunt = fields.entry("shunt".into()).or_insert_with(|| Mapping::new().into());
    let shunt = shunt.as_mapping_mut().context("shunt is a section")?;
    shunt.insert("ebpf".into(), serde_yaml_ng::from_str(sizes)?);
    Ok(fields)
}

/// Returns nftables rules that translate and masquerade.
fn kernel_nat() -> String {
    let ports: Vec<String> = (0..).zip(PORTS).map(|(number, port)| format!("{number} : {port}")).collect();
    let (count, ports) = (PORTS.len(), ports.join(", "));
    let dnat = format!(
        "ip daddr {NODE} udp dport {NODE_PORT} dnat to {ENDPOINT} : numgen random mod {count} map {{ {ports} }}; "
    );
    paths::nat_table(&dnat, &format!("ip daddr {ENDPOINT}"))
}

/// Sends to the node and to the router.
struct Sender {
    node: [u8; 6],
    router: [u8; 6],
    client: [u8; 6],
    to: SocketAddrV4,
    receiver: FrameReceiver,
}

impl Sender {
    fn to(world: &World, way: Way) -> Result<Self> {
        let to = match way {
            Way::Routed => SocketAddrV4::new(ENDPOINT, PORTS.start),
            _ => SocketAddrV4::new(NODE, NODE_PORT),
        };
        Ok(Self {
            node: world.hardware_address(Host::Node1)?,
            router: world.hardware_address(Host::Router)?,
            client: world.hardware_address(Host::Client)?,
            to,
            receiver: match way {
                Way::XdpNative => FrameReceiver::Proxy,
                Way::FloorXdpTable => FrameReceiver::Floor,
                Way::XdpBare => FrameReceiver::Link,
                _ => FrameReceiver::Stack,
            },
        })
    }

    fn to_node(&self, clients: u32) -> Datagrams {
        Datagrams {
            ethernet: [self.node, self.client],
            first_client: FIRST_CLIENT,
            first: 0,
            clients,
            to: self.to,
        }
    }

    fn to_router(&self, clients: u32) -> Datagrams {
        let to = SocketAddrV4::new(BEHIND_ROUTER, PORTS.start);
        Datagrams { ethernet: [self.router, self.client], first_client: FIRST_CLIENT, first: 0, clients, to }
    }

    /// Sends a datagram of each flow until its endpoint has answered and the node has learned it.
    fn begin_flows(&self, world: &mut World) -> Result<()> {
        for _ in 0..3 {
            send(world, Host::Node1, (&self.to_node(MANY), self.receiver), (BURST, MANY / BURST), PAUSE)?;
            thread::sleep(LEARNING);
        }
        send(world, Host::Router, (&self.to_router(1), FrameReceiver::Stack), (1, 3), PAUSE).map(drop)
    }

    fn compare(&self, world: &mut World, way: Way, flows: Flows, pairs: usize) -> Result<PacketsResult> {
        let (node, router) = (self.to_node(flows.count()), self.to_router(flows.count()));
        let mut rates = Vec::new();
        if flows == Flows::Many {
            for _ in 0..LEARNING_ROUNDS {
                rate(world, Host::Node1, (&node, self.receiver))?;
            }
        }
        // The first round fills caches.
        for round in 0..=pairs {
            let clean = rate(world, Host::Router, (&router, FrameReceiver::Stack))?;
            let measured = rate(world, Host::Node1, (&node, self.receiver))?;
            rates.extend((round > 0).then_some((measured, clean)));
        }
        let per_second = median(rates.iter().map(|(measured, _)| *measured))?;
        Ok(PacketsResult { way, flows, per_second, ratio: Ratio::of(rates.into_iter()) })
    }

    /// Each packet begins a flow: with a random endpoint, and with that of a table.
    fn compare_new_flows(&self, world: &mut World, pairs: usize) -> Result<NewFlows> {
        let mut rates = Vec::new();
        let mut first = MANY;
        for round in 0..=pairs {
            let mut measure = |port| {
                let to = SocketAddrV4::new(NODE, port);
                first += ROUND;
                let datagrams = Datagrams { to, first, ..self.to_node(ALL_NEW) };
                rate(world, Host::Node1, (&datagrams, FrameReceiver::Stack))
            };
            let with_random = measure(RANDOM_NODE_PORT)?;
            let with_table = measure(MAGLEV_NODE_PORT)?;
            rates.extend((round > 0).then_some((with_table, with_random)));
        }
        let per_second = median(rates.iter().map(|(with_table, _)| *with_table))?;
        Ok(NewFlows { per_second, ratio: Ratio::of(rates.into_iter()) })
    }
}

fn median(rates: impl Iterator<Item = f64>) -> Result<f64> {
    let mut sorted: Vec<f64> = rates.collect();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 50).context("no rounds")
}

/// Lets an agent send one round. Returns packets a second.
fn rate(world: &mut World, host: Host, datagrams: (&Datagrams, FrameReceiver)) -> Result<f64> {
    let mut forwarded = 0.0;
    for _ in 0..ATTEMPTS {
        let (per_second, share) = send(world, host, datagrams, (ROUND, 1), Duration::ZERO)?;
        if share >= FORWARDED {
            return Ok(per_second);
        }
        forwarded = share;
    }
    bail!("{host} forwarded {forwarded:.3} of its packets, {ATTEMPTS} times one after the other")
}

/// Lets an agent send bursts. Returns packets a second, and the share that was forwarded.
fn send(
    world: &mut World,
    host: Host,
    (datagrams, receiver): (&Datagrams, FrameReceiver),
    (packets, bursts): (u32, u32),
    pause: Duration,
) -> Result<(f64, f64)> {
    let burst = PacketBurst { datagrams: *datagrams, packets, bursts, pause, receiver };
    match world.agent(host)?.bench(BenchRequest::Packets(burst), TIMEOUT)? {
        BenchResponse::Sent { per_second, share } => Ok((per_second, share)),
        other => bail!("packets of {host}: {other:?}"),
    }
}

/// Sends bursts, in an agent.
pub(super) fn send_here(burst: &PacketBurst) -> Result<BenchResponse> {
    let PacketBurst { datagrams, packets, bursts, pause, receiver } = *burst;
    ensure!(packets > 0, "no packets");
    super::load::pin_to_last_cpu()?;
    let link = if_nametoindex(LINK).context(LINK)?;
    let program = match receiver {
        FrameReceiver::Proxy => Some(xdp_program("shunt_xdp")?),
        FrameReceiver::Floor => Some(xdp_program(floor::XDP_PROGRAM)?),
        FrameReceiver::Stack | FrameReceiver::Link => None,
    };
    let to = match &program {
        Some(program) => Receiver::Program(program.as_fd()),
        None if receiver == FrameReceiver::Link => Receiver::Link,
        None => Receiver::Stack,
    };
    let generator = Generator::load(&datagrams, to).context("load XDP")?;
    let (before, began) = (packets_sent()?, Stopwatch::start());
    for _ in 0..bursts {
        generator.send(link, packets).context("send live frames")?;
        thread::sleep(pause);
    }
    let took = began.elapsed().as_secs_f64();
    let (expected, sent) = (f64::from(packets) * f64::from(bursts), packets_sent()? - before);
    Ok(BenchResponse::Sent { per_second: sent / took, share: sent / expected })
}

/// Returns the program with this name, which has just been loaded.
fn xdp_program(name: &str) -> Result<OwnedFd> {
    programs::newest(name)?.with_context(|| format!("no program {name} is loaded"))
}

/// Returns the number of packets that left on all links.
fn packets_sent() -> Result<f64> {
    /// The columns of a link before this number.
    const BEFORE: usize = 9;
    let links = fs::read_to_string("/proc/thread-self/net/dev").context("read the links")?;
    let sent = links.lines().filter_map(|line| line.split_once(':')?.1.split_whitespace().nth(BEFORE));
    sent.map(|sent| sent.parse::<f64>().context("a number of packets")).sum()
}
