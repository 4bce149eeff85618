//! Keeps one copy of the values that many objects repeat: namespaces, Service and node names, zones, port names, hints.

use std::{collections::HashSet, hash::Hash, sync::Arc};

/// Below this many values it is not worth looking for unused ones.
const SMALLEST_SWEEP: usize = 1024;

/// A set of shared values. Values nobody else holds are dropped whenever the set has doubled, so it neither leaks nor
/// costs more than constant time a value.
#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    known: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// The one copy of `value`.
    pub(crate) fn intern(&mut self, value: &Arc<T>) -> Arc<T> {
        if let Some(known) = self.known.get(value.as_ref()) {
            return Arc::clone(known);
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_at = SMALLEST_SWEEP.max(self.known.len() * 2);
        }
        self.known.insert(Arc::clone(value));
        Arc::clone(value)
    }

    /// Replaces `value` with its one copy.
    pub(crate) fn share(&mut self, value: &mut Arc<T>) {
        *value = self.intern(value);
    }
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { known: HashSet::new(), sweep_at: SMALLEST_SWEEP }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_become_one() {
        let mut interner = Interner::<str>::default();
        let (first, second) = (Arc::from("zone-a"), Arc::from("zone-a"));
        assert!(Arc::ptr_eq(&interner.intern(&first), &interner.intern(&second)));
    }

    #[test]
    fn values_nobody_holds_are_dropped_in_time() {
        let mut interner = Interner::<str>::default();
        let kept = interner.intern(&Arc::from("kept"));
        for number in 0..10 * SMALLEST_SWEEP {
            interner.intern(&Arc::from(number.to_string()));
        }
        assert!(interner.known.len() <= SMALLEST_SWEEP, "{} values left", interner.known.len());
        assert!(Arc::ptr_eq(&kept, &interner.intern(&Arc::from("kept"))));
    }
}
