//! Runs each link program in the kernel over single frames (`BPF_PROG_TEST_RUN`). Needs root.

mod differential;
mod floods;
mod framing;
mod kernel;
mod learned;
mod verifier;

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::ExitCode,
};

use libtest_mimic::{Arguments, Trial};
use proxy_common::testing::{
    Addresses, TestNode, UptimeTooShort,
    scenarios::{ALL, Scenario},
};

use self::kernel::Kernel;

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
            let mut kernel = Kernel::lock();
            let result = catch_unwind(AssertUnwindSafe(|| {
                (scenario.run)(&mut TestNode::new(&mut *kernel, addresses));
            }));
            let Err(panic) = result else { continue };
            let Some(UptimeTooShort { seconds }) = panic.downcast_ref() else { resume_unwind(panic) };
            // The same scenario runs on the host, where the test sets the clock.
            println!("{name}: stopped early, the kernel is up for less than {seconds} s");
        }
        Ok(())
    })
}
