//! The run's cgroup v2 subtrees: one for each node and its pods, one for all other hosts.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::topology::CgroupSubtree;
use crate::deadline::Deadline;

/// The time for killed processes to leave their cgroup.
const KILL_TIMEOUT: Duration = Duration::from_mins(1);

/// Returns the mount point of the cgroup v2 hierarchy, unified or next to version 1.
pub(super) fn mount_point() -> Result<Option<PathBuf>> {
    Ok(super::mounts_of_type(&super::mounts()?, "cgroup2").next().map(Path::to_owned))
}

/// Creates the subtrees of the run with this name. Mounts cgroup2 at `private_mount` if it is not
/// mounted.
pub(super) fn create(name: &str, private_mount: &Path) -> Result<PathBuf> {
    let top = if let Some(found) = mount_point()? {
        found
    } else {
        fs::create_dir_all(private_mount)?;
        mount(None::<&str>, private_mount, Some("cgroup2"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount cgroup2 at {}", private_mount.display()))?;
        private_mount.to_owned()
    };
    let own = top.join(name);
    for subtree in CgroupSubtree::ALL {
        let path = own.join(subtree.name());
        fs::create_dir_all(&path).with_context(|| format!("create cgroup {}", path.display()))?;
    }
    Ok(own)
}

/// Kills the processes in the cgroup and its children, and removes them. Does nothing if the cgroup
/// does not exist.
pub(super) fn remove(cgroup: &Path) -> Result<()> {
    if !cgroup.exists() {
        return Ok(());
    }
    let deadline = Deadline::after(KILL_TIMEOUT);
    loop {
        let running = processes(cgroup)?;
        for pid in &running {
            // The process may have ended already.
            let _killed = kill(*pid, Signal::SIGKILL);
        }
        if running.is_empty() {
            match remove_directories(cgroup) {
                Ok(()) => return Ok(()),
                // A dying process leaves its cgroup shortly after it leaves cgroup.procs.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && !deadline.passed() => {}
                Err(error) => return Err(error).with_context(|| format!("remove {}", cgroup.display())),
            }
        } else if deadline.passed() {
            bail!("processes {running:?} stay in cgroup {}", cgroup.display());
        }
        Deadline::pause();
    }
}

fn processes(cgroup: &Path) -> Result<Vec<Pid>> {
    let mut found = Vec::new();
    for path in children(cgroup)?.iter().map(PathBuf::as_path).chain([cgroup]) {
        let text = match fs::read_to_string(path.join("cgroup.procs")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.with_context(|| format!("read cgroup.procs of {}", path.display()))?,
        };
        found.extend(text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw));
    }
    Ok(found)
}

fn remove_directories(cgroup: &Path) -> io::Result<()> {
    for child in children(cgroup)? {
        fs::remove_dir(child)?;
    }
    fs::remove_dir(cgroup)
}

fn children(cgroup: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(cgroup)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.iter().map(fs::DirEntry::path).filter(|path| path.is_dir()).collect())
}
