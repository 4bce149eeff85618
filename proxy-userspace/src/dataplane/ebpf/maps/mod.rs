//! The maps of the eBPF programs as userspace sees them: how they are created, written and read.

pub(crate) mod checker;
pub(crate) mod counters;
pub(crate) mod entries;
mod fill;
mod node;
mod pinned_fill;
pub(crate) mod prefilter;
pub(crate) mod service_counts;
pub(crate) mod sweeper;
mod usage;

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, lpm_trie::LpmTrie};
use proxy_common::{
    Addr,
    layout::{
        DsrKey, EndpointKey, EndpointValue, HardwareAddress, MAPS, MapContent, MapDeclaration, MapSizes,
        MasqueradeSubnet, MemberKey, NodeValue, SIZE_SETTINGS, ServiceKey, ServiceValue, SourceRange,
        UdpSocket, VlanKey, XdpLinkValue, service_slots,
    },
    maglev::TableSize,
    prefilter::PrefilterTable,
};

pub(crate) use self::node::{NodeSettings, pinned_layouts, pinned_marks, pinned_node, update_node};
pub(in crate::dataplane) use self::pinned_fill::pinned_fill;
use self::{entries::EntryReader, prefilter::Prefilter};
use super::{
    plan::{
        ids::ServiceIds,
        state::{EntriesRead, State},
        step::MapEntry,
    },
    rules::Marks,
};
use crate::{
    dataplane::lock,
    kernel::{
        KernelError,
        bpf::{MapSpec, Object, Writer},
        netns::NetnsCookie,
        sock_diag::SocketCookie,
    },
};

/// Returns what each map must look like on a machine with this number of CPUs.
pub(crate) fn specs(sizes: &MapSizes, cpus: u32) -> Vec<MapSpec> {
    let spec = |map: &MapDeclaration| MapSpec {
        name: map.name,
        key_size: map.key_size,
        value_size: map.value_size,
        max_entries: match map.content {
            MapContent::Counts => (service_slots(sizes.counted_services) * cpus).max(1),
            MapContent::Config | MapContent::State | MapContent::Cache => sizes.entries(map.name),
        },
    };
    MAPS.iter().map(spec).collect()
}

/// Returns the error of a map that has no room.
pub(crate) fn map_full(map: &'static str, sizes: &MapSizes) -> KernelError {
    let remedy = match SIZE_SETTINGS.iter().find(|setting| setting.map == map) {
        Some(setting) => format!("raise {} in the configuration file (--config)", setting.path),
        None if matches!(
            map,
            "bridge_ports"
                | "vlans"
                | "masquerade_addresses"
                | "direct_links"
                | "peer_links"
                | "xdp_links"
                | "dsr_endpoints"
                | "dsr_nodes"
        ) =>
        {
            "its size is fixed".into()
        }
        None if matches!(map, "exempt_netns" | "exempt_sources") => {
            "its size is fixed; --sockets-scope node leaves the sockets of all pods alone".into()
        }
        None => "its size is fixed, but other values of --detect-local-mode do not need this map".into(),
    };
    KernelError::MapFull { map, capacity: sizes.entries(map), remedy }
}

/// The maps that userspace writes.
pub(crate) struct Maps {
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    endpoints: HashMap<MapData, EndpointKey, EndpointValue>,
    members: HashMap<MapData, MemberKey, u8>,
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    node_addresses: HashMap<MapData, Addr, u8>,
    node: Array<MapData, NodeValue>,
    /// The thread that checks the maps clears bits.
    pub(crate) prefilter: Arc<Mutex<Prefilter>>,
    udp_sockets: HashMap<MapData, u64, UdpSocket>,
    local_sources: LpmTrie<MapData, Addr, u8>,
    local_links: HashMap<MapData, u32, u8>,
    bridge_ports: HashMap<MapData, u32, HardwareAddress>,
    vlans: HashMap<MapData, VlanKey, u8>,
    exempt_netns: HashMap<MapData, u64, u8>,
    exempt_sources: HashMap<MapData, Addr, u8>,
    masquerade_addresses: LpmTrie<MapData, MasqueradeSubnet, Addr>,
    direct_links: HashMap<MapData, u32, u8>,
    peer_links: HashMap<MapData, u32, u8>,
    xdp_links: HashMap<MapData, u32, XdpLinkValue>,
    dsr_endpoints: HashMap<MapData, DsrKey, Addr>,
    dsr_nodes: HashMap<MapData, Addr, u8>,
    pub(crate) sizes: MapSizes,
    marks: Marks,
    entries: EntryReader,
    batches: Batches,
}

/// Writers of the maps that have many entries.
struct Batches {
    services: Writer<ServiceKey, ServiceValue>,
    endpoints: Writer<EndpointKey, EndpointValue>,
    members: Writer<MemberKey, u8>,
}

