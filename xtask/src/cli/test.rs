//! `cargo xtask test`: every check there is, and a table of how they came out.

use std::env;
use std::fs::{self, File};
use std::io::Write as _;
use std::iter;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use xtask::run::{self, Run};
use xtask::{ebpf, workspace};

use super::counts::{self, Counts};
use super::failures::Failures;
use super::progress::Progress;
use super::summary::{Outcome, Summary};
use super::vm::Kernel;
use super::{Conformance, setup, steps};

const SHORT: Duration = Duration::from_mins(2);
const LONG: Duration = Duration::from_mins(30);
/// Longer than alone: other steps run beside it, and have precedence.
const GUEST: Duration = Duration::from_mins(40);
/// How many guests run at once. Each keeps one CPU busy, if nothing else does.
const GUESTS: usize = 2;
/// Cases that wait for silence again and again; `cargo xtask conformance --mode MODE` runs them too.
const SLOW: [&str; 4] = [
    "outside-cgroup-internal-local",
    "outside-cgroup-local",
    "refused-or-dropped",
    "source-ranges-of-some-pods",
];

/// Cases that ask what the model makes of objects, which it does the same in every mode, and every second switch between modes: guests
/// are slow. `cargo xtask conformance --mode ipvs` runs them too.
const NOT_IN_GUESTS: [&str; 23] = [
    "affinity-separate-clients",
    "clusterip-many-slices",
    "clusterip-spread",
    "detect-local-interface-prefix",
    "headless-and-externalname",
    "health-check-node-port",
    "healthz-and-livez",
    "internal-local-with-endpoint",
    "loadbalancer-ipmode-proxy",
    "loadbalancer-source-ranges-node",
    "node-hints",
    "nodeport-addresses-cidr",
    "nodeport-every-node-address",
    "nodeport-not-on-other-hosts",
    "not-ready",
    "service-proxy-name",
    "switch-ipvs-to-nftables",
    "switch-iptables-to-ipvs",
    "switch-nftables-to-ipvs",
    "terminating-only",
    "two-namespaces",
    "zone-hints",
    "zone-hints-missing-one",
];

/// Tests of the mode iptables, which needs nothing that differs between kernels: run in guests by `--all-kernels`.
const OF_IPTABLES: [&str; 2] = ["iptables_mode::", "iptables_refused::"];

/// Reads a count out of a line of output.
type Count = fn(&str) -> Option<Counts>;

/// A step: its name, what runs, and how its output is read.
struct Step {
    name: &'static str,
    run: Run,
    count: Count,
    /// Whether the output must hold a count: a runner that ends without one has not run.
    counted: bool,
    /// Whether its lines stay on the screen.
    echo: bool,
}

