//! Network namespaces: their cookies, and running code in another one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    net::IpAddr,
    os::unix::{fs::MetadataExt as _, net::UnixDatagram},
    path::{Path, PathBuf},
    thread,
};

use nix::{
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    sched::{CloneFlags, setns, unshare},
};

use super::KernelError;
pub use crate::net::NetnsCookie;

/// Returns the cookie of the calling thread's namespace. `None` on kernels before 5.14, which show
/// it to programs only (`SO_NETNS_COOKIE`, e8b9eab99232).
pub fn current_cookie() -> Result<Option<NetnsCookie>, KernelError> {
    // Any socket works. This kind needs no address and no link that is up.
    let socket = UnixDatagram::unbound().map_err(KernelError::call("open", "a socket"))?;
    match super::socket_option_u64(&socket, libc::SO_NETNS_COOKIE) {
        Ok(cookie) => Ok(Some(NetnsCookie(cookie))),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        Err(error) => Err(KernelError::call("getsockopt SO_NETNS_COOKIE of", "a socket")(error)),
    }
}

/// Returns the addresses in the calling thread's namespace, without loopback and IPv6 link-local
/// addresses.
pub fn addresses() -> Result<BTreeSet<IpAddr>, KernelError> {
    let links = getifaddrs().map_err(|error| KernelError::call("list", "addresses")(error.into()))?;
    let links = links.filter(|link| !link.flags.contains(InterfaceFlags::IFF_LOOPBACK));
    let addresses = links.filter_map(|link| {
        let address = link.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    let is_link_local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    Ok(addresses.filter(|address| !is_link_local(address)).collect())
}

/// Returns one handle for each network namespace that can be found: named ones (`/run/netns`, where
/// container runtimes keep those of pods), and those of processes in /proc.
pub fn handles() -> Vec<(PathBuf, File)> {
    let mut found = BTreeMap::new();
    let named = directory("/run/netns").chain(directory("/var/run/netns"));
    let of_processes = directory("/proc")
        .filter(|path| path.file_name().is_some_and(|n| n.as_encoded_bytes().iter().all(u8::is_ascii_digit)))
        .map(|path| path.join("ns/net"));
    for path in [PathBuf::from("/proc/self/ns/net")].into_iter().chain(named).chain(of_processes) {
        // A namespace that cannot be opened has disappeared.
        if let Ok(file) = File::open(&path)
            && let Ok(meta) = file.metadata()
        {
            found.entry((meta.dev(), meta.ino())).or_insert((path, file));
        }
    }
    found.into_values().collect()
}

/// Returns the addresses in each network namespace that can be found and entered, by its cookie.
/// Enters each of them, so it takes a millisecond for ten or so.
pub fn addresses_by_cookie() -> BTreeMap<NetnsCookie, BTreeSet<IpAddr>> {
    let read = |(path, file): (PathBuf, File)| {
        let inside = within(&path, &file, || Ok((current_cookie()?, addresses()?)));
        // A namespace may have disappeared meanwhile.
        inside.ok().and_then(|(cookie, addresses)| Some((cookie?, addresses)))
    };
    handles().into_iter().filter_map(read).collect()
}

fn directory(path: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Runs `job` on a new thread in a network namespace.
pub fn within<T: Send>(
    path: &Path,
    namespace: &File,
    job: impl FnOnce() -> Result<T, KernelError> + Send,
) -> Result<T, KernelError> {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                setns(namespace, CloneFlags::CLONE_NEWNET)
                    .map_err(|e| KernelError::path("enter network namespace", path)(e.into()))?;
                job()
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `job` on a new thread in a new network namespace, which ends with the thread. Commands that
/// the job starts run there too.
pub fn within_new<T: Send>(job: impl FnOnce() -> T + Send) -> Result<T, KernelError> {
    let job = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|error| KernelError::call("create", "a network namespace")(error.into()))?;
        Ok(job())
    };
    thread::scope(|scope| scope.spawn(job).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_namespace_has_a_cookie_and_a_handle() {
        let here = current_cookie().expect("a socket").expect("kernel 5.14 or newer");
        assert!(
            handles().iter().any(|(path, file)| within(path, file, current_cookie).ok() == Some(Some(here))),
            "root can enter its own namespace"
        );
    }
}
