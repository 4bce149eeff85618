//! The commands that xtask runs on the workspace.

use std::env;
use std::time::Duration;

use xtask::run::Run;
use xtask::{search, workspace};

use super::{Bench, Conformance};

/// The environment variable that makes properties use the same cases every time, so that a result
/// is about the change.
pub(crate) const SAME_CASES: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

/// Variables that `cargo run` sets for xtask. Crates that read them would be rebuilt without need.
const OURS: [&str; 6] = [
    "CARGO_PKG_",
    "CARGO_MANIFEST_",
    "CARGO_BIN_",
    "CARGO_CRATE_NAME",
    "CARGO_PRIMARY_PACKAGE",
    "LD_LIBRARY_PATH",
];

/// Returns a cargo command on the workspace, with a time limit.
pub(crate) fn cargo(limit: Duration) -> Run {
    let mut run = Run::new(search::cargo())
        .dir(workspace::root())
        // A relative path is relative to the caller's folder.
        .env("CARGO_TARGET_DIR", workspace::target())
        .limit(limit);
    for (name, _) in env::vars_os() {
        if OURS.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            run = run.without_env(name);
        }
    }
    run
}

/// Returns the command that builds shunt.
pub(crate) fn build(release: bool) -> Run {
    let run = cargo(BUILD).args(["build", "--package", "proxy-userspace"]);
    if release { run.arg("--release") } else { run }
}

/// Returns the command that builds shunt and the programs of the test world.
pub(crate) fn build_world() -> Run {
    cargo(BUILD).args(["build", "--release", "--package", "proxy-userspace", "--package", "shunt-tests"])
}

/// Returns the demo, built by [`build_world`].
pub(crate) fn demo(mode: &str) -> Run {
    world_program("demo", mode)
}

/// Returns the conformance runner, built by [`build_world`].
pub(crate) fn conformance(what: &Conformance) -> Run {
    let mut run = world_program("conformance", &what.mode);
    if let Some(iptables) = &what.iptables {
        run = run.arg("--iptables").arg(iptables);
    }
    if let Some(source) = &what.source {
        run = run.arg("--source").arg(source);
    }
    if let Some(cases) = &what.cases {
        run = run.arg("--cases").arg(cases);
    }
    if !what.only.is_empty() {
        run = run.arg("--only").arg(what.only.join(","));
    }
    if !what.except.is_empty() {
        run = run.arg("--except").arg(what.except.join(","));
    }
    run
}

/// Returns the program that kills and restarts shunt under load, built by [`build_world`].
pub(crate) fn restarts(mode: &str) -> Run {
    world_program("restarts", mode)
}

/// Returns the benchmark, built by [`build_world`]. It writes its figures to the target folder.
pub(crate) fn bench(what: &Bench) -> Run {
    let mut run = world_program("bench", &what.mode);
    run = run.arg("--json").arg(workspace::target().join(format!("bench-{}.json", what.mode)));
    if let Some(iptables) = &what.iptables {
        run = run.arg("--iptables").arg(iptables);
    }
    if !what.services.is_empty() {
        let numbers: Vec<String> = what.services.iter().map(ToString::to_string).collect();
        run = run.arg("--services").arg(numbers.join(","));
    }
    let lists = [("--only", &what.only), ("--path", &what.path), ("--workload", &what.workload)];
    for (flag, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
        run = run.arg(flag).arg(list.join(","));
    }
    let switches = [("--quick", what.quick), ("--check", what.check)];
    run.args(switches.into_iter().filter_map(|(switch, on)| on.then_some(switch)))
}

/// Returns the program with the scenes of the daemon, built by [`build_world`].
pub(crate) fn daemon(mode: &str) -> Run {
    world_program("daemon", mode)
}

/// Returns the program that changes endpoints and restarts shunt under load, built by
/// [`build_world`].
pub(crate) fn churn(mode: &str) -> Run {
    world_program("churn", mode)
}

/// Returns the program that runs shunt with the capabilities of its manifest and changes its
/// configuration, built by [`build_world`].
pub(crate) fn deployment() -> Run {
    with_shunt("deployment")
}

fn world_program(name: &str, mode: &str) -> Run {
    with_shunt(name).args(["--mode", mode])
}

fn with_shunt(name: &str) -> Run {
    let release = workspace::release();
    Run::new(release.join(name)).arg("--shunt").arg(release.join("shunt"))
}

/// The time limit of a build from scratch, on two slow cores.
const BUILD: Duration = Duration::from_mins(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conformance_gets_mode_cases_and_names() {
        let what = Conformance {
            mode: "ebpf".into(),
            iptables: None,
            source: Some("api".into()),
            cases: Some("my cases".into()),
            kernel: None,
            only: vec!["hairpin".into(), "dual-stack".into()],
            except: Vec::new(),
        };
        let shown = conformance(&what).to_string();
        assert!(shown.contains("/release/conformance --shunt /"), "{shown}");
        assert!(
            shown.ends_with("--mode ebpf --source api --cases my cases --only hairpin,dual-stack"),
            "{shown}"
        );
    }

    #[test]
    fn bench_gets_numbers_switches_and_output_file() {
        let what = Bench {
            mode: "ebpf".into(),
            iptables: None,
            services: vec![10, 500],
            only: Vec::new(),
            path: Vec::new(),
            workload: vec!["request-response".into()],
            quick: true,
            check: false,
        };
        let shown = bench(&what).to_string();
        assert!(
            shown.ends_with("/bench-ebpf.json --services 10,500 --workload request-response --quick"),
            "{shown}"
        );
    }

    #[test]
    fn runner_uses_its_own_cases_by_default() {
        let what = Conformance { mode: "ebpf".into(), ..Conformance::default() };
        assert!(conformance(&what).to_string().ends_with("--mode ebpf"));
    }
}
