//! Attaching programs to a cgroup through pinned links.

use std::{
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use aya::programs::{CgroupAttachMode, Program, ProgramError, links::FdLink};

use super::{
    super::{KernelError, cgroup::Cgroup},
    pins::suffixed,
    syscall,
};

/// How a program came to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// A link was made and pinned.
    Attached,
    /// It took the place of another program in the pinned link.
    Replaced,
}

/// Makes a loaded program run for a cgroup, through a link pinned at `pin`. A link that is pinned there already gets the new
/// program in place of the old; where it belongs to another cgroup, or to none any more, a new link takes its path first.
pub fn attach(program: &mut Program, cgroup: &Cgroup, pin: &Path) -> Result<Replacement, KernelError> {
    let Some(link) = live_link(cgroup, pin)? else {
        return attach_anew(program, cgroup, pin).map(|()| Replacement::Attached);
    };
    let fd = program.fd().map_err(KernelError::bpf("find program for", pin.display().to_string()))?;
    syscall::update_link(link.as_fd(), fd.as_fd())
        .map(|()| Replacement::Replaced)
        .map_err(KernelError::path("replace program of link", pin))
}

/// Whether a link is pinned there that runs its program for the cgroup: someone may have removed it, or detached it.
pub fn is_attached(cgroup: &Cgroup, pin: &Path) -> Result<bool, KernelError> {
    live_link(cgroup, pin).map(|link| link.is_some())
}

/// The link pinned there, if it belongs to the cgroup. A detached one belongs to none, nor does one whose cgroup is gone.
fn live_link(cgroup: &Cgroup, pin: &Path) -> Result<Option<OwnedFd>, KernelError> {
    let Some(link) = open(pin)? else { return Ok(None) };
    let attached_to = syscall::link_cgroup(link.as_fd()).map_err(KernelError::path("inspect link", pin))?;
    Ok((attached_to == cgroup.id()).then_some(link))
}

/// The link pinned there; none where there is no such pin.
pub(super) fn open(pin: &Path) -> Result<Option<OwnedFd>, KernelError> {
    match syscall::open_pin(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        link => link.map(Some).map_err(KernelError::path("open link", pin)),
    }
}

fn attach_anew(program: &mut Program, cgroup: &Cgroup, pin: &Path) -> Result<(), KernelError> {
    let link = create(program, cgroup)
        .map_err(KernelError::bpf("attach program to cgroup for", pin.display().to_string()))?;
    pin_over(pin, |beside| {
        link.pin(beside).map(drop).map_err(KernelError::bpf("pin link", beside.display().to_string()))
    })
}

/// Pins a new link, through `pin_at`, beside and then renames it over the old one, which ends with its last pin.
pub(super) fn pin_over(
    pin: &Path,
    pin_at: impl FnOnce(&Path) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let beside = suffixed(pin, "-new");
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(KernelError::path("remove", beside)(error));
        }
        _ => {}
    }
    pin_at(&beside)?;
    fs::rename(&beside, pin).map_err(KernelError::path("rename link to", pin))
}

fn create(program: &mut Program, cgroup: &Cgroup) -> Result<FdLink, ProgramError> {
    let directory = cgroup.directory();
    // Links of several owners stack whatever the mode says, and other modes are refused for links.
    let mode = CgroupAttachMode::Single;
    let link = match program {
        Program::CgroupSockAddr(program) => {
            let id = program.attach(directory, mode)?;
            FdLink::try_from(program.take_link(id)?)
        }
        Program::CgroupSock(program) => {
            let id = program.attach(directory, mode)?;
            FdLink::try_from(program.take_link(id)?)
        }
        _ => return Err(ProgramError::UnexpectedProgramType),
    };
    link.map_err(|_| ProgramError::UnexpectedProgramType)
}
