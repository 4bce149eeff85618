//! Those who dial, and what came of their connections.

use std::{
    fmt,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::{
        Agent,
        protocol::{Attempt, ConnectRequest, FailureKind, Order, Protocol, SendRequest},
    },
    small_cluster::{CLUSTER_IP, NODE_PORT},
    world::{Host, World},
};

const CLUSTER_IP_V6: &str = "[fd96::80]:80";
const NODE_PORT_V6: &str = "[fd57::11]:30080";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections begun together; an agent has 64 of them open at a time.
const BATCH: usize = 256;
/// Each is used three times, for long enough to see a change of endpoints.
const USED_AGAIN: usize = 2;
const BETWEEN: Duration = Duration::from_millis(50);
/// Connections that each client keeps open from the beginning, to each address.
const HELD: usize = 10;
/// More ports than the kernel's default, and again a second after they were used: so many connections to one address need them.
const PORTS: &str =
    "echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range; echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse";

/// A host that dials.
pub(crate) struct Client {
    host: Host,
    addresses: [SocketAddr; 2],
    agent: Agent,
}

/// What came of connections.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) connections: usize,
    refused: usize,
    lost: usize,
    moved: usize,
    /// Their sockets name the endpoint as their peer, not the VIP.
    renamed: usize,
    /// All that went wrong.
    pub(crate) examples: Vec<String>,
}

/// Until when to dial.
pub(crate) struct StopCondition<'a> {
    /// Connections made by all clients so far.
    pub(crate) made: &'a AtomicUsize,
    /// Enough of them.
    pub(crate) enough: usize,
    /// Stop, whatever the number.
    pub(crate) done: &'a AtomicBool,
}

/// A client outside, a pod seen by the hooks of sockets, and one that is not.
pub(crate) fn clients(world: &mut World) -> Result<Vec<Client>> {
    let cluster_ip = [CLUSTER_IP.parse()?, CLUSTER_IP_V6.parse()?];
    let node_port = [NODE_PORT.parse()?, NODE_PORT_V6.parse()?];
    [(Host::Client, node_port), (Host::A1, cluster_ip), (Host::A2, cluster_ip)]
        .into_iter()
        .map(|(host, addresses)| {
            world.run(host, PORTS)?;
            Ok(Client { host, addresses, agent: world.take_agent(host)? })
        })
        .collect()
}

impl Client {
    /// Dials over and over.
    pub(crate) fn load(&mut self, until: &StopCondition<'_>) -> Result<Counts> {
        let mut counts = Counts::default();
        for to in self.addresses.into_iter().cycle() {
            if until.done.load(Ordering::Relaxed) || until.made.load(Ordering::Relaxed) >= until.enough {
                break;
            }
            let request = ConnectRequest {
                repeats: USED_AGAIN,
                repeat_interval: BETWEEN,
                ..connect_request(to, BATCH)
            };
            let attempts = self.agent.connect(request)?;
            until.made.fetch_add(attempts.len(), Ordering::Relaxed);
            let name = format!("{} to {to}", self.host);
            for one in &attempts {
                counts.add(&name, one);
            }
        }
        Ok(counts)
    }

    /// Opens the connections that are kept.
    pub(crate) fn hold(&mut self) -> Result<()> {
        for (id, to) in self.held() {
            let hold = ConnectRequest { hold: Some(id), ..connect_request(to, 1) };
            let attempts = self.agent.connect(hold)?;
            ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "{to} does not answer: {attempts:?}");
        }
        Ok(())
    }

    /// Uses those that were kept; says which have ended.
    pub(crate) fn ended(&mut self) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        for (id, to) in self.held() {
            let send = SendRequest { id, size: 1, answer: 0, timeout: ANSWER_TIMEOUT };
            if let Attempt::Failed(failure) = self.agent.send(send)? {
                ended.push(format!(
                    "{} to {to}, open from the start: {}: {}",
                    self.host, failure.operation, failure.message
                ));
            }
        }
        Ok(ended)
    }

    /// Whether only this host answers; says who else does.
    pub(crate) fn others_than(&mut self, host: Host) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for to in self.addresses {
            let attempts = self.agent.connect(connect_request(to, 20))?;
            let is_wrong =
                |one: &Attempt| !matches!(one, Attempt::Answered(answer) if answer.host == host.name());
            wrong.extend(
                attempts.into_iter().find(is_wrong).map(|one| format!("{} to {to}: {one:?}", self.host)),
            );
        }
        Ok(wrong)
    }

    /// Of each connection that is kept: its name and the address it goes to.
    fn held(&self) -> Vec<(String, SocketAddr)> {
        let of = |to: SocketAddr| (0..HELD).map(move |number| (format!("{to} {number}"), to));
        self.addresses.into_iter().flat_map(of).collect()
    }

    /// How many connections are kept.
    pub(crate) fn held_count(&self) -> usize {
        self.held().len()
    }
}

fn connect_request(to: SocketAddr, attempts: usize) -> ConnectRequest {
    ConnectRequest {
        order: Order::Concurrent,
        timeout: ANSWER_TIMEOUT,
        ..ConnectRequest::new(to, Protocol::Tcp, attempts)
    }
}

impl Counts {
    fn add(&mut self, name: &str, one: &Attempt) {
        self.connections += 1;
        let what = match one {
            Attempt::Answered(answer) if answer.peer == answer.destination => return,
            Attempt::Answered(answer) => {
                self.renamed += 1;
                format!("the peer is {}", answer.peer)
            }
            Attempt::Failed(failure) => {
                match failure.kind {
                    FailureKind::Refused => self.refused += 1,
                    FailureKind::Moved => self.moved += 1,
                    _ => self.lost += 1,
                }
                format!("{}: {}", failure.operation, failure.message)
            }
        };
        self.examples.push(format!("{name}: {what}"));
    }

    /// Of all.
    pub(crate) fn sum(all: impl IntoIterator<Item = Self>) -> Self {
        all.into_iter().fold(Self::default(), Self::plus)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            connections: self.connections + other.connections,
            refused: self.refused + other.refused,
            lost: self.lost + other.lost,
            moved: self.moved + other.moved,
            renamed: self.renamed + other.renamed,
            examples: [self.examples, other.examples].concat(),
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connections, refused, lost, moved, renamed, .. } = self;
        write!(
            f,
            "{connections} connections, {refused} refused, {lost} lost, {moved} moved, {renamed} renamed"
        )
    }
}
