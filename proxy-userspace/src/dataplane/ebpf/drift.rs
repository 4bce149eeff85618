//! Compares entries of maps with those that were written.

use std::{borrow::Borrow, collections::BTreeSet, net::SocketAddr, path::Path};

use aya::maps::{HashMap, MapData, MapError, lpm_trie::LpmTrie};
use proxy_common::{
    Addr,
    layout::{Endpoint, EndpointKey, EndpointValue, MemberKey, ServiceKey, ServiceValue, SourceRange},
};

use super::{
    maps::{IN_SET, failed, open_pinned},
    plan::{ranges::Range, state::State},
};
use crate::{dataplane::drift::difference, kernel::KernelError, model::ServicePortKey, net::Protocol};

/// The maps of Services and endpoints.
pub struct HeldMaps {
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    endpoints: HashMap<MapData, EndpointKey, EndpointValue>,
    members: HashMap<MapData, MemberKey, u8>,
    node_addresses: HashMap<MapData, Addr, u8>,
    /// A look-up in a trie finds shorter ranges, too. So they are read before.
    ranges: BTreeSet<Range>,
}

impl HeldMaps {
    /// Opens the maps that are pinned in a directory.
    pub(super) fn open(pins: &Path) -> Result<Self, KernelError> {
        let ranges: LpmTrie<MapData, SourceRange, u32> = open_pinned(pins, "source_ranges")?;
        let ranges = ranges.keys().map(|key| key.map(|key| Range::from_key(&key)));
        Ok(Self {
            services: open_pinned(pins, "services")?,
            endpoints: open_pinned(pins, "endpoints")?,
            members: open_pinned(pins, "members")?,
            node_addresses: open_pinned(pins, "node_addresses")?,
            ranges: ranges.collect::<Result<_, _>>().map_err(failed("read", "source_ranges"))?,
        })
    }

    /// Returns what differs of a service port.
    pub(super) fn differences(&self, state: &State, key: &ServicePortKey) -> Vec<String> {
        let Some(service) = state.id(key) else { return Vec::new() };
        let mut found = Vec::new();
        for (key, value) in state.frontends(service) {
            found.extend(differs(&self.services, &key, &value, || format!("services {}", frontend(&key))));
        }
        for (key, value) in state.slots(service) {
            found.extend(differs(&self.endpoints, key, value, || {
                format!("endpoints, slot {} of list {}, {}", key.slot, key.list, address(value.endpoint))
            }));
        }
        for key in state.members_of(service) {
            found.extend(is_missing(&self.members, key, || {
                format!("members {} of list {}", address(key.endpoint), key.list)
            }));
        }
        let missing = state.ranges_of(service).filter(|range| !self.ranges.contains(range));
        found.extend(missing.map(|range| {
            let first = std::net::IpAddr::from(range.prefix.addr);
            format!("the entry source_ranges {first} is missing")
        }));
        found
    }

    /// Returns what differs of the addresses that serve node ports.
    pub(super) fn differences_of_node(&self, state: &State) -> Vec<String> {
        let describe = |address: &Addr| format!("node_addresses {}", std::net::IpAddr::from(*address));
        let addresses = state.node_addresses.iter();
        addresses.filter_map(|key| is_missing(&self.node_addresses, key, || describe(key))).collect()
    }
}

fn differs<K: aya::Pod, V: aya::Pod + PartialEq>(
    map: &HashMap<impl Borrow<MapData>, K, V>,
    key: &K,
    wanted: &V,
    entry: impl FnOnce() -> String,
) -> Option<String> {
    match map.get(key, 0) {
        Ok(held) => difference(wanted, Some(&held), |_| format!("the entry {}", entry())),
        Err(MapError::KeyNotFound) => difference(wanted, None, |_| format!("the entry {}", entry())),
        Err(error) => Some(format!("cannot read the entry {}: {error}", entry())),
    }
}

fn is_missing<K: aya::Pod>(
    map: &HashMap<impl Borrow<MapData>, K, u8>,
    key: &K,
    entry: impl FnOnce() -> String,
) -> Option<String> {
    differs(map, key, &IN_SET, entry)
}

fn address(endpoint: Endpoint) -> SocketAddr {
    endpoint.into()
}

fn frontend(key: &ServiceKey) -> String {
    let protocol = Protocol::from_number(key.proto).map_or("?", Protocol::name);
    format!("{}/{protocol}", address(Endpoint::new(key.addr, key.port)))
}
