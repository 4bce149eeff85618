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
        protocol::{Dial, Order, Protocol, Send, Try},
    },
    small_cluster::{CLUSTER_IP, DNS, NODE_PORT, NODE_PORT_UDP},
    world::{Host, World},
};

const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
const BATCH: usize = 50;
const HELD: &str = "held";

/// What one client saw.
pub struct Load {
    /// Which client connected to which destination.
    pub name: String,
    /// How many connections were made.
    pub connections: usize,
    /// What went wrong.
    pub failures: Vec<String>,
}

impl Load {
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
    pub fn take(world: &mut World) -> Result<Self> {
        let mut clients = vec![
            Client::new(world, Host::A1, vec![dial(CLUSTER_IP, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A2, vec![dial(NODE_PORT, Protocol::Tcp, false)?])?,
            Client::new(world, Host::A3, vec![dial(DNS, Protocol::Udp, true)?])?,
        ];
        clients.iter_mut().try_for_each(Client::hold)?;
        Ok(Self(clients))
    }

    /// With a host outside the cluster, that sends datagrams to a node port: conversations that begin, and one that goes on. Nothing
    /// is sent twice, so that each datagram counts.
    pub fn with_udp_from_outside(mut self, world: &mut World) -> Result<Self> {
        let begin = Dial { timeout: LOST_AFTER, ..dial(NODE_PORT_UDP, Protocol::Udp, true)? };
        let go_on = Dial { source_port: Some(SOURCE_PORT), ..begin.clone() };
        let mut outside = Client::new(world, Host::Client, vec![begin, go_on])?;
        outside.hold_to(NODE_PORT)?;
        self.0.push(outside);
        Ok(self)
    }

    /// Conntrack will forget conversations whose endpoint leaves, answers under way included: a datagram whose answer is not
    /// translated back is sent once more, from another socket.
    pub fn flows_are_forgotten(&mut self) {
        self.0.iter_mut().for_each(|client| client.flows_are_forgotten = true);
    }

    /// Modes will change: programs that go take along what a socket says of its peer, and what is held must live on all the while.
    pub fn modes_change(&mut self) {
        self.0.iter_mut().for_each(|client| client.modes_change = true);
    }

    /// Has all dial while something is done.
    pub fn dial_while(&mut self, job: impl FnOnce() -> Result<()>) -> Result<Vec<Load>> {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let running: Vec<_> =
                self.0.iter_mut().map(|client| scope.spawn(|| client.load(&done))).collect();
            let ended = job();
            done.store(true, Ordering::Relaxed);
            let loads: Result<Vec<Load>> = running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            ended.and(loads)
        })
    }

    /// The connections that were held from the beginning still work.
    pub fn ensure_held(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(Client::ensure_held)
    }

    /// New connections reach this host alone.
    pub fn ensure_only(&mut self, host: Host) -> Result<()> {
        self.0.iter_mut().take(1).try_for_each(|client| client.ensure_only(host))
    }
}

/// A host that dials one address, over and over.
struct Client {
    host: Host,
    /// In turn.
    dials: Vec<Dial>,
    agent: Agent,
    modes_change: bool,
    flows_are_forgotten: bool,
}

impl Client {
    fn new(world: &mut World, host: Host, dials: Vec<Dial>) -> Result<Self> {
        let agent = world.lend_agent(host)?;
        Ok(Self { host, dials, agent, modes_change: false, flows_are_forgotten: false })
    }

    fn load(&mut self, done: &AtomicBool) -> Result<Load> {
        let dials = self.dials.clone();
        let Dial { to, protocol, .. } = dials.first().context("nothing to dial")?;
        let name = format!("{} to {to} over {protocol:?}", self.host);
        let mut load = Load { name, connections: 0, failures: Vec::new() };
        for dial in dials.into_iter().cycle() {
            if done.load(Ordering::Relaxed) {
                break;
            }
            let tries = self.agent.dial(dial.clone())?;
            load.connections += tries.len();
            let any_peer = self.modes_change;
            for failed in tries.into_iter().filter_map(|one| failure(one, any_peer)) {
                let is_asked_again = self.flows_are_forgotten && dial.protocol == Protocol::Udp;
                let failed = if is_asked_again { self.ask_again(&dial)? } else { Some(failed) };
                load.failures.extend(failed);
            }
            if self.modes_change {
                load.failures.extend(self.ensure_held().err().map(|error| error.to_string()));
            }
        }
        Ok(load)
    }

    fn ask_again(&mut self, dial: &Dial) -> Result<Option<String>> {
        let tries = self.agent.dial(Dial { tries: 1, ..dial.clone() })?;
        Ok(tries.into_iter().find_map(|one| failure(one, self.modes_change)))
    }

    fn hold(&mut self) -> Result<()> {
        self.hold_to(CLUSTER_IP)
    }

    fn hold_to(&mut self, to: &str) -> Result<()> {
        let held = Dial { hold: Some(HELD.into()), tries: 1, ..dial(to, Protocol::Tcp, false)? };
        let tries = self.agent.dial(held)?;
        ensure!(matches!(tries[..], [Try::Answered(_)]), "the first connection fails: {tries:?}");
        Ok(())
    }

    fn ensure_held(&mut self) -> Result<()> {
        let send = Send { id: HELD.into(), size: 1, answer: 0, timeout: ANSWERED_WITHIN };
        let answer = self.agent.send(send)?;
        ensure!(matches!(answer, Try::Answered(_)), "an established connection has ended: {answer:?}");
        Ok(())
    }

    fn ensure_only(&mut self, host: Host) -> Result<()> {
        for dial in self.dials.clone() {
            for one in self.agent.dial(dial)? {
                let is_right = matches!(&one, Try::Answered(answer) if answer.host == host.name());
                ensure!(is_right, "{host} is the only endpoint left, and not what this reached: {one:?}");
            }
        }
        Ok(())
    }
}

fn failure(one: Try, any_peer: bool) -> Option<String> {
    match one {
        Try::Answered(answer) if any_peer || answer.reported == answer.destination => None,
        Try::Answered(answer) => Some(format!("the peer is {}", answer.reported)),
        Try::Failed(failure) => Some(format!("{}: {}", failure.doing, failure.message)),
    }
}

fn dial(to: &str, protocol: Protocol, unconnected: bool) -> Result<Dial> {
    let order = Order::InSequence;
    let timeout = ANSWERED_WITHIN;
    Ok(Dial { unconnected, order, timeout, ..Dial::new(to.parse()?, protocol, BATCH) })
}
