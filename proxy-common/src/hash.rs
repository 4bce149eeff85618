//! The hash of an address and port. It has no secret, and is the same on every node and in every
//! version.

/// The factors of the hash function: odd numbers with well mixed bits (Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators", 2014).
const FACTORS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// Returns a hash of two words of addresses, and of both ports in one word. It is worse than
/// [`of_address`], and takes less time. The low bits are mixed least.
#[inline(always)]
pub const fn of_words([source, destination]: [u32; 2], ports: u32) -> u64 {
    let low = source ^ ports.rotate_left(16);
    let high = destination ^ ports;
    ((high as u64) << 32 | low as u64).wrapping_mul(FACTORS[0])
}

/// Returns the place of a hash among so many, a power of two.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the highest bits are few")]
pub const fn place(hash: u64, places: usize) -> u32 {
    // The low bits are mixed least.
    (hash >> (u64::BITS - places.trailing_zeros())) as u32
}

/// Returns the hash of the words of an address, and a port in host byte order. The low bits are
/// mixed least.
#[inline(always)]
pub const fn of_address([a, b, c, d]: [u32; 4], port: u16) -> u64 {
    let high = (a as u64) << 32 | b as u64;
    let low = (c as u64) << 32 | d as u64;
    // Not added to `low`, where ports and IPv4 addresses would add up to the same sums.
    let mixed =
        high.wrapping_add((port as u64) << 17).wrapping_mul(FACTORS[0]) ^ low.wrapping_mul(FACTORS[1]);
    (mixed ^ mixed >> 29).wrapping_mul(FACTORS[2])
}
