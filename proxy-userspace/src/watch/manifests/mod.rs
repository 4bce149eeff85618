//! The manifests directory (`--manifests`) as a source of objects.
//!
//! Change a manifest by atomic rename: write a temporary file, then rename it to the manifest's
//! name. The temporary name must start with `.` or not end in `.yaml`, `.yml` or `.json`. Volumes
//! of `ConfigMaps` work too: kubelet changes their files by renaming the link `..data`.
//!
//! A file that is written in another way is followed as well as inotify allows:
//! - A file is read when its writer closes it. If a part of it cannot be read, the last good
//!   version of that part stays in effect.
//! - If a file is gone or empty, its objects stay for half a second: editors remove or truncate a
//!   file before they write it again.
//! - If the directory is gone, all objects stay until it is back.
//! - Every ten seconds all files are compared with what was read, for changes that inotify does not
//!   report. A file that was written in the last second is left for later. What else is found in it
//!   applies, but no object is removed before the writer closes the file, or does not write for 30
//!   seconds: a slow writer has truncated the file, and not written all of it yet.
//!
//! A file may have any length: it is read as a stream, and a list item by item. If a list has a
//! syntax error, none of its items is used: all of them keep their last good version.

mod directory;
mod documents;
mod file;
#[cfg(feature = "fuzzing")]
mod fuzzing;
mod json;
mod pods;
#[cfg(test)]
mod tests;
mod watcher;
mod yaml;

use std::{fs, io, path::PathBuf};

use tokio::{
    sync::{mpsc::Sender, watch},
    task,
    time::Instant,
};

#[cfg(feature = "fuzzing")]
pub use self::fuzzing::{Manifest, read_manifest};
pub use self::pods::find_pod;
use self::{
    directory::Directory,
    watcher::{Changes, DirectoryWatcher},
};
use super::{
    WatchError,
    status::{ManifestErrors, WatchStatus},
};
use crate::model::WatchEvent;

/// The status names at most this many errors.
const ERRORS_IN_STATUS: usize = 5;

/// A directory of manifests: the files `*.yaml`, `*.yml` and `*.json` in it, without
/// subdirectories.
#[derive(Debug)]
pub struct ManifestSource {
    dir: PathBuf,
    status: watch::Sender<WatchStatus>,
}

impl ManifestSource {
    /// Creates a source for `dir`, which must exist when [`Self::run`] is called.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), status: watch::Sender::default() }
    }

    /// Returns the source's state. The watch of the directory is that of all kinds.
    pub fn status(&self) -> watch::Receiver<WatchStatus> {
        self.status.subscribe()
    }

    /// Checks what [`Self::run`] needs at its start.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read and watched.
    pub fn check(&self) -> Result<(), WatchError> {
        let watched = DirectoryWatcher::new(self.dir.clone()).map(drop);
        watched.and_then(|()| fs::read_dir(&self.dir).map(drop)).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> WatchError {
        WatchError::ManifestDir { path: self.dir.clone(), source }
    }

    /// Sends the directory's objects, then their changes, until the receiver is gone.
    ///
    /// # Errors
    /// Returns an error only if the directory cannot be read and watched at the start.
    pub async fn run(self, tx: Sender<WatchEvent>) -> Result<(), WatchError> {
        let failed = |source| self.failed(source);
        let mut watcher = DirectoryWatcher::new(self.dir.clone()).map_err(failed)?;
        let changes = Changes { all: true, ..Changes::default() };
        let (mut directory, loaded) = update(Directory::new(self.dir.clone()), changes).await;
        loaded.map_err(failed)?;
        let mut events = directory.list();
        loop {
            for event in events {
                if tx.send(event).await.is_err() {
                    return Ok(());
                }
            }
            self.report(&directory, watcher.error());
            let changes = tokio::select! {
                changes = watcher.wait() => changes,
                () = tx.closed() => return Ok(()),
            };
            // If the directory cannot be read, all objects stay, and the next check reports it.
            (directory, _) = update(directory, changes).await;
            events = directory.take_changes();
        }
    }

    /// Updates the status. Receivers are notified only of differences.
    fn report(&self, directory: &Directory, watch_error: Option<&str>) {
        let manifest_errors = manifest_errors(directory);
        let last_error = watch_error.map(ToOwned::to_owned);
        self.status.send_if_modified(|status| {
            let before = status.clone();
            status.manifest_errors = manifest_errors;
            let WatchStatus { services, endpoint_slices, nodes, service_cidrs, .. } = status;
            for kind in [services, endpoint_slices, nodes, service_cidrs] {
                kind.synced = true;
                kind.connected();
                kind.connected_since.take_if(|_| watch_error.is_some());
                kind.last_error.clone_from(&last_error);
            }
            *status != before
        });
    }
}

/// Returns what cannot be read now.
fn manifest_errors(directory: &Directory) -> ManifestErrors {
    let mut errors = directory.errors();
    let mut texts: Vec<String> = errors.by_ref().take(ERRORS_IN_STATUS).collect();
    let more = errors.count();
    let count = texts.len() + more;
    if more > 0 {
        texts.push(format!("and {more} more"));
    }
    ManifestErrors { count, texts }
}

/// Reads what changed, on a thread that may block.
async fn update(mut directory: Directory, changes: Changes) -> (Directory, io::Result<()>) {
    let updated = task::spawn_blocking(move || {
        let result = directory.update(changes, Instant::now());
        (directory, result)
    });
    match updated.await {
        Ok(updated) => updated,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime is shutting down, and this task with it.
        Err(_) => std::future::pending().await,
    }
}
