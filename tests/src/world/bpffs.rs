//! The run's directory for pinned BPF objects, apart from that of a real installation.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount, umount};

/// Where bpffs is mounted by convention.
const MOUNT_POINT: &str = "/sys/fs/bpf";

/// The name of the mounted "device" of a bpffs that a run mounted. The run that ends last has to unmount it, and that
/// may be another process's.
const OURS: &str = "shunt-test";

/// Makes the directory of the run called `name`, mounting bpffs at its usual place if it is not mounted. As long as
/// the directory is there, no other run takes the mount away.
pub(super) fn create(name: &str) -> Result<()> {
    if super::mounts_of_type(&super::mounts()?, "bpf").all(|at| at != Path::new(MOUNT_POINT)) {
        mount(Some(OURS), MOUNT_POINT, Some("bpf"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount bpffs at {MOUNT_POINT}"))?;
    }
    let path = directory(name);
    fs::create_dir(&path).with_context(|| format!("create {}", path.display()))
}

/// The directory of the run called `name`; the proxy pins in a directory below it, which it makes itself.
pub(super) fn directory(name: &str) -> PathBuf {
    Path::new(MOUNT_POINT).join(name)
}

/// Unpins all that the run called `name` has pinned, which detaches and frees it.
pub(super) fn remove(name: &str) -> Result<()> {
    let path = directory(name);
    if !path.exists() {
        return Ok(());
    }
    fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))
}

/// Unmounts bpffs if a run mounted it and nothing is in it. Not while another run is being created.
pub(super) fn unmount_if_unused() -> Result<()> {
    if !is_ours(&super::mounts()?) {
        return Ok(());
    }
    let mut entries = fs::read_dir(MOUNT_POINT).with_context(|| format!("read {MOUNT_POINT}"))?.flatten();
    // Kernels with preloaded iterators put maps.debug and progs.debug into every bpffs.
    let is_kernels_own =
        |entry: &fs::DirEntry| entry.path().extension().is_some_and(|suffix| suffix == "debug");
    if entries.all(|entry| is_kernels_own(&entry)) {
        umount(MOUNT_POINT).with_context(|| format!("unmount {MOUNT_POINT}"))?;
    }
    Ok(())
}

/// Whether the bpffs in the text of `/proc/self/mounts` was mounted by a run.
fn is_ours(mounts: &str) -> bool {
    mounts.lines().any(|line| line.starts_with(&format!("{OURS} {MOUNT_POINT} bpf ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bpffs_that_was_there_is_not_ours() {
        assert!(!is_ours("bpf /sys/fs/bpf bpf rw,relatime 0 0\n"));
        assert!(is_ours("proc /proc proc rw 0 0\nshunt-test /sys/fs/bpf bpf rw,relatime 0 0\n"));
    }
}
