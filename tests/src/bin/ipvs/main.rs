//! Checks the ipvs mode for what conformance cases cannot see: the number of requests, draining,
//! rejected objects, and objects of other programs. The kernel needs IPVS.

mod counters;
mod families;
mod node;
mod rejected;
mod takeover;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, ensure};
use clap::Parser;
use proxy_userspace::{
    dataplane::ipvs::{IpvsError, IpvsSettings, RequestCounts},
    kernel::ipvs::{Change, Ipvs as Socket, RealServer, Timeouts, VirtualKey, VirtualServer},
    model::{Protocol, Snapshot},
};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, Protocol as Transport, SendRequest},
    deadline::scaled,
    process, scenarios,
    world::Host,
};

use self::node::{Mode, Node, cluster_ip, endpoints, of_ports, service, services};

/// Checks the ipvs mode in this kernel. Needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// Run only checks whose name contains this.
    #[arg(default_value = "")]
    only: String,
    /// The shunt binary. With it, each mode also takes over a node from kube-proxy's ipvs mode.
    #[arg(long, value_name = "PATH")]
    shunt: Option<PathBuf>,
}

const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The name of a check and its function.
type Check = (&'static str, fn(&mut Node) -> Result<()>);

/// What is run.
enum Scenario<'a> {
    /// A check of the dataplane.
    Check(fn(&mut Node) -> Result<()>),
    /// The shunt binary at this path takes over in this mode.
    Takeover(&'a Path, &'static str),
    /// The shunt binary at this path ends during a takeover.
    InterruptedTakeover(&'a Path),
}

/// The names and modes of takeovers.
const TAKEOVERS: [(&str, &str); 4] = [
    ("mode ebpf takes over the connections of kube-proxy in ipvs mode", "ebpf"),
    ("mode nftables takes over the connections of kube-proxy in ipvs mode", "nftables"),
    ("mode iptables takes over the connections of kube-proxy in ipvs mode", "iptables"),
    ("mode ipvs takes over the connections of kube-proxy in ipvs mode", "ipvs"),
];

const INTERRUPTED_TAKEOVER: &str = "connections continue if shunt ends during a takeover";

const CHECKS: &[Check] = &[
    ("a change sends as many requests at a thousand Services as at ten", cost_does_not_depend_on_services),
    ("a draining real server keeps its connections and gets no new ones", real_servers_drain),
    ("a real server of UDP is removed at once", udp_is_removed_at_once),
    ("a restarted process changes nothing", a_restart_changes_nothing),
    ("the first sync removes stale objects, except in excluded ranges", stale_objects_are_removed),
    ("a weight that another program changed is restored", weights_are_restored),
    ("timeouts and sysctls are set as configured", sysctls_are_set),
    ("the error names a scheduler that the kernel lacks", a_missing_scheduler_is_an_error),
    ("the configured scheduler is loaded and used", schedulers_are_loaded),
    ("a rejected object of one Service does not affect other Services", rejected::one_of_many),
    ("connections and bytes are counted, and the first Services individually", counters::of_services),
    ("a family whose iptables fails does not affect the other", families::fail_separately),
    ("without IPv6 on the dummy link IPv4 is served", families::ipv6_is_disabled),
    ("without a match of iptables only what needs it is left out", families::without_some_matches),
    ("a full set leaves out entries until it has room", rejected::full_set),
    ("cleanup removes all objects of shunt and none of others", cleanup_keeps_foreign_objects),
];

fn main() -> ExitCode {
    process::main("ipvs", || Ok(run(&Arguments::parse())))
}

/// Runs the selected checks. Returns true if none failed.
fn run(arguments: &Arguments) -> bool {
    let checks = CHECKS.iter().map(|(name, check)| (*name, Scenario::Check(*check)));
    let takeovers = arguments
        .shunt
        .iter()
        .flat_map(|shunt| TAKEOVERS.map(|(name, mode)| (name, Scenario::Takeover(shunt, mode))));
    let interrupted =
        arguments.shunt.iter().map(|shunt| (INTERRUPTED_TAKEOVER, Scenario::InterruptedTakeover(shunt)));
    let chosen =
        checks.chain(takeovers).chain(interrupted).filter(|(name, _)| name.contains(&arguments.only));
    scenarios::run_all(chosen, |scenario| match scenario {
        Scenario::Check(check) => Node::new().and_then(|mut node| check(&mut node)),
        Scenario::Takeover(shunt, mode) => takeover::run(shunt, mode),
        Scenario::InterruptedTakeover(shunt) => takeover::run_interrupted(shunt),
    })
}

fn difference(before: RequestCounts, after: RequestCounts) -> RequestCounts {
    RequestCounts {
        ipvs: after.ipvs - before.ipvs,
        addresses: after.addresses - before.addresses,
        ipset: after.ipset - before.ipset,
        iptables: after.iptables - before.iptables,
    }
}

fn cost_does_not_depend_on_services(node: &mut Node) -> Result<()> {
    let mut costs = Vec::new();
    for count in [10, 1000] {
        let mut mode = node.mode(IpvsSettings::default())?;
        let all = services(count);
        mode.sync(node, &all)?;
        let mut measure =
            |what: &str, snapshot: &Snapshot, changed: &str| -> Result<(String, RequestCounts)> {
                let before = mode.requests();
                mode.change(node, snapshot, changed)?;
                let sent = difference(before, mode.requests());
                println!("    {count} Services, {what}: {sent:?}");
                Ok((what.to_owned(), sent))
            };
        let mut one_more = all.clone();
        one_more.ports.extend([service("more", cluster_ip(0), Protocol::Tcp, &endpoints(&[1, 2]))]);
        let mut grown = all.clone();
        grown.ports.extend([service("s3", cluster_ip(3), Protocol::Tcp, &endpoints(&[1, 2, 3]))]);
        costs.push([
            measure("one Service added", &one_more, "more")?,
            measure("one Service removed", &all, "more")?,
            measure("one endpoint added", &grown, "s3")?,
            measure("one endpoint removed", &all, "s3")?,
        ]);
        mode.clean_up(node)?;
    }
    ensure!(costs[0] == costs[1], "{:?} at 10, {:?} at 1000", costs[0], costs[1]);
    Ok(())
}

fn weights(node: &Node, key: VirtualKey) -> Result<Vec<(String, u32)>> {
    let mut reals: Vec<RealServer> = node.ipvs(|ipvs| ipvs.real_servers(key))?;
    reals.sort_by_key(|real| real.address);
    Ok(reals.into_iter().map(|real| (real.address.to_string(), real.weight)).collect())
}

fn key(protocol: Protocol) -> Result<VirtualKey> {
    Ok(VirtualKey { protocol, address: format!("{}:80", cluster_ip(0)).parse()? })
}

fn of_pods(protocol: Protocol, pods: &[u8]) -> Snapshot {
    of_ports([service("web", cluster_ip(0), protocol, &endpoints(pods))])
}

fn answering_host(attempts: &[Attempt]) -> Result<String> {
    match attempts {
        [Attempt::Answered(answer)] => Ok(answer.host.clone()),
        other => anyhow::bail!("{other:?}"),
    }
}

fn real_servers_drain(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    let to = key(Protocol::Tcp)?.address;
    let held = ConnectRequest { hold: Some("held".into()), ..ConnectRequest::new(to, Transport::Tcp, 1) };
    let first = answering_host(&node.agent(Host::Client)?.connect(held)?)?;
    mode.change(node, &of_pods(Protocol::Tcp, &[1, 3]), "web")?;
    mode.change(node, &of_pods(Protocol::Tcp, &[2]), "web")?;
    // The third real server had no connection, so it was removed.
    let left = weights(node, key(Protocol::Tcp)?)?;
    ensure!(left == [("10.244.1.11:8080".into(), 0), ("10.244.1.12:8080".into(), 1)], "{left:?}");
    for _ in 0..4 {
        let other = answering_host(&node.agent(Host::Client)?.connect(ConnectRequest::new(
            to,
            Transport::Tcp,
            1,
        ))?)?;
        ensure!(other == "a2", "a new connection went to {other}");
    }
    let again = SendRequest { id: "held".into(), size: 1, answer: 0, timeout: scaled(ANSWER_TIMEOUT) };
    let again = answering_host(&[node.agent(Host::Client)?.send(again)?])?;
    ensure!(again == first && first == "a1", "the connection went from {first} to {again}");
    // A full sync keeps the real server while the connection lasts. If the endpoint is added again,
    // it gets new connections again.
    let changes = mode.sync(node, &of_pods(Protocol::Tcp, &[2]))?;
    ensure!(changes == 0, "{changes} changes while the connection lasts");
    mode.change(node, &of_pods(Protocol::Tcp, &[1, 2]), "web")?;
    let back = weights(node, key(Protocol::Tcp)?)?;
    ensure!(back.iter().all(|(_, weight)| *weight == 1), "{back:?}");
    mode.clean_up(node)
}

fn udp_is_removed_at_once(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_pods(Protocol::Udp, &[1]))?;
    let to = key(Protocol::Udp)?.address;
    answering_host(&node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Udp, 1))?)?;
    mode.change(node, &of_pods(Protocol::Udp, &[2]), "web")?;
    let left = weights(node, key(Protocol::Udp)?)?;
    ensure!(left == [("10.244.1.12:8080".into(), 1)], "{left:?}");
    mode.clean_up(node)
}

