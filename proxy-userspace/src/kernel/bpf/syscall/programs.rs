//! Commands of bpf(2) for programs.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::{BPF_OBJ_GET_INFO_BY_FD, BPF_XDP, InfoByFd, bpf, bpf_object, bpf_with_output, number};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_TEST_RUN: libc::c_int = 10;
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
    let count = u32::try_from(instructions.len()).map_err(io::Error::other)?;
    let attribute = ProgramLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: count,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        // As with the programs that it may call.
        expected_attach_type: BPF_XDP,
        ..ProgramLoad::default()
    };
    bpf_object(BPF_PROG_LOAD, attribute)
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

/// Runs a program over a frame and its context, and overwrites both with the result. Returns what
/// the program returned. The frame may not grow. An empty context is that of the kernel.
pub(in crate::kernel::bpf) fn test_run(
    program: BorrowedFd<'_>,
    frame: &mut Vec<u8>,
    context: &mut [u8],
    flags: u32,
) -> io::Result<u32> {
    let [frame_size, context_size] = [frame.len(), context.len()].map(u32::try_from);
    let [frame_size, context_size] =
        [frame_size.map_err(io::Error::other)?, context_size.map_err(io::Error::other)?];
    let mut attribute = TestRun {
        prog_fd: number(program),
        data_size_in: frame_size,
        data_size_out: frame_size,
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
    bpf_with_output(BPF_PROG_TEST_RUN, &mut attribute)?;
    frame.truncate(attribute.data_size_out as usize);
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
