//! Reads one manifest file from disk.

use std::{
    fs::{File, Metadata},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// Manifests above this size, in bytes, are refused: no directory of Services is that large, and it is read into memory.
const MAX_SIZE: u64 = 64 << 20;

/// What tells without reading that a file has changed: device, inode, size, modification and change times.
pub(super) type Stamp = (u64, u64, u64, (i64, i64), (i64, i64));

/// What is in a file's place.
#[derive(Debug)]
pub(super) enum Reading {
    /// No file.
    Gone,
    /// Something that cannot be read, and why.
    Unreadable(String),
    /// A file's text and its hash.
    Text { text: String, hash: u64 },
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Reading {
    match read_bytes(path) {
        Ok(Some(bytes)) => match String::from_utf8(bytes) {
            Ok(text) => {
                let mut hasher = DefaultHasher::new();
                text.hash(&mut hasher);
                Reading::Text { text, hash: hasher.finish() }
            }
            Err(error) => Reading::Unreadable(format!("not UTF-8 text: {error}")),
        },
        Ok(None) => Reading::Gone,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if path.symlink_metadata().is_ok() {
                Reading::Unreadable("a symbolic link to a file that does not exist".to_owned())
            } else {
                Reading::Gone
            }
        }
        Err(error) => Reading::Unreadable(format!("cannot be read: {error}")),
    }
}

/// The stamp of a regular file; none for anything else.
pub(super) fn stamp(path: &Path) -> Option<Stamp> {
    path.metadata()
        .ok()
        .filter(Metadata::is_file)
        .map(|m| (m.dev(), m.ino(), m.len(), (m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())))
}

/// None for directories, pipes and the like, which are not opened.
fn read_bytes(path: &Path) -> io::Result<Option<Vec<u8>>> {
    if !path.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {MAX_SIZE} bytes")));
    }
    Ok(Some(bytes))
}
