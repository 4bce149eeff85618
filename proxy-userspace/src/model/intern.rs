//! Keeps one copy of values that many objects repeat: namespaces, names of Services, nodes, zones
//! and ports, and hints.

use std::{hash::Hash, sync::Arc};

use foldhash::HashSet;

/// Below this number of values, unused values are not removed.
const SMALLEST_SWEEP: usize = 1024;

/// A set of shared values. Each time the set has doubled, unused values are dropped. So memory does
/// not leak, and each value costs constant time on average.
#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    known: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Returns the shared copy of `value`.
    pub(crate) fn intern(&mut self, value: &Arc<T>) -> Arc<T> {
        if let Some(known) = self.known.get(value.as_ref()) {
            return Arc::clone(known);
        }
        self.add(value);
        Arc::clone(value)
    }

    /// Adds a value.
    fn add(&mut self, value: &Arc<T>) {
        if self.known.len() >= self.sweep_at {
            self.known.retain(|value| Arc::strong_count(value) > 1);
            self.sweep_at = SMALLEST_SWEEP.max(self.known.len() * 2);
        }
        self.known.insert(Arc::clone(value));
    }

    /// Replaces `value` by the shared copy.
    pub(crate) fn share(&mut self, value: &mut Arc<T>) {
        match self.known.get(value.as_ref()) {
            // It is shared already.
            Some(known) if Arc::ptr_eq(known, value) => {}
            Some(known) => *value = Arc::clone(known),
            None => self.add(value),
        }
    }
}

impl Interner<str> {
    /// Returns the number of texts.
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns the shared copy of a text. Allocates memory only for the first one.
    pub(crate) fn intern_text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.known.get(text) {
            return Arc::clone(known);
        }
        let text = Arc::from(text);
        self.add(&text);
        text
    }
}

impl<T: Eq + Hash> Interner<T> {
    /// Returns the shared copy of `value`. Only the first one is allocated, after `prepare`.
    pub(crate) fn intern_value(&mut self, mut value: T, prepare: impl FnOnce(&mut T)) -> Arc<T> {
        if let Some(known) = self.known.get(&value) {
            return Arc::clone(known);
        }
        prepare(&mut value);
        let value = Arc::new(value);
        self.add(&value);
        value
    }
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { known: HashSet::default(), sweep_at: SMALLEST_SWEEP }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_copy() {
        let mut interner = Interner::<str>::default();
        let (first, second) = (Arc::from("zone-a"), Arc::from("zone-a"));
        assert!(Arc::ptr_eq(&interner.intern(&first), &interner.intern(&second)));
    }

    #[test]
    fn unused_values_are_dropped() {
        let mut interner = Interner::<str>::default();
        let kept = interner.intern(&Arc::from("kept"));
        for number in 0..10 * SMALLEST_SWEEP {
            interner.intern(&Arc::from(number.to_string()));
        }
        assert!(interner.known.len() <= SMALLEST_SWEEP, "{} values left", interner.known.len());
        assert!(Arc::ptr_eq(&kept, &interner.intern(&Arc::from("kept"))));
    }
}
