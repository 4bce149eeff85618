//! The limit on locked memory, which older kernels charge maps and programs to.

use std::mem::zeroed;

/// Takes the limit away. Kernels from 5.11 on do not charge it (97306be45fbe).
pub(super) fn lift_limit() {
    // SAFETY: a plain structure of two integers.
    let mut limit: libc::rlimit = unsafe { zeroed() };
    limit.rlim_cur = libc::RLIM_INFINITY;
    limit.rlim_max = libc::RLIM_INFINITY;
    // SAFETY: the kernel only reads the structure. Failing is fine: map creation then says what it lacks.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
}
