//! `cargo xtask test`: runs every check, and prints a table of the results.

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
use super::steps::world_program;
use super::summary::{Outcome, Summary};
use super::vm::Kernel;
use super::{Conformance, setup, steps};

const SHORT: Duration = Duration::from_mins(2);
const LONG: Duration = Duration::from_mins(30);
/// The time limit of a guest. Other steps run at the same time, with higher priority.
const GUEST: Duration = Duration::from_mins(40);
/// The number of guests that run at the same time. Each uses one CPU that is otherwise idle.
const GUESTS: usize = 2;
/// Cases that often wait for silence. Only `cargo xtask conformance --mode MODE` and the ebpf mode
/// run them.
const SLOW: [&str; 4] = [
    "outside-cgroup-internal-local",
    "outside-cgroup-local",
    "refused-or-dropped",
    "source-ranges-of-some-pods",
];

/// Cases with masqueraded packets, which the link programs masquerade with `--links-masquerade
/// programs`, and changes of what does.
const MASQUERADED: [&str; 20] = [
    "dual-stack",
    "established-survives",
    "externalip-cluster",
    "forward-policy-drop-legacy",
    "forward-policy-drop-nft",
    "fragmented-udp",
    "fragments-both-ways",
    "hairpin",
    "links-path-changes",
    "loadbalancer-cluster",
    "masquerade-all-packets",
    "nodeport-cluster",
    "nodeport-udp",
    "outside-cgroup-hairpin",
    "path-mtu-behind-other-node",
    "path-mtu-behind-other-node-tcp",
    "restart",
    "switch-ebpf-to-nftables",
    "switch-iptables-to-ebpf",
    "switch-nftables-to-ebpf",
];

/// Cases that slow guests leave out: those about the model, which is the same in every mode, those
/// that others resemble, and most switches between modes. `cargo xtask conformance --mode ipvs`
/// runs them.
const NOT_IN_GUESTS: [&str; 30] = [
    "affinity-separate-clients",
    "clusterip-many-slices",
    "clusterip-multi-port",
    "clusterip-spread",
    "detect-local-interface-prefix",
    "established-survives",
    "externalip-cluster",
    "headless-and-externalname",
    "health-check-node-port",
    "healthz-and-livez",
    "internal-local-with-endpoint",
    "loadbalancer-cluster",
    "loadbalancer-ipmode-proxy",
    "loadbalancer-source-ranges-node",
    "node-hints",
    "nodeport-addresses-cidr",
    "nodeport-every-node-address",
    "nodeport-not-on-other-hosts",
    "not-ready",
    "service-changed",
    "service-proxy-name",
    "switch-iptables-to-ipvs",
    "switch-ipvs-to-iptables",
    "switch-ipvs-to-nftables",
    "switch-nftables-to-ipvs",
    "terminating-only",
    "terminating-with-ready",
    "two-namespaces",
    "zone-hints",
    "zone-hints-missing-one",
];

/// Tests of mode iptables, which works alike on all kernels. Guests run them only with
/// `--all-kernels`.
const OF_IPTABLES: [&str; 2] = ["iptables_mode::", "iptables_refused::"];

/// Reads numbers of tests from a line of output.
type Count = fn(&str) -> Option<Counts>;

/// A step: its name, its command, and how its output is read.
struct Step {
    name: &'static str,
    run: Run,
    /// How to count its tests, if it runs tests. A runner that prints no numbers has not run.
    count: Option<Count>,
    /// True if its lines stay on the screen.
    echo: bool,
}

