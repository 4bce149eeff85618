//! The restart test: kills the proxy repeatedly at different moments while clients connect. No
//! connection may fail. With several modes, the proxy starts in another mode each time and gets
//! time to take over.

use std::{collections::BTreeSet, path::PathBuf, process::ExitCode, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use serde_yaml_ng::Mapping;
use shunt_tests::{
    deadline::Deadline,
    process,
    runner::{LinkFlags, Manifests, Proxy},
    small_cluster::{DNS_PORT, HOSTS, NODE, OUTSIDE, SERVICES, Slices},
    traffic::{ClientResult, Clients},
    world::{Host, World},
};

/// The time from the start in another mode until the takeover.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings of `--ebpf-log`, in turn: the first program that is loaded with another setting
/// replaces that of the process before. Otherwise programs are used again.
const EBPF_LOGS: [&str; 4] = ["off", "off", "error", "error"];

const EBPF: &str = "ebpf";

/// In one of so many rounds, the process lives until it has replaced the XDP program: [`EBPF_LOGS`]
/// has another setting than for the last such round.
const XDP_TURN: u32 = 6;
/// The longest time that this takes.
const XDP_TIMEOUT: Duration = Duration::from_secs(30);

/// Kills and restarts the proxy while pods and the node connect. Needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// The modes of the proxy, in turn.
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', default_value = EBPF)]
    mode: Vec<String>,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    #[command(flatten)]
    links: LinkFlags,
    /// How often to kill the proxy.
    #[arg(long, default_value_t = 60)]
    kills: u32,
}

fn main() -> ExitCode {
    process::main("restarts", || run(&Arguments::parse()).map(|results| report(&results)))
}

fn report(results: &[ClientResult]) -> bool {
    let all_passed = ClientResult::report(results);
    let failed = results.iter().filter(|load| !load.failures.is_empty()).count();
    println!("{} passed, {failed} failed", results.len() - failed);
    all_passed
}

fn run(arguments: &Arguments) -> Result<Vec<ClientResult>> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let is_ebpf = arguments.mode == [EBPF];
    ensure!(
        is_ebpf || !arguments.links.has_xdp(),
        "--links-xdp needs --mode ebpf alone: other modes have no XDP"
    );
    let hosts = if arguments.links.has_xdp() { &Host::ALL[..] } else { &HOSTS };
    let mut world = World::build(hosts, &std::env::current_exe()?)?;
    arguments.links.prepare(&mut world)?;
    let manifests = Manifests::create(world.directory())?;
    manifests.place("node.yaml", NODE)?;
    manifests.place("services.yaml", SERVICES)?;
    manifests.place("outside.yaml", OUTSIDE)?;
    set_endpoints(&manifests, arguments.endpoint_sets()[0])?;
    let modes = &arguments.mode;
    let mode = modes.first().context("--mode is empty")?;
    let mut proxy = Proxy::new(Host::Node1, &world, &shunt, mode, &manifests, &Mapping::new())?;
    if modes.len() > 1 {
        // The link programs translate the connections of a2.
        world.move_out_of_cgroup(Host::A2)?;
    }
    arguments.links.set(&mut proxy);
    proxy.start(&mut world)?;
    let results = kill_under_load(&mut world, &mut proxy, &manifests, arguments);
    if results.is_err() {
        eprintln!("the end of the proxy's log:\n{}", proxy.log_tail(20));
    }
    let results = results?;
    proxy.stop()?;
    proxy.clean_up(&world)?;
    Ok(results)
}

