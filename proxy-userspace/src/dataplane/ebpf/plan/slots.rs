//! Arranges the endpoints of a list in slots, with as few changes as possible.
//!
//! Programs read the first slots of a list, as many as the frontend counts. So a slot below that
//! number always has an endpoint, and it is replaced by one map update. An endpoint that stays is
//! never moved before another slot has it, and the slots above the new number are removed last.

use proxy_common::layout::Endpoint;

/// Returns the slots to write so that the first slots have exactly the wanted endpoints. `held` are
/// the present slots, and `wanted` has no endpoint twice.
///
/// Endpoints that are wanted keep their slots. The others are replaced by endpoints that have no
/// slot yet, or whose slot is above the number of wanted ones.
pub(super) fn arrange(
    held: impl Iterator<Item = (u32, Endpoint)> + Clone,
    wanted: impl Iterator<Item = Endpoint> + Clone,
) -> Vec<(u32, Endpoint)> {
    // After a restart, nearly all lists are as they were.
    if held.clone().eq((0..).zip(wanted.clone())) {
        return Vec::new();
    }
    let mut wanted: Vec<Endpoint> = wanted.collect();
    wanted.sort_unstable();
    let mut is_kept = vec![false; wanted.len()];
    let mut has_slot = vec![false; wanted.len()];
    // Slots are filled in the order of the endpoints, and few change later.
    let mut next = 0;
    for (slot, endpoint) in held {
        let is_next = wanted.get(next) == Some(&endpoint);
        let Ok(at) = (if is_next { Ok(next) } else { wanted.binary_search(&endpoint) }) else { continue };
        next = at + 1;
        // An interrupted change may have left an endpoint in two slots.
        if let Some(is_kept) = is_kept.get_mut(slot as usize)
            && !has_slot[at]
        {
            (*is_kept, has_slot[at]) = (true, true);
        }
    }
    let free = (0..).zip(is_kept).filter_map(|(slot, is_kept)| (!is_kept).then_some(slot));
    let coming =
        wanted.iter().zip(has_slot).filter_map(|(endpoint, has_slot)| (!has_slot).then_some(*endpoint));
    free.zip(coming).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use proxy_common::Addr;

    use super::*;

    fn endpoint(number: u8) -> Endpoint {
        Endpoint::new(Addr::from_v4([10, 244, 0, number]), 8080)
    }

    fn arranged(held: &[u8], wanted: &[u8]) -> Vec<(u32, Endpoint)> {
        let wanted = wanted.iter().map(|number| endpoint(*number));
        arrange((0..).zip(held.iter().map(|number| endpoint(*number))), wanted)
    }

    #[test]
    fn one_endpoint_of_a_list_changes_one_slot() {
        assert_eq!(arranged(&[1, 2, 3], &[1, 2, 3]), []);
        assert_eq!(arranged(&[3, 1, 2], &[1, 2, 3]), [], "any order will do");
        assert_eq!(arranged(&[1, 2, 3], &[1, 2, 3, 4]), [(3, endpoint(4))]);
        assert_eq!(arranged(&[1, 2, 3], &[1, 3, 9]), [(1, endpoint(9))]);
        assert_eq!(arranged(&[1, 2, 3], &[1, 3]), [(1, endpoint(3))], "the last one moves");
        assert_eq!(arranged(&[1, 2, 3], &[1, 2]), [], "the last slot is only removed");
        assert_eq!(arranged(&[], &[1]), [(0, endpoint(1))]);
        assert_eq!(arranged(&[1], &[]), []);
    }

    #[test]
    fn endpoint_in_two_slots_keeps_the_first() {
        assert_eq!(arranged(&[1, 3, 3], &[1, 2, 3]), [(2, endpoint(2))]);
    }

    fn entries(slots: &BTreeMap<u32, Endpoint>) -> impl Iterator<Item = (u32, Endpoint)> + Clone {
        slots.iter().map(|(slot, endpoint)| (*slot, *endpoint))
    }

    proptest! {
        #[test]
        fn first_slots_have_the_wanted_endpoints(
            held in prop::collection::btree_map(0..12_u32, 0..12_u8, 0..12),
            wanted in prop::collection::btree_set(0..12_u8, 0..12),
        ) {
            let held: BTreeMap<u32, Endpoint> = held.into_iter().map(|(slot, number)| (slot, endpoint(number))).collect();
            let wanted: Vec<Endpoint> = wanted.into_iter().map(endpoint).collect();
            let mut slots = held.clone();
            slots.extend(arrange(entries(&held), wanted.iter().copied()));
            let count = u32::try_from(wanted.len()).expect("few");
            let first: BTreeSet<Endpoint> = slots.range(..count).map(|(_, endpoint)| *endpoint).collect();
            prop_assert!(slots.range(..count).count() == wanted.len() && first.into_iter().eq(wanted.iter().copied()));
            prop_assert_eq!(arrange(entries(&slots), wanted.iter().copied()), [], "nothing is left to write");
        }
    }
}
