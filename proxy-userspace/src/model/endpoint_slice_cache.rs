//! The known EndpointSlices, reduced to the fields that resolution needs. Merges the slices of a
//! Service.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    net::SocketAddr,
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    AddressType, Delta, EndpointSlice, Hints, IpFamily, Name, NamespacedName, ServicePortKey, SliceEndpoint,
    SlicePort, UnixNanos, intern::Interner,
};

/// Upstream's `EndpointSliceCache`, with the trigger times of `EndpointsChangeTracker`.
#[derive(Debug, Default)]
pub(super) struct EndpointSliceCache {
    slices: HashMap<NamespacedName, CachedSlice>,
    /// The names of each Service's slices, sorted. They are in its namespace. Most Services have one
    /// slice.
    by_service: HashMap<NamespacedName, SmallVec<[Name; 1]>>,
    hints: Interner<Hints>,
    /// Most slices have the same ports as many others.
    ports: Interner<[SlicePort]>,
    /// The number of endpoints in all slices.
    pub(super) endpoint_count: usize,
    /// The first complete list came. Changes before it are not part of the programming latency.
    pub(super) is_listed: bool,
    /// The Services whose slices changed since [`Self::checkout_changes`].
    changed: BTreeSet<NamespacedName>,
    trigger_times: BTreeMap<NamespacedName, Vec<UnixNanos>>,
}

/// A slice with addresses of one family that belongs to a Service.
#[derive(Debug, PartialEq, Eq)]
struct CachedSlice {
    service: Name,
    family: IpFamily,
    /// The endpoints with an address of the family.
    endpoints: Box<[SliceEndpoint]>,
    /// The ports with a number.
    ports: Arc<[SlicePort]>,
}

/// An endpoint of one service port: upstream's `BaseEndpointInfo`.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndpointInfo<'a> {
    pub(super) address: SocketAddr,
    pub(super) is_local: bool,
    pub(super) endpoint: &'a SliceEndpoint,
}

impl EndpointSliceCache {
    /// Applies a change from a source.
    pub(super) fn update(&mut self, delta: Delta<EndpointSlice>, strings: &mut Interner<str>) {
        let is_list = matches!(delta, Delta::Replace(_));
        let (deleted, slices) = delta.split(self.slices.keys(), |slice| &slice.name);
        for name in deleted {
            self.set(name, None, None);
        }
        for slice in slices {
            self.apply(slice, strings);
        }
        if is_list && !mem::replace(&mut self.is_listed, true) {
            self.trigger_times.clear();
        }
    }

    /// Returns the Services whose slices changed since the last call.
    pub(super) fn checkout_changes(&mut self) -> BTreeSet<NamespacedName> {
        mem::take(&mut self.changed)
    }

    /// Returns the trigger times of slices that changed since the last call.
    pub(super) fn checkout_trigger_times(&mut self) -> Vec<UnixNanos> {
        mem::take(&mut self.trigger_times).into_values().flatten().collect()
    }

