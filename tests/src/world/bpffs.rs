//! The run's directory for pinned BPF objects, separate from that of a real installation.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount, umount};

/// The usual mount point of bpffs.
const MOUNT_POINT: &str = "/sys/fs/bpf";

/// The device name of a bpffs that a run mounted. The last run unmounts it, which may be in another
/// process.
const OURS: &str = "shunt-test";

/// Creates the directory of the run with this name. Mounts bpffs at its usual place if necessary.
/// While the directory exists, no other run unmounts bpffs.
pub(super) fn create(name: &str) -> Result<()> {
    if super::mounts_of_type(&super::mounts()?, "bpf").all(|at| at != Path::new(MOUNT_POINT)) {
        mount(Some(OURS), MOUNT_POINT, Some("bpf"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount bpffs at {MOUNT_POINT}"))?;
    }
    let path = directory(name);
    fs::create_dir(&path).with_context(|| format!("create {}", path.display()))
}

/// Returns the directory of the run with this name. The proxy creates a directory below it for its
/// pins.
pub(super) fn directory(name: &str) -> PathBuf {
    Path::new(MOUNT_POINT).join(name)
}

/// Unpins everything that the run with this name has pinned, which detaches and frees it.
pub(super) fn remove(name: &str) -> Result<()> {
    let path = directory(name);
    if !path.exists() {
        return Ok(());
    }
    fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))
}

/// Unmounts bpffs if a run mounted it and it is empty. Must not run while another run is created.
pub(super) fn unmount_if_unused() -> Result<()> {
    if !is_ours(&super::mounts()?) {
        return Ok(());
    }
    let mut entries = fs::read_dir(MOUNT_POINT).with_context(|| format!("read {MOUNT_POINT}"))?.flatten();
    // Kernels with preloaded iterators create maps.debug and progs.debug in every bpffs.
    let is_kernels_own =
        |entry: &fs::DirEntry| entry.path().extension().is_some_and(|suffix| suffix == "debug");
    if entries.all(|entry| is_kernels_own(&entry)) {
        umount(MOUNT_POINT).with_context(|| format!("unmount {MOUNT_POINT}"))?;
    }
    Ok(())
}

/// Returns true if a run mounted the bpffs in the text of `/proc/self/mounts`.
fn is_ours(mounts: &str) -> bool {
    mounts.lines().any(|line| line.starts_with(&format!("{OURS} {MOUNT_POINT} bpf ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_bpffs_is_not_ours() {
        assert!(!is_ours("bpf /sys/fs/bpf bpf rw,relatime 0 0\n"));
        assert!(is_ours("proc /proc proc rw 0 0\nshunt-test /sys/fs/bpf bpf rw,relatime 0 0\n"));
    }
}