pub(crate) fn failed(operation: &'static str, map: &'static str) -> impl FnOnce(MapError) -> KernelError {
    KernelError::bpf(operation, format!("map {map}"))
}

fn error_number(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(call) => call.io_error.raw_os_error(),
        _ => None,
    }
}

/// Checks the result of a removal. An entry that was not there is no error.
pub(crate) fn removed(map: &'static str, result: Result<(), MapError>) -> Result<(), KernelError> {
    match result {
        Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
        Err(error) if error_number(&error) == Some(libc::ENOENT) => Ok(()),
        Err(error) => Err(failed("remove from", map)(error)),
    }
}

/// The value of every entry of a map that is a set.
pub(crate) const IN_SET: u8 = 1;

impl Maps {
    pub(crate) fn open(object: &mut Object, sizes: MapSizes, marks: Marks) -> Result<Self, KernelError> {
        let batches = Batches {
            services: object.writer("services")?,
            endpoints: object.writer("endpoints")?,
            members: object.writer("members")?,
        };
        Ok(Self {
            entries: EntryReader::open(object)?,
            batches,
            services: object.open_map("services")?,
            endpoints: object.open_map("endpoints")?,
            members: object.open_map("members")?,
            source_ranges: object.open_map("source_ranges")?,
            node_addresses: object.open_map("node_addresses")?,
            node: object.open_map("node")?,
            prefilter: Arc::new(Mutex::new(Prefilter::new(
                object.mapped("prefilter", PrefilterTable::LENGTH)?,
            ))),
            udp_sockets: object.open_map("udp_sockets")?,
            local_sources: object.open_map("local_sources")?,
            local_links: object.open_map("local_links")?,
            bridge_ports: object.open_map("bridge_ports")?,
            vlans: object.open_map("vlans")?,
            exempt_netns: object.open_map("exempt_netns")?,
            exempt_sources: object.open_map("exempt_sources")?,
            masquerade_addresses: object.open_map("masquerade_addresses")?,
            direct_links: object.open_map("direct_links")?,
            peer_links: object.open_map("peer_links")?,
            xdp_links: object.open_map("xdp_links")?,
            dsr_endpoints: object.open_map("dsr_endpoints")?,
            dsr_nodes: object.open_map("dsr_nodes")?,
            sizes,
            marks,
        })
    }

    /// Returns the network namespace of a connected UDP socket, as the programs recorded it.
    pub(crate) fn udp_socket_netns(&self, socket: SocketCookie) -> Result<NetnsCookie, KernelError> {
        let value = self.udp_sockets.get(&socket.0, 0).map_err(failed("read", "udp_sockets"))?;
        Ok(NetnsCookie(value.netns))
    }

    /// Inserts an entry, or replaces its value.
    pub(crate) fn put(&mut self, entry: &MapEntry) -> Result<(), KernelError> {
        // Programs must not miss the entry once it is there.
        if let Some(item) = entry.prefilter_item() {
            lock(&self.prefilter).insert(item);
        }
        let result = match *entry {
            MapEntry::Service(key, value) => self.services.insert(key, value, 0),
            MapEntry::Endpoint(key, value) => self.endpoints.insert(key, value, 0),
            MapEntry::Member(key) => self.members.insert(key, IN_SET, 0),
            MapEntry::SourceRange(range) => self.source_ranges.insert(&range.key(), range.service, 0),
            MapEntry::MasqueradeAddress(subnet, address) => {
                self.masquerade_addresses.insert(&subnet.key(), address, 0)
            }
            MapEntry::NodeAddress(address) => self.node_addresses.insert(address, IN_SET, 0),
            MapEntry::LocalSource(source) => self.local_sources.insert(&source.key(), IN_SET, 0),
            MapEntry::LocalLink(index) => self.local_links.insert(index, IN_SET, 0),
            MapEntry::DirectLink(index) => self.direct_links.insert(index, IN_SET, 0),
            MapEntry::PeerLink(index) => self.peer_links.insert(index, IN_SET, 0),
            MapEntry::XdpLink(index, value) => self.xdp_links.insert(index, value, 0),
            MapEntry::DsrEndpoint(key, node) => self.dsr_endpoints.insert(key, node, 0),
            MapEntry::DsrNode(address, kind) => self.dsr_nodes.insert(address, kind, 0),
            MapEntry::BridgePort(index, bridge) => self.bridge_ports.insert(index, bridge, 0),
            MapEntry::Vlan(vlan) => self.vlans.insert(vlan, IN_SET, 0),
            MapEntry::ExemptNetns(cookie) => self.exempt_netns.insert(cookie.0, IN_SET, 0),
            MapEntry::ExemptSource(address) => self.exempt_sources.insert(address, IN_SET, 0),
        };
        result.map_err(|error| match error_number(&error) {
            // A hash map without room returns E2BIG, a trie ENOSPC.
            Some(libc::E2BIG | libc::ENOSPC) => map_full(entry.map(), &self.sizes),
            _ => failed("write", entry.map())(error),
        })
    }