    /// Returns the Services that have an endpoint with hints.
    pub(super) fn services_with_hints(&self) -> impl Iterator<Item = NamespacedName> {
        let hinted =
            self.slices.iter().filter(|(_, slice)| slice.endpoints.iter().any(|e| e.hints.is_some()));
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
            !node_name.is_empty() && endpoint.node_name.as_deref() == Some(node_name)
        };
        let mut endpoints = Vec::new();
        for slice in self.slices_of(&key.name.service).filter(|slice| slice.family == key.family) {
            let is_port =
                |port: &&SlicePort| port.protocol == key.name.protocol && port.name == key.name.port;
            for port in slice.ports.iter().filter(is_port).filter_map(|port| port.port) {
                let addressed = slice.endpoints.iter().filter_map(|endpoint| {
                    let address = SocketAddr::new(endpoint.address?, port.get());
                    Some(EndpointInfo { address, is_local: is_local(endpoint), endpoint })
                });
                endpoints.extend(addressed);
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

    fn slices_of(&self, service: &NamespacedName) -> impl Iterator<Item = &CachedSlice> {
        let namespace = service.namespace.clone();
        let names = self.by_service.get(service).into_iter().flatten();
        names.filter_map(move |name| {
            self.slices.get(&NamespacedName { namespace: namespace.clone(), name: name.clone() })
        })
    }

    fn apply(&mut self, slice: EndpointSlice, strings: &mut Interner<str>) {
        let mut name = slice.name.clone();
        name.namespace.share(strings);
        let trigger_time = slice.last_change_trigger_time;
        let slice = CachedSlice::new(slice, strings, &mut self.hints, &mut self.ports);
        self.set(name, slice, trigger_time);
    }

    fn set(&mut self, name: NamespacedName, current: Option<CachedSlice>, trigger_time: Option<UnixNanos>) {
        let previous = self.slices.get(&name);
        if previous == current.as_ref() {
            return;
        }
        let owners = [previous, current.as_ref()].map(|slice| slice.map(|slice| slice.service_name(&name)));
        let [previous_owner, current_owner] = owners;
        if previous_owner != current_owner {
            if let Some(owner) = &previous_owner {
                self.unlink(owner, &name.name);
            }
            if let Some(owner) = &current_owner {
                self.link(owner, &name.name);
            }
        }
        self.record_trigger_time(previous_owner.as_ref(), current_owner.as_ref(), trigger_time);
        self.changed.extend(previous_owner.into_iter().chain(current_owner));
        self.endpoint_count += current.as_ref().map_or(0, |slice| slice.endpoints.len());
        let previous = match current {
            Some(slice) => self.slices.insert(name, slice),
            None => self.slices.remove(&name),
        };
        self.endpoint_count -= previous.map_or(0, |slice| slice.endpoints.len());
    }

    /// Records the trigger time of a slice. Upstream's rule for a slice that is deleted: its time
    /// belongs to an earlier change. So that time is ignored, and the recorded times of its Service
    /// are dropped.
    fn record_trigger_time(
        &mut self,
        previous: Option<&NamespacedName>,
        current: Option<&NamespacedName>,
        time: Option<UnixNanos>,
    ) {
        if let Some(previous) = previous.filter(|previous| current != Some(*previous)) {
            self.trigger_times.remove(previous);
        }
        if let (Some(current), Some(time)) = (current, time) {
            self.trigger_times.entry(current.clone()).or_default().push(time);
        }
    }

    fn link(&mut self, service: &NamespacedName, slice: &Name) {
        let names = self.by_service.entry(service.clone()).or_default();
        if let Err(index) = names.binary_search(slice) {
            names.insert(index, slice.clone());
        }
    }

    fn unlink(&mut self, service: &NamespacedName, slice: &Name) {
        let Some(names) = self.by_service.get_mut(service) else { return };
        names.retain(|name| *name != *slice);
        if names.is_empty() {
            self.by_service.remove(service);
        }
    }
}

impl CachedSlice {
    /// Reduces a slice. None if it has no Service, or host names as addresses.
    fn new(
        slice: EndpointSlice,
        strings: &mut Interner<str>,
        hints: &mut Interner<Hints>,
        port_sets: &mut Interner<[SlicePort]>,
    ) -> Option<Self> {
        let mut service = slice.service.filter(|service| !service.is_empty())?;
        let family = match slice.address_type {
            AddressType::Ipv4 => IpFamily::V4,
            AddressType::Ipv6 => IpFamily::V6,
            AddressType::Fqdn => return None,
        };
        let reduce_endpoint = |mut endpoint: SliceEndpoint| {
            let address = endpoint.address?.to_canonical();
            endpoint.address = Some(address);
            endpoint.node_name.iter_mut().for_each(|name| strings.share(name));
            endpoint.hints.iter_mut().for_each(|names| hints.share(names));
            (IpFamily::of(address) == family).then_some(endpoint)
        };
        let endpoints = slice.endpoints.into_iter().filter_map(reduce_endpoint).collect();
        let share_name = |mut port: SlicePort| {
            port.name.share(strings);
            port
        };
        let ports = slice.ports.into_iter().filter(|port| port.port.is_some()).map(share_name).collect();
        let ports = port_sets.intern(&ports);
        service.share(strings);
        Some(Self { service, family, endpoints, ports })
    }

    fn service_name(&self, slice: &NamespacedName) -> NamespacedName {
        NamespacedName { namespace: slice.namespace.clone(), name: self.service.clone() }
    }
}
