//! The demo: a node and three pods made of network namespaces, a Service, and its traffic.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use aya::maps::{HashMap, Map, MapData, MapError};
use clap::Parser;
use proxy_common::{
    Protocol as ServiceProtocol,
    layout::{ServiceKey, ServiceValue},
};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol},
    deadline::{Deadline, Stopwatch},
    process,
    runner::{Manifests, Proxy},
    small_cluster::{CLUSTER_IP, HOSTS, NODE_PORT},
    world::{Host, World},
};

const LOCALHOST_NODE_PORT: &str = "127.0.0.1:30080";
const CONNECTIONS: usize = 60;
const NEW_ENDPOINT: Host = Host::A3;
const CHANGE_TIMEOUT: Duration = Duration::from_mins(1);
/// The number of endpoints of the Service with the new one.
const ENDPOINTS_AFTERWARDS: u32 = 3;
const BPFTOOL_TIMEOUT: Duration = Duration::from_secs(30);
const INSTALL_BPFTOOL: &str = "; on Debian and Ubuntu install it with: apt-get install bpftool";
/// The number of lines to show of a dump.
const DUMP_LINES: usize = 60;

/// Shows shunt at work on a small cluster made of network namespaces. Needs root, and removes
/// everything it made.
#[derive(Debug, Parser)]
struct Arguments {
    /// The mode of the proxy: ebpf, nftables, iptables or ipvs.
    #[arg(long, default_value = "ebpf")]
    mode: String,
    /// The binary of the proxy.
    #[arg(long, value_name = "PATH")]
    shunt: PathBuf,
    /// A directory of manifests. Those in its folder `later` are added during the demo.
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/demo"))]
    manifests: PathBuf,
}

struct Demo {
    // Declared before the world, so that the process ends before its namespace is removed.
    proxy: Proxy,
    world: World,
    manifests: Manifests,
}

fn main() -> ExitCode {
    process::main("demo", || run(&Arguments::parse()).map(|()| true))
}

fn run(arguments: &Arguments) -> Result<()> {
    let began = Stopwatch::start();
    let mut demo = build(arguments)?;
    let result = demo.show(arguments);
    if result.is_err() {
        println!("\nthe end of shunt's log:\n{}", indented(&demo.proxy.log_tail(20)));
    }
    result?;
    demo.clean_up()?;
    println!("Done in {:.1} s.", began.elapsed().as_secs_f32());
    Ok(())
}

fn build(arguments: &Arguments) -> Result<Demo> {
    let shunt =
        arguments.shunt.canonicalize().with_context(|| format!("--shunt {}", arguments.shunt.display()))?;
    let program = std::env::current_exe().context("find the demo's own program")?;
    heading("A small cluster");
    let stopwatch = Stopwatch::start();
    let world = World::build(&HOSTS, &program)?;
    println!("  node1   192.168.57.11   the node: shunt will run here");
    for pod in [Host::A1, Host::A2, Host::A3] {
        println!(
            "  {pod:<8}{:<16}a pod on node1",
            pod.addresses().first().map(ipnet::IpNet::addr).context("a pod without address")?
        );
    }
    println!("  client  192.168.57.50   a host outside the cluster");
    println!("  Each host is a network namespace. Creating them took {}.", milliseconds(stopwatch.elapsed()));
    let manifests = Manifests::create(world.directory())?;
    copy(&arguments.manifests, &manifests)?;
    let proxy = Proxy::new(Host::Node1, &world, &shunt, &arguments.mode, &manifests, &Mapping::new())?;
    Ok(Demo { proxy, world, manifests })
}

impl Demo {
    fn show(&mut self, arguments: &Arguments) -> Result<()> {
        heading(&format!("shunt --mode {}", arguments.mode));
        let stopwatch = Stopwatch::start();
        self.proxy.start(&mut self.world)?;
        println!("  Service default/web: cluster IP {CLUSTER_IP}, node port 30080, endpoints a1 and a2.");
        println!("  shunt had programmed it {} after its start.", milliseconds(stopwatch.elapsed()));

        heading(&format!("Answers to {CONNECTIONS} connections"));
        self.show_answers(Host::A3, CLUSTER_IP, "pod a3 to the cluster IP")?;
        self.show_answers(Host::Node1, CLUSTER_IP, "the node to the cluster IP")?;
        self.show_answers(Host::A3, NODE_PORT, "pod a3 to the node port")?;
        // Only the socket programs of the ebpf mode translate connections to 127.0.0.1 in every
        // case.
        let from_node = if arguments.mode == "ebpf" { LOCALHOST_NODE_PORT } else { NODE_PORT };
        self.show_answers(Host::Node1, from_node, "the node to the node port")?;
        self.show_answers(Host::Client, NODE_PORT, "a client outside the cluster to the node port")?;

        heading("A third endpoint");
        self.add_endpoint(&arguments.manifests.join("later"))?;
        self.show_answers(Host::A1, CLUSTER_IP, "pod a1 to the cluster IP")?;

        if arguments.mode == "ebpf" {
            heading("The services map as bpftool shows it");
            self.show_map("services");
        }
        Ok(())
    }

