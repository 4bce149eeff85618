//! The switches of the ebpf mode under load: the path of packets on links, the backstop, and the
//! sockets of a pod, each made and undone, and restarts of the proxy: while netfilter has the
//! links, and with another setting of what takes the direct path.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Result, ensure};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, LoadReport, LoadRequest, Protocol},
    deadline::{Deadline, Stopwatch},
    runner::{LinkFlags, Proxy},
    small_cluster::Slices,
    world::{Host, World},
};

use super::{Check, ChurnTest, load::Client};

pub(crate) const SERVICES: &str = include_str!("switched.yaml");
const SCTP_SERVICE: &str = include_str!("sctp.yaml");
const PORTS: &str = "{name: t, protocol: TCP, port: 8080}, {name: u, protocol: UDP, port: 5353}";
/// How long the load runs before, between and after the switches.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause between two checks whether a switch has happened.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// The longest time that a switch takes.
const SWITCH_TIMEOUT: Duration = Duration::from_mins(1);
pub(crate) const TCP_TIMEOUT: Duration = Duration::from_secs(30);
/// A datagram that is not answered after this time is lost. It holds up only its conversation.
const UDP_TIMEOUT: Duration = Duration::from_secs(3);
/// The number of datagrams of one client that may stay unanswered in each round. Those that come in
/// while conntrack takes over their flow are dropped, and a loaded machine takes longer for it.
pub(crate) const MAX_UNANSWERED: usize = 64;

/// A rule that matches no packet of the load, and that link programs would hide packets from.
const ADD_RULE: &str = "nft add table inet notice; \
    nft add chain inet notice prerouting '{ type filter hook prerouting priority raw; }'; \
    nft add rule inet notice prerouting ip daddr 203.0.113.9 drop";
const DELETE_RULE: &str = "nft delete table inet notice";
/// A rule that looks at forwarded packets: flows do not leave before it. It matches no packet of
/// the load.
const ADD_FORWARDING_RULE: &str = "nft add table inet watch; \
    nft add chain inet watch forward '{ type filter hook forward priority filter; }'; \
    nft add rule inet watch forward ip daddr 203.0.113.9 counter";
const DELETE_FORWARDING_RULE: &str = "nft delete table inet watch";
/// A rule by which a pod redirects its own packets. It matches no packet of the load.
const ADD_REDIRECTION: &str =
    "iptables-nft -t nat -A OUTPUT -d 203.0.113.9 -p tcp -j REDIRECT --to-ports 8081";
const DELETE_REDIRECTION: &str =
    "iptables-nft -t nat -D OUTPUT -d 203.0.113.9 -p tcp -j REDIRECT --to-ports 8081";

/// The name of the switch after which the proxy is restarted once.
const TO_NETFILTER: &str = "links to netfilter";

/// Settings with which the proxy starts again, each with what shows it in the map `node`. The last
/// one is the default.
const DIRECT_SETTINGS: [(&str, &str); 2] =
    [("whole", "\"direct_scope\":1"), ("learned", "\"direct_scope\":0")];

/// The load begins more flows in the two minutes for which closed ones are kept than the maps have
/// entries by default. A flow whose entry is evicted may end.
const MAP_SIZES: &str = "shunt: {ebpf: {mapSizes: {flows: 1000000}}}";

/// Shell conditions for node1.
const PROGRAMS_ON_LINKS: &str =
    "{ ls $PINS/links | grep -q shunt_in_ || tc filter show dev eth0 ingress | grep -q shunt_in; }";
/// An odd epoch means that there is a direct path.
const DIRECT_PATH: &str =
    "bpftool -j map dump pinned $PINS/node | grep -q '\"direct_epoch\":[0-9]*[13579][,}]'";
const BACKSTOP: &str = "nft list tables | grep -q kube-proxy";
const EXEMPT_POD: &str = "bpftool -j map dump pinned $PINS/exempt_netns | grep -q key";

/// A change, and how to see that the proxy has followed it.
pub(crate) struct Switch {
    name: &'static str,
    change: Change,
    /// A shell condition.
    is_made: String,
}

