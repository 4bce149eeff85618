//! Collects the names of objects that changed.

use super::NamespacedName;

/// Below this number of names, repeated names are not removed.
const SMALLEST_SORT: usize = 1024;

/// Names that are added one by one and taken together.
///
/// Lists from the API server are sorted. Sorting such a list is faster than inserting each name
/// into a set.
#[derive(Debug, Default)]
pub(super) struct ChangedNames {
    names: Vec<NamespacedName>,
    /// At this number of names, repeated names are removed, so that memory does not grow.
    sort_at: usize,
}

impl ChangedNames {
    /// Adds a name.
    pub(super) fn add(&mut self, name: NamespacedName) {
        if self.names.last() == Some(&name) {
            return;
        }
        if self.names.len() >= self.sort_at.max(SMALLEST_SORT) {
            sort_names(&mut self.names);
            self.sort_at = self.names.len() * 2;
        }
        self.names.push(name);
    }

    /// Takes all names, sorted, each once.
    pub(super) fn take(&mut self) -> Vec<NamespacedName> {
        let mut names = std::mem::take(&mut self.names);
        self.sort_at = 0;
        sort_names(&mut names);
        names
    }
}

/// Sorts names, and removes repeated ones.
pub(super) fn sort_names(names: &mut Vec<NamespacedName>) {
    // A stable sort finds the sorted parts.
    names.sort();
    names.dedup();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Name;

    fn name(number: usize) -> NamespacedName {
        let name = Name::label(&format!("web-{number:04}")).expect("a label");
        NamespacedName { namespace: "shop".into(), name }
    }

    #[test]
    fn names_are_taken_sorted_and_once() {
        let mut names = ChangedNames::default();
        for number in [3, 1, 1, 2, 3] {
            names.add(name(number));
        }
        assert_eq!(names.take(), [1, 2, 3].map(name));
        assert_eq!(names.take(), []);
    }

    #[test]
    fn repeated_names_take_no_memory() {
        let mut names = ChangedNames::default();
        (0..100 * SMALLEST_SORT).for_each(|number| names.add(name(number % 10)));
        assert!(names.names.len() <= SMALLEST_SORT, "{}", names.names.len());
        assert_eq!(names.take().len(), 10);
    }
}
