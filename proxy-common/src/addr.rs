//! Addresses in the form of the maps, which is the same for both IP families.

use core::cmp::Ordering;

/// The third word of an IPv4-mapped address.
const V4_MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// An IPv6 address, or an IPv4-mapped IPv6 address (`::ffff:a.b.c.d`), in network byte order.
///
/// With one form, both IP families share maps and code, and an IPv4-mapped address of an IPv6
/// socket is the IPv4 address. The alignment of 4 makes programs copy words.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Eq, Hash)]
#[expect(clippy::derived_hash_with_manual_eq, reason = "both are of all octets")]
pub struct Addr {
    /// The octets in network byte order.
    pub octets: [u8; 16],
}

/// An IPv4 address in network byte order, for the maps that hold IPv4 alone.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddrV4 {
    /// The octets in network byte order.
    pub octets: [u8; 4],
}

impl AddrV4 {
    /// Returns the IPv4 address that an address is or ends in.
    #[inline(always)]
    pub const fn last_of(address: &Addr) -> Self {
        Self { octets: address.words()[3].to_ne_bytes() }
    }
}

impl From<AddrV4> for Addr {
    #[inline(always)]
    fn from(address: AddrV4) -> Self {
        Self::from_v4(address.octets)
    }
}

/// The derived function would make programs load octets one by one.
impl PartialEq for Addr {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.different_bits(other) == 0
    }
}

/// The order of the octets. One wide comparison is several times faster than the derived function,
/// which compares octets.
impl Ord for Addr {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        u128::from_be_bytes(self.octets).cmp(&u128::from_be_bytes(other.octets))
    }
}

impl PartialOrd for Addr {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Addr {
    /// The number of bits.
    pub const BITS: u32 = 128;
    /// `0.0.0.0`: the address in the key of an IPv4 node port.
    pub const UNSPECIFIED_V4: Self = Self::from_v4([0; 4]);
    /// `::`: the address in the key of an IPv6 node port.
    pub const UNSPECIFIED_V6: Self = Self { octets: [0; 16] };
    /// `127.0.0.1`: the key of 127.0.0.0/8 in `node_addresses`.
    pub const LOOPBACK_V4: Self = Self::from_v4([127, 0, 0, 1]);
    /// `::1`.
    pub const LOOPBACK_V6: Self = Self::from_words([0, 0, 0, u32::from_ne_bytes([0, 0, 0, 1])]);

    /// Returns an IPv4 address.
    #[inline(always)]
    pub const fn from_v4(octets: [u8; 4]) -> Self {
        Self::from_words([0, 0, V4_MAPPED, u32::from_ne_bytes(octets)])
    }

    /// Returns an address from four words of a kernel context, which are in network byte order in
    /// memory.
    ///
    /// It is built in one wide integer, because the BPF backend would otherwise move sixteen single
    /// bytes.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        let [a, b, c, d] =
            if cfg!(target_endian = "big") { [words[3], words[2], words[1], words[0]] } else { words };
        let wide = (a as u128) | (b as u128) << 32 | (c as u128) << 64 | (d as u128) << 96;
        Self { octets: wide.to_ne_bytes() }
    }

    /// Returns four words in network byte order in memory.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "each cast takes one word of the four")]
    pub const fn words(&self) -> [u32; 4] {
        let wide = u128::from_ne_bytes(self.octets);
        let words = [wide as u32, (wide >> 32) as u32, (wide >> 64) as u32, (wide >> 96) as u32];
        if cfg!(target_endian = "big") { [words[3], words[2], words[1], words[0]] } else { words }
    }

    /// Returns 0 for the same address, and otherwise some of the bits that differ.
    #[inline(always)]
    pub(crate) const fn different_bits(&self, other: &Self) -> u32 {
        let (one, other) = (self.words(), other.words());
        one[0] ^ other[0] | one[1] ^ other[1] | one[2] ^ other[2] | one[3] ^ other[3]
    }

