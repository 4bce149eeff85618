//! What the ipvs mode plans against what upstream kube-proxy v1.36 left in the kernel for the same cases, step by step.
//!
//! `tests/recorded/ipvs` holds the latter: virtual and real servers, sets and their entries, addresses of kube-ipvs0, and rules as
//! iptables-save showed them; what is the same in all cases once, the rest by case and step. `default/kubernetes`, a Service of
//! the cluster that was recorded, is there in every case here too. Rules are compared chain by chain and in order, all else
//! as sets. [`EXPLAINED`] tells what may differ, and why.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::Path,
};

use anyhow::{Result, ensure};
use proxy_userspace::{
    assembly,
    dataplane::{
        Dataplane as _, PlanSize as _,
        ipvs::{Ipvs, Item, State},
    },
    kernel::command::Launcher,
    model::{Dirty, IpFamily},
};
use shunt_tests::{
    case::{Case, Step},
    planned::{PlannedCase, Tables},
    runner::cases_directory,
};

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded/ipvs");
/// What is the same in all of them.
const COMMON: &str = "common";

/// The cluster's own Service, which had no endpoint that could be reached.
const KUBERNETES: &str = "
apiVersion: v1
kind: Service
metadata: {name: kubernetes, namespace: default}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{name: https, port: 443, targetPort: 6443, protocol: TCP}]}
";

/// What only one side has: in which cases, what the difference begins and ends with; and why.
struct Explained {
    cases: &'static [&'static str],
    begins: &'static str,
    ends: &'static str,
    #[expect(dead_code, reason = "to be read by people")]
    why: &'static str,
}

/// Cases with an endpoint of this node that gets no traffic.
const NOT_SERVING: &[&str] = &["not-ready", "terminating-with-ready"];

const EXPLAINED: &[Explained] = &[
    Explained {
        cases: &["endpoint-replaced", "established-survives", "health-check-node-port"],
        begins: "only ours: real TCP ",
        ends: " 0",
        why: "a plan ends with weight 0 for what leaves; those without connections, which no plan knows of, are removed at once",
    },
    Explained {
        cases: &["internal-local-without-endpoint"],
        begins: "only theirs: real TCP 10.96.3.11:80 ",
        ends: " 1",
        why: "internalTrafficPolicy Local without an endpoint here: theirs falls back to all endpoints, ours refuses",
    },
    Explained {
        cases: NOT_SERVING,
        begins: "only theirs: entry KUBE-LOOP-BACK 10.244.1.11,tcp:8080,10.244.1.11",
        ends: "",
        why: "theirs has all endpoints of the node, ours those that get traffic: connections of others are conntrack's already",
    },
    Explained {
        cases: NOT_SERVING,
        begins: "only theirs: v4 nat KUBE-POSTROUTING ",
        ends: " --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
        why: "the rule is there where the set has entries",
    },
];

/// What is in the kernel: rules by family, table and chain, and lines of all else.
#[derive(Debug, Default, PartialEq, Eq)]
struct Kernel {
    chains: BTreeMap<String, Vec<String>>,
    others: BTreeSet<String>,
}

impl Kernel {
    /// Adds a line.
    fn add(&mut self, line: &str) {
        if !line.starts_with("v4 ") && !line.starts_with("v6 ") {
            self.others.insert(as_shown(line));
            return;
        }
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        let chain = format!("{} {} {}", word(), word(), word());
        self.chains.entry(chain).or_default().push(word());
    }

    fn of<'a>(lines: impl IntoIterator<Item = &'a str>) -> Self {
        let mut kernel = Self::default();
        lines.into_iter().for_each(|line| kernel.add(line));
        kernel
    }

    /// What is in one of the two alone, and chains that are the same in another order.
    fn differences(theirs: &Self, ours: &Self) -> Vec<String> {
        let mut differences = compare(&theirs.others, &ours.others, "");
        let names: BTreeSet<&String> = theirs.chains.keys().chain(ours.chains.keys()).collect();
        for name in names {
            let of = |kernel: &Self| kernel.chains.get(name).cloned().unwrap_or_default();
            let (theirs, ours) = (of(theirs), of(ours));
            let set = |rules: &[String]| rules.iter().cloned().collect();
            let found = compare(&set(&theirs), &set(&ours), &format!("{name} "));
            if found.is_empty() && theirs != ours {
                differences.push(format!("in another order: {name}: {theirs:#?} {ours:#?}"));
            }
            differences.extend(found);
        }
        differences
    }
}

/// As ipset shows an entry where it knows protocols by name: a range of one address as that address.
fn as_shown(line: &str) -> String {
    if !line.starts_with("entry ") {
        return line.to_owned();
    }
    let named = line.replace(",6:", ",tcp:").replace(",17:", ",udp:");
    let bits = if named.contains("KUBE-6-") { "/128" } else { "/32" };
    named.strip_suffix(bits).map_or(named.clone(), str::to_owned)
}

fn compare(theirs: &BTreeSet<String>, ours: &BTreeSet<String>, prefix: &str) -> Vec<String> {
    let only_theirs = theirs.difference(ours).map(|line| format!("only theirs: {prefix}{line}"));
    let only_ours = ours.difference(theirs).map(|line| format!("only ours: {prefix}{line}"));
    only_theirs.chain(only_ours).collect()
}

