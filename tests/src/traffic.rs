//! Clients that dial all the time, from pods: while something is done to the proxy, no connection may fail.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    agent::{
        Agent,
        protocol::{Attempt, ConnectRequest, Order, Protocol, SendRequest},
    },
    small_cluster::{CLUSTER_IP, DNS, NODE_PORT, NODE_PORT_UDP},
    world::{Host, World},
};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const BATCH: usize = 50;
const HELD: &str = "held";

/// What one client saw.
pub struct ClientResult {
    /// Which client connected to which destination.
    pub name: String,
    /// How many connections were made.
    pub connections: usize,
    /// What went wrong.
    pub failures: Vec<String>,
}

impl ClientResult {
    /// Whether nothing failed; prints how it went.
    pub fn report(loads: &[Self]) -> bool {
        for load in loads {
            println!("{}: {} connections, {} failed", load.name, load.connections, load.failures.len());
            load.failures.iter().take(3).for_each(|failure| println!("    {failure}"));
        }
        loads.iter().all(|load| load.failures.is_empty() && load.connections > 0)
    }
}

/// Of a client that sends datagrams over and over: one conversation that goes on.
const SOURCE_PORT: u16 = 20_000;
/// A datagram is lost, however slow the machine is.
const LOST_AFTER: Duration = Duration::from_secs(20);

/// Three pods of node1: one dials a cluster IP, one a node port, one sends UDP. Each holds a connection besides.
pub struct Clients(Vec<Client>);