    /// Returns true for an IPv4 address.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        let [a, b, c, _] = self.words();
        a == 0 && b == 0 && c == V4_MAPPED
    }

    /// Returns true for two IPv4 addresses. It has one branch, because the verifier follows each.
    #[inline(always)]
    pub const fn are_v4(one: &Self, other: &Self) -> bool {
        let (one, other) = (one.words(), other.words());
        let zeros = one[0] | one[1] | other[0] | other[1];
        zeros | one[2] ^ V4_MAPPED | other[2] ^ V4_MAPPED == 0
    }

    /// Returns true for `0.0.0.0` and `::`, which a socket takes for loopback.
    #[inline(always)]
    pub const fn is_unspecified(&self) -> bool {
        let [a, b, c, d] = self.words();
        a == 0 && b == 0 && d == 0 && (c == 0 || c == V4_MAPPED)
    }

    /// Returns true for 127.0.0.0/8 and `::1`.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        if self.is_v4() {
            self.words()[3].to_ne_bytes()[0] == 127
        } else {
            let [a, b, c, d] = self.words();
            a == 0 && b == 0 && c == 0 && d == u32::from_ne_bytes([0, 0, 0, 1])
        }
    }

    /// Returns the unspecified address of the same IP family, which is in the key of a node port.
    #[inline(always)]
    pub const fn any(&self) -> Self {
        if self.is_v4() { Self::UNSPECIFIED_V4 } else { Self::UNSPECIFIED_V6 }
    }

    /// Returns the key in `node_addresses`. All loopback and unspecified addresses have the same
    /// key.
    #[inline(always)]
    pub const fn node_address(&self) -> Self {
        if self.is_loopback() || self.is_unspecified() {
            if self.is_v4() { Self::LOOPBACK_V4 } else { Self::LOOPBACK_V6 }
        } else {
            *self
        }
    }
}

#[cfg(any(test, feature = "testing", feature = "user"))]
mod user {
    use std::{
        fmt,
        net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    };

    use super::Addr;
    use crate::layout::Endpoint;

    impl From<IpAddr> for Addr {
        fn from(address: IpAddr) -> Self {
            match address {
                IpAddr::V4(v4) => Self::from_v4(v4.octets()),
                IpAddr::V6(v6) => Self { octets: v6.octets() },
            }
        }
    }

    impl From<Addr> for IpAddr {
        fn from(address: Addr) -> Self {
            let v6 = Ipv6Addr::from(address.octets);
            v6.to_ipv4_mapped().map_or(Self::V6(v6), |v4: Ipv4Addr| Self::V4(v4))
        }
    }

    impl From<SocketAddr> for Endpoint {
        fn from(address: SocketAddr) -> Self {
            Self::new(address.ip().into(), address.port())
        }
    }

    impl From<Endpoint> for SocketAddr {
        fn from(endpoint: Endpoint) -> Self {
            Self::new(endpoint.addr.into(), endpoint.port)
        }
    }

    impl fmt::Display for Addr {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            IpAddr::from(*self).fmt(f)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn order_and_equality_are_those_of_the_octets(octets: [u8; 16], at in 0..16_usize, other: u8) {
            let mut changed = octets;
            changed[at] = other;
            prop_assert_eq!(Addr { octets }.cmp(&Addr { octets: changed }), octets.cmp(&changed));
            prop_assert_eq!(Addr { octets } == Addr { octets: changed }, octets == changed);
        }
    }

    #[test]
    fn ipv4_address_is_mapped_and_recognised() {
        let address = Addr::from_v4([10, 96, 0, 1]);
        assert!(address.is_v4());
        assert_eq!(&address.octets[10..], &[0xff, 0xff, 10, 96, 0, 1]);
        assert_eq!(Addr::from_words(address.words()), address);
    }

    #[test]
    fn loopback_and_unspecified_addresses_have_one_node_address() {
        assert_eq!(Addr::from_v4([127, 8, 9, 1]).node_address(), Addr::LOOPBACK_V4);
        assert_eq!(Addr::UNSPECIFIED_V4.node_address(), Addr::LOOPBACK_V4);
        assert_eq!(Addr::UNSPECIFIED_V6.node_address(), Addr::LOOPBACK_V6);
        assert_eq!(Addr::LOOPBACK_V6.node_address(), Addr::LOOPBACK_V6);
        let other = Addr::from_v4([192, 168, 57, 11]);
        assert_eq!(other.node_address(), other);
    }

    #[test]
    fn ipv6_address_that_ends_in_zeros_is_not_unspecified() {
        let mut octets = [0; 16];
        octets[0] = 0xfd;
        assert!(!Addr { octets }.is_unspecified());
        assert!(Addr::UNSPECIFIED_V4.is_unspecified() && Addr::UNSPECIFIED_V6.is_unspecified());
    }
}
