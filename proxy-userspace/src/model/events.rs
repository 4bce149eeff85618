//! Changes to objects, as sources send them.

use std::collections::BTreeMap;

use foldhash::HashSet;

use super::{EndpointSlice, NamespacedName, Node, Service, ServiceCidr};

/// A change to the objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta<T> {
    /// The complete list: all other objects are deleted. After the first list, the kind is synced.
    Replace(Vec<T>),
    /// An object was added or changed.
    Apply(T),
    /// An object was deleted. Unknown names are ignored.
    Delete(NamespacedName),
}

impl<T> Delta<T> {
    /// Applies the change to a map by name.
    pub fn apply_to(self, objects: &mut BTreeMap<NamespacedName, T>, name: impl Fn(&T) -> NamespacedName) {
        match self {
            Self::Replace(list) => {
                *objects = list.into_iter().map(|object| (name(&object), object)).collect();
            }
            Self::Apply(object) => drop(objects.insert(name(&object), object)),
            Self::Delete(name) => drop(objects.remove(&name)),
        }
    }

    /// Splits the change into the names to delete and the objects to apply. `known` are the names
    /// of all present objects.
    pub(super) fn split<'a>(
        self,
        known: impl Iterator<Item = &'a NamespacedName>,
        name: impl Fn(&T) -> &NamespacedName,
    ) -> (Vec<NamespacedName>, Vec<T>) {
        match self {
            Self::Apply(object) => (Vec::new(), vec![object]),
            Self::Delete(name) => (vec![name], Vec::new()),
            Self::Replace(list) => {
                let listed: HashSet<_> = list.iter().map(name).collect();
                let deleted = known.filter(|name| !listed.contains(name)).cloned().collect();
                (deleted, list)
            }
        }
    }
}

/// A part of the first list of a kind. The model takes it in while the next parts are on their way.
/// Nothing is programmed before the last part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListPart<T> {
    /// This is the first part. Objects of an earlier list, whose last part never came, are deleted.
    pub is_first: bool,
    /// This is the last part: the list is complete.
    pub is_last: bool,
    /// The objects.
    pub objects: Vec<T>,
}

impl<T> ListPart<T> {
    /// Adds the objects to a map by name.
    pub fn apply_to(self, objects: &mut BTreeMap<NamespacedName, T>, name: impl Fn(&T) -> NamespacedName) {
        if self.is_first {
            objects.clear();
        }
        objects.extend(self.objects.into_iter().map(|object| (name(&object), object)));
    }
}

/// An event of a source. A source may repeat an event: the model finds the real differences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// Services.
    Services(Delta<Service>),
    /// EndpointSlices.
    EndpointSlices(Delta<EndpointSlice>),
    /// Services of a first list that is long.
    ServicePart(ListPart<Service>),
    /// EndpointSlices of a first list that is long.
    EndpointSlicePart(ListPart<EndpointSlice>),
    /// Nodes. A source may send only the Node of this node.
    Nodes(Delta<Node>),
    /// ServiceCIDRs. Not every cluster has them, and no sync waits for them.
    ServiceCidrs(Delta<ServiceCidr>),
}
