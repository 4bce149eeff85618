//! Connections from outside and from pods, all the time, while endpoints come and go and the proxy is killed and started
//! again: none that had an endpoint to go to may be refused, lost or moved. Then other map sizes, where there are maps, and
//! the removal of all.

mod leftovers;
mod load;
mod phases;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    process,
    runner::{Manifests, Proxy},
    small_cluster::{NODE, Slices, WEB_PORT},
    world::{Host, World},
};

use self::{
    leftovers::KernelState,
    load::{Client, Counts},
};

/// Makes connections while endpoints change ten times a second and the proxy is killed every two seconds; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The proxy's mode.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The proxy's binary.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// How many connections to make in all.
    #[arg(long, default_value_t = 5000)]
    connections: usize,
}

/// One thing that must hold.
struct Check {
    name: String,
    /// What is wrong; none if it holds.
    wrong: Vec<String>,
}

/// The world with the proxy in it.
struct ChurnTest {
    // Goes before the world: the process ends before its namespace does.
    proxy: Proxy,
    clients: Vec<Client>,
    world: World,
    manifests: Manifests,
    mode: String,
    /// What netfilter, tc and BPF showed before the proxy was there.
    before: KernelState,
}

fn main() -> ExitCode {
    process::main("churn", || run(&Arguments::parse()).map(|checks| report(&checks)))
}

/// Whether everything held.
fn report(checks: &[Check]) -> bool {
    for Check { name, wrong } in checks {
        println!("{:<8}{name}", if wrong.is_empty() { "PASS" } else { "FAIL" });
        wrong.iter().take(5).for_each(|what| println!("    {what}"));
    }
    let failed = checks.iter().filter(|check| !check.wrong.is_empty()).count();
    println!("{} passed, {failed} failed", checks.len() - failed);
    failed == 0
}

fn run(arguments: &Arguments) -> Result<Vec<Check>> {
    let mut scene = build(arguments)?;
    let checks = scene.all_phases(arguments.connections);
    if checks.as_ref().map_or(true, |checks| checks.iter().any(|check| !check.wrong.is_empty())) {
        eprintln!("the end of the proxy's log:\n{}", scene.proxy.log_tail(20));
    }
    checks
}

fn build(arguments: &Arguments) -> Result<ChurnTest> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&Host::ALL, &std::env::current_exe()?)?;
    // One pod whose connections are seen by the hooks of sockets, and one whose packets have to do.
    world.move_out_of_cgroup(Host::A2)?;
    let before = KernelState::read(&world)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("web.yaml", include_str!("web.yaml"))?;
    set_endpoints(&manifests, phases::SERVED[0])?;
    let proxy = Proxy::new(&world, &shunt, &arguments.mode, &manifests, &Mapping::new())?;
    let clients = load::clients(&mut world)?;
    Ok(ChurnTest { proxy, clients, world, manifests, mode: arguments.mode.clone(), before })
}

fn set_endpoints(manifests: &Manifests, hosts: &[Host]) -> Result<()> {
    let mut slices = Slices::default();
    for is_v6 in [false, true] {
        slices.add("web", is_v6, WEB_PORT, hosts);
    }
    slices.place(manifests)
}

impl Check {
    fn new(name: impl Into<String>, wrong: Vec<String>) -> Self {
        Self { name: name.into(), wrong }
    }

    fn of_load(name: &str, counts: &Counts) -> Self {
        Self::new(format!("{name}: {counts}"), counts.examples.clone())
    }
}
