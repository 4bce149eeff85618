//! The hash in the names of chains and sets, as kube-proxy computes it: base32 (RFC 4648) of a
//! SHA-256.

use std::array;

use ring::digest::{SHA256, digest};

const DIGITS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

/// Returns the first `N` base32 digits of a text's SHA-256. Each digit encodes 5 bits; `N` is at
/// most 25.
pub(super) fn base32<const N: usize>(text: &str) -> [u8; N] {
    let hash = digest(&SHA256, text.as_bytes());
    let bits = hash.as_ref().iter().take(16).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
    array::from_fn(|index| DIGITS[(bits >> (123 - 5 * index)) as usize & 31])
}
