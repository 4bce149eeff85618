//! Records the files that a complete setup relied on, so that the next setup only checks whether
//! they are unchanged.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Changes when setup needs something new. Older stamps are then ignored.
const FIRST_LINE: &str = "shunt setup 5";

/// Writes the stamp for `files`.
pub(crate) fn write(stamp: &Path, files: &[PathBuf]) -> Result<()> {
    let mut text = format!("{FIRST_LINE}\n");
    for file in files {
        let mark = mark(file).with_context(|| format!("{} vanished during setup", file.display()))?;
        writeln!(text, "{mark} {}", file.display())?;
    }
    fs::write(stamp, text).with_context(|| format!("cannot write {}", stamp.display()))
}

/// Returns the files of a stamp if all are unchanged. `None` means that setup must check
/// everything.
pub(crate) fn read(stamp: &Path) -> Option<Vec<PathBuf>> {
    let text = fs::read_to_string(stamp).ok()?;
    let rest = text.strip_prefix(FIRST_LINE)?.strip_prefix('\n')?;
    let files: Option<Vec<PathBuf>> = rest.lines().map(unchanged).collect();
    files.filter(|files| !files.is_empty())
}

fn unchanged(line: &str) -> Option<PathBuf> {
    let (old, file) = line.split_once(' ')?;
    let file = PathBuf::from(file);
    (mark(&file)? == old).then_some(file)
}

/// Returns size and modification time. A replaced file differs in one of them.
fn mark(file: &Path) -> Option<String> {
    let meta = fs::metadata(file).ok()?;
    Some(format!("{}:{}.{}", meta.len(), meta.mtime(), meta.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed at the end of its test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("shunt-stamp-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn stamped(&self) -> (PathBuf, PathBuf) {
            let (stamp, tool) = (self.0.join("stamp"), self.0.join("a tool"));
            fs::write(&tool, "one").unwrap();
            write(&stamp, std::slice::from_ref(&tool)).unwrap();
            (stamp, tool)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn unchanged_files_are_read_back() {
        let folder = Folder::new("unchanged");
        let (stamp, tool) = folder.stamped();
        assert_eq!(read(&stamp), Some(vec![tool]));
    }

    #[test]
    fn a_removed_tool_is_noticed() {
        let folder = Folder::new("removed");
        let (stamp, tool) = folder.stamped();
        fs::remove_file(tool).unwrap();
        assert_eq!(read(&stamp), None);
    }

    #[test]
    fn a_replaced_tool_is_noticed() {
        let folder = Folder::new("replaced");
        let (stamp, tool) = folder.stamped();
        fs::write(tool, "other").unwrap();
        assert_eq!(read(&stamp), None);
    }

    #[test]
    fn stamp_of_another_version_or_without_files_is_ignored() {
        let folder = Folder::new("version");
        let (stamp, _) = folder.stamped();
        fs::write(&stamp, "shunt setup 0\n").unwrap();
        assert_eq!(read(&stamp), None);
        fs::write(&stamp, format!("{FIRST_LINE}\n")).unwrap();
        assert_eq!(read(&stamp), None);
    }

    #[test]
    fn a_file_that_vanished_is_named() {
        let folder = Folder::new("vanished");
        let error = write(&folder.0.join("stamp"), &[folder.0.join("gone")]).unwrap_err().to_string();
        assert!(error.contains("gone"), "{error}");
    }
}
