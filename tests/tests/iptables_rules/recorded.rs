//! Compares our rules with those that upstream kube-proxy v1.36 wrote for the same cases, step by
//! step.
//!
//! `tests/recorded/iptables` holds upstream's rules as iptables-save showed them: the common rules
//! once, the others by case, step and family, without those of `default/kubernetes`, a Service of
//! the recording cluster. Rules are compared chain by chain and in order. Chains that Services
//! share are compared as sets, because upstream writes them in the order of a hash map, except the
//! last rule of KUBE-SERVICES. [`EXPLAINED`] lists what may differ, and why.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use shunt_tests::{case::Case, planned::Tables, runner::cases_directory};

use crate::scene::Scene;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded/iptables");
const FAMILIES: [&str; 2] = ["v4", "v6"];
/// The chains that Services share.
const SHARED: [&str; 4] =
    ["KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"];

/// Rules that only one side has: case, part of the rule, reason.
const EXPLAINED: &[(&str, &str, &str)] = &[];

type Chains = BTreeMap<String, Vec<String>>;

#[test]
fn rules_equal_upstreams_in_every_case_and_step() {
    let names: Vec<String> = fs::read_dir(RECORDED)
        .expect("recordings")
        .filter_map(|entry| {
            entry.ok()?.file_name().into_string().ok()?.strip_suffix(".txt").map(str::to_owned)
        })
        .filter(|name| !name.starts_with("common-"))
        .collect();
    assert_eq!(names.len(), 50, "every shared case");
    let mut differences = Vec::new();
    for case in Case::read_directory(cases_directory(), &names).expect("cases") {
        let mut scene = Scene::new(&case).expect("a scene");
        for (number, step) in case.steps.iter().enumerate() {
            scene
                .apply_step(step)
                .unwrap_or_else(|error| panic!("{} step {}: {error:#}", case.name, number + 1));
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

/// Returns the recorded rules of a step, or `None` if it was not recorded.
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
