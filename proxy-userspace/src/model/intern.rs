//! Keeps one copy of values that many objects repeat: names of namespaces, nodes, zones and ports,
//! hints, placements of endpoints, and the ports of slices.

use std::{hash::Hash, sync::Arc};

use foldhash::fast::RandomState;
use indexmap::{Equivalent, IndexSet};

use super::{Hints, Placement, SlicePort};

/// Below this number of values, unused values are not removed.
const SMALLEST_SWEEP: usize = 1024;

/// A set of shared values. Each time the set has doubled, unused values are dropped. So memory does
/// not leak, and each value costs constant time on average. The set remembers the hashes of its
/// values, so that it grows without reading them again.
#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    known: IndexSet<Arc<T>, RandomState>,
    sweep_at: usize,
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Returns the shared copy of `value`. Only the first one is made.
    fn find_or_add<Q>(&mut self, value: &Q, make: impl FnOnce() -> Arc<T>) -> Arc<T>
    where
        Q: ?Sized + Equivalent<Arc<T>> + Hash,
    {
        if let Some(known) = self.known.get(value) {
            return Arc::clone(known);
        }
        let value = make();
        self.add(&value);
        value
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
    /// Returns the shared copy of a text. Allocates memory only for the first one.
    pub(crate) fn intern_text(&mut self, text: &str) -> Arc<str> {
        self.find_or_add(text, || text.into())
    }
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { known: IndexSet::default(), sweep_at: SMALLEST_SWEEP }
    }
}

/// The values that the objects of one decoder repeat.
#[derive(Debug, Default)]
pub(crate) struct SharedValues {
    /// Names of all kinds.
    pub(crate) strings: Interner<str>,
    hints: Interner<Hints>,
    placements: Interner<Placement>,
    slice_ports: Interner<[SlicePort]>,
}

impl SharedValues {
    /// Returns the shared copy of a placement. Only the first one is allocated.
    pub(crate) fn placement(&mut self, node_name: Option<&str>, hints: Option<&Hints>) -> Arc<Placement> {
        let Self { strings, hints: known, placements, .. } = self;
        let value = PlacementRef { node_name, hints };
        placements.find_or_add(&value, || {
            let hints = hints.map(|hints| known.find_or_add(hints, || Arc::new(hints.clone())));
            Arc::new(Placement { node_name: node_name.map(|name| strings.intern_text(name)), hints })
        })
    }

    /// Returns the shared copy of a slice's ports. Only the first one is allocated.
    pub(crate) fn slice_ports(&mut self, ports: &[SlicePort]) -> Arc<[SlicePort]> {
        self.slice_ports.find_or_add(ports, || ports.into())
    }
}

/// A placement with borrowed fields. Its hash is that of a [`Placement`] with the same fields.
#[derive(Hash)]
struct PlacementRef<'a> {
    node_name: Option<&'a str>,
    hints: Option<&'a Hints>,
}

impl Equivalent<Arc<Placement>> for PlacementRef<'_> {
    fn equivalent(&self, placement: &Arc<Placement>) -> bool {
        self.node_name == placement.node_name.as_deref() && self.hints == placement.hints.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_copy() {
        let mut interner = Interner::<str>::default();
        let first = interner.intern_text("zone-a");
        assert!(Arc::ptr_eq(&first, &interner.intern_text("zone-a")));
        let mut other = Arc::from("zone-a");
        interner.share(&mut other);
        assert!(Arc::ptr_eq(&first, &other));
    }

    #[test]
    fn equal_placements_share_one_copy() {
        let mut shared = SharedValues::default();
        let hints = |zone: &str| Hints { zones: [zone.into()].into(), ..Hints::default() };
        let placements = [
            (None, None),
            (Some("n1"), None),
            (Some("n2"), None),
            (None, Some(hints("east"))),
            (Some("n1"), Some(hints("east"))),
            (Some("n1"), Some(hints("west"))),
        ];
        let known = placements.clone().map(|(node, hints)| shared.placement(node, hints.as_ref()));
        for ((node, hints), known) in placements.into_iter().zip(&known) {
            assert!(Arc::ptr_eq(&shared.placement(node, hints.as_ref()), known));
            assert_eq!((known.node_name.as_deref(), known.hints.as_deref()), (node, hints.as_ref()));
        }
        assert!(known.iter().enumerate().all(|(i, one)| known[..i].iter().all(|other| one != other)));
    }

    #[test]
    fn unused_placements_are_dropped_with_what_they_share() {
        let mut shared = SharedValues::default();
        for number in 0..10 * SMALLEST_SWEEP {
            let hints = Hints { zones: [number.to_string().into()].into(), ..Hints::default() };
            shared.placement(Some(&format!("n{number}")), Some(&hints));
        }
        let left = [shared.placements.known.len(), shared.hints.known.len(), shared.strings.known.len()];
        assert!(left.iter().all(|left| *left <= 2 * SMALLEST_SWEEP), "{left:?} values left");
    }

    #[test]
    fn unused_values_are_dropped() {
        let mut interner = Interner::<str>::default();
        let kept = interner.intern_text("kept");
        for number in 0..10 * SMALLEST_SWEEP {
            interner.intern_text(&number.to_string());
        }
        assert!(interner.known.len() <= SMALLEST_SWEEP, "{} values left", interner.known.len());
        assert!(Arc::ptr_eq(&kept, &interner.intern_text("kept")));
    }
}
