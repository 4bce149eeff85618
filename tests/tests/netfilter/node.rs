//! A node with a pod behind it and another node in front, and commands run on it.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use proxy_userspace::{
    dataplane::ebpf::{Marks, Rules},
    kernel::{
        KernelError,
        command::{Command, SearchPath},
        netns,
    },
};
use shunt_tests::{
    agent::protocol::{Dial, FailureKind, Order, Protocol, Try},
    deadline::patient,
    world::{Host, World},
};

pub(crate) const MARKS: Marks = Marks { masquerade: 1 << 14, reject: 1 << 15 };
/// Packets from node2 to these ports of pod a1 carry a mark; to [`PLAIN`] they carry none.
pub(crate) const MASQUERADED: u16 = 8080;
pub(crate) const REFUSED: u16 = 8081;
pub(crate) const PLAIN: u16 = 5353;

/// Marks packets as the programs on links do: before conntrack.
const MARKING: &str = "
table inet marking {
    chain prerouting {
        type filter hook prerouting priority raw - 10;
        iifname eth0 th dport 8080 meta mark set meta mark | 0x4000
        iifname eth0 th dport 8081 meta mark set meta mark | 0x8000
    }
}
";

/// node1 with pod a1, and node2, whose traffic to a1 is forwarded by node1.
pub(crate) struct Node {
    world: World,
    pub(crate) path: SearchPath,
    namespace: (PathBuf, File),
}

/// How a connection attempt of node2 to pod a1 ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The pod answered, and saw an address of node1.
    AsNode1,
    /// The pod answered, and saw an address of node2.
    AsNode2,
    Refused,
    Silence,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self::with_commands(SearchPath::default())
    }

    /// A node where only the commands of these names are installed.
    pub(crate) fn with_only(names: &[&str], directory: &Path) -> Self {
        for name in names {
            let target =
                SearchPath::default().find(name).unwrap_or_else(|| panic!("{name} is not installed"));
            std::os::unix::fs::symlink(target, directory.join(name)).expect("an empty directory");
        }
        Self::with_commands(SearchPath::only([directory.to_owned()]))
    }

    fn with_commands(path: SearchPath) -> Self {
        let hosts = [Host::Node1, Host::A1, Host::Node2];
        let world =
            World::build(&hosts, Path::new(env!("CARGO_BIN_EXE_conformance"))).expect("build the world");
        let namespace = PathBuf::from(format!("/run/netns/{}-node1", world.name()));
        let file = File::open(&namespace).expect("node1's namespace");
        let node = Self { world, path, namespace: (namespace, file) };
        node.mark();
        node
    }

    pub(crate) fn mark(&self) {
        self.run("nft", &["-f", "-"], MARKING);
    }

    /// Runs something in node1's network namespace.
    pub(crate) fn within<T: Send>(&self, job: impl FnOnce() -> Result<T, KernelError> + Send) -> T {
        netns::within(&self.namespace.0, &self.namespace.1, job).expect("on node1")
    }

    /// Runs a command on node1.
    pub(crate) fn run(&self, program: &str, args: &[&str], stdin: &str) -> String {
        let command = Command::new(program, &SearchPath::default()).args(args).stdin(stdin);
        let command = command.limit(patient(Duration::from_secs(10)));
        self.within(|| command.run()).stdout
    }

    /// Runs a command line on node1, for each family's command if it begins with iptables.
    pub(crate) fn both_families(&self, line: &str) {
        for line in [line.to_owned(), line.replacen("iptables", "ip6tables", 1)] {
            let words: Vec<_> = line.split(' ').collect();
            self.run(words[0], &words[1..], "");
        }
    }

    pub(crate) fn rules(&self) -> Rules {
        Rules::new(MARKS, self.path.clone())
    }

    pub(crate) fn put(&self, rules: &mut Rules) {
        self.within(|| rules.put());
        assert!(self.are_put(rules), "what was just put there");
    }

    pub(crate) fn are_put(&self, rules: &mut Rules) -> bool {
        self.within(|| Ok(rules.are_put()))
    }

    pub(crate) fn remove(&self, rules: &mut Rules) {
        let errors = self.within(|| Ok(rules.remove()));
        assert!(errors.is_empty(), "{errors:?}");
    }

    /// All that netfilter holds on node1.
    pub(crate) fn everything(&self) -> String {
        let mut all = self.run("nft", &["list", "ruleset"], "");
        for (names, command) in [("ip", "iptables-legacy-save"), ("ip6", "ip6tables-legacy-save")] {
            let names = format!("/proc/thread-self/net/{names}_tables_names");
            if self.within(|| Ok(fs::read_to_string(&names).is_ok_and(|names| !names.is_empty()))) {
                all += &self.run(command, &[], "");
            }
        }
        // Counters and times count on.
        let lines = all.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.split(" [").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
    }

    /// How an attempt ends, the same way for both families.
    pub(crate) fn try_both_families(&mut self, protocol: Protocol, port: u16) -> Seen {
        let [v4, v6] = [0, 1].map(|family| self.try_one(protocol, port, family));
        assert_eq!(v4, v6, "{protocol:?} port {port}");
        v4
    }

    /// From node2 to a port of pod a1, by its address of a family.
    fn dial(&mut self, dial: impl FnOnce(SocketAddr) -> Dial, port: u16, family: usize) -> Vec<Try> {
        let to = SocketAddr::new(Host::A1.addresses()[family].addr(), port);
        self.world.agent(Host::Node2).expect("node2").dial(dial(to)).expect("the agent answers")
    }

    /// The addresses that pod a1 sees of datagrams of node2, which it answers, one after the other.
    pub(crate) fn seen_of_datagrams(&mut self, port: u16, family: usize, tries: usize) -> Vec<SocketAddr> {
        let (timeout, order) = (patient(Duration::from_secs(5)), Order::InSequence);
        let answers =
            self.dial(|to| Dial { timeout, order, ..Dial::new(to, Protocol::Udp, tries) }, port, family);
        let seen = answers.into_iter().map(|one| match one {
            Try::Answered(answer) => answer.seen,
            Try::Failed(failure) => panic!("{failure:?}"),
        });
        seen.collect()
    }

    fn try_one(&mut self, protocol: Protocol, port: u16, family: usize) -> Seen {
        let timeout = patient(Duration::from_millis(700));
        match &self.dial(|to| Dial { timeout, ..Dial::new(to, protocol, 1) }, port, family)[..] {
            [Try::Answered(answer)] if Host::Node1.owns(answer.seen.ip()) => Seen::AsNode1,
            [Try::Answered(answer)] if Host::Node2.owns(answer.seen.ip()) => Seen::AsNode2,
            [Try::Failed(failure)] if failure.kind == FailureKind::Refused => Seen::Refused,
            [Try::Failed(failure)] if failure.kind == FailureKind::TimedOut => Seen::Silence,
            other => panic!("{protocol:?} port {port}: {other:?}"),
        }
    }

    /// The three kinds of packets fare as they should; `plain` is what becomes of those without a mark.
    pub(crate) fn assert_served(&mut self, plain: &Seen) {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            assert_eq!(self.try_both_families(protocol, MASQUERADED), Seen::AsNode1, "{protocol:?}");
            assert_eq!(self.try_both_families(protocol, REFUSED), Seen::Refused, "{protocol:?}");
            assert_eq!(self.try_both_families(protocol, PLAIN), *plain, "{protocol:?}");
        }
    }
}