fn a_restart_changes_nothing(node: &mut Node) -> Result<()> {
    let all = node::every_kind();
    let mut first = node.mode(IpvsSettings::default())?;
    let changes = first.sync(node, &all)?;
    ensure!(changes > 100, "only {changes} changes");
    let mut next = node.mode(IpvsSettings::default())?;
    let changes = next.plan(node, &all)?;
    ensure!(changes.is_empty(), "{changes}");
    next.clean_up(node)
}

fn stale_objects_are_removed(node: &mut Node) -> Result<()> {
    let mut first = node.mode(IpvsSettings::default())?;
    first.sync(node, &node::every_kind())?;
    let others = ["203.0.113.7:80", "192.0.2.7:80"];
    let added = others.map(|address| node::server_of(Protocol::Tcp, address));
    node.change(&added.clone().map(|(key, server)| Change::AddServer(key, server)))?;
    let settings = IpvsSettings { exclude_cidrs: vec!["203.0.113.0/24".parse()?], ..IpvsSettings::default() };
    let mut next = node.mode(settings)?;
    next.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    let left: Vec<String> = node.ipvs(Socket::servers)?.keys().map(ToString::to_string).collect();
    ensure!(left == ["TCP 10.96.0.1:80", "TCP 203.0.113.7:80"], "{left:?}");
    let addresses = node.run("ip -o addr show dev kube-ipvs0")?;
    ensure!(addresses.lines().count() == 1 && addresses.contains("10.96.0.1/32"), "{addresses}");
    let sets = node.run("ipset save | grep ^add")?;
    ensure!(sets.lines().count() == 3, "{sets}");
    node.change(&[Change::RemoveServer(added[0].0)])?;
    next.clean_up(node)
}

