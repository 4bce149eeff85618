//! Running a program of a link over a frame that no link ever carried (`BPF_PROG_TEST_RUN`): for tests.

use std::{io, os::fd::BorrowedFd};

use super::syscall;

/// A frame, and what its `__sk_buff` says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestFrame {
    /// The frame from its Ethernet header on, of at least 15 bytes.
    pub bytes: Vec<u8>,
    /// Its mark.
    pub mark: u32,
    /// The link it passes; 0 is lo. Kernel 5.9 (21594c44083c).
    pub ifindex: u32,
    /// Bytes and number of the segments it is to be cut into; zeros of a frame that is none. Kernel 5.7 (cf62089b0edd).
    pub segments: (u32, u32),
    /// The link's hardware took a checksum of it; the kernel then checks that it is still right. Younger kernels alone
    /// have this and others answer EINVAL.
    pub has_sum: bool,
}

/// More than any kernel's `struct __sk_buff`; zeros that it does not know are fine.
const CONTEXT_SIZE: usize = 256;
/// Where the fields are in it.
const MARK: usize = 8;
const IFINDEX: usize = 40;
const GSO_SEGS: usize = 164;
const GSO_SIZE: usize = 176;
/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// Runs a program over a frame: changes the frame, and says what the program returned. EBADMSG says that the hardware's sum
/// is off.
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
