//! What the programs of the benchmark remember: an entry for each direction of a flow that they
//! translate, with room for what a flow of IPv4 needs.
#![expect(unsafe_code, reason = "only the verifier checks the pointers to map values")]

use aya_ebpf::{btf_maps::LruHashMap, macros::btf_map};

/// The packets of one direction before translation, in the order of the packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Key {
    /// Source and destination.
    pub addresses: [u32; 2],
    /// Source and destination.
    pub ports: [u16; 2],
    /// The IP protocol number.
    pub proto: u32,
}

/// What they are after it. With key and the kernel's header, an entry has two cache lines.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Translation {
    /// Source and destination.
    pub addresses: [u32; 2],
    /// Source and destination.
    pub ports: [u16; 2],
    /// The Ethernet addresses.
    pub hardware: [u32; 3],
    /// The index of the link on which packets leave, or 0 if they go through the stack.
    pub link: u32,
    /// Zero. As long as what a flow needs besides: service, state, counts and times.
    pub unused: [u32; 9],
}

/// The number of entries, as of `direct_flows_v4` in the benchmark.
const ENTRIES: usize = 1 << 19;

#[btf_map]
static TRANSLATIONS: LruHashMap<Key, Translation, ENTRIES> = LruHashMap::new();

/// Looks up an entry.
#[inline(always)]
pub fn find(key: &Key) -> Option<Translation> {
    // SAFETY: the value is copied before any other map operation, so the reference is valid.
    unsafe { TRANSLATIONS.get(key) }.copied()
}

/// Writes an entry.
#[inline(always)]
pub fn insert(key: &Key, translation: &Translation) {
    let _ = TRANSLATIONS.insert(key, translation, 0);
}
