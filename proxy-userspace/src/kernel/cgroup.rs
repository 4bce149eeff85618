//! The cgroup v2 hierarchy and its directories.

use std::{
    fs::File,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};

use super::KernelError;

const MOUNTS: &str = "/proc/self/mounts";
/// Where systemd mounts version 2 beside version 1, below `/sys/fs/cgroup`.
const UNIFIED: &str = "unified";

/// Returns the first mounted cgroup2 filesystem.
pub fn find_root() -> Result<PathBuf, KernelError> {
    let mounts = std::fs::read_to_string(MOUNTS).map_err(KernelError::path("read", MOUNTS))?;
    first_mount(&mounts).ok_or(KernelError::NoCgroup2)
}

/// Returns the first cgroup2 mount in the text of `/proc/self/mounts`.
pub fn first_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (_, path, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(unescape(path)))
    })
}

/// Decodes the kernel's octal escapes in mount points (`fs/proc_namespace.c`, `mangle`).
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// An open directory of a cgroup2 filesystem.
#[derive(Debug)]
pub struct Cgroup {
    /// The open directory.
    pub(super) directory: File,
    /// The kernel's ID of the cgroup, which is its inode number.
    pub(super) id: u64,
}

impl Cgroup {
    /// Opens the directory. On a node with both versions of cgroups, `/sys/fs/cgroup` holds version
    /// 1, and version 2 is in its directory `unified`: then opens that.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        match Self::open_directory(path) {
            Err(error @ KernelError::NotCgroup2(_)) => {
                Self::open_directory(&path.join(UNIFIED)).map_err(|_| error)
            }
            opened => opened,
        }
    }

    fn open_directory(path: &Path) -> Result<Self, KernelError> {
        let directory = File::open(path).map_err(KernelError::path("open --cgroup-root", path))?;
        let kind = fstatfs(&directory).map_err(|e| KernelError::path("statfs", path)(e.into()))?;
        let metadata = directory.metadata().map_err(KernelError::path("stat", path))?;
        if kind.filesystem_type() != CGROUP2_SUPER_MAGIC || !metadata.is_dir() {
            return Err(KernelError::NotCgroup2(path.into()));
        }
        Ok(Self { directory, id: metadata.ino() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_cgroup2_mount_is_found_among_version_1_hierarchies() {
        let mounts =
            "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(first_mount(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(first_mount("tmpfs /tmp tmpfs rw 0 0\n"), None);
    }

    #[test]
    fn file_of_a_cgroup_is_refused() {
        let file = find_root().expect("cgroup2").join("cgroup.procs");
        let error = Cgroup::open(&file).expect_err("no directory");
        assert!(error.to_string().ends_with("is not a directory of a cgroup2 filesystem"), "{error}");
    }

    #[test]
    fn version_2_beside_version_1_is_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = find_root().expect("cgroup2");
        std::os::unix::fs::symlink(&root, directory.path().join(UNIFIED)).expect("created");
        let opened = Cgroup::open(directory.path()).expect("it has unified");
        assert_eq!(opened.id, Cgroup::open(&root).expect("cgroup2").id);
    }

    #[test]
    fn directory_elsewhere_is_refused_by_name() {
        let error = Cgroup::open(Path::new("/proc")).expect_err("procfs is no cgroup");
        assert_eq!(error.to_string(), "--cgroup-root /proc is not a directory of a cgroup2 filesystem");
    }
}
