//! Clients that connect all the time, mostly from pods. While a test does something to the proxy,
//! no connection may fail.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    agent::{
        Agent,
        protocol::{Attempt, ConnectRequest, Order, Protocol},
    },
    small_cluster::{CLUSTER_IP, DNS, NODE_PORT, NODE_PORT_UDP},
    world::{Host, World},
};

/// A machine with much other load may stand still for some seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
const BATCH: usize = 50;
const OPEN_CONNECTION: &str = "open";

/// The result of one client.
pub struct ClientResult {
    /// Which client connected to which destination.
    pub name: String,
    /// The number of connections.
    pub connections: usize,
    /// The failures.
    pub failures: Vec<String>,
}

impl ClientResult {
    /// Prints the results. Returns true if nothing failed.
    pub fn report(results: &[Self]) -> bool {
        for result in results {
            println!("{}: {} connections, {} failed", result.name, result.connections, result.failures.len());
            result.failures.iter().take(3).for_each(|failure| println!("    {failure}"));
        }
        results.iter().all(|result| result.failures.is_empty() && result.connections > 0)
    }
}

/// The source port of a client that sends datagrams repeatedly, as one conversation.
const SOURCE_PORT: u16 = 20_000;

/// Three pods of node1: one connects to a cluster IP, one to a node port, and one sends UDP. Each
/// also keeps a connection open.
pub struct Clients(Vec<Client>);

impl Clients {
    /// Creates the clients with the agents of the pods, which it takes out of the world.
    pub fn from_world(world: &mut World) -> Result<Self> {
        let mut clients = vec![
            Client::new(world, Host::A1, vec![connect_request(CLUSTER_IP, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A2, vec![connect_request(NODE_PORT, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A3, vec![connect_request(DNS, Protocol::Udp, true)?])?,
        ];
        clients.iter_mut().try_for_each(|client| client.open(CLUSTER_IP))?;
        Ok(Self(clients))
    }

    /// Adds a host outside the cluster that sends datagrams to a node port: new conversations and
    /// one that continues. Nothing is retransmitted, so every datagram counts.
    pub fn with_udp_from_outside(mut self, world: &mut World) -> Result<Self> {
        let new_conversation = connect_request(NODE_PORT_UDP, Protocol::Udp, true)?;
        let continued_conversation =
            ConnectRequest { source_port: Some(SOURCE_PORT), ..new_conversation.clone() };
        let mut outside = Client::new(world, Host::Client, vec![new_conversation, continued_conversation])?;
        outside.open(NODE_PORT)?;
        self.0.push(outside);
        Ok(self)
    }

    /// Tolerates that shunt deletes the conntrack entries of conversations whose endpoint leaves,
    /// even if a reply is on its way: a datagram whose reply is not translated is sent once more,
    /// from another socket.
    pub fn tolerate_deleted_flows(&mut self) {
        self.0.iter_mut().for_each(|client| client.tolerate_deleted_flows = true);
    }

    /// Tolerates changes of the mode: a removed program no longer hides the endpoint as the peer of
    /// a socket. Open connections must work all the time.
    pub fn tolerate_mode_changes(&mut self) {
        self.0.iter_mut().for_each(|client| client.tolerate_mode_changes = true);
    }

    /// Has all clients connect while `job` runs.
    pub fn connect_during(&mut self, job: impl FnOnce() -> Result<()>) -> Result<Vec<ClientResult>> {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let running: Vec<_> =
                self.0.iter_mut().map(|client| scope.spawn(|| client.load(&done))).collect();
            let job_result = job();
            done.store(true, Ordering::Relaxed);
            let results: Result<Vec<ClientResult>> = running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            job_result.and(results)
        })
    }

    /// Checks that the connections that were opened at the start still work.
    pub fn check_open_connections(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(Client::check_open_connections)
    }

    /// Checks that new connections reach this host only.
    pub fn check_only_endpoint(&mut self, host: Host) -> Result<()> {
        self.0.iter_mut().take(1).try_for_each(|client| client.check_only_endpoint(host))
    }
}

/// A host that connects to its destinations repeatedly.
struct Client {
    host: Host,
    /// The requests, in turn.
    requests: Vec<ConnectRequest>,
    agent: Agent,
    tolerate_mode_changes: bool,
    tolerate_deleted_flows: bool,
}

impl Client {
    fn new(world: &mut World, host: Host, requests: Vec<ConnectRequest>) -> Result<Self> {
        let agent = world.take_agent(host)?;
        Ok(Self { host, requests, agent, tolerate_mode_changes: false, tolerate_deleted_flows: false })
    }

    fn load(&mut self, done: &AtomicBool) -> Result<ClientResult> {
        let requests = self.requests.clone();
        let ConnectRequest { to, protocol, .. } = requests.first().context("the client has no request")?;
        let name = format!("{} to {to} over {protocol:?}", self.host);
        let mut result = ClientResult { name, connections: 0, failures: Vec::new() };
        for request in requests.into_iter().cycle() {
            // A short job may be over before a busy machine runs this thread.
            if result.connections > 0 && done.load(Ordering::Relaxed) {
                break;
            }
            let attempts = self.agent.connect(request.clone())?;
            result.connections += attempts.len();
            let any_peer = self.tolerate_mode_changes;
            for failure in attempts.into_iter().filter_map(|attempt| failure(attempt, any_peer)) {
                let may_retry = self.tolerate_deleted_flows && request.protocol == Protocol::Udp;
                result.failures.extend(if may_retry { self.retry(&request)? } else { Some(failure) });
            }
            if self.tolerate_mode_changes {
                result.failures.extend(self.check_open_connections().err().map(|error| error.to_string()));
            }
        }
        Ok(result)
    }

    fn retry(&mut self, request: &ConnectRequest) -> Result<Option<String>> {
        let attempts = self.agent.connect(ConnectRequest { attempts: 1, ..request.clone() })?;
        Ok(attempts.into_iter().find_map(|attempt| failure(attempt, self.tolerate_mode_changes)))
    }

    fn open(&mut self, to: &str) -> Result<()> {
        self.agent.open(OPEN_CONNECTION, connect_request(to, Protocol::Tcp, false)?)
    }

    fn check_open_connections(&mut self) -> Result<()> {
        self.agent.check_open(OPEN_CONNECTION, ANSWER_TIMEOUT)
    }

    fn check_only_endpoint(&mut self, host: Host) -> Result<()> {
        for request in self.requests.clone() {
            for attempt in self.agent.connect(request)? {
                ensure!(attempt.is_answered_by(host), "{host} is the only endpoint left, but: {attempt:?}");
            }
        }
        Ok(())
    }
}

fn failure(attempt: Attempt, any_peer: bool) -> Option<String> {
    match attempt {
        Attempt::Answered(answer) if any_peer || answer.peer == answer.destination => None,
        Attempt::Answered(answer) => Some(format!("the peer is {}", answer.peer)),
        Attempt::Failed(failure) => Some(failure.to_string()),
    }
}

fn connect_request(to: &str, protocol: Protocol, unconnected: bool) -> Result<ConnectRequest> {
    // One failure decides.
    let (order, timeout) = (Order::UntilFailure, ANSWER_TIMEOUT);
    Ok(ConnectRequest { unconnected, order, timeout, ..ConnectRequest::new(to.parse()?, protocol, BATCH) })
}