fn kill_under_load(
    world: &mut World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    arguments: &Arguments,
) -> Result<Vec<ClientResult>> {
    let mut clients = Clients::from_world(world)?;
    let is_ebpf = arguments.mode == [EBPF];
    if is_ebpf {
        clients = clients.with_udp_from_outside(world)?;
    }
    // Netfilter deletes the conntrack entries of a conversation whose endpoint leaves.
    if !is_ebpf || arguments.links.links_path.as_deref() == Some("netfilter") {
        clients.tolerate_deleted_flows();
    }
    if arguments.mode.len() > 1 {
        clients.tolerate_mode_changes();
    }
    let results = clients.connect_during(|| kill_repeatedly(world, proxy, manifests, arguments))?;
    proxy.start(world)?;
    clients.check_open_connections()?;
    clients.check_only_endpoint(Host::A3)?;
    if arguments.links.has_xdp() {
        // The counts survive all restarts.
        let sent = proxy.sent_before_stack(world)?;
        println!("{sent} packets left before the stack");
        ensure!(sent > 0, "no packet left before the stack");
    }
    Ok(results)
}

impl Arguments {
    /// Returns the endpoints of the Services, in turn. XDP sends on only what leaves the node.
    fn endpoint_sets(&self) -> [&'static [Host]; 3] {
        if self.links.has_xdp() {
            [&[Host::A1, Host::B1], &[Host::B1, Host::B2], &[Host::A1, Host::B2]]
        } else {
            [&[Host::A1, Host::A2], &[Host::A2, Host::A3], &[Host::A1, Host::A3]]
        }
    }
}

/// Kills the proxy after a pause that differs in each round: while it loads programs, reads
/// manifests, writes maps, replaces programs, and while it runs. The endpoints change in each
/// round. At the end, a3 is the only one.
fn kill_repeatedly(
    world: &World,
    proxy: &mut Proxy,
    manifests: &Manifests,
    arguments: &Arguments,
) -> Result<()> {
    let Arguments { mode: modes, kills, .. } = arguments;
    let endpoint_sets = arguments.endpoint_sets();
    let mut xdp_programs = BTreeSet::new();
    if arguments.links.has_xdp() {
        xdp_programs.insert(xdp_program(world)?);
    }
    for (round, mode) in (0..*kills).zip(modes.iter().cycle().skip(1)) {
        proxy.kill()?;
        set_endpoints(manifests, endpoint_sets[round as usize % endpoint_sets.len()])?;
        let mut pause = Duration::from_millis(u64::from(round * 7 % 120));
        if modes.len() > 1 {
            proxy.set_mode(mode, &Mapping::new())?;
            pause += TAKEOVER_TIMEOUT;
        }
        proxy.set_flag("--ebpf-log", EBPF_LOGS[round as usize % EBPF_LOGS.len()]);
        proxy.spawn(world)?;
        thread::sleep(pause);
        if arguments.links.has_xdp() && round > XDP_TURN && round % XDP_TURN == 1 {
            wait_for_another_xdp_program(world, &mut xdp_programs)?;
        }
    }
    if arguments.links.has_xdp() {
        println!("{} XDP programs, each in place of the one before", xdp_programs.len());
    }
    proxy.kill()?;
    set_endpoints(manifests, &[Host::A3])
}

/// Waits until an XDP program is on the link that was not there before. The link always has one.
fn wait_for_another_xdp_program(world: &World, before: &mut BTreeSet<String>) -> Result<()> {
    let replaced = Deadline::after(XDP_TIMEOUT).try_poll(|| {
        let program = xdp_program(world)?;
        Ok::<_, anyhow::Error>(before.insert(program).then_some(()))
    })?;
    replaced.with_context(|| format!("the XDP program is not replaced within {XDP_TIMEOUT:?}: {before:?}"))
}

/// Returns the identifier of the XDP program on the link that leads out of the node. Fails if there
/// is none.
fn xdp_program(world: &World) -> Result<String> {
    world.run(Host::Node1, "ip link show eth0 | grep -oP 'prog/xdp id \\K[0-9]+'")
}

fn set_endpoints(manifests: &Manifests, pods: &[Host]) -> Result<()> {
    let mut slices = Slices::for_all_services(pods);
    slices.add("outside", false, DNS_PORT, pods);
    slices.place(manifests)
}
