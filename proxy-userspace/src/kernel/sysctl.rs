//! Settings that the kernel keeps in files: those of the calling thread's network namespace below `/proc/sys/net`, conntrack's
//! table, and this process's own.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::KernelError;

/// Where a manifest mounts the host's `/proc/sys/net`: a container's own is read-only unless it is privileged.
const MOUNTED: &str = "/host/proc/sys/net";

/// Where settings are. They are those of the process's network namespace, through either path.
fn root() -> &'static Path {
    static ROOT: OnceLock<&Path> = OnceLock::new();
    ROOT.get_or_init(|| {
        let mounted = Path::new(MOUNTED);
        if mounted.is_dir() { mounted } else { Path::new("/proc/sys/net") }
    })
}

/// A setting below `/proc/sys/net`, such as `ipv4/conf/all/route_localnet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetSetting(pub &'static str);

impl NetSetting {
    fn path(self) -> PathBuf {
        root().join(self.0)
    }

    /// Its value; none where this kernel does not have it.
    pub fn read(self) -> Result<Option<i64>, KernelError> {
        match fs::read_to_string(self.path()) {
            Ok(text) => text.trim().parse().map(Some).map_err(|_| {
                KernelError::path("read", self.path())(io::Error::other(format!("{text:?} is no number")))
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(KernelError::path("read", self.path())(error)),
        }
    }

    /// Sets it.
    pub fn write(self, value: i64) -> Result<(), KernelError> {
        fs::write(self.path(), value.to_string()).map_err(KernelError::path("write", self.path()))
    }

    /// Sets it where it has another value, and says whether it had. A setting that this kernel does not have is an error.
    pub fn ensure(self, value: i64) -> Result<bool, KernelError> {
        if self.read()? == Some(value) {
            return Ok(false);
        }
        self.write(value).map(|()| true)
    }
}

/// How many processors are online; at least one.
pub fn processors() -> u32 {
    // Not what this process may run on: the limits are the node's.
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    count_processors(&online).unwrap_or(1).max(1)
}

/// Of a list such as `0-3,6`.
fn count_processors(list: &str) -> Option<u32> {
    let count = |range: &str| -> Option<u32> {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        to.parse::<u32>().ok()?.checked_sub(from.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(count).sum()
}

/// Gives conntrack's hash table at least so many buckets; it is all network namespaces'.
pub fn ensure_conntrack_buckets(buckets: u32) -> Result<(), KernelError> {
    const PATH: &str = "/sys/module/nf_conntrack/parameters/hashsize";
    let text = fs::read_to_string(PATH).map_err(KernelError::path("read", PATH))?;
    if text.trim().parse::<u32>().is_ok_and(|has| has >= buckets) {
        return Ok(());
    }
    fs::write(PATH, buckets.to_string()).map_err(KernelError::path("write", PATH))
}

/// How soon the kernel kills this process for want of memory: -1000 for never, 1000 for first.
pub fn set_oom_score_adj(score: i32) -> Result<(), KernelError> {
    const PATH: &str = "/proc/self/oom_score_adj";
    let has = fs::read_to_string(PATH).map_err(KernelError::path("read", PATH))?;
    if has.trim() == score.to_string() {
        return Ok(());
    }
    fs::write(PATH, score.to_string()).map_err(|error| KernelError::path("write", PATH)(explained(error)))
}

fn explained(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            io::Error::new(error.kind(), format!("{error}; a lower score than before needs CAP_SYS_RESOURCE"))
        }
        _ => error,
    }
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
    fn a_setting_that_the_kernel_does_not_have_cannot_be_set() {
        let absent = NetSetting("ipv4/conf/all/no_such_setting");
        assert!(matches!(absent.read(), Ok(None)));
        let error = absent.ensure(1).expect_err("absent").to_string();
        assert!(error.contains("/proc/sys/net/ipv4/conf/all/no_such_setting"), "{error}");
    }
}
