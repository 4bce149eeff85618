//! The soak test: held and short connections, conversations and bulk, while everything that can
//! happen to shunt happens, one after the other in random order. At the end no connection was lost,
//! and the process and the kernel hold what they held at the start.

mod disturbances;
mod footprint;
mod timeline;

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{
    agent::protocol::{ConnectRequest, LoadReport, LoadRequest, Protocol},
    deadline::Deadline,
    flood::SOURCES,
    runner::{Cluster, LinkFlags, Proxy},
    small_cluster::NODE,
    world::{Host, World},
};

use self::{
    disturbances::{Disturbance, FLOODED_SERVICE},
    footprint::Footprint,
    timeline::Timeline,
};
use super::{
    Arguments, Check,
    leftovers::{KernelState, PinnedObjects},
    load::{self, Client},
    phases::ENDPOINT_SETS,
    switches::{self, MAX_UNANSWERED, TCP_TIMEOUT},
    web_slices,
};

/// Map sizes that the Services of the load fit into, and those of a disturbance do not. A flood has
/// more packets than the map for its flows has entries.
const FIELDS: &str = "shunt: {ebpf: {mapSizes: {services: 200, unassuredFlows: 8192}}}";
/// The time in which the process settles after a start, and the load after a disturbance.
const SETTLE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
/// The time after which the process holds no more than at the start.
const SHRINK_TIMEOUT: Duration = Duration::from_mins(1);
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(30);
/// Removes the tables that iptables commands create and never remove, unless a rule or a chain of
/// somebody is left in them.
const REMOVE_EMPTY_TABLES: &str = "for family in ip ip6; do \
    if ! ${family}tables-nft-save | grep -q -e ^-A -e '^:[A-Z-]* -'; then \
    for table in nat filter mangle; do nft delete table $family $table || true; done; fi; done";
/// Lets conntrack forget sooner what has ended. With the default, two minutes, the load of minutes
/// fills its table, and the kernel drops new connections in every mode. A minute is as long as the
/// programs leave a connection to conntrack.
const FORGET_SOONER: &str = "for name in time_wait syn_sent; do \
    echo 60 > /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_$name; done";
/// The pause between two connections of a stream. Conntrack's table has room for 262,144 here, and
/// the connections of a minute must fit into it, on a fast machine too.
const CONNECTION_PAUSE: Duration = Duration::from_millis(30);
/// The greatest number of connections and conversations that a client has at the same time.
const MAX_OPEN: usize = 64;
const CLIENT: &str = "192.168.57.50";

/// The world with the proxy, the API server and the clients.
struct Soak {
    // Declared before the world, so that the process ends before its namespace is removed.
    proxy: Proxy,
    clients: Vec<Client>,
    cluster: Cluster,
    world: World,
    links: LinkFlags,
    fields: Mapping,
    /// Endpoint sets that were set.
    sets: usize,
    timeline: Timeline,
}

/// Runs the test. The seed decides the order of the disturbances whose name contains `only`.
pub(super) fn run(arguments: &Arguments, minutes: u64) -> Result<Vec<Check>> {
    let Arguments { seed, only, .. } = arguments;
    let mut order = Disturbances {
        of_round: Disturbance::ALL
            .into_iter()
            .filter(|disturbance| disturbance.name().contains(&**only))
            .collect(),
        random: fastrand::Rng::with_seed(seed.unwrap_or_else(|| fastrand::u64(..))),
    };
    ensure!(!order.of_round.is_empty(), "--only {only:?}: no disturbance has this in its name");
    println!("        --seed {}", order.random.get_seed());
    let (mut soak, before) = build(arguments)?;
    let checks = soak.run(Duration::from_mins(minutes), &mut order, &before);
    if checks.as_ref().map_or(true, |checks| checks.iter().any(|check| !check.failures.is_empty())) {
        let failures = checks.iter().flatten().flat_map(|check| &check.failures);
        eprintln!("{}", soak.timeline.explain(failures, &soak.proxy.log()));
    }
    checks
}

