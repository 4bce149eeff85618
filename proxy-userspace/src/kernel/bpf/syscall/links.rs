//! Commands of bpf(2) for BPF links, of cgroups and of network links.

use std::{
    io,
    mem::zeroed,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::{BPF_OBJ_GET_INFO_BY_FD, BPF_XDP, InfoByFd, bpf, bpf_object, bpf_with_output, number};

const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
const BPF_LINK_DETACH: libc::c_int = 34;
/// Attach before all other programs.
const BPF_F_BEFORE: u32 = 1 << 3;
const BPF_LINK_TYPE_TCX: u32 = 11;
const BPF_LINK_TYPE_XDP: u32 = 6;
/// The maximal number of programs on a hook of a link (`BPF_MPROG_MAX`).
const MAX_ON_A_HOOK: usize = 64;

#[repr(C)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative_fd: u32,
    padding: u32,
    expected_revision: u64,
}

#[repr(C)]
struct NextId {
    start: u32,
    next: u32,
    open_flags: u32,
}

#[repr(C)]
struct LinkDetach {
    link_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct ProgQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    padding: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The head of `struct bpf_link_info`. The body depends on the type of the link.
#[repr(C)]
struct LinkInfo {
    link_type: u32,
    id: u32,
    prog_id: u32,
    padding: u32,
    body: [u8; 48],
}

fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    // SAFETY: a plain structure of integers.
    let mut info: LinkInfo = unsafe { zeroed() };
    let info_len = u32::try_from(size_of::<LinkInfo>()).map_err(io::Error::other)?;
    bpf(BPF_OBJ_GET_INFO_BY_FD, InfoByFd { bpf_fd: number(link), info_len, info: (&raw mut info) as u64 })?;
    Ok(info)
}

/// Returns the id of the cgroup that a link is attached to; 0 if it is detached or the cgroup is
/// gone. Kernel 5.8 (f2e10bff16a0).
pub(in crate::kernel::bpf) fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<u64> {
    link_info(link).map(|info| u64::from_ne_bytes(first(&info.body)))
}

/// The information about a link of type TCX.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::bpf) struct TcxLink {
    /// The id of the link.
    pub(in crate::kernel::bpf) id: u32,
    /// The id of its program.
    pub(in crate::kernel::bpf) program: u32,
    /// The index of its network link; 0 if that is gone.
    pub(in crate::kernel::bpf) ifindex: u32,
    /// The hook of the network link.
    pub(in crate::kernel::bpf) attach_type: u32,
}

/// Returns the information about a link; `None` if it is not of type TCX. Kernel 6.6
/// (e420bed02507).
pub(in crate::kernel::bpf) fn tcx_link(link: BorrowedFd<'_>) -> io::Result<Option<TcxLink>> {
    let info = link_info(link)?;
    let tcx = TcxLink {
        id: info.id,
        program: info.prog_id,
        ifindex: u32::from_ne_bytes(first(&info.body)),
        attach_type: u32::from_ne_bytes(first(&info.body[4..])),
    };
    Ok((info.link_type == BPF_LINK_TYPE_TCX).then_some(tcx))
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk().copied().unwrap_or([0; N])
}

/// Attaches a program to a hook of a network link, before all others. Kernel 6.6 (e420bed02507).
pub(in crate::kernel::bpf) fn create_tcx_link(
    program: BorrowedFd<'_>,
    target_ifindex: u32,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        prog_fd: number(program),
        target_ifindex,
        attach_type,
        flags: BPF_F_BEFORE,
        ..LinkCreate::default()
    };
    create_link(attribute)
}

/// The information about a link of type XDP.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::bpf) struct XdpLink {
    /// The id of its program.
    pub(in crate::kernel::bpf) program: u32,
    /// The index of its network link; 0 if that is gone.
    pub(in crate::kernel::bpf) ifindex: u32,
}