/// Runs all steps, also after one that fails.
///
/// The kernel tests run on this machine's kernel and on the oldest supported one, or on all.
pub(crate) fn run(all_kernels: bool) -> Result<ExitCode> {
    let mut summary = Summary::default();
    summary.add(setup_step()?);
    fs::create_dir_all(workspace::logs()).context("cannot create the folder for logs")?;
    summary.add(ebpf_step());
    let kernels = if all_kernels { Kernel::value_variants() } else { &[Kernel::V5_10] };
    let skip = if all_kernels { &[][..] } else { &OF_IPTABLES };
    let mut guests = Vec::new();
    for kernel in kernels {
        guests.extend(kernel_steps(*kernel, skip)?);
    }
    // The longest of each kernel first, so that no lane is idle at the end.
    guests.insert(1, ipvs_step()?);
    let guests = Mutex::new(guests.into_iter());
    let hosts = [tests()].into_iter().chain(packets()?);
    run_all(checks()?.into_iter(), &mut summary)?;
    // The steps on the host mostly wait: for packets, for silence, for processes to end.
    thread::scope(|scope| {
        let run_guests = || {
            let next = iter::from_fn(|| guests.lock().unwrap_or_else(PoisonError::into_inner).next());
            let mut outcomes = Summary::default();
            run_all(next, &mut outcomes).map(|()| outcomes)
        };
        let lanes = [(); GUESTS].map(|()| scope.spawn(run_guests));
        run_all(hosts, &mut summary)?;
        for lane in lanes {
            summary.append(lane.join().map_err(|_| anyhow::anyhow!("the steps in guests panicked"))??);
        }
        anyhow::Ok(())
    })?;
    println!("\n{summary}");
    Ok(if summary.totals().failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs steps one after the other.
fn run_all(steps: impl Iterator<Item = Step>, summary: &mut Summary) -> Result<()> {
    for step in steps {
        summary.add(step.run_to_end()?);
        if let Some(signal) = run::interrupted() {
            anyhow::bail!("stopped by signal {signal}");
        }
    }
    Ok(())
}

fn setup_step() -> Result<Outcome> {
    let started = run::now();
    setup::ensure()?;
    // Here, because two guests that start together must not both do it. An error appears in the
    // guests' steps, and that of the browser in its scenario.
    drop(setup::ensure_vm());
    drop(setup::ensure_tests());
    Ok(Outcome { step: "setup", ok: true, took: started.elapsed(), ..Outcome::default() })
}

/// Compiles the eBPF programs. A warning fails the step: cargo only prints warnings, and clippy
/// does not see them because it belongs to another compiler.
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

/// Returns the steps that compile, which cargo would serialise anyway, and the check of documents.
/// Afterwards nothing is left to build.
fn checks() -> Result<Vec<Step>> {
    let deny = ["--all-targets", "--", "-D", "warnings"];
    Ok(vec![
        Step::plain("format", steps::cargo(SHORT).args(["fmt", "--all", "--check"])),
        Step::plain("clippy", steps::cargo(LONG).arg("clippy").args(deny)),
        // The host build of proxy-ebpf is an empty program, so this checks little.
        Step::plain("clippy ebpf", steps::cargo(LONG).args(["clippy", "-p", "proxy-ebpf"]).args(deny)),
        Step::plain("build", steps::build_world()),
        Step::plain("build tests", steps::cargo(LONG).args(["test", "--no-run"])),
        Step::plain("docs", this()?.arg("docs").limit(LONG)),
    ])
}

/// Returns a run of this program, for another of its commands.
fn this() -> Result<Run> {
    Ok(Run::new(env::current_exe().context("cannot find this program")?))
}

fn tests() -> Step {
    let run =
        steps::cargo(LONG).args(["test", "--no-fail-fast"]).env(steps::SAME_CASES.0, steps::SAME_CASES.1);
    Step { count: Some(counts::test_result), ..Step::plain("tests", run) }
}

/// Returns the steps that send packets on this machine's kernel, with the programs that [`checks`]
/// built.
fn packets() -> Result<Vec<Step>> {
    let of_netfilter = |mode: &str| Conformance {
        mode: mode.into(),
        except: SLOW.map(Into::into).into(),
        ..Conformance::default()
    };
    let all = Conformance { mode: "ebpf".into(), ..Conformance::default() };
    let ours = ours()?;
    // shunt's own cases run with the default settings, which need the backstop in many of them.
    let shared = Conformance { except: ours.clone(), ..all.clone() };
    let backstopped = Conformance { backstop: Some("always".into()), ..shared.clone() };
    let netfilter_path = Conformance { links_path: Some("netfilter".into()), ..shared };
    let masquerade = Conformance {
        links_masquerade: Some("programs".into()),
        only: MASQUERADED.map(Into::into).into(),
        ..all.clone()
    };
    let with_api = |mode: &str| Conformance {
        mode: mode.into(),
        source: Some("api".into()),
        except: ours.clone(),
        ..Conformance::default()
    };
    let daemon = |mode, only| world_program("daemon", mode).args(["--only", only]);
    Ok([
        ("conformance", steps::conformance(&all)),
        ("conformance backstop", steps::conformance(&backstopped)),
        ("conformance links path", steps::conformance(&netfilter_path)),
        ("conformance masquerade", steps::conformance(&masquerade)),
        ("restarts", world_program("restarts", "ebpf")),
        ("churn", world_program("churn", "ebpf")),
        ("soak", steps::soak(0, None)),
        ("conformance nftables", steps::conformance(&of_netfilter("nftables"))),
        ("conformance iptables", steps::conformance(&of_netfilter("iptables"))),
        ("conformance API", steps::conformance(&with_api("ebpf"))),
        ("conformance API nftables", steps::conformance(&with_api("nftables"))),
        ("conformance API iptables", steps::conformance(&with_api("iptables"))),
        ("daemon", world_program("daemon", "ebpf")),
        ("daemon nftables", daemon("nftables", "monitoring,repairs,shutdown,top,ui")),
        ("daemon iptables", daemon("iptables", "repairs,shutdown,top")),
        ("restarts nftables", world_program("restarts", "nftables")),
        ("churn nftables", world_program("churn", "nftables").args(["--connections", "20000"])),
        ("restarts iptables", world_program("restarts", "iptables")),
        ("deployment", steps::with_shunt("deployment")),
    ]
    .map(|(name, run)| Step {
        count: Some(counts::conformance_result),
        echo: true,
        ..Step::plain(name, run.limit(LONG))
    })
    .into())
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
    let count = Some(counts::conformance_result as Count);
    Ok(Step { count, ..Step::plain("conformance ipvs", run.limit(GUEST)) })
}

/// Returns the steps for the kernel tests in virtual machines, which run this program again.
fn kernel_steps(kernel: Kernel, skip: &[&str]) -> Result<[Step; 2]> {
    let minutes = (GUEST.as_secs() / 60).to_string();
    let [name, programs, cases, _] = kernel.names();
    let run = this()?.args(["vm", "--kernel", name, "--limit", &minutes]).limit(GUEST);
    let run = run.args(skip.iter().flat_map(|skip| ["--skip", skip]));
    let count: Count = |line| counts::test_result(line).or_else(|| counts::conformance_result(line));
    let step =
        |step, part| Step { count: Some(count), ..Step::plain(step, run.clone().args(["--part", part])) };
    Ok([step(programs, "programs"), step(cases, "cases")])
}

impl Step {
    fn plain(name: &'static str, run: Run) -> Self {
        Self { name, run, count: None, echo: false }
    }

    fn run_to_end(self) -> Result<Outcome> {
        let path = workspace::logs().join(format!("{}.log", self.name.replace(' ', "-")));
        let mut log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut progress = Progress::start(self.name);
        let mut counts = None;
        let mut failures = Failures::default();
        let ended = self.run.watch(&mut |line| {
            if let Some(more) = self.count.and_then(|count| count(line)) {
                *counts.get_or_insert_default() += more;
            }
            if self.echo {
                progress.keep(line);
            }
            progress.line(line);
            failures.line(line);
            // An incomplete log must not fail the step.
            drop(writeln!(log, "{line}"));
        });
        let missing = self.count.is_some() && counts.is_none();
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
        Ok(Outcome { step: self.name, counts, failures: failures.all, ok, took })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::conformance::is_case;

    #[test]
    fn every_case_that_is_left_out_exists() {
        let is_mode = |mode: &str| ["ebpf", "nftables", "iptables", "ipvs"].contains(&mode);
        let is_switch = |case: &str| {
            let modes = case.strip_prefix("switch-").and_then(|modes| modes.split_once("-to-"));
            modes.is_some_and(|(from, to)| from != to && is_mode(from) && is_mode(to))
        };
        for case in SLOW.iter().chain(&NOT_IN_GUESTS).chain(&MASQUERADED) {
            assert!(is_case(case) || is_switch(case), "there is no {case}.yaml");
        }
    }

    #[test]
    fn every_step_has_a_unique_name() {
        let kernels = Kernel::value_variants().iter().flat_map(|kernel| kernel.names()[1..3].to_vec());
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
