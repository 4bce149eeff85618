//! Compares entries of maps with those that were written.

use std::{
    borrow::Borrow,
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use aya::maps::{HashMap, MapData, MapError, lpm_trie::LpmTrie};
use proxy_common::{
    Addr,
    layout::{
        DsrKey, Endpoint, EndpointKey, EndpointValue, MemberKey, ServiceKey, ServiceValue, SourceRange,
    },
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
    dsr_endpoints: HashMap<MapData, DsrKey, Addr>,
    dsr_nodes: HashMap<MapData, Addr, u8>,
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
            dsr_endpoints: open_pinned(pins, "dsr_endpoints")?,
            dsr_nodes: open_pinned(pins, "dsr_nodes")?,
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
        for (key, node) in state.dsr_endpoints_of(service) {
            found.extend(differs(&self.dsr_endpoints, key, node, || {
                format!("dsr_endpoints {}", ip(key.addr))
            }));
        }
        let missing = state.ranges_of(service).filter(|range| !self.ranges.contains(range));
        found.extend(
            missing.map(|range| format!("the entry source_ranges {} is missing", ip(range.prefix.addr))),
        );
        found
    }

    /// Returns what differs of the addresses that serve node ports, and of the nodes behind the
    /// tunnel.
    pub(super) fn differences_of_node(&self, state: &State) -> Vec<String> {
        let node_ports = state.node_addresses.iter().filter_map(|key| {
            is_missing(&self.node_addresses, key, || format!("node_addresses {}", ip(*key)))
        });
        let nodes = state.dsr_nodes.iter().filter_map(|(key, kind)| {
            differs(&self.dsr_nodes, key, kind, || format!("dsr_nodes {}", ip(*key)))
        });
        node_ports.chain(nodes).collect()
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

fn ip(addr: Addr) -> IpAddr {
    addr.into()
}

fn address(endpoint: Endpoint) -> SocketAddr {
    endpoint.into()
}

fn frontend(key: &ServiceKey) -> String {
    let protocol = Protocol::from_number(key.proto).map_or("?", Protocol::name);
    let through = if key.tunneled == 0 { "" } else { " through the tunnel" };
    format!("{}/{protocol}{through}", address(Endpoint::new(key.addr, key.port)))
}
