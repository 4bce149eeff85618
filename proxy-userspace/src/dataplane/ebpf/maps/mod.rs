//! The maps of the eBPF programs as userspace sees them: how they are created, written and read.

pub(crate) mod checker;
pub(crate) mod counters;
pub(crate) mod entries;
mod fill;
mod pinned_fill;
pub(crate) mod prefilter;
pub(crate) mod service_counts;
pub(crate) mod sweeper;
mod usage;

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, lpm_trie::LpmTrie};
use proxy_common::{
    Addr,
    layout::{
        DsrKey, EndpointKey, EndpointValue, HardwareAddress, LAYOUT_VERSION, LocalDetection, MAPS,
        MapContent, MapDeclaration, MapSizes, MasqueradeSubnet, Masquerading, MemberKey, NewFlows, NodeValue,
        SIZE_SETTINGS, STATE_LAYOUT_VERSION, ServiceKey, ServiceValue, SocketScope, SourceRange, UdpSocket,
        VlanKey, XdpLinkValue, service_slots,
    },
    maglev::TableSize,
    prefilter::PrefilterTable,
};

pub(in crate::dataplane) use self::pinned_fill::pinned_fill;
use self::{entries::EntryReader, prefilter::Prefilter};
use super::{
    plan::{
        ids::ServiceIds,
        state::{EntriesRead, State},
        step::{DirectEpoch, DirectFields, MapEntry, MasqueradeFields, TunnelFields},
    },
    rules::Marks,
};
use crate::{
    dataplane::lock,
    kernel::{
        KernelError,
        bpf::{MapSpec, Object, Writer, first_words},
        clock,
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
    xdp_links: HashMap<MapData, u32, XdpLinkValue>,
    dsr_endpoints: HashMap<MapData, DsrKey, Addr>,
    dsr_nodes: HashMap<MapData, Addr, u8>,
    pub(crate) sizes: MapSizes,
    marks: Marks,
    entries: EntryReader,
    batches: Batches,
}

/// What a plan sets in `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeSettings {
    local_detection: u32,
    socket_scope: u16,
    new_flows: u16,
    masquerade: MasqueradeFields,
    direct: DirectFields,
    tunnel: TunnelFields,
}