fn build(arguments: &Arguments) -> Result<(Soak, KernelState)> {
    let shunt = arguments.shunt.canonicalize().context("--shunt")?;
    let mut world = World::build(&Host::ALL, &std::env::current_exe()?)?;
    world.move_out_of_cgroup(Host::A2)?;
    // Answers to forged sources leave the node.
    world.route(Host::Node1, SOURCES.parse()?, CLIENT.parse()?)?;
    world.run(Host::Node1, FORGET_SOONER)?;
    let before = KernelState::read(&world)?;
    let cluster = Cluster::start(&world)?;
    let web = include_str!("../web.yaml");
    for text in [NODE, web, FLOODED_SERVICE, switches::SERVICES, &switches::endpoints()] {
        cluster.apply_all(text)?;
    }
    let fields: Mapping = serde_yaml_ng::from_str(FIELDS)?;
    let mut proxy = Proxy::new(Host::Node1, &world, &shunt, "ebpf", &cluster, &fields)?;
    arguments.links.set(&mut proxy);
    let clients = load::clients(&mut world)?;
    let (links, timeline) = (arguments.links.clone(), Timeline::default());
    let soak = Soak { proxy, clients, cluster, world, links, fields, sets: 0, timeline };
    soak.set_endpoints(ENDPOINT_SETS[0])?;
    Ok((soak, before))
}

/// The number of disturbances.
#[derive(Clone, Copy, Debug, Default)]
struct Made {
    all: usize,
    /// Those that changed the mode.
    modes: usize,
}

/// The disturbances of a round, and what decides their order.
struct Disturbances {
    of_round: Vec<Disturbance>,
    random: fastrand::Rng,
}

impl Soak {
    fn run(
        &mut self,
        duration: Duration,
        order: &mut Disturbances,
        before: &KernelState,
    ) -> Result<Vec<Check>> {
        self.proxy.start(&mut self.world)?;
        self.timeline = Timeline::default();
        self.clients.iter_mut().try_for_each(start_load)?;
        // The first use of the backstop starts threads that stay.
        self.make(Disturbance::Switches)?;
        thread::sleep(SETTLE);
        let at_start = Footprint::read(&self.proxy, &self.world)?;
        let made = self.disturb(Deadline::after(duration), order);
        thread::sleep(SETTLE);
        let mut checks = vec![self.check_footprint(&at_start)?];
        let reports: Result<Vec<_>> = self.clients.iter_mut().map(switches::stop_load).collect();
        let made = made?;
        checks.push(self.check_conntrack()?);
        checks.extend(reports?.iter().map(|(host, report)| check_load(host, report, &made)));
        checks.push(self.check_follows()?);
        checks.push(self.clean_up(before)?);
        Ok(checks)
    }

    /// Makes rounds of the disturbances in random order until the time is over. Returns how many
    /// disturbances there were.
    fn disturb(&mut self, end: Deadline, order: &mut Disturbances) -> Result<Made> {
        let mut made = Made::default();
        while made.all == 0 || !end.passed() {
            order.random.shuffle(&mut order.of_round);
            for disturbance in order.of_round.iter().copied() {
                println!("        {:.1} s: {}", self.timeline.seconds(), disturbance.name());
                self.timeline.begins(disturbance.name());
                self.make(disturbance).with_context(|| disturbance.name())?;
                made.all += 1;
                made.modes += usize::from(disturbance == Disturbance::Modes);
                thread::sleep(PAUSE);
            }
        }
        Ok(made)
    }

    fn set_endpoints(&self, hosts: &[Host]) -> Result<()> {
        self.cluster.apply_all(web_slices(hosts).text())
    }

    fn check_footprint(&self, at_start: &Footprint) -> Result<Check> {
        let mut last = Vec::new();
        let settled = Deadline::after(SHRINK_TIMEOUT).try_poll(|| {
            last = Footprint::read(&self.proxy, &self.world)?.more_than(at_start);
            anyhow::Ok(last.is_empty().then_some(()))
        })?;
        let now = Footprint::read(&self.proxy, &self.world)?;
        let failures = if settled.is_some() { Vec::new() } else { last };
        Ok(Check::new(format!("shunt holds {now}; at the start {at_start}"), failures))
    }

