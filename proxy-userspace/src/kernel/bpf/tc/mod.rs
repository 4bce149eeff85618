//! Programs on the hooks of network links: through TCX where the kernel has it, else as filters of a clsact qdisc.

pub mod clsact;
pub mod tcx;

use std::{io, os::fd::BorrowedFd};

use super::super::KernelError;

/// A hook of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// What leaves; after netfilter.
    Egress,
    /// What comes in; before netfilter.
    Ingress,
}

/// A loaded program for links.
#[derive(Clone, Copy, Debug)]
pub struct LinkProgram<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its descriptor.
    pub fd: BorrowedFd<'a>,
    /// Its id: what the kernel tells of whatever runs it.
    pub id: u32,
}

/// How attaching to a link ended, where nothing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// The program runs.
    Runs,
    /// The link is gone, and nothing is left to be done for it.
    LinkGone,
    /// The link has a qdisc of kind ingress, beside which there can be no clsact one: no hook for what leaves.
    NoEgress,
}

/// A link that vanished is no failure.
fn unless_gone(
    error: io::Error,
    failed: impl FnOnce(io::Error) -> KernelError,
) -> Result<Attached, KernelError> {
    match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENOLINK) => Ok(Attached::LinkGone),
        _ => Err(failed(error)),
    }
}
