//! Commands of bpf(2) for programs.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::{
    BPF_OBJ_GET_INFO_BY_FD, BPF_XDP, InfoByFd, bpf, bpf_object, bpf_with_output, number, object_name,
};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_TEST_RUN: libc::c_int = 10;
const BPF_BTF_LOAD: libc::c_int = 18;
const BPF_PROG_TYPE_XDP: u32 = 6;
/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;
/// The bytes of `struct bpf_prog_info` before `run_time_ns`. The zeros ask for no lists.
const PROGRAM_INFO_HEAD: usize = 192;

/// The head of the attribute, as above.
#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log: [u32; 4],
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct TypesLoad {
    btf: u64,
    log: u64,
    btf_size: u32,
    log_size: u32,
    log_level: u32,
    padding: u32,
}

/// Where a function of a program begins (`struct bpf_func_info`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::bpf) struct FunctionStart {
    /// The number of its first instruction.
    pub(in crate::kernel::bpf) instruction: u32,
    /// The identifier of its type.
    pub(in crate::kernel::bpf) function: u32,
}

/// The functions of a program.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::bpf) struct Functions<'a> {
    /// Their types, as [`load_types`] returns them.
    pub(in crate::kernel::bpf) types: BorrowedFd<'a>,
    /// Where each begins, in ascending order.
    pub(in crate::kernel::bpf) starts: &'a [FunctionStart],
}

/// The beginning of `struct bpf_prog_info`.
#[repr(C)]
struct ProgramIdentity {
    _prog_type: u32,
    id: u32,
}

/// The beginning of `struct bpf_prog_info`.
#[repr(C, align(8))]
struct ProgramInfo {
    head: [u8; PROGRAM_INFO_HEAD],
    run_time_ns: u64,
    runs: u64,
}

#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

/// Loads an XDP program of these instructions.
pub(in crate::kernel::bpf) fn load_xdp(instructions: &[u64]) -> io::Result<OwnedFd> {
    bpf_object(BPF_PROG_LOAD, xdp_load(instructions)?)
}

/// Returns the attribute that loads an XDP program of these instructions.
fn xdp_load(instructions: &[u64]) -> io::Result<ProgramLoad> {
    Ok(ProgramLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        // As with the programs that it may call.
        expected_attach_type: BPF_XDP,
        ..ProgramLoad::default()
    })
}

/// Loads an XDP program of several functions, with flags.
pub(in crate::kernel::bpf) fn load_xdp_functions(
    name: &str,
    instructions: &[u64],
    functions: Functions<'_>,
    prog_flags: u32,
) -> io::Result<OwnedFd> {
    let starts = functions.starts;
    let attribute = ProgramLoad {
        prog_flags,
        prog_name: object_name(name),
        prog_btf_fd: number(functions.types),
        func_info_rec_size: u32::try_from(size_of::<FunctionStart>()).map_err(io::Error::other)?,
        func_info: starts.as_ptr() as u64,
        func_info_cnt: u32::try_from(starts.len()).map_err(io::Error::other)?,
        ..xdp_load(instructions)?
    };
    bpf_object(BPF_PROG_LOAD, attribute)
}

/// Loads types in the format BTF. Kernel 4.18 (f56a653c1fd1).
pub(in crate::kernel::bpf) fn load_types(btf: &[u8]) -> io::Result<OwnedFd> {
    let btf_size = u32::try_from(btf.len()).map_err(io::Error::other)?;
    bpf_object(BPF_BTF_LOAD, TypesLoad { btf: btf.as_ptr() as u64, btf_size, ..TypesLoad::default() })
}

/// Returns the id of a program. Kernel 4.13 (1e2709769086).
pub(in crate::kernel::bpf) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramIdentity { _prog_type: 0, id: 0 };
    let info_len = u32::try_from(size_of::<ProgramIdentity>()).map_err(io::Error::other)?;
    let attribute = InfoByFd { bpf_fd: number(program), info_len, info: (&raw mut info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, attribute)?;
    Ok(info.id)
}

/// Returns the time of all runs of a program in nanoseconds, and their number. Both grow only while
/// statistics are enabled. Kernel 5.1 (492ecee892c2).
pub(in crate::kernel::bpf) fn program_runs(program: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut info = ProgramInfo { head: [0; PROGRAM_INFO_HEAD], run_time_ns: 0, runs: 0 };
    let info_len = u32::try_from(size_of::<ProgramInfo>()).map_err(io::Error::other)?;
    let attribute = InfoByFd { bpf_fd: number(program), info_len, info: (&raw mut info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, attribute)?;
    Ok((info.run_time_ns, info.runs))
}

/// The bytes by which a program may make a frame longer: the headers of an ICMP error.
const LARGEST_INSERTION: usize = 48;

/// Runs a program over a frame and its context, and overwrites both with the result. Returns what
/// the program returned. The frame may grow by [`LARGEST_INSERTION`]. An empty context is that of
/// the kernel.
pub(in crate::kernel::bpf) fn test_run(
    program: BorrowedFd<'_>,
    frame: &mut Vec<u8>,
    context: &mut [u8],
    flags: u32,
) -> io::Result<u32> {
    let length = frame.len();
    frame.resize(length + LARGEST_INSERTION, 0);
    let [frame_size, room, context_size] = [length, frame.len(), context.len()].map(u32::try_from);
    let context_size = context_size.map_err(io::Error::other)?;
    let mut attribute = TestRun {
        prog_fd: number(program),
        data_size_in: frame_size.map_err(io::Error::other)?,
        data_size_out: room.map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        data_out: frame.as_mut_ptr() as u64,
        repeat: 1,
        ctx_size_in: context_size,
        ctx_size_out: context_size,
        ctx_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        ctx_out: if context.is_empty() { 0 } else { context.as_mut_ptr() as u64 },
        flags,
        ..TestRun::default()
    };
    let result = bpf_with_output(BPF_PROG_TEST_RUN, &mut attribute);
    frame.truncate(if result.is_ok() { attribute.data_size_out as usize } else { length });
    result?;
    Ok(attribute.retval)
}

/// Runs an XDP program over copies of a frame. What it passes goes into the stack, as if it came in
/// on the link of the context. Kernel 5.18 (b530e9e1063e).
pub(in crate::kernel::bpf) fn test_run_live(
    program: BorrowedFd<'_>,
    frame: &[u8],
    context: &[u8],
    repeat: u32,
) -> io::Result<()> {
    let [frame_size, context_size] = [frame.len(), context.len()].map(u32::try_from);
    let mut attribute = TestRun {
        prog_fd: number(program),
        data_size_in: frame_size.map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        repeat,
        ctx_size_in: context_size.map_err(io::Error::other)?,
        ctx_in: context.as_ptr() as u64,
        flags: LIVE_FRAMES,
        ..TestRun::default()
    };
    bpf_with_output(BPF_PROG_TEST_RUN, &mut attribute).map(drop)
}
