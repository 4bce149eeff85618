//! The configuration file: reads it, and watches it for changes.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::error::ConfigError;
use crate::yaml;

/// How often the file is checked. A `ConfigMap` takes a minute to reach its mount. A check costs a
/// stat(2), which follows all symbolic links to the file.
const CHECK_PERIOD: Duration = Duration::from_secs(2);
/// A file that has not changed for this time is completely written.
const SETTLED: Duration = Duration::from_millis(100);
/// How many periods of [`SETTLED`] a slow writer gets.
const MAX_WAITS: u32 = 50;

/// A configuration file's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    path: PathBuf,
    text: Arc<str>,
}

impl ConfigFile {
    /// Reads the file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref().to_owned();
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text: text.into() }),
            Err(source) => Err(ConfigError::Read { path, source }),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn yaml(&self) -> Result<serde_yaml_ng::Value, ConfigError> {
        // Some editors write a mark of the byte order.
        let text = self.text.strip_prefix('\u{feff}').unwrap_or(&self.text);
        yaml::parse(text).map_err(|source| {
            let path = self.path.clone();
            if yaml::has_several_documents(text) {
                ConfigError::SeveralDocuments(path)
            } else {
                ConfigError::Syntax { path, source }
            }
        })
    }
}

/// Metadata that differs between two versions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Ok(Self { inode: metadata.ino(), size: metadata.size(), modified })
    }
}

/// Watches a configuration file for changes.
#[derive(Debug)]
pub struct FileWatcher {
    last: ConfigFile,
    /// `None` while it is unknown.
    stamp: Option<Stamp>,
    /// An error was returned last. The next text is a change, even if it is the last one.
    has_failed: bool,
}

impl FileWatcher {
    /// Watches for a text other than the one that was read.
    pub fn new(file: ConfigFile) -> Self {
        Self { last: file, stamp: None, has_failed: false }
    }

    /// Waits until the file has another text, or becomes unreadable or readable. Returns each
    /// change once. A call that is not awaited to its end loses no change.
    pub async fn next(&mut self) -> Result<ConfigFile, ConfigError> {
        loop {
            let stamp = self.settled_stamp().await;
            if stamp.is_none() || stamp != self.stamp {
                let was_readable = self.stamp.is_some();
                self.stamp = stamp;
                match ConfigFile::read(&self.last.path) {
                    Ok(file) if file != self.last || self.has_failed => {
                        self.last = file.clone();
                        self.has_failed = false;
                        return Ok(file);
                    }
                    Err(error) if was_readable => {
                        self.stamp = None;
                        self.has_failed = true;
                        return Err(error);
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            tokio::time::sleep(CHECK_PERIOD).await;
        }
    }

    /// Reads the file now. Its text is no change any more for [`Self::next`].
    pub fn read(&mut self) -> Result<ConfigFile, ConfigError> {
        let file = ConfigFile::read(&self.last.path)?;
        self.last = file.clone();
        self.has_failed = false;
        Ok(file)
    }

    /// Waits until nobody writes to the file, and returns its stamp.
    async fn settled_stamp(&self) -> Option<Stamp> {
        let mut stamp = Stamp::of(&self.last.path).ok();
        for _ in 0..MAX_WAITS {
            if stamp == self.stamp {
                break;
            }
            tokio::time::sleep(SETTLED).await;
            let now = Stamp::of(&self.last.path).ok();
            if now == stamp {
                break;
            }
            stamp = now;
        }
        stamp
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_config_map_update_is_a_change_unless_the_text_is_the_same() {
        let mount = tempfile::tempdir().unwrap();
        let at = |name: &str| mount.path().join(name);
        let swap = |version: &str, text: &str| {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("config.conf"), text).unwrap();
            symlink(version, at("..data_tmp")).unwrap();
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
        };
        swap("..1", "first");
        symlink("..data/config.conf", at("config.conf")).unwrap();
        let mut changes = FileWatcher::new(ConfigFile::read(at("config.conf")).unwrap());
        let nothing = tokio::time::timeout(CHECK_PERIOD * 5, changes.next()).await;
        assert!(nothing.is_err(), "{nothing:?}");
        swap("..2", "first");
        assert!(tokio::time::timeout(CHECK_PERIOD * 5, changes.next()).await.is_err());
        swap("..3", "second");
        assert_eq!(&*changes.next().await.unwrap().text, "second");
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_file_is_reported_once_and_its_return_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        fs::write(&path, "first").unwrap();
        let mut changes = FileWatcher::new(ConfigFile::read(&path).unwrap());
        assert!(tokio::time::timeout(CHECK_PERIOD * 2, changes.next()).await.is_err());
        fs::remove_file(&path).unwrap();
        assert!(matches!(changes.next().await, Err(ConfigError::Read { .. })));
        assert!(tokio::time::timeout(CHECK_PERIOD * 5, changes.next()).await.is_err());
        for text in ["first", "second"] {
            fs::write(&path, text).unwrap();
            assert_eq!(&*changes.next().await.unwrap().text, text);
        }
    }
}
