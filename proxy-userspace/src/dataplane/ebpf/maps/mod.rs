//! The maps of the eBPF programs as userspace sees them: their sizes, their types, and one write each.

pub(crate) mod counters;
pub(crate) mod prefilter;
pub(crate) mod service_counts;
pub(crate) mod sweeper;
mod usage;

use std::{fmt, path::Path, time::Duration};

use aya::maps::{
    Array, HashMap, Map, MapData, MapError,
    lpm_trie::{Key, LpmTrie},
};
use proxy_common::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, BridgeAddress, Connection, Endpoint, EndpointKey, Flow, FlowKey,
        FragmentKey, FragmentValue, LAYOUT_VERSION, LocalDetection, MemberKey, NodeValue, ProgramErrors,
        STATE_LAYOUT_VERSION, ServiceCounts, ServiceKey, ServiceValue, SocketPeer, SourceRange, UdpSocket,
        service_slots,
    },
    prefilter::{PrefilterBit, WORDS},
};

use self::prefilter::Prefilter;
use super::{
    plan::{
        ids::Ids,
        ranges::{Prefix, Range},
        state::State,
    },
    rules::Marks,
};
use crate::kernel::{
    KernelError,
    bpf::{MapSpec, Object, first_words},
    clock,
    netns::NetnsCookie,
    sock_diag::SocketCookie,
};

/// Capacities. Those of the first five maps cost 16 bytes an entry while empty; the others take all their memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Destinations: an address and port each; a node port counts once.
    pub services: u32,
    /// Endpoints over all Services; a Service's count twice while they change.
    pub endpoints: u32,
    /// Endpoints of Services that use UDP or affinity; see `members` in the map layout.
    pub members: u32,
    /// `loadBalancerSourceRanges` over all Services.
    pub source_ranges: u32,
    /// Addresses of this node.
    pub node_addresses: u32,
    /// Clients of Services with affinity.
    pub affinity: u32,
    /// Conversations of unconnected UDP sockets.
    pub udp_flows: u32,
    /// Connected UDP sockets.
    pub udp_sockets: u32,
    /// Connected TCP sockets.
    pub tcp_connections: u32,
    /// Flows translated on links; each takes two.
    pub flows: u32,
    /// Fragmented datagrams on links.
    pub fragments: u32,
    /// Service ports that are counted apart from others; 0 counts none. Each takes 40 bytes a CPU, and twice that at most.
    pub counted_services: u32,
}

impl Default for MapSizes {
    fn default() -> Self {
        Self {
            services: 131_072,
            endpoints: 524_288,
            members: 524_288,
            source_ranges: 65_536,
            node_addresses: 4_096,
            affinity: 65_536,
            udp_flows: 65_536,
            udp_sockets: 32_768,
            tcp_connections: 131_072,
            flows: 262_144,
            fragments: 8_192,
            counted_services: 4_000,
        }
    }
}

impl MapSizes {
    /// How many service ports each CPU has room to count.
    pub(crate) const fn service_slots(&self) -> u32 {
        service_slots(self.counted_services)
    }

    /// What every map must look like where there are so many CPUs.
    pub fn specs(&self, cpus: u32) -> [MapSpec; 21] {
        [
            spec::<ServiceKey, ServiceValue>("services", self.services),
            spec::<EndpointKey, Endpoint>("endpoints", self.endpoints),
            spec::<MemberKey, u8>("members", self.members),
            spec::<Key<SourceRange>, u32>("source_ranges", self.source_ranges),
            spec::<Addr, u8>("node_addresses", self.node_addresses),
            spec::<u32, NodeValue>("node", 0),
            spec::<AffinityKey, AffinityValue>("affinity", self.affinity),
            spec::<SocketPeer, Endpoint>("udp_flows", self.udp_flows),
            spec::<SocketPeer, Endpoint>("udp_replies", self.udp_flows),
            spec::<u64, UdpSocket>("udp_sockets", self.udp_sockets),
            spec::<i32, Connection>("udp_connections", 0),
            spec::<u64, Connection>("tcp_connections", self.tcp_connections),
            spec::<Key<Addr>, u8>("local_sources", MOST_LOCAL),
            spec::<u32, u8>("local_links", MOST_LOCAL),
            spec::<u32, BridgeAddress>("bridge_ports", MOST_LOCAL),
            spec::<FlowKey, Flow>("flows", self.flows),
            spec::<FragmentKey, FragmentValue>("fragments", self.fragments),
            spec::<u32, u64>("counters", 0),
            spec::<u32, u64>("prefilter", 0),
            spec::<u32, ServiceCounts>("service_counts", (self.service_slots() * cpus).max(1)),
            spec::<u32, ProgramErrors>("program_errors", 0),
        ]
    }

