//! Reads and writes entries of the direct path in place. The descriptions are those of
//! [`Tables`](proxy_common::tables::Tables).

use aya_ebpf::btf_maps::LruHashMap;
use proxy_common::{
    Addr, AddrV4,
    layout::{DirectFlow, DirectFlowV4, DirectHint, DirectKey, DirectKeyV4, DirectPath},
    link::direct::DirectProgress,
    packet::TcpFlags,
};

use super::{DIRECT_FLOWS_V4, DIRECT_FLOWS_V6, DIRECT_HINTS, PLACEHOLDER};

/// A value of one of the maps.
pub(super) trait Value: Copy {
    /// Returns true if both have the same addresses.
    fn has_addresses_of(&self, other: &Self) -> bool;
    fn path(&self) -> &DirectPath;
    /// Returns a pointer to the path of a value.
    ///
    /// # Safety
    ///
    /// The pointer is to a value.
    unsafe fn path_mut(value: *mut Self) -> *mut DirectPath;
}

macro_rules! value {
    ($value:ty) => {
        impl Value for $value {
            #[inline(always)]
            fn has_addresses_of(&self, other: &Self) -> bool {
                self.source == other.source && self.destination == other.destination
            }

            #[inline(always)]
            fn path(&self) -> &DirectPath {
                &self.path
            }

            #[inline(always)]
            unsafe fn path_mut(value: *mut Self) -> *mut DirectPath {
                // SAFETY: by the condition above.
                unsafe { &raw mut (*value).path }
            }
        }
    };
}

value!(DirectFlow);
value!(DirectFlowV4);

#[inline(always)]
pub fn direct_flow(key: &DirectKey, tcp: TcpFlags, acknowledged: u32) -> Option<DirectFlow> {
    match key.v4() {
        Some(key) => find(&DIRECT_FLOWS_V4, &key, tcp, acknowledged).map(DirectFlow::from),
        None => find(&DIRECT_FLOWS_V6, key, tcp, acknowledged),
    }
}

#[inline(always)]
pub(super) fn find<K, V: Value>(
    map: &'static LruHashMap<K, V, PLACEHOLDER>,
    key: &K,
    tcp: TcpFlags,
    acknowledged: u32,
) -> Option<V> {
    let flow = map.get_ptr_mut(key)?;
    // SAFETY: as in `flows::answered_flow`.
    unsafe {
        if tcp.has_ack() && (*flow).path().acknowledged != acknowledged {
            (*V::path_mut(flow)).acknowledged = acknowledged;
        }
        Some(*flow)
    }
}

#[inline(always)]
pub fn direct_progress(key: &DirectKey, ends: Option<[&Addr; 2]>) -> DirectProgress {
    match key.v4() {
        Some(key) => progress(&DIRECT_FLOWS_V4, &key, |flow| {
            ends.is_none_or(|ends| ends.map(AddrV4::last_of) == [flow.source, flow.destination])
        }),
        None => progress(&DIRECT_FLOWS_V6, key, |flow| {
            ends.is_none_or(|[source, destination]| {
                *source == flow.source && *destination == flow.destination
            })
        }),
    }
}

#[inline(always)]
fn progress<K, V: Value>(
    map: &'static LruHashMap<K, V, PLACEHOLDER>,
    key: &K,
    is_of_connection: impl Fn(&V) -> bool,
) -> DirectProgress {
    // SAFETY: the fields are copied before any other map operation.
    let flow = unsafe { map.get(key) }.filter(|flow| is_of_connection(flow));
    flow.map_or(DirectProgress::default(), |flow| DirectProgress::of(flow.path()))
}

#[inline(always)]
pub fn put_direct_flow(key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath) {
    if key.is_v4() {
        put_v4(key, source, destination, path);
    } else {
        put_v6(key, source, destination, path);
    }
}

/// A function call of its own saves stack.
#[inline(never)]
fn put_v4(key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath) {
    let [source, destination] = [source, destination].map(AddrV4::last_of);
    if let Some(key) = key.v4() {
        if put(&DIRECT_FLOWS_V4, &key, &DirectFlowV4 { source, destination, path: *path }) {
            leave_hint(DirectHint::of(&key));
        }
    }
}

#[inline(always)]
fn leave_hint(DirectHint { place, tag }: DirectHint) {
    if let Some(hint) = DIRECT_HINTS.get_ptr_mut(place) {
        // SAFETY: the map keeps its entries. If two CPUs write at once, one of the flows has no
        // hint.
        unsafe { hint.write_volatile(tag) };
    }
}

#[inline(always)]
pub fn has_direct_hint(key: &DirectKeyV4) -> bool {
    let DirectHint { place, tag } = DirectHint::of(key);
    DIRECT_HINTS.get(place).is_some_and(|hint| *hint == tag)
}

/// A function call of its own saves stack.
#[inline(never)]
fn put_v6(key: &DirectKey, source: &Addr, destination: &Addr, path: &DirectPath) {
    put(&DIRECT_FLOWS_V6, key, &DirectFlow { source: *source, destination: *destination, path: *path });
}

/// Returns false if the kernel has no memory. Without the entry, packets go through the stack.
#[inline(always)]
fn put<K, V: Value>(map: &'static LruHashMap<K, V, PLACEHOLDER>, key: &K, flow: &V) -> bool {
    let path = flow.path();
    if let Some(entry) = map.get_ptr_mut(key) {
        // SAFETY: as in `flows::touch_flow`. If the kernel gave the element to another flow between
        // the comparison and the writes, that flow takes the direct path for one lease
        // more, with packets as long as this one.
        unsafe {
            if (*entry).has_addresses_of(flow) && (*entry).path().is_same_but_for_time(path) {
                let entry = V::path_mut(entry);
                (*entry).longest = path.longest;
                (*entry).epoch = path.epoch;
                (*entry).until_ns = path.until_ns;
                return true;
            }
        }
    }
    map.insert(key, flow, 0).is_ok()
}

#[inline(always)]
pub fn remove_direct_flow(key: &DirectKey) {
    let _ = match key.v4() {
        Some(key) => DIRECT_FLOWS_V4.remove(key),
        None => DIRECT_FLOWS_V6.remove(key),
    };
}
