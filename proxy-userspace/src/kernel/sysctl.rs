//! Kernel settings of the calling thread's network namespace, below `/proc/sys/net`.

use std::{fs, io, path::PathBuf};

use super::KernelError;

/// A setting below `/proc/sys/net`, such as `ipv4/conf/all/route_localnet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetSetting(pub &'static str);

impl NetSetting {
    fn path(self) -> PathBuf {
        PathBuf::from("/proc/sys/net").join(self.0)
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
}
