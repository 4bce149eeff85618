//! Our rules against those that upstream kube-proxy v1.36 wrote for the same cases, step by step.
//!
//! `tests/recorded/iptables` holds them as iptables-save showed them: those that are the same in all cases once, the others by
//! case, step and family, without those of `default/kubernetes`, a Service of the cluster they were recorded in. They are compared
//! chain by chain, rule by rule and in order; in the chains that Services share only as sets, since upstream writes those in the
//! order of a hash map, but for the last rule of KUBE-SERVICES. [`EXPLAINED`] tells what may differ, and why.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use shunt_tests::{case::Case, planned::Tables, runner::own_cases};

use crate::scene::Scene;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded/iptables");
const FAMILIES: [&str; 2] = ["v4", "v6"];
/// Chains that all Services add to.
const SHARED: [&str; 4] =
    ["KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"];

/// Rules that only one side has: the case, a part of the rule, and why.
const EXPLAINED: &[(&str, &str, &str)] = &[];

type Chains = BTreeMap<String, Vec<String>>;

#[test]
fn rules_are_upstreams_in_every_case_and_step() {
    let names: Vec<String> = fs::read_dir(RECORDED)
        .expect("recordings")
        .filter_map(|entry| {
            entry.ok()?.file_name().into_string().ok()?.strip_suffix(".txt").map(str::to_owned)
        })
        .filter(|name| !name.starts_with("common-"))
        .collect();
    assert_eq!(names.len(), 50, "every case that comes with the project, but its own");
    let mut differences = Vec::new();
    for case in Case::read_directory(own_cases(), &names).expect("cases") {
        let mut scene = Scene::new(&case).expect("a scene");
        for (number, step) in case.steps.iter().enumerate() {
            scene.play(step).unwrap_or_else(|error| panic!("{} step {}: {error:#}", case.name, number + 1));
            for (family, tables) in FAMILIES.into_iter().zip(&scene.tables) {
                let Some(theirs) = recorded(&case.name, number + 1, family) else { continue };
                let at = format!("{} step {} {family}", case.name, number + 1);
                differences.extend(compare(&at, &theirs, &ours(tables)));
            }
        }
    }
    differences.retain(|difference| !is_explained(difference));
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

fn is_explained(difference: &str) -> bool {
    EXPLAINED.iter().any(|(case, part, _)| difference.starts_with(case) && difference.contains(part))
}

/// The rules of a step; none where it was not recorded.
fn recorded(case: &str, step: usize, family: &str) -> Option<Chains> {
    let read = |name: &str| fs::read_to_string(Path::new(RECORDED).join(name)).expect("a recording");
    let text = read(&format!("{case}.txt"));
    let section = text.split("# ").find_map(|part| part.strip_prefix(&format!("step{step} {family}\n")))?;
    let mut chains = Chains::new();
    for line in section.lines().chain(read(&format!("common-{family}.txt")).lines()) {
        add(&mut chains, line);
    }
    Some(chains)
}

fn ours(tables: &Tables) -> Chains {
    let mut chains = Chains::new();
    for ((table, chain), rule) in tables.rules() {
        add(&mut chains, &format!("{table} {chain} {rule}"));
    }
    chains
}

fn add(chains: &mut Chains, line: &str) {
    let line = line.replace("--nfacct-name  ", "--nfacct-name ");
    let mut words = line.splitn(3, ' ');
    let mut word = || words.next().unwrap_or_default().to_owned();
    let chain = format!("{} {}", word(), word());
    chains.entry(chain).or_default().push(word());
}

fn compare(at: &str, theirs: &Chains, ours: &Chains) -> Vec<String> {
    let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    let empty = Vec::new();
    let mut differences = Vec::new();
    for name in names {
        let (theirs, ours) = (theirs.get(name).unwrap_or(&empty), ours.get(name).unwrap_or(&empty));
        let is_shared = SHARED.iter().any(|shared| name.ends_with(shared));
        let (their_set, our_set): (BTreeSet<_>, BTreeSet<_>) =
            (theirs.iter().collect(), ours.iter().collect());
        differences
            .extend(their_set.difference(&our_set).map(|rule| format!("{at}: only theirs: {name} {rule}")));
        differences
            .extend(our_set.difference(&their_set).map(|rule| format!("{at}: only ours: {name} {rule}")));
        let is_ordered = if is_shared {
            theirs.last() == ours.last() || !name.starts_with("nat KUBE-SERVICES")
        } else {
            theirs == ours
        };
        if their_set == our_set && !is_ordered {
            differences.push(format!("{at}: in another order: {name}:\n  {theirs:#?}\n  {ours:#?}"));
        }
    }
    differences
}
