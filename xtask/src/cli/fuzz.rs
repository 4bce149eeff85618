//! `cargo xtask fuzz`: what holds for any packet on a link, over far more packets than a test run has time for.

use std::time::Duration;

use anyhow::{Context as _, Result};
use xtask::run;

use super::progress::Progress;
use super::{privilege, steps};

/// Cases a property is tried with before the time is looked at.
const CASES: u32 = 5_000;
/// For one round; later than that something hangs.
const ROUND: Duration = Duration::from_mins(20);

/// The properties: on the host, and on the host and in the kernel at once.
const TARGETS: [(&str, &[&str]); 2] = [
    ("host", &["test", "--package", "proxy-common", "--lib", "properties"]),
    ("host and kernel", &["test", "--package", "shunt-tests", "--test", "ebpf_frames", "differential"]),
];

/// Tries the properties with fresh cases, round after round, until the time is over or one does not hold.
pub(crate) fn run(seconds: u64) -> Result<()> {
    privilege::require("fuzz")?;
    let begun = run::now();
    let mut cases = 0;
    while cases == 0 || begun.elapsed() < Duration::from_secs(seconds) {
        cases += CASES;
        for (name, args) in TARGETS {
            let mut progress = Progress::start(name);
            let held = steps::cargo(ROUND)
                .args(args)
                .env("PROPTEST_CASES", CASES.to_string())
                .check(&mut |line| progress.line(line));
            progress.end(if held.is_ok() { "ok" } else { "FAILED" });
            held.context(
                "a property does not hold; its seed is in a new line of a proptest-regressions file (git status): \
                 commit that with what mends it",
            )?;
        }
        println!("{cases} cases of each property in {} s", begun.elapsed().as_secs());
    }
    Ok(())
}
