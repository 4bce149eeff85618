//! What the ipvs mode does in the kernel that conformance cases cannot see: how much it sends, what becomes of real servers that
//! leave, what it refuses, and what it leaves to others. Runs where the kernel has IPVS.

mod counts;
mod families;
mod leftovers;
mod node;
mod refused;

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

/// Tries the ipvs mode in this kernel; needs root.
#[derive(Debug, Parser)]
struct Arguments {
    /// Only checks with this in their name.
    #[arg(default_value = "")]
    only: String,
    /// The proxy's binary: it takes a node over, too, on which upstream's ipvs mode ran.
    #[arg(long, value_name = "PATH")]
    shunt: Option<PathBuf>,
}

const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// A check and its name.
type Check = (&'static str, fn(&mut Node) -> Result<()>);

/// What is tried.
enum Scene<'a> {
    /// A check of the mode's parts.
    Check(fn(&mut Node) -> Result<()>),
    /// The proxy, by its path, takes over in this mode.
    TakenOver(&'a Path, &'static str),
    /// It is told to end while it does.
    CutOff(&'a Path),
}

/// Names of checks, and the modes that they are of.
const TAKEN_OVER: [(&str, &str); 4] = [
    ("mode ebpf takes over from upstream's ipvs mode with its connections", "ebpf"),
    ("mode nftables takes over from upstream's ipvs mode with its connections", "nftables"),
    ("mode iptables takes over from upstream's ipvs mode with its connections", "iptables"),
    ("mode ipvs takes over from upstream's ipvs mode with its connections", "ipvs"),
];

const CUT_OFF: &str = "connections of upstream's ipvs mode stay when the proxy ends while it takes over";

const CHECKS: &[Check] = &[
    ("a change sends as many messages at a thousand Services as at ten", a_change_is_as_large_at_any_size),
    ("real servers that leave keep their connections and get no new ones", real_servers_leave_gracefully),
    ("a real server of UDP goes at once", udp_goes_at_once),
    ("the next process finds what it would write", the_next_process_changes_nothing),
    ("what vanished while no proxy ran goes at the first sync, but for excluded ranges", leftovers_go),
    ("a weight that somebody changed is put right", weights_are_put_right),
    ("timeouts and settings are made as asked for", settings_are_made),
    ("a scheduler that the kernel lacks is refused by name", a_missing_scheduler_is_refused),
    ("a scheduler of choice is loaded and used", schedulers_are_loaded),
    ("what the kernel refuses of one Service keeps no other from being served", refused::one_of_many),
    ("connections and bytes of Services are counted, as many as asked for apart", counts::of_services),
    ("a family whose iptables fails does not hold up the other", families::go_by_themselves),
    ("a full set leaves out what it has no room for until it has", refused::full_set),
    ("cleanup takes all of ours and nothing of others", cleanup_leaves_others_alone),
];

fn main() -> ExitCode {
    process::main("ipvs", || Ok(run(&Arguments::parse())))
}

/// Whether nothing failed.
fn run(arguments: &Arguments) -> bool {
    let checks = CHECKS.iter().map(|(name, check)| (*name, Scene::Check(*check)));
    let taken_over = arguments
        .shunt
        .iter()
        .flat_map(|shunt| TAKEN_OVER.map(|(name, mode)| (name, Scene::TakenOver(shunt, mode))));
    let cut_off = arguments.shunt.iter().map(|shunt| (CUT_OFF, Scene::CutOff(shunt)));
    let chosen = checks.chain(taken_over).chain(cut_off).filter(|(name, _)| name.contains(&arguments.only));
    scenarios::run_all(chosen, |scene| match scene {
        Scene::Check(check) => Node::new().and_then(|mut node| check(&mut node)),
        Scene::TakenOver(shunt, mode) => leftovers::are_taken_over(shunt, mode),
        Scene::CutOff(shunt) => leftovers::are_left_by_one_that_ends(shunt),
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

fn a_change_is_as_large_at_any_size(node: &mut Node) -> Result<()> {
    let mut seen = Vec::new();
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
        seen.push([
            measure("one Service added", &one_more, "more")?,
            measure("one Service removed", &all, "more")?,
            measure("one endpoint added", &grown, "s3")?,
            measure("one endpoint removed", &all, "s3")?,
        ]);
        mode.clean_up(node)?;
    }
    ensure!(seen[0] == seen[1], "{:?}, and then {:?}", seen[0], seen[1]);
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

fn answered(attempts: &[Attempt]) -> Result<String> {
    match attempts {
        [Attempt::Answered(answer)] => Ok(answer.host.clone()),
        other => anyhow::bail!("{other:?}"),
    }
}

fn real_servers_leave_gracefully(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_pods(Protocol::Tcp, &[1]))?;
    let to = key(Protocol::Tcp)?.address;
    let held = ConnectRequest { hold: Some("held".into()), ..ConnectRequest::new(to, Transport::Tcp, 1) };
    let first = answered(&node.agent(Host::Client)?.connect(held)?)?;
    mode.change(node, &of_pods(Protocol::Tcp, &[1, 3]), "web")?;
    mode.change(node, &of_pods(Protocol::Tcp, &[2]), "web")?;
    // The third had no connection, so it is gone.
    let left = weights(node, key(Protocol::Tcp)?)?;
    ensure!(left == [("10.244.1.11:8080".into(), 0), ("10.244.1.12:8080".into(), 1)], "{left:?}");
    for _ in 0..4 {
        let other =
            answered(&node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Tcp, 1))?)?;
        ensure!(other == "a2", "a new connection went to {other}");
    }
    let again = SendRequest { id: "held".into(), size: 1, answer: 0, timeout: scaled(ANSWERED_WITHIN) };
    let again = answered(&[node.agent(Host::Client)?.send(again)?])?;
    ensure!(again == first && first == "a1", "the connection went from {first} to {again}");
    // Another look finds the connection still there, and one after the return of the endpoint gives it connections again.
    let changes = mode.sync(node, &of_pods(Protocol::Tcp, &[2]))?;
    ensure!(changes == 0, "{changes} changes while the connection lasts");
    mode.change(node, &of_pods(Protocol::Tcp, &[1, 2]), "web")?;
    let back = weights(node, key(Protocol::Tcp)?)?;
    ensure!(back.iter().all(|(_, weight)| *weight == 1), "{back:?}");
    mode.clean_up(node)
}

fn udp_goes_at_once(node: &mut Node) -> Result<()> {
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &of_pods(Protocol::Udp, &[1]))?;
    let to = key(Protocol::Udp)?.address;
    answered(&node.agent(Host::Client)?.connect(ConnectRequest::new(to, Transport::Udp, 1))?)?;
    mode.change(node, &of_pods(Protocol::Udp, &[2]), "web")?;
    let left = weights(node, key(Protocol::Udp)?)?;
    ensure!(left == [("10.244.1.12:8080".into(), 1)], "{left:?}");
    mode.clean_up(node)
}

