//! The bitmap of what packets are looked at for: bits are set before anything needs them, and cleared when nothing does any more.
//!
//! A bit is cleared if no Service and no endpoint of the maps has had it from one look on, and nothing that programs noted of flows
//! and sockets, in a look through all of that which began later, needs it. What is noted anew between the two is so for
//! Services and endpoints that are in the maps, or from what was there before.

use proxy_common::prefilter::{PrefilterBit, WORDS};

use super::{super::plan::state::State, usage::Noted};
use crate::kernel::bpf::MappedWords;

/// Some bits of the bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bits(Vec<u64>);

impl Default for Bits {
    fn default() -> Self {
        Self(vec![0; WORDS as usize])
    }
}

impl Bits {
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

    fn of_state(state: &State) -> Self {
        let mut bits = Self::default();
        state.prefilter_bits().for_each(|place| bits.insert(place));
        bits
    }

    fn words(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..WORDS).zip(self.0.iter().copied()).filter(|(_, mask)| *mask != 0)
    }
}

/// The bitmap, shared with the programs.
#[derive(Debug)]
pub(crate) struct Prefilter {
    words: MappedWords,
    stale: Option<Stale>,
}

/// Bits that nothing in the maps has had since they were looked at.
#[derive(Debug)]
struct Stale {
    bits: Bits,
    /// How many looks at what programs noted had begun.
    begun: u64,
}

impl Prefilter {
    pub(crate) const fn new(words: MappedWords) -> Self {
        Self { words, stale: None }
    }

    /// Packets of an address and port are looked at from now on.
    pub(crate) fn insert(&mut self, place: PrefilterBit) {
        self.words.set(place.word, place.mask);
        if let Some(stale) = &mut self.stale {
            stale.bits.remove(place);
        }
    }

    /// Clears what has been of no use since the last time, and sees what is now. Not to be called while programs run that use
    /// other maps, which may hold other Services.
    pub(crate) fn clear_stale(&mut self, state: &State, noted: &Noted) {
        let wanted = Bits::of_state(state);
        if let Some(mut stale) = self.stale.take() {
            stale.bits.remove_all(&wanted);
            let is_seen = noted.needed_after(stale.begun, |needed| stale.bits.remove_all(needed));
            if !is_seen {
                self.stale = Some(stale);
                return;
            }
            let mut cleared = 0;
            for (word, mask) in stale.bits.words() {
                self.words.clear(word, mask);
                cleared += mask.count_ones();
            }
            if cleared > 0 {
                tracing::debug!(cleared, "bits of addresses that are no Service's any more");
            }
        }
        let mut bits = Bits((0..WORDS).map(|word| self.words.get(word)).collect());
        bits.remove_all(&wanted);
        self.stale = Some(Stale { bits, begun: noted.begun() });
    }

    /// Programs run that use other maps.
    pub(crate) fn keep_all(&mut self) {
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
    fn bits_are_inserted_and_removed_one_by_one_and_all_together() {
        let places =
            [80, 443, 8080].map(|port| PrefilterBit::of_service(&Addr::from_v4([10, 96, 0, 1]), port));
        let mut bits = Bits::default();
        for place in places {
            bits.insert(place);
        }
        assert_eq!(bits.words().map(|(_, mask)| mask.count_ones()).sum::<u32>(), 3);
        let mut others = Bits::default();
        others.insert(places[0]);
        bits.remove_all(&others);
        bits.remove(places[1]);
        let mut last = Bits::default();
        last.insert(places[2]);
        assert_eq!(bits, last);
    }
    #[test]
    fn an_endpoint_that_drains_keeps_its_bit_while_it_serves() {
        let endpoint = Endpoint::new(Addr::from_v4([10, 244, 0, 5]), 53);
        let member = MemberKey { service: 1, list: List::Serving.number(), endpoint };
        let mut state = State::default();
        state.record(&Step::Put(MapEntry::Member(member)));
        let mut needed = Bits::default();
        needed.insert(PrefilterBit::of_endpoint(&endpoint.addr, endpoint.port));
        assert_eq!(Bits::of_state(&state), needed);
        state.record(&Step::Remove(MapEntry::Member(member)));
        assert_eq!(Bits::of_state(&state), Bits::default());
    }
}
