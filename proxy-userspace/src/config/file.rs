//! The configuration file: read once, and looked at again for changes.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::ConfigError;

/// How often the file is looked at. A `ConfigMap` takes a minute to reach its mount; looking costs a stat(2), and follows whatever
/// symbolic links lead there.
const LOOK: Duration = Duration::from_secs(2);
/// A file that has not changed for so long was written to its end.
const SETTLED: Duration = Duration::from_millis(100);
/// A writer that is slower is waited for no longer.
const LONGEST_UNSETTLED: u32 = 50;

/// A configuration file's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    path: PathBuf,
    text: Arc<str>,
}

impl ConfigFile {
    /// Reads it.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref().to_owned();
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text: text.into() }),
            Err(source) => Err(ConfigError::Read { path, source }),
        }
    }

    pub(super) fn yaml(&self) -> Result<serde_yaml_ng::Value, ConfigError> {
        let syntax = |source| ConfigError::Syntax { path: self.path.clone(), source };
        serde_yaml_ng::from_str(&self.text).map_err(syntax)
    }

    /// Its path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Tells a file from what it was before without reading it.
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

/// Follows a file's text.
#[derive(Debug)]
pub struct FileChanges {
    last: ConfigFile,
    /// `None` while it cannot be told.
    stamp: Option<Stamp>,
}

impl FileChanges {
    /// Follows the file from this text of it on.
    pub fn since(file: ConfigFile) -> Self {
        Self { last: file, stamp: None }
    }

    /// Waits until the file has another text, or cannot be read. It is told once each.
    pub async fn next(&mut self) -> Result<ConfigFile, ConfigError> {
        loop {
            let stamp = self.settled().await;
            if stamp.is_none() || stamp != self.stamp {
                let was_readable = self.stamp.is_some();
                self.stamp = stamp;
                match ConfigFile::read(&self.last.path) {
                    Ok(file) if file != self.last => {
                        self.last = file.clone();
                        return Ok(file);
                    }
                    Ok(_) => {}
                    Err(error) if was_readable => {
                        self.stamp = None;
                        return Err(error);
                    }
                    Err(_) => {}
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What the file is once nobody writes to it.
    async fn settled(&self) -> Option<Stamp> {
        let mut stamp = Stamp::of(&self.last.path).ok();
        for _ in 0..LONGEST_UNSETTLED {
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
    async fn a_swap_of_the_links_of_a_config_map_is_a_change_and_the_same_text_again_is_none() {
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
        let mut changes = FileChanges::since(ConfigFile::read(at("config.conf")).unwrap());
        let nothing = tokio::time::timeout(LOOK * 5, changes.next()).await;
        assert!(nothing.is_err(), "{nothing:?}");
        swap("..2", "first");
        assert!(tokio::time::timeout(LOOK * 5, changes.next()).await.is_err());
        swap("..3", "second");
        assert_eq!(&*changes.next().await.unwrap().text, "second");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_goes_is_told_once_and_its_return_is_a_change_if_it_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        fs::write(&path, "first").unwrap();
        let mut changes = FileChanges::since(ConfigFile::read(&path).unwrap());
        assert!(tokio::time::timeout(LOOK * 2, changes.next()).await.is_err());
        fs::remove_file(&path).unwrap();
        assert!(matches!(changes.next().await, Err(ConfigError::Read { .. })));
        assert!(tokio::time::timeout(LOOK * 5, changes.next()).await.is_err());
        fs::write(&path, "second").unwrap();
        assert_eq!(&*changes.next().await.unwrap().text, "second");
    }
}
