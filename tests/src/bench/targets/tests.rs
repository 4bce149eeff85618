//! Reports against targets, and targets against SPECIFICATION.md.

use std::collections::BTreeSet;

use super::{
    super::{Effort, kernel_maps::KernelMap},
    *,
};

fn memory(services: usize, source: &'static str, mib: u64) -> Memory {
    let maps = vec![KernelMap { name: "flows".to_owned(), kib: mib }];
    Memory { services, source, settled_kib: mib << 10, peak_kib: mib << 11, anonymous_kib: 0, maps }
}

/// Returns a benchmark of these parts, with all paths and workloads.
fn bench(parts: &[Part]) -> Bench {
    Bench {
        shunt: "shunt".into(),
        mode: "ebpf".into(),
        iptables: None,
        services: Vec::new(),
        parts: parts.to_vec(),
        paths: Path::ALL.to_vec(),
        ways: Vec::new(),
        workloads: Workload::ALL.to_vec(),
        effort: Effort::QUICK,
    }
}

fn outcome(report: &Report, what: &str) -> Option<TargetOutcome> {
    let results = check(report, &bench(&Part::ALL));
    let mut names = results.iter().map(|result| &result.what);
    assert!(names.any(|name| name == what), "{what}: no such target");
    results.iter().find(|result| result.what == what).map(|result| result.verdict)
}

#[test]
fn target_of_the_largest_cluster_is_that_of_the_api_source() {
    let mut report = Report::new("ebpf");
    report.memory = vec![memory(10_000, API, 40), memory(30_000, "manifests", 120), memory(30_000, API, 80)];
    let of = |what: &str| outcome(&report, what);
    assert_eq!(of("RSS settled, 10,000 Services"), Some(TargetOutcome::Reached));
    assert_eq!(of("RSS settled from the API, 30,000 Services"), Some(TargetOutcome::Reached));
    assert_eq!(of("RSS peak from the API, 30,000 Services"), Some(TargetOutcome::Missed));
    assert_eq!(of("restart, median, 30,000 Services"), Some(TargetOutcome::NotMeasured));
}

#[test]
fn missed_goal_does_not_break_the_promise() {
    let mut report = Report::new("ebpf");
    report.memory = vec![memory(10_000, API, 40)];
    report.memory[0].settled_kib = 55 << 10;
    let settled = "RSS settled, 10,000 Services";
    assert_eq!(outcome(&report, settled), Some(TargetOutcome::GoalMissed));
    assert!(TargetOutcome::GoalMissed.is_acceptable());
}

#[test]
fn target_that_was_not_measured_is_broken_unless_its_part_was_not_chosen() {
    let mut report = Report::new("ebpf");
    let mut holds = |bench: &Bench| {
        report.check_targets(bench);
        report.meets_all_targets()
    };
    assert!(!holds(&bench(&[Part::Changes])), "chosen, and without a value");
    assert!(holds(&bench(&[Part::Outside])), "a part without targets");
    assert!(!holds(&bench(&[Part::Data])));
    let other_path = Bench { paths: Vec::new(), ..bench(&[Part::Data]) };
    assert!(holds(&other_path));
    let other_workload = Bench { workloads: vec![Workload::Bulk], ..bench(&[Part::Data]) };
    assert!(holds(&other_workload));
}

#[test]
fn every_target_has_a_number_of_services_with_which_it_is_measured() {
    assert_eq!(sizes("ebpf"), [SMALL, LARGE, LARGEST]);
    assert_eq!(sizes("iptables"), [SMALL]);
    for target in TARGETS {
        let fits = sizes(target.mode).iter().any(|size| target.services.contains(size));
        assert!(fits, "{}", target.name());
    }
}

#[test]
fn report_names_the_command_that_measures_the_targets_of_another_mode() {
    let report = Report::new("ebpf").to_string();
    assert!(report.ends_with("mode nftables: cargo xtask bench --mode nftables --check\n"), "{report}");
    assert!(Report::new("iptables").to_string().contains("mode iptables has none"));
}

#[test]
fn smaller_clusters_do_not_count_for_the_largest() {
    let mut report = Report::new("nftables");
    report.memory = vec![memory(10_000, API, 400)];
    let peak = "RSS peak, 30,000 Services";
    assert_eq!(outcome(&report, peak), Some(TargetOutcome::NotMeasured));
}

#[test]
fn goals_are_harder_than_promises() {
    for target in TARGETS {
        let Some(goal) = target.goal else { continue };
        let is_harder = target.what.holds(goal, target.promise) && !target.what.holds(target.promise, goal);
        assert!(is_harder, "{}", target.name());
    }
}

/// Returns the targets that SPECIFICATION.md names: rows whose last cell has
/// "bench `MODE: NAME`", with the promise and the goal in the second and third cell.
fn specified() -> BTreeSet<[String; 3]> {
    let text = include_str!("../../../../SPECIFICATION.md");
    let cells = |line: &str| -> Option<[String; 3]> {
        let cells: Vec<&str> = line.strip_prefix('|')?.split('|').map(str::trim).collect();
        let [_, promise, goal, .., check, _] = cells[..] else { return None };
        let name = check.split("bench `").nth(1)?.split('`').next()?;
        Some([name, promise, goal].map(str::to_owned))
    };
    text.lines().filter_map(cells).collect()
}

#[test]
fn the_specification_has_every_target_with_its_numbers() {
    let row = |target: &Target| {
        let goal = target.goal.map(|goal| target.what.limit(goal)).unwrap_or_default();
        [format!("{}: {}", target.mode, target.name()), target.what.limit(target.promise), goal]
    };
    assert_eq!(specified(), TARGETS.iter().map(row).collect());
}