fn the_next_process_changes_nothing(node: &mut Node) -> Result<()> {
    let all = node::every_kind();
    let mut first = node.mode(IpvsSettings::default())?;
    let changes = first.sync(node, &all)?;
    ensure!(changes > 100, "only {changes} changes");
    let mut next = node.mode(IpvsSettings::default())?;
    let changes = next.plan(node, &all)?;
    ensure!(changes.is_empty(), "{changes}");
    next.clean_up(node)
}

fn leftovers_go(node: &mut Node) -> Result<()> {
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

fn weights_are_put_right(node: &mut Node) -> Result<()> {
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

fn settings_are_made(node: &mut Node) -> Result<()> {
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

fn a_missing_scheduler_is_refused(node: &mut Node) -> Result<()> {
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

fn cleanup_leaves_others_alone(node: &mut Node) -> Result<()> {
    node.run("ipset create OTHERS hash:ip && ipset add OTHERS 192.0.2.1 && iptables -N OTHERS && iptables -A INPUT -j OTHERS")?;
    let (foreign, server) = node::server_of(Protocol::Tcp, "192.168.57.11:25");
    let before = node.everything()?;
    let mut mode = node.mode(IpvsSettings::default())?;
    mode.sync(node, &node::every_kind())?;
    // What another program sets up beside us stays while we only change what differs, and when we go.
    node.change(&[Change::AddServer(foreign, server)])?;
    mode.clean_up(node)?;
    let left: Vec<VirtualKey> = node.ipvs(Socket::servers)?.into_keys().collect();
    ensure!(left == [foreign], "{left:?}");
    node.change(&[Change::RemoveServer(foreign)])?;
    let after = node.everything()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}
