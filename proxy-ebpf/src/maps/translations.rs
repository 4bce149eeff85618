//! What the programs of the benchmark remember: an entry for each direction of a flow that they
//! translate, with room for what a flow of IPv4 needs.
#![expect(unsafe_code, reason = "only the verifier checks the pointers to map values")]

use aya_ebpf::{bindings::BPF_NOEXIST, btf_maps::LruHashMap, macros::btf_map};

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
    /// Bits of [`state`].
    pub state: u32,
    /// The sequence number that the client must acknowledge, if the endpoint has answered. In
    /// host byte order.
    pub sequence: u32,
    /// Zero. As long as what a flow needs besides: service, counts and times.
    pub unused: [u32; 7],
}

/// Bits of [`Translation::state`].
pub mod state {
    /// The endpoint has answered.
    pub const ANSWERED: u32 = 1;
    /// A FIN or reset was sent.
    pub const CLOSED: u32 = 2;
}

impl Translation {
    /// Returns the entry of the opposite direction, which leaves with other Ethernet addresses on
    /// another link. `key` is the key of this entry.
    #[inline(always)]
    pub fn opposite(&self, key: &Key, hardware: [u32; 3], link: u32) -> (Key, Self) {
        let swapped = Self {
            addresses: [key.addresses[1], key.addresses[0]],
            ports: [key.ports[1], key.ports[0]],
            hardware,
            link,
            ..*self
        };
        (self.opposite_key(key), swapped)
    }

    /// Returns the key of the opposite direction. `key` is the key of this entry.
    #[inline(always)]
    pub fn opposite_key(&self, key: &Key) -> Key {
        Key {
            addresses: [self.addresses[1], self.addresses[0]],
            ports: [self.ports[1], self.ports[0]],
            proto: key.proto,
        }
    }
}

/// The number of entries, as of `direct_flows_v4` in the benchmark.
const ENTRIES: usize = 1 << 19;
/// The number of entries of flows that are not assured, as of `unassured_flows`.
const UNASSURED: usize = 1 << 16;

#[btf_map]
static TRANSLATIONS: LruHashMap<Key, Translation, ENTRIES> = LruHashMap::new();

/// Flows that are not assured, if the programs know the state of flows.
#[btf_map]
static UNASSURED_TRANSLATIONS: LruHashMap<Key, Translation, UNASSURED> = LruHashMap::new();

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

/// Looks up an entry of a flow that is not assured.
#[inline(always)]
pub fn find_unassured(key: &Key) -> Option<Translation> {
    // SAFETY: as above.
    unsafe { UNASSURED_TRANSLATIONS.get(key) }.copied()
}

/// Writes an entry of a new flow, unless another flow has it.
#[inline(always)]
pub fn insert_unassured(key: &Key, translation: &Translation) {
    let _ = UNASSURED_TRANSLATIONS.insert(key, translation, BPF_NOEXIST.into());
}

/// Moves an entry to the map of assured flows.
#[inline(always)]
pub fn assure(key: &Key, translation: &Translation) {
    let _ = TRANSLATIONS.insert(key, translation, BPF_NOEXIST.into());
    let _ = UNASSURED_TRANSLATIONS.remove(key);
}

/// Notes the answer of an endpoint in the entry of its client.
#[inline(always)]
pub fn note_answer(key: &Key, sequence: u32) {
    if let Some(entry) = UNASSURED_TRANSLATIONS.get_ptr_mut(key) {
        // SAFETY: the pointer is valid until the program ends.
        unsafe { ((*entry).state, (*entry).sequence) = ((*entry).state | state::ANSWERED, sequence) };
    }
}

/// Sets the state of an assured flow in an entry.
#[inline(always)]
pub fn set_state(key: &Key, state: u32) {
    if let Some(entry) = TRANSLATIONS.get_ptr_mut(key) {
        // SAFETY: as above.
        unsafe { (*entry).state = state };
    }
}
