//! Maglev tables: which slot of a list a client from outside gets, the same on every node.
//!
//! A table is a list of slots. A client's address and port lead to one place in it. Userspace fills
//! a table as in the paper by Eisenbud and others ("Maglev: A fast and reliable software network
//! load balancer", NSDI 2016, section 3.4), from nothing but the endpoints. So a client that
//! arrives at another node, or whose flow the node has lost, gets the same endpoint.

use core::num::NonZeroU16;

use crate::{
    hash,
    layout::{Endpoint, MaglevKey, MaglevPage, ServiceValue, flags},
    select::Slots,
    tables::Tables,
};

/// The number of entries of a table: the largest prime below a power of two from 2^8 to 2^18. It is
/// a prime so that every step through a table reaches all of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableSize(NonZeroU16);

/// The exponent of the smallest size, less one.
const BEFORE_FIRST: u32 = 7;
/// The bits of [`GAPS`] for each size.
const GAP_BITS: u32 = 5;
/// The gap between each size and the power of two above it. As one number, a program needs no map
/// to read it.
const GAPS: u64 = {
    let (mut gaps, mut at) = (0, 0);
    while at < TableSize::ENTRIES.len() {
        let entries = TableSize::ENTRIES[at];
        at += 1;
        let gap = (entries.next_power_of_two() - entries) as u64;
        gaps |= gap << (GAP_BITS as usize * at);
    }
    gaps
};

impl TableSize {
    /// The sizes, by their number of entries.
    pub const ENTRIES: [u32; 11] =
        [251, 509, 1_021, 2_039, 4_093, 8_191, 16_381, 32_749, 65_521, 131_071, 262_139];

    /// The entries that an endpoint has on average. With fewer, shares differ by more than one
    /// percent.
    const ENTRIES_PER_ENDPOINT: u32 = 100;

    /// Returns the size with this number of entries.
    pub fn of_entries(entries: u32) -> Option<Self> {
        let at = Self::ENTRIES.iter().position(|size| *size == entries)?;
        Self::of_number(u16::try_from(at + 1).ok()?)
    }

    /// Returns the size of a table for this number of endpoints: this one, or a larger one if each
    /// endpoint would have fewer than a hundred entries. A single endpoint needs only the smallest.
    /// Returns `None` without endpoints, and for more than a slot number can count.
    #[must_use]
    pub fn for_endpoints(self, endpoints: u32) -> Option<Self> {
        match endpoints {
            0 => return None,
            1 => return Self::of_number(1),
            _ if endpoints >= MaglevPage::NO_SLOT.into() => return None,
            _ => {}
        }
        let wanted = endpoints.saturating_mul(Self::ENTRIES_PER_ENDPOINT);
        let larger = Self::ENTRIES.iter().position(|entries| *entries >= wanted);
        let at = larger.unwrap_or(Self::ENTRIES.len() - 1);
        Self::of_number(u16::try_from(at + 1).ok()?).map(|size| size.max(self))
    }

    /// Returns the size that the flags of a frontend name, if clients from outside choose by a
    /// table.
    #[inline(always)]
    pub const fn of_flags(flags: u16) -> Option<Self> {
        Self::of_number((flags & flags::MAGLEV_SIZE) >> flags::MAGLEV_SIZE.trailing_zeros())
    }

    /// Returns the flags of a frontend for this size.
    pub const fn flags(self) -> u16 {
        self.0.get() << flags::MAGLEV_SIZE.trailing_zeros()
    }

