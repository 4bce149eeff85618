//! What the programs count of each service port: who has which slot, and the sum over all CPUs.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::maps::{Array, MapData};
use proxy_common::layout::ServiceCounts;

use super::super::plan::ids::ServiceIds;
use crate::{
    dataplane::ServiceCount,
    kernel::{
        KernelError,
        bpf::{Object, Reader},
    },
    model::ServicePortKey,
};

const MAP: &str = "service_counts";

/// Who has which slot, by slots: the identifier, and the service port's name.
type Owners = BTreeMap<u32, (u32, ServicePortKey)>;

/// The slots, as the process that gives them sees them.
pub(crate) struct ServiceSlots {
    ids: ServiceIds,
    slots: u32,
    cpus: u32,
    map: Array<MapData, ServiceCounts>,
    owners: Arc<Mutex<Owners>>,
    /// Slots whose counts may be those of a service port that is gone.
    used: HashSet<u32>,
    /// The maps were read: owners that do not come again are gone.
    is_reread: bool,
}

impl fmt::Debug for ServiceSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceSlots").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl ServiceSlots {
    /// For so many service ports with a slot of their own, on so many CPUs; also what reads them.
    pub(crate) fn open(
        object: &mut Object,
        most: u32,
        slots: u32,
        cpus: u32,
    ) -> Result<(Self, ServiceReader), KernelError> {
        let owners = Arc::<Mutex<Owners>>::default();
        let reader =
            ServiceReader { slots, entries: Mutex::new(object.reader(MAP)?), owners: Arc::clone(&owners) };
        let is_used = |(slot, counts): (u32, ServiceCounts)| (counts != ServiceCounts::NONE).then_some(slot);
        let used = (0..).zip(reader.sums()?).filter_map(is_used).collect();
        let map = object.take_map(MAP)?;
        let ids = ServiceIds::counting(most);
        Ok((Self { ids, slots, cpus, map, owners, used, is_reread: false }, reader))
    }

    /// No identifier is in use yet.
    pub(crate) fn ids(&self) -> ServiceIds {
        self.ids.clone()
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The maps were read, so that identifiers are given to names anew.
    pub(crate) fn reread(&mut self) {
        self.is_reread = true;
    }

    /// A service port got an identifier; a new one, or one that the maps know.
    pub(crate) fn give(&mut self, name: &ServicePortKey, service: u32, is_new: bool) {
        let Some(slot) = self.ids.own_slot(service) else { return };
        if is_new && self.used.contains(&slot) {
            self.clear(slot);
        }
        self.used.insert(slot);
        let mut owners = self.owners();
        if owners.get(&slot).is_none_or(|(owner, known)| (*owner, known) != (service, name)) {
            owners.insert(slot, (service, name.clone()));
        }
    }

    /// A service port lost its identifier.
    pub(crate) fn take_back(&mut self, service: u32) {
        if let Some(slot) = self.ids.own_slot(service) {
            self.owners().remove(&slot);
        }
    }

    /// All identifiers are given; these are.
    pub(crate) fn settle(&mut self, is_given: impl Fn(u32) -> bool) {
        if std::mem::take(&mut self.is_reread) {
            self.owners().retain(|_, (service, _)| is_given(*service));
        }
    }

    /// Failing, the new service port begins with the counts of another that is gone.
    fn clear(&mut self, slot: u32) {
        for cpu in 0..self.cpus {
            if let Err(error) = self.map.set(cpu * self.slots + slot, ServiceCounts::NONE, 0) {
                tracing::debug!(%error, slot, "cannot clear what was counted");
            }
        }
    }
}

/// Reads what was counted.
#[derive(Debug)]
pub(crate) struct ServiceReader {
    slots: u32,
    entries: Mutex<Reader<u32, ServiceCounts>>,
    owners: Arc<Mutex<Owners>>,
}

impl ServiceReader {
    /// What was counted of each service port that has a slot and was used at all, and last of all others together; nothing where
    /// nothing is counted.
    pub(crate) fn read(&self) -> Result<Vec<ServiceCount>, KernelError> {
        let sums = self.sums()?;
        let Some(others) = sums.first() else { return Ok(Vec::new()) };
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let apart = owners.iter().filter_map(|(slot, (_, name))| {
            let counts = sums.get(*slot as usize).filter(|counts| **counts != ServiceCounts::NONE)?;
            Some(count(Some(name.clone()), counts))
        });
        Ok(apart.chain([count(None, others)]).collect())
    }

    /// The sums over all CPUs, by slots.
    fn sums(&self) -> Result<Vec<ServiceCounts>, KernelError> {
        let mut sums = vec![ServiceCounts::NONE; self.slots as usize];
        if sums.is_empty() {
            return Ok(sums);
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            for (place, counts) in entries.read().map_err(KernelError::call("read map", MAP))? {
                if let Some(sum) = sums.get_mut((place % self.slots) as usize) {
                    sum.merge(&counts);
                }
            }
            if entries.is_at_beginning() {
                return Ok(sums);
            }
        }
    }
}

fn count(port: Option<ServicePortKey>, counts: &ServiceCounts) -> ServiceCount {
    let ServiceCounts { connections, refusals, drops, bytes_to_endpoints, bytes_to_clients } = *counts;
    ServiceCount { port, connections, refusals, drops, bytes_to_endpoints, bytes_to_clients }
}
