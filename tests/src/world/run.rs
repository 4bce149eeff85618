//! The name and the directory of one run. Everything that the run makes is found by its name: for
//! removal at the end, after a signal, and by a later run if this one was killed.
//!
//! A run's directory is locked while its process lives. An unlocked directory is left over from a
//! killed run.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context as _, Error, Result};
use nix::mount::{MntFlags, umount2};

use super::{bpffs, cgroup, netns};

/// The parent of the directories of runs. They are found again here, and vanish with a reboot.
const PARENT: &str = "/run";
/// The prefix of the names of all runs.
const PREFIX: &str = "shunt-test-";
const LOCK: &str = "lock";
const PRIVATE_CGROUP2: &str = "cgroup2";

/// The runs of this process that are not removed yet.
static LIVE: Mutex<Vec<String>> = Mutex::new(Vec::new());
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A run: its unique name and its directory. When it is dropped, everything with its name is
/// removed.
#[derive(Debug)]
pub(super) struct Run {
    name: String,
    directory: PathBuf,
    _lock: File,
}

impl Run {
    /// Claims a new name and creates the directories, after it has removed the leftovers of killed
    /// runs.
    pub(super) fn create() -> Result<Self> {
        let run = Self::claim()?;
        // The lock is released here, because dropping the run takes the same lock.
        {
            let _one_at_a_time = lock_parent()?;
            bpffs::create(&run.name)?;
        }
        Ok(run)
    }

    fn claim() -> Result<Self> {
        let _one_at_a_time = lock_parent()?;
        for error in remove_leftovers_locked().1 {
            tracing::warn!(error = format!("{error:#}"), "cannot remove all leftovers of an earlier run");
        }
        let name = format!("{PREFIX}{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = Path::new(PARENT).join(&name);
        live().push(name.clone());
        fs::create_dir(&directory).with_context(|| format!("create {}", directory.display()))?;
        let lock = File::create_new(directory.join(LOCK)).context("create the lock of the run")?;
        lock.try_lock().context("lock the directory of the run")?;
        Ok(Self { name, directory, _lock: lock })
    }

    /// Returns the name, such as `shunt-test-4711-0`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the directory for the run's files.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the mount point for cgroup2 if it is not mounted.
    pub(super) fn private_cgroup2(&self) -> PathBuf {
        self.directory.join(PRIVATE_CGROUP2)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let errors = remove_own(std::slice::from_ref(&self.name));
        live().retain(|name| *name != self.name);
        for error in errors {
            tracing::error!(
                run = self.name,
                error = format!("{error:#}"),
                "cannot remove all of the test world"
            );
        }
    }
}

/// Removes the leftovers of killed runs. Returns their names, and the errors.
pub fn remove_leftovers() -> Result<(Vec<String>, Vec<Error>)> {
    let _one_at_a_time = lock_parent()?;
    Ok(remove_leftovers_locked())
}

/// Removes all runs of this process, before it exits on a signal.
pub fn remove_live_runs() -> Vec<Error> {
    let names = live().clone();
    remove_own(&names)
}

/// Removes runs of this process, under the lock: another run must not take a half removed and no
/// longer locked run for a leftover.
fn remove_own(names: &[String]) -> Vec<Error> {
    let (_one_at_a_time, mut errors) = match lock_parent() {
        Ok(lock) => (Some(lock), Vec::new()),
        Err(error) => (None, vec![error]),
    };
    errors.extend(names.iter().flat_map(|name| remove(name)));
    errors.extend(bpffs::unmount_if_unused().err());
    errors
}

/// Returns the paths that exist under the run's name, for checks that nothing is left.
pub fn leftover_paths(name: &str) -> Vec<PathBuf> {
    let namespaces = netns::names(&format!("{name}-"));
    let mut paths: Vec<_> =
        namespaces.iter().map(|namespace| Path::new(netns::DIRECTORY).join(namespace)).collect();
    paths.extend(cgroup_of(name));
    paths.extend([bpffs::directory(name), Path::new(PARENT).join(name)]);
    paths.retain(|path| path.exists());
    paths
}

fn remove_leftovers_locked() -> (Vec<String>, Vec<Error>) {
    let mut names = Vec::new();
    for entry in fs::read_dir(PARENT).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name.starts_with(PREFIX) && !is_locked(&entry.path()) {
            names.push(name);
        }
    }
    let errors = names.iter().flat_map(|name| remove(name)).collect();
    (names, errors)
}

/// Removes everything with this name. The directory comes last: while it exists, the rest can be
/// found again.
fn remove(name: &str) -> Vec<Error> {
    let mut errors = Vec::new();
    // Processes come first, because they use everything else.
    errors.extend(cgroup_of(name).and_then(|path| cgroup::remove(&path).err()));
    for namespace in netns::names(&format!("{name}-")) {
        errors.extend(netns::remove(&namespace).err());
    }
    errors.extend(bpffs::remove(name).err());
    let directory = Path::new(PARENT).join(name);
    let private_cgroup2 = directory.join(PRIVATE_CGROUP2);
    if private_cgroup2.exists()
        && let Err(error) = umount2(&private_cgroup2, MntFlags::MNT_DETACH)
    {
        errors.push(Error::new(error).context(format!("unmount {}", private_cgroup2.display())));
        return errors;
    }
    if directory.exists() {
        errors.extend(remove_directory(&directory).err());
    }
    errors
}

/// Renames the directory before removing it, because a thread that is still running may create a
/// file in it at any moment.
fn remove_directory(directory: &Path) -> Result<()> {
    let removed = directory.with_added_extension("removed");
    fs::rename(directory, &removed)
        .and_then(|()| fs::remove_dir_all(&removed))
        .with_context(|| format!("remove {}", directory.display()))
}

fn cgroup_of(name: &str) -> Option<PathBuf> {
    let mount_point = cgroup::mount_point().ok().flatten()?;
    Some(mount_point.join(name))
}

fn is_locked(directory: &Path) -> bool {
    File::open(directory.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_err())
}

/// Locks the parent directory, so that no other run looks for leftovers while a directory exists
/// but is not locked yet.
fn lock_parent() -> Result<File> {
    let parent = File::open(PARENT).with_context(|| format!("open {PARENT}"))?;
    parent.lock().with_context(|| format!("lock {PARENT}"))?;
    Ok(parent)
}

fn live() -> MutexGuard<'static, Vec<String>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}