    fn show_answers(&mut self, from: Host, to: &str, what: &str) -> Result<()> {
        let attempts = self.world.agent(from)?.connect(connect_request(to, CONNECTIONS)?)?;
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for attempt in &attempts {
            match attempt {
                Attempt::Answered(answer) => *counts.entry(&answer.host).or_default() += 1,
                Attempt::Failed(failure) => bail!("{what}, {to}: {failure}"),
            }
        }
        println!("  {what}, {to}");
        for (host, count) in counts {
            println!("    {host:<6}{} {count}", "#".repeat(count / 2));
        }
        Ok(())
    }

    fn add_endpoint(&mut self, later: &Path) -> Result<()> {
        let logged = self.proxy.log().lines().count();
        let services = open_services(&self.world.pin_directory())?;
        copy(later, &self.manifests)?;
        let took = wait_for_map_change(&services, ENDPOINTS_AFTERWARDS)?;
        println!(
            "  web-2.yaml was added: the map `endpoints` has {NEW_ENDPOINT} {} later.",
            milliseconds(took)
        );
        for line in self.proxy.log().lines().skip(logged).filter(|line| line.contains("programmed")) {
            println!("  shunt logs: {line}");
        }
        Ok(())
    }

    fn show_map(&self, name: &str) {
        let path = self.world.pin_directory().join(name).display().to_string();
        println!("  bpftool map dump pinned {path}");
        let arguments = ["map", "dump", "pinned", &path];
        match process::run_with_timeout(Path::new("bpftool"), &arguments, BPFTOOL_TIMEOUT) {
            Ok(done) if done.status.success() => {
                let lines: Vec<_> = done.stdout.lines().collect();
                println!("{}", indented(&lines.get(..DUMP_LINES).unwrap_or(&lines).join("\n")));
                if let Some(more) = lines.len().checked_sub(DUMP_LINES + 1) {
                    println!("    ... and {} more lines", more + 1);
                }
            }
            Ok(done) => println!("  bpftool failed: {}{}", done.stdout, done.stderr),
            Err(error) => println!("  {error:#}{}", if is_missing(&error) { INSTALL_BPFTOOL } else { "" }),
        }
    }

    fn clean_up(mut self) -> Result<()> {
        heading("Clean up");
        self.proxy.stop()?;
        self.proxy.clean_up(&self.world)?;
        println!("  shunt --cleanup removed everything from the kernel.");
        drop(self);
        println!("  The namespaces are removed.");
        Ok(())
    }
}

/// The pinned map `services` of the eBPF mode.
type Services = HashMap<MapData, ServiceKey, ServiceValue>;

fn open_services(pin_directory: &Path) -> Result<Services> {
    let path = pin_directory.join("services");
    let map = MapData::from_pin(&path).and_then(Map::from_map_data).and_then(HashMap::try_from);
    map.with_context(|| format!("open the map {}", path.display()))
}

/// Waits until the Service has this number of endpoints in the map. Returns the time that it took.
fn wait_for_map_change(services: &Services, endpoints: u32) -> Result<Duration> {
    let stopwatch = Stopwatch::start();
    let deadline = Deadline::after(CHANGE_TIMEOUT);
    let vip: SocketAddr = CLUSTER_IP.parse()?;
    let key = ServiceKey::new(vip.ip().into(), vip.port(), ServiceProtocol::Tcp);
    // The loop does not sleep, because the change takes about as long as the shortest sleep.
    while !deadline.passed() {
        match services.get(&key, 0) {
            Ok(service) if service.inside_count == endpoints => return Ok(stopwatch.elapsed()),
            Ok(_) | Err(MapError::KeyNotFound) => {}
            Err(error) => return Err(error).context("read the map services"),
        }
    }
    bail!("{NEW_ENDPOINT} was added to the Service but is not in the map after {CHANGE_TIMEOUT:?}")
}

fn connect_request(to: &str, attempts: usize) -> Result<ConnectRequest> {
    let to: SocketAddr = to.parse().with_context(|| format!("the address {to}"))?;
    Ok(ConnectRequest::new(to, Protocol::Tcp, attempts))
}

/// Copies the manifests of a folder, each in one step.
fn copy(from: &Path, manifests: &Manifests) -> Result<()> {
    let entries = fs::read_dir(from).with_context(|| format!("--manifests: read {}", from.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_file() {
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            manifests.place(&name, &text)?;
        }
    }
    Ok(())
}

fn is_missing(error: &anyhow::Error) -> bool {
    let io = error.root_cause().downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::NotFound)
}

fn heading(text: &str) {
    println!("\n{text}\n{}", "-".repeat(text.chars().count()));
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}