    /// Returns true if the map of an entry has many entries, which [`Self::put_batch`] writes.
    pub(crate) const fn takes_batches(entry: &MapEntry) -> bool {
        matches!(entry, MapEntry::Service(..) | MapEntry::Endpoint(..) | MapEntry::Member(_))
    }

    /// Inserts or replaces entries of one map in this order, by one call. Stops at the first that
    /// fails: [`Self::put`] returns its error. Returns how many were written.
    pub(crate) fn put_batch(&mut self, entries: &[&MapEntry]) -> usize {
        let items = entries.iter().filter_map(|entry| entry.prefilter_item());
        let mut prefilter = lock(&self.prefilter);
        items.for_each(|item| prefilter.insert(item));
        drop(prefilter);
        let Batches { services, endpoints, members } = &self.batches;
        let entries = entries.iter().copied();
        match entries.clone().next() {
            Some(MapEntry::Service(..)) => services.put(entries.map_while(|entry| match *entry {
                MapEntry::Service(key, value) => Some((key, value)),
                _ => None,
            })),
            Some(MapEntry::Endpoint(..)) => endpoints.put(entries.map_while(|entry| match *entry {
                MapEntry::Endpoint(key, value) => Some((key, value)),
                _ => None,
            })),
            Some(MapEntry::Member(_)) => members.put(entries.map_while(|entry| match *entry {
                MapEntry::Member(key) => Some((key, IN_SET)),
                _ => None,
            })),
            _ => 0,
        }
    }

    /// Removes the entry with the key of this one, if there is one.
    pub(crate) fn remove(&mut self, entry: &MapEntry) -> Result<(), KernelError> {
        let result = match entry {
            MapEntry::Service(key, _) => self.services.remove(key),
            MapEntry::Endpoint(key, _) => self.endpoints.remove(key),
            MapEntry::Member(key) => self.members.remove(key),
            MapEntry::SourceRange(range) => self.source_ranges.remove(&range.key()),
            MapEntry::MasqueradeAddress(subnet, _) => self.masquerade_addresses.remove(&subnet.key()),
            MapEntry::NodeAddress(address) => self.node_addresses.remove(address),
            MapEntry::LocalSource(source) => self.local_sources.remove(&source.key()),
            MapEntry::LocalLink(index) => self.local_links.remove(index),
            MapEntry::DirectLink(index) => self.direct_links.remove(index),
            MapEntry::PeerLink(index) => self.peer_links.remove(index),
            MapEntry::XdpLink(index, _) => self.xdp_links.remove(index),
            MapEntry::DsrEndpoint(key, _) => self.dsr_endpoints.remove(key),
            MapEntry::DsrNode(address, _) => self.dsr_nodes.remove(address),
            MapEntry::BridgePort(index, _) => self.bridge_ports.remove(index),
            MapEntry::Vlan(vlan) => self.vlans.remove(vlan),
            MapEntry::ExemptNetns(cookie) => self.exempt_netns.remove(&cookie.0),
            MapEntry::ExemptSource(address) => self.exempt_sources.remove(address),
        };
        removed(entry.map(), result)
    }

    /// Removes all frontends, so that the programs translate no new connection.
    pub(crate) fn remove_all_services(&mut self) -> Result<(), KernelError> {
        let keys: Result<Vec<_>, _> = self.services.keys().collect();
        let keys = keys.map_err(failed("read", "services"))?;
        keys.iter().try_for_each(|key| removed("services", self.services.remove(key)))
    }

    /// Reads all entries.
    pub(crate) fn read(&mut self, ids: ServiceIds, table_size: TableSize) -> Result<State, KernelError> {
        let mut state = State::default();
        (state.ids, state.table_size) = (ids, table_size);
        let mut entries = EntriesRead::new(state);
        self.entries.read(|entry| entries.add(&entry))?;
        let mut state = entries.into_state();
        let node = self.node_settings()?;
        state.local_detection = node.local_detection;
        (state.socket_scope, state.new_flows) = (node.socket_scope, node.new_flows);
        (state.masquerade, state.direct, state.tunnel) = (node.masquerade, node.direct, node.tunnel);
        state.forget_names();
        Ok(state)
    }
}

/// Opens a map that is pinned in a directory.
pub(crate) fn open_pinned<M>(directory: &Path, map: &'static str) -> Result<M, KernelError>
where
    M: TryFrom<Map, Error = MapError>,
{
    let data = MapData::from_pin(directory.join(map)).and_then(Map::from_map_data);
    data.and_then(M::try_from).map_err(failed("open", map))
}
