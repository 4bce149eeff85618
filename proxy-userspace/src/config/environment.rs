//! What the configuration takes from the machine and the process: read once, so that the rest is pure.

use std::path::PathBuf;

use crate::kernel::cgroup;

/// Facts from outside the flags and the file.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// The machine's host name, as the kernel has it.
    pub host_name: String,
    /// `NODE_NAME`, which manifests set from `spec.nodeName` through the downward API.
    pub node_name: Option<String>,
    /// `RUST_LOG`: a log filter for when neither a flag nor the file sets one.
    pub log_filter: Option<String>,
    /// The text of `/proc/self/mounts`.
    pub mounts: String,
}

impl Environment {
    /// Reads this process's.
    #[expect(clippy::disallowed_methods, reason = "this is where the environment is read")]
    pub fn of_this_process() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            host_name: read("/proc/sys/kernel/hostname"),
            node_name: std::env::var("NODE_NAME").ok(),
            log_filter: std::env::var("RUST_LOG").ok(),
            mounts: read("/proc/self/mounts"),
        }
    }

    /// Where the first cgroup v2 hierarchy is mounted.
    pub(super) fn cgroup_root(&self) -> Option<PathBuf> {
        cgroup::first_mount(&self.mounts)
    }
}
