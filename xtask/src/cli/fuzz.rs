//! `cargo xtask fuzz`: checks the properties of packet decisions with many more generated packets
//! than a test run.

use std::time::Duration;

use anyhow::{Context as _, Result};
use xtask::run;

use super::progress::Progress;
use super::{privilege, steps};

/// The number of cases in a round. The time is checked after each round.
const CASES: u32 = 5_000;
/// The time limit of a round.
const ROUND: Duration = Duration::from_mins(20);

/// The tests of the properties: on the host, and on host and kernel together.
const TARGETS: [(&str, &[&str]); 2] = [
    ("host", &["test", "--package", "proxy-common", "--lib", "properties"]),
    ("host and kernel", &["test", "--package", "shunt-tests", "--test", "ebpf_frames", "differential"]),
];

/// Checks the properties with new cases, round after round, until the time is over or a property
/// fails.
pub(crate) fn run(seconds: u64) -> Result<()> {
    privilege::require("fuzz")?;
    let begun = run::now();
    let mut cases = 0;
    while cases == 0 || begun.elapsed() < Duration::from_secs(seconds) {
        cases += CASES;
        for (name, args) in TARGETS {
            let run = steps::cargo(ROUND).args(args).env("PROPTEST_CASES", CASES.to_string());
            Progress::run(name, run).context(
                "a property failed. Its seed is in a new line of a proptest-regressions file (see git status): \
                 commit that file with the fix",
            )?;
        }
        println!("{cases} cases of each property in {} s", begun.elapsed().as_secs());
    }
    Ok(())
}
