//! Attaches programs to the XDP hook of network links, through pinned BPF links. Kernel 5.9
//! (aa8d3a716b59).

pub mod dispatcher;
mod hook;

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use nix::net::if_::if_nameindex;

use super::{super::KernelError, link, syscall, tc::LinkProgram};
use crate::net::XdpMode;

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE`.
pub(super) const fn flags(mode: XdpMode) -> u32 {
    match mode {
        XdpMode::Generic => 1 << 1,
        XdpMode::Native => 1 << 2,
    }
}

/// The outcome of attaching to a link, unless it failed.
#[derive(Debug)]
pub enum XdpOutcome {
    /// The program is attached.
    Attached,
    /// The link is gone.
    LinkGone,
    /// The link has an XDP program of another owner.
    Taken(io::Error),
    /// The driver of the link refuses programs of this mode.
    Refused(io::Error),
}

/// Attaches a program to a link, through a BPF link that is pinned at `pin`. If a BPF link of this
/// network link is pinned there already, its program is replaced without a gap. `pin` must differ
/// by mode: the kernel does not say in which mode a program runs.
pub fn attach(
    program: LinkProgram<'_>,
    index: u32,
    mode: XdpMode,
    pin: &Path,
) -> Result<XdpOutcome, KernelError> {
    if let Some((link, _)) = live_link(index, pin)? {
        return match syscall::update_link(link.as_fd(), program.fd) {
            Ok(()) => Ok(XdpOutcome::Attached),
            Err(error) => outcome(index, error, KernelError::path("replace program of link", pin)),
        };
    }
    match syscall::create_xdp_link(program.fd, index, flags(mode)) {
        Ok(created) => {
            link::pin_over(pin, |new_pin| {
                syscall::pin(created.as_fd(), new_pin).map_err(KernelError::path("pin link", new_pin))
            })?;
            Ok(XdpOutcome::Attached)
        }
        Err(error) => outcome(index, error, KernelError::path("attach XDP program for", pin)),
    }
}

/// Returns the id of the program that the BPF link at `pin` runs on a link. Returns `None` if it
/// runs on another link, or on none.
pub fn attached(index: u32, pin: &Path) -> Result<Option<u32>, KernelError> {
    Ok(live_link(index, pin)?.map(|(_, program)| program))
}

fn live_link(index: u32, pin: &Path) -> Result<Option<(OwnedFd, u32)>, KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(None) };
    let info = syscall::xdp_link(link.as_fd()).map_err(KernelError::path("inspect link", pin))?;
    Ok(info.filter(|info| info.ifindex == index).map(|info| (link, info.program)))
}

/// Detaches the BPF link at `pin` and removes the pin. A pin that does not exist is no error.
pub fn detach(pin: &Path) -> Result<(), KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(()) };
    if syscall::xdp_link(link.as_fd()).is_ok_and(|info| info.is_some()) {
        link::detach_now(&link, pin);
    }
    link::remove_pin(pin)
}

/// Drivers refuse with many errors: for an MTU that needs several buffers, for too few queues or
/// too little memory. Whatever it is, the link programs serve the link. For a link that is gone,
/// the kernel returns EINVAL.
fn outcome(
    index: u32,
    error: io::Error,
    failed: impl FnOnce(io::Error) -> KernelError,
) -> Result<XdpOutcome, KernelError> {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EMFILE) => Err(failed(error)),
        _ if is_gone(index) => Ok(XdpOutcome::LinkGone),
        // EEXIST if the other program runs in another mode.
        Some(libc::EBUSY | libc::EEXIST) => Ok(XdpOutcome::Taken(error)),
        _ => Ok(XdpOutcome::Refused(error)),
    }
}

fn is_gone(index: u32) -> bool {
    if_nameindex().is_ok_and(|links| links.iter().all(|link| link.index() != index))
}