impl NodeSettings {
    /// Returns what they are as this process knows them.
    pub(crate) const fn of_state(state: &State) -> Self {
        Self {
            local_detection: state.local_detection,
            socket_scope: state.socket_scope,
            new_flows: state.new_flows,
            masquerade: state.masquerade,
            direct: state.direct,
            tunnel: state.tunnel,
        }
    }
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
            services: object.take_map("services")?,
            endpoints: object.take_map("endpoints")?,
            members: object.take_map("members")?,
            source_ranges: object.take_map("source_ranges")?,
            node_addresses: object.take_map("node_addresses")?,
            node: object.take_map("node")?,
            prefilter: Arc::new(Mutex::new(Prefilter::new(
                object.mapped("prefilter", PrefilterTable::LENGTH)?,
            ))),
            udp_sockets: object.take_map("udp_sockets")?,
            local_sources: object.take_map("local_sources")?,
            local_links: object.take_map("local_links")?,
            bridge_ports: object.take_map("bridge_ports")?,
            vlans: object.take_map("vlans")?,
            exempt_netns: object.take_map("exempt_netns")?,
            exempt_sources: object.take_map("exempt_sources")?,
            masquerade_addresses: object.take_map("masquerade_addresses")?,
            direct_links: object.take_map("direct_links")?,
            xdp_links: object.take_map("xdp_links")?,
            dsr_endpoints: object.take_map("dsr_endpoints")?,
            dsr_nodes: object.take_map("dsr_nodes")?,
            sizes,
            marks,
        })
    }

    /// Writes the network namespace of the node and the versions of the layout.
    ///
    /// If the namespace is unknown, the one that an earlier process found out stays. What the plan
    /// sets stays too, since the programs of an earlier process may still run.
    pub(crate) fn set_node(&mut self, netns: Option<NetnsCookie>) -> Result<(), KernelError> {
        let before = self.node.get(&0, 0).ok();
        let value = NodeValue {
            netns: netns
                .map(|cookie| cookie.0)
                .or(before.map(|value| value.netns))
                .unwrap_or(NodeValue::NETNS_UNKNOWN),
            layout: LAYOUT_VERSION,
            masquerade_mark: self.marks.masquerade,
            reject_mark: self.marks.reject,
            local_detection: before.map_or(LocalDetection::None as u32, |value| value.local_detection),
            state_layout: STATE_LAYOUT_VERSION,
            socket_scope: before.map_or(SocketScope::All as u16, |value| value.socket_scope),
            new_flows: before.map_or(NewFlows::Translate as u16, |value| value.new_flows),
            settling_until_ns: 0,
            masquerading: before.map_or(Masquerading::Netfilter as u16, |value| value.masquerading),
            first_port: before.map_or(0, |value| value.first_port),
            last_port: before.map_or(0, |value| value.last_port),
            direct_scope: before.map_or(0, |value| value.direct_scope),
            direct_epoch: before.map_or(0, |value| value.direct_epoch),
            direct_lease_ns: before.map_or(0, |value| value.direct_lease_ns),
            tunnel_link: before.map_or(0, |value| value.tunnel_link),
            tunnel_mtu: before.map_or(0, |value| value.tunnel_mtu),
            tunnel_v4: before.map_or(Addr::UNSPECIFIED_V6, |value| value.tunnel_v4),
            tunnel_v6: before.map_or(Addr::UNSPECIFIED_V6, |value| value.tunnel_v6),
            tunnel_returns: before.map_or(0, |value| value.tunnel_returns),
            zero: 0,
        };
        self.node.set(0, value, 0).map_err(failed("write", "node"))
    }

    fn update_node(&mut self, update: impl FnOnce(&mut NodeValue)) -> Result<(), KernelError> {
        update_node(&mut self.node, update)
    }

    /// Sets the marks that the programs put on packets.
    pub(crate) fn set_marks(&mut self, marks: Marks) -> Result<(), KernelError> {
        self.update_node(|node| {
            node.masquerade_mark = marks.masquerade;
            node.reject_mark = marks.reject;
        })?;
        self.marks = marks;
        Ok(())
    }

    /// Sets how the programs recognize local clients.
    pub(crate) fn set_local_detection(&mut self, detection: LocalDetection) -> Result<(), KernelError> {
        self.update_node(|node| node.local_detection = detection as u32)
    }

    /// Sets which sockets the programs serve.
    pub(crate) fn set_socket_scope(&mut self, scope: SocketScope) -> Result<(), KernelError> {
        self.update_node(|node| node.socket_scope = scope as u16)
    }

    /// Sets what masquerades.
    pub(crate) fn set_masquerade(&mut self, fields: MasqueradeFields) -> Result<(), KernelError> {
        let MasqueradeFields { masquerading, first_port, last_port } = fields;
        self.update_node(|node| {
            (node.masquerading, node.first_port, node.last_port) = (masquerading, first_port, last_port);
        })
    }

    /// Sets which flows take the direct path.
    pub(crate) fn set_direct(&mut self, fields: DirectFields) -> Result<(), KernelError> {
        let DirectFields { epoch, scope, lease_ns } = fields;
        self.update_node(|node| {
            (node.direct_epoch, node.direct_scope, node.direct_lease_ns) = (epoch.0, scope, lease_ns);
        })
    }

    /// Sets the tunnel to other nodes.
    pub(crate) fn set_tunnel(&mut self, fields: TunnelFields) -> Result<(), KernelError> {
        let TunnelFields { link, mtu, v4, v6, returns } = fields;
        self.update_node(|node| {
            (node.tunnel_link, node.tunnel_mtu) = (link, mtu);
            (node.tunnel_v4, node.tunnel_v6, node.tunnel_returns) = (v4, v6, returns);
        })
    }

    /// Sets what the link programs do with new flows.
    pub(crate) fn set_new_flows(&mut self, new_flows: NewFlows) -> Result<(), KernelError> {
        self.update_node(|node| node.new_flows = new_flows as u16)
    }

    /// Tells the programs that flows may be missing during this time from now on. Zero ends it.
    pub(crate) fn set_settling(&mut self, duration: Duration) -> Result<(), KernelError> {
        let until = if duration.is_zero() { Duration::ZERO } else { clock::monotonic()? + duration };
        self.update_node(|node| node.settling_until_ns = clock::nanos(until))
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

    /// Returns what a plan sets in `node`.
    pub(crate) fn node_settings(&self) -> Result<NodeSettings, KernelError> {
        let node = self.node.get(&0, 0).map_err(failed("read", "node"))?;
        let NodeValue { masquerading, first_port, last_port, .. } = node;
        Ok(NodeSettings {
            local_detection: node.local_detection,
            socket_scope: node.socket_scope,
            new_flows: node.new_flows,
            masquerade: MasqueradeFields { masquerading, first_port, last_port },
            direct: DirectFields {
                epoch: DirectEpoch(node.direct_epoch),
                scope: node.direct_scope,
                lease_ns: node.direct_lease_ns,
            },
            tunnel: TunnelFields {
                link: node.tunnel_link,
                mtu: node.tunnel_mtu,
                v4: node.tunnel_v4,
                v6: node.tunnel_v6,
                returns: node.tunnel_returns,
            },
        })
    }
}

