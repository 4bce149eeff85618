//! Runs each link program in the kernel over single frames (`BPF_PROG_TEST_RUN`). Needs root.

mod content;
mod differential;
mod floods;
mod framing;
mod kernel;
mod learned;
mod verifier;

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::ExitCode,
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Trial};
use proxy_common::testing::{
    Addresses, TestNode, UptimeTooShort,
    scenarios::{ALL, Scenario},
};

use shunt_tests::deadline::Stopwatch;

use self::kernel::Kernel;

/// No scenario depends on a time as short as this.
const SOON: Duration = Duration::from_millis(500);
const ATTEMPTS: usize = 3;

fn main() -> ExitCode {
    let scenarios = ALL.iter().copied().flatten().map(trial);
    let others = [differential::TESTS, framing::TESTS, floods::TESTS, learned::TESTS, verifier::TESTS];
    let others = others.into_iter().flatten().map(|(name, test)| {
        Trial::test(*name, || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), scenarios.chain(others).collect()).exit_code()
}

fn trial(scenario: &'static Scenario) -> Trial {
    let name = scenario.name.rsplit("scenarios::").next().unwrap_or(scenario.name);
    Trial::test(name, move || {
        for addresses in Addresses::BOTH {
            let Err(panic) = attempt(scenario, addresses) else { continue };
            let Some(UptimeTooShort { seconds }) = panic.downcast_ref() else { resume_unwind(panic) };
            // The same scenario runs on the host, where the test sets the clock.
            println!("{name}: stopped early, the kernel is up for less than {seconds} s");
        }
        Ok(())
    })
}

/// Runs a scenario. The kernel has its own clock, so a scenario that fails on a machine that stood
/// still begins again.
fn attempt(scenario: &Scenario, addresses: Addresses) -> thread::Result<()> {
    let mut kernel = Kernel::lock();
    let mut attempts = 0;
    loop {
        let began = Stopwatch::start();
        let result = catch_unwind(AssertUnwindSafe(|| {
            (scenario.run)(&mut TestNode::new(&mut *kernel, addresses));
        }));
        attempts += 1;
        let took = began.elapsed();
        if result.is_ok() || attempts == ATTEMPTS || took < SOON {
            return result;
        }
        println!("{} took {took:?}, and begins again", scenario.name);
    }
}
