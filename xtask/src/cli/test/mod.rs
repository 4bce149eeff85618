//! `cargo xtask test`: runs every check, and prints a table of the results.

mod cases;
mod live;
mod plan;
mod step;
mod suite;

use std::fs;
use std::iter;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result};
use xtask::run;
use xtask::{ebpf, workspace};

use self::live::Live;
pub(crate) use self::plan::is_step;
use self::plan::{Lane, Plan, Times, minutes};
use self::step::{Step, verdict};
pub(crate) use self::suite::Extent;
use self::suite::Suite;
use super::progress::Progress;
use super::release::Target;
use super::setup;
use super::summary::{Outcome, Summary};

/// The number of guests that run at the same time. Each uses one CPU that is otherwise idle.
const GUESTS: u8 = 2;
/// The steps before those of the suite.
const SETUP: &str = "setup";
const EBPF: &str = "ebpf";

/// Prints the plan, and runs all steps, also after one that fails.
pub(crate) fn run(extent: Extent) -> Result<ExitCode> {
    fs::create_dir_all(workspace::logs()).context("cannot create the folder for logs")?;
    let suite = Suite::new(extent)?;
    let times = Times::read();
    let plan = plan(&suite, &times);
    eprintln!("{plan}about {} in all\n", minutes(plan.remaining(|_| false, GUESTS.into())));
    let live = Live::start(plan, GUESTS.into());
    let mut summary = run_suite(suite, extent, &live)?;
    if extent != Extent::Quick {
        summary.left_out = setup::left_out();
    }
    drop(live);
    println!("\n{summary}");
    let code = if summary.totals().failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    times.remember(&summary);
    Ok(code)
}

fn plan(suite: &Suite, times: &Times) -> Plan {
    let mut plan = Plan::default();
    plan.add(Lane::Build, &[SETUP, EBPF], times);
    for (lane, names) in suite.names() {
        plan.add(lane, &names, times);
    }
    plan
}

fn run_suite(suite: Suite, extent: Extent, live: &Live) -> Result<Summary> {
    let mut summary = Summary::default();
    summary.add(setup_step(extent, live)?);
    summary.add(ebpf_step(live));
    run_all(suite.build.into_iter(), &mut summary, live)?;
    let guests = Mutex::new(suite.guests.into_iter());
    let next_guest = || guests.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run_guests = &|first: Vec<Step>| {
        let mut outcomes = Summary::default();
        let steps = first.into_iter().chain(iter::from_fn(&next_guest));
        run_all(steps, &mut outcomes, live).map(|()| outcomes)
    };
    // The steps on the host mostly wait: for packets, for silence, for processes to end.
    thread::scope(|scope| {
        let mut first = vec![suite.beside];
        first.resize_with(GUESTS.into(), Vec::new);
        let lanes: Vec<_> = first.into_iter().map(|first| scope.spawn(move || run_guests(first))).collect();
        run_all(suite.host.into_iter(), &mut summary, live)?;
        for lane in lanes {
            summary.append(lane.join().map_err(|_| anyhow::anyhow!("the steps in guests panicked"))??);
        }
        anyhow::Ok(())
    })?;
    Ok(summary)
}

/// Runs steps one after the other.
fn run_all(steps: impl Iterator<Item = Step>, summary: &mut Summary, live: &Live) -> Result<()> {
    for step in steps {
        summary.add(step.run_to_end(live)?);
        if let Some(signal) = run::interrupted() {
            anyhow::bail!("stopped by signal {signal}");
        }
    }
    Ok(())
}

fn setup_step(extent: Extent, live: &Live) -> Result<Outcome> {
    let started = run::now();
    setup::ensure()?;
    setup::ensure_world()?;
    setup::ensure_components();
    setup::ensure_kernel();
    if extent != Extent::Quick {
        // Here, because two guests that start together must not both do it. An error appears in the
        // guests' steps.
        drop(setup::ensure_vm(Target::default()));
        setup::ensure_tests();
    }
    live.end(SETUP, true);
    Ok(Outcome { step: SETUP, ok: true, took: started.elapsed(), ..Outcome::default() })
}

/// Compiles the eBPF programs. A warning fails the step: cargo only prints warnings, and clippy
/// does not see them because it belongs to another compiler.
fn ebpf_step(live: &Live) -> Outcome {
    let progress = Progress::start(EBPF);
    let complaints =
        [ebpf::OBJECT, ebpf::FLOOR].map(|binary| match ebpf::build_ebpf(&workspace::logs(), binary) {
            Ok(built) => built.warnings.join("\n"),
            Err(error) => format!("{error:#}"),
        });
    let complaint = complaints.join("\n").trim().to_owned();
    let ok = complaint.is_empty();
    if !ok {
        progress.keep(&complaint);
    }
    let took = progress.end(verdict(ok));
    live.end(EBPF, ok);
    Outcome { step: EBPF, ok, took, ..Outcome::default() }
}
