//! Lifts the limit on locked memory, to which older kernels charge maps and programs.

use std::mem::zeroed;

/// Removes the limit. Kernels since 5.11 do not charge it (97306be45fbe).
pub(super) fn lift_limit() {
    // SAFETY: a plain structure of two integers.
    let mut limit: libc::rlimit = unsafe { zeroed() };
    limit.rlim_cur = libc::RLIM_INFINITY;
    limit.rlim_max = libc::RLIM_INFINITY;
    // SAFETY: the kernel only reads the structure. A failure is reported by the creation of maps.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
}