fn weights_are_restored(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    let wanted = of_pods(Protocol::Tcp, &[1, 2]);
    mode.sync(node, &wanted)?;
    let key = key(Protocol::Tcp)?;
    node.change(&[Change::SetReal(key, "10.244.1.11:8080".parse()?, 7)])?;
    let changes = mode.sync(node, &wanted)?;
    ensure!(changes == 1, "{changes} changes");
    let left = weights(node, key)?;
    ensure!(left.iter().all(|(_, weight)| *weight == 1), "{left:?}");
    mode.clean_up(node)
}

fn sysctls_are_set(node: &mut Node) -> Result<()> {
    let read = |node: &Node| -> Result<Vec<String>> {
        let names = "net.ipv4.vs.conntrack net.ipv4.vs.expire_nodest_conn net.ipv4.vs.expire_quiescent_template \
                     net.ipv4.ip_forward net.ipv4.conf.all.arp_ignore net.ipv4.conf.all.arp_announce";
        Ok(node.run(&format!("sysctl -n {names}"))?.lines().map(String::from).collect())
    };
    node.run("sysctl -q net.ipv4.ip_forward=0")?;
    let mut plain = node.mode(IpvsSettings::default())?;
    plain.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    let values = read(node)?;
    ensure!(values == ["1", "1", "1", "1", "0", "0"], "{values:?}");
    let timeouts = Timeouts { tcp: 901, tcp_fin: 0, udp: 301 };
    let mut strict = node.mode(IpvsSettings { strict_arp: true, timeouts, ..IpvsSettings::default() })?;
    strict.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    let values = read(node)?;
    ensure!(values == ["1", "1", "1", "1", "1", "2"], "{values:?}");
    let held = node.ipvs(Socket::timeouts)?;
    ensure!((held.tcp, held.udp) == (901, 301) && held.tcp_fin != 0, "{held:?}");
    strict.clean_up(node)
}

fn a_missing_scheduler_is_an_error(node: &mut Node) -> Result<()> {
    let error = match node.try_mode(IpvsSettings { scheduler: "nosuch".into(), ..IpvsSettings::default() }) {
        Err(error @ IpvsError::NoScheduler { .. }) => error.to_string(),
        other => anyhow::bail!("{:?}", other.err()),
    };
    ensure!(error.contains("modprobe ip_vs_nosuch") && error.contains("--ipvs-scheduler"), "{error}");
    let servers = node.ipvs(Socket::servers)?;
    ensure!(servers.is_empty(), "{servers:?}");
    Ok(())
}

fn schedulers_are_loaded(node: &mut Node) -> Result<()> {
    for scheduler in ["lc", "sh", "mh", "wrr"] {
        let settings = IpvsSettings { scheduler: scheduler.into(), ..IpvsSettings::default() };
        let mut mode = node.mode(settings.clone())?;
        mode.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
        let servers = node.ipvs(Socket::servers)?;
        let expected = VirtualServer::new(scheduler, std::net::Ipv4Addr::LOCALHOST.into());
        ensure!(servers.values().all(|server| *server == expected), "{servers:?}");
        let mut again: Mode = node.mode(settings)?;
        let left = again.plan(node, &of_pods(Protocol::Tcp, &[1]))?;
        ensure!(left.is_empty(), "{left}");
    }
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    mode.clean_up(node)
}

fn cleanup_keeps_foreign_objects(node: &mut Node) -> Result<()> {
    node.run("ipset create OTHERS hash:ip && ipset add OTHERS 192.0.2.1 && iptables -N OTHERS && iptables -A INPUT -j OTHERS")?;
    let (foreign, server) = node::server_of(Protocol::Tcp, "192.168.57.11:25");
    let before = node.everything()?;
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &node::every_kind())?;
    // An object that another program creates later stays, during syncs and after the cleanup.
    node.change(&[Change::AddServer(foreign, server)])?;
    mode.clean_up(node)?;
    let left: Vec<VirtualKey> = node.ipvs(Socket::servers)?.into_keys().collect();
    ensure!(left == [foreign], "{left:?}");
    node.change(&[Change::RemoveServer(foreign)])?;
    let after = node.everything()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}
