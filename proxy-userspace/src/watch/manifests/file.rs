//! Opens one manifest file.

use std::{
    ffi::OsStr,
    fs::{File, Metadata},
    io::{self, BufRead, BufReader, Seek, SeekFrom},
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, SystemTime},
};

/// How much of a file is read at once, in bytes.
const BUFFER: usize = 64 << 10;
/// A file that was written in place more recently may still be incomplete.
const SETTLED_AFTER: Duration = Duration::from_secs(1);
/// A file that was not written for this long is complete, even if nobody saw its writer close it.
const COMPLETE_AFTER: Duration = Duration::from_secs(30);

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
        self.is_same_file(last) && self.is_younger_than(SETTLED_AFTER)
    }

    /// Returns true if no other file has taken the place of the last one.
    fn is_same_file(self, last: Option<Self>) -> bool {
        last.is_some_and(|last| last.identity == self.identity)
    }

    /// Returns true if the file was not written for so long that its writer must be done.
    pub(super) fn is_complete(self) -> bool {
        !self.is_younger_than(COMPLETE_AFTER)
    }

    /// A time in the future comes from another clock, and says nothing.
    fn is_younger_than(self, limit: Duration) -> bool {
        self.modified.elapsed().is_ok_and(|age| age < limit)
    }
}

/// Returns true for the name of a manifest. Hidden files are temporary files of editors.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let is_hidden = name.as_encoded_bytes().starts_with(b".");
    !is_hidden && matches!(Path::new(name).extension().and_then(OsStr::to_str), Some("yaml" | "yml" | "json"))
}

/// The text of a manifest.
#[derive(Debug)]
pub(super) struct Text<R> {
    /// Starts after the byte order mark.
    pub(super) reader: R,
    /// The first byte that is not blank.
    pub(super) first: Option<u8>,
}

impl<R: BufRead + Seek> Text<R> {
    pub(super) fn new(mut reader: R) -> io::Result<Self> {
        if reader.fill_buf()?.starts_with("\u{feff}".as_bytes()) {
            reader.consume('\u{feff}'.len_utf8());
        }
        let start = reader.stream_position()?;
        let mut first = None;
        while first.is_none() {
            let bytes = reader.fill_buf()?;
            let length = bytes.len();
            if length == 0 {
                break;
            }
            first = bytes.iter().copied().find(|byte| !byte.is_ascii_whitespace());
            reader.consume(length);
        }
        reader.seek(SeekFrom::Start(start))?;
        Ok(Self { reader, first })
    }
}

/// Opens a file. None if there is none, or something else in its place: directories and pipes are
/// not opened.
///
/// # Errors
/// Returns why the file cannot be read.
pub(super) fn open(path: &Path) -> Result<Option<Text<BufReader<File>>>, String> {
    let cannot = |error: io::Error| format!("cannot be read: {error}");
    match path.metadata() {
        Ok(file) if file.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cannot(error)),
        Err(_) if path.is_symlink() => return Err("a symbolic link to a file that does not exist".to_owned()),
        _ => return Ok(None),
    }
    let file = File::open(path).map(|file| BufReader::with_capacity(BUFFER, file));
    file.and_then(Text::new).map(Some).map_err(cannot)
}
