//! A node with a pod and a neighbour node, and commands that run on it.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use proxy_userspace::{
    dataplane::ebpf::{Marks, RuleDuties, Rules},
    kernel::{
        KernelError,
        command::{Command, Launcher},
        netns,
    },
};
use shunt_tests::{
    agent::protocol::{Attempt, ConnectRequest, FailureKind, Order, Protocol},
    deadline::scaled,
    world::{Host, World},
};

pub(crate) const MARKS: Marks = Marks { masquerade: 1 << 14, reject: 1 << 15 };
/// Packets from node2 to these ports of pod a1 carry a mark. Those to [`PLAIN`] carry none.
pub(crate) const MASQUERADED: u16 = 8080;
pub(crate) const REFUSED: u16 = 8081;
pub(crate) const PLAIN: u16 = 5353;

/// Rules that mark packets before conntrack, as link programs do.
const MARKING: &str = "
table inet marking {
    chain prerouting {
        type filter hook prerouting priority raw - 10;
        iifname eth0 th dport 8080 meta mark set meta mark | 0x4000
        iifname eth0 th dport 8081 meta mark set meta mark | 0x8000
    }
}
";

/// node1 with pod a1, and node2. node1 forwards node2's traffic to a1.
pub(crate) struct Node {
    world: World,
    pub(crate) launcher: Launcher,
    namespace: (PathBuf, File),
}

