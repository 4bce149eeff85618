//! Runs every fuzz target on its corpus, and on inputs of it that are changed at random.
//!
//! There is no coverage here: `cargo xtask fuzz` has it. The random numbers are the same every
//! time, so that a failure is about a change of the code.

use std::{
    fs,
    panic::{self, AssertUnwindSafe},
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use fastrand::Rng;
use libtest_mimic::{Arguments, Failed, Trial};
use shunt_fuzz::{TARGETS, Target};

/// The number of changed inputs of each target.
const RUNS: usize = 3_000;
/// A slow target gets fewer.
const LIMIT: Duration = Duration::from_secs(5);
/// A changed input is at most this long.
const MAX_LENGTH: usize = 4 << 10;

fn main() -> ExitCode {
    let trials = TARGETS.into_iter().map(|target| Trial::test(target.name, move || check(target)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn check(target: Target) -> Result<(), Failed> {
    let inputs = target.corpus()?;
    if inputs.is_empty() {
        return Err(format!("{} has no corpus", target.name).into());
    }
    for (path, input) in &inputs {
        run(target, input, path)?;
    }
    let inputs: Vec<Vec<u8>> = inputs.into_iter().map(|(_, input)| input).collect();
    let mut random = Rng::with_seed(1);
    let failing = Path::new(env!("CARGO_TARGET_TMPDIR")).join(target.name);
    let started = now();
    for _ in 0..RUNS {
        let input = changed(&inputs, &mut random);
        if let Err(failed) = run(target, &input, &failing) {
            fs::write(&failing, &input)?;
            return Err(failed);
        }
        if started.elapsed() > LIMIT {
            break;
        }
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "this bounds the time of a test")]
fn now() -> Instant {
    Instant::now()
}

/// Runs the target on an input that is, or will be, in this file.
fn run(target: Target, input: &[u8], file: &Path) -> Result<(), Failed> {
    panic::catch_unwind(AssertUnwindSafe(|| (target.run)(input))).map_err(|cause| {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
        format!("{text}\nagain: cargo run -p shunt-fuzz -- {} {}", target.name, file.display()).into()
    })
}

/// Returns one of the inputs with up to eight changes: a byte, a copy or removal of a part, a part
/// of another input.
fn changed(inputs: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = inputs[random.usize(..inputs.len())].clone();
    for _ in 0..random.usize(1..=8) {
        let other = &inputs[random.usize(..inputs.len())];
        let at = random.usize(..=input.len());
        let end = input.len().min(at + random.usize(1..32));
        match random.u8(..4) {
            0 if at < input.len() => input[at] = random.u8(..),
            0 => input.push(random.u8(..)),
            1 => drop(input.drain(at..end)),
            2 => {
                let part = input[at..end].to_vec();
                input.splice(at..at, part);
            }
            _ => {
                let from = random.usize(..=other.len());
                let to = other.len().min(from + random.usize(1..64));
                input.splice(at..end, other[from..to].iter().copied());
            }
        }
    }
    input.truncate(MAX_LENGTH);
    input
}
