//! Kernel settings in files: sysctls of the network namespace, the size of conntrack's hash table,
//! and the OOM score of this process.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::KernelError;
use crate::net::PortRange;

/// Where a manifest mounts the host's `/proc/sys/net`. A container's own `/proc/sys/net` is
/// read-only unless the container is privileged.
const MOUNTED: &str = "/host/proc/sys/net";

/// Returns the directory of the sysctls. Both directories show the sysctls of the process's network
/// namespace.
fn root() -> &'static Path {
    static ROOT: OnceLock<&Path> = OnceLock::new();
    ROOT.get_or_init(|| {
        let mounted = Path::new(MOUNTED);
        if mounted.is_dir() { mounted } else { Path::new("/proc/sys/net") }
    })
}

/// Returns the values of a sysctl of IPv4 that each link has, such as `rp_filter`, by the name of
/// the link, with `all` and `default`. Links that cannot be read are left out: they may be gone.
pub fn of_links(name: &str) -> Result<BTreeMap<String, i64>, KernelError> {
    let directory = root().join("ipv4/conf");
    let entries = fs::read_dir(&directory).map_err(KernelError::path("list", directory))?;
    let value = |entry: fs::DirEntry| {
        let value = fs::read_to_string(entry.path().join(name)).ok()?.trim().parse().ok()?;
        Some((entry.file_name().into_string().ok()?, value))
    };
    Ok(entries.flatten().filter_map(value).collect())
}

/// A sysctl below `/proc/sys/net`, such as `ipv4/conf/all/route_localnet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sysctl(pub &'static str);

impl Sysctl {
    fn path(self) -> PathBuf {
        root().join(self.0)
    }

    /// Returns the value, or `None` if this kernel does not have the sysctl.
    pub fn read(self) -> Result<Option<i64>, KernelError> {
        match fs::read_to_string(self.path()) {
            Ok(text) => text.trim().parse().map(Some).map_err(|_| {
                KernelError::path("read", self.path())(io::Error::other(format!("{text:?} is not a number")))
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(KernelError::path("read", self.path())(error)),
        }
    }

    /// Writes the value.
    pub fn write(self, value: i64) -> Result<(), KernelError> {
        fs::write(self.path(), value.to_string()).map_err(KernelError::path("write", self.path()))
    }

    /// Writes the value if the sysctl has another one. Returns true if it had. Fails if this kernel
    /// does not have the sysctl.
    pub fn ensure(self, value: i64) -> Result<bool, KernelError> {
        if self.read()? == Some(value) {
            return Ok(false);
        }
        self.write(value).map(|()| true)
    }
}

/// Returns the ports that the kernel chooses for sockets of this network namespace
/// (`net.ipv4.ip_local_port_range`, for both IP families).
pub fn local_ports() -> Result<PortRange, KernelError> {
    let path = root().join("ipv4/ip_local_port_range");
    let text = fs::read_to_string(&path).map_err(KernelError::path("read", &path))?;
    let mut words = text.split_whitespace();
    let range = format!("{}-{}", words.next().unwrap_or_default(), words.next().unwrap_or_default());
    PortRange::parse(&range)
        .ok_or_else(|| KernelError::path("read", &path)(io::Error::other(format!("{text:?} is no range"))))
}

/// Keeps the kernel from choosing these ports for sockets of this network namespace
/// (`net.ipv4.ip_local_reserved_ports`, for both IP families). A program can still bind a socket
/// to one of them. Returns false if they are all reserved already.
pub fn reserve_local_ports(ports: PortRange) -> Result<bool, KernelError> {
    let path = root().join("ipv4/ip_local_reserved_ports");
    let text = fs::read_to_string(&path).map_err(KernelError::path("read", &path))?;
    let Some(list) = with_ports(text.trim(), ports) else { return Ok(false) };
    fs::write(&path, list).map(|()| true).map_err(KernelError::path("write", &path))
}

/// Adds ports to a list such as `8080,9148-9200`. Returns `None` if the list has them all. They
/// are then in one range, because the kernel joins ranges that follow each other.
fn with_ports(list: &str, ports: PortRange) -> Option<String> {
    let has_all = |range: &str| PortRange::parse(range).and_then(|range| range.common(ports)) == Some(ports);
    if list.split(',').any(has_all) {
        return None;
    }
    Some(if list.is_empty() { ports.to_string() } else { format!("{list},{ports}") })
}

/// Returns the number of online processors, at least 1. Processors that this process may not use
/// count too, because the limits are the node's.
pub fn processors() -> u32 {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    count_processors(&online).unwrap_or(1).max(1)
}

/// Counts the processors in a list such as `0-3,6`.
fn count_processors(list: &str) -> Option<u32> {
    let count = |range: &str| -> Option<u32> {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        to.parse::<u32>().ok()?.checked_sub(from.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(count).sum()
}

/// Gives conntrack's hash table at least this number of buckets. All network namespaces share it.
pub fn ensure_conntrack_buckets(buckets: u32) -> Result<(), KernelError> {
    const PATH: &str = "/sys/module/nf_conntrack/parameters/hashsize";
    let text = fs::read_to_string(PATH).map_err(KernelError::path("read", PATH))?;
    if text.trim().parse::<u32>().is_ok_and(|current| current >= buckets) {
        return Ok(());
    }
    fs::write(PATH, buckets.to_string()).map_err(KernelError::path("write", PATH))
}

/// Sets the OOM score of this process, from -1000 (the kernel never kills it) to 1000 (it is killed
/// first).
pub fn set_oom_score_adj(score: i32) -> Result<(), KernelError> {
    const PATH: &str = "/proc/self/oom_score_adj";
    let current = fs::read_to_string(PATH).map_err(KernelError::path("read", PATH))?;
    if current.trim() == score.to_string() {
        return Ok(());
    }
    fs::write(PATH, score.to_string()).map_err(|error| {
        let hint = "to lower the score, the process needs CAP_SYS_RESOURCE";
        let error = match error.kind() {
            io::ErrorKind::PermissionDenied => io::Error::new(error.kind(), format!("{error}; {hint}")),
            _ => error,
        };
        KernelError::path("write", PATH)(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_over_ranges() {
        for (list, count) in
            [("0\n", Some(1)), ("0-3\n", Some(4)), ("0-3,6,8-9", Some(7)), ("", None), ("3-0", None)]
        {
            assert_eq!(count_processors(list), count, "{list:?}");
        }
        assert!(processors() >= 1);
    }

    #[test]
    fn the_kernel_has_a_range_of_local_ports() {
        assert!(local_ports().is_ok_and(|ports| ports.first < ports.last));
    }

    #[test]
    fn ports_are_added_to_the_reserved_ones() {
        let ports = PortRange { first: 40_000, last: 40_009 };
        assert_eq!(with_ports("", ports).as_deref(), Some("40000-40009"));
        assert_eq!(with_ports("8080,9148-9200", ports).as_deref(), Some("8080,9148-9200,40000-40009"));
        assert_eq!(with_ports("40001-40020", ports).as_deref(), Some("40001-40020,40000-40009"));
        assert_eq!(with_ports("8080,39999-40020", ports), None);
    }

    #[test]
    fn a_missing_sysctl_cannot_be_written() {
        let absent = Sysctl("ipv4/conf/all/no_such_sysctl");
        assert!(matches!(absent.read(), Ok(None)));
        let error = absent.ensure(1).expect_err("absent").to_string();
        assert!(error.contains("/proc/sys/net/ipv4/conf/all/no_such_sysctl"), "{error}");
    }
}
