//! Errors between shunt and the kernel. Each has the operation, the object and the cause.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{
    bpf::xdp::dispatcher::Obstacle,
    security_module::{self, Confinement},
};

/// A failed operation on the kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A system call on a path or another object.
    #[error("cannot {operation} {object}: {source}")]
    Call {
        /// The operation.
        operation: &'static str,
        /// The object.
        object: String,
        /// The cause.
        source: io::Error,
    },
    /// A security module denied a system call.
    #[error("cannot {operation} {object}: {module} denies it ({source}); {}", .module.remedy())]
    Denied {
        /// The operation.
        operation: &'static str,
        /// The object.
        object: String,
        /// The security module.
        module: Confinement,
        /// The error of the system call.
        source: io::Error,
    },
    /// A map has no room for another entry.
    #[error("the map {map} is full: it holds {capacity} entries; {remedy}")]
    MapFull {
        /// The map.
        map: &'static str,
        /// Its capacity.
        capacity: u32,
        /// How to make room.
        remedy: String,
    },
    /// This pin directory is not on a bpf filesystem.
    #[error(
        "cannot pin maps and links: {} is not on a bpf filesystem; mount one with `mount -t bpf bpf /sys/fs/bpf`, or \
         set another directory with --bpf-pin-dir",
        .0.display()
    )]
    NoBpffs(PathBuf),
    /// A bpf filesystem that this process mounts would end with its container.
    #[error(
        "cannot pin maps and links: no bpf filesystem is mounted on {path}, and one that shunt mounts would end with \
         this container (its mount namespace), and all pins with it; mount the node's {path} into the container; if \
         the node has none, run there: mount -t bpf bpf {path}",
        path = super::bpf::BPFFS
    )]
    BpffsNotLasting,
    /// Users other than ours can change this pin directory.
    #[error(
        "cannot use the pin directory {}: it belongs to user {owner} and has mode {mode:04o}; it must belong to \
         user {user} and only that user may write to it; remove it, or set another directory with --bpf-pin-dir",
        .path.display()
    )]
    PinsNotPrivate {
        /// The directory.
        path: PathBuf,
        /// The number of the user that owns it.
        owner: u32,
        /// Its permissions.
        mode: u32,
        /// The number of our effective user.
        user: u32,
    },
    /// A symbolic link or a file is in the place of a pin directory.
    #[error(
        "cannot use the pin directory {}: it is a symbolic link or a file; remove it, or set another directory \
         with --bpf-pin-dir",
        .0.display()
    )]
    PinsNotInDirectory(PathBuf),
    /// Another process uses this pin directory.
    #[error(
        "another shunt ({}) uses {}: stop that one, or set another directory with --bpf-pin-dir; nodes in containers \
         that share a bpf filesystem need a directory each",
        .process.map_or_else(|| "in another container".into(), |process| format!("process {process}")),
        .path.display()
    )]
    PinsInUse {
        /// The directory.
        path: PathBuf,
        /// The process, or `None` if it is in another PID namespace.
        process: Option<u32>,
    },
    /// There is no cgroup v2 hierarchy.
    #[error("no cgroup2 filesystem is mounted")]
    NoCgroup2,
    /// This process may not use eBPF: these capabilities are missing.
    #[error("eBPF needs root, or the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; missing: {0}")]
    NotPermitted(String),
    /// This process may not change the network.
    #[error("every mode needs root or the capability CAP_NET_ADMIN: the capability is missing")]
    NoNetAdmin,
    /// This process may not enter network namespaces.
    #[error(
        "cannot find the pods that redirect their own traffic: the capability CAP_SYS_ADMIN is missing, which \
         entering their network namespaces needs"
    )]
    NoSysAdmin,
    /// This directory is not in a cgroup v2 hierarchy.
    #[error("--cgroup-root {} is not a directory of a cgroup2 filesystem", .0.display())]
    NotCgroup2(PathBuf),
    /// The program with this name is not in the searched directories.
    #[error("the command {0} is not installed: it is not in PATH")]
    CommandNotFound(String),
    /// A command ended with an error.
    #[error("`{command}` ended with {status}: {stderr}")]
    CommandFailed {
        /// The command line.
        command: String,
        /// The exit status.
        status: std::process::ExitStatus,
        /// The end of its standard error.
        stderr: String,
    },
    /// A command took too long and was killed.
    #[error("`{command}` did not end within {limit:?} and was killed")]
    CommandTimedOut {
        /// The command line.
        command: String,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// The process shuts down: the command with this command line did not start, or it was killed.
    #[error("cannot run `{0}`: shunt is shutting down")]
    CommandCancelled(String),
    /// Neither nft nor iptables can write the rules for marked packets.
    #[error(
        "cannot masquerade or reject traffic from outside: neither nft nor iptables works on this node; \
         nft: {nft}; iptables: {iptables}"
    )]
    NoNetfilter {
        /// The error of nft.
        nft: Box<Self>,
        /// The error of iptables.
        iptables: Box<Self>,
    },
    /// Conntrack entries cannot be listed or deleted.
    #[error(
        "cannot list or delete conntrack entries: {0}; the kernel needs the module nf_conntrack_netlink \
         (CONFIG_NF_CT_NETLINK); try `modprobe nf_conntrack_netlink`"
    )]
    NoConntrackNetlink(#[source] io::Error),
    /// The dispatcher of libxdp on a link cannot be used.
    #[error("cannot use the dispatcher of libxdp: {0}")]
    Dispatcher(#[from] Obstacle),
}

impl KernelError {
    /// Returns a constructor of [`Self::Call`] for a path, for `map_err`.
    pub(crate) fn path(operation: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        Self::call(operation, path.as_ref().display().to_string())
    }

    /// Returns a constructor of [`Self::Call`], for `map_err`.
    pub(crate) fn call(operation: &'static str, object: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let object = object.into();
        move |source| Self::Call { operation, object, source }
    }

    /// Names the security module, if one denied a [`Self::Call`] on bpffs or of bpf(2).
    pub(crate) fn explained(self) -> Self {
        match self {
            Self::Call { operation, object, source } => match security_module::cause_of(&source) {
                Some(module) => Self::Denied { operation, object, module, source },
                None => Self::Call { operation, object, source },
            },
            other => other,
        }
    }

    /// Returns a constructor of [`Self::Call`] for an error of the BPF library, for `map_err`. The
    /// library keeps the kernel's error in the last cause.
    pub(crate) fn bpf<E>(operation: &'static str, object: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let call = Self::call(operation, object);
        move |error| call(io::Error::other(format!("{:#}", anyhow::Error::new(error))))
    }
}
