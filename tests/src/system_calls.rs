//! Records the system calls of a thread with strace.

use std::{fs, path::Path, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, getppid, gettid},
};

use crate::{
    deadline::Deadline,
    process::{CommandOutput, run_with_timeout},
};

const TIMEOUT: Duration = Duration::from_secs(30);
/// System calls for memory and for waiting on other threads. They concern neither the network nor
/// BPF.
const IGNORED_CALLS: [&str; 7] = ["mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "futex"];
/// The call that marks the start and the end of the recorded part. Nothing else calls it.
const MARK: &str = "getppid";

/// Runs `job`, and returns the names of the system calls that this thread made, in order, without
/// calls for memory.
pub fn system_calls_of(job: impl FnOnce()) -> Result<Vec<String>> {
    let directory = tempfile::tempdir()?;
    let trace = directory.path().join("trace");
    let thread_id = gettid().to_string();
    let output = trace.display().to_string();
    let strace = thread::spawn(move || {
        run_with_timeout(Path::new("strace"), &["-q", "-o", &output, "-p", &thread_id], 3 * TIMEOUT)
    });
    let tracer = Deadline::after(TIMEOUT).poll(|| tracer().filter(|_| is_recording(&trace)));
    if tracer.is_some() {
        let _mark = getppid();
        job();
        let _mark = getppid();
    }
    if let Some(tracer) = tracer {
        kill(tracer, Signal::SIGINT).context("end strace")?;
    }
    let CommandOutput { stderr, .. } =
        strace.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    ensure!(tracer.is_some(), "strace does not trace this thread: {stderr}");
    names(&fs::read_to_string(&trace)?)
}

/// Returns the tracer of this thread.
fn tracer() -> Option<Pid> {
    let status = fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok().filter(|pid| *pid != 0).map(Pid::from_raw)
}

/// Returns true if strace has recorded a call, so that it also records all later calls.
fn is_recording(trace: &Path) -> bool {
    fs::metadata(trace).is_ok_and(|trace| trace.len() > 0)
}

fn names(trace: &str) -> Result<Vec<String>> {
    let calls = trace.lines().filter_map(|line| Some(line.split_once('(')?.0.trim_start()));
    let parts: Vec<Vec<&str>> =
        calls.collect::<Vec<_>>().split(|name| *name == MARK).map(<[&str]>::to_vec).collect();
    ensure!(parts.len() == 3, "{} marks in the trace instead of two:\n{trace}", parts.len() - 1);
    Ok(parts[1].iter().filter(|name| !IGNORED_CALLS.contains(name)).map(ToString::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_between_the_marks_are_recorded_except_for_memory() {
        let calls =
            system_calls_of(|| assert!(fs::metadata("/no/such/file").is_err())).expect("strace, and root");
        assert_eq!(calls.len(), 1, "{calls:?}");
    }
}
