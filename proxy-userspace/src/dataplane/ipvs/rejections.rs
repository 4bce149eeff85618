//! The objects that the kernel rejected. Plans leave them out until their service port changes or
//! there is room again. A faulty service port then does not stop the others from being served.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    desired::{DesiredObjects, Item, KernelObject, endpoints},
    error::IpvsError,
    node::Node,
    sets::SetEntry,
};
use crate::{
    dataplane::{LeftOutPort, LeftOutReason},
    model::{ResolvedPort, ServicePortKey, Snapshot},
};

/// A rejection by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rejection {
    message: String,
    /// The kernel may have room for the object now.
    try_again: bool,
}

/// The rejected objects of each service port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rejections {
    by_port: BTreeMap<ServicePortKey, BTreeMap<KernelObject, Rejection>>,
}

impl Rejections {
    /// Returns true if plans leave out this object of a service port.
    pub(super) fn contains(&self, port: &ServicePortKey, object: KernelObject) -> bool {
        self.by_port.get(port).is_some_and(|rejected| rejected.contains_key(&object))
    }

    fn filter(&self, mut keep: impl FnMut(&ServicePortKey, KernelObject, &Rejection) -> bool) -> Self {
        let mut by_port = self.by_port.clone();
        by_port.retain(|key, rejected| {
            rejected.retain(|object, why| keep(key, *object, why));
            !rejected.is_empty()
        });
        Self { by_port }
    }

    /// Returns what a full plan leaves out: objects that are still needed and must not be tried
    /// again.
    pub(super) fn for_full_plan(&self, snapshot: &Snapshot, node: &Node) -> Self {
        self.filter(|key, object, why| {
            let is_needed = |port| is_needed(&DesiredObjects::new(key, port, node, &|_| false), port, object);
            !why.try_again && snapshot.ports.get(key).is_some_and(|port| is_needed(port))
        })
    }

    /// Returns what a plan for these changed service ports leaves out: only objects of others.
    pub(super) fn for_partial_plan(&self, changed: &BTreeSet<ServicePortKey>) -> Self {
        self.filter(|key, _, _| !changed.contains(key))
    }

    /// Keeps only the rejections that a plan left out.
    pub(super) fn retain(&mut self, left_out: &Self) {
        *self = self.filter(|key, object, _| left_out.contains(key, object));
    }

    /// Adds what a plan left out without a rejection by the kernel.
    pub(super) fn add_planned(&mut self, planned: Self) {
        for (key, rejected) in planned.by_port {
            let known = self.by_port.entry(key).or_default();
            for (object, why) in rejected {
                known.entry(object).or_insert(why);
            }
        }
    }

    /// Records that an entry was deleted from a set, so that the set has room. An entry of the same
    /// frontend does not count: it was deleted because the other one was rejected.
    pub(super) fn entry_deleted(&mut self, deleted: SetEntry) {
        for (object, why) in self.by_port.values_mut().flatten() {
            if let KernelObject::Item(Item::Entry(SetEntry { family, set, entry })) = object {
                why.try_again |= (*family, *set) == (deleted.family, deleted.set)
                    && !set.have_same_frontend(*entry, deleted.entry);
            }
        }
    }

    /// Records a rejection.
    pub(super) fn add(&mut self, port: ServicePortKey, object: KernelObject, message: String) {
        tracing::debug!(%port, ?object, message, "the kernel rejected an object");
        self.by_port.entry(port).or_default().insert(object, Rejection { message, try_again: false });
    }

    /// Returns the service ports of which something is left out, each with its first rejection.
    pub(super) fn left_out_ports(&self) -> Vec<LeftOutPort> {
        let left_out = |(port, rejected): (&ServicePortKey, &BTreeMap<KernelObject, Rejection>)| {
            let message = rejected.values().next()?.message.clone();
            Some(LeftOutPort { port: port.clone(), reason: LeftOutReason::Rejected, message })
        };
        self.by_port.iter().filter_map(left_out).collect()
    }

    /// Returns an error if anything is left out.
    pub(super) fn check(&self) -> Result<(), IpvsError> {
        let first = self.by_port.iter().find_map(|(key, rejected)| Some((key, rejected.values().next()?)));
        first.map_or(Ok(()), |(key, why)| {
            let (count, first, message) = (self.by_port.len(), key.clone(), why.message.clone());
            Err(IpvsError::LeftOut { count, first, message })
        })
    }
}

/// Returns true if a service port needs the object when nothing is rejected.
fn is_needed(desired: &DesiredObjects, port: &ResolvedPort, object: KernelObject) -> bool {
    let KernelObject::RealServer(key, real) = object else { return desired.contains(object) };
    let mut needed = desired.reason(key).into_iter().flat_map(|reason| endpoints(reason, port));
    needed.any(|endpoint| endpoint.address == real)
}
