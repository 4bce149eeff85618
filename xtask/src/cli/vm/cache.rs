//! The cache of what was fetched for virtual machines: target/vm.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xtask::workspace;

use crate::cli::release::Target;

/// Locks the cache until the file is dropped.
pub(crate) fn lock() -> Result<File> {
    let cache = workspace::vm();
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let lock = File::create(cache.join("lock")).context("cannot create the lock of the cache")?;
    lock.lock().context("cannot lock the cache")?;
    Ok(lock)
}

/// Returns the folder of something for an architecture.
pub(crate) fn folder(name: &str, arch: Target) -> PathBuf {
    workspace::vm().join(match arch {
        Target::Amd64 => name.to_owned(),
        Target::Arm64 => format!("{name}-{}", arch.name()),
    })
}

/// Moves a complete folder into the cache.
pub(crate) fn keep(complete: &Path, folder: &Path) -> Result<()> {
    // An existing folder is incomplete.
    drop(fs::remove_dir_all(folder));
    fs::rename(complete, folder).with_context(|| format!("cannot move {} into the cache", folder.display()))
}

/// Describes a failure.
pub(crate) fn cannot_fetch(what: &str, folder: &Path) -> String {
    let folder = folder.display();
    format!("cannot fetch {what} (the network is needed once; afterwards it is in {folder})")
}
