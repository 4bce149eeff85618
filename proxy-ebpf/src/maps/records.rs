//! What the programs write for a trace: events, and packets on links before and after the programs.
//! Userspace turns it on before it loads the programs; the verifier otherwise removes the code.

use core::ptr;

use aya_ebpf::{
    Global,
    bindings::BPF_RB_NO_WAKEUP,
    btf_maps::{PerCpuArray, RingBuf},
    macros::btf_map,
};
use proxy_common::{
    layout::{CapturedHeaders, CapturedPacket, HEADERS_LENGTH, LostRecord, TraceEvent, captured},
    packet::Frame as _,
};

use super::{EntryPoint, NODE};
use crate::ctx::{self, DROP, Layer, REDIRECT, Skb};

/// The ring buffer of trace events. Like the maps below it is not pinned, because only the process
/// that loads the programs reads it. Userspace sets the size.
#[btf_map(name = "trace_events")]
static TRACE_EVENTS: RingBuf<TraceEvent, 4096> = RingBuf::new();

/// The number of records for which a ring buffer had no room, by [`LostRecord`].
#[btf_map(name = "lost_records")]
static LOST_RECORDS: PerCpuArray<u64, { LostRecord::COUNT }> = PerCpuArray::new();

/// Userspace sets it if packets are captured.
#[unsafe(no_mangle)]
static CAPTURES_PACKETS: Global<u32> = Global::new(0);

/// The packet that a program on this CPU decides about.
#[btf_map(name = "captured_headers")]
static CAPTURED_HEADERS: PerCpuArray<CapturedHeaders, 1> = PerCpuArray::new();

/// The ring buffer of captured packets. Userspace sets the size.
#[btf_map(name = "captured_packets")]
static CAPTURED_PACKETS: RingBuf<CapturedPacket, 4096> = RingBuf::new();

/// Writes an event. Userspace polls, so it is not woken up.
#[inline(always)]
pub fn write_event(event: impl FnOnce() -> TraceEvent) {
    if let Some(mut entry) = TRACE_EVENTS.reserve(0) {
        entry.write(event());
        entry.submit(BPF_RB_NO_WAKEUP.into());
    } else {
        count_lost(LostRecord::Event);
    }
}

#[inline(always)]
fn count_lost(record: LostRecord) {
    if let Some(count) = LOST_RECORDS.get_ptr_mut(record as u32) {
        // SAFETY: the pointer is valid until the program ends, and the slot belongs to this CPU.
        unsafe { *count += 1 };
    }
}

/// Returns true if packets are captured.
#[inline(always)]
pub fn captures_packets() -> bool {
    CAPTURES_PACKETS.load() != 0
}

/// Keeps the headers of a packet as it came to the program.
#[inline(always)]
pub fn begin_capture<L: Layer>(skb: &Skb<L>) {
    if captures_packets() {
        keep_headers(skb.again());
    }
}

#[inline(never)]
fn keep_headers<L: Layer>(skb: Skb<L>) {
    let Some(headers) = CAPTURED_HEADERS.get_ptr_mut(0) else { return };
    // SAFETY: the entry belongs to this CPU, and no other program of a link runs on it meanwhile.
    unsafe {
        (*headers).length = skb.copy_start::<HEADERS_LENGTH>((&raw mut (*headers).before).cast());
    }
}

/// Writes the packet if the program changed, refused or dropped it. `code` is what the program
/// returns.
#[inline(always)]
pub fn end_capture<L: Layer, P: EntryPoint>(skb: &Skb<L>, code: i32) {
    if captures_packets() {
        write::<L, P>(skb.again(), code);
    }
}

#[inline(never)]
fn write<L: Layer, P: EntryPoint>(skb: Skb<L>, code: i32) {
    let outcome = match code {
        DROP => captured::DROPPED,
        REDIRECT => captured::REDIRECTED,
        _ => 0,
    };
    let Some(headers) = CAPTURED_HEADERS.get_ptr_mut(0) else { return };
    // SAFETY: as above.
    let headers = unsafe { &mut *headers };
    skb.copy_start::<HEADERS_LENGTH>((&raw mut headers.after).cast());
    let is_same = headers.before.iter().zip(&headers.after).all(|(before, after)| before == after);
    let changed = if is_same { 0 } else { captured::CHANGED };
    let is_refused = NODE.get(0).is_some_and(|node| skb.mark() & node.reject_mark != 0);
    let refused = if is_refused { captured::REFUSED } else { 0 };
    let happened = outcome | changed | refused;
    if happened == 0 {
        return;
    }
    let Some(mut entry) = CAPTURED_PACKETS.reserve(0) else {
        count_lost(LostRecord::Packet);
        return;
    };
    let record: *mut CapturedPacket = entry.as_mut_ptr();
    // SAFETY: the record is memory of the ring buffer, and userspace reads no more bytes of each
    // array than its length says.
    unsafe {
        ptr::addr_of_mut!((*record).time_ns).write(ctx::now_ns());
        ptr::addr_of_mut!((*record).link).write(skb.link());
        ptr::addr_of_mut!((*record).length).write(skb.length());
        ptr::addr_of_mut!((*record).before_length).write(headers.length);
        ptr::addr_of_mut!((*record).happened).write(happened);
        ptr::addr_of_mut!((*record).program).write(P::PROGRAM as u32);
        ptr::addr_of_mut!((*record).before).write(headers.before);
        let after_length = skb.copy_start(ptr::addr_of_mut!((*record).after));
        ptr::addr_of_mut!((*record).after_length).write(after_length);
    }
    entry.submit(BPF_RB_NO_WAKEUP.into());
}
