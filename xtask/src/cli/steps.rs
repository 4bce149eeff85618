//! The commands that xtask runs on the workspace.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use xtask::run::Run;
use xtask::{search, workspace};

use super::release::Target;
use super::release::binaries::{self, Builder};
use super::setup::tools;
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

/// Returns a cargo command that compiles the workspace with the driver of clippy. The lints then
/// take a few seconds. A separate `cargo clippy` would read all crates again, which takes minutes.
///
/// Cargo keeps the results of the driver apart from those of rustc. The driver leaves out the
/// checks for null and misaligned pointers. `cargo test` and `cargo xtask test --quick` have them.
pub(crate) fn cargo_with_lints(limit: Duration) -> Run {
    cargo(limit)
        .env("RUSTC_WORKSPACE_WRAPPER", tools::component_path(tools::LINTER))
        // Both together are a third of the work. Few people run all tests again after a small
        // change, which is where incremental compilation helps.
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        // Warnings are found in the output.
        .env("CARGO_TERM_COLOR", "never")
}

/// Returns the command that installs a tool of crates.io into `root`, without default features. The
/// tool is not optimised, because building it takes longer than all that it does here.
pub(crate) fn install(name: &str, version: &str, features: &str, root: &Path, limit: Duration) -> Run {
    cargo(limit)
        .args(["install", name, "--version", version, "--locked", "--no-default-features"])
        .args(["--features", features, "--root"])
        .arg(root)
        .arg("--debug")
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        .env("CARGO_PROFILE_DEV_DEBUG_ASSERTIONS", "false")
        .env("CARGO_PROFILE_DEV_OVERFLOW_CHECKS", "false")
        // Cargo then builds in a folder that it removes.
        .without_env("CARGO_TARGET_DIR")
}

/// Returns the command that builds shunt.
pub(crate) fn build(release: bool) -> Run {
    let run = cargo(BUILD).args(["build", "--package", "proxy-userspace"]);
    if release { run.arg("--release") } else { run }
}

/// The packages with shunt and the programs of the test world.
pub(crate) const WORLD: [&str; 4] = ["--package", "proxy-userspace", "--package", "shunt-tests"];

/// Returns the command that builds shunt and the programs of the test world, as programs of a
/// release are built: what is tested is what is shipped.
pub(crate) fn build_world() -> Result<Run> {
    Ok(match Target::host() {
        Some(host) => Builder::prepare(host)?.cargo("build").args(WORLD),
        None => cargo(BUILD).args(["build", "--release"]).args(WORLD),
    })
}

/// Returns the folder of the programs that [`build_world`] builds.
pub(crate) fn world() -> PathBuf {
    Target::host().map_or_else(|| workspace::target().join("release"), binaries::release)
}

/// The profiles without optimisation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unoptimised {
    /// Shares crates with xtask itself. Without the features of shunt that bring many crates.
    Quick,
    /// Shares crates with tests.
    Dev,
}

impl Unoptimised {
    /// Returns the command that builds shunt and a program of the test world.
    pub(crate) fn build(self, program: &str) -> Run {
        let selection = match self {
            Self::Quick => &["quick", "--no-default-features"][..],
            Self::Dev => &["dev"],
        };
        let run = cargo(BUILD).args(["build", "--profile"]).args(selection).args(WORLD);
        run.args(["--bin", "shunt", "--bin", program])
    }

    /// Returns a program of the test world that runs shunt in a mode. [`Self::build`] builds it.
    pub(crate) fn program(self, name: &str, mode: &str) -> Run {
        let folder = match self {
            Self::Quick => "quick",
            Self::Dev => "debug",
        };
        with_shunt_in(&workspace::target().join(folder), name).args(["--mode", mode])
    }
}

/// Returns the conformance runner.
pub(crate) fn conformance(what: &Conformance) -> Run {
    world_program("conformance", &what.mode).args(choice(what))
}

/// Returns the conformance runner without optimisation.
pub(crate) fn quick_conformance(what: &Conformance) -> Run {
    Unoptimised::Dev.program("conformance", &what.mode).args(choice(what))
}

