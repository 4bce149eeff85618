//! The steps of `cargo xtask test`.

use std::env;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use xtask::run::Run;
use xtask::workspace;

use super::cases::{ALIKE, IN_THE_DRIVER, MASQUERADED, NOT_IN_GUESTS, QUICK, QUICK_NETFILTER, SLOW};
use super::plan::Lane;
use super::step::{Count, Step};
use crate::cli::Conformance;
use crate::cli::counts;
use crate::cli::steps::{self, Unoptimised, world_program};
use crate::cli::vm::Kernel;

const LONG: Duration = Duration::from_mins(30);
/// Arguments of clippy.
const DENY: [&str; 4] = ["--all-targets", "--", "-D", "warnings"];
/// The tests of [`Extent::Quick`]: pure ones, those of layers, and the programs with frames.
const QUICK_TESTS: [&str; 5] = ["--lib", "--test", "layers", "--test", "ebpf_frames"];
/// The time limit of a guest. Other steps run at the same time, with higher priority.
const GUEST: Duration = Duration::from_hours(1);
/// Arguments of `churn` for the switches on a node where netfilter masquerades.
const NETFILTER_MASQUERADES: [&str; 5] =
    ["--links-masquerade", "netfilter", "--only-switches", "--switches", "1"];

/// Flags of `restarts` and `churn` for whole flows, and for an XDP program on links.
const WHOLE: [&str; 6] =
    ["--links-path", "direct", "--links-direct", "whole", "--links-masquerade", "programs"];
const XDP: [&str; 4] = ["--links-path", "direct", "--links-xdp", "generic"];
const FEW_CONNECTIONS: [&str; 4] = ["--connections", "1000", "--switches", "1"];

/// How much is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// What is likely to fail, in a few minutes.
    Quick,
    /// Everything, and the kernel tests also on the oldest kernel.
    Whole,
    /// Everything, and the kernel tests on all kernels.
    AllKernels,
}

/// The steps by what runs them.
#[derive(Default)]
pub(super) struct Suite {
    /// Steps before all others: they build what the others run.
    pub(super) build: Vec<Step>,
    /// Steps on this machine, with the programs that were built.
    pub(super) host: Vec<Step>,
    /// Steps at the same time as those of `host`, which mostly wait.
    pub(super) beside: Vec<Step>,
    /// Steps in virtual machines.
    pub(super) guests: Vec<Step>,
}

impl Suite {
    pub(super) fn new(extent: Extent) -> Result<Self> {
        let kernels = match extent {
            Extent::Quick => return quick(),
            Extent::Whole => &[Kernel::V5_10],
            Extent::AllKernels => Kernel::value_variants(),
        };
        let skip = if extent == Extent::AllKernels { &[][..] } else { &ALIKE };
        let mut guests = Vec::new();
        for kernel in kernels {
            guests.extend(kernel_steps(*kernel, skip)?);
        }
        // First, because it needs nothing that is built beside the steps on this machine.
        guests.insert(0, ipvs_step()?);
        let build = vec![Step::plain("build", steps::build_world()?)];
        // Last, because another step builds the tests at the same time.
        let host = [vec![demo()], packets()?, vec![tests()]].concat();
        Ok(Self { build, host, beside: [checks()?, daemons()].concat(), guests })
    }

