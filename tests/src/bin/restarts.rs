//! Kills the proxy at any moment, again and again, while connections are made all the time: none may fail.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::{
        Agent,
        protocol::{Dial, Order, Protocol, Send, Try},
    },
    process,
    runner::{Manifests, Proxy},
    small_cluster::{CLUSTER_IP, DNS_PORT, HOSTS, NODE, NODE_PORT, Slices, WEB_PORT},
    world::{Host, World},
};

const DNS: &str = "10.96.0.53:53";
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
const BATCH: usize = 50;
const HELD: &str = "held";

/// Kills and restarts the proxy under a load of connections from pods and the node; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's mode.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The proxy's binary.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// How often to kill it.
    #[arg(long, default_value_t = 60)]
    kills: u32,
}

fn main() -> ExitCode {
    process::main("restarts", || run(&Arguments::parse()).map(|loads| report(&loads)))
}

/// Whether nothing failed.
fn report(loads: &[Load]) -> bool {
    for load in loads {
        println!("{}: {} connections, {} failed", load.name, load.connections, load.failures.len());
        load.failures.iter().take(3).for_each(|failure| println!("    {failure}"));
    }
    let failed = loads.iter().filter(|load| !load.failures.is_empty()).count();
    println!("{} passed, {failed} failed", loads.len() - failed);
    failed == 0
}

/// What one client saw.
struct Load {
    name: String,
    connections: usize,
    failures: Vec<String>,
}

fn run(arguments: &Arguments) -> Result<Vec<Load>> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&HOSTS, &std::env::current_exe()?)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", include_str!("restarts.yaml"))?;
    set_endpoints(&manifests, &[Host::A1, Host::A2])?;
    let mut proxy = Proxy::new(&world, &shunt, &arguments.mode, &manifests, &Mapping::new())?;
    proxy.start(&mut world)?;
    let loads = kill_under_load(&mut world, &mut proxy, &manifests, arguments.kills);
    if loads.is_err() {
        eprintln!("the end of the proxy's log:\n{}", proxy.log_tail(20));
    }
    let loads = loads?;
    proxy.stop()?;
    proxy.clean_up(&world)?;
    Ok(loads)
}

fn kill_under_load(
    world: &mut World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    kills: u32,
) -> Result<Vec<Load>> {
    let mut clients = [
        Client::new(world, Host::A1, dial(CLUSTER_IP, Protocol::Tcp, false)?)?,
        Client::new(world, Host::A2, dial(NODE_PORT, Protocol::Tcp, false)?)?,
        Client::new(world, Host::A3, dial(DNS, Protocol::Udp, true)?)?,
    ];
    for client in &mut clients {
        client.hold()?;
    }
    let done = AtomicBool::new(false);
    let loads = thread::scope(|scope| {
        let running: Vec<_> = clients.iter_mut().map(|client| scope.spawn(|| client.load(&done))).collect();
        let killed = kill_again_and_again(world, proxy, manifests, kills);
        done.store(true, Ordering::Relaxed);
        let loads: Result<Vec<Load>> = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        killed.and(loads)
    })?;
    proxy.start(world)?;
    for client in &mut clients {
        client.ensure_held()?;
    }
    clients[0].ensure_only(Host::A3)?;
    Ok(loads)
}

/// Kills it after a time that differs each round: while it loads its programs, reads the manifests, writes maps, replaces
/// programs, and while it runs. What is served changes each round too, in the end to a3 alone.
fn kill_again_and_again(world: &World, proxy: &mut Proxy, manifests: &Manifests, kills: u32) -> Result<()> {
    let served = [&[Host::A1, Host::A2][..], &[Host::A2, Host::A3], &[Host::A1, Host::A3]];
    for round in 0..kills {
        proxy.kill()?;
        set_endpoints(manifests, served[round as usize % served.len()])?;
        proxy.spawn(world)?;
        thread::sleep(Duration::from_millis(u64::from(round * 7 % 120)));
    }
    proxy.kill()?;
    set_endpoints(manifests, &[Host::A3])
}

/// A pod that dials one address, over and over.
struct Client {
    host: Host,
    dial: Dial,
    agent: Agent,
}

impl Client {
    fn new(world: &mut World, host: Host, dial: Dial) -> Result<Self> {
        Ok(Self { host, dial, agent: world.lend_agent(host)? })
    }

    fn load(&mut self, done: &AtomicBool) -> Result<Load> {
        let name = format!("{} to {}", self.host, self.dial.to);
        let mut load = Load { name, connections: 0, failures: Vec::new() };
        while !done.load(Ordering::Relaxed) {
            let tries = self.agent.dial(self.dial.clone())?;
            load.connections += tries.len();
            load.failures.extend(tries.into_iter().filter_map(failure));
        }
        Ok(load)
    }

    fn hold(&mut self) -> Result<()> {
        let held = Dial { hold: Some(HELD.into()), tries: 1, ..dial(CLUSTER_IP, Protocol::Tcp, false)? };
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
        for one in self.agent.dial(self.dial.clone())? {
            let is_right = matches!(&one, Try::Answered(answer) if answer.host == host.name());
            ensure!(is_right, "{host} is the only endpoint left, and not what this reached: {one:?}");
        }
        Ok(())
    }
}

fn failure(one: Try) -> Option<String> {
    match one {
        Try::Answered(answer) if answer.reported == answer.dialled => None,
        Try::Answered(answer) => Some(format!("the peer is {}", answer.reported)),
        Try::Failed(failure) => Some(format!("{}: {}", failure.doing, failure.message)),
    }
}

fn dial(to: &str, protocol: Protocol, unconnected: bool) -> Result<Dial> {
    let order = Order::InSequence;
    let timeout = ANSWERED_WITHIN;
    Ok(Dial { unconnected, order, timeout, ..Dial::new(to.parse()?, protocol, BATCH) })
}

fn set_endpoints(manifests: &Manifests, pods: &[Host]) -> Result<()> {
    let mut slices = Slices::default();
    slices.add("web", false, WEB_PORT, pods);
    slices.add("dns", false, DNS_PORT, pods);
    slices.place(manifests)
}