/// The result of a connection attempt from node2 to pod a1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AttemptResult {
    /// The pod answered, and saw an address of node1.
    AsNode1,
    /// The pod answered, and saw an address of node2.
    AsNode2,
    Refused,
    Silence,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self::with_launcher(Launcher::default())
    }

    /// Creates a node where only the commands with these names are installed.
    pub(crate) fn with_only(names: &[&str], directory: &Path) -> Self {
        for name in names {
            let target = Launcher::default().find(name).unwrap_or_else(|| panic!("{name} is not installed"));
            std::os::unix::fs::symlink(target, directory.join(name)).expect("an empty directory");
        }
        Self::with_launcher(Launcher::only_in([directory.to_owned()]))
    }

    fn with_launcher(launcher: Launcher) -> Self {
        let hosts = [Host::Node1, Host::A1, Host::Node2];
        let world =
            World::build(&hosts, Path::new(env!("CARGO_BIN_EXE_conformance"))).expect("build the world");
        let namespace = PathBuf::from(format!("/run/netns/{}-node1", world.name()));
        let file = File::open(&namespace).expect("node1's namespace");
        let node = Self { world, launcher, namespace: (namespace, file) };
        node.mark();
        node
    }

    pub(crate) fn mark(&self) {
        self.run("nft", &["-f", "-"], MARKING);
    }

    /// Runs a job in node1's network namespace.
    pub(crate) fn within<T: Send>(&self, job: impl FnOnce() -> Result<T, KernelError> + Send) -> T {
        netns::within(&self.namespace.0, &self.namespace.1, job).expect("on node1")
    }

    /// Runs a command on node1.
    pub(crate) fn run(&self, program: &str, args: &[&str], stdin: &str) -> String {
        let command = Command::new(program, &Launcher::default()).args(args).stdin(stdin);
        let command = command.limit(scaled(Duration::from_mins(1)));
        self.within(|| command.run()).stdout
    }

    /// Runs a command line on node1. If it starts with iptables, runs it for both families.
    pub(crate) fn both_families(&self, line: &str) {
        for line in [line.to_owned(), line.replacen("iptables", "ip6tables", 1)] {
            let (program, arguments) = line.split_once(' ').expect("a command line");
            // All network namespaces share the lock, and tests run at the same time.
            let wait = program.contains("tables").then_some("-w");
            self.run(program, &arguments.split(' ').chain(wait).collect::<Vec<_>>(), "");
        }
    }

    pub(crate) fn rules(&self) -> Rules {
        Rules::new(MARKS, true, self.launcher.clone())
    }

    pub(crate) fn put(&self, rules: &mut Rules) {
        self.within(|| rules.install());
        assert!(self.are_installed(rules), "the rules were just installed");
    }

    pub(crate) fn give(&self, rules: &mut Rules, duties: RuleDuties) {
        self.within(|| rules.set_duties(duties));
    }

    pub(crate) fn are_installed(&self, rules: &mut Rules) -> bool {
        self.within(|| Ok(rules.are_installed()))
    }

    pub(crate) fn remove(&self, rules: &mut Rules) {
        let errors = self.within(|| Ok(rules.remove()));
        assert!(errors.is_empty(), "{errors:?}");
    }

    /// Returns all netfilter rules of node1.
    pub(crate) fn everything(&self) -> String {
        let mut all = self.run("nft", &["list", "ruleset"], "");
        for (names, command) in [("ip", "iptables-legacy-save"), ("ip6", "ip6tables-legacy-save")] {
            let names = format!("/proc/thread-self/net/{names}_tables_names");
            if self.within(|| Ok(fs::read_to_string(&names).is_ok_and(|names| !names.is_empty()))) {
                all += &self.run(command, &[], "");
            }
        }
        // Comments contain counters and times.
        let lines = all.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.split(" [").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
    }

    /// Returns the result of an attempt, which must be the same for both families.
    pub(crate) fn try_both_families(&mut self, protocol: Protocol, port: u16) -> AttemptResult {
        let [v4, v6] = [0, 1].map(|family| self.try_one(protocol, port, family));
        assert_eq!(v4, v6, "{protocol:?} port {port}");
        v4
    }

    /// Connects from node2 to a port of pod a1, at its address of a family.
    fn connect(
        &mut self,
        request: impl FnOnce(SocketAddr) -> ConnectRequest,
        port: u16,
        family: usize,
    ) -> Vec<Attempt> {
        let to = SocketAddr::new(Host::A1.addresses()[family].addr(), port);
        self.world.agent(Host::Node2).expect("node2").connect(request(to)).expect("the agent answers")
    }

    /// Sends datagrams from node2 to pod a1, and returns the source addresses that the pod sees.
    pub(crate) fn datagram_sources(&mut self, port: u16, family: usize, attempts: usize) -> Vec<SocketAddr> {
        let (timeout, order) = (scaled(Duration::from_mins(1)), Order::Sequential);
        let answers = self.connect(
            |to| ConnectRequest { timeout, order, ..ConnectRequest::new(to, Protocol::Udp, attempts) },
            port,
            family,
        );
        let seen = answers.into_iter().map(|one| match one {
            Attempt::Answered(answer) => answer.client,
            Attempt::Failed(failure) => panic!("{failure:?}"),
        });
        seen.collect()
    }

    /// Tries again after silence: a machine with much other load may be silent for a moment.
    fn try_one(&mut self, protocol: Protocol, port: u16, family: usize) -> AttemptResult {
        match self.try_once(protocol, port, family, Duration::from_millis(700)) {
            AttemptResult::Silence => self.try_once(protocol, port, family, Duration::from_secs(3)),
            result => result,
        }
    }

    fn try_once(&mut self, protocol: Protocol, port: u16, family: usize, timeout: Duration) -> AttemptResult {
        let timeout = scaled(timeout);
        match &self.connect(
            |to| ConnectRequest { timeout, ..ConnectRequest::new(to, protocol, 1) },
            port,
            family,
        )[..]
        {
            [Attempt::Answered(answer)] if Host::Node1.owns(answer.client.ip()) => AttemptResult::AsNode1,
            [Attempt::Answered(answer)] if Host::Node2.owns(answer.client.ip()) => AttemptResult::AsNode2,
            [Attempt::Failed(failure)] if failure.kind == FailureKind::Refused => AttemptResult::Refused,
            [Attempt::Failed(failure)] if failure.kind == FailureKind::TimedOut => AttemptResult::Silence,
            other => panic!("{protocol:?} port {port}: {other:?}"),
        }
    }

    /// Asserts the results of marked packets. `plain` is the expected result of packets without a
    /// mark.
    pub(crate) fn assert_served(&mut self, plain: &AttemptResult) {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            assert_eq!(self.try_both_families(protocol, MASQUERADED), AttemptResult::AsNode1, "{protocol:?}");
            assert_eq!(self.try_both_families(protocol, REFUSED), AttemptResult::Refused, "{protocol:?}");
            assert_eq!(self.try_both_families(protocol, PLAIN), *plain, "{protocol:?}");
        }
    }
}
