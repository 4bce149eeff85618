//! The clients that connect during the churn test, and the counts of their connections.

use std::{
    fmt,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use shunt_tests::{
    agent::{
        Agent,
        protocol::{Attempt, ConnectRequest, FailureKind, Protocol, SendRequest},
    },
    small_cluster::{CLUSTER_IP, NODE_PORT},
    world::{Host, World},
};

const CLUSTER_IP_V6: &str = "[fd96::80]:80";
const NODE_PORT_V6: &str = "[fd57::11]:30080";
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The number of connections in one request. An agent has 64 of them open at a time.
const BATCH: usize = 256;
/// Each connection is used three times, which takes long enough to meet a change of endpoints.
const REPEATS: usize = 2;
const REPEAT_INTERVAL: Duration = Duration::from_millis(50);
/// The number of connections that each client keeps open from the start, for each address.
const OPEN_CONNECTIONS: usize = 10;
/// Allows to reuse a port after a second, which this number of connections to one address needs.
const REUSE_PORTS: &str = "echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse";

/// A host that connects.
pub(crate) struct Client {
    pub(crate) host: Host,
    addresses: [SocketAddr; 2],
    pub(crate) agent: Agent,
}

/// The results of connections.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) connections: usize,
    refused: usize,
    lost: usize,
    moved: usize,
    /// The socket reports another peer than the VIP.
    wrong_peer: usize,
    /// A description of each failure.
    pub(crate) failures: Vec<String>,
}

/// How a client connects, and when it stops.
pub(crate) struct LoadCondition<'a> {
    /// How long it waits for an answer.
    pub(crate) timeout: Duration,
    /// The number of connections that all clients have made so far.
    pub(crate) made: &'a AtomicUsize,
    /// Stop at this number.
    pub(crate) enough: usize,
    /// Stop at any number.
    pub(crate) done: &'a AtomicBool,
}

/// Returns a client outside the cluster, a pod whose sockets the socket programs see, and a pod
/// whose sockets they do not see.
pub(crate) fn clients(world: &mut World) -> Result<Vec<Client>> {
    let cluster_ip = [CLUSTER_IP.parse()?, CLUSTER_IP_V6.parse()?];
    let node_port = [NODE_PORT.parse()?, NODE_PORT_V6.parse()?];
    [(Host::Client, node_port), (Host::A1, cluster_ip), (Host::A2, cluster_ip)]
        .into_iter()
        .map(|(host, addresses)| {
            world.run(host, REUSE_PORTS)?;
            Ok(Client { host, addresses, agent: world.take_agent(host)? })
        })
        .collect()
}

impl Client {
    /// Connects repeatedly.
    pub(crate) fn load(&mut self, stop: &LoadCondition<'_>) -> Result<Counts> {
        let mut counts = Counts::default();
        for to in self.addresses.into_iter().cycle() {
            if stop.done.load(Ordering::Relaxed) || stop.made.load(Ordering::Relaxed) >= stop.enough {
                break;
            }
            let request = ConnectRequest {
                repeats: REPEATS,
                repeat_interval: REPEAT_INTERVAL,
                ..connect_request(to, BATCH).with_timeout(stop.timeout)
            };
            let attempts = self.agent.connect(request)?;
            stop.made.fetch_add(attempts.len(), Ordering::Relaxed);
            let name = format!("{} to {to}", self.host);
            for attempt in &attempts {
                counts.add(&name, attempt);
            }
        }
        Ok(counts)
    }

    /// Returns the addresses of the Service whose endpoints change.
    pub(crate) const fn addresses(&self) -> [SocketAddr; 2] {
        self.addresses
    }

    /// Opens the connections that stay open.
    pub(crate) fn open(&mut self) -> Result<()> {
        self.open_connections().into_iter().try_for_each(|(id, to)| {
            self.agent.open(&id, connect_request(to, 1)).with_context(|| to.to_string())
        })
    }

    /// Uses the open connections. Returns a line for each that has ended.
    pub(crate) fn ended_connections(&mut self) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        for (id, to) in self.open_connections() {
            let send = SendRequest { id, size: 1, answer: 0, timeout: ANSWER_TIMEOUT };
            if let Attempt::Failed(failure) = self.agent.send(send)? {
                ended.push(format!("{} to {to}, open from the start: {failure}", self.host));
            }
        }
        Ok(ended)
    }

    /// Connects to all addresses. Returns a line for each address at which not only `host` answers.
    pub(crate) fn answers_of_others(&mut self, host: Host) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for to in self.addresses {
            let attempts = self.agent.connect(connect_request(to, 20))?;
            let first = attempts.into_iter().find(|attempt| !attempt.is_answered_by(host));
            wrong.extend(first.map(|attempt| format!("{} to {to}: {attempt:?}", self.host)));
        }
        Ok(wrong)
    }

    /// Returns the name and the destination of each connection that stays open.
    fn open_connections(&self) -> Vec<(String, SocketAddr)> {
        let numbered =
            |to: SocketAddr| (0..OPEN_CONNECTIONS).map(move |number| (format!("{to} {number}"), to));
        self.addresses.into_iter().flat_map(numbered).collect()
    }

    /// Returns the number of connections that stay open.
    pub(crate) fn open_count(&self) -> usize {
        self.open_connections().len()
    }
}

fn connect_request(to: SocketAddr, attempts: usize) -> ConnectRequest {
    ConnectRequest::new(to, Protocol::Tcp, attempts).with_timeout(ANSWER_TIMEOUT)
}

impl Counts {
    fn add(&mut self, name: &str, attempt: &Attempt) {
        self.connections += 1;
        let failure = match attempt {
            Attempt::Answered(answer) if answer.peer == answer.destination => return,
            Attempt::Answered(answer) => {
                self.wrong_peer += 1;
                format!("the peer is {}", answer.peer)
            }
            Attempt::Failed(failure) => {
                match failure.kind {
                    FailureKind::Refused => self.refused += 1,
                    FailureKind::Moved => self.moved += 1,
                    _ => self.lost += 1,
                }
                failure.to_string()
            }
        };
        self.failures.push(format!("{name}: {failure}"));
    }

    /// Returns the sum.
    pub(crate) fn sum(all: impl IntoIterator<Item = Self>) -> Self {
        all.into_iter().fold(Self::default(), Self::plus)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            connections: self.connections + other.connections,
            refused: self.refused + other.refused,
            lost: self.lost + other.lost,
            moved: self.moved + other.moved,
            wrong_peer: self.wrong_peer + other.wrong_peer,
            failures: [self.failures, other.failures].concat(),
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connections, refused, lost, moved, wrong_peer, .. } = self;
        write!(f, "{connections} connections, {refused} refused, {lost} lost, {moved} moved, ")?;
        write!(f, "{wrong_peer} with a wrong peer")
    }
}