impl Clients {
    /// Takes the pods out of the world, for use beside it.
    pub fn from_world(world: &mut World) -> Result<Self> {
        let mut clients = vec![
            Client::new(world, Host::A1, vec![connect_request(CLUSTER_IP, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A2, vec![connect_request(NODE_PORT, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A3, vec![connect_request(DNS, Protocol::Udp, true)?])?,
        ];
        clients.iter_mut().try_for_each(Client::hold)?;
        Ok(Self(clients))
    }

    /// With a host outside the cluster, that sends datagrams to a node port: conversations that begin, and one that goes on. Nothing
    /// is sent twice, so that each datagram counts.
    pub fn with_udp_from_outside(mut self, world: &mut World) -> Result<Self> {
        let begin =
            ConnectRequest { timeout: LOST_AFTER, ..connect_request(NODE_PORT_UDP, Protocol::Udp, true)? };
        let go_on = ConnectRequest { source_port: Some(SOURCE_PORT), ..begin.clone() };
        let mut outside = Client::new(world, Host::Client, vec![begin, go_on])?;
        outside.hold_to(NODE_PORT)?;
        self.0.push(outside);
        Ok(self)
    }

    /// Conntrack will forget conversations whose endpoint leaves, answers under way included: a datagram whose answer is not
    /// translated back is sent once more, from another socket.
    pub fn tolerate_deleted_flows(&mut self) {
        self.0.iter_mut().for_each(|client| client.tolerate_deleted_flows = true);
    }

    /// Modes will change: programs that go take along what a socket says of its peer, and what is held must live on all the while.
    pub fn tolerate_mode_changes(&mut self) {
        self.0.iter_mut().for_each(|client| client.tolerate_mode_changes = true);
    }

    /// Has all dial while something is done.
    pub fn connect_during(&mut self, job: impl FnOnce() -> Result<()>) -> Result<Vec<ClientResult>> {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let running: Vec<_> =
                self.0.iter_mut().map(|client| scope.spawn(|| client.load(&done))).collect();
            let ended = job();
            done.store(true, Ordering::Relaxed);
            let loads: Result<Vec<ClientResult>> = running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            ended.and(loads)
        })
    }

    /// The connections that were held from the beginning still work.
    pub fn check_open_connections(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(Client::check_open_connections)
    }

    /// New connections reach this host alone.
    pub fn check_only_endpoint(&mut self, host: Host) -> Result<()> {
        self.0.iter_mut().take(1).try_for_each(|client| client.check_only_endpoint(host))
    }
}

/// A host that dials one address, over and over.
struct Client {
    host: Host,
    /// In turn.
    dials: Vec<ConnectRequest>,
    agent: Agent,
    tolerate_mode_changes: bool,
    tolerate_deleted_flows: bool,
}

impl Client {
    fn new(world: &mut World, host: Host, dials: Vec<ConnectRequest>) -> Result<Self> {
        let agent = world.take_agent(host)?;
        Ok(Self { host, dials, agent, tolerate_mode_changes: false, tolerate_deleted_flows: false })
    }

    fn load(&mut self, done: &AtomicBool) -> Result<ClientResult> {
        let dials = self.dials.clone();
        let ConnectRequest { to, protocol, .. } = dials.first().context("the client has no request")?;
        let name = format!("{} to {to} over {protocol:?}", self.host);
        let mut load = ClientResult { name, connections: 0, failures: Vec::new() };
        for request in dials.into_iter().cycle() {
            if done.load(Ordering::Relaxed) {
                break;
            }
            let attempts = self.agent.connect(request.clone())?;
            load.connections += attempts.len();
            let any_peer = self.tolerate_mode_changes;
            for failed in attempts.into_iter().filter_map(|one| failure(one, any_peer)) {
                let is_asked_again = self.tolerate_deleted_flows && request.protocol == Protocol::Udp;
                let failed = if is_asked_again { self.ask_again(&request)? } else { Some(failed) };
                load.failures.extend(failed);
            }
            if self.tolerate_mode_changes {
                load.failures.extend(self.check_open_connections().err().map(|error| error.to_string()));
            }
        }
        Ok(load)
    }

    fn ask_again(&mut self, request: &ConnectRequest) -> Result<Option<String>> {
        let attempts = self.agent.connect(ConnectRequest { attempts: 1, ..request.clone() })?;
        Ok(attempts.into_iter().find_map(|one| failure(one, self.tolerate_mode_changes)))
    }

    fn hold(&mut self) -> Result<()> {
        self.hold_to(CLUSTER_IP)
    }

    fn hold_to(&mut self, to: &str) -> Result<()> {
        let held = ConnectRequest {
            hold: Some(HELD.into()),
            attempts: 1,
            ..connect_request(to, Protocol::Tcp, false)?
        };
        let attempts = self.agent.connect(held)?;
        ensure!(matches!(attempts[..], [Attempt::Answered(_)]), "the first connection fails: {attempts:?}");
        Ok(())
    }

    fn check_open_connections(&mut self) -> Result<()> {
        let send = SendRequest { id: HELD.into(), size: 1, answer: 0, timeout: ANSWER_TIMEOUT };
        let answer = self.agent.send(send)?;
        ensure!(matches!(answer, Attempt::Answered(_)), "an established connection has ended: {answer:?}");
        Ok(())
    }

    fn check_only_endpoint(&mut self, host: Host) -> Result<()> {
        for request in self.dials.clone() {
            for one in self.agent.connect(request)? {
                let is_right = matches!(&one, Attempt::Answered(answer) if answer.host == host.name());
                ensure!(is_right, "{host} is the only endpoint left, and not what this reached: {one:?}");
            }
        }
        Ok(())
    }
}

fn failure(one: Attempt, any_peer: bool) -> Option<String> {
    match one {
        Attempt::Answered(answer) if any_peer || answer.peer == answer.destination => None,
        Attempt::Answered(answer) => Some(format!("the peer is {}", answer.peer)),
        Attempt::Failed(failure) => Some(format!("{}: {}", failure.operation, failure.message)),
    }
}

fn connect_request(to: &str, protocol: Protocol, unconnected: bool) -> Result<ConnectRequest> {
    let order = Order::Sequential;
    let timeout = ANSWER_TIMEOUT;
    Ok(ConnectRequest { unconnected, order, timeout, ..ConnectRequest::new(to.parse()?, protocol, BATCH) })
}