    #[inline(always)]
    const fn of_number(number: u16) -> Option<Self> {
        match NonZeroU16::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Returns the number of entries.
    #[inline(always)]
    pub const fn entries(self) -> u32 {
        let number = self.0.get() as u32;
        let gap = GAPS >> (GAP_BITS * number) & ((1 << GAP_BITS) - 1);
        (1 << (BEFORE_FIRST + number)) - gap as u32
    }

    /// Returns the number of pages of a table.
    pub const fn pages(self) -> u32 {
        self.entries().div_ceil(MaglevPage::SLOTS)
    }

    /// Returns the place of a client in a table.
    #[inline(always)]
    const fn place(self, hash: u32) -> u32 {
        ((hash as u64 * self.entries() as u64) >> 32) as u32
    }
}

impl Default for TableSize {
    /// 16381 entries: enough for 163 endpoints.
    fn default() -> Self {
        Self(NonZeroU16::new(7).unwrap_or(NonZeroU16::MIN))
    }
}

/// Returns the hash of a client. With affinity all ports of a client have the same, so that the
/// client gets the same endpoint on every node.
#[inline(always)]
const fn client_hash(client: &Endpoint, affinity_seconds: u32) -> u32 {
    let port = if affinity_seconds == 0 { client.port } else { 0 };
    (hash::of_address(client.addr.words(), port) >> 32) as u32
}

/// Chooses a slot for a new flow of this client: by the table of the list, or at random without
/// one.
///
/// While userspace writes a table, pages are missing, and some name slots that are gone. A client
/// then gets another endpoint than on other nodes, for some milliseconds, but always one of the
/// list.
#[inline(always)]
pub fn slot<T: Tables>(tables: &T, service: &ServiceValue, slots: Slots, client: &Endpoint) -> u32 {
    let Some(size) = TableSize::of_flags(slots.table) else { return slots.pick(tables.random()) };
    let hash = client_hash(client, service.affinity_seconds);
    let slot = slot_at(tables, service.service, slots.list, size, hash);
    if slot < slots.count { slot } else { slots.pick(hash) }
}

/// Returns the slot for a client with this hash. It is larger than that of any endpoint if the page
/// is missing. A function call of its own saves stack.
#[inline(never)]
fn slot_at<T: Tables>(tables: &T, service: u32, list: u32, size: TableSize, hash: u32) -> u32 {
    let place = size.place(hash);
    let key = MaglevKey { service, list, size: size.entries(), page: place / MaglevPage::SLOTS };
    tables.maglev_slot(&key, place % MaglevPage::SLOTS).map_or(u32::MAX, u32::from)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, vec};

    use super::*;
    use crate::Addr;

    fn sizes() -> impl Iterator<Item = TableSize> {
        TableSize::ENTRIES.into_iter().map(|entries| TableSize::of_entries(entries).expect("listed"))
    }

    #[test]
    fn sizes_are_the_largest_primes_below_powers_of_two() {
        let is_prime = |number: u32| (2..=number.isqrt()).all(|factor| !number.is_multiple_of(factor));
        for (size, entries) in sizes().zip(TableSize::ENTRIES) {
            assert_eq!(size.entries(), entries);
            let power = entries.next_power_of_two();
            assert!(is_prime(entries) && (entries + 1..power).all(|larger| !is_prime(larger)), "{entries}");
            assert_eq!(TableSize::of_flags(size.flags() | !flags::MAGLEV_SIZE), Some(size));
        }
        assert_eq!(TableSize::default().entries(), 16_381);
        assert_eq!(TableSize::of_flags(!flags::MAGLEV_SIZE), None);
        assert_eq!([0, 1, 250, 16_384].map(TableSize::of_entries), [None; 4]);
    }

    #[test]
    fn table_has_at_least_a_hundred_entries_for_each_endpoint() {
        let size = |endpoints| TableSize::default().for_endpoints(endpoints).map(TableSize::entries);
        assert_eq!([0, 1, 2, 163].map(size), [None, Some(251), Some(16_381), Some(16_381)]);
        assert_eq!([164, 5_000, 65_534].map(size), [Some(32_749), Some(262_139), Some(262_139)]);
        assert_eq!(size(65_535), None, "slots have numbers of 16 bits");
        let small = TableSize::of_entries(251).expect("a size");
        assert_eq!(small.for_endpoints(2).map(TableSize::entries), Some(251));
        assert_eq!(small.for_endpoints(3).map(TableSize::entries), Some(509));
    }

    #[test]
    fn clients_come_to_all_places_evenly() {
        let size = TableSize::of_entries(251).expect("a size");
        let client = |host: u8, port| Endpoint::new(Addr::from_v4([192, 0, 2, host]), port);
        let clients = || (0..=255).flat_map(|host| (32_768..=33_767).map(move |port| client(host, port)));
        let mut hits = vec![0_u32; 251];
        clients().for_each(|client| hits[size.place(client_hash(&client, 0)) as usize] += 1);
        // A place has 1,020 clients on average, with a standard deviation of 32.
        assert!(hits.iter().all(|count| count.abs_diff(1_020) < 160), "{hits:?}");
        let hashes: HashSet<u32> = clients().map(|client| client_hash(&client, 10_800)).collect();
        assert_eq!(hashes.len(), 256, "with affinity, ports do not count");
    }
}