enum Change {
    Run(Host, &'static str),
    Place(&'static str),
}

/// Replaces the objects of the Service that the programs cannot serve by those of a text.
pub(crate) type PlaceSctp<'a> = &'a dyn Fn(&str) -> Result<()>;

/// Returns the switches in their order.
pub(crate) fn switches(links: &LinkFlags) -> Vec<Switch> {
    let chosen = links.links_path.as_deref().filter(|path| *path != "auto");
    let path = if chosen.is_none() { path_switches(links) } else { Vec::new() };
    let sockets = [
        run("sockets of a pod to its link", Host::A1, ADD_REDIRECTION, EXEMPT_POD.to_owned()),
        run("sockets of a pod to programs", Host::A1, DELETE_REDIRECTION, format!("! {EXEMPT_POD}")),
    ];
    let mut backstop = vec![
        Switch {
            name: "backstop in place",
            change: Change::Place(SCTP_SERVICE),
            is_made: BACKSTOP.to_owned(),
        },
        Switch { name: "backstop removed", change: Change::Place(""), is_made: format!("! {BACKSTOP}") },
    ];
    if chosen == Some("netfilter") {
        // It is in place all the time.
        backstop.clear();
    }
    path.into_iter().chain(sockets).chain(backstop).collect()
}

/// Returns the switches from each link path to each other one. Where netfilter masquerades, there
/// is no direct path.
fn path_switches(links: &LinkFlags) -> Vec<Switch> {
    let has_direct_path = links.links_masquerade.as_deref() != Some("netfilter");
    let netfilter = || format!("! {PROGRAMS_ON_LINKS} && {BACKSTOP}");
    let programs = || format!("{PROGRAMS_ON_LINKS} && ! {BACKSTOP} && ! {{ {DIRECT_PATH}; }}");
    let direct = || format!("{PROGRAMS_ON_LINKS} && ! {BACKSTOP} && {DIRECT_PATH}");
    let first = || if has_direct_path { direct() } else { programs() };
    let mut path = vec![
        run(TO_NETFILTER, Host::Node1, ADD_RULE, netfilter()),
        run("links back from netfilter", Host::Node1, DELETE_RULE, first()),
    ];
    if has_direct_path {
        path.extend([
            run("links from the direct path to programs", Host::Node1, ADD_FORWARDING_RULE, programs()),
            run("links from programs to netfilter", Host::Node1, ADD_RULE, netfilter()),
            run("links from netfilter to programs", Host::Node1, DELETE_RULE, programs()),
            run("links from programs to the direct path", Host::Node1, DELETE_FORWARDING_RULE, direct()),
        ]);
    }
    path
}

fn run(name: &'static str, host: Host, line: &'static str, is_made: String) -> Switch {
    Switch { name, change: Change::Run(host, line), is_made }
}

impl ChurnTest {
    /// Makes all switches under load.
    pub(crate) fn switch(&mut self, rounds: usize, links: &LinkFlags) -> Result<Vec<Check>> {
        self.proxy.configure(&self.mode, &serde_yaml_ng::from_str(MAP_SIZES)?)?;
        self.proxy.kill()?;
        self.proxy.start(&mut self.world)?;
        self.manifests.place("switched.yaml", SERVICES)?;
        self.manifests.place("switched-endpoints.yaml", &endpoints())?;
        self.wait_until_served()?;
        let took = Stopwatch::start();
        self.clients.iter_mut().try_for_each(start_load)?;
        let switches = switches(links);
        // Before netfilter translates: conntrack would track whole flows when they become learned.
        let has_default_links = links.given().next().is_none();
        let changed = if has_default_links { self.change_direct_setting(took) } else { Ok(()) };
        let made = changed.and_then(|()| self.make_switches(rounds, &switches, took));
        let reports: Result<Vec<_>> = self.clients.iter_mut().map(stop_load).collect();
        made?;
        Ok(reports?.into_iter().map(|(name, report)| check(&name, &report, rounds, switches.len())).collect())
    }

    /// Waits until all clients reach both Services.
    fn wait_until_served(&mut self) -> Result<()> {
        for client in &mut self.clients {
            for to in destinations(client.host) {
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    let request = ConnectRequest::new(to, protocol, 1);
                    let answered = Deadline::after(SWITCH_TIMEOUT).try_poll(|| {
                        let attempts = client.agent.connect(request.clone())?;
                        Ok::<_, anyhow::Error>(attempts.iter().all(Attempt::is_answered).then_some(()))
                    })?;
                    ensure!(answered.is_some(), "{} does not reach {protocol} {to}", client.host);
                }
            }
        }
        Ok(())
    }

    /// Makes all switches several times, and restarts the proxy once.
    fn make_switches(&mut self, rounds: usize, switches: &[Switch], since: Stopwatch) -> Result<()> {
        let Self { proxy, world, manifests, .. } = self;
        thread::sleep(PAUSE);
        for round in 0..rounds {
            for switch in switches {
                switch.make(world, &|text| manifests.place("sctp.yaml", text), since)?;
                if round == 0 && switch.name == TO_NETFILTER {
                    restart(proxy, world, since)?;
                }
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

impl ChurnTest {
    /// Restarts the proxy so that whole flows take the direct path, and once more with the default.
    /// New flows are whole in between. Flows of before go on each time.
    fn change_direct_setting(&mut self, since: Stopwatch) -> Result<()> {
        let Self { proxy, world, .. } = self;
        for (setting, shown) in DIRECT_SETTINGS {
            proxy.set_flag("--links-direct", setting);
            restart(proxy, world, since)?;
            println!("        --links-direct {setting}");
            let node = world.run(Host::Node1, "bpftool -j map dump pinned $PINS/node")?;
            ensure!(node.contains(shown), "--links-direct {setting}: {node}");
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

fn restart(proxy: &mut Proxy, world: &mut World, since: Stopwatch) -> Result<()> {
    thread::sleep(PAUSE);
    proxy.kill()?;
    proxy.start(world)?;
    println!("        {:.2} s: the proxy is killed and started", since.elapsed().as_secs_f32());
    Ok(())
}

impl Switch {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Makes the change, and waits until the proxy has followed it.
    pub(crate) fn make(&self, world: &World, place: PlaceSctp<'_>, since: Stopwatch) -> Result<()> {
        let from = since.elapsed();
        match self.change {
            Change::Run(host, line) => drop(world.run(host, line)?),
            Change::Place(text) => place(text)?,
        }
        let deadline = Deadline::after(SWITCH_TIMEOUT);
        let check = format!("if {}; then echo made; fi", self.is_made);
        while world.run(Host::Node1, &check)?.is_empty() {
            ensure!(!deadline.passed(), "{}: not made within {SWITCH_TIMEOUT:?}", self.name);
            thread::sleep(CHECK_EVERY);
        }
        let (from, to) = (from.as_secs_f32(), since.elapsed().as_secs_f32());
        println!("        {from:.2} s to {to:.2} s: {}", self.name);
        Ok(())
    }
}

fn check(name: &str, report: &LoadReport, rounds: usize, switches: usize) -> Check {
    check_report(&format!("{} switches, {name}", rounds * switches), report, rounds * MAX_UNANSWERED, 0)
}

/// Checks what happened to the connections of a client.
pub(crate) fn check_report(
    name: &str,
    report: &LoadReport,
    max_unanswered: usize,
    max_wrong_peers: usize,
) -> Check {
    let LoadReport { connections, conversations, exchanges, unanswered, refused, .. } = report;
    let LoadReport { lost, broken, moved, wrong_peer, .. } = report;
    let name = format!(
        "{name}: {connections} connections, {conversations} UDP conversations, \
         {exchanges} exchanges, {unanswered} datagrams unanswered, {refused} refused, {lost} lost, {broken} \
         broken, {moved} moved, {wrong_peer} with a wrong peer"
    );
    let wrong_peers = wrong_peer.saturating_sub(max_wrong_peers);
    let has_failed = refused + lost + broken + moved + wrong_peers > 0;
    for failure in report.failures.iter().chain(&report.unanswered_datagrams) {
        println!("        {failure}");
    }
    let mut failures = if has_failed { report.failures.clone() } else { Vec::new() };
    if *unanswered > max_unanswered {
        failures.push(format!("{unanswered} datagrams are unanswered, {max_unanswered} may be"));
        failures.extend_from_slice(&report.unanswered_datagrams);
    }
    Check::new(name, failures)
}

pub(crate) fn endpoints() -> String {
    let mut slices = Slices::default();
    for is_v6 in [false, true] {
        for service in ["wide", "near"] {
            slices.add(service, is_v6, PORTS, &[Host::A3, Host::B1, Host::B2]);
        }
    }
    slices.text().to_owned()
}

fn start_load(client: &mut Client) -> Result<()> {
    client.agent.start_load(LoadRequest { streams: streams_of(client.host) })
}

/// Returns the load of a client.
pub(crate) fn streams_of(client: Host) -> Vec<ConnectRequest> {
    destinations(client).into_iter().flat_map(streams_to).collect()
}

pub(crate) fn stop_load(client: &mut Client) -> Result<(String, LoadReport)> {
    Ok((client.host.to_string(), client.agent.stop_load(TCP_TIMEOUT)?))
}

/// Returns the addresses of both Services that a client uses.
fn destinations(client: Host) -> Vec<SocketAddr> {
    let socket = |ip: &str, port| SocketAddr::new(ip.parse().unwrap_or([0, 0, 0, 0].into()), port);
    let to: &[(&str, u16)] = if client == Host::Client {
        &[
            ("192.168.57.11", 30081),
            ("fd57::11", 30081),
            ("192.168.57.11", 30082),
            ("fd57::11", 30082),
            ("198.51.100.81", 81),
            ("2001:db8:51::81", 81),
            ("198.51.100.82", 82),
            ("2001:db8:51::82", 82),
        ]
    } else {
        &[("10.96.0.81", 81), ("fd96::81", 81)]
    };
    to.iter().map(|(ip, port)| socket(ip, *port)).collect()
}

/// Returns the load to one address: short connections and conversations, and some that last.
fn streams_to(to: SocketAddr) -> Vec<ConnectRequest> {
    let ms = Duration::from_millis;
    let stream = |protocol, attempts, repeats, repeat_interval, timeout| ConnectRequest {
        repeats,
        repeat_interval,
        pause: ms(10),
        ..ConnectRequest::new(to, protocol, attempts).with_timeout(timeout)
    };
    let bulk = stream(Protocol::Tcp, 1, usize::MAX, ms(50), TCP_TIMEOUT);
    let unconnected = stream(Protocol::Udp, 1, usize::MAX, ms(20), UDP_TIMEOUT);
    vec![
        stream(Protocol::Tcp, 4, 0, ms(0), TCP_TIMEOUT),
        stream(Protocol::Tcp, 2, usize::MAX, ms(20), TCP_TIMEOUT),
        ConnectRequest { answer: 20_000, ..bulk },
        stream(Protocol::Udp, 4, 4, ms(10), UDP_TIMEOUT),
        stream(Protocol::Udp, 2, usize::MAX, ms(20), UDP_TIMEOUT),
        ConnectRequest { unconnected: true, ..unconnected },
    ]
}
