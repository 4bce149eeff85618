//! The known EndpointSlices, reduced to the fields that resolution needs. Merges the slices of a
//! Service.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::SocketAddr,
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    AddressType, Delta, EndpointSlice, IpFamily, ListPart, Name, NamespacedName, PodNames, ServicePortKey,
    SliceEndpoint, SlicePort, TriggerTime, UnixNanos, object_map::ObjectMap,
};

/// Upstream's `EndpointSliceCache`, with the trigger times of `EndpointsChangeTracker`.
#[derive(Debug, Default)]
pub(super) struct EndpointSliceCache {
    slices: ObjectMap<CachedSlice>,
    /// The names of each Service's slices, sorted. They are in its namespace. Most Services have one
    /// slice.
    by_service: ObjectMap<SmallVec<[Name; 1]>>,
    /// The number of endpoints in all slices.
    pub(super) endpoint_count: usize,
    /// The first complete list came.
    pub(super) is_listed: bool,
    /// Trigger times until then are ignored, as with upstream: what the first list contains mostly
    /// happened before this process could program it.
    pub(super) start: UnixNanos,
    /// The Services whose slices changed since [`Self::checkout_changes`]. None before its first
    /// call: everything is new.
    changed: Option<BTreeSet<NamespacedName>>,
    /// Upstream has a tracker for each family.
    trigger_times: BTreeMap<(NamespacedName, IpFamily), Vec<UnixNanos>>,
}

/// A slice with addresses of one family that belongs to a Service.
#[derive(Debug, PartialEq, Eq)]
struct CachedSlice {
    service: Name,
    family: IpFamily,
    /// The endpoints with an address of the family.
    endpoints: Box<[SliceEndpoint]>,
    /// Their pods.
    pods: PodNames,
    ports: Arc<[SlicePort]>,
}

/// An endpoint of one service port: upstream's `BaseEndpointInfo`.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndpointInfo<'a> {
    pub(super) address: SocketAddr,
    pub(super) is_local: bool,
    pub(super) endpoint: &'a SliceEndpoint,
    slice: &'a CachedSlice,
    /// The index of the endpoint in the slice.
    index: usize,
}

impl EndpointInfo<'_> {
    /// Returns the name of the pod, which is in the namespace of the Service.
    pub(super) fn pod(&self) -> Option<Name> {
        self.slice.pods.get(self.index)
    }
}

impl EndpointSliceCache {
    /// Applies a change from a source. Returns the number of slices that differ.
    pub(super) fn update(&mut self, delta: Delta<EndpointSlice>) -> usize {
        self.is_listed |= matches!(delta, Delta::Replace(_));
        let (deleted, slices) = delta.split(self.slices.keys(), |slice| &slice.name);
        let deleted = deleted.into_iter().map(|name| self.set(name, None, None));
        let deleted = deleted.filter(|differs| *differs).count();
        let applied = slices.into_iter().map(|slice| self.apply(slice));
        deleted + applied.filter(|differs| *differs).count()
    }

    /// Adds a part of the first list. Returns the number of slices that differ.
    pub(super) fn add(&mut self, part: ListPart<EndpointSlice>) -> usize {
        self.is_listed |= part.is_last;
        if part.is_first {
            let earlier: Vec<_> = self.slices.keys().cloned().collect();
            for name in earlier {
                self.set(name, None, None);
            }
        }
        let applied = part.objects.into_iter().map(|slice| self.apply(slice));
        applied.filter(|differs| *differs).count()
    }

    /// Returns the Services whose slices changed since the last call. The first call returns none.
    pub(super) fn checkout_changes(&mut self) -> BTreeSet<NamespacedName> {
        self.changed.replace(BTreeSet::new()).unwrap_or_default()
    }

    /// Returns the trigger times of slices that changed since the last call.
    pub(super) fn checkout_trigger_times(&mut self) -> Vec<TriggerTime> {
        let times = mem::take(&mut self.trigger_times).into_iter();
        times
            .flat_map(|((_, family), times)| times.into_iter().map(move |at| TriggerTime { family, at }))
            .collect()
    }

    /// Returns the Services that have an endpoint with hints.
    pub(super) fn services_with_hints(&self) -> impl Iterator<Item = NamespacedName> {
        let is_hinted = |endpoint: &SliceEndpoint| endpoint.placement.hints.is_some();
        let hinted = self.slices.iter().filter(move |(_, slice)| slice.endpoints.iter().any(is_hinted));
        hinted.map(|(name, slice)| slice.service_name(name))
    }