    /// The error of a map that has no room.
    pub(crate) fn full(map: &'static str, capacity: u32) -> KernelError {
        let remedy = match setting_name(map) {
            Some(setting) => format!("raise mapSizes.{setting} of section shunt.ebpf in --config"),
            None if map == "bridge_ports" => "its size is fixed".into(),
            None => "its size is fixed, and another --detect-local-mode needs none of it".into(),
        };
        KernelError::MapFull { map, capacity, remedy }
    }
}

/// The name of a map's size in the configuration; none of those without one.
fn setting_name(map: &str) -> Option<&'static str> {
    match map {
        "services" => Some("services"),
        "endpoints" => Some("endpoints"),
        "members" => Some("members"),
        "source_ranges" => Some("sourceRanges"),
        "node_addresses" => Some("nodeAddresses"),
        _ => None,
    }
}

/// Ranges, or links, of local pods, or ports of bridges: one range a family, and more links than a node has pods.
const MOST_LOCAL: u32 = 4_096;

const fn spec<K, V>(name: &'static str, max_entries: u32) -> MapSpec {
    MapSpec { name, key_size: size_of::<K>(), value_size: size_of::<V>(), max_entries }
}

/// The maps that userspace writes.
pub(crate) struct Maps {
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    endpoints: HashMap<MapData, EndpointKey, Endpoint>,
    members: HashMap<MapData, MemberKey, u8>,
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    node_addresses: HashMap<MapData, Addr, u8>,
    node: Array<MapData, NodeValue>,
    pub(crate) prefilter: Prefilter,
    udp_sockets: HashMap<MapData, u64, UdpSocket>,
    local_sources: LpmTrie<MapData, Addr, u8>,
    local_links: HashMap<MapData, u32, u8>,
    bridge_ports: HashMap<MapData, u32, BridgeAddress>,
    pub(crate) sizes: MapSizes,
    marks: Marks,
}

impl fmt::Debug for Maps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maps").field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

/// Turns the library's error into ours, and "no room" into the one that says what to do.
fn failed(operation: &'static str, map: &'static str, capacity: u32) -> impl FnOnce(MapError) -> KernelError {
    move |error| match &error {
        // A hash map without room says E2BIG, a trie ENOSPC.
        MapError::SyscallError(call)
            if matches!(call.io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC)) =>
        {
            MapSizes::full(map, capacity)
        }
        _ => KernelError::bpf(operation, format!("map {map}"))(error),
    }
}

/// Removing what is not there is what was wanted.
pub(crate) fn removed(map: &'static str) -> impl Fn(Result<(), MapError>) -> Result<(), KernelError> {
    move |result| match result {
        Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
        Err(MapError::SyscallError(call)) if call.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(error) => Err(failed("remove from", map, 0)(error)),
    }
}

const IN_SET: u8 = 1;

impl Maps {
    pub(crate) fn open(object: &mut Object, sizes: MapSizes, marks: Marks) -> Result<Self, KernelError> {
        Ok(Self {
            services: object.take_map("services")?,
            endpoints: object.take_map("endpoints")?,
            members: object.take_map("members")?,
            source_ranges: object.take_map("source_ranges")?,
            node_addresses: object.take_map("node_addresses")?,
            node: object.take_map("node")?,
            prefilter: Prefilter::new(object.mapped("prefilter", WORDS)?),
            udp_sockets: object.take_map("udp_sockets")?,
            local_sources: object.take_map("local_sources")?,
            local_links: object.take_map("local_links")?,
            bridge_ports: object.take_map("bridge_ports")?,
            sizes,
            marks,
        })
    }

