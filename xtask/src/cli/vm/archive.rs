//! Writes a guest's file system: a cpio archive in the format of the kernel's initramfs ("newc").
//! The kernel unpacks several concatenated archives.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cpio::newc::{Builder, ModeFileType, trailer};

/// The alignment of archives. The kernel expects the next archive at a multiple of four; a larger
/// one is allowed.
const ALIGNMENT: usize = 512;
/// Folders that are links to folders in /usr in every guest.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// An archive that is being written. Each path is written once; the first write wins.
pub(crate) struct Archive {
    path: PathBuf,
    file: BufWriter<File>,
    written: BTreeSet<PathBuf>,
}

impl Archive {
    /// Creates an empty archive.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file), written: BTreeSet::new() })
    }

    /// Adds the links from /bin and similar folders to /usr.
    pub(crate) fn merged_folders(&mut self) -> Result<()> {
        MERGED.iter().try_for_each(|name| {
            let target = format!("usr/{name}");
            self.folder(Path::new(&target))?;
            self.entry(Path::new(name), ModeFileType::Symlink, 0o777, target.len(), &mut target.as_bytes())
        })
    }

    /// Adds a folder, and the folders above it.
    pub(crate) fn folder(&mut self, at: &Path) -> Result<()> {
        self.entry(&place(at), ModeFileType::Directory, 0o755, 0, &mut io::empty())
    }

    /// Adds an executable file with this text.
    pub(crate) fn script(&mut self, at: &Path, text: &[u8]) -> Result<()> {
        self.entry(&place(at), ModeFileType::Regular, 0o755, text.len(), &mut &*text)
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, at: &Path, target: &Path) -> Result<()> {
        let target = target.as_os_str().as_bytes();
        self.entry(&place(at), ModeFileType::Symlink, 0o777, target.len(), &mut &*target)
    }

    /// Adds a copy of a file, or of all files in a folder. Links are followed.
    pub(crate) fn copy(&mut self, at: &Path, from: &Path) -> Result<()> {
        let failed = || format!("cannot read {}", from.display());
        let meta = fs::metadata(from).with_context(failed)?;
        if meta.is_dir() {
            self.folder(at)?;
            let mut names = fs::read_dir(from).with_context(failed)?.collect::<io::Result<Vec<_>>>()?;
            names.sort_by_key(fs::DirEntry::file_name);
            return names.iter().try_for_each(|entry| self.copy(&at.join(entry.file_name()), &entry.path()));
        }
        let mut file = File::open(from).with_context(failed)?;
        let size = usize::try_from(meta.len())?;
        self.entry(&place(at), ModeFileType::Regular, meta.permissions().mode() & 0o777, size, &mut file)
    }

    /// Completes the archive.
    pub(crate) fn finish(mut self) -> Result<()> {
        let failed = || format!("cannot write {}", self.path.display());
        trailer(&mut self.file).with_context(failed)?;
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error).with_context(failed)?;
        let size = file.metadata().with_context(failed)?.len();
        file.set_len(size.next_multiple_of(ALIGNMENT as u64)).with_context(failed)
    }

    /// Adds an entry after the folders above it.
    fn entry(
        &mut self,
        at: &Path,
        kind: ModeFileType,
        mode: u32,
        size: usize,
        content: &mut dyn Read,
    ) -> Result<()> {
        if self.written.contains(at) {
            return Ok(());
        }
        if let Some(folder) = at.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            self.folder(folder)?;
        }
        self.written.insert(at.to_owned());
        let failed = || format!("cannot write {} into {}", at.display(), self.path.display());
        let name = at.to_str().with_context(|| format!("{} is not UTF-8", at.display()))?;
        let inode = u32::try_from(self.written.len()).with_context(failed)?;
        let header = Builder::new(name).ino(inode).mode(mode).set_mode_file_type(kind);
        let mut entry = header.write(&mut self.file, u32::try_from(size).with_context(failed)?);
        io::copy(content, &mut entry).with_context(failed)?;
        entry.finish().and_then(io::Write::flush).with_context(failed)
    }
}

/// Returns the path in the archive of a path of the host: relative, and in usr/ where merged
/// systems have it.
fn place(path: &Path) -> PathBuf {
    let path = path.strip_prefix("/").unwrap_or(path);
    if MERGED.iter().any(|name| path.starts_with(name)) { Path::new("usr").join(path) } else { path.into() }
}

#[cfg(test)]
mod tests {
    use cpio::newc::Reader;

    use super::*;

    fn listing(write: impl FnOnce(&mut Archive)) -> Vec<(String, u32)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("archive");
        let mut archive = Archive::create(&path).unwrap();
        write(&mut archive);
        archive.finish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len() % ALIGNMENT as u64, 0);
        let (mut file, mut entries) = (File::open(&path).unwrap(), Vec::new());
        loop {
            let reader = Reader::new(file).unwrap();
            if reader.entry().is_trailer() {
                return entries;
            }
            entries.push((reader.entry().name().to_owned(), reader.entry().file_size()));
            file = reader.finish().unwrap();
        }
    }

    #[test]
    fn file_is_written_once_after_its_folders() {
        let entries = listing(|archive| {
            archive.script(Path::new("/a/b/c"), b"text").unwrap();
            archive.script(Path::new("/a/b/d"), b"").unwrap();
            archive.script(Path::new("/a/b/c"), b"another").unwrap();
        });
        let expected = [("a", 0), ("a/b", 0), ("a/b/c", 4), ("a/b/d", 0)];
        assert_eq!(entries, expected.map(|(name, size)| (name.to_owned(), size)));
    }

    #[test]
    fn files_of_lib_are_in_usr() {
        assert_eq!(place(Path::new("/lib/modules")), Path::new("usr/lib/modules"));
        assert_eq!(place(Path::new("/usr/lib/x")), Path::new("usr/lib/x"));
        assert_eq!(place(Path::new("/library")), Path::new("library"));
    }

    #[test]
    fn folder_is_copied_with_its_files() {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir(from.path().join("in")).unwrap();
        fs::write(from.path().join("in/file"), "12345").unwrap();
        let entries = listing(|archive| archive.copy(Path::new("/cases"), from.path()).unwrap());
        assert_eq!(entries.last(), Some(&("cases/in/file".to_owned(), 5)));
    }

    #[test]
    fn a_missing_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut archive = Archive::create(&folder.path().join("archive")).unwrap();
        let error = archive.copy(Path::new("/x"), Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(error.contains("/no/such/file"), "{error}");
    }
}
