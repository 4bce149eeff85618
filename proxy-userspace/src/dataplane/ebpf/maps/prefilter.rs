//! The prefilter as userspace writes it: an item is inserted before an entry needs it, and its bits
//! are cleared when no entry does any more.
//!
//! Clearing a bit takes two steps. First, no Service and no endpoint of the maps has it. Then a
//! scan through all flows and sockets that programs recorded begins, and finds no entry that needs
//! it. What programs record between the two steps belongs to Services and endpoints in the maps, or
//! to flows and sockets that were there before.
//!
//! Only the thread that applies plans changes the size, when it inserts. The copies that doubling
//! leaves are cleared by the same two steps. They begin after the change, so no program that runs
//! then has the old mask.

use proxy_common::prefilter::{PrefilterItem, sized::SizedPrefilter};

use super::{super::plan::state::State, usage::MapUsage};
use crate::{dataplane::PrefilterFill, kernel::bpf::MappedWords};

/// Some bits of a prefilter with a number of words, which is a power of two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefilterBits(Vec<u64>);

impl PrefilterBits {
    pub(crate) fn new(words: u32) -> Self {
        Self(vec![0; words.next_power_of_two() as usize])
    }

    pub(crate) fn insert(&mut self, item: PrefilterItem) {
        if let Some(word) = self.word_of(item) {
            *word |= item.bits();
        }
    }

    fn remove(&mut self, item: PrefilterItem) {
        if let Some(word) = self.word_of(item) {
            *word &= !item.bits();
        }
    }

    fn word_of(&mut self, item: PrefilterItem) -> Option<&mut u64> {
        let mask = u32::try_from(self.0.len().saturating_sub(1)).unwrap_or(u32::MAX);
        self.0.get_mut(item.index(mask) as usize)
    }

    /// Removes the bits that others have. If the prefilter changed its size between the two, these
    /// are the bits that the items of the others may have in this size.
    fn remove_all(&mut self, others: &Self) {
        let words = self.0.len();
        for (index, bits) in self.0.iter_mut().enumerate() {
            let first = index & others.0.len().saturating_sub(1);
            let others = others.0.iter().skip(first).step_by(words);
            *bits &= !others.fold(0, |all, bits| all | bits);
        }
    }

    /// Returns the bits of the entries of the maps.
    pub(crate) fn of_state(state: &State, words: u32) -> Self {
        let mut bits = Self::new(words);
        state.prefilter_items().for_each(|item| bits.insert(item));
        bits
    }

    /// Frees the memory if there are no bits, which is so most of the time.
    pub(crate) fn shrunk(self) -> Self {
        if self.words().next().is_none() { Self(Vec::new()) } else { self }
    }

    fn words(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..).zip(self.0.iter().copied()).filter(|(_, bits)| *bits != 0)
    }
}

/// The prefilter, shared with the programs.
#[derive(Debug)]
pub(crate) struct Prefilter {
    filter: SizedPrefilter<MappedWords>,
    stale: Option<StaleBits>,
    /// No bit was stale, and nothing was inserted since.
    is_clean: bool,
}

/// Bits that no Service and no endpoint has had since the last observation.
#[derive(Debug)]
struct StaleBits {
    bits: PrefilterBits,
    /// The number of scans that had begun at that time.
    begun: u64,
}

impl Prefilter {
    /// Takes over a prefilter, which programs may be using.
    pub(crate) fn new(memory: MappedWords) -> Self {
        Self { filter: SizedPrefilter::open(memory), stale: None, is_clean: false }
    }

    /// Returns the number of words in use.
    pub(crate) const fn words(&self) -> u32 {
        self.filter.words()
    }

    /// Inserts an item.
    pub(crate) fn insert(&mut self, item: PrefilterItem) {
        self.change(|filter| filter.insert(item));
        if let Some(stale) = &mut self.stale {
            stale.bits.remove(item);
        }
    }

    /// Makes room for so many more items.
    pub(crate) fn reserve(&mut self, items: usize) {
        self.change(|filter| filter.reserve(items));
    }

    /// Makes a change that may double the prefilter. What was stale is then in other words.
    fn change(&mut self, change: impl FnOnce(&mut SizedPrefilter<MappedWords>)) {
        let before = self.words();
        self.is_clean = false;
        change(&mut self.filter);
        if self.words() != before {
            tracing::debug!(before, words = self.words(), "the prefilter has more words");
            self.stale = None;
        }
    }