    /// Says which network namespace is the node's, and that these maps are of our layout. While it is not known, what an
    /// earlier process found out stays, and so does how local callers are told: its programs run.
    pub(crate) fn set_node(&mut self, netns: Option<NetnsCookie>) -> Result<(), KernelError> {
        let known = self.node.get(&0, 0).ok();
        let netns_known = known.map_or(NodeValue::NETNS_UNKNOWN, |value| value.netns);
        let value = NodeValue {
            netns: netns.map_or(netns_known, |cookie| cookie.0),
            layout: LAYOUT_VERSION,
            masquerade_mark: self.marks.masquerade,
            reject_mark: self.marks.reject,
            local_detection: known.map_or(LocalDetection::None as u32, |value| value.local_detection),
            state_layout: STATE_LAYOUT_VERSION,
            zero: 0,
            settling_until_ns: 0,
        };
        self.node.set(0, value, 0).map_err(failed("write", "node", 1))
    }

    /// Has the programs mark packets so from now on.
    pub(crate) fn set_marks(&mut self, marks: Marks) -> Result<(), KernelError> {
        let known = self.node.get(&0, 0).map_err(failed("read", "node", 1))?;
        let Marks { masquerade: masquerade_mark, reject: reject_mark } = marks;
        let value = NodeValue { masquerade_mark, reject_mark, ..known };
        self.node.set(0, value, 0).map_err(failed("write", "node", 1))?;
        self.marks = marks;
        Ok(())
    }

    /// Says how local callers are told from others.
    pub(crate) fn set_local_detection(&mut self, detection: LocalDetection) -> Result<(), KernelError> {
        let known = self.node.get(&0, 0).map_err(failed("read", "node", 1))?;
        let value = NodeValue { local_detection: detection as u32, ..known };
        self.node.set(0, value, 0).map_err(failed("write", "node", 1))
    }

    /// Says that flows may be missing for so long from now on; zero once they are all there.
    pub(crate) fn set_settling(&mut self, how_long: Duration) -> Result<(), KernelError> {
        let known = self.node.get(&0, 0).map_err(failed("read", "node", 1))?;
        let until = if how_long.is_zero() { Duration::ZERO } else { clock::monotonic()? + how_long };
        let settling_until_ns = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        self.node.set(0, NodeValue { settling_until_ns, ..known }, 0).map_err(failed("write", "node", 1))
    }

    /// The network namespace of a connected UDP socket, as the programs noted it.
    pub(crate) fn udp_socket_netns(&self, socket: SocketCookie) -> Result<NetnsCookie, KernelError> {
        let noted = self.udp_sockets.get(&socket.0, 0).map_err(failed("read", "udp_sockets", 0))?;
        Ok(NetnsCookie(noted.netns))
    }

    pub(crate) fn put_service(&mut self, key: ServiceKey, value: ServiceValue) -> Result<(), KernelError> {
        self.prefilter.insert(PrefilterBit::of_service(&key.addr, key.port));
        self.services.insert(key, value, 0).map_err(failed("write", "services", self.sizes.services))
    }

    pub(crate) fn put_endpoint(&mut self, key: EndpointKey, value: Endpoint) -> Result<(), KernelError> {
        self.prefilter.insert(PrefilterBit::of_endpoint(&value.addr, value.port));
        self.endpoints.insert(key, value, 0).map_err(failed("write", "endpoints", self.sizes.endpoints))
    }

    pub(crate) fn put_member(&mut self, key: MemberKey) -> Result<(), KernelError> {
        self.prefilter.insert(PrefilterBit::of_endpoint(&key.endpoint.addr, key.endpoint.port));
        self.members.insert(key, IN_SET, 0).map_err(failed("write", "members", self.sizes.members))
    }

    pub(crate) fn put_range(&mut self, range: Range) -> Result<(), KernelError> {
        let capacity = self.sizes.source_ranges;
        self.source_ranges.insert(&range.key(), range.service, 0).map_err(failed(
            "write",
            "source_ranges",
            capacity,
        ))
    }

    pub(crate) fn put_node_address(&mut self, address: Addr) -> Result<(), KernelError> {
        let capacity = self.sizes.node_addresses;
        self.node_addresses.insert(address, IN_SET, 0).map_err(failed("write", "node_addresses", capacity))
    }

    pub(crate) fn put_local_source(&mut self, source: Prefix) -> Result<(), KernelError> {
        self.local_sources.insert(&source.key(), IN_SET, 0).map_err(failed(
            "write",
            "local_sources",
            MOST_LOCAL,
        ))
    }

    pub(crate) fn put_local_link(&mut self, index: u32) -> Result<(), KernelError> {
        self.local_links.insert(index, IN_SET, 0).map_err(failed("write", "local_links", MOST_LOCAL))
    }

