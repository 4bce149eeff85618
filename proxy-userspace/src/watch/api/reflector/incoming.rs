//! The objects of a list while it comes.

use std::{collections::BTreeMap, mem};

use super::{End, Reflector};
use crate::{
    model::{Delta, ListPart, NamespacedName, WatchEvent},
    watch::decode::Kind,
};

/// How many objects of a first list the receiver gets together. Each part wakes it once.
const PART_SIZE: usize = 128;

/// The objects of a list before its end.
pub(super) enum Incoming<K> {
    /// A first list. The receiver has no objects of the kind yet, so it takes in parts while others
    /// are on their way.
    First { event: fn(ListPart<K>) -> WatchEvent, part: Vec<K>, sent: usize },
    /// A list that replaces the objects of an earlier one, at once.
    Whole(BTreeMap<NamespacedName, K>),
}

impl<K: Kind> Incoming<K> {
    /// Returns a list without objects. `is_first` if no list of the kind was complete yet.
    pub(super) fn new(is_first: bool) -> Self {
        match K::PART.filter(|_| is_first) {
            Some(event) => Self::First { event, part: Vec::new(), sent: 0 },
            None => Self::Whole(BTreeMap::new()),
        }
    }

    /// Takes the events for the objects that were not sent, and the number of all objects.
    fn end(self) -> (WatchEvent, usize) {
        match self {
            Self::First { event, part, sent: sent @ 1.. } => {
                let count = sent + part.len();
                (event(ListPart { is_first: false, is_last: true, objects: part }), count)
            }
            Self::First { part, .. } => {
                let count = part.len();
                (K::event(Delta::Replace(part)), count)
            }
            Self::Whole(objects) => {
                let count = objects.len();
                (K::event(Delta::Replace(objects.into_values().collect())), count)
            }
        }
    }
}

impl<K: Kind> Reflector<K> {
    /// Adds an object to a list, or removes it.
    pub(super) async fn add(&self, delta: Delta<K>, list: &mut Incoming<K>) -> Result<(), End> {
        let (event, part, sent) = match list {
            Incoming::First { event, part, sent } => (event, part, sent),
            Incoming::Whole(objects) => {
                delta.apply_to(objects, K::key);
                return Ok(());
            }
        };
        match delta {
            Delta::Apply(object) => part.push(object),
            Delta::Delete(name) => {
                part.retain(|object| object.key() != name);
                if *sent > 0 {
                    self.send(K::event(Delta::Delete(name))).await?;
                }
            }
            Delta::Replace(objects) => part.extend(objects),
        }
        if part.len() >= PART_SIZE {
            let objects = mem::replace(part, Vec::with_capacity(PART_SIZE));
            let is_first = *sent == 0;
            *sent += objects.len();
            self.send(event(ListPart { is_first, is_last: false, objects })).await?;
        }
        Ok(())
    }

    /// Sends what completes a list. Returns the number of its objects.
    pub(super) async fn complete(&self, list: Incoming<K>) -> Result<usize, End> {
        let (event, count) = list.end();
        self.send(event).await?;
        Ok(count)
    }
}