/// Returns the arguments for the cases and settings of a conformance run.
fn choice(what: &Conformance) -> impl Iterator<Item = OsString> {
    given([
        ("--iptables", what.iptables.clone().map(Into::into)),
        ("--source", what.source.clone().map(Into::into)),
        ("--backstop", what.backstop.clone().map(Into::into)),
        ("--links-path", what.links_path.clone().map(Into::into)),
        ("--links-masquerade", what.links_masquerade.clone().map(Into::into)),
        ("--links-direct", what.links_direct.clone().map(Into::into)),
        ("--links-xdp", what.links_xdp.clone().map(Into::into)),
        ("--sockets-scope", what.sockets_scope.clone().map(Into::into)),
        ("--cases", what.cases.clone().map(Into::into)),
        ("--only", list(&what.only)),
        ("--except", list(&what.except)),
    ])
}

/// Returns the benchmark. It writes its figures to this file.
pub(crate) fn bench(what: &Bench, json: &Path) -> Run {
    let options = given([
        ("--json", Some(json.into())),
        ("--iptables", what.iptables.clone().map(Into::into)),
        ("--services", list(&what.services)),
        ("--only", list(&what.only)),
        ("--path", list(&what.path)),
        ("--way", list(&what.way)),
        ("--workload", list(&what.workload)),
    ]);
    let switches = [("--quick", what.quick), ("--check", what.check)];
    let switches = switches.into_iter().filter_map(|(switch, on)| on.then_some(switch));
    world_program("bench", &what.mode).args(options).args(switches)
}

/// Returns the soak test.
pub(crate) fn soak(minutes: u64, seed: Option<u64>) -> Run {
    let options = [("--soak", Some(minutes.to_string())), ("--seed", seed.map(|seed| seed.to_string()))];
    with_shunt("churn").args(given(options.map(|(flag, value)| (flag, value.map(Into::into)))))
}

/// Returns the arguments for those flags that have a value.
fn given<const N: usize>(flags: [(&str, Option<OsString>); N]) -> impl Iterator<Item = OsString> {
    flags.into_iter().filter_map(|(flag, value)| Some([flag.into(), value?])).flatten()
}

/// Joins the values of a flag by commas. Returns `None` if there are none.
fn list(values: &[impl ToString]) -> Option<OsString> {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    (!values.is_empty()).then(|| values.join(",").into())
}

/// Returns a program of the test world that runs shunt in a mode. [`build_world`] builds it.
pub(crate) fn world_program(name: &str, mode: &str) -> Run {
    with_shunt(name).args(["--mode", mode])
}

/// Returns a program of the test world that runs shunt. [`build_world`] builds it.
pub(crate) fn with_shunt(name: &str) -> Run {
    with_shunt_in(&world(), name)
}

/// Returns a program of the test world that runs shunt. Both are in this folder.
pub(crate) fn with_shunt_in(folder: &Path, name: &str) -> Run {
    Run::new(folder.join(name)).arg("--shunt").arg(folder.join("shunt"))
}

/// The time limit of commands that build nothing.
pub(crate) const SHORT: Duration = Duration::from_mins(2);
/// The time limit of a build from scratch, on two slow cores.
pub(crate) const BUILD: Duration = Duration::from_mins(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conformance_gets_mode_cases_and_names() {
        let what = Conformance {
            mode: "ebpf".into(),
            source: Some("api".into()),
            backstop: Some("always".into()),
            links_path: Some("netfilter".into()),
            cases: Some("my cases".into()),
            only: vec!["hairpin".into(), "dual-stack".into()],
            ..Conformance::default()
        };
        let shown = conformance(&what).to_string();
        assert!(shown.contains("/release/conformance --shunt /"), "{shown}");
        assert!(
            shown.ends_with(
                "--mode ebpf --source api --backstop always --links-path netfilter --cases my cases --only hairpin,dual-stack"
            ),
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
            way: Vec::new(),
            workload: vec!["request-response".into()],
            quick: true,
            check: false,
            plot: None,
        };
        let shown = bench(&what, Path::new("target/bench-ebpf.json")).to_string();
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
