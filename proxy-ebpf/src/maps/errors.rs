//! Limits the ICMP errors about datagrams that the programs refuse.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};

/// The errors that a CPU may send in a second. The kernel sends as many of its own on all CPUs
/// together (`net.ipv4.icmp_msgs_per_sec`).
const LIMIT: u32 = 1_000;
const SECOND_NS: u64 = 1_000_000_000;

/// The errors of a second.
#[repr(C)]
#[derive(Clone, Copy)]
struct SentErrors {
    /// When it began, on the monotonic clock in nanoseconds.
    since_ns: u64,
    /// The errors since then.
    count: u32,
    zero: u32,
}

/// The errors of each CPU. Like the maps for traces it is not pinned, because nothing else reads
/// it.
#[btf_map(name = "sent_errors")]
static SENT_ERRORS: PerCpuArray<SentErrors, 1> = PerCpuArray::new();

/// Returns true if this CPU may send one more, and counts it.
#[inline(never)]
pub fn may_send_error(now_ns: u64) -> bool {
    let Some(errors) = SENT_ERRORS.get_ptr_mut(0) else { return false };
    // SAFETY: the entry belongs to this CPU, and no other program of a link runs on it meanwhile.
    let errors = unsafe { &mut *errors };
    if now_ns.wrapping_sub(errors.since_ns) >= SECOND_NS {
        errors.since_ns = now_ns;
        errors.count = 0;
    }
    let may_send = errors.count < LIMIT;
    errors.count += u32::from(may_send);
    may_send
}
