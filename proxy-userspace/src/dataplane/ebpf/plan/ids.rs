//! Which identifier a new service port gets: one with a slot of its own in `service_counts` while there are any, and never one
//! that was given a short while ago.
//!
//! Identifiers are counted upwards, so that flows which still name a service port that went meet nobody else's for as long as
//! possible. Those without a slot of their own are multiples of the number of slots.

use std::collections::HashSet;

use proxy_common::layout::{service_slot, service_slots};

/// Identifiers in use, as far as new ones depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ids {
    /// Service ports that may have a slot of their own.
    most: usize,
    /// Slots of a CPU; 0 where nothing is counted.
    slots: u32,
    /// Slots in use, but for that of all others.
    taken: HashSet<u32>,
    cursors: Cursors,
}

/// The largest identifiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursors {
    /// Among those with a slot of their own.
    own: u32,
    /// Among those without.
    other: u32,
}

impl Ids {
    /// For so many service ports that are counted apart.
    pub(crate) fn counting(most: u32) -> Self {
        let slots = service_slots(most);
        Self { most: usize::try_from(most).unwrap_or(usize::MAX), slots, ..Self::default() }
    }

    /// The slot of an identifier, if it is its own.
    pub(crate) fn own_slot(&self, service: u32) -> Option<u32> {
        let slot = service_slot(service, self.slots);
        (self.slots != 0 && slot != 0).then_some(slot)
    }

    /// An identifier was seen.
    pub(crate) fn see(&mut self, service: u32) {
        self.cursors.see(service, self.own_slot(service).is_some() || self.slots == 0);
    }

    /// A service port has it.
    pub(crate) fn take(&mut self, service: u32) {
        self.see(service);
        self.taken.extend(self.own_slot(service));
    }

    /// No service port has it any more.
    pub(crate) fn release(&mut self, service: u32) {
        if let Some(slot) = self.own_slot(service) {
            self.taken.remove(&slot);
        }
    }

    /// Nothing is known but that these are in use.
    pub(crate) fn restart(&mut self, in_use: impl IntoIterator<Item = u32>) {
        self.taken.clear();
        self.cursors = Cursors::default();
        for service in in_use {
            self.take(service);
        }
    }

    /// Gives new ones, without changing what is in use.
    pub(crate) fn fresh(&self) -> Fresh<'_> {
        Fresh { ids: self, cursors: self.cursors, taken: HashSet::new() }
    }
}

impl Cursors {
    fn see(&mut self, service: u32, is_own: bool) {
        let cursor = if is_own { &mut self.own } else { &mut self.other };
        *cursor = service.max(*cursor);
    }
}

/// New identifiers of a plan.
pub(crate) struct Fresh<'a> {
    ids: &'a Ids,
    cursors: Cursors,
    taken: HashSet<u32>,
}

impl Fresh<'_> {
    /// The next one.
    pub(crate) fn next(&mut self) -> u32 {
        let Ids { most, slots, taken, .. } = self.ids;
        if *slots == 0 {
            self.cursors.own = successor(self.cursors.own, 1);
            return self.cursors.own;
        }
        if taken.len() + self.taken.len() >= *most {
            self.cursors.other = successor(self.cursors.other, *slots);
            return self.cursors.other;
        }
        // There is a free slot, and as many identifiers in a row have all slots.
        loop {
            self.cursors.own = successor(self.cursors.own, 1);
            let slot = self.ids.own_slot(self.cursors.own);
            if slot.is_some_and(|slot| !taken.contains(&slot) && self.taken.insert(slot)) {
                return self.cursors.own;
            }
        }
    }
}

/// After four billion they begin anew.
fn successor(last: u32, step: u32) -> u32 {
    last.checked_add(step).unwrap_or(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_asked_for_have_slots_apart_and_the_rest_share_one() {
        let mut ids = Ids::counting(3);
        let mut fresh = ids.fresh();
        let given: Vec<u32> = (0..5).map(|_| fresh.next()).collect();
        assert_eq!(given, [1, 2, 3, 4, 8]);
        for id in &given {
            ids.take(*id);
        }
        let slots: Vec<_> = given.iter().map(|id| ids.own_slot(*id)).collect();
        assert_eq!(slots, [Some(1), Some(2), Some(3), None, None]);
    }

    #[test]
    fn a_slot_that_was_given_back_is_given_again_under_another_identifier() {
        let mut ids = Ids::counting(3);
        for id in [1, 2, 3, 4] {
            ids.take(id);
        }
        ids.release(2);
        assert_eq!(ids.fresh().next(), 6, "slot 2 of 4");
        ids.take(6);
        assert_eq!(ids.fresh().next(), 8, "no slot is left");
    }

    #[test]
    fn identifiers_go_on_after_the_largest_where_nothing_is_counted() {
        let mut ids = Ids::default();
        ids.restart([3, 9]);
        let mut fresh = ids.fresh();
        assert_eq!([fresh.next(), fresh.next()], [10, 11]);
    }

    #[test]
    fn identifiers_begin_anew_after_the_last() {
        let mut ids = Ids::counting(3);
        ids.take(u32::MAX);
        ids.take(u32::MAX - 3);
        let mut fresh = ids.fresh();
        assert_eq!([fresh.next(), fresh.next(), fresh.next()], [1, 2, 4], "slot 3 is that of the largest");
    }
}
