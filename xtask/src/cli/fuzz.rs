//! `cargo xtask fuzz`: runs the fuzz targets with coverage, and checks the properties of packet
//! decisions with many more generated packets than a test run.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::run::{self, Run};
use xtask::workspace;

use super::progress::Progress;
use super::{privilege, setup, steps};

/// The name that stands for the properties of packet decisions.
const PROPERTIES: &str = "properties";
/// The number of cases in a round of the properties. The time is checked after each round.
const CASES: u32 = 5_000;
/// The time limit of a round.
const ROUND: Duration = Duration::from_mins(20);

/// The tests of the properties: on the host, and on host and kernel together.
const TESTS: [(&str, &[&str]); 2] = [
    ("host", &["test", "--package", "proxy-common", "--lib", "properties"]),
    ("host and kernel", &["test", "--package", "shunt-tests", "--test", "ebpf_frames", "differential"]),
];

/// Coverage for libFuzzer, as cargo-fuzz sets it, and the checks of a debug build. The passes of
/// LLVM need no nightly compiler; the sanitizers, which find errors of unsafe code, would.
const FLAGS: [&str; 8] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
    "-Coverflow-checks",
];
/// The longest input, in bytes.
const MAX_LENGTH: u32 = 4 << 10;
/// An input that takes longer is a failure, in seconds.
const MAX_SECONDS: u32 = 10;

/// Runs one target, or all of them and then the properties, each for this time.
pub(crate) fn run(target: Option<&str>, seconds: u64) -> Result<()> {
    let targets = targets()?;
    match target {
        Some(PROPERTIES) => properties(seconds),
        Some(name) if targets.iter().any(|target| target == name) => covered(name, seconds),
        Some(name) => {
            bail!("{name} is not a fuzz target; these are: {}, {PROPERTIES}", targets.join(", "))
        }
        None => {
            targets.iter().try_for_each(|target| covered(target, seconds))?;
            properties(seconds)
        }
    }
}

fn corpora() -> PathBuf {
    workspace::root().join("tests/fuzz/corpus")
}

/// Returns the names of the targets: each has a corpus.
fn targets() -> Result<Vec<String>> {
    let corpora = corpora();
    let entries = fs::read_dir(&corpora).with_context(|| format!("cannot read {}", corpora.display()))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    Ok(names)
}

/// Runs a target with coverage. libFuzzer writes what it finds to `target/fuzz/corpus`, and an
/// input that fails to `target/fuzz/failures`.
fn covered(target: &str, seconds: u64) -> Result<()> {
    setup::ensure_fuzz()?;
    let folder = workspace::target().join("fuzz");
    let (found, failures) = (folder.join("corpus").join(target), folder.join("failures"));
    for folder in [&found, &failures] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let build = ["run", "--release", "--package", "shunt-fuzz", "--bin", "fuzz"];
    let run = steps::cargo(steps::BUILD + Duration::from_secs(seconds))
        .args(build)
        // With a target, the flags do not concern build scripts.
        .args(["--target", "host-tuple", "--target-dir"])
        .arg(&folder)
        .arg("--")
        .args([&found, &corpora().join(target)])
        .args([
            format!("-max_total_time={seconds}"),
            format!("-artifact_prefix={}/{target}-", failures.display()),
        ])
        .args([format!("-max_len={MAX_LENGTH}"), format!("-timeout={MAX_SECONDS}")])
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
        .env("SHUNT_FUZZ_TARGET", target);
    Progress::during(target, |progress| run_to_end(run, progress)).with_context(|| {
        format!(
            "the target {target} failed on a file in {}: copy the file to {}/{target}, and commit it with the fix",
            failures.display(),
            corpora().display()
        )
    })
}

/// Runs libFuzzer, and keeps its last lines on the screen.
fn run_to_end(run: Run, progress: &mut Progress) -> Result<()> {
    run.check(&mut |line| {
        if line.starts_with("Done ") || line.contains("\tDONE ") {
            progress.keep(line);
        }
        progress.line(line);
    })
    .map(drop)
}

/// Checks the properties with new cases, round after round, until the time is over or a property
/// fails.
fn properties(seconds: u64) -> Result<()> {
    privilege::require("fuzz properties")?;
    let begun = run::now();
    let mut cases = 0;
    while cases == 0 || begun.elapsed() < Duration::from_secs(seconds) {
        cases += CASES;
        for (name, args) in TESTS {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_target_is_an_error_that_names_the_targets() {
        let error = run(Some("nothing"), 1).unwrap_err().to_string();
        for name in ["frames", "netlink", "kubeconfig", PROPERTIES] {
            assert!(error.contains(name), "{error}");
        }
    }
}
