//! The map of the model for many objects.

use super::NamespacedName;

/// Objects by name. The map remembers the hashes of its names, so that it grows without reading
/// them again: they are all over the memory. Its order is that of the insertions until something is
/// removed.
pub(super) type ObjectMap<T> = indexmap::IndexMap<NamespacedName, T, foldhash::fast::RandomState>;
