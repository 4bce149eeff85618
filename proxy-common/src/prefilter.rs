//! The prefilter: a Bloom filter with one hash function. It has a bit for each frontend and
//! endpoint, so that a packet of no Service costs no other map lookup.
//!
//! A bit is set before the entry that needs it is written, and cleared long after that entry is
//! removed, because flows outlive their Services. Two frontends or endpoints may share a bit. A
//! false positive costs map lookups and nothing else.

use crate::{
    Addr,
    layout::{Direction, Endpoint, Flow, FlowKey},
};

/// The number of bits: 128 KiB. With 10,000 Services of 4 endpoints, one bit in twenty is set.
pub const BITS: u32 = 1 << 20;
/// The number of words, which are the entries of the map.
pub const WORDS: u32 = BITS / 64;

/// The position of the bit of an address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefilterBit {
    /// The index of the word, less than [`WORDS`].
    pub word: u32,
    /// The bit in the word.
    pub mask: u64,
}

/// The factors of the hash function: odd numbers with well mixed bits (Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators", 2014).
const FACTORS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// Makes the hash of an endpoint differ from that of a frontend with the same address. Any word
/// works that no address begins with.
const ENDPOINT: u32 = 0x5bd1_e995;

impl PrefilterBit {
    /// Returns the bit of a frontend, which programs check for the destination of a packet. The
    /// port is in host byte order.
    #[inline(always)]
    pub const fn of_service(addr: &Addr, port: u16) -> Self {
        Self::of_words(addr.words(), port)
    }

    /// Returns the bit of an endpoint, which programs check for the source of a packet. It differs
    /// from that of a frontend, so that packets which go directly to an endpoint pass quickly.
    #[inline(always)]
    pub const fn of_endpoint(addr: &Addr, port: u16) -> Self {
        let [a, b, c, d] = addr.words();
        Self::of_words([a ^ ENDPOINT, b, c, d], port)
    }

    /// Returns the bit of a node port: that of the unspecified address of the same IP family.
    #[inline(always)]
    pub const fn of_node_port(addr: &Addr, port: u16) -> Self {
        let third = if addr.is_v4() { Addr::UNSPECIFIED_V4.words()[2] } else { 0 };
        Self::of_words([0, 0, third, 0], port)
    }

    /// Returns the bits that packets of a flow need, even if its Service or endpoint is gone: of
    /// the VIP as an address and as a node port, and of the endpoint. Both entries of a flow give
    /// the same bits.
    pub const fn of_flow(key: &FlowKey, flow: &Flow) -> [Self; 3] {
        let (vip, endpoint): (&Endpoint, &Endpoint) = if key.direction == Direction::Original as u8 {
            (&key.destination, &flow.destination)
        } else {
            (&flow.source, &key.source)
        };
        [
            Self::of_service(&vip.addr, vip.port),
            Self::of_node_port(&vip.addr, vip.port),
            Self::of_endpoint(&endpoint.addr, endpoint.port),
        ]
    }

    #[inline(always)]
    const fn of_words([a, b, c, d]: [u32; 4], port: u16) -> Self {
        let high = (a as u64) << 32 | b as u64;
        let low = (c as u64) << 32 | d as u64;
        let mixed =
            high.wrapping_mul(FACTORS[0]) ^ low.wrapping_add((port as u64) << 17).wrapping_mul(FACTORS[1]);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(FACTORS[2]);
        let bit = (mixed >> 44) as u32;
        Self { word: bit / 64 % WORDS, mask: 1 << (bit % 64) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn similar_addresses_and_ports_have_different_bits() {
        let mut bits = HashSet::new();
        let mut count = 0;
        for third in 0..20 {
            for last in 0..=255 {
                for port in [80, 443, 8080] {
                    bits.insert(bit(&Addr::from_v4([10, 244, third, last]), port));
                    count += 1;
                }
            }
        }
        for port in 30_000..32_768 {
            bits.insert(bit(&Addr::UNSPECIFIED_V4, port));
            bits.insert(bit(&Addr::UNSPECIFIED_V6, port));
            count += 2;
        }
        for host in 0..5_000u16 {
            let mut octets = [0; 16];
            octets[0] = 0xfd;
            octets[14..].copy_from_slice(&host.to_be_bytes());
            bits.insert(bit(&Addr { octets }, 53));
            count += 1;
        }
        // A random function has n²/2m collisions, some 350.
        assert!(bits.len() > count - 700, "{} bits for {count}", bits.len());
    }

    #[test]
    fn node_port_has_the_bit_of_the_unspecified_address() {
        for (addr, any) in
            [(Addr::from_v4([192, 0, 2, 1]), Addr::UNSPECIFIED_V4), (Addr::LOOPBACK_V6, Addr::UNSPECIFIED_V6)]
        {
            assert_eq!(PrefilterBit::of_node_port(&addr, 30_080), PrefilterBit::of_service(&any, 30_080));
        }
    }

    fn bit(addr: &Addr, port: u16) -> u32 {
        let PrefilterBit { word, mask } = PrefilterBit::of_service(addr, port);
        assert!(word < WORDS);
        word * 64 + mask.trailing_zeros()
    }
}
