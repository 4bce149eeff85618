//! The bpf filesystem at its usual path, and where one that shunt mounts outlives the process.

use std::{
    fs::{self, OpenOptions},
    os::{
        fd::AsRawFd as _,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    sync::{Mutex, PoisonError},
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use crate::kernel::KernelError;

/// The path where distributions and container runtimes mount bpffs.
pub(in crate::kernel) const BPFFS: &str = "/sys/fs/bpf";

/// The inodes of the machine's first namespaces (`enum init_ns_ino`, include/uapi/linux/nsfs.h).
/// That of the mount namespace is fixed since kernel 6.18.
const FIRST_MOUNT_NAMESPACE: u64 = 0xEFFF_FFF8;
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Returns true if the path is on a bpf filesystem.
pub(in crate::kernel) fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

/// Makes sure that pins can be created in this directory, which may not exist yet. Mounts a bpffs
/// at its usual path if it is missing there and would last.
pub(super) fn ensure_bpffs(path: &Path) -> Result<(), KernelError> {
    // A second mount would hide what is in the first.
    static MOUNTING: Mutex<()> = Mutex::new(());
    let _turn = MOUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    if path.starts_with(BPFFS) && !is_bpffs(Path::new(BPFFS)) && Path::new(BPFFS).is_dir() {
        check_lasting()?;
        mount_bpffs()?;
        tracing::info!(path = BPFFS, "mounted a bpf filesystem, because there was none");
    }
    let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    if is_bpffs(existing) { Ok(()) } else { Err(KernelError::NoBpffs(path.into())) }
}

/// Mounts a bpffs at its usual path, for this user only. Without the option, every user may create
/// directories in it.
pub(in crate::kernel) fn mount_bpffs() -> Result<(), KernelError> {
    mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
        .map_err(|error| KernelError::path("mount bpf filesystem on", BPFFS)(error.into()))
}

/// Checks that a bpffs mounted now at its usual path would outlive this process. A mount ends with
/// the last mount namespace that has it. That of a container ends with the container.
///
/// It lasts in the machine's first mount namespace. It also lasts where mounts propagate to another
/// namespace: a directory of the node with the mount propagation `Bidirectional`. A container's own
/// `/sys` may propagate too, but to nobody, so only a bind mount of a directory counts.
pub(in crate::kernel) fn check_lasting() -> Result<(), KernelError> {
    if is_first_mount_namespace() || is_propagated_directory(Path::new(BPFFS))? {
        return Ok(());
    }
    Err(KernelError::BpffsNotLasting)
}

/// Returns true if this thread is in the mount namespace of the machine's first process. Returns
/// false if that cannot be read: before kernel 6.18 it needs the capabilities of that process.
fn is_first_mount_namespace() -> bool {
    let inode = |path: &str| fs::metadata(path).map(|metadata| metadata.ino()).ok();
    let own = inode("/proc/thread-self/ns/mnt");
    let is_in_first_pid_namespace = inode("/proc/thread-self/ns/pid") == Some(FIRST_PID_NAMESPACE);
    own.is_some()
        && (own == Some(FIRST_MOUNT_NAMESPACE) || is_in_first_pid_namespace && own == inode("/proc/1/ns/mnt"))
}

/// Returns true if the directory is on a bind mount of a directory whose mounts propagate to
/// others.
fn is_propagated_directory(path: &Path) -> Result<bool, KernelError> {
    const MOUNTS: &str = "/proc/thread-self/mountinfo";
    let directory = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(path);
    let directory = directory.map_err(KernelError::path("open", path))?;
    let info = format!("/proc/thread-self/fdinfo/{}", directory.as_raw_fd());
    let read = |path: &str| fs::read_to_string(path).map_err(KernelError::path("read", path));
    let (info, mounts) = (read(&info)?, read(MOUNTS)?);
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    Ok(id.is_some_and(|id| mounts.lines().any(|line| propagates_a_directory(line, id))))
}

/// Returns true if a line of `/proc/self/mountinfo` describes the mount with this identifier, and
/// this is a shared mount of a directory that is not the root of its file system.
fn propagates_a_directory(line: &str, id: &str) -> bool {
    // proc_pid_mountinfo(5): ID, parent, device, root, mount point, options, then tags up to "-".
    let mut fields = line.split(' ');
    let (found, root) = (fields.next(), fields.nth(2));
    let mut tags = fields.skip(2).take_while(|field| *field != "-");
    found == Some(id) && root.is_some_and(|root| root != "/") && tags.any(|tag| tag.starts_with("shared:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_shared_directory_of_another_namespace_propagates() {
        let at = |root: &str, tags: &str| {
            let line = format!("47 44 0:22 {root} /sys/fs/bpf rw,relatime{tags} - sysfs sysfs rw");
            propagates_a_directory(&line, "47")
        };
        assert!(at("/fs/bpf", " shared:7") && at("/fs/bpf", " master:3 shared:7"));
        for (root, tags) in [("/fs/bpf", ""), ("/fs/bpf", " master:3"), ("/", " shared:7")] {
            assert!(!at(root, tags), "{root}{tags}");
        }
        assert!(!propagates_a_directory("4 44 0:22 /fs/bpf /sys/fs/bpf rw shared:7 - sysfs sysfs rw", "47"));
    }
}
