//! Compares the plans of the ipvs mode with what kube-proxy v1.36 left in the kernel, for each step
//! of each case.
//!
//! `tests/recorded/ipvs` holds kube-proxy's virtual and real servers, sets and their entries,
//! addresses of kube-ipvs0, and the rules that iptables-save showed. One file has what is the same
//! in all cases, the others what differs by case and step. Each case here also has the Service
//! `default/kubernetes` of the recorded cluster. Rules are compared by chain and in order,
//! everything else as sets. [`EXPLAINED`] lists the differences that are allowed, with reasons.

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
/// The file with what is the same in all cases.
const COMMON: &str = "common";

/// The Service of the recorded cluster. It had no reachable endpoint.
const KUBERNETES: &str = "
apiVersion: v1
kind: Service
metadata: {name: kubernetes, namespace: default}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{name: https, port: 443, targetPort: 6443, protocol: TCP}]}
";

/// An allowed difference: the cases, how the difference begins and ends, and the reason.
struct Explained {
    cases: &'static [&'static str],
    begins: &'static str,
    ends: &'static str,
    #[expect(dead_code, reason = "for readers")]
    why: &'static str,
}

/// Cases with an endpoint of this node that gets no traffic.
const NOT_SERVING: &[&str] = &["not-ready", "terminating-with-ready"];

const EXPLAINED: &[Explained] = &[
    Explained {
        cases: &["endpoint-replaced", "established-survives", "health-check-node-port"],
        begins: "only shunt: real TCP ",
        ends: " 0",
        why: "a plan only sets the weight of removed endpoints to 0; apply then removes real servers without connections",
    },
    Explained {
        cases: &["internal-local-without-endpoint"],
        begins: "only kube-proxy: real TCP 10.96.3.11:80 ",
        ends: " 1",
        why: "internalTrafficPolicy Local without an endpoint on this node: kube-proxy uses all endpoints, shunt refuses",
    },
    Explained {
        cases: NOT_SERVING,
        begins: "only kube-proxy: entry KUBE-LOOP-BACK 10.244.1.11,tcp:8080,10.244.1.11",
        ends: "",
        why: "kube-proxy adds all endpoints of the node, shunt those that get traffic: conntrack has the connections of the others",
    },
    Explained {
        cases: NOT_SERVING,
        begins: "only kube-proxy: v4 nat KUBE-POSTROUTING ",
        ends: " --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
        why: "the rule exists only if the set has entries",
    },
];

/// The content of the kernel: rules by family, table and chain, and lines for everything else.
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

    /// Returns what only one side has, and chains whose rules have another order.
    fn differences(kube_proxy: &Self, shunt: &Self) -> Vec<String> {
        let mut differences = compare(&kube_proxy.others, &shunt.others, "");
        let names: BTreeSet<&String> = kube_proxy.chains.keys().chain(shunt.chains.keys()).collect();
        for name in names {
            let of = |kernel: &Self| kernel.chains.get(name).cloned().unwrap_or_default();
            let (kube_proxy, shunt) = (of(kube_proxy), of(shunt));
            let set = |rules: &[String]| rules.iter().cloned().collect();
            let found = compare(&set(&kube_proxy), &set(&shunt), &format!("{name} "));
            if found.is_empty() && kube_proxy != shunt {
                differences.push(format!("another order: {name}: {kube_proxy:#?} {shunt:#?}"));
            }
            differences.extend(found);
        }
        differences
    }
}

/// Returns an entry as ipset prints it: with the name of the protocol, and a range of one address
/// as that address.
fn as_shown(line: &str) -> String {
    if !line.starts_with("entry ") {
        return line.to_owned();
    }
    let named = line.replace(",6:", ",tcp:").replace(",17:", ",udp:");
    let bits = if named.contains("KUBE-6-") { "/128" } else { "/32" };
    named.strip_suffix(bits).map_or(named.clone(), str::to_owned)
}

fn compare(kube_proxy: &BTreeSet<String>, shunt: &BTreeSet<String>, prefix: &str) -> Vec<String> {
    let only_kube_proxy = kube_proxy.difference(shunt).map(|line| format!("only kube-proxy: {prefix}{line}"));
    let only_shunt = shunt.difference(kube_proxy).map(|line| format!("only shunt: {prefix}{line}"));
    only_kube_proxy.chain(only_shunt).collect()
}

/// Returns what the kernel holds except rules, one line for each object. Sets and entries have the
/// form of `ipset save`.
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

/// A case with the state after the steps so far.
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
        ensure!(rest.is_empty(), "the plan is incomplete: {rest:#?}");
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

/// Returns the recorded content of the kernel after a step, if it was recorded.
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

/// The results of the comparison.
#[derive(Default)]
struct Comparison {
    /// The number of compared steps.
    compared: usize,
    unexplained: Vec<String>,
    /// The indices of the explanations that were needed.
    explained: BTreeSet<usize>,
}

impl Comparison {
    fn compare(&mut self, case: &Case) {
        let mut scene = Scene::new(case).expect("a scene");
        for (number, step) in case.steps.iter().enumerate() {
            let at = format!("{} step {}", case.name, number + 1);
            scene.apply_step(step).unwrap_or_else(|error| panic!("{at}: {error:#}"));
            let Some(kube_proxy) = recorded(&case.name, number + 1) else { continue };
            self.compared += 1;
            for difference in Kernel::differences(&kube_proxy, &scene.kernel()) {
                match explanation(&case.name, &difference) {
                    Some(explained) => drop(self.explained.insert(explained)),
                    None => self.unexplained.push(format!("{at}: {difference}")),
                }
            }
        }
    }
}

#[test]
fn plans_match_kube_proxy_in_every_case_and_step() {
    let files = fs::read_dir(RECORDED).expect("recordings");
    let names = files.filter_map(|entry| {
        entry.ok()?.file_name().into_string().ok()?.strip_suffix(".txt").map(str::to_owned)
    });
    let names: Vec<String> = names.filter(|name| name != COMMON).collect();
    assert_eq!(names.len(), 50, "all cases of the project");
    let mut found = Comparison::default();
    for case in Case::read_directory(cases_directory(), &names).expect("cases") {
        found.compare(&case);
    }
    let Comparison { compared, unexplained, explained } = found;
    assert!(unexplained.is_empty(), "{} differences:\n{}", unexplained.len(), unexplained.join("\n"));
    assert_eq!(compared, 63, "steps that were recorded");
    assert_eq!(explained.len(), EXPLAINED.len(), "an explanation is not needed");
}
