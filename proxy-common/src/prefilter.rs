//! Which addresses and ports are, or were, those of a Service or an endpoint: a bitmap that spares all other packets every
//! look into a map.
//!
//! Bits are set before what they stand for is, and cleared long after: flows outlive the Services they began with. Two things may
//! share a bit; a packet that is let through by such an accident is looked at like any other.

use crate::{
    Addr,
    layout::{Direction, Endpoint, Flow, FlowKey},
};

/// Bits of the map; 128 KiB. With 10,000 Services of 4 endpoints, one in twenty is set.
pub const BITS: u32 = 1 << 20;
/// Words of the map.
pub const WORDS: u32 = BITS / 64;

/// Where the bit of an address and port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefilterBit {
    /// The word, less than [`WORDS`].
    pub word: u32,
    /// The bit in it.
    pub mask: u64,
}

/// Odd numbers with well mixed bits (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
const FACTORS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// Tells an endpoint's place from a Service's at the same address: any word that no address here begins with.
const ENDPOINT: u32 = 0x5bd1_e995;

impl PrefilterBit {
    /// The place of an address and port of a Service: packets that come in for it are looked at. The port is in host byte order.
    #[inline(always)]
    pub const fn of_service(addr: &Addr, port: u16) -> Self {
        Self::of_words(addr.words(), port)
    }

    /// The place of an endpoint: packets that leave from it are looked at. A place of its own, so that who dials endpoints past
    /// all Services is not held up as they come in.
    #[inline(always)]
    pub const fn of_endpoint(addr: &Addr, port: u16) -> Self {
        let [a, b, c, d] = addr.words();
        Self::of_words([a ^ ENDPOINT, b, c, d], port)
    }

    /// The place of a node port: of the unspecified address of the same family as this one.
    #[inline(always)]
    pub const fn of_node_port(addr: &Addr, port: u16) -> Self {
        let third = if addr.is_v4() { Addr::UNSPECIFIED_V4.words()[2] } else { 0 };
        Self::of_words([0, 0, third, 0], port)
    }

    /// The places without which packets of a flow would not be looked at, whether or not there still is its Service or endpoint: of
    /// the VIP, as a Service's and as a node port, and of the endpoint. Either of its two entries names them all.
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
    fn addresses_and_ports_that_differ_little_have_places_of_their_own() {
        let mut places = HashSet::new();
        let mut count = 0;
        for third in 0..20 {
            for last in 0..=255 {
                for port in [80, 443, 8080] {
                    places.insert(bit(&Addr::from_v4([10, 244, third, last]), port));
                    count += 1;
                }
            }
        }
        for port in 30_000..32_768 {
            places.insert(bit(&Addr::UNSPECIFIED_V4, port));
            places.insert(bit(&Addr::UNSPECIFIED_V6, port));
            count += 2;
        }
        for host in 0..5_000u16 {
            let mut octets = [0; 16];
            octets[0] = 0xfd;
            octets[14..].copy_from_slice(&host.to_be_bytes());
            places.insert(bit(&Addr { octets }, 53));
            count += 1;
        }
        // About as many collisions as chance would have it: n²/2m, some 350.
        assert!(places.len() > count - 700, "{} places for {count}", places.len());
    }

    #[test]
    fn a_node_port_has_the_place_of_its_familys_unspecified_address() {
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
