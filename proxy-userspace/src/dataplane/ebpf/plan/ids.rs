//! Which identifier a new service port gets: one with its own slot in `service_counts` while there
//! are any, and none that was released a short while ago.
//!
//! Identifiers count upwards. A flow that still names a deleted service port then meets no other
//! service port with its identifier for as long as possible. Identifiers without their own slot are
//! multiples of the number of slots.

use foldhash::HashSet;

use proxy_common::layout::{service_slot, service_slots};

/// The identifiers in use, as far as new ones depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServiceIds {
    /// The number of service ports that may have their own slot.
    max_own: usize,
    /// Slots of a CPU; 0 if service ports are not counted.
    slots: u32,
    /// Slots in use, except the one that all others share.
    taken: HashSet<u32>,
    largest: LargestIds,
}

/// The largest identifiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LargestIds {
    /// Among those with their own slot.
    own: u32,
    /// Among those that share a slot.
    shared: u32,
}

impl ServiceIds {
    /// Returns identifiers for this number of service ports that are counted one by one.
    pub(crate) fn counting(max_own: u32) -> Self {
        let slots = service_slots(max_own);
        Self { max_own: usize::try_from(max_own).unwrap_or(usize::MAX), slots, ..Self::default() }
    }

    /// Returns the slot of an identifier, if it has its own.
    pub(crate) fn own_slot(&self, service: u32) -> Option<u32> {
        let slot = service_slot(service, self.slots);
        (self.slots != 0 && slot != 0).then_some(slot)
    }

    /// Records that an identifier is in the maps.
    pub(crate) fn record(&mut self, service: u32) {
        let is_own = self.own_slot(service).is_some() || self.slots == 0;
        let largest = if is_own { &mut self.largest.own } else { &mut self.largest.shared };
        *largest = service.max(*largest);
    }

    /// Records that a service port has an identifier.
    pub(crate) fn assign(&mut self, service: u32) {
        self.record(service);
        self.taken.extend(self.own_slot(service));
    }

    /// Records that no service port has the identifier any more.
    pub(crate) fn release(&mut self, service: u32) {
        if let Some(slot) = self.own_slot(service) {
            self.taken.remove(&slot);
        }
    }

    /// Forgets everything, and records that these are in use.
    pub(crate) fn reset(&mut self, in_use: impl IntoIterator<Item = u32>) {
        self.taken.clear();
        self.largest = LargestIds::default();
        for service in in_use {
            self.assign(service);
        }
    }

    /// Returns an allocator of new identifiers. It does not change which are in use.
    pub(crate) fn allocator(&self) -> IdAllocator<'_> {
        IdAllocator { ids: self, largest: self.largest, taken: HashSet::default() }
    }
}

/// Allocates the new identifiers of a plan.
pub(crate) struct IdAllocator<'a> {
    ids: &'a ServiceIds,
    largest: LargestIds,
    taken: HashSet<u32>,
}

impl IdAllocator<'_> {
    /// Returns the next new identifier.
    pub(crate) fn next(&mut self) -> u32 {
        let ServiceIds { max_own, slots, taken, .. } = self.ids;
        if *slots == 0 {
            self.largest.own = successor(self.largest.own, 1);
            return self.largest.own;
        }
        if taken.len() + self.taken.len() >= *max_own {
            self.largest.shared = successor(self.largest.shared, *slots);
            return self.largest.shared;
        }
        // A slot is free, and this many consecutive identifiers have all slots.
        loop {
            self.largest.own = successor(self.largest.own, 1);
            let slot = self.ids.own_slot(self.largest.own);
            if slot.is_some_and(|slot| !taken.contains(&slot) && self.taken.insert(slot)) {
                return self.largest.own;
            }
        }
    }
}

/// Identifiers wrap around after four billion.
fn successor(last: u32, step: u32) -> u32 {
    last.checked_add(step).unwrap_or(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_service_ports_have_their_own_slot_and_all_others_share_one() {
        let mut ids = ServiceIds::counting(3);
        let mut allocator = ids.allocator();
        let given: Vec<u32> = (0..5).map(|_| allocator.next()).collect();
        assert_eq!(given, [1, 2, 3, 4, 8]);
        for id in &given {
            ids.assign(*id);
        }
        let slots: Vec<_> = given.iter().map(|id| ids.own_slot(*id)).collect();
        assert_eq!(slots, [Some(1), Some(2), Some(3), None, None]);
    }

    #[test]
    fn a_released_slot_is_reused_under_another_identifier() {
        let mut ids = ServiceIds::counting(3);
        for id in [1, 2, 3, 4] {
            ids.assign(id);
        }
        ids.release(2);
        assert_eq!(ids.allocator().next(), 6, "slot 2 of 4");
        ids.assign(6);
        assert_eq!(ids.allocator().next(), 8, "no slot is left");
    }

    #[test]
    fn identifiers_continue_after_the_largest_if_nothing_is_counted() {
        let mut ids = ServiceIds::default();
        ids.reset([3, 9]);
        let mut allocator = ids.allocator();
        assert_eq!([allocator.next(), allocator.next()], [10, 11]);
    }

    #[test]
    fn identifiers_wrap_around_after_the_largest_number() {
        let mut ids = ServiceIds::counting(3);
        ids.assign(u32::MAX);
        ids.assign(u32::MAX - 3);
        let mut allocator = ids.allocator();
        assert_eq!(
            [allocator.next(), allocator.next(), allocator.next()],
            [1, 2, 4],
            "slot 3 is that of the largest"
        );
    }
}