/// Returns what the kernel holds except rules, one line for each object. Sets and entries have the form
/// of `ipset save`.
fn lines(state: &State) -> Vec<String> {
    let mut lines = Vec::new();
    for (key, held) in &state.servers {
        let timeout = held.server.timeout;
        let persistent = if timeout == 0 { String::new() } else { format!(" persistent {timeout}") };
        lines.push(format!("server {key} {}{persistent}", held.server.scheduler));
        let reals = held.reals.iter();
        lines.extend(reals.map(|real| format!("real {key} {} {}", real.address, real.weight)));
    }
    let sets = state.sets.iter();
    lines.extend(sets.map(|(family, set)| format!("set {} {}", set.name(*family), set.definition(*family))));
    lines.extend(state.existing_items().filter_map(|item| match item {
        Item::Entry(entry) => Some(format!("entry {entry}")),
        Item::NodeDenied(..) => None,
    }));
    let bits = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
    lines.extend(state.addresses.iter().map(|address| format!("address {address}/{}", bits(address))));
    lines
}

/// A case in the middle of its steps, with what the plans so far left.
struct Scene {
    case: PlannedCase,
    state: State,
    tables: BTreeMap<&'static str, Tables>,
}

impl Scene {
    fn new(case: &Case) -> Result<Self> {
        let case = PlannedCase::new(case, "ipvs")?;
        case.manifests().place("kubernetes.yaml", KUBERNETES)?;
        let settings = assembly::ipvs(case.config(), &Launcher::default());
        let state = State::of_empty_kernel(&settings);
        Ok(Self { case, state, tables: BTreeMap::new() })
    }

    fn apply_step(&mut self, step: &Step) -> Result<()> {
        let dirty = self.case.apply_step(step)?;
        let plan = Ipvs::plan(&self.state, self.case.snapshot(), &dirty);
        for (family, input) in plan.rules() {
            let name = if family == IpFamily::V4 { "v4" } else { "v6" };
            self.tables.entry(name).or_default().restore(&input);
        }
        plan.record(&mut self.state);
        let rest = Ipvs::plan(&self.state, self.case.snapshot(), &Dirty::everything());
        ensure!(rest.is_empty(), "left out: {rest:#?}");
        Ok(())
    }

    fn kernel(&self) -> Kernel {
        let mut kernel = Kernel::of(lines(&self.state).iter().map(String::as_str));
        for (family, tables) in &self.tables {
            for ((table, chain), rule) in tables.rules() {
                kernel.add(&format!("{family} {table} {chain} {rule}"));
            }
        }
        kernel
    }
}

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(RECORDED).join(name).with_extension("txt")).expect("a recording")
}

/// What was there after a step; none where it was not recorded.
fn recorded(case: &str, step: usize) -> Option<Kernel> {
    let (common, text) = (read(COMMON), read(case));
    let section = text.split("# ").find_map(|part| part.strip_prefix(&format!("step{step}\n")))?;
    Some(Kernel::of(section.lines().chain(common.lines())))
}

fn explanation(case: &str, difference: &str) -> Option<usize> {
    EXPLAINED.iter().position(|explained| {
        explained.cases.contains(&case)
            && difference.starts_with(explained.begins)
            && difference.ends_with(explained.ends)
    })
}

/// What came of comparing.
#[derive(Default)]
struct Found {
    /// So many steps.
    compared: usize,
    unexplained: Vec<String>,
    /// Which explanations there was something to explain for.
    explained: BTreeSet<usize>,
}

impl Found {
    fn compare(&mut self, case: &Case) {
        let mut scene = Scene::new(case).expect("a scene");
        for (number, step) in case.steps.iter().enumerate() {
            let at = format!("{} step {}", case.name, number + 1);
            scene.apply_step(step).unwrap_or_else(|error| panic!("{at}: {error:#}"));
            let Some(theirs) = recorded(&case.name, number + 1) else { continue };
            self.compared += 1;
            for difference in Kernel::differences(&theirs, &scene.kernel()) {
                match explanation(&case.name, &difference) {
                    Some(explained) => drop(self.explained.insert(explained)),
                    None => self.unexplained.push(format!("{at}: {difference}")),
                }
            }
        }
    }
}

#[test]
fn what_is_planned_is_upstreams_in_every_case_and_step() {
    let files = fs::read_dir(RECORDED).expect("recordings");
    let names = files.filter_map(|entry| {
        entry.ok()?.file_name().into_string().ok()?.strip_suffix(".txt").map(str::to_owned)
    });
    let names: Vec<String> = names.filter(|name| name != COMMON).collect();
    assert_eq!(names.len(), 50, "every case that comes with the project, but its own");
    let mut found = Found::default();
    for case in Case::read_directory(cases_directory(), &names).expect("cases") {
        found.compare(&case);
    }
    let Found { compared, unexplained, explained } = found;
    assert!(unexplained.is_empty(), "{} differences:\n{}", unexplained.len(), unexplained.join("\n"));
    assert_eq!(compared, 63, "steps that were recorded");
    assert_eq!(explained.len(), EXPLAINED.len(), "an explanation that explains nothing");
}
