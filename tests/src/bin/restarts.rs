//! Kills the proxy at any moment, again and again, while connections are made and used all the time: none may fail. With
//! several modes it starts in another one each time, and is given the time to take over.

use std::{path::PathBuf, process::ExitCode, thread, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    process,
    runner::{Manifests, Proxy},
    small_cluster::{DNS_PORT, HOSTS, NODE, OUTSIDE, SERVICES, Slices},
    traffic::{ClientResult, Clients},
    world::{Host, World},
};

/// From its start in another mode.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Kills and restarts the proxy under a load of connections from pods and the node; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's modes, taken in turn.
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', default_value = "ebpf")]
    mode: Vec<String>,
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

fn report(loads: &[ClientResult]) -> bool {
    let all_well = ClientResult::report(loads);
    let failed = loads.iter().filter(|load| !load.failures.is_empty()).count();
    println!("{} passed, {failed} failed", loads.len() - failed);
    all_well
}

fn run(arguments: &Arguments) -> Result<Vec<ClientResult>> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&HOSTS, &std::env::current_exe()?)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
    manifests.place("outside.yaml", OUTSIDE)?;
    set_endpoints(&manifests, &[Host::A1, Host::A2])?;
    let modes = &arguments.mode;
    let mode = modes.first().context("--mode names none")?;
    let mut proxy = Proxy::new(&world, &shunt, mode, &manifests, &Mapping::new())?;
    if modes.len() > 1 {
        // What it dials is translated on links.
        world.move_out_of_cgroup(Host::A2)?;
    }
    proxy.start(&mut world)?;
    let loads = kill_under_load(&mut world, &mut proxy, &manifests, arguments);
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
    arguments: &Arguments,
) -> Result<Vec<ClientResult>> {
    let mut clients = Clients::from_world(world)?;
    // Modes that translate in netfilter have conntrack forget a conversation whose endpoint leaves.
    if arguments.mode == ["ebpf"] {
        clients = clients.with_udp_from_outside(world)?;
    } else {
        clients.tolerate_deleted_flows();
    }
    if arguments.mode.len() > 1 {
        clients.tolerate_mode_changes();
    }
    let loads = clients.connect_during(|| kill_again_and_again(world, proxy, manifests, arguments))?;
    proxy.start(world)?;
    clients.check_open_connections()?;
    clients.check_only_endpoint(Host::A3)?;
    Ok(loads)
}

/// Kills it after a time that differs each round: while it loads its programs, reads the manifests, writes maps, replaces
/// programs, and while it runs. What is served changes each round too, in the end to a3 alone.
fn kill_again_and_again(
    world: &World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    Arguments { mode: modes, kills, .. }: &Arguments,
) -> Result<()> {
    let served = [&[Host::A1, Host::A2][..], &[Host::A2, Host::A3], &[Host::A1, Host::A3]];
    for (round, mode) in (0..*kills).zip(modes.iter().cycle().skip(1)) {
        proxy.kill()?;
        set_endpoints(manifests, served[round as usize % served.len()])?;
        let mut pause = Duration::from_millis(u64::from(round * 7 % 120));
        if modes.len() > 1 {
            proxy.set_mode(mode, &Mapping::new())?;
            pause += TAKEOVER_TIMEOUT;
        }
        proxy.spawn(world)?;
        thread::sleep(pause);
    }
    proxy.kill()?;
    set_endpoints(manifests, &[Host::A3])
}

fn set_endpoints(manifests: &Manifests, pods: &[Host]) -> Result<()> {
    let mut slices = Slices::for_all_services(pods);
    slices.add("outside", false, DNS_PORT, pods);
    slices.place(manifests)
}