    /// Clears the stale bits of the last call if a scan since then found no entry that needs them,
    /// and finds new stale bits. `wanted` are the bits that the maps need. Must not be called while
    /// programs with other maps are attached: those maps may hold other Services.
    pub(crate) fn clear_stale(&mut self, wanted: &PrefilterBits, usage: &MapUsage) {
        self.is_clean = false;
        if let Some(mut stale) = self.stale.take() {
            stale.bits.remove_all(wanted);
            let is_scanned = usage.needed_after(stale.begun, |needed| stale.bits.remove_all(needed));
            if !is_scanned {
                self.stale = Some(stale);
                return;
            }
            self.clear(&stale.bits);
        }
        let mut bits = PrefilterBits((0..self.words()).map(|index| self.filter.word(index)).collect());
        bits.remove_all(wanted);
        let bits = bits.shrunk();
        self.is_clean = bits.words().next().is_none();
        self.stale = Some(StaleBits { bits, begun: usage.begun() });
    }

    /// Returns true if no bit was stale at the last look, and nothing was inserted since. Then no
    /// bit becomes stale before an entry is removed from the maps.
    pub(crate) const fn is_clean(&self) -> bool {
        self.is_clean
    }

    fn clear(&mut self, bits: &PrefilterBits) {
        let mut cleared = 0;
        for (index, bits) in bits.words() {
            self.filter.clear(index, bits);
            cleared += bits.count_ones();
        }
        self.filter.recount();
        if cleared > 0 {
            tracing::debug!(cleared, "cleared stale bits of the prefilter");
        }
    }

    /// Forgets which bits are stale, because programs with other maps are attached.
    pub(crate) fn keep_stale(&mut self) {
        (self.stale, self.is_clean) = (None, false);
    }

    /// Returns the size and the share of false positives.
    pub(crate) fn fill(&self) -> PrefilterFill {
        let bytes = u64::from(self.words()) * 8;
        PrefilterFill { bytes, false_positive_ratio: self.filter.false_positive_ratio() }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        Addr,
        layout::{Endpoint, List, MemberKey},
        prefilter::PrefilterTable,
    };

    use super::*;
    use crate::dataplane::ebpf::{MapEntry, Step};

    fn items() -> [PrefilterItem; 3] {
        [80, 443, 8080].map(|port| PrefilterItem::of_service(&Addr::from_v4([10, 96, 0, 1]), port))
    }

    #[test]
    fn item_of_another_size_keeps_its_bits() {
        for (own, of_others) in [(512, 4096), (4096, 512), (512, 512), (512, 1)] {
            let [mut bits, mut others] = [PrefilterBits::new(own), PrefilterBits::new(of_others)];
            bits.insert(items()[0]);
            others.insert(items()[0]);
            bits.remove_all(&others);
            assert_eq!(bits, PrefilterBits::new(own), "{own} words without the bits of {of_others}");
            let mut shrunk = bits.clone().shrunk();
            shrunk.remove_all(&others);
            bits.remove_all(&shrunk);
            shrunk.remove(items()[0]);
            assert_eq!(shrunk.words().chain(bits.words()).count(), 0);
        }
    }

    #[test]
    fn bits_are_inserted_and_removed() {
        let all = items();
        let mut bits = PrefilterBits::new(512);
        for item in all {
            bits.insert(item);
        }
        assert_eq!(bits.words().map(|(_, bits)| bits.count_ones()).sum::<u32>(), 9);
        let mut others = PrefilterBits::new(512);
        others.insert(all[0]);
        bits.remove_all(&others);
        bits.remove(all[1]);
        let mut last = PrefilterBits::new(512);
        last.insert(all[2]);
        assert_eq!(bits, last);
    }

    /// Returns a prefilter in a file, which is no map: only the memory matters here.
    fn prefilter() -> Prefilter {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(u64::from(PrefilterTable::LENGTH) * 8).expect("it grows");
        Prefilter::new(MappedWords::new(file, PrefilterTable::LENGTH).expect("mapped"))
    }

    #[test]
    fn an_item_that_no_map_has_is_looked_for_whoever_inserted_it() {
        let (mut prefilter, usage) = (prefilter(), MapUsage::default());
        let nothing = PrefilterBits::new(prefilter.words());
        prefilter.clear_stale(&nothing, &usage);
        let scan = usage.begin();
        usage.end(scan, nothing.clone(), Vec::new());
        prefilter.clear_stale(&nothing, &usage);
        assert!(prefilter.is_clean());
        prefilter.insert(items()[0]);
        assert!(!prefilter.is_clean(), "nothing says that a map gets the item");
    }

    #[test]
    fn terminating_endpoint_keeps_its_bit_while_it_serves() {
        let endpoint = Endpoint::new(Addr::from_v4([10, 244, 0, 5]), 53);
        let member = MemberKey { service: 1, list: List::Serving.number(), endpoint };
        let mut state = State::default();
        state.record(&Step::Put(MapEntry::Member(member)));
        let mut needed = PrefilterBits::new(512);
        needed.insert(PrefilterItem::of_endpoint(&endpoint.addr, endpoint.port));
        assert_eq!(PrefilterBits::of_state(&state, 512), needed);
        state.record(&Step::Remove(MapEntry::Member(member)));
        assert_eq!(PrefilterBits::of_state(&state, 512), PrefilterBits::new(512));
    }
}
