//! Kills the proxy at any moment, again and again, while connections are made all the time: none may fail.

use std::{path::PathBuf, process::ExitCode, thread, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    process,
    runner::{Manifests, Proxy},
    small_cluster::{HOSTS, NODE, SERVICES, Slices},
    traffic::{Clients, Load},
    world::{Host, World},
};

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

fn report(loads: &[Load]) -> bool {
    let all_well = Load::report(loads);
    let failed = loads.iter().filter(|load| !load.failures.is_empty()).count();
    println!("{} passed, {failed} failed", loads.len() - failed);
    all_well
}

fn run(arguments: &Arguments) -> Result<Vec<Load>> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&HOSTS, &std::env::current_exe()?)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
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
    let mut clients = Clients::take(world)?;
    let loads = clients.dial_while(|| kill_again_and_again(world, proxy, manifests, kills))?;
    proxy.start(world)?;
    clients.ensure_held()?;
    clients.ensure_only(Host::A3)?;
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

fn set_endpoints(manifests: &Manifests, pods: &[Host]) -> Result<()> {
    Slices::of_all(pods).place(manifests)
}