/// Returns the information about a link; `None` if it is not of type XDP. Kernel 5.9
/// (c1931c9784eb).
pub(in crate::kernel::bpf) fn xdp_link(link: BorrowedFd<'_>) -> io::Result<Option<XdpLink>> {
    let info = link_info(link)?;
    let xdp = XdpLink { program: info.prog_id, ifindex: u32::from_ne_bytes(first(&info.body)) };
    Ok((info.link_type == BPF_LINK_TYPE_XDP).then_some(xdp))
}

/// Attaches a program to the XDP hook of a network link, which has no other. Kernel 5.9
/// (aa8d3a716b59).
pub(in crate::kernel::bpf) fn create_xdp_link(
    program: BorrowedFd<'_>,
    target_ifindex: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        prog_fd: number(program),
        target_ifindex,
        attach_type: BPF_XDP,
        flags,
        ..LinkCreate::default()
    };
    create_link(attribute)
}

/// Attaches an extension program to a function of another program, in whose place it runs then.
/// `function` is the type of the function there. The program may be attached elsewhere, too. Kernel
/// 5.10 (4a1e7c0c63e0).
pub(in crate::kernel::bpf) fn create_extension_link(
    program: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    function: u32,
) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        prog_fd: number(program),
        // The kernel calls these fields `target_fd` and `target_btf_id` here.
        target_ifindex: number(target),
        relative_fd: function,
        ..LinkCreate::default()
    };
    create_link(attribute)
}

fn create_link(attribute: LinkCreate) -> io::Result<OwnedFd> {
    bpf_object(BPF_LINK_CREATE, attribute)
}

/// Returns the identifier of the BPF link of the system that follows this identifier; `None` after
/// the last one. Needs `CAP_SYS_ADMIN`. Kernel 5.8 (2d602c8cf40d).
pub(in crate::kernel::bpf) fn next_link(after: u32) -> io::Result<Option<u32>> {
    let mut attribute = NextId { start: after, next: 0, open_flags: 0 };
    match bpf_with_output(BPF_LINK_GET_NEXT_ID, &mut attribute) {
        Ok(_) => Ok(Some(attribute.next)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A program on a hook of a network link.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::bpf) struct TcxProgram {
    /// The id of the program.
    pub(in crate::kernel::bpf) program: u32,
    /// The id of its BPF link; 0 if it is attached without one.
    pub(in crate::kernel::bpf) link: u32,
}

/// Returns the programs on a hook of a network link in this network namespace, in the order in
/// which they run. Kernel 6.6 (e420bed02507); older kernels return EINVAL.
pub(in crate::kernel::bpf) fn tcx_programs(
    target_ifindex: u32,
    attach_type: u32,
) -> io::Result<Vec<TcxProgram>> {
    let mut links = [0u32; MAX_ON_A_HOOK];
    let mut programs = [0u32; MAX_ON_A_HOOK];
    let mut attribute = ProgQuery {
        target_ifindex,
        attach_type,
        prog_ids: programs.as_mut_ptr() as u64,
        count: u32::try_from(MAX_ON_A_HOOK).map_err(io::Error::other)?,
        link_ids: links.as_mut_ptr() as u64,
        ..ProgQuery::default()
    };
    bpf_with_output(BPF_PROG_QUERY, &mut attribute)?;
    let found = programs.into_iter().zip(links).take(attribute.count as usize);
    Ok(found.map(|(program, link)| TcxProgram { program, link }).collect())
}

/// Detaches a link at once. Removing its pin would detach it only some time later. Kernel 5.9
/// (73b11c2ab072).
pub(in crate::kernel::bpf) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, LinkDetach { link_fd: number(link) }).map(drop)
}

/// Replaces the program of a link without a gap. Kernel 5.7 (0c991ebc8c69).
pub(in crate::kernel::bpf) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(
        BPF_LINK_UPDATE,
        LinkUpdate { link_fd: number(link), new_prog_fd: number(program), flags: 0, old_prog_fd: 0 },
    )
    .map(drop)
}