    /// Returns the names of the steps of each lane.
    pub(super) fn names(&self) -> [(Lane, Vec<&'static str>); 4] {
        let names = |steps: &[Step]| steps.iter().map(|step| step.name).collect();
        [
            (Lane::Build, names(&self.build)),
            (Lane::Host, names(&self.host)),
            (Lane::Beside, names(&self.beside)),
            (Lane::Guest, names(&self.guests)),
        ]
    }
}

/// Returns the steps that need no optimised build: what most mistakes fail in.
fn quick() -> Result<Suite> {
    let cases = |mode: &str, names: &[&str]| {
        let only = names.iter().map(ToString::to_string).collect();
        let what = Conformance { mode: mode.into(), only, ..Conformance::default() };
        steps::quick_conformance(&what).limit(LONG)
    };
    let packets = [
        ("quick ebpf", cases("ebpf", &QUICK)),
        ("quick nftables", cases("nftables", &QUICK[..QUICK_NETFILTER])),
        ("quick iptables", cases("iptables", &QUICK[..QUICK_NETFILTER])),
    ];
    let packets = packets.map(|(name, run)| Step::counted(name, run, counts::conformance_result));
    let build = vec![
        format(),
        clippy(),
        clippy_of_the_demo(),
        Step::plain("quick build", Unoptimised::Dev.build("conformance")),
        Step::plain("quick build tests", steps::cargo(LONG).args(["test", "--no-run"]).args(QUICK_TESTS)),
        documents()?,
    ];
    let tests = all_tests(steps::cargo(LONG)).args(QUICK_TESTS);
    let tests = Step::counted("quick tests", tests, counts::test_result);
    Ok(Suite { build, host: [vec![tests], packets.into()].concat(), ..Suite::default() })
}

/// Returns the steps that compile beside others. Afterwards nothing is left to build.
fn checks() -> Result<Vec<Step>> {
    let steps = vec![
        format(),
        // The host build of proxy-ebpf is an empty program, so this checks little.
        Step::plain("clippy ebpf", steps::cargo(LONG).args(["clippy", "-p", "proxy-ebpf"]).args(DENY)),
        Step { denies_warnings: true, ..Step::plain("build tests", build_tests()) },
        documents()?,
    ];
    Ok(steps.into_iter().map(|step| Step { run: step.run.behind_others(), ..step }).collect())
}

fn format() -> Step {
    Step::plain("format", steps::cargo(steps::SHORT).args(["fmt", "--all", "--check"]))
}

/// Returns the check of all lints, for [`Extent::Quick`], which does not build all tests.
fn clippy() -> Step {
    Step::plain("clippy", steps::cargo(LONG).arg("clippy").args(DENY))
}

/// Returns the check of the features that the demo is built with. It takes minutes if nothing is
/// built, so only [`Extent::Quick`] has it.
fn clippy_of_the_demo() -> Step {
    let run = steps::cargo(LONG).arg("clippy").args(["--no-default-features", "--features", "xtask/cli"]);
    Step::plain("quick clippy", run.args(["--lib", "--bins", "--", "-D", "warnings"]))
}

fn documents() -> Result<Step> {
    Ok(Step::plain("docs", this()?.arg("docs").limit(LONG)))
}

/// Returns a run of this program, for another of its commands.
fn this() -> Result<Run> {
    Ok(Run::new(env::current_exe().context("cannot find this program")?))
}

/// Returns the build of all that `cargo test` runs, and of the programs that no test starts.
fn build_tests() -> Run {
    steps::cargo_with_lints(LONG).args(["build", "--all-targets"])
}

/// Returns the demo, with the optimised programs that the other steps use.
fn demo() -> Step {
    Step::plain("demo", world_program("demo", "ebpf").limit(steps::SHORT))
}

fn tests() -> Step {
    Step::counted("tests", all_tests(steps::cargo_with_lints(LONG)), counts::test_result)
}

/// Returns a run of tests with a cargo command.
fn all_tests(cargo: Run) -> Run {
    cargo.args(["test", "--no-fail-fast"]).env(steps::SAME_CASES.0, steps::SAME_CASES.1)
}

/// Returns the steps that send packets on this machine's kernel, with the programs that [`checks`]
/// built.
fn packets() -> Result<Vec<Step>> {
    let ours = ours()?;
    let with_api = Conformance { source: Some("api".into()), except: ours.clone(), ..in_mode_ebpf() };
    let of_netfilter = |mode: &str| Conformance {
        mode: mode.into(),
        except: SLOW.map(Into::into).into(),
        ..Conformance::default()
    };
    let of_other_modes = counted([
        ("soak", steps::soak(0, None)),
        ("conformance nftables", steps::conformance(&of_netfilter("nftables"))),
        ("conformance iptables", steps::conformance(&of_netfilter("iptables"))),
        ("conformance API", steps::conformance(&with_api)),
        ("conformance API nftables", steps::conformance(&some_with_api("nftables"))),
        ("conformance API iptables", steps::conformance(&some_with_api("iptables"))),
        ("restarts nftables", world_program("restarts", "nftables")),
        ("churn nftables", world_program("churn", "nftables").args(["--connections", "20000"])),
        ("restarts iptables", world_program("restarts", "iptables")),
        ("deployment", steps::with_shunt("deployment")),
        ("image", this()?.args(["release", "--try"])),
    ]);
    Ok([cases(ours), disruptions(), of_other_modes].into_iter().flatten().collect())
}

fn in_mode_ebpf() -> Conformance {
    Conformance { mode: "ebpf".into(), ..Conformance::default() }
}

/// Returns the steps that run conformance cases in mode ebpf: all, and with each link path those
/// that it concerns. `ours` are shunt's own cases.
fn cases(ours: Vec<String>) -> Vec<Step> {
    let all = in_mode_ebpf();
    // shunt's own cases run with the default settings, which need the backstop in many of them.
    let shared = Conformance { except: ours, ..all.clone() };
    let backstopped = Conformance { backstop: Some("always".into()), ..shared.clone() };
    let netfilter_path = Conformance { links_path: Some("netfilter".into()), ..shared };
    let masquerade = Conformance {
        links_masquerade: Some("netfilter".into()),
        only: MASQUERADED.map(Into::into).into(),
        ..all.clone()
    };
    let with_path = |path: &str| Conformance {
        links_path: Some(path.into()),
        only: MASQUERADED.map(Into::into).into(),
        ..in_mode_ebpf()
    };
    let masquerading = Some("programs".to_owned());
    let programs = Conformance { links_masquerade: masquerading.clone(), ..with_path("programs") };
    let xdp = Conformance { links_xdp: Some("generic".into()), ..with_path("direct") };
    let in_the_driver = Conformance {
        links_xdp: Some("native".into()),
        only: IN_THE_DRIVER.map(Into::into).into(),
        ..in_mode_ebpf()
    };
    let whole = Conformance {
        links_direct: Some("whole".into()),
        links_masquerade: masquerading,
        ..with_path("direct")
    };
    counted([
        ("conformance", steps::conformance(&all)),
        ("conformance backstop", steps::conformance(&backstopped)),
        ("conformance links path", steps::conformance(&netfilter_path)),
        ("conformance masquerade", steps::conformance(&masquerade)),
        ("conformance whole flows", steps::conformance(&whole)),
        ("conformance programs", steps::conformance(&programs)),
        ("conformance XDP", steps::conformance(&xdp)),
        ("conformance XDP native", steps::conformance(&in_the_driver)),
    ])
}

/// Returns the steps in which the proxy ends and starts under load in mode ebpf, with each link
/// path.
fn disruptions() -> Vec<Step> {
    let restarts = |flags: &[&str]| world_program("restarts", "ebpf").args(flags).args(["--kills", "30"]);
    let churn = |flags: &[&str]| world_program("churn", "ebpf").args(flags);
    counted([
        ("restarts", world_program("restarts", "ebpf")),
        ("restarts programs", restarts(&["--links-path", "programs"])),
        ("restarts links path", restarts(&["--links-path", "netfilter"])),
        ("restarts whole flows", restarts(&WHOLE)),
        ("restarts XDP", restarts(&XDP)),
        ("churn", churn(&[])),
        ("churn masquerade", churn(&NETFILTER_MASQUERADES)),
        ("churn whole flows", churn(&WHOLE).args(FEW_CONNECTIONS)),
        ("churn XDP", churn(&XDP).args(FEW_CONNECTIONS)),
    ])
}

/// Returns the steps that watch one shunt for minutes.
fn daemons() -> Vec<Step> {
    let daemon = |mode, only| world_program("daemon", mode).args(["--only", only]);
    counted([
        ("daemon", world_program("daemon", "ebpf")),
        ("daemon nftables", daemon("nftables", "monitoring,repairs,shutdown,top,ui")),
        ("daemon iptables", daemon("iptables", "repairs,shutdown,top")),
    ])
}

/// Returns steps with programs that count as the conformance runner does.
fn counted<const N: usize>(steps: [(&'static str, Run); N]) -> Vec<Step> {
    let step = |(name, run): (_, Run)| Step {
        echo: true,
        ..Step::counted(name, run.limit(LONG), counts::conformance_result)
    };
    steps.map(step).into()
}

/// Returns the cases with objects from the API for another mode. Few are enough: the source of
/// objects is the same in every mode.
fn some_with_api(mode: &str) -> Conformance {
    Conformance {
        mode: mode.into(),
        source: Some("api".into()),
        only: QUICK.map(Into::into).into(),
        ..Conformance::default()
    }
}

/// Returns the names of shunt's own cases. They test packets, whatever the source of objects.
fn ours() -> Result<Vec<String>> {
    let ours = workspace::root().join("tests/cases/shunt");
    let ours = fs::read_dir(&ours).with_context(|| format!("cannot read {}", ours.display()))?;
    let names = |entry: fs::DirEntry| Some(entry.path().file_stem()?.to_string_lossy().into_owned());
    Ok(ours.flatten().filter_map(names).collect())
}

/// Returns the step for mode ipvs, which runs this program again; that chooses a virtual machine if
/// this kernel has no IPVS. Guests are slow, so shunt's own cases, but that of SCTP, are
/// left to `cargo xtask conformance --mode ipvs`.
fn ipvs_step() -> Result<Step> {
    let ours: Vec<String> = ours()?.into_iter().filter(|case| case != "sctp").collect();
    let except = [ours, NOT_IN_GUESTS.map(Into::into).into()].concat().join(",");
    let run = this()?.args(["conformance", "--mode", "ipvs", "--except", &except]);
    Ok(Step::counted("conformance ipvs", run.limit(GUEST), counts::conformance_result))
}

/// Returns the steps for the kernel tests in virtual machines, which run this program again.
fn kernel_steps(kernel: Kernel, skip: &[&str]) -> Result<[Step; 2]> {
    let minutes = (GUEST.as_secs() / 60).to_string();
    let [name, programs, cases, _] = kernel.names();
    let run = this()?.args(["vm", "--kernel", name, "--limit", &minutes]).limit(GUEST);
    let run = run.args(skip.iter().flat_map(|skip| ["--skip", skip]));
    let count: Count = |line| counts::test_result(line).or_else(|| counts::conformance_result(line));
    let step = |step, part| Step::counted(step, run.clone().args(["--part", part]), count);
    Ok([step(programs, "programs"), step(cases, "cases")])
}

#[cfg(test)]
mod tests {
    use super::super::plan::is_step;
    use super::*;

    #[test]
    fn every_step_has_a_unique_name_and_a_time() {
        for extent in [Extent::Quick, Extent::AllKernels] {
            let names = Suite::new(extent).unwrap().names();
            let names: Vec<&str> = names.into_iter().flat_map(|(_, names)| names).collect();
            let mut unique = names.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(names.len(), unique.len(), "{names:?}");
            for name in names {
                assert!(is_step(name), "{name} has no time");
            }
        }
    }
}