    /// Checks that the node's conntrack had room. If not, new connections failed in every mode, and
    /// the other checks say nothing about shunt.
    fn check_conntrack(&self) -> Result<Check> {
        let statistics = self.world.run(Host::Node1, "cat /proc/net/stat/nf_conntrack")?;
        let dropped = early_drops(&statistics).context("/proc/net/stat/nf_conntrack has no early_drop")?;
        let full = || format!("its table was full, and {dropped} entries gave way: raise nf_conntrack_max");
        let failures = if dropped == 0 { Vec::new() } else { vec![full()] };
        Ok(Check::new("conntrack had room for all connections", failures))
    }

    /// Checks that only the endpoints of the last change answer.
    fn check_follows(&mut self) -> Result<Check> {
        self.set_endpoints(&[Host::B1])?;
        let mut others = Vec::new();
        let followed = Deadline::after(FOLLOW_TIMEOUT).try_poll(|| {
            others.clear();
            for client in &mut self.clients {
                others.extend(client.answers_of_others(Host::B1)?);
            }
            anyhow::Ok(others.is_empty().then_some(()))
        })?;
        let failures = if followed.is_some() { Vec::new() } else { others };
        Ok(Check::new("afterwards, only the remaining endpoint answers", failures))
    }

    fn clean_up(&mut self, before: &KernelState) -> Result<Check> {
        let pinned = PinnedObjects::read(&self.world)?;
        self.proxy.stop()?;
        self.proxy.clean_up(&self.world)?;
        self.world.run(Host::Node1, REMOVE_EMPTY_TABLES)?;
        let mut failures = KernelState::read(&self.world)?.difference_from(before);
        failures.extend(pinned.remaining());
        Ok(Check::new(format!("--cleanup removes {pinned}, rules and links"), failures))
    }
}

/// Starts the load of the switches, and connections to the Service whose endpoints change.
fn start_load(client: &mut Client) -> Result<()> {
    let mut streams = switches::streams_of(client.host);
    // When another mode takes over, a socket that connected to no endpoint gets one by its VIP:
    // conntrack never saw the VIP of a socket that the programs served.
    streams.retain(|stream| client.host != Host::A1 || !stream.unconnected);
    for to in client.addresses() {
        let short = ConnectRequest::new(to, Protocol::Tcp, 4).with_timeout(TCP_TIMEOUT);
        let held = ConnectRequest {
            repeats: usize::MAX,
            repeat_interval: Duration::from_millis(20),
            ..short.clone()
        };
        streams.extend([short, held]);
    }
    for stream in &mut streams {
        stream.pause = CONNECTION_PAUSE;
    }
    client.agent.start_load(LoadRequest { streams })
}

/// Checks the connections of a client. The connections of a1 are translated at its sockets. Those
/// that are open when another mode removes the programs show the endpoint as their peer from then
/// on.
fn check_load(host: &str, report: &LoadReport, made: &Made) -> Check {
    let name = format!("{} disturbances, {host}", made.all);
    let max_wrong_peers = if host == Host::A1.name() { made.modes * MAX_OPEN } else { 0 };
    switches::check_report(&name, report, made.all * MAX_UNANSWERED, max_wrong_peers)
}

/// Returns how many entries conntrack gave up because its table was full. The text is a line of
/// names, and for each CPU a line of hexadecimal numbers.
fn early_drops(statistics: &str) -> Option<u64> {
    let mut lines = statistics.lines();
    let column = lines.next()?.split_whitespace().position(|name| name == "early_drop")?;
    let of_cpu = |line: &str| u64::from_str_radix(line.split_whitespace().nth(column)?, 16).ok();
    lines.map(of_cpu).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_gave_way_are_added_over_cpus() {
        let text = "entries  drop early_drop\n0000000a 00000001 00000010\n0000000a 00000000 00000002\n";
        assert_eq!(early_drops(text), Some(18));
        assert_eq!(early_drops("entries\n0\n"), None);
    }
}
