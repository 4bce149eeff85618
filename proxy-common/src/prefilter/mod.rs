//! The prefilter: a Bloom filter with the frontends and endpoints, so that a packet of no Service
//! costs one lookup in an array and no other.
//!
//! Each item has three bits in one 64-bit word. They are set before the entry that needs them is
//! written, and cleared long after that entry is removed, because flows outlive their Services. A
//! false positive costs map lookups and nothing else.
//!
//! Only the first words of the memory are in use, and their number follows the content: with few
//! Services, programs read few cache lines. It is a power of two. The word of an item is the hash
//! modulo this number, so a prefilter of twice the size begins as two copies of the smaller one,
//! whatever items it has. [`sized`] changes the size.

#[cfg(any(test, feature = "user"))]
pub mod sized;

use crate::{
    Addr, hash,
    layout::{Direction, Endpoint, Flow, FlowKey},
};

/// The maximal number of words in use: 1 MiB, for 30,000 Services of 4 endpoints in both IP
/// families.
pub const MAX_WORDS: u32 = 1 << 17;
/// The minimal number of words in use: a page of memory.
pub const MIN_WORDS: u32 = 1 << 9;
/// The number of bits that are drawn for an item. Some may be the same. With three, the fewest
/// words keep false positives well below 1 %; two need half as many words more, and four save
/// little.
pub const BITS_PER_ITEM: u32 = 3;

/// The only value of the map `prefilter`. Userspace maps it into its memory. A single value takes
/// one lookup, and the verifier checks the index of the word.
#[repr(C)]
#[derive(Debug)]
pub struct PrefilterTable {
    /// The number of words in use less one: all bits of their indexes.
    pub mask: u64,
    /// The words. Those behind the words in use have no meaning.
    pub words: [u64; MAX_WORDS as usize],
}

impl PrefilterTable {
    /// The number of 64-bit words of the value, with the mask.
    pub const LENGTH: u32 = 1 + MAX_WORDS;

    /// Returns the bits of each item that are not set: 0 if it was inserted, or with a false
    /// positive.
    #[inline(always)]
    pub fn missing_bits<const N: usize>(&self, items: [PrefilterItem; N]) -> [u64; N] {
        #[expect(clippy::cast_possible_truncation, reason = "there are at most 2^17 words")]
        let mask = self.mask as u32;
        let word = |item: PrefilterItem| self.words.get(item.index(mask) as usize).copied().unwrap_or(0);
        items.map(|item| item.bits() & !word(item))
    }
}

const _: () = assert!(MAX_WORDS.is_power_of_two() && MIN_WORDS.is_power_of_two());
const _: () = assert!(size_of::<PrefilterTable>() == PrefilterTable::LENGTH as usize * size_of::<u64>());

/// What the prefilter has of an address and port: a hash, from which its word and bits follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefilterItem(u64);

/// Makes the hash of an endpoint differ from that of a frontend with the same address. Any word
/// works that no address begins with.
const ENDPOINT: u32 = 0x5bd1_e995;

impl PrefilterItem {
    /// Returns the index of the word. `mask` is the number of words in use less one.
    #[inline(always)]
    pub const fn index(self, mask: u32) -> u32 {
        (self.0 >> 47) as u32 & mask
    }

    /// Returns the bits in the word.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        1 << (self.0 >> 41 & 63) | 1 << (self.0 >> 35 & 63) | 1 << (self.0 >> 29 & 63)
    }

    /// Returns the item of a frontend, which programs check for the destination of a packet. The
    /// port is in host byte order.
    #[inline(always)]
    pub const fn of_service(addr: &Addr, port: u16) -> Self {
        Self::of_words(addr.words(), port)
    }

    /// Returns the item of an endpoint, which programs check for the source of a packet. It differs
    /// from that of a frontend, so that packets which go directly to an endpoint pass quickly.
    #[inline(always)]
    pub const fn of_endpoint(addr: &Addr, port: u16) -> Self {
        let [a, b, c, d] = addr.words();
        Self::of_words([a ^ ENDPOINT, b, c, d], port)
    }

    /// Returns the item of a node port: that of the unspecified address of the same IP family.
    #[inline(always)]
    pub const fn of_node_port(addr: &Addr, port: u16) -> Self {
        let third = if addr.is_v4() { Addr::UNSPECIFIED_V4.words()[2] } else { 0 };
        Self::of_words([0, 0, third, 0], port)
    }

    /// Returns the items that packets of a flow need, even if its Service or endpoint is gone: of
    /// the VIP as an address and as a node port, and of the endpoint. The entries of a flow that is
    /// masqueraded need only the endpoint. Both entries of a flow give the same items.
    pub const fn of_flow(key: &FlowKey, flow: &Flow) -> [Self; 3] {
        let (vip, endpoint): (Option<&Endpoint>, &Endpoint) = match key.direction() {
            Some(Direction::Original) => (Some(&key.destination), &flow.destination),
            Some(Direction::Reply) => (Some(&flow.source), &key.source),
            Some(Direction::Masquerade) => (None, &key.destination),
            Some(Direction::MasqueradeReply) if flow.has_twice_nat() => (Some(&flow.source), &key.source),
            Some(Direction::MasqueradeReply) | None => (None, &key.source),
        };
        let endpoint = Self::of_endpoint(&endpoint.addr, endpoint.port);
        let Some(vip) = vip else { return [endpoint; 3] };
        [Self::of_service(&vip.addr, vip.port), Self::of_node_port(&vip.addr, vip.port), endpoint]
    }

    #[inline(always)]
    const fn of_words(words: [u32; 4], port: u16) -> Self {
        // The low bits of the hash are mixed least, and are not used.
        Self(hash::of_address(words, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_port_is_the_item_of_the_unspecified_address() {
        for (addr, any) in
            [(Addr::from_v4([192, 0, 2, 1]), Addr::UNSPECIFIED_V4), (Addr::LOOPBACK_V6, Addr::UNSPECIFIED_V6)]
        {
            assert_eq!(PrefilterItem::of_node_port(&addr, 30_080), PrefilterItem::of_service(&any, 30_080));
        }
    }

    #[test]
    fn bits_of_an_item_are_in_one_word_of_any_size() {
        for port in 0..=u16::MAX {
            let item = PrefilterItem::of_service(&Addr::from_v4([10, 96, 0, 1]), port);
            assert!((1..=BITS_PER_ITEM).contains(&item.bits().count_ones()));
            let index = item.index(MAX_WORDS - 1);
            assert!(index < MAX_WORDS);
            assert_eq!(item.index(u32::MAX), index, "programs read no word behind the last");
            assert_eq!(item.index(MIN_WORDS - 1), index % MIN_WORDS);
        }
    }
}
