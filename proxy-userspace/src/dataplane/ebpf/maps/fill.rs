//! How full the map `flows` is, and how long finished connections stay in it.

use std::time::Duration;

/// How long a finished connection is kept in a map that is more than half full. Its last segments
/// may be retransmitted.
const FINISHED: Duration = Duration::from_secs(10);
/// How long it is kept in a map that is more than three quarters full. Two retransmissions arrive
/// in this time.
const FINISHED_UNDER_PRESSURE: Duration = Duration::from_secs(1);

/// How full the map is: the entries that were counted, and those of the flows that began since.
#[derive(Debug)]
pub(crate) struct Fill {
    capacity: usize,
    counted: usize,
    /// Flows that had begun, on all CPUs, when the count began.
    begun_before: u64,
}

impl Fill {
    /// Returns the fill of a map of this capacity, if it was empty before the first flow.
    pub(crate) fn new(capacity: u32) -> Self {
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        Self { capacity, counted: 0, begun_before: 0 }
    }

    /// Records how many entries the map had. `begun` is the number of flows that had begun before
    /// they were counted.
    pub(crate) const fn count(&mut self, entries: usize, begun: u64) {
        (self.counted, self.begun_before) = (entries, begun);
    }

    /// Returns the number of entries that the map has at most.
    fn entries(&self, begun: u64) -> usize {
        self.counted.saturating_add(self.added(begun)).min(self.capacity)
    }

    /// Returns how many entries may have been added since the last count. A flow has two.
    fn added(&self, begun: u64) -> usize {
        usize::try_from(begun.saturating_sub(self.begun_before).saturating_mul(2)).unwrap_or(usize::MAX)
    }

    /// Returns how long finished connections are kept, if they are kept for a shorter time than
    /// others that are closed.
    pub(crate) fn keeps_finished(&self, begun: u64) -> Option<Duration> {
        let entries = self.entries(begun);
        if entries > self.capacity / 4 * 3 {
            Some(FINISHED_UNDER_PRESSURE)
        } else if entries > self.capacity / 2 {
            Some(FINISHED)
        } else {
            None
        }
    }

    /// Returns true if the whole map must be swept now. A sweep is worth its time after as many new
    /// flows as an eighth of the map.
    pub(crate) fn needs_sweep(&self, begun: u64) -> bool {
        self.keeps_finished(begun).is_some() && self.added(begun) >= self.capacity / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_is_what_was_counted_and_what_began_since() {
        let mut fill = Fill::new(1_000);
        fill.count(0, 5_000);
        assert_eq!(fill.keeps_finished(5_000), None);
        assert_eq!(fill.keeps_finished(5_250), None, "half full");
        assert_eq!(fill.keeps_finished(5_251), Some(FINISHED));
        assert_eq!(fill.keeps_finished(5_376), Some(FINISHED_UNDER_PRESSURE));
        assert_eq!(fill.keeps_finished(u64::MAX), Some(FINISHED_UNDER_PRESSURE));
        fill.count(400, 6_000);
        assert_eq!(fill.keeps_finished(6_000), None);
        assert_eq!(fill.keeps_finished(6_051), Some(FINISHED));
    }

    #[test]
    fn map_that_stays_full_is_swept_once_per_eighth_of_new_flows() {
        let mut fill = Fill::new(1_000);
        fill.count(900, 0);
        assert!(!fill.needs_sweep(0), "the last sweep found nothing to remove");
        assert!(!fill.needs_sweep(62));
        assert!(fill.needs_sweep(63));
        fill.count(100, 63);
        assert!(!fill.needs_sweep(63 + 200), "half full");
        assert!(fill.needs_sweep(63 + 201));
    }

    #[test]
    fn map_of_the_default_size_never_fills_at_20_000_connections_a_second() {
        const PER_SECOND: usize = 20_000;
        let capacity = proxy_common::layout::MapSizes::default().flows;
        let mut fill = Fill::new(capacity);
        // Entries by the half second in which their connection began and finished.
        let mut entries: Vec<(usize, usize)> = Vec::new();
        for half_second in 0..120 {
            let begun = (PER_SECOND / 2 * (half_second + 1)) as u64;
            entries.push((half_second, PER_SECOND));
            let total = |entries: &[(usize, usize)]| entries.iter().map(|(_, count)| count).sum::<usize>();
            assert!(total(&entries) < capacity as usize, "after {half_second} half seconds");
            if fill.needs_sweep(begun) {
                let kept = fill.keeps_finished(begun).expect("it is needed");
                let kept = usize::try_from(kept.as_millis() / 500).expect("small");
                entries.retain(|(began, _)| half_second - began <= kept);
                fill.count(total(&entries), begun);
            }
        }
    }
}
