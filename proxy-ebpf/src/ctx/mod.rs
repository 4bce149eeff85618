//! Safe views of the contexts the kernel hands to programs; the only other place with `unsafe` is `maps`.
#![expect(unsafe_code, reason = "contexts are raw pointers whose accesses only the verifier checks")]

mod skb;
mod sock_addr;
mod socket;

use aya_ebpf::helpers::generated::{
    bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_smp_processor_id, bpf_ktime_get_coarse_ns,
    bpf_ktime_get_ns, bpf_set_retval,
};
pub use skb::{Ethernet, Ip, Layer, Skb};
pub use sock_addr::{Family, SockAddr, V4, V6};
pub use socket::Socket;

/// 32 random bits.
#[inline(always)]
pub fn random() -> u32 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}

/// The number of the CPU that runs the program.
#[inline(always)]
pub fn cpu() -> u32 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_get_smp_processor_id() }
}

/// Nanoseconds of the monotonic clock.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// The same as of the kernel's last tick, without asking the hardware: some milliseconds old at most. Kernel 5.11 (d05512618056).
#[inline(always)]
pub fn coarse_now_ns() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Identifies the initial network namespace as long as the kernel runs. Kernel 5.7 (f318903c0bf4).
#[inline(always)]
pub fn initial_netns() -> u64 {
    // SAFETY: without a context the helper answers for the initial namespace.
    unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) }
}

/// Makes the caller of a hooked system call see this error when the program denies it. Kernel 6.1 (bed89185af0d).
#[inline(always)]
pub fn set_errno(errno: i32) {
    // SAFETY: the helper takes a number; one it does not accept changes nothing.
    unsafe { bpf_set_retval(-errno) };
}
