//! The kernel's interfaces: bpf(2), netlink, namespaces, mounts. No other module calls them, and
//! this one knows nothing of Services.
#![expect(unsafe_code, reason = "raw system calls live here, and nowhere else in this crate")]

pub mod bpf;
pub mod capabilities;
pub mod cgroup;
pub mod clock;
pub mod command;
pub mod conntrack;
pub mod cpu_profile;
pub mod end_signals;
mod error;
pub mod foreign_changes;
pub mod foreign_filters;
pub mod forwarding_changes;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod hangup;
pub mod ipset;
pub mod iptables;
pub mod ipvs;
pub mod links;
mod local_routes;
mod netlink;
pub mod netns;
pub mod nfacct;
pub mod nft;
pub mod nftables;
pub mod own_link;
pub mod own_process;
pub mod packet_trace;
pub mod probe;
pub mod process_memory;
pub mod processes;
pub mod redirecting_pods;
pub mod restart;
pub mod routing_rules;
pub mod ruleset_changes;
mod security_module;
pub mod sock_diag;
pub mod sysctl;
pub mod tunnel_link;
mod xdp_features;
pub mod xfrm;
pub mod xt_recent;

pub use error::KernelError;
pub use security_module::Confinement;

use std::{
    io,
    mem::size_of,
    os::fd::AsRawFd,
    thread::{self, JoinHandle},
};

/// Starts a thread with this name.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, KernelError> {
    let started = thread::Builder::new().name(name.into()).spawn(run);
    started.map_err(KernelError::call("start", format!("thread {name}")))
}

/// Returns a 64-bit socket option.
fn socket_option_u64(socket: &impl AsRawFd, option: libc::c_int) -> io::Result<u64> {
    let mut value = 0u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes to `value`, which has as many.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
