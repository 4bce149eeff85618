//! Internet checksum arithmetic (RFC 1071, RFC 1624): the difference that changed bytes make to a
//! checksum.

use crate::Addr;

/// A number to add to a ones' complement sum. It is a `__wsum` of the kernel: 32 bits that are
/// folded later, in network byte order like the words in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference(u32);

impl Difference {
    /// Returns the difference of a replaced address. Both have the same IP family. In IPv4 only one
    /// of the four words differs.
    #[inline(always)]
    pub const fn of_addresses(old: &Addr, new: &Addr) -> Self {
        Self::of_sums(sum_of_words(old.words()), sum_of_words(new.words()))
    }

    /// Returns the difference of a replaced port, in host byte order. Ports are at even offsets.
    #[inline(always)]
    pub const fn of_ports(old: u16, new: u16) -> Self {
        Self::of_sums(old.to_be() as i64, new.to_be() as i64)
    }

    /// Adds another difference.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(add(self.0, other.0))
    }

    /// Returns the difference for a number that [`Self::wsum`] returned.
    #[inline(always)]
    pub const fn from_wsum(wsum: u32) -> Self {
        Self(wsum)
    }

    /// Returns the difference of a replaced word of two bytes at an even offset.
    #[inline(always)]
    pub const fn of_bytes(old: [u8; 2], new: [u8; 2]) -> Self {
        Self::of_sums(u16::from_ne_bytes(old) as i64, u16::from_ne_bytes(new) as i64)
    }

    /// Returns the difference of replaced words of four bytes at an even offset.
    #[inline(always)]
    pub const fn of_words(old: [u8; 4], new: [u8; 4]) -> Self {
        Self::of_sums(u32::from_ne_bytes(old) as i64, u32::from_ne_bytes(new) as i64)
    }

    /// Returns the difference that one hop makes to the checksum of an IPv4 header with this hop
    /// limit before, and this protocol.
    #[inline(always)]
    pub const fn of_hop(hops: u8, proto: u8) -> Self {
        Self::of_bytes([hops, proto], [hops.wrapping_sub(1), proto])
    }

    /// Returns the number for the helpers of the kernel.
    #[inline(always)]
    pub const fn wsum(self) -> u32 {
        self.0
    }

    /// Returns the same number, folded to 16 bits.
    #[inline(always)]
    pub const fn folded(self) -> u16 {
        fold(self.0)
    }

    /// Returns the difference for a number that [`Self::folded`] returned.
    #[inline(always)]
    pub const fn from_folded(sum: u16) -> Self {
        Self(sum as u32)
    }

    /// Returns true if the checksum does not change.
    #[inline(always)]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns the difference of words with these sums, each of a few words. It is zero if the sums
    /// are equal, and may be zero if they are equal in ones' complement. It has no branch, because
    /// the verifier follows each branch.
    #[inline(always)]
    const fn of_sums(old: i64, new: i64) -> Self {
        Self(fold_words(new - old))
    }

    /// Returns the checksum field after the change (RFC 1624, equation 3). The field has the byte
    /// order of the packet.
    #[inline(always)]
    pub const fn apply(self, field: [u8; 2]) -> [u8; 2] {
        let sum = add(!u16::from_ne_bytes(field) as u32 & 0xffff, self.0);
        (!fold(sum)).to_ne_bytes()
    }
}

/// Returns the checksum field of a message, whose own field is zero. `before` is the sum of what
/// comes before it.
#[inline(always)]
pub const fn of_message<const N: usize>(message: &[u8; N], before: u32) -> [u8; 2] {
    (!fold(add(sum_of(message), before))).to_ne_bytes()
}

/// Returns the sum of the words of a message. N is even, and less than 2^17.
#[inline(always)]
pub const fn sum_of<const N: usize>(message: &[u8; N]) -> u32 {
    const { assert!(N.is_multiple_of(2) && N < 1 << 17) };
    let (mut sum, mut at) = (0, 0);
    while at < N {
        sum += u16::from_ne_bytes([message[at], message[at + 1]]) as u32;
        at += 2;
    }
    sum
}

