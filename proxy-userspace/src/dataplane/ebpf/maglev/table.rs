//! Fills a Maglev table, from nothing but the endpoints and their weights.

use std::num::NonZeroU32;

use proxy_common::{
    hash,
    layout::{Endpoint, MaglevPage},
    maglev::TableSize,
};

/// An endpoint that a table can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The slot of its list, which differs between nodes.
    pub(super) slot: u16,
    /// The endpoint.
    pub(super) endpoint: Endpoint,
    /// Its share of the entries, compared with the weights of the others.
    pub(super) weight: NonZeroU32,
}

/// Makes the first word of an address differ, for a second hash of the same endpoint.
const SECOND: u32 = 0x5bd1_e995;

/// The way of an endpoint through the table: it starts at an entry and goes on by steps.
struct Walk {
    slot: u16,
    weight: u32,
    /// Weight that was not enough for a turn yet.
    saved: u64,
    at: u32,
    step: u32,
}

impl Walk {
    fn new(candidate: &Candidate, entries: u32) -> Self {
        let Candidate { slot, endpoint, weight } = candidate;
        let [a, b, c, d] = endpoint.addr.words();
        let below = |limit: u32, words| {
            let high = hash::of_address(words, endpoint.port) >> 32;
            u32::try_from((high * u64::from(limit)) >> 32).unwrap_or(0)
        };
        Self {
            slot: *slot,
            weight: weight.get(),
            saved: 0,
            at: below(entries, [a, b, c, d]),
            step: 1 + below(entries - 1, [a ^ SECOND, b, c, d]),
        }
    }

    /// Goes on until an entry is free. There is one, and a step that a prime has no factor in
    /// common with reaches all entries.
    fn next_free(&mut self, table: &[u16]) -> usize {
        loop {
            let at = self.at as usize;
            self.at += self.step;
            if self.at as usize >= table.len() {
                self.at -= u32::try_from(table.len()).unwrap_or(0);
            }
            if table.get(at) == Some(&MaglevPage::NO_SLOT) {
                return at;
            }
        }
    }

    /// Returns true if the endpoint takes an entry in this round. That with the largest weight
    /// takes one in each.
    fn has_turn(&mut self, largest: u32) -> bool {
        self.saved += u64::from(self.weight);
        let has_turn = self.saved >= u64::from(largest);
        if has_turn {
            self.saved -= u64::from(largest);
        }
        has_turn
    }
}

