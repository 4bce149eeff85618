//! What the kernel knows of this process: its threads and what they cost, and where its memory is.

use std::{fmt::Write as _, fs, io};

use super::KernelError;

const TASKS: &str = "/proc/self/task";
const MEMORY: &str = "/proc/self/smaps_rollup";

/// A line a thread: its id, its name, and the seconds it has run in user space and in the kernel.
pub fn threads() -> Result<String, KernelError> {
    let mut text = String::from("id name user kernel\n");
    let failed = KernelError::path("read", TASKS);
    let tasks: Result<Vec<_>, io::Error> = fs::read_dir(TASKS).and_then(Iterator::collect);
    for task in tasks.map_err(failed)? {
        // A thread may end meanwhile.
        let Ok(stat) = fs::read_to_string(task.path().join("stat")) else { continue };
        let Some((name, user, kernel)) = times(&stat) else { continue };
        let id = task.file_name();
        let _infallible = writeln!(text, "{} {name} {user:.2} {kernel:.2}", id.to_string_lossy());
    }
    Ok(text)
}

/// Resident, proportional and anonymous memory, as the kernel sums them up.
pub fn memory() -> Result<String, KernelError> {
    fs::read_to_string(MEMORY).map_err(KernelError::path("read", MEMORY))
}

/// The name, and the seconds in user space and in the kernel: fields 2, 14 and 15 of proc(5)'s `stat`, in hundredths, which is
/// what user space sees on every architecture (`USER_HZ`).
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
    fn this_process_has_threads_and_memory() {
        let threads = threads().expect("readable");
        assert!(threads.lines().count() >= 2, "{threads}");
        assert!(memory().expect("readable").contains("Rss:"));
    }
}