/// Returns the sum of a pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1). `length` is
/// that of header and payload.
#[inline(always)]
pub const fn sum_of_pseudo_header(source: &Addr, destination: &Addr, proto: u8, length: u32) -> u32 {
    // The words before an IPv4 address are 0 and 0xffff, which is zero in ones' complement.
    let addresses = sum_of_words(source.words()) + sum_of_words(destination.words());
    fold_words(addresses + (proto as u32).to_be() as i64 + length.to_be() as i64)
}

/// Returns true if a checksum field holds the sum of the pseudo header alone, without its
/// complement. `length` is that of header and payload.
#[inline(always)]
pub const fn is_sum_of_pseudo_header(
    field: [u8; 2],
    source: &Addr,
    destination: &Addr,
    proto: u8,
    length: u32,
) -> bool {
    let sum = sum_of_pseudo_header(source, destination, proto, length);
    // Zero has two forms.
    fold(sum) % 0xffff == u16::from_ne_bytes(field) % 0xffff
}

#[inline(always)]
const fn sum_of_words([a, b, c, d]: [u32; 4]) -> i64 {
    a as i64 + b as i64 + c as i64 + d as i64
}

/// Returns a sum of less than 2^31 words as one word. The sum may be negative.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is added to the lower one")]
#[expect(clippy::cast_sign_loss, reason = "the sign is in the upper half")]
pub const fn fold_words(sum: i64) -> u32 {
    // 2^32 is 1 in ones' complement. After the first addition, the upper half is -1, 0 or 1.
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    (sum as u32).wrapping_add((sum >> 32) as u32)
}

/// Ones' complement addition of two sums.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is added again")]
pub const fn add(a: u32, b: u32) -> u32 {
    let sum = a as u64 + b as u64;
    (sum as u32).wrapping_add((sum >> 32) as u32)
}

/// Returns a sum as one word of two bytes.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "after two folds the sum fits 16 bits")]
pub const fn fold(sum: u32) -> u16 {
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
        fn checksum_is_correct_after_addresses_and_ports_changed(
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
            let expected = packet(new, new_port);
            // Zero has two forms in ones' complement. A sum of words that are not all zero never
            // has the second form.
            prop_assert!(fixed == expected || (fixed ^ expected) == 0xffff && (fixed == 0 || expected == 0));
        }
    }

    proptest! {
        #[test]
        fn sum_of_a_pseudo_header_is_told_from_a_checksum(
            is_v4: bool, source: [u8; 16], destination: [u8; 16], proto: u8, length: u16, other in 1..0xffff_u16,
        ) {
            let [source, destination] = [source, destination].map(|octets| {
                let [a, b, c, d, ..] = octets;
                if is_v4 { Addr::from_v4([a, b, c, d]) } else { Addr { octets } }
            });
            let bytes = |addr: Addr| if is_v4 { addr.octets[12..].to_vec() } else { addr.octets.to_vec() };
            let header = [bytes(source), bytes(destination), [0, proto].to_vec(), length.to_be_bytes().to_vec()];
            let sum = !checksum(&header.concat());
            let is_sum = |field: u16| {
                is_sum_of_pseudo_header(field.to_be_bytes(), &source, &destination, proto, length.into())
            };
            prop_assert!(is_sum(sum));
            let different = fold(u32::from(sum) + u32::from(other));
            prop_assert!(!is_sum(different));
        }
    }

    #[test]
    fn sums_with_many_carries_have_the_right_difference() {
        const MAX: i64 = 0xffff_ffff;
        let sums: [i64; 9] = [0, 1, 2, MAX - 1, MAX, MAX + 1, 2 * MAX, 4 * MAX - 1, 4 * MAX];
        for old in sums {
            for new in sums {
                let difference = i64::from(Difference::of_sums(old, new).wsum());
                // Both are equal in ones' complement.
                assert_eq!((old + difference) % MAX, new % MAX, "from {old:#x} to {new:#x}");
                assert!(old != new || difference == 0, "{old:#x}");
            }
        }
    }

    #[test]
    fn equal_addresses_and_ports_make_no_difference() {
        let addr = Addr::from_v4([10, 0, 0, 1]);
        assert!(Difference::of_addresses(&addr, &addr).and(Difference::of_ports(80, 80)).is_zero());
    }
}
