//! A file for parsers that read files.

use std::{
    cell::OnceCell,
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

thread_local! {
    static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Writes the bytes to a file of this thread, and returns its path. It is in memory where the
/// machine has `/dev/shm`.
pub(crate) fn file_with(bytes: &[u8]) -> PathBuf {
    let path = FOLDER.with(|folder| {
        let make = || tempfile::tempdir_in(Path::new("/dev/shm")).or_else(|_| tempfile::tempdir());
        folder.get_or_init(|| make().expect("a temporary folder")).path().join("input")
    });
    fs::write(&path, bytes).expect("a file in a temporary folder");
    path
}
