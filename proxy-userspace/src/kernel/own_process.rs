//! What the kernel reports about this process (CPU time by thread, memory, open files), and its
//! limit of open files.

use std::{fmt::Write as _, fs, io};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::KernelError;

const TASKS: &str = "/proc/self/task";
const MEMORY: &str = "/proc/self/smaps_rollup";
const STAT: &str = "/proc/self/stat";
const STATUS: &str = "/proc/self/status";
const LIMITS: &str = "/proc/self/limits";
const FILES: &str = "/proc/self/fd";
const SYSTEM: &str = "/proc/stat";

/// Returns one line for each thread: id, name, and seconds of CPU time in user space and in the
/// kernel.
pub fn threads() -> Result<String, KernelError> {
    let mut text = String::from("id name user kernel\n");
    let failed = KernelError::path("read", TASKS);
    let tasks: Result<Vec<_>, io::Error> = fs::read_dir(TASKS).and_then(Iterator::collect);
    for task in tasks.map_err(failed)? {
        // The thread may have ended.
        let Ok(stat) = fs::read_to_string(task.path().join("stat")) else { continue };
        let Some((name, user, kernel)) = times(&stat) else { continue };
        let id = task.file_name();
        let _infallible = writeln!(text, "{} {name} {user:.2} {kernel:.2}", id.to_string_lossy());
    }
    Ok(text)
}

/// Returns the kernel's summary of resident, proportional and anonymous memory.
pub fn memory() -> Result<String, KernelError> {
    fs::read_to_string(MEMORY).map_err(KernelError::path("read", MEMORY))
}

/// The resources that this process uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// CPU time of all threads in seconds, in user space and in the kernel.
    pub cpu_seconds: f64,
    /// Resident memory in bytes.
    pub resident: u64,
    /// Virtual memory in bytes.
    pub mapped: u64,
    /// The number of open files.
    pub open_files: u64,
    /// The limit of open files; `None` if there is no limit.
    pub max_files: Option<u64>,
    /// The number of threads.
    pub threads: u64,
}

/// Reads the resources in use.
pub fn usage() -> Result<Usage, KernelError> {
    let (own, status, limits) = (read(STAT)?, read(STATUS)?, read(LIMITS)?);
    let (_, user, kernel) = times(&own).ok_or_else(|| unreadable(STAT))?;
    let of_status = |name| bytes(&status, name).ok_or_else(|| unreadable(STATUS));
    let files = fs::read_dir(FILES).map_err(KernelError::path("read", FILES))?.count();
    Ok(Usage {
        cpu_seconds: user + kernel,
        resident: of_status("VmRSS:")?,
        mapped: of_status("VmSize:")?,
        // One of them is the directory itself.
        open_files: (files as u64).saturating_sub(1),
        max_files: max_files(&limits),
        threads: number(&status, "Threads:").ok_or_else(|| unreadable(STATUS))?,
    })
}

/// Returns the start time of this process in seconds since the Unix epoch. Do not call it often:
/// the kernel sums up all interrupts for `/proc/stat`.
pub fn started_at() -> Result<f64, KernelError> {
    started(&read(STAT)?, &read(SYSTEM)?).ok_or_else(|| unreadable(STAT))
}

/// Raises the limit of open files from the soft to the hard limit, which needs no capability. Many
/// container runtimes and systemd start a process with 1,024 for the sake of select(2), which shunt
/// does not use. Commands that start later inherit the limit.
pub fn raise_file_limit() -> Result<(), KernelError> {
    let failed = || KernelError::call("raise", "the limit of open files");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| failed()(error.into()))?;
    if soft == hard {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(|error| failed()(error.into()))
}

fn read(path: &'static str) -> Result<String, KernelError> {
    fs::read_to_string(path).map_err(KernelError::path("read", path))
}

fn unreadable(path: &str) -> KernelError {
    KernelError::path("parse", path)(io::ErrorKind::InvalidData.into())
}

/// Adds field 22 of proc(5)'s `stat`, in hundredths of a second since boot, to the boot time, which
/// is `btime` of `/proc/stat`.
fn started(stat: &str, system: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let since_boot: f64 = rest.split_whitespace().nth(19)?.parse().ok()?;
    let boot: f64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + since_boot / 100.0)
}

/// Returns a line of `/proc/self/status` in bytes.
fn bytes(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns a line of `/proc/self/status` that is a number.
fn number(status: &str, name: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

/// Returns the soft limit in `/proc/self/limits`.
fn max_files(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the name and the seconds in user space and in the kernel: fields 2, 14 and 15 of
/// proc(5)'s `stat`. They are in hundredths (`USER_HZ`) on every architecture.
fn times(stat: &str) -> Option<(&str, f64, f64)> {
    let (head, rest) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = rest.split_whitespace().skip(11).map(|field| field.parse::<f64>().ok());
    Some((name, fields.next()?? / 100.0, fields.next()?? / 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_brackets_does_not_shift_the_times() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 75 0 0 20 0 1 0 100 0 0";
        assert_eq!(times(stat), Some(("a) b", 2.5, 0.75)));
    }

    #[test]
    fn start_time_memory_and_file_limit_are_parsed() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 75 0 0 20 0 1 0 12345 0 0";
        assert_eq!(started(stat, "cpu 1 2\nbtime 1700000000\n"), Some(1_700_000_123.45));
        assert_eq!(bytes("VmSize:\t    1024 kB\nVmRSS:\t     8 kB\n", "VmRSS:"), Some(8192));
        let limits =
            |soft: &str| format!("Max processes  1  1  processes\nMax open files  {soft}  4096  files\n");
        assert_eq!((max_files(&limits("1024")), max_files(&limits("unlimited"))), (Some(1024), None));
    }

    #[test]
    fn usage_of_this_process_is_plausible() {
        let usage = usage().expect("readable");
        assert!(usage.resident > 0 && usage.mapped > usage.resident && usage.open_files >= 3, "{usage:?}");
        assert!(usage.threads >= 2, "the test runs in a thread of its own: {usage:?}");
        assert!(started_at().expect("readable") > 1.6e9);
    }

    #[test]
    fn the_limit_of_open_files_rises_to_the_hard_limit() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("readable");
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).expect("a lower limit is allowed");
        raise_file_limit().expect("the hard limit is allowed");
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).expect("readable"), (hard, hard));
    }

    #[test]
    fn this_process_has_threads_and_memory() {
        let threads = threads().expect("readable");
        assert!(threads.lines().count() >= 2, "{threads}");
        assert!(memory().expect("readable").contains("Rss:"));
    }
}
