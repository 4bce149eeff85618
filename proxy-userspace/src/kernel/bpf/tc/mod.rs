//! Attaches programs to the hooks of network links: through TCX if the kernel has it, otherwise as
//! filters of a clsact qdisc.

pub mod clsact;
pub mod tcx;

use std::{io, os::fd::BorrowedFd};

use super::super::KernelError;

/// A hook of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// For packets that leave, after netfilter.
    Egress,
    /// For packets that arrive, before netfilter.
    Ingress,
}

/// A loaded link program.
#[derive(Clone, Copy, Debug)]
pub struct LinkProgram<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its descriptor.
    pub fd: BorrowedFd<'a>,
    /// Its id, which the kernel reports for a link or filter.
    pub id: u32,
}

/// Our program on a hook of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The id of the program.
    pub program: u32,
    /// The name of the program of another owner that runs before it, if one does.
    pub behind: Option<String>,
}

/// The outcome of attaching to a link, unless it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachOutcome {
    /// The program is attached.
    Attached,
    /// The link is gone.
    LinkGone,
    /// The link has a qdisc of kind ingress, so that it cannot have a clsact qdisc and an egress
    /// hook.
    NoEgressHook,
}

/// Returns the outcome of an error. A link that is gone is no failure.
fn link_gone_or(
    error: io::Error,
    failed: impl FnOnce(io::Error) -> KernelError,
) -> Result<AttachOutcome, KernelError> {
    match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENOLINK) => Ok(AttachOutcome::LinkGone),
        _ => Err(failed(error)),
    }
}
