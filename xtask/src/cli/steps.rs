//! The cargo commands that xtask runs on the workspace.

use std::env;
use std::time::Duration;

use xtask::run::Run;
use xtask::{search, workspace};

use super::{Bench, Conformance};

/// The environment in which properties are tried with the same cases every time: what a run says of a change is about the change.
pub(crate) const SAME_CASES: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

/// Variables that `cargo run` sets for xtask itself; crates that read them would be rebuilt for no reason.
const OURS: [&str; 6] = [
    "CARGO_PKG_",
    "CARGO_MANIFEST_",
    "CARGO_BIN_",
    "CARGO_CRATE_NAME",
    "CARGO_PRIMARY_PACKAGE",
    "LD_LIBRARY_PATH",
];

/// A cargo command on the workspace, for at most `limit`; later than that something hangs.
pub(crate) fn cargo(limit: Duration) -> Run {
    let mut run = Run::new(search::cargo())
        .dir(workspace::root())
        // A relative one counts from the caller's folder, not from ours.
        .env("CARGO_TARGET_DIR", workspace::target())
        .limit(limit);
    for (name, _) in env::vars_os() {
        if OURS.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            run = run.without_env(name);
        }
    }
    run
}

/// Builds shunt.
pub(crate) fn build(release: bool) -> Run {
    let run = cargo(BUILD).args(["build", "--package", "proxy-userspace"]);
    if release { run.arg("--release") } else { run }
}

/// Builds what demo and conformance run: shunt, and the programs of the test world.
pub(crate) fn build_world() -> Run {
    cargo(BUILD).args(["build", "--release", "--package", "proxy-userspace", "--package", "shunt-tests"])
}

/// The demo, built by [`build_world`].
pub(crate) fn demo(mode: &str) -> Run {
    world_program("demo", mode)
}

/// The conformance runner, built by [`build_world`].
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

/// The program that kills and restarts shunt under load, built by [`build_world`].
pub(crate) fn restarts(mode: &str) -> Run {
    world_program("restarts", mode)
}

/// The benchmark, built by [`build_world`]. It leaves its figures in the target folder.
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

/// The program with the scenes of the daemon, built by [`build_world`].
pub(crate) fn daemon(mode: &str) -> Run {
    world_program("daemon", mode)
}

/// The program that changes endpoints and restarts shunt under load, built by [`build_world`].
pub(crate) fn churn(mode: &str) -> Run {
    world_program("churn", mode)
}

/// The program that runs shunt under the capabilities of its manifest and changes its configuration, built by [`build_world`].
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

/// The longest a build from scratch may take, on two slow cores.
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
    fn bench_gets_numbers_and_switches_and_a_place_for_its_figures() {
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
    fn without_cases_and_names_the_runner_takes_its_own() {
        let what = Conformance { mode: "ebpf".into(), ..Conformance::default() };
        assert!(conformance(&what).to_string().ends_with("--mode ebpf"));
    }
}
