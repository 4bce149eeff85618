//! The prefilter as userspace writes it: a bit is set before an entry needs it, and cleared when
//! none does any more.
//!
//! Clearing a bit takes two steps. First, no Service and no endpoint of the maps has it. Then a
//! scan through all flows and sockets that programs recorded begins, and finds no entry that needs
//! it. What programs record between the two steps belongs to Services and endpoints in the maps, or
//! to flows and sockets that were there before.

use proxy_common::prefilter::{PrefilterBit, WORDS};

use super::{super::plan::state::State, usage::MapUsage};
use crate::kernel::bpf::MappedWords;

/// Some bits of the prefilter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefilterBits(Vec<u64>);

impl Default for PrefilterBits {
    fn default() -> Self {
        Self(vec![0; WORDS as usize])
    }
}

impl PrefilterBits {
    pub(crate) fn insert(&mut self, PrefilterBit { word, mask }: PrefilterBit) {
        if let Some(bits) = self.0.get_mut(word as usize) {
            *bits |= mask;
        }
    }

    fn remove(&mut self, PrefilterBit { word, mask }: PrefilterBit) {
        if let Some(bits) = self.0.get_mut(word as usize) {
            *bits &= !mask;
        }
    }

    fn remove_all(&mut self, others: &Self) {
        for (bits, others) in self.0.iter_mut().zip(&others.0) {
            *bits &= !others;
        }
    }

    pub(crate) fn of_state(state: &State) -> Self {
        let mut bits = Self::default();
        state.prefilter_bits().for_each(|bit| bits.insert(bit));
        bits
    }

    fn words(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..WORDS).zip(self.0.iter().copied()).filter(|(_, mask)| *mask != 0)
    }
}

/// The prefilter, shared with the programs.
#[derive(Debug)]
pub(crate) struct Prefilter {
    words: MappedWords,
    stale: Option<StaleBits>,
}

/// Bits that no Service and no endpoint has had since the last observation.
#[derive(Debug)]
struct StaleBits {
    bits: PrefilterBits,
    /// The number of scans that had begun at that time.
    begun: u64,
}

impl Prefilter {
    pub(crate) const fn new(words: MappedWords) -> Self {
        Self { words, stale: None }
    }

    /// Sets a bit.
    pub(crate) fn insert(&mut self, bit: PrefilterBit) {
        self.words.set(bit.word, bit.mask);
        if let Some(stale) = &mut self.stale {
            stale.bits.remove(bit);
        }
    }

    /// Clears the stale bits of the last call if a scan since then found no entry that needs them,
    /// and finds new stale bits. `wanted` are the bits that the maps need. Must not be called while
    /// programs with other maps are attached: those maps may hold other Services.
    pub(crate) fn clear_stale(&mut self, wanted: &PrefilterBits, usage: &MapUsage) {
        if let Some(mut stale) = self.stale.take() {
            stale.bits.remove_all(wanted);
            let is_scanned = usage.needed_after(stale.begun, |needed| stale.bits.remove_all(needed));
            if !is_scanned {
                self.stale = Some(stale);
                return;
            }
            let mut cleared = 0;
            for (word, mask) in stale.bits.words() {
                self.words.clear(word, mask);
                cleared += mask.count_ones();
            }
            if cleared > 0 {
                tracing::debug!(cleared, "cleared stale bits of the prefilter");
            }
        }
        let mut bits = PrefilterBits((0..WORDS).map(|word| self.words.get(word)).collect());
        bits.remove_all(wanted);
        self.stale = Some(StaleBits { bits, begun: usage.begun() });
    }

    /// Forgets which bits are stale, because programs with other maps are attached.
    pub(crate) fn keep_stale(&mut self) {
        self.stale = None;
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        Addr,
        layout::{Endpoint, List, MemberKey},
    };

    use super::*;
    use crate::dataplane::ebpf::{MapEntry, Step};

    #[test]
    fn bits_are_inserted_and_removed() {
        let all = [80, 443, 8080].map(|port| PrefilterBit::of_service(&Addr::from_v4([10, 96, 0, 1]), port));
        let mut bits = PrefilterBits::default();
        for bit in all {
            bits.insert(bit);
        }
        assert_eq!(bits.words().map(|(_, mask)| mask.count_ones()).sum::<u32>(), 3);
        let mut others = PrefilterBits::default();
        others.insert(all[0]);
        bits.remove_all(&others);
        bits.remove(all[1]);
        let mut last = PrefilterBits::default();
        last.insert(all[2]);
        assert_eq!(bits, last);
    }

    #[test]
    fn terminating_endpoint_keeps_its_bit_while_it_serves() {
        let endpoint = Endpoint::new(Addr::from_v4([10, 244, 0, 5]), 53);
        let member = MemberKey { service: 1, list: List::Serving.number(), endpoint };
        let mut state = State::default();
        state.record(&Step::Put(MapEntry::Member(member)));
        let mut needed = PrefilterBits::default();
        needed.insert(PrefilterBit::of_endpoint(&endpoint.addr, endpoint.port));
        assert_eq!(PrefilterBits::of_state(&state), needed);
        state.record(&Step::Remove(MapEntry::Member(member)));
        assert_eq!(PrefilterBits::of_state(&state), PrefilterBits::default());
    }
}
