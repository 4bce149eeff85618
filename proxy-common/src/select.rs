//! The choice of a slot, and the timeout of affinity.

use crate::layout::{AffinityValue, ServiceValue, flags};

/// The slots that a client can get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The number of the [`List`](crate::layout::List).
    pub list: u32,
    /// The number of slots.
    pub count: u32,
    /// The flags of the frontend with the size of the Maglev table that chooses among them
    /// ([`flags::MAGLEV_SIZE`]). 0 without one.
    pub table: u16,
}

impl Slots {
    /// Returns the slots for clients inside.
    #[inline(always)]
    pub const fn inside(service: &ServiceValue) -> Self {
        Self { list: service.inside_list as u32, count: service.inside_count, table: 0 }
    }

    /// Returns the slots for clients outside.
    #[inline(always)]
    pub const fn outside(service: &ServiceValue) -> Self {
        Self {
            list: service.outside_list as u32,
            count: service.outside_count,
            table: service.flags & flags::MAGLEV_SIZE,
        }
    }

    /// Picks a slot evenly from 32 random bits, by a multiplication. It is cheaper and less biased
    /// than a remainder. Returns 0 without slots, so callers check `count` first.
    #[inline(always)]
    pub const fn pick(&self, random: u32) -> u32 {
        ((random as u64 * self.count as u64) >> 32) as u32
    }
}

impl AffinityValue {
    /// Returns true if the last connection of the client is younger than the timeout. A time in the
    /// future, which another CPU wrote a moment ago, counts as now.
    #[inline(always)]
    pub const fn is_fresh(&self, now_ns: u64, timeout_seconds: u32) -> bool {
        now_ns.saturating_sub(self.used_ns) < timeout_seconds as u64 * 1_000_000_000
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Addr, layout::Endpoint};

    proptest! {
        #[test]
        fn picked_slot_is_always_in_range(random: u32, count in 1u32..) {
            let slots = Slots { list: 0, count, table: 0 };
            prop_assert!(slots.pick(random) < count);
        }
    }

    #[test]
    fn slots_are_picked_evenly() {
        for count in [2, 3, 7, 100] {
            let slots = Slots { list: 0, count, table: 0 };
            let step = 4099;
            let mut hits = std::vec![0u32; count as usize];
            for random in (0..u32::MAX).step_by(step) {
                hits[slots.pick(random) as usize] += 1;
            }
            let expected = u32::MAX / u32::try_from(step).expect("small") / count;
            assert!(hits.iter().all(|&n| n.abs_diff(expected) <= 1), "{count} slots: {hits:?}");
        }
    }

    #[test]
    fn affinity_ends_after_the_timeout() {
        let used = AffinityValue {
            endpoint: Endpoint::new(Addr::UNSPECIFIED_V4, 0),
            zero: 0,
            used_ns: 5_000_000_000,
        };
        assert!(used.is_fresh(5_000_000_000, 1));
        assert!(used.is_fresh(5_999_999_999, 1));
        assert!(!used.is_fresh(6_000_000_000, 1));
        assert!(used.is_fresh(4_000_000_000, 1), "the clock of another CPU may be behind");
        assert!(!used.is_fresh(u64::MAX, u32::MAX), "the largest timeout does not overflow");
    }
}