/// Changes the only value of the map `node`.
pub(crate) fn update_node(
    node: &mut Array<MapData, NodeValue>,
    update: impl FnOnce(&mut NodeValue),
) -> Result<(), KernelError> {
    let mut value = node.get(&0, 0).map_err(failed("read", "node"))?;
    update(&mut value);
    node.set(0, value, 0).map_err(failed("write", "node"))
}

/// Opens a map that is pinned in a directory.
pub(crate) fn open_pinned<M>(directory: &Path, map: &'static str) -> Result<M, KernelError>
where
    M: TryFrom<Map, Error = MapError>,
{
    let data = MapData::from_pin(directory.join(map)).and_then(Map::from_map_data);
    data.and_then(M::try_from).map_err(failed("open", map))
}

/// Returns the value of the map `node` that is pinned in a directory. Returns `None` if there is no
/// such map, or if the maps have another layout.
pub(crate) fn pinned_node(directory: &Path) -> Result<Option<NodeValue>, KernelError> {
    if pinned_layouts(directory).is_none_or(|(layout, _)| layout != LAYOUT_VERSION) {
        return Ok(None);
    }
    let node: Array<MapData, NodeValue> = open_pinned(directory, "node")?;
    node.get(&0, 0).map(Some).map_err(failed("read", "node"))
}

/// Returns the marks that the programs with the maps pinned in a directory use. Returns `None` if
/// there are no such maps, or if they have another layout.
pub(crate) fn pinned_marks(directory: &Path) -> Option<Marks> {
    let node = pinned_node(directory).ok()??;
    let NodeValue { masquerade_mark: masquerade, reject_mark: reject, .. } = node;
    (masquerade != 0).then_some(Marks { masquerade, reject })
}

/// Returns the layout versions of the maps pinned in a directory: that of all maps, and that of the
/// maps with [`MapContent::State`]. Returns `None` if no map `node` is pinned there. These two
/// fields have the same position in every version; the others may not.
pub(crate) fn pinned_layouts(directory: &Path) -> Option<(u32, u32)> {
    first_words(&directory.join("node")).ok().map(|[layout, state_layout]| (layout, state_layout))
}
