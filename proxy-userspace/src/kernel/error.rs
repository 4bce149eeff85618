//! What can go wrong between shunt and the kernel: always the operation, the object and the cause.

use std::{io, path::PathBuf};

/// A call into the kernel failed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A system call on a file or directory.
    #[error("{operation} {}: {source}", path.display())]
    Path {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A system call on something without a path.
    #[error("{operation} {object}: {source}")]
    Call {
        /// What was tried.
        operation: &'static str,
        /// On what.
        object: String,
        /// Why not.
        source: io::Error,
    },
    /// The BPF object, a program, map or link.
    #[error("{operation} {object}: {source}")]
    Bpf {
        /// What was tried.
        operation: &'static str,
        /// On what.
        object: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A map cannot take another entry.
    #[error("map {map} is full: it holds {capacity} entries; {remedy}")]
    MapFull {
        /// The map.
        map: &'static str,
        /// Its capacity.
        capacity: u32,
        /// What to do about it.
        remedy: String,
    },
    /// No hook for what leaves a link.
    #[error(
        "somebody else's ingress qdisc on link {link} leaves no room for a clsact one, which kernels before 6.6 need: remove it \
         (`tc qdisc del dev {link} ingress`), or use a newer kernel"
    )]
    NoEgress {
        /// The link's name.
        link: String,
    },
    /// Pins can only live on a bpf filesystem.
    #[error(
        "{} is not on a bpf filesystem, where maps and links are pinned: mount one with `mount -t bpf bpf /sys/fs/bpf`, or name \
         another directory with --bpf-pin-dir",
        path.display()
    )]
    NoBpffs {
        /// The directory asked for.
        path: PathBuf,
    },
    /// Another process has these pins.
    #[error(
        "another shunt works with {}: stop that one, or name another directory with --bpf-pin-dir",
        path.display()
    )]
    PinsInUse {
        /// The directory asked for.
        path: PathBuf,
    },
    /// No cgroup v2 hierarchy.
    #[error("no cgroup2 filesystem is mounted; mount one and name it with --cgroup-root")]
    NoCgroup2,
    /// This process may not use eBPF.
    #[error(
        "eBPF needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; missing: {missing}"
    )]
    NotPermitted {
        /// What it lacks.
        missing: String,
    },
    /// This process may change nothing of the network.
    #[error("every mode needs root, or the capability CAP_NET_ADMIN, which is missing")]
    NoNetAdmin,
    /// Not a cgroup v2 directory.
    #[error("--cgroup-root {} is not a directory of a cgroup2 filesystem", path.display())]
    NotCgroup2 {
        /// The directory asked for.
        path: PathBuf,
    },
    /// A command that is not installed, or not where it is looked for.
    #[error("the command {program} is not installed: it is not in PATH")]
    CommandNotFound {
        /// Its name.
        program: String,
    },
    /// A command that ended with an error.
    #[error("`{command}` ended with {status}: {stderr}")]
    CommandFailed {
        /// The command line.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of what it said on its standard error.
        stderr: String,
    },
    /// A command that took too long, and was killed.
    #[error("`{command}` did not end within {limit:?} and was killed")]
    CommandTimedOut {
        /// The command line.
        command: String,
        /// How long it had.
        limit: std::time::Duration,
    },
    /// The process is about to end: a command was ended too, or not begun.
    #[error("`{command}` is not waited for: the proxy is stopping")]
    CommandForsaken {
        /// The command line.
        command: String,
    },
    /// Packets that programs marked are left as they are.
    #[error(
        "traffic from outside that has to be masqueraded or refused is not served right, because neither nft nor iptables can \
         be used; nft: {nft}; iptables: {iptables}"
    )]
    NoNetfilter {
        /// What came of nft.
        nft: Box<Self>,
        /// What came of iptables.
        iptables: Box<Self>,
    },
    /// The table of tracked connections cannot be read or changed.
    #[error(
        "this kernel does not let conntrack entries be listed or deleted: it needs the module nf_conntrack_netlink \
         (CONFIG_NF_CT_NETLINK); try `modprobe nf_conntrack_netlink`: {source}"
    )]
    NoConntrackNetlink {
        /// What it said.
        source: io::Error,
    },
    /// rtnetlink.
    #[error("rtnetlink: {operation}: {source}")]
    Netlink {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: rtnetlink::Error,
    },
}

impl KernelError {
    /// An error of a call on a path, for `map_err`.
    pub(crate) fn path<P: Into<PathBuf>>(operation: &'static str, path: P) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { operation, path, source }
    }

    /// An error of a call on a named thing, for `map_err`.
    pub(crate) fn call(operation: &'static str, object: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let object = object.into();
        move |source| Self::Call { operation, object, source }
    }

    /// An error of the BPF library, for `map_err`.
    pub(crate) fn bpf<E>(operation: &'static str, object: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let object = object.into();
        move |source| Self::Bpf { operation, object, source: Box::new(Chain(source)) }
    }
}

/// Shows an error with its causes: the BPF library keeps the kernel's answer in the last one.
#[derive(Debug)]
struct Chain<E>(E);

impl<E: std::error::Error> std::fmt::Display for Chain<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl<E: std::error::Error> std::error::Error for Chain<E> {}
