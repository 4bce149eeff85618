//! What the configuration takes from the machine and the process. The rest is pure.

use crate::net::ProxyVariables;

/// Facts that come neither from flags nor from the file.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// The kernel's host name.
    pub host_name: String,
    /// `NODE_NAME`, which manifests set from `spec.nodeName` through the downward API.
    pub node_name: Option<String>,
    /// `RUST_LOG`: the log filter if neither a flag nor the file sets one.
    pub log_filter: Option<String>,
    /// `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`.
    pub proxies: ProxyVariables,
    /// The text of `/proc/self/mounts`.
    pub mounts: String,
}

impl Environment {
    /// Reads the environment of this process.
    #[expect(clippy::disallowed_methods, reason = "this is where the environment is read")]
    pub fn of_this_process() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let variable = |name: &str| std::env::var(name).ok();
        Self {
            host_name: read("/proc/sys/kernel/hostname"),
            node_name: variable("NODE_NAME"),
            log_filter: variable("RUST_LOG"),
            proxies: ProxyVariables::read(variable),
            mounts: read("/proc/self/mounts"),
        }
    }
}