/// Returns the slot for each entry of a table. The order of the candidates does not matter. Without
/// candidates, no entry has a slot.
///
/// The endpoints take turns in their order. Each takes the next free entry on its own way through
/// the table. So if an endpoint goes, nearly all entries of the others stay.
pub(super) fn fill(candidates: &[Candidate], size: TableSize) -> Vec<u16> {
    let mut table = vec![MaglevPage::NO_SLOT; size.entries() as usize];
    let mut sorted: Vec<&Candidate> = candidates.iter().collect();
    sorted.sort_unstable_by_key(|candidate| candidate.endpoint);
    let mut walks: Vec<Walk> =
        sorted.into_iter().map(|candidate| Walk::new(candidate, size.entries())).collect();
    let Some(largest) = walks.iter().map(|walk| walk.weight).max() else { return table };
    let mut free = table.len();
    loop {
        for walk in &mut walks {
            if walk.has_turn(largest) {
                let at = walk.next_free(&table);
                table[at] = walk.slot;
                free -= 1;
            }
            if free == 0 {
                return table;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::Addr;

    use super::*;

    fn candidate(slot: u16, weight: u32) -> Candidate {
        let [high, low] = slot.to_be_bytes();
        let endpoint = Endpoint::new(Addr::from_v4([10, 244, high, low]), 8080);
        Candidate { slot, endpoint, weight: NonZeroU32::new(weight).expect("not zero") }
    }

    fn candidates(count: u16) -> Vec<Candidate> {
        (0..count).map(|slot| candidate(slot, 1)).collect()
    }

    fn size(entries: u32) -> TableSize {
        TableSize::of_entries(entries).expect("a size")
    }

    fn counts(table: &[u16], endpoints: u16) -> Vec<usize> {
        let mut counts = vec![0; endpoints.into()];
        for slot in table {
            counts[usize::from(*slot)] += 1;
        }
        counts
    }

    #[test]
    fn every_entry_has_an_endpoint_and_all_endpoints_have_equally_many() {
        for entries in TableSize::ENTRIES {
            for endpoints in [1, 2, 3, 10, 100] {
                let counts = counts(&fill(&candidates(endpoints), size(entries)), endpoints);
                let (least, most) = (counts.iter().min(), counts.iter().max());
                assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "{counts:?}");
            }
        }
    }

    #[test]
    fn table_does_not_depend_on_the_slots_of_a_node() {
        let here = candidates(50);
        let there: Vec<Candidate> = here
            .iter()
            .map(|candidate| Candidate { slot: (candidate.slot * 7 + 3) % 50, ..*candidate })
            .rev()
            .collect();
        let endpoints = |candidates: &[Candidate]| -> Vec<Option<Endpoint>> {
            let of_slot =
                |slot| candidates.iter().find(|other| other.slot == slot).map(|found| found.endpoint);
            fill(candidates, size(4_093)).into_iter().map(of_slot).collect()
        };
        assert_eq!(endpoints(&here), endpoints(&there));
    }

    /// Returns the share of all entries that get another endpoint although theirs stays, when the
    /// first `gone` of `endpoints` go at once.
    fn share_that_moves(endpoints: u16, gone: u16, size: TableSize) -> f64 {
        let all = candidates(endpoints);
        let before = fill(&all, size);
        let after = fill(&all[gone.into()..], size);
        let moved = before.iter().zip(&after).filter(|(before, after)| **before >= gone && before != after);
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let share = moved.count() as f64 / before.len() as f64;
        println!("{gone} of {endpoints} endpoints, {} entries: {share:.4}", size.entries());
        share
    }

    /// docs/maglev.md has the numbers that this prints.
    #[test]
    fn few_entries_change_if_an_endpoint_goes() {
        for (endpoints, share) in [(10, 0.005), (100, 0.013), (1_000, 0.006)] {
            let size = TableSize::default().for_endpoints(endpoints.into()).expect("some endpoints");
            assert!(share_that_moves(endpoints, 1, size) < share);
        }
    }

    /// Section 5.3 of the paper: 1,000 backends of which some fail at once, and tables of 65,537
    /// entries and of ten times as many. These are the nearest sizes here. docs/maglev.md has the
    /// numbers that this prints.
    #[test]
    fn larger_tables_change_less_if_endpoints_go_at_once() {
        for gone in [1, 10, 50] {
            let [small, large] =
                [65_521, 262_139].map(|entries| share_that_moves(1_000, gone, size(entries)));
            assert!(large < small && small < 0.05);
        }
    }

    #[test]
    fn shares_follow_the_weights_within_two_percent() {
        let weights = [1, 2, 3, 10, 50, 100, 100, 7, 99, 1_000];
        let all: Vec<Candidate> = (0..).zip(weights).map(|(slot, weight)| candidate(slot, weight)).collect();
        let table = fill(&all, size(65_521));
        let total: u32 = weights.iter().sum();
        for (count, weight) in counts(&table, 10).into_iter().zip(weights) {
            let expected = f64::from(weight) / f64::from(total) * 65_521.0;
            let count = f64::from(u32::try_from(count).expect("few"));
            assert!(
                (count - expected).abs() <= expected * 0.02 + 1.0,
                "weight {weight}: {count} of {expected}"
            );
        }
    }

    #[test]
    fn table_without_endpoints_is_empty() {
        assert!(fill(&[], size(251)).iter().all(|slot| *slot == MaglevPage::NO_SLOT));
    }
}
