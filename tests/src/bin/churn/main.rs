//! The churn test: clients outside and pods connect all the time, while endpoints change and the
//! proxy is killed and restarted. No connection that had an endpoint may be refused, lost or moved.
//! Then, in the ebpf mode, the map sizes change, and at the end the proxy cleans up.

mod leftovers;
mod load;
mod phases;
mod soak;
mod switches;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    process,
    runner::{LinkFlags, Manifests, Proxy},
    small_cluster::{NODE, Slices, WEB_PORT},
    world::{Host, World},
};

use self::{
    leftovers::KernelState,
    load::{Client, Counts},
};

/// Makes connections while endpoints change ten times a second and the proxy is killed every two
/// seconds. Needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The mode of the proxy.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    #[command(flatten)]
    links: LinkFlags,
    /// The total number of connections.
    #[arg(long, default_value_t = 5000)]
    connections: usize,
    /// How often each switch of the ebpf mode is made.
    #[arg(long, default_value_t = 2)]
    switches: usize,
    /// Skip what comes before the switches.
    #[arg(long)]
    only_switches: bool,
    /// Run the soak test for this many minutes instead.
    #[arg(long, value_name = "MINUTES")]
    soak: Option<u64>,
    /// The seed for the order of what the soak test does [default: random].
    #[arg(long)]
    seed: Option<u64>,
    /// Let only those things happen in the soak test whose name contains this text.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
}

/// One check.
struct Check {
    name: String,
    /// The failures. Empty if the check passed.
    failures: Vec<String>,
}

/// The world with the proxy and the clients.
struct ChurnTest {
    // Declared before the world, so that the process ends before its namespace is removed.
    proxy: Proxy,
    clients: Vec<Client>,
    world: World,
    manifests: Manifests,
    mode: String,
    /// What netfilter, tc and BPF showed before the proxy started.
    before: KernelState,
}

fn main() -> ExitCode {
    process::main("churn", || {
        let arguments = Arguments::parse();
        let checks = match arguments.soak {
            Some(minutes) => soak::run(&arguments, minutes),
            None => run(&arguments),
        };
        checks.map(|checks| report(&checks))
    })
}

/// Prints the checks. Returns true if all passed.
fn report(checks: &[Check]) -> bool {
    for Check { name, failures } in checks {
        println!("{:<8}{name}", if failures.is_empty() { "PASS" } else { "FAIL" });
        failures.iter().take(5).for_each(|failure| println!("    {failure}"));
    }
    let failed = checks.iter().filter(|check| !check.failures.is_empty()).count();
    println!("{} passed, {failed} failed", checks.len() - failed);
    failed == 0
}

fn run(arguments: &Arguments) -> Result<Vec<Check>> {
    let mut test = build(arguments)?;
    let checks = test.all_phases(arguments);
    if checks.as_ref().map_or(true, |checks| checks.iter().any(|check| !check.failures.is_empty())) {
        eprintln!("the end of the proxy's log:\n{}", test.proxy.log_tail(20));
    }
    checks
}

fn build(arguments: &Arguments) -> Result<ChurnTest> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&Host::ALL, &std::env::current_exe()?)?;
    arguments.links.prepare(&mut world)?;
    // The socket programs see the connections of one pod, and not those of the other, which needs
    // the link programs.
    world.move_out_of_cgroup(Host::A2)?;
    let before = KernelState::read(&world)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("web.yaml", include_str!("web.yaml"))?;
    set_endpoints(&manifests, phases::ENDPOINT_SETS[0])?;
    let mut proxy = Proxy::new(Host::Node1, &world, &shunt, &arguments.mode, &manifests, &Mapping::new())?;
    arguments.links.set(&mut proxy);
    let clients = load::clients(&mut world)?;
    Ok(ChurnTest { proxy, clients, world, manifests, mode: arguments.mode.clone(), before })
}

fn set_endpoints(manifests: &Manifests, hosts: &[Host]) -> Result<()> {
    web_slices(hosts).place(manifests)
}

/// Returns the EndpointSlices of the Service whose endpoints change.
fn web_slices(hosts: &[Host]) -> Slices {
    let mut slices = Slices::default();
    for is_v6 in [false, true] {
        slices.add("web", is_v6, WEB_PORT, hosts);
    }
    slices
}

impl Check {
    fn new(name: impl Into<String>, failures: Vec<String>) -> Self {
        Self { name: name.into(), failures }
    }

    fn of_load(name: &str, counts: &Counts) -> Self {
        Self::new(format!("{name}: {counts}"), counts.failures.clone())
    }
}
