//! Attaches programs through TCX (kernel 6.6, e420bed02507): programs of several owners are
//! ordered, and each is in a BPF link that can be pinned.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use nix::net::if_::if_nametoindex;

use super::{
    super::{super::KernelError, link, syscall},
    AttachOutcome, Attached, Hook, LinkProgram, link_gone_or,
};

/// The index of lo in every network namespace.
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

/// Queries the programs on loopback, which kernels without TCX refuse with EINVAL.
pub fn probe() -> io::Result<()> {
    syscall::tcx_programs(LOOPBACK, Hook::Ingress.attach_type()).map(drop)
}

/// Returns true if the kernel has TCX.
pub fn is_supported() -> bool {
    match probe() {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, "the kernel has no TCX: programs on links are attached as filters of a clsact qdisc");
            false
        }
    }
}

/// Attaches a program to a link, through a BPF link that is pinned at `pin`. It comes before all
/// programs of other owners, so that it runs whatever they return. If a BPF link of this network
/// link is pinned there already and is the first, its program is replaced. The index may be that of
/// another network link by now.
///
/// If the pinned BPF link is behind others, a new one replaces it without a gap. A hook takes each
/// program only once. So `choose` gets the id of the program that it must not return then.
pub fn attach<'a>(
    choose: impl FnOnce(Option<u32>) -> Result<LinkProgram<'a>, KernelError>,
    index: u32,
    hook: Hook,
    pin: &Path,
) -> Result<AttachOutcome, KernelError> {
    let present = live_link(index, hook, pin)?;
    let behind = present.as_ref().filter(|present| present.behind.is_some());
    let program = choose(behind.map(|present| present.program))?;
    if let Some(LiveLink { link, behind: None, .. }) = &present {
        return match syscall::update_link(link.as_fd(), program.fd) {
            Ok(()) => Ok(AttachOutcome::Attached),
            Err(error) => link_gone_or(error, KernelError::path("replace program of link", pin)),
        };
    }
    let link = match syscall::create_tcx_link(program.fd, index, hook.attach_type()) {
        Ok(link) => link,
        Err(error) => {
            return link_gone_or(error, KernelError::path("attach program through TCX for", pin));
        }
    };
    link::pin_over(pin, |new_pin| {
        syscall::pin(link.as_fd(), new_pin).map_err(KernelError::path("pin link", new_pin))
    })?;
    if let Some(LiveLink { link, .. }) = present {
        link::detach_now(&link, pin);
    }
    Ok(AttachOutcome::Attached)
}

/// Returns what the BPF link at `pin` runs on a link. Returns `None` if it runs on another link, on
/// no link, or in another network namespace.
pub fn attached(index: u32, hook: Hook, pin: &Path) -> Result<Option<Attached>, KernelError> {
    let attached = |LiveLink { program, behind, .. }| Attached { program, behind: behind.map(program_name) };
    Ok(live_link(index, hook, pin)?.map(attached))
}

/// A BPF link that runs a program on a network link.
struct LiveLink {
    link: OwnedFd,
    program: u32,
    /// The id of the first program of the hook, if that is another.
    behind: Option<u32>,
}

fn live_link(index: u32, hook: Hook, pin: &Path) -> Result<Option<LiveLink>, KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(None) };
    let info = syscall::tcx_link(link.as_fd()).map_err(KernelError::path("inspect link", pin))?;
    let Some(info) = info.filter(|info| info.ifindex == index && info.attach_type == hook.attach_type())
    else {
        return Ok(None);
    };
    let here = match syscall::tcx_programs(index, hook.attach_type()) {
        Ok(here) => here,
        // The link is in another namespace, or it has just been deleted.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
        Err(error) => return Err(KernelError::path("find link", pin)(error)),
    };
    if here.iter().all(|program| program.link != info.id) {
        return Ok(None);
    }
    let behind = here.first().filter(|first| first.link != info.id).map(|first| first.program);
    Ok(Some(LiveLink { link, program: info.program, behind }))
}

/// Returns the name of a program, and its id.
fn program_name(id: u32) -> String {
    let found = loaded_programs().flatten().find(|program| program.id() == id);
    let name = found.as_ref().and_then(ProgramInfo::name_as_str).unwrap_or("unknown");
    format!("{name} (id {id})")
}

/// Returns the names of the programs on a hook of a link, in the order in which they run. Kernel
/// 6.6. A link that is gone has none.
pub fn names(link: &str, hook: Hook) -> Result<Vec<String>, KernelError> {
    let kind = match hook {
        Hook::Ingress => TcAttachType::Ingress,
        Hook::Egress => TcAttachType::Egress,
    };
    match SchedClassifier::query_tcx(link, kind) {
        Ok((_, programs)) => {
            let name = |program: &ProgramInfo| String::from_utf8_lossy(program.name()).into_owned();
            Ok(programs.iter().map(name).collect())
        }
        Err(_) if if_nametoindex(link).is_err() => Ok(Vec::new()),
        Err(error) => Err(KernelError::bpf("list TCX programs of", link)(error)),
    }
}

/// Detaches the BPF link at `pin` and removes the pin. A pin that does not exist is no error.
pub fn detach(pin: &Path) -> Result<(), KernelError> {
    let Some(link) = link::open(pin)? else { return Ok(()) };
    // A link of another type under our name, for example of a cgroup, is not detached. The pin is
    // removed anyway.
    if syscall::tcx_link(link.as_fd()).is_ok_and(|info| info.is_some()) {
        link::detach_now(&link, pin);
    }
    link::remove_pin(pin)
}
