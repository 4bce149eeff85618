//! A prefilter whose size follows its content.
//!
//! The size changes while programs read. A program reads the mask once and then one word, so it
//! must find each item by the new mask from the moment of the change, and by the old mask until it
//! ends:
//!
//! - To double, all words are copied behind themselves, and then the mask is written. The word of
//!   an item by the new mask is its old word or the copy. The old words stay, so a program with the
//!   old mask finds it too. Nothing has to know which items there are: those of flows and sockets
//!   are copied as well. The copies that no item needs are cleared as stale bits are, much later.
//! - To halve, the upper half is added to the lower half, and then the mask is written. The upper
//!   half stays as it is until the prefilter doubles again, and is then replaced by at least the
//!   same bits.
//!
//! A program with the old mask may miss an item that was inserted after the change, as a program
//! that read its word just before. The item's entry did not exist when the packet came.

use super::{BITS_PER_ITEM, MAX_WORDS, MIN_WORDS, PrefilterItem};

/// If more than one bit in so many is set, the prefilter doubles. Three in eight hundred other
/// items are then false positives.
const BITS_PER_SET_BIT: u64 = 8;
/// If at most one bit in so many is set, an opened prefilter is halved. It has then room for twice
/// its items before it doubles.
const BITS_PER_SET_BIT_IF_LARGE: u64 = 32;

/// The memory of a [`PrefilterTable`](super::PrefilterTable). Programs read it at the same time, so
/// each operation is atomic. An index outside the memory reads 0 and writes nothing.
pub trait PrefilterMemory {
    /// Returns the mask.
    fn mask(&self) -> u64;
    /// Writes the mask, after all words that were written before.
    fn set_mask(&self, mask: u64);
    /// Returns a word.
    fn word(&self, index: u32) -> u64;
    /// Replaces a word.
    fn set_word(&self, index: u32, word: u64);
    /// Sets bits of a word.
    fn set_bits(&self, index: u32, bits: u64);
    /// Clears bits of a word.
    fn clear_bits(&self, index: u32, bits: u64);
}

/// Returns the number of words in use.
pub fn words_in_use(memory: &impl PrefilterMemory) -> u32 {
    // Other numbers than powers of two are never written.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_WORDS")]
    let last = (memory.mask() & u64::from(MAX_WORDS - 1)) as u32;
    (last + 1).next_power_of_two()
}

/// Inserts an item into a prefilter without changing its size, while nothing else does either.
pub fn insert(memory: &impl PrefilterMemory, item: PrefilterItem) {
    memory.set_bits(item.index(words_in_use(memory) - 1), item.bits());
}

/// A prefilter with the only writer of its size.
#[derive(Debug)]
pub struct SizedPrefilter<M> {
    memory: M,
    /// The words in use.
    words: u32,
    /// The bits that would be set without the copies of the last doublings.
    load: u64,
    /// The sum, over the words in use, of the cubes of their numbers of bits.
    cubes: u64,
}

impl<M: PrefilterMemory> SizedPrefilter<M> {
    /// Opens a prefilter that programs may be reading. It becomes smaller if it is too large for
    /// its bits.
    pub fn open(memory: M) -> Self {
        let mut prefilter = Self { words: words_in_use(&memory), memory, load: 0, cubes: 0 };
        prefilter.recount();
        while prefilter.words > MIN_WORDS
            && prefilter.load * BITS_PER_SET_BIT_IF_LARGE <= u64::from(prefilter.words) * 64
        {
            prefilter.halve();
        }
        while prefilter.words < MIN_WORDS {
            prefilter.double();
        }
        prefilter
    }

    /// Returns the number of words in use, a power of two.
    pub const fn words(&self) -> u32 {
        self.words
    }

    /// Returns a word.
    pub fn word(&self, index: u32) -> u64 {
        self.memory.word(index)
    }

    /// Inserts an item. Doubles the prefilter if it has too many bits.
    pub fn insert(&mut self, item: PrefilterItem) {
        let index = item.index(self.words - 1);
        let before = self.memory.word(index);
        if before & item.bits() != item.bits() {
            let after = before | item.bits();
            self.memory.set_bits(index, item.bits());
            self.load += u64::from(after.count_ones() - before.count_ones());
            self.cubes += cube(after) - cube(before);
            self.reserve(0);
        }
    }

    /// Makes room for so many more items. Without this, many new items leave copies behind each
    /// time the prefilter doubles.
    pub fn reserve(&mut self, items: usize) {
        let load = self.load.saturating_add((items as u64).saturating_mul(u64::from(BITS_PER_ITEM)));
        while self.words < MAX_WORDS && load.saturating_mul(BITS_PER_SET_BIT) > u64::from(self.words) * 64 {
            self.double();
        }
    }

    /// Clears bits of a word, and neither the load nor the ratio: [`Self::recount`] does that.
    pub fn clear(&self, index: u32, bits: u64) {
        self.memory.clear_bits(index, bits);
    }

    /// Counts the bits again, after copies that nothing needs were cleared.
    pub fn recount(&mut self) {
        let words = (0..self.words).map(|index| self.memory.word(index));
        (self.load, self.cubes) = words
            .fold((0, 0), |(load, cubes), word| (load + u64::from(word.count_ones()), cubes + cube(word)));
    }

    /// Returns the share of other items that pass. Each bit of an item is set with the share of
    /// bits that are set in its word.
    pub fn false_positive_ratio(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "both are below 2^36")]
        let ratio = self.cubes as f64 / (u64::from(self.words) * cube(u64::MAX)) as f64;
        ratio
    }

    fn double(&mut self) {
        for index in 0..self.words {
            self.memory.set_word(self.words + index, self.memory.word(index));
        }
        self.cubes *= 2;
        self.set_words(self.words * 2);
    }

    fn halve(&mut self) {
        let half = self.words / 2;
        for index in 0..half {
            self.memory.set_bits(index, self.memory.word(half + index));
        }
        self.set_words(half);
        self.recount();
    }

    fn set_words(&mut self, words: u32) {
        self.words = words;
        self.memory.set_mask(u64::from(words - 1));
    }
}

/// Returns in how many of 64³ cases three random bits are set in a word.
fn cube(word: u64) -> u64 {
    u64::from(word.count_ones()).pow(BITS_PER_ITEM)
}

#[cfg(test)]
mod tests;
