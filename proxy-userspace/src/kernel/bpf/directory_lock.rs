//! The lock of a pin directory, and the process that holds it.

use std::{
    fs::{self, File, TryLockError},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use nix::sys::stat::{major, minor};

use super::super::KernelError;

/// Locks an open directory until it is closed. Fails if another process has the lock.
pub(super) fn lock(path: &Path, directory: File) -> Result<File, KernelError> {
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::WouldBlock) => {
            Err(KernelError::PinsInUse { path: path.into(), process: holder(&directory) })
        }
        Err(TryLockError::Error(error)) => Err(KernelError::path("lock directory", path)(error)),
    }
}

/// Returns the process that has the lock, or `None` if it is in another PID namespace, whose locks
/// `/proc/locks` does not list.
fn holder(directory: &File) -> Option<u32> {
    let found = directory.metadata().ok()?;
    holder_of_inode(&fs::read_to_string("/proc/locks").ok()?, found.dev(), found.ino())
}

/// Finds the process in the text of `/proc/locks`: `1: FLOCK ADVISORY WRITE 812 00:20:7 0 EOF` (the
/// kernel's `lock_get_status`).
fn holder_of_inode(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().find_map(|line| match *line.split_whitespace().collect::<Vec<_>>() {
        [_, "FLOCK", _, _, process, locked, ..] if locked == file => process.parse().ok(),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::process;

    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn the_error_of_a_locked_directory_names_the_process_that_has_the_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = || File::open(directory.path()).expect("opened");
        let held = lock(directory.path(), open()).expect("nobody has the lock");
        let error = lock(directory.path(), open()).expect_err("it is locked").to_string();
        let expected =
            format!("another shunt (process {}) uses {}: ", process::id(), directory.path().display());
        assert!(error.starts_with(&expected), "{error}");
        drop(held);
        lock(directory.path(), open()).expect("it is not locked any more");
    }

    #[test]
    fn the_process_is_that_of_the_same_file_and_kind_of_lock() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:1f:42 0 EOF\n\
             2: FLOCK  ADVISORY  WRITE 12 00:1f:421 0 EOF\n\
             2: -> FLOCK  ADVISORY  WRITE 13 00:1f:42 0 EOF\n\
             3: FLOCK  ADVISORY  WRITE 14 00:1f:42 0 EOF\n";
        assert_eq!(holder_of_inode(locks, makedev(0, 0x1f), 42), Some(14));
        assert_eq!(holder_of_inode(locks, makedev(0x103, 0x1f), 42), None);
        assert_eq!(holder_of_inode("", makedev(0, 0x1f), 42), None);
    }

    #[test]
    fn a_process_in_another_container_has_no_number() {
        let error = KernelError::PinsInUse { path: "/sys/fs/bpf/shunt".into(), process: None }.to_string();
        assert!(
            error.starts_with("another shunt (in another container) uses /sys/fs/bpf/shunt: "),
            "{error}"
        );
    }
}
