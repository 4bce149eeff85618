//! TCX (kernel 6.6, e420bed02507): programs of several owners in an order of their own, each in a BPF link that can be pinned.

use std::{
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use super::{
    super::{super::KernelError, link, syscall},
    Attached, Hook, LinkProgram, unless_gone,
};

/// Loopback, which is in every network namespace.
const LOOPBACK: u32 = 1;

impl Hook {
    /// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
    const fn attach_type(self) -> u32 {
        match self {
            Self::Ingress => 46,
            Self::Egress => 47,
        }
    }
}

/// Whether this kernel has TCX. Asks it what runs on loopback: one that has not knows no such question.
pub fn is_supported() -> bool {
    match syscall::tcx_links(LOOPBACK, Hook::Ingress.attach_type()) {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(%error, "no TCX: programs on links are filters of a clsact qdisc");
            false
        }
    }
}

/// Makes a program run on a link, through a BPF link pinned at `pin`: before all that others attached so far, so that it runs
/// whatever they return. What is pinned there gets the program in place of its own, if it is for that link still; an index
/// may stand for another link by now.
pub fn attach(program: LinkProgram<'_>, index: u32, hook: Hook, pin: &Path) -> Result<Attached, KernelError> {
    if let Some((link, _)) = live_link(index, hook, pin)? {
        return match syscall::update_link(link.as_fd(), program.fd) {
            Ok(()) => Ok(Attached::Runs),
            Err(error) => unless_gone(error, KernelError::path("replace program of link", pin)),
        };
    }
    let link = match syscall::create_tcx_link(program.fd, index, hook.attach_type()) {
        Ok(link) => link,
        Err(error) => {
            return unless_gone(error, KernelError::path("attach program through TCX for", pin));
        }
    };
    link::pin_over(pin, |beside| {
        syscall::pin(link.as_fd(), beside).map_err(KernelError::path("pin link", beside))
    })?;
    Ok(Attached::Runs)
}

/// The id of the program that the BPF link at `pin` runs on a link; none where it runs on no link, on another one, or on one of
/// another network namespace.
pub fn attached(index: u32, hook: Hook, pin: &Path) -> Result<Option<u32>, KernelError> {
    Ok(live_link(index, hook, pin)?.map(|(_, program)| program))
}

fn live_link(index: u32, hook: Hook, pin: &Path) -> Result<Option<(OwnedFd, u32)>, KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(None) };
    let told = syscall::tcx_link(link.as_fd()).map_err(KernelError::path("inspect link", pin))?;
    let Some(told) = told.filter(|told| told.ifindex == index && told.attach_type == hook.attach_type())
    else {
        return Ok(None);
    };
    match syscall::tcx_links(index, hook.attach_type()) {
        Ok(here) => Ok(here.contains(&told.id).then_some((link, told.program))),
        // It is in another namespace, or gone this moment.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(KernelError::path("find link", pin)(error)),
    }
}

/// Takes the program off that the BPF link at `pin` runs, and removes the pin. One that is not there is no error.
pub fn detach(pin: &Path) -> Result<(), KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(()) };
    // What is pinned under our name but no link on a network link is not taken off a cgroup, say; the pin goes all the same.
    if syscall::tcx_link(link.as_fd()).is_ok_and(|told| told.is_some())
        && let Err(error) = syscall::detach_link(link.as_fd())
    {
        tracing::debug!(%error, pin = %pin.display(), "already detached");
    }
    match fs::remove_file(pin) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(KernelError::path("remove", pin)(error)),
        _ => Ok(()),
    }
}
