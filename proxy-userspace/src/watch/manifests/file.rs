//! Reads one manifest file from disk.

use std::{
    ffi::OsStr,
    fs::{File, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, SystemTime},
};

/// The largest manifest that is read, in bytes: a manifest is read into memory as a whole.
const MAX_SIZE: u64 = 64 << 20;
/// A file that was written in place more recently may still be incomplete.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// What shows that a file has changed: device, inode, size, modification and change time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    identity: (u64, u64),
    size: u64,
    modified: SystemTime,
    changed: (i64, i64),
}

impl Stamp {
    /// Returns the stamp of a regular file, none for anything else.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let file = path.metadata().ok().filter(Metadata::is_file)?;
        Some(Self {
            identity: (file.dev(), file.ino()),
            size: file.len(),
            modified: file.modified().ok()?,
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    /// Returns true if the file was written in place a moment ago, so that its writer may not be
    /// done.
    pub(super) fn is_being_written(self, last: Option<Self>) -> bool {
        let is_in_place = last.is_some_and(|last| last.identity == self.identity);
        is_in_place && self.modified.elapsed().is_ok_and(|age| age < SETTLED_AFTER)
    }
}

/// Returns true for the name of a manifest. Hidden files are temporary files of editors.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let is_hidden = name.as_encoded_bytes().starts_with(b".");
    !is_hidden && matches!(Path::new(name).extension().and_then(OsStr::to_str), Some("yaml" | "yml" | "json"))
}

/// Reads a file. None if there is none, or something else in its place: directories and pipes are
/// not opened.
///
/// # Errors
/// Returns why the file cannot be read.
pub(super) fn read(path: &Path) -> Result<Option<String>, String> {
    let cannot = |error: io::Error| format!("cannot be read: {error}");
    match path.metadata() {
        Ok(file) if file.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cannot(error)),
        Err(_) if path.is_symlink() => return Err("a symbolic link to a file that does not exist".to_owned()),
        _ => return Ok(None),
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_SIZE + 1).read_to_end(&mut bytes)).map_err(cannot)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(format!("cannot be read: larger than {MAX_SIZE} bytes"));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| format!("not UTF-8 text: {error}"))
}
