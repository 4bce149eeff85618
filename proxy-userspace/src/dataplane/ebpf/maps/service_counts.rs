//! What the programs count for each service port: which service port has which slot, and the sums
//! over all CPUs.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
};

use aya::maps::{Array, MapData};
use proxy_common::layout::ServiceCounts;

use super::super::plan::ids::ServiceIds;
use crate::{
    dataplane::{ServiceCount, lock},
    kernel::{
        KernelError,
        bpf::{Object, Reader},
    },
    model::ServicePortKey,
};

const MAP: &str = "service_counts";

/// The identifier and name of the service port in each slot.
type Owners = BTreeMap<u32, (u32, ServicePortKey)>;

/// Assigns the slots to service ports.
pub(crate) struct ServiceSlots {
    ids: ServiceIds,
    slots: u32,
    cpus: u32,
    map: Array<MapData, ServiceCounts>,
    owners: Arc<Mutex<Owners>>,
    /// Slots with counts that may be of a deleted service port.
    used: HashSet<u32>,
    /// The maps were read again, and owners that are not assigned again are deleted.
    is_reassigned: bool,
}

impl ServiceSlots {
    /// Opens the map for `max_own` service ports with their own slot. Also returns a reader of the
    /// counts.
    pub(crate) fn open(
        object: &mut Object,
        max_own: u32,
        slots: u32,
        cpus: u32,
    ) -> Result<(Self, ServiceCountReader), KernelError> {
        let owners = Arc::<Mutex<Owners>>::default();
        let reader = ServiceCountReader {
            slots,
            entries: Mutex::new(object.reader(MAP)?),
            owners: Arc::clone(&owners),
        };
        let is_used = |(slot, counts): (u32, ServiceCounts)| (counts != ServiceCounts::NONE).then_some(slot);
        let used = (0..).zip(reader.sums()?).filter_map(is_used).collect();
        let map = object.open_map(MAP)?;
        let ids = ServiceIds::counting(max_own);
        Ok((Self { ids, slots, cpus, map, owners, used, is_reassigned: false }, reader))
    }

    /// Returns the identifiers, of which none is in use. Expects that they are assigned again,
    /// because the maps are read.
    pub(crate) fn unused_ids(&mut self) -> ServiceIds {
        self.is_reassigned = true;
        self.ids.clone()
    }

    /// Records that a service port got an identifier. It is new unless an entry of the maps has it.
    pub(crate) fn assign(&mut self, name: &ServicePortKey, service: u32, is_new: impl FnOnce() -> bool) {
        let Some(slot) = self.ids.own_slot(service) else { return };
        if self.used.contains(&slot) && is_new() {
            self.clear(slot);
        }
        self.used.insert(slot);
        let mut owners = lock(&self.owners);
        if owners.get(&slot).is_none_or(|(owner, known)| (*owner, known) != (service, name)) {
            owners.insert(slot, (service, name.clone()));
        }
    }

    /// Records that a service port lost its identifier.
    pub(crate) fn release(&mut self, service: u32) {
        if let Some(slot) = self.ids.own_slot(service) {
            lock(&self.owners).remove(&slot);
        }
    }

    /// Drops the owners that did not get their identifier again after the maps were read.
    pub(crate) fn drop_former_owners(&mut self, is_assigned: impl Fn(u32) -> bool) {
        if std::mem::take(&mut self.is_reassigned) {
            lock(&self.owners).retain(|_, (service, _)| is_assigned(*service));
        }
    }

    /// Sets the counts of a slot to zero. If that fails, the new service port starts with the
    /// counts of a deleted one.
    fn clear(&mut self, slot: u32) {
        for cpu in 0..self.cpus {
            if let Err(error) = self.map.set(cpu * self.slots + slot, ServiceCounts::NONE, 0) {
                tracing::debug!(%error, slot, "cannot clear the counts of a slot");
            }
        }
    }
}

/// Reads the counts.
#[derive(Debug)]
pub(crate) struct ServiceCountReader {
    slots: u32,
    entries: Mutex<Reader<u32, ServiceCounts>>,
    owners: Arc<Mutex<Owners>>,
}

impl ServiceCountReader {
    /// Returns the counts of each service port that has its own slot and was used. The last item is
    /// the sum of all others. Returns nothing if service ports are not counted.
    pub(crate) fn read(&self) -> Result<Vec<ServiceCount>, KernelError> {
        let sums = self.sums()?;
        let Some(others) = sums.first() else { return Ok(Vec::new()) };
        let owners = lock(&self.owners);
        let own = owners.iter().filter_map(|(slot, (_, name))| {
            let counts = sums.get(*slot as usize).filter(|counts| **counts != ServiceCounts::NONE)?;
            Some(ServiceCount { port: Some(name.clone()), counts: *counts })
        });
        Ok(own.chain([ServiceCount { port: None, counts: *others }]).collect())
    }

    /// Returns the sums over all CPUs, by slot.
    fn sums(&self) -> Result<Vec<ServiceCounts>, KernelError> {
        let mut sums = vec![ServiceCounts::NONE; self.slots as usize];
        if sums.is_empty() {
            return Ok(sums);
        }
        let mut entries = lock(&self.entries);
        loop {
            for (index, counts) in entries.read().map_err(KernelError::call("read map", MAP))? {
                if let Some(sum) = sums.get_mut((index % self.slots) as usize) {
                    sum.merge(&counts);
                }
            }
            if entries.is_at_beginning() {
                return Ok(sums);
            }
        }
    }
}
