//! Attaches programs to a cgroup through pinned links.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use aya::programs::{
    CgroupAttachMode, Program, ProgramError,
    links::{FdLink, LinkInfo},
    loaded_links, loaded_programs,
};

use super::{
    super::{KernelError, cgroup::Cgroup},
    pins::suffixed,
    syscall,
};

/// Attaches a loaded program to a cgroup, through a link that is pinned at `pin`. If a link of this
/// cgroup is pinned there already, its program is replaced. Otherwise a new link is pinned there.
pub(super) fn attach(program: &mut Program, cgroup: &Cgroup, pin: &Path) -> Result<(), KernelError> {
    let fd = program.fd().map_err(KernelError::bpf("find program for", pin.display().to_string()))?;
    if replace_program(fd.as_fd(), cgroup, pin)? { Ok(()) } else { attach_new(program, cgroup, pin) }
}

/// Replaces the program of a link of this cgroup. Returns false if no such link is pinned there.
pub(super) fn replace_program(
    program: BorrowedFd<'_>,
    cgroup: &Cgroup,
    pin: &Path,
) -> Result<bool, KernelError> {
    let Some(link) = live_link(cgroup, pin)? else { return Ok(false) };
    let replaced = syscall::update_link(link.as_fd(), program);
    replaced.map(|()| true).map_err(KernelError::path("replace program of link", pin))
}

/// Returns true if a link is pinned there that is attached to the cgroup. It may have been removed
/// or detached.
pub fn is_attached(cgroup: &Cgroup, pin: &Path) -> Result<bool, KernelError> {
    live_link(cgroup, pin).map(|link| link.is_some())
}

/// The BPF links of the system that were made so far.
#[derive(Clone, Copy, Debug)]
pub struct KnownLinks {
    /// The identifier of the newest one.
    newest: u32,
}

impl KnownLinks {
    /// Returns those that exist. Needs `CAP_SYS_ADMIN`.
    pub fn read() -> Result<Self, KernelError> {
        let newest = links_after(0)?.pop().unwrap_or(0);
        Ok(Self { newest })
    }

    /// Returns true if others made a link since the last call. The names of our programs begin with
    /// `own_programs`. A new link that is gone already may have been anybody's.
    pub fn has_others(&mut self, own_programs: &str) -> Result<bool, KernelError> {
        let new = links_after(self.newest)?;
        let Some(newest) = new.last() else { return Ok(false) };
        self.newest = *newest;
        let own = loaded_programs()
            .flatten()
            .filter(|program| program.name_as_str().is_some_and(|name| name.starts_with(own_programs)));
        let own: BTreeSet<u32> = own.map(|program| program.id()).collect();
        let is_own = |link: &LinkInfo| own.contains(&link.program_id());
        let own_links: BTreeSet<u32> =
            loaded_links().flatten().filter(is_own).map(|link| link.id()).collect();
        Ok(new.iter().any(|link| !own_links.contains(link)))
    }
}

/// Returns the identifiers of the BPF links of the system that follow this one.
fn links_after(known: u32) -> Result<Vec<u32>, KernelError> {
    let mut links = Vec::new();
    let next = |known| syscall::next_link(known).map_err(KernelError::call("list", "BPF links"));
    while let Some(link) = next(links.last().copied().unwrap_or(known))? {
        links.push(link);
    }
    Ok(links)
}

/// Returns the link pinned there if it belongs to the cgroup. A detached link belongs to none, and
/// so does a link whose cgroup is gone.
fn live_link(cgroup: &Cgroup, pin: &Path) -> Result<Option<OwnedFd>, KernelError> {
    let Some(link) = open(pin)? else { return Ok(None) };
    let attached_to = syscall::link_cgroup(link.as_fd()).map_err(KernelError::path("inspect link", pin))?;
    Ok((attached_to == cgroup.id).then_some(link))
}

/// Returns the link pinned there; `None` if there is no such pin.
pub(super) fn open(pin: &Path) -> Result<Option<OwnedFd>, KernelError> {
    match syscall::open_pin(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        link => link.map(Some).map_err(KernelError::path("open link", pin)),
    }
}

fn attach_new(program: &mut Program, cgroup: &Cgroup, pin: &Path) -> Result<(), KernelError> {
    let link = create(program, cgroup)
        .map_err(KernelError::bpf("attach program to cgroup for", pin.display().to_string()))?;
    pin_over(pin, |new_pin| {
        link.pin(new_pin).map(drop).map_err(KernelError::bpf("pin link", new_pin.display().to_string()))
    })
}

/// Replaces a pin. `pin_at` pins the new link at another path, which is then renamed to `pin`. The
/// old link ends with its last pin.
pub(super) fn pin_over(
    pin: &Path,
    pin_at: impl FnOnce(&Path) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let new_pin = suffixed(pin, "-new");
    remove_pin(&new_pin)?;
    pin_at(&new_pin)?;
    fs::rename(&new_pin, pin).map_err(KernelError::path("rename link to", pin))
}

/// Detaches a link at once. Removing its pin would detach it only some time later.
pub(super) fn detach_now(link: &OwnedFd, pin: &Path) {
    if let Err(error) = syscall::detach_link(link.as_fd()) {
        tracing::debug!(%error, pin = %pin.display(), "cannot detach the link: it is detached already");
    }
}

/// Removes a pin. One that does not exist is no error.
pub(super) fn remove_pin(pin: &Path) -> Result<(), KernelError> {
    match fs::remove_file(pin) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(KernelError::path("remove", pin)(error)),
        _ => Ok(()),
    }
}

fn create(program: &mut Program, cgroup: &Cgroup) -> Result<FdLink, ProgramError> {
    let directory = &cgroup.directory;
    // Links of several owners stack in any mode, and the kernel refuses other modes for links.
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

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    /// `r0 = XDP_PASS; exit`.
    const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];

    #[test]
    fn only_bpf_links_of_others_are_new() {
        // An own network namespace, so that the program sees no packet of others.
        let run = std::thread::spawn(attach_and_look);
        run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    fn attach_and_look() {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace, as root");
        let mut before = KnownLinks::read().expect("as root");
        let program = syscall::load_xdp(&PASS).expect("the verifier accepts it");
        let loopback = nix::net::if_::if_nametoindex("lo").expect("every namespace has it");
        let generic = 1 << 1;
        let link = syscall::create_xdp_link(program.as_fd(), loopback, generic).expect("attached");
        let mut same = before;
        assert!(before.has_others("shunt_").expect("as root"), "it has no name");
        // Every name begins so.
        assert!(!same.has_others("").expect("as root"));
        drop(link);
    }
}