/// Runs all steps; one that fails does not keep the later ones from running.
///
/// The kernel tests run on this machine's kernel and on the oldest one that is supported, or on all there are.
pub(crate) fn run(all_kernels: bool) -> Result<ExitCode> {
    let mut summary = Summary::default();
    summary.add(setup_step()?);
    fs::create_dir_all(workspace::logs()).context("cannot make the folder for logs")?;
    summary.add(ebpf_step());
    let kernels = if all_kernels { Kernel::value_variants() } else { &[Kernel::V5_10] };
    let skip = if all_kernels { &[][..] } else { &OF_IPTABLES };
    let kernels = kernels.iter().map(|kernel| kernel_step(*kernel, skip)).collect::<Result<Vec<_>>>()?;
    let guests = Mutex::new([ipvs_step()?].into_iter().chain(kernels));
    let hosts = [tests()].into_iter().chain(packets()?);
    take_all(checks()?.into_iter(), &mut summary)?;
    // What runs here waits most of its time: for packets, for silence, for processes to end.
    thread::scope(|scope| {
        let take_guests = || {
            let next = iter::from_fn(|| guests.lock().unwrap_or_else(PoisonError::into_inner).next());
            let mut outcomes = Summary::default();
            take_all(next, &mut outcomes).map(|()| outcomes)
        };
        let lanes = [(); GUESTS].map(|()| scope.spawn(take_guests));
        take_all(hosts, &mut summary)?;
        for lane in lanes {
            summary.append(lane.join().map_err(|_| anyhow::anyhow!("the steps in guests panicked"))??);
        }
        anyhow::Ok(())
    })?;
    println!("\n{summary}");
    Ok(if summary.totals().failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Takes steps one after the other.
fn take_all(steps: impl Iterator<Item = Step>, summary: &mut Summary) -> Result<()> {
    for step in steps {
        summary.add(step.take()?);
        if let Some(signal) = run::interrupted() {
            anyhow::bail!("stopped by signal {signal}");
        }
    }
    Ok(())
}

fn setup_step() -> Result<Outcome> {
    let started = run::now();
    setup::ensure()?;
    // Before guests that begin at the same time both do it. What cannot be had is their steps' error.
    drop(setup::ensure_vm());
    Ok(Outcome { step: "setup", ok: true, took: started.elapsed(), ..Outcome::default() })
}

/// Compiles the eBPF programs, without warnings: cargo shows them on every build but goes on, and clippy, which belongs
/// to another compiler, does not see them.
fn ebpf_step() -> Outcome {
    let progress = Progress::start("ebpf");
    let complaint = match ebpf::build_ebpf(&workspace::logs()) {
        Ok(built) => built.warnings.join("\n"),
        Err(error) => format!("{error:#}"),
    };
    let ok = complaint.is_empty();
    if !ok {
        progress.keep(&complaint);
    }
    let took = progress.end(verdict(ok));
    Outcome { step: "ebpf", ok, took, ..Outcome::default() }
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAILED" }
}

/// What compiles, one after the other: cargo would make them wait for each other anyway. After it nothing is left to build.
fn checks() -> Result<Vec<Step>> {
    let deny = ["--all-targets", "--", "-D", "warnings"];
    Ok(vec![
        Step::plain("format", steps::cargo(SHORT).args(["fmt", "--all", "--check"])),
        Step::plain("clippy", steps::cargo(LONG).arg("clippy").args(deny)),
        // Its host build is an empty program: this checks the crate's frame.
        Step::plain("clippy ebpf", steps::cargo(LONG).args(["clippy", "-p", "proxy-ebpf"]).args(deny)),
        Step::plain("build", steps::build_world()),
        Step::plain("build tests", steps::cargo(LONG).args(["test", "--no-run"])),
        Step::plain("docs", this()?.arg("docs").limit(LONG)),
    ])
}

/// This program, to run another of its commands.
fn this() -> Result<Run> {
    Ok(Run::new(env::current_exe().context("cannot find this program")?))
}

fn tests() -> Step {
    let run =
        steps::cargo(LONG).args(["test", "--no-fail-fast"]).env(steps::SAME_CASES.0, steps::SAME_CASES.1);
    Step { count: counts::test_result, counted: true, ..Step::plain("tests", run) }
}

/// What sends packets on this machine's kernel, with what [`checks`] built.
fn packets() -> Result<Vec<Step>> {
    let of_netfilter = |mode: &str| Conformance {
        mode: mode.into(),
        except: SLOW.map(Into::into).into(),
        ..Conformance::default()
    };
    let all = Conformance { mode: "ebpf".into(), ..Conformance::default() };
    let ours = ours()?;
    let with_api = |mode: &str| Conformance {
        mode: mode.into(),
        source: Some("api".into()),
        except: ours.clone(),
        ..Conformance::default()
    };
    let repairs = |mode| steps::daemon(mode).args(["--only", "repairs,shutdown"]);
    Ok([
        ("conformance", steps::conformance(&all)),
        ("restarts", steps::restarts("ebpf")),
        ("churn", steps::churn("ebpf")),
        ("conformance nftables", steps::conformance(&of_netfilter("nftables"))),
        ("conformance iptables", steps::conformance(&of_netfilter("iptables"))),
        ("conformance API", steps::conformance(&with_api("ebpf"))),
        ("conformance API nftables", steps::conformance(&with_api("nftables"))),
        ("conformance API iptables", steps::conformance(&with_api("iptables"))),
        ("daemon", steps::daemon("ebpf")),
        ("daemon nftables", repairs("nftables")),
        ("daemon iptables", repairs("iptables")),
        ("restarts nftables", steps::restarts("nftables")),
        ("churn nftables", steps::churn("nftables").args(["--connections", "20000"])),
        ("restarts iptables", steps::restarts("iptables")),
        ("deployment", steps::deployment()),
    ]
    .map(|(name, run)| Step {
        count: counts::conformance_result,
        counted: true,
        echo: true,
        ..Step::plain(name, run.limit(LONG))
    })
    .into())
}

/// The cases of shunt's own: about what it does with packets, wherever it has objects from.
fn ours() -> Result<Vec<String>> {
    let ours = workspace::root().join("tests/cases/shunt");
    let ours = fs::read_dir(&ours).with_context(|| format!("cannot read {}", ours.display()))?;
    let names = |entry: fs::DirEntry| Some(entry.path().file_stem()?.to_string_lossy().into_owned());
    Ok(ours.flatten().filter_map(names).collect())
}

/// Most cases of all modes in mode ipvs, in a virtual machine where this machine's kernel lacks what it needs: another run of this
/// program, which tells by itself. What is ours alone is left to `cargo xtask conformance --mode ipvs`, since guests are slow.
fn ipvs_step() -> Result<Step> {
    let except = [ours()?, NOT_IN_GUESTS.map(Into::into).into()].concat().join(",");
    let run = this()?.args(["conformance", "--mode", "ipvs", "--except", &except]);
    let count = counts::conformance_result;
    Ok(Step { count, counted: true, ..Step::plain("conformance ipvs", run.limit(GUEST)) })
}

/// The kernel tests in a virtual machine: another run of this program, since only the guest tells how they ended.
fn kernel_step(kernel: Kernel, skip: &[&str]) -> Result<Step> {
    let minutes = (GUEST.as_secs() / 60).to_string();
    let run = this()?.args(["vm", "--kernel", kernel.name(), "--limit", &minutes]).limit(GUEST);
    let run = run.args(skip.iter().flat_map(|skip| ["--skip", skip]));
    let count = |line: &str| counts::test_result(line).or_else(|| counts::conformance_result(line));
    Ok(Step { count, counted: true, ..Step::plain(kernel.step(), run) })
}

impl Step {
    fn plain(name: &'static str, run: Run) -> Self {
        Self { name, run, count: |_| None, counted: false, echo: false }
    }

    fn take(self) -> Result<Outcome> {
        let path = workspace::logs().join(format!("{}.log", self.name.replace(' ', "-")));
        let mut log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut progress = Progress::start(self.name);
        let mut counts = None;
        let mut failures = Failures::default();
        let ended = self.run.watch(&mut |line| {
            if let Some(more) = (self.count)(line) {
                *counts.get_or_insert_default() += more;
            }
            if self.echo {
                progress.keep(line);
            }
            progress.line(line);
            failures.line(line);
            // The log is a help; a full disk shows itself in the step.
            drop(writeln!(log, "{line}"));
        });
        let missing = self.counted && counts.is_none();
        let counts: Counts = counts.unwrap_or_default();
        let complaint = match ended {
            Err(error) => Some(format!("{error:#}")),
            Ok(finished) if !finished.status.success() => {
                Some(format!("{}\n{}", finished.tail, finished.status))
            }
            Ok(_) if missing => Some("it printed no result".to_owned()),
            Ok(_) => None,
        };
        let ok = complaint.is_none() && counts.failed == 0;
        if let Some(complaint) = complaint {
            progress.keep(&format!("{complaint}\n(the whole output is in {})", path.display()));
        }
        let took = progress.end(verdict(ok));
        Ok(Outcome { step: self.name, counts, failures: failures.into_told(), ok, took })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::conformance::is_case;

    #[test]
    fn every_case_that_is_left_out_is_there() {
        let is_mode = |mode: &str| ["ebpf", "nftables", "iptables", "ipvs"].contains(&mode);
        let is_switch = |case: &str| {
            let modes = case.strip_prefix("switch-").and_then(|modes| modes.split_once("-to-"));
            modes.is_some_and(|(from, to)| from != to && is_mode(from) && is_mode(to))
        };
        for case in SLOW.iter().chain(&NOT_IN_GUESTS) {
            assert!(is_case(case) || is_switch(case), "there is no {case}.yaml");
        }
    }

    #[test]
    fn every_step_has_a_name_of_its_own() {
        let kernels = Kernel::value_variants().iter().map(|kernel| kernel.step());
        let mut names: Vec<&str> = checks()
            .unwrap()
            .iter()
            .chain([&tests()])
            .chain(&packets().unwrap())
            .map(|step| step.name)
            .chain(kernels)
            .chain([ipvs_step().unwrap().name])
            .collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
