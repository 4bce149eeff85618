//! Measures floods: which connections end while packets with forged sources come in, or while many
//! others open and close, and what that costs the node.
//!
//! The Services have policy Local, so that the cost is that of the proxy and not of masquerading.
//! The forged sources are routed to the client, so that answers leave the node.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::{
    agent::protocol::{Attempt, ConnectRequest, LoadReport, LoadRequest, Protocol, SendRequest},
    flood::{Connections, Flood, SOURCES, Sent},
    runner::{Manifests, Proxy},
    small_cluster::{DNS_PORT, NODE, NODE_PORT, NODE_PORT_UDP, Slices, WEB_PORT},
    world::{Host, World},
};

const SERVICES: &str = include_str!("floods.yaml");
/// The hosts of the world.
pub(super) const HOSTS: [Host; 3] = [Host::Node1, Host::A3, Host::Client];
const CLIENT: &str = "192.168.57.50";
/// Active connections, each of which exchanges a byte every second.
const ACTIVE: usize = 1_000;
const EXCHANGE_EVERY: Duration = Duration::from_secs(1);
/// The time for all connections to open, and for the exchanges after a flood.
const SETTLE: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(10);
/// Conntrack forgets closed connections soon. Otherwise its table is full after some seconds, and
/// the node drops packets in every mode.
const CONNTRACK: &str = "sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_time_wait=1 \
    net.netfilter.nf_conntrack_tcp_timeout_last_ack=1";

/// The node port of the Service whose endpoint is no socket.
const NODE_PORT_PACKETS: &str = "192.168.57.11:30081";
/// Its endpoint, on the link of A3.
const ENDPOINT: &str = "10.244.1.99:8080";
/// Connections that open and close each second.
const CONNECTIONS_PER_SECOND: u32 = 20_000;

/// What the connections have to survive.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Attack {
    /// SYNs with forged sources, which the endpoint answers.
    Syns,
    /// Datagrams with forged sources, which the endpoint answers.
    Datagrams,
    /// Connections that open and close.
    Connections,
}

/// The result of one attack.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FloodResult {
    pub(super) attack: Attack,
    /// Packets or connections.
    pub(super) count: u32,
    /// How many there were in a second.
    pub(super) per_second: f64,
    /// CPU time of the node for each of them, in nanoseconds, with that of sending it.
    pub(super) cpu_ns: u64,
    /// Active connections.
    pub(super) active: usize,
    /// Active connections that ended, moved, or were not answered in time.
    pub(super) lost: usize,
    /// Descriptions of the first ones.
    pub(super) failures: Vec<String>,
    /// Why the idle connection ended.
    pub(super) idle: Option<String>,
}

impl Attack {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Syns => "SYNs",
            Self::Datagrams => "datagrams",
            Self::Connections => "connections",
        }
    }

    fn run(self, world: &World, packets: u32) -> Result<(u32, Sent)> {
        let mut client = world.sender(Host::Client)?;
        let flood = |protocol, to: &str, client| Flood { protocol, to: to.parse()?, packets }.send(client);
        let sent = match self {
            Self::Syns => flood(Protocol::Tcp, NODE_PORT, &mut client)?,
            Self::Datagrams => flood(Protocol::Udp, NODE_PORT_UDP, &mut client)?,
            Self::Connections => {
                let (to, endpoint) = (NODE_PORT_PACKETS.parse()?, ENDPOINT.parse()?);
                let (count, per_second) = (packets / 8, CONNECTIONS_PER_SECOND);
                let connections = Connections { to, endpoint, count, per_second };
                return Ok((count, connections.make(&mut client, &mut world.sender(Host::A3)?)?));
            }
        };
        Ok((packets, sent))
    }
}

/// Places the Services and their endpoints.
pub(super) fn place(manifests: &Manifests) -> Result<()> {
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
    let mut slices = Slices::default();
    slices.add("web", false, WEB_PORT, &[Host::A3]);
    slices.add("outside", false, DNS_PORT, &[Host::A3]);
    slices.place(manifests)
}

/// Makes all attacks, one after the other, while the proxy runs.
pub(super) fn measure(world: &mut World, proxy: &mut Proxy, packets: u32) -> Result<Vec<FloodResult>> {
    world.route(Host::Node1, SOURCES.parse()?, CLIENT.parse()?)?;
    let link = Host::A3.node_link();
    let endpoint = ENDPOINT.parse::<SocketAddr>()?.ip();
    world.run(
        Host::Node1,
        &format!(
            "ip route add {endpoint} dev {link}; ip neigh add {endpoint} lladdr 02:00:00:00:00:02 dev {link}; {CONNTRACK}"
        ),
    )?;
    proxy.start(world)?;
    let attacks = [Attack::Syns, Attack::Datagrams, Attack::Connections];
    let results = attacks.map(|attack| survive(world, attack, packets));
    proxy.stop()?;
    proxy.clean_up(world)?;
    results.into_iter().collect()
}

fn survive(world: &mut World, attack: Attack, packets: u32) -> Result<FloodResult> {
    let to = NODE_PORT.parse()?;
    let client = world.agent(Host::Client)?;
    client.open("idle", ConnectRequest::new(to, Protocol::Tcp, 1).with_timeout(TIMEOUT))?;
    let active = ConnectRequest {
        repeats: usize::MAX,
        repeat_interval: EXCHANGE_EVERY,
        ..ConnectRequest::new(to, Protocol::Tcp, ACTIVE).with_timeout(TIMEOUT)
    };
    client.start_load(LoadRequest { streams: vec![active] })?;
    thread::sleep(SETTLE);
    let sent = attack.run(world, packets);
    thread::sleep(SETTLE);
    let client = world.agent(Host::Client)?;
    let report = client.stop_load(TIMEOUT)?;
    let idle = client.send(SendRequest { id: "idle".to_owned(), size: 1, answer: 0, timeout: TIMEOUT })?;
    client.close()?;
    let (count, sent) = sent?;
    let each = sent.cpu.as_nanos() / u128::from(count.max(1));
    Ok(FloodResult {
        attack,
        count,
        per_second: f64::from(count) / sent.took.as_secs_f64(),
        cpu_ns: u64::try_from(each).context("the time of a packet")?,
        active: report.connections,
        lost: lost(&report),
        idle: match idle {
            Attempt::Answered(_) => None,
            Attempt::Failed(failure) => Some(failure.to_string()),
        },
        failures: report.failures,
    })
}

/// Returns how many connections failed. A connection that fails is opened again.
pub(super) const fn lost(report: &LoadReport) -> usize {
    let LoadReport { refused, lost, broken, moved, wrong_peer, .. } = report;
    *refused + *lost + *broken + *moved + *wrong_peer
}