    /// Returns the endpoints of a service port in all its slices, sorted by address, without
    /// duplicates.
    ///
    /// Several slices can contain the same address: an endpoint moves to another slice, or a new
    /// pod has the address of a terminating one. Upstream's rule is in `addEndpoints`: a later
    /// endpoint replaces an earlier one unless it is terminating. shunt sorts slices by name.
    /// Upstream's order is random.
    pub(super) fn endpoints(&self, key: &ServicePortKey, node_name: &str) -> Vec<EndpointInfo<'_>> {
        let is_local = |endpoint: &SliceEndpoint| {
            !node_name.is_empty() && endpoint.placement.node_name.as_deref() == Some(node_name)
        };
        let mut endpoints = Vec::new();
        for slice in self.slices_of(&key.name.service).filter(|slice| slice.family == key.family) {
            let is_port =
                |port: &&SlicePort| port.protocol == key.name.protocol && port.name == key.name.port;
            for port in slice.ports.iter().filter(is_port).filter_map(|port| port.port) {
                let with_port = slice.endpoints.iter().enumerate().map(|(index, endpoint)| {
                    let address = SocketAddr::new(endpoint.address, port.get());
                    EndpointInfo { address, is_local: is_local(endpoint), endpoint, slice, index }
                });
                endpoints.extend(with_port);
            }
        }
        // Stable: the order of slices decides between endpoints with the same address.
        endpoints.sort_by_key(|endpoint| endpoint.address);
        endpoints.dedup_by(|later, earlier| {
            let is_same = later.address == earlier.address;
            if is_same && !later.endpoint.terminating {
                *earlier = *later;
            }
            is_same
        });
        endpoints
    }

    /// Returns the namespace, the endpoints and the pods of each slice.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&Name, &[SliceEndpoint], &PodNames)> {
        self.slices.iter().map(|(name, slice)| (&name.namespace, &*slice.endpoints, &slice.pods))
    }

    fn slices_of(&self, service: &NamespacedName) -> impl Iterator<Item = &CachedSlice> {
        let namespace = service.namespace.clone();
        let names = self.by_service.get(service).into_iter().flatten();
        names.filter_map(move |name| {
            self.slices.get(&NamespacedName { namespace: namespace.clone(), name: name.clone() })
        })
    }

    /// Returns true if the slice differs.
    fn apply(&mut self, slice: EndpointSlice) -> bool {
        let EndpointSlice { name, service, address_type, endpoints, pods, ports, last_change_trigger_time } =
            slice;
        let family = match address_type {
            AddressType::Ipv4 => Some(IpFamily::V4),
            AddressType::Ipv6 => Some(IpFamily::V6),
            // Proxies ignore host names.
            AddressType::Fqdn => None,
        };
        let service = service.filter(|service| !service.is_empty());
        let slice = service.zip(family).map(|(service, family)| {
            let (endpoints, pods) = with_family(endpoints, pods, family);
            CachedSlice { service, family, endpoints, pods, ports }
        });
        self.set(name, slice, last_change_trigger_time)
    }

    /// Returns true if the slice differs.
    fn set(
        &mut self,
        name: NamespacedName,
        current: Option<CachedSlice>,
        trigger_time: Option<UnixNanos>,
    ) -> bool {
        let previous = self.slices.get(&name);
        if previous == current.as_ref() {
            return false;
        }
        let owner = |slice: &CachedSlice| (slice.service_name(&name), slice.family);
        let [previous_owner, current_owner] = [previous, current.as_ref()].map(|slice| slice.map(owner));
        self.record_trigger_time(previous_owner.as_ref(), current_owner.as_ref(), trigger_time);
        if let Some(changed) = &mut self.changed {
            let owners = previous_owner.iter().chain(&current_owner);
            changed.extend(owners.map(|(service, _)| service.clone()));
        }
        if previous_owner != current_owner {
            if let Some((owner, _)) = &previous_owner {
                self.unlink(owner, &name.name);
            }
            if let Some((owner, _)) = current_owner {
                self.link(owner, &name.name);
            }
        }
        self.endpoint_count += current.as_ref().map_or(0, |slice| slice.endpoints.len());
        let previous = match current {
            Some(slice) => self.slices.insert(name, slice),
            None => self.slices.swap_remove(&name),
        };
        self.endpoint_count -= previous.map_or(0, |slice| slice.endpoints.len());
        true
    }

    /// Records the trigger time of a slice. Upstream's rule for a slice that is deleted: its time
    /// belongs to an earlier change. So that time is ignored, and the recorded times of its Service
    /// are dropped.
    fn record_trigger_time(
        &mut self,
        previous: Option<&(NamespacedName, IpFamily)>,
        current: Option<&(NamespacedName, IpFamily)>,
        time: Option<UnixNanos>,
    ) {
        if let Some(previous) = previous.filter(|previous| current != Some(*previous)) {
            self.trigger_times.remove(previous);
        }
        if let (Some(current), Some(time)) = (current, time.filter(|time| *time > self.start)) {
            self.trigger_times.entry(current.clone()).or_default().push(time);
        }
    }

    fn link(&mut self, service: NamespacedName, slice: &Name) {
        let names = self.by_service.entry(service).or_default();
        if let Err(index) = names.binary_search(slice) {
            names.insert(index, slice.clone());
        }
    }

    fn unlink(&mut self, service: &NamespacedName, slice: &Name) {
        let Some(names) = self.by_service.get_mut(service) else { return };
        names.retain(|name| *name != *slice);
        if names.is_empty() {
            self.by_service.swap_remove(service);
        }
    }
}

impl CachedSlice {
    fn service_name(&self, slice: &NamespacedName) -> NamespacedName {
        NamespacedName { namespace: slice.namespace.clone(), name: self.service.clone() }
    }
}

/// Returns the endpoints with an address of the family, and their pods.
fn with_family(
    mut endpoints: Vec<SliceEndpoint>,
    mut pods: PodNames,
    family: IpFamily,
) -> (Box<[SliceEndpoint]>, PodNames) {
    let is_kept = |endpoint: &SliceEndpoint| IpFamily::of(endpoint.address) == family;
    if !endpoints.iter().all(is_kept) {
        let with_pods = endpoints.iter().zip(pods.iter());
        pods = with_pods.filter_map(|(endpoint, pod)| is_kept(endpoint).then_some(pod)).collect();
        endpoints.retain(is_kept);
    }
    (endpoints.into(), pods)
}
