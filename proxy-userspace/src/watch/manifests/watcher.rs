//! Watches the directory with inotify, and detects that another directory has its name.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, ModifyKind},
};
use tokio::{
    sync::mpsc,
    time::{Interval, MissedTickBehavior, interval},
};
use tracing::{error, info};

use super::file::is_manifest;

/// How often shunt checks that it watches the right directory. Inotify does not report a mount over
/// the directory.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// After this many checks, all files are compared with what was read.
const CHECKS_PER_SCAN: u32 = 20;
/// If more changes wait, the kernel's queue fills, and inotify reports an overflow.
const QUEUE_LENGTH: usize = 1024;

/// What may have changed in the directory.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Files that appeared, disappeared, or were closed by a writer.
    pub(super) files: BTreeSet<OsString>,
    /// Any other file may have changed too.
    pub(super) all: bool,
}

/// The name of a changed file; none if any file may have changed.
type Change = Option<OsString>;

pub(super) struct DirectoryWatcher {
    dir: PathBuf,
    /// The watch, and device and inode of the directory that it is on.
    watched: Option<(RecommendedWatcher, (u64, u64))>,
    /// Why there is no watch.
    error: Option<String>,
    changes: (mpsc::Sender<Change>, mpsc::Receiver<Change>),
    checks: Interval,
    check: u32,
}

impl DirectoryWatcher {
    pub(super) fn new(dir: PathBuf) -> io::Result<Self> {
        let (changes, mut checks) = (mpsc::channel(QUEUE_LENGTH), interval(CHECK_INTERVAL));
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watcher = Self { dir, watched: None, error: None, changes, checks, check: 0 };
        watcher.watch()?;
        Ok(watcher)
    }

    /// Waits for changes or the next check.
    pub(super) async fn wait(&mut self) -> Changes {
        let (mut files, mut all) = (BTreeSet::new(), false);
        let mut add = |change: Change| match change {
            Some(name) => drop(files.insert(name)),
            None => all = true,
        };
        tokio::select! {
            Some(change) = self.changes.1.recv() => add(change),
            _ = self.checks.tick() => self.check += 1,
        }
        while let Ok(change) = self.changes.1.try_recv() {
            add(change);
        }
        if self.check == CHECKS_PER_SCAN {
            (self.check, all) = (0, true);
        }
        all |= self.renew();
        Changes { files, all }
    }

    /// Returns why the directory cannot be watched now.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// If another directory has the name now, watches that one and returns true.
    fn renew(&mut self) -> bool {
        let watched = self.watched.as_ref().map(|(_, identity)| *identity);
        if watched.is_some() && identity(&self.dir).ok() == watched {
            return false;
        }
        self.watched = None;
        let error = self.watch().err();
        let error = error.map(|e| format!("cannot watch manifests directory {}: {e}", self.dir.display()));
        match &error {
            None => info!(dir = %self.dir.display(), "the manifests directory was replaced; shunt reads it"),
            Some(error) if self.error.is_none() => error!("{error}; all objects stay; shunt keeps trying"),
            Some(_) => {}
        }
        self.error = error;
        self.error.is_none()
    }

    fn watch(&mut self) -> io::Result<()> {
        let io_error = |error: notify::Error| match error.kind {
            notify::ErrorKind::Io(error) => error,
            _ => io::Error::other(error),
        };
        let (dir, sender) = (self.dir.clone(), self.changes.0.clone());
        let identity = identity(&dir)?;
        let send = move |event| {
            for change in changes(&dir, event) {
                // If the receiver is gone, the source has ended.
                let _ = sender.blocking_send(change);
            }
        };
        let mut watcher = notify::recommended_watcher(send).map_err(io_error)?;
        watcher.watch(&self.dir, RecursiveMode::NonRecursive).map_err(io_error)?;
        self.watched = Some((watcher, identity));
        Ok(())
    }
}

/// Returns device and inode of the directory.
fn identity(dir: &Path) -> io::Result<(u64, u64)> {
    let metadata = dir.metadata()?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok((metadata.dev(), metadata.ino()))
}

fn changes(dir: &Path, event: notify::Result<notify::Event>) -> Vec<Change> {
    match event {
        Ok(event) if !event.need_rescan() => {
            event.paths.iter().filter_map(|path| change(dir, path, event.kind)).collect()
        }
        Ok(_) | Err(_) => vec![None],
    }
}

/// Converts an event for one path. None if nothing needs to be read.
fn change(dir: &Path, path: &Path, kind: EventKind) -> Option<Change> {
    let is_complete = match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Modify(ModifyKind::Name(_))
        | EventKind::Remove(_) => true,
        // A link appears with its content. The writer of another new file closes it later.
        EventKind::Create(_) => {
            path.symlink_metadata().is_ok_and(|file| file.is_symlink() || file.nlink() > 1)
        }
        _ => false,
    };
    match path.file_name().filter(|name| path != dir && is_manifest(name)) {
        _ if !is_complete => None,
        Some(name) => Some(Some(name.to_owned())),
        // Manifests may be reached through a symbolic link, like a ConfigMap's `..data`.
        None => (path == dir || path.is_symlink()).then_some(None),
    }
}
