//! Internet checksum arithmetic (RFC 1071, RFC 1624): what a change of some bytes adds to a sum of all.

use crate::Addr;

/// What has to be added to a ones' complement sum, as the kernel's `__wsum`: 32 bits, folded later, in network byte order as
/// the words in memory are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference(u32);

impl Difference {
    /// Of one address put in place of another of the same family. IPv4 has one word of the four.
    #[inline(always)]
    pub const fn of_addresses(old: &Addr, new: &Addr) -> Self {
        // The words that both families' forms share cancel out.
        let (old, new) = (old.words(), new.words());
        Self(0)
            .and_word(old[0], new[0])
            .and_word(old[1], new[1])
            .and_word(old[2], new[2])
            .and_word(old[3], new[3])
    }

    /// Of one port put in place of another, both in host byte order. Ports stand at even offsets.
    #[inline(always)]
    pub const fn of_ports(old: u16, new: u16) -> Self {
        Self(0).and_word(old.to_be() as u32, new.to_be() as u32)
    }

    /// Both.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(add(self.0, other.0))
    }

    /// As the kernel's helpers take it.
    #[inline(always)]
    pub const fn wsum(self) -> u32 {
        self.0
    }

    /// Changes nothing.
    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    const fn and_word(self, old: u32, new: u32) -> Self {
        if old == new { self } else { Self(add(add(self.0, !old), new)) }
    }

    /// The checksum field, as it stands in memory, after the change (RFC 1624, equation 3).
    #[inline(always)]
    pub const fn apply(self, field: [u8; 2]) -> [u8; 2] {
        let sum = add(!u16::from_ne_bytes(field) as u32 & 0xffff, self.0);
        (!fold(sum)).to_ne_bytes()
    }
}

/// Ones' complement addition.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "what the cast cuts off is added again")]
const fn add(a: u32, b: u32) -> u32 {
    let sum = a as u64 + b as u64;
    (sum as u32).wrapping_add((sum >> 32) as u32)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "folded twice, a sum of two halves fits one")]
const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn checksum(bytes: &[u8]) -> u16 {
        let sum = bytes.chunks(2).fold(0u32, |sum, pair| {
            sum + u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))
        });
        !fold(sum)
    }

    proptest! {
        #[test]
        fn a_checksum_is_right_after_addresses_and_ports_changed(
            old: [u8; 16], new: [u8; 16], old_port: u16, new_port: u16, rest: [u8; 24],
        ) {
            let packet = |addr: [u8; 16], port: u16| {
                let mut bytes = addr.to_vec();
                bytes.extend(port.to_be_bytes());
                bytes.extend(rest);
                checksum(&bytes)
            };
            let difference = Difference::of_addresses(&Addr { octets: old }, &Addr { octets: new })
                .and(Difference::of_ports(old_port, new_port));
            let fixed = u16::from_be_bytes(difference.apply(packet(old, old_port).to_be_bytes()));
            let wanted = packet(new, new_port);
            // Zero has two forms in ones' complement; a sum that is not all zeros never takes the second.
            prop_assert!(fixed == wanted || (fixed ^ wanted) == 0xffff && (fixed == 0 || wanted == 0));
        }
    }

    #[test]
    fn equal_addresses_make_no_difference() {
        let addr = Addr::from_v4([10, 0, 0, 1]);
        assert!(Difference::of_addresses(&addr, &addr).and(Difference::of_ports(80, 80)).is_none());
    }
}