    pub(crate) fn put_bridge_port(&mut self, index: u32, bridge: BridgeAddress) -> Result<(), KernelError> {
        self.bridge_ports.insert(index, bridge, 0).map_err(failed("write", "bridge_ports", MOST_LOCAL))
    }

    pub(crate) fn remove_bridge_port(&mut self, index: u32) -> Result<(), KernelError> {
        removed("bridge_ports")(self.bridge_ports.remove(&index))
    }

    pub(crate) fn remove_local_source(&mut self, source: &Prefix) -> Result<(), KernelError> {
        removed("local_sources")(self.local_sources.remove(&source.key()))
    }

    pub(crate) fn remove_local_link(&mut self, index: u32) -> Result<(), KernelError> {
        removed("local_links")(self.local_links.remove(&index))
    }

    pub(crate) fn remove_service(&mut self, key: &ServiceKey) -> Result<(), KernelError> {
        removed("services")(self.services.remove(key))
    }

    pub(crate) fn remove_all_services(&mut self) -> Result<(), KernelError> {
        let keys: Result<Vec<_>, _> = self.services.keys().collect();
        let keys = keys.map_err(failed("read", "services", 0))?;
        keys.iter().try_for_each(|key| self.remove_service(key))
    }

    pub(crate) fn remove_endpoint(&mut self, key: &EndpointKey) -> Result<(), KernelError> {
        removed("endpoints")(self.endpoints.remove(key))
    }

    pub(crate) fn remove_member(&mut self, key: &MemberKey) -> Result<(), KernelError> {
        removed("members")(self.members.remove(key))
    }

    pub(crate) fn remove_range(&mut self, range: &Range) -> Result<(), KernelError> {
        removed("source_ranges")(self.source_ranges.remove(&range.key()))
    }

    pub(crate) fn remove_node_address(&mut self, address: &Addr) -> Result<(), KernelError> {
        removed("node_addresses")(self.node_addresses.remove(address))
    }

    /// Everything the maps hold.
    pub(crate) fn read(&self, ids: Ids) -> Result<State, KernelError> {
        let mut state = State::with_ids(ids);
        for entry in &self.services {
            let (key, value) = entry.map_err(failed("read", "services", 0))?;
            state.put_service(key, value);
        }
        for entry in &self.endpoints {
            let (key, value) = entry.map_err(failed("read", "endpoints", 0))?;
            state.endpoints.insert(key, value);
        }
        for key in self.members.keys() {
            state.members.insert(key.map_err(failed("read", "members", 0))?);
        }
        for key in self.source_ranges.keys() {
            state.ranges.insert(Range::from_key(&key.map_err(failed("read", "source_ranges", 0))?));
        }
        for key in self.node_addresses.keys() {
            state.node_addresses.insert(key.map_err(failed("read", "node_addresses", 0))?);
        }
        for key in self.local_sources.keys() {
            state.local_sources.insert(Prefix::from_key(&key.map_err(failed("read", "local_sources", 0))?));
        }
        for key in self.local_links.keys() {
            state.local_links.insert(key.map_err(failed("read", "local_links", 0))?);
        }
        for entry in &self.bridge_ports {
            let (index, bridge) = entry.map_err(failed("read", "bridge_ports", 0))?;
            state.bridge_ports.insert(index, bridge);
        }
        state.local_detection = self.node.get(&0, 0).map_err(failed("read", "node", 1))?.local_detection;
        state.forget_names();
        Ok(state)
    }
}

/// How the programs that work with the maps pinned in a directory mark packets; none where there are no such maps, or of another
/// layout.
pub(crate) fn pinned_marks(directory: &Path) -> Option<Marks> {
    let (layout, _) = pinned_layouts(directory)?;
    let node = MapData::from_pin(directory.join("node")).and_then(Map::from_map_data);
    let node: Array<MapData, NodeValue> = node.ok().filter(|_| layout == LAYOUT_VERSION)?.try_into().ok()?;
    let NodeValue { masquerade_mark: masquerade, reject_mark: reject, .. } = node.get(&0, 0).ok()?;
    (masquerade != 0).then_some(Marks { masquerade, reject })
}

/// The layout version of the maps pinned in a directory, and that of those among them which programs write; none where there is
/// no such map. Whatever else their version says of the node is none of this one's business.
pub(crate) fn pinned_layouts(directory: &Path) -> Option<(u32, u32)> {
    first_words(&directory.join("node")).ok().map(|[layout, state_layout]| (layout, state_layout))
}
