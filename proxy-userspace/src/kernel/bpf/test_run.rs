//! Runs a link program or an XDP program over a frame (`BPF_PROG_TEST_RUN`).

use std::{io, os::fd::BorrowedFd};

use super::syscall;

/// A frame with fields of its `__sk_buff`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestFrame {
    /// The frame, starting with its Ethernet header. It has at least 15 bytes.
    pub bytes: Vec<u8>,
    /// Its mark.
    pub mark: u32,
    /// The index of the link that it passes; 0 is lo. Kernel 5.9 (21594c44083c).
    pub ifindex: u32,
    /// Size in bytes and number of the GSO segments; zeros for a frame without GSO. Kernel 5.7
    /// (cf62089b0edd).
    pub segments: (u32, u32),
    /// The hardware of the link computed a checksum (`CHECKSUM_COMPLETE`). The kernel checks that
    /// the program keeps it correct. Older kernels return EINVAL.
    pub has_sum: bool,
}

/// Larger than `struct __sk_buff` of any kernel. Kernels accept zeros after the fields that they
/// know.
const CONTEXT_SIZE: usize = 256;
/// The offsets of the fields.
const MARK: usize = 8;
const IFINDEX: usize = 40;
const GSO_SEGS: usize = 164;
const GSO_SIZE: usize = 176;
/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// Runs a program over a frame, which it may change. Returns what the program returned. The error
/// EBADMSG means that the hardware's checksum is wrong afterwards.
pub fn test_run(program: BorrowedFd<'_>, frame: &mut TestFrame) -> io::Result<i32> {
    let mut context = [0; CONTEXT_SIZE];
    let (size, number) = frame.segments;
    for (offset, value) in
        [(MARK, frame.mark), (IFINDEX, frame.ifindex), (GSO_SEGS, number), (GSO_SIZE, size)]
    {
        context[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let flags = if frame.has_sum { CHECKSUM_COMPLETE } else { 0 };
    let code = syscall::test_run(program, &mut frame.bytes, &mut context, flags)?;
    let [a, b, c, d] = [0, 1, 2, 3].map(|byte| context[MARK + byte]);
    frame.mark = u32::from_ne_bytes([a, b, c, d]);
    Ok(code.cast_signed())
}

/// Runs an XDP program over a frame that came in on lo, which it may change. Returns what the
/// program returned.
pub fn test_run_xdp(program: BorrowedFd<'_>, frame: &mut Vec<u8>) -> io::Result<u32> {
    syscall::test_run(program, frame, &mut [], 0)
}
