//! A sum over entries of maps, which tells whether two sets of entries are the same.

use std::hash::{Hash, Hasher};

/// The sum of the hashes of entries, in any order. Two different sets have the same sum by accident
/// with a probability of about 2^-64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Digest {
    /// Adds an entry.
    pub(crate) fn add(&mut self, entry: &impl Hash) {
        self.0 = self.0.wrapping_add(hash(entry));
    }

    /// Removes an entry that was added.
    pub(crate) fn remove(&mut self, entry: &impl Hash) {
        self.0 = self.0.wrapping_sub(hash(entry));
    }
}

fn hash(entry: &impl Hash) -> u64 {
    let mut hasher = EntryHasher(0);
    entry.hash(&mut hasher);
    hasher.finish()
}

/// A hash function without a secret. It is several times faster than that of the standard library,
/// and each look hashes all entries.
struct EntryHasher(u64);

/// Odd numbers with well mixed bits (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
const FACTORS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

impl Hasher for EntryHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(FACTORS[0]);
        self.0 = mixed ^ mixed >> 29;
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.write_u64(word.into());
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        let mixed = (self.0 ^ self.0 >> 32).wrapping_mul(FACTORS[1]);
        mixed ^ mixed >> 29
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{super::step::MapEntry, *};

    #[test]
    fn similar_entries_have_different_hashes_in_any_order() {
        let links = (0..5_000).map(MapEntry::LocalLink);
        let hashes: HashSet<u64> = links.clone().map(|entry| hash(&entry)).collect();
        assert_eq!(hashes.len(), 5_000);
        let [mut forwards, mut backwards] = [Digest::default(); 2];
        links.clone().for_each(|entry| forwards.add(&entry));
        links.clone().rev().for_each(|entry| backwards.add(&entry));
        assert_eq!(forwards, backwards);
        links.for_each(|entry| forwards.remove(&entry));
        assert_eq!(forwards, Digest::default());
    }
}
