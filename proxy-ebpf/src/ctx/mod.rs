//! Safe views of the contexts of programs. Besides this module, only `maps` has unsafe code.
#![expect(unsafe_code, reason = "contexts are raw pointers, and only the verifier checks their accesses")]

mod fib;
mod linear;
mod sk_lookup;
mod skb;
mod sock_addr;
mod socket;
mod tunnel;
mod xdp;

use aya_ebpf::helpers::generated::{
    bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_smp_processor_id, bpf_ktime_get_coarse_ns,
    bpf_ktime_get_ns, bpf_set_retval,
};
pub use skb::{DROP, Ethernet, Ip, Layer, NEXT, REDIRECT, Skb, Tunnel};
pub use sock_addr::{Family, SockAddr, V4, V6};
pub use socket::Socket;
pub use xdp::Xdp;

/// Returns 32 random bits.
#[inline(always)]
pub fn random() -> u32 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}

/// Returns the number of the CPU that runs the program.
#[inline(always)]
pub fn cpu() -> u32 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_get_smp_processor_id() }
}

/// Returns the nanoseconds of the monotonic clock.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// Returns the time of the kernel's last tick without reading the hardware clock. It is some
/// milliseconds old at most. Minimum kernel: 5.11 (d05512618056).
#[inline(always)]
pub fn coarse_now_ns() -> u64 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Returns the cookie of the initial network namespace. Minimum kernel: 5.7 (f318903c0bf4).
#[inline(always)]
pub fn initial_netns() -> u64 {
    // SAFETY: without a context the helper returns the cookie of the initial network namespace.
    unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) }
}

/// Reads four words, each with its own access, because the verifier requires fixed offsets.
///
/// # Safety
///
/// The pointer is valid, and programs may read all four words.
#[inline(always)]
unsafe fn read_words(words: *const [u32; 4]) -> [u32; 4] {
    // SAFETY: the caller guarantees it.
    unsafe {
        [
            (&raw const (*words)[0]).read_volatile(),
            (&raw const (*words)[1]).read_volatile(),
            (&raw const (*words)[2]).read_volatile(),
            (&raw const (*words)[3]).read_volatile(),
        ]
    }
}

/// Sets the error of the system call, if the program denies it. Minimum kernel: 6.1 (bed89185af0d).
#[inline(always)]
pub fn set_errno(errno: i32) {
    // SAFETY: the helper takes a number. An invalid one changes nothing.
    unsafe { bpf_set_retval(-errno) };
}
