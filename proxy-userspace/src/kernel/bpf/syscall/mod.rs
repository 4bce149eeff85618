//! Calls bpf(2) for commands that the BPF library does not offer in this form: for BPF links of
//! cgroups and network links, for batches of map entries, and for programs that are made at run
//! time.

mod links;
mod maps;
mod programs;

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

pub(super) use self::{
    links::{
        create_extension_link, create_tcx_link, create_xdp_link, detach_link, link_cgroup, next_link,
        tcx_link, tcx_programs, update_link, xdp_link,
    },
    maps::{create_array, create_constants, create_program_array, lookup_batch, lookup_first, update_batch},
    programs::{
        FunctionStart, Functions, load_types, load_xdp, load_xdp_functions, program_id, program_runs,
        test_run, test_run_live,
    },
};

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_XDP: u32 = 37;
/// The size of the buffer for attributes, larger than any of them. The kernel wants zeros in the
/// rest.
const ATTR_SIZE: usize = 96;

#[repr(C)]
struct Obj {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Calls bpf(2).
fn bpf<A>(command: libc::c_int, mut attribute: A) -> io::Result<RawFd> {
    bpf_with_output(command, &mut attribute)
}

/// Calls bpf(2) for a command that opens or creates an object.
fn bpf_object<A>(command: libc::c_int, attribute: A) -> io::Result<OwnedFd> {
    let fd = bpf(command, attribute)?;
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls bpf(2) for a command that writes to its attribute.
fn bpf_with_output<A>(command: libc::c_int, attribute: &mut A) -> io::Result<RawFd> {
    const { assert!(size_of::<A>() <= ATTR_SIZE, "the attribute fits") };
    let mut buffer = [0u64; ATTR_SIZE / 8];
    // SAFETY: `buffer` is at least as large as `A`, and aligned to 8, which is the largest
    // alignment of a field here.
    unsafe { buffer.as_mut_ptr().cast::<A>().copy_from_nonoverlapping(attribute, 1) };
    // SAFETY: the kernel reads ATTR_SIZE bytes. The callers vouch for pointers in the attribute.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, buffer.as_mut_ptr(), ATTR_SIZE) };
    // SAFETY: as above. The attributes consist of integers, for which every bit pattern is valid.
    unsafe { buffer.as_ptr().cast::<A>().copy_to_nonoverlapping(attribute, 1) };
    RawFd::try_from(result).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Opens the object that is pinned at a path.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf_object(BPF_OBJ_GET, Obj { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 })
}

/// Pins an object at a path.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf(BPF_OBJ_PIN, Obj { pathname: path.as_ptr() as u64, bpf_fd: number(object), file_flags: 0 }).map(drop)
}

/// Waits for an RCU grace period: then no CPU runs a program of a link that was replaced before.
/// Kernels with CPUs without ticks (`nohz_full`) return EINVAL. Kernel 4.3 (5b25b13ab08f).
pub(super) fn wait_for_runs() -> io::Result<()> {
    /// `MEMBARRIER_CMD_GLOBAL`.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call has no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns a name as the kernel keeps it: 15 bytes at most, and a zero.
fn object_name(name: &str) -> [u8; 16] {
    let mut kept = [0; 16];
    kept.iter_mut().take(15).zip(name.bytes()).for_each(|(to, from)| *to = from);
    kept
}
