//! Finds the pods that redirect their own outgoing packets, as the sidecars of service meshes do.
//!
//! Such a pod translates addresses with netfilter in its own network namespace, and asks the kernel
//! for the original destination (`SO_ORIGINAL_DST`). It must see the address that the application
//! connected to, so nothing may translate it before.
//!
//! A network namespace redirects if one of these is in it:
//!
//! - nftables, also written by iptables-nft: a chain of type `nat` or `route` at the hook output
//!   with at least one rule, or a rule with TPROXY;
//! - the legacy iptables: a rule in the chain OUTPUT of the tables nat or mangle. TPROXY is not
//!   looked for there.
//!
//! The kernel reports changes of nftables. Legacy tables are checked twice a second: it reports no
//! changes of those. Namespaces are found at the same rate, or as soon as one gets a name.

mod legacy;
mod namespaces;
mod nftables;
#[cfg(test)]
mod tests;
mod uapi;
mod watched;
mod watcher;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    path::PathBuf,
};

use tokio::sync::{oneshot, watch};

#[cfg(feature = "fuzzing")]
pub(super) use self::nftables::read_any;
use self::watcher::Watcher;
use super::{
    KernelError,
    capabilities::{self, SYS_ADMIN},
    netns::NetnsCookie,
};

/// The inode number of a network namespace, as `lsns` and `readlink /proc/PID/ns/net` show it. It
/// is unique while the namespace exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsInode(pub u64);

/// A network namespace that redirects its own outgoing packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExemptNamespace {
    /// The number that eBPF programs see. `None` on kernels before 5.14.
    pub cookie: Option<NetnsCookie>,
    /// The host name inside, which is the pod's name. `None` if no process of the pod is visible in
    /// /proc, because shunt has a PID namespace of its own.
    pub host_name: Option<String>,
    /// A path at which the namespace can be opened: `/run/netns/…` or `/proc/PID/ns/net`.
    pub path: PathBuf,
}

/// Writes `pod-name (/run/netns/…)`, or the path only.
impl fmt::Display for ExemptNamespace {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host_name {
            Some(name) => write!(to, "{name} ({})", self.path.display()),
            None => self.path.display().fmt(to),
        }
    }
}

/// All network namespaces that redirect their own outgoing packets, except that of this process.
pub type ExemptNamespaces = BTreeMap<NetnsInode, ExemptNamespace>;

/// What is known about pods that redirect their own outgoing packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedirectingPods {
    /// The namespaces that redirect.
    pub namespaces: ExemptNamespaces,
    /// The addresses in these namespaces, and in those that redirected before, without loopback and
    /// IPv6 link-local addresses. While a namespace redirects, they are read again within eight
    /// seconds.
    pub addresses: BTreeSet<IpAddr>,
}

/// Sends the namespaces that redirect after they were checked for the first time, and after every
/// change. Returns when all receivers are gone.
///
/// Needs `CAP_SYS_ADMIN` to enter the namespaces, and returns [`KernelError::NoSysAdmin`] without
/// it. Keeps up to five file descriptors for each namespace of the node. A namespace that cannot be
/// checked for another reason is logged once, and checked again twice a second.
pub async fn report(to: watch::Sender<Option<RedirectingPods>>) -> Result<(), KernelError> {
    if !capabilities::is_held(SYS_ADMIN)? {
        return Err(KernelError::NoSysAdmin);
    }
    let mut watcher = Watcher::new()?;
    let (end, ended) = oneshot::channel();
    // Entering a namespace and listing its rules block.
    super::spawn("redirecting-pods", move || {
        let is_over = |end: &oneshot::Sender<_>| to.is_closed() || end.is_closed();
        let outcome = watcher.run(&to, || is_over(&end));
        let _ = end.send(outcome);
    })?;
    ended.await.unwrap_or(Ok(()))
}
