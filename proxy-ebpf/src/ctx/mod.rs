//! Safe views of the contexts the kernel hands to programs; the only other place with `unsafe` is `maps`.
#![expect(unsafe_code, reason = "contexts are raw pointers whose accesses only the verifier checks")]

mod sock_addr;
mod socket;

use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns, bpf_set_retval};
pub use sock_addr::{Family, SockAddr, V4, V6};
pub use socket::Socket;

/// 32 random bits.
#[inline(always)]
pub fn random() -> u32 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}

/// Nanoseconds of the monotonic clock.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// Makes the caller of a hooked system call see this error when the program denies it. Needs a kernel with
/// `bpf_set_retval`, 5.18 (b44123b4a3dc).
#[inline(always)]
pub fn set_errno(errno: i32) {
    // SAFETY: the helper takes a number; one it does not accept changes nothing.
    unsafe { bpf_set_retval(-errno) };
}
