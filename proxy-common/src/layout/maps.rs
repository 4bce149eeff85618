//! The table of all pinned maps: all but those for trace events. Lists of maps and the settings for
//! their sizes are derived from it.

use super::{
    AffinityKey, AffinityValue, Connection, DirectFlow, DirectFlowV4, DirectKey, DirectKeyV4, DirectWatch,
    DsrKey, Endpoint, EndpointKey, EndpointValue, Flow, FlowKey, FragmentKey, FragmentValue, HardwareAddress,
    KnownRoute, MaglevKey, MaglevPage, MasqueradeSubnet, MemberKey, NodeValue, ProgramErrors, ServiceCounts,
    ServiceKey, ServiceValue, SocketPeer, SourceRange, UdpSocket, VlanKey, XdpLinkValue,
};
use crate::{Addr, prefilter::PrefilterTable};

/// Passes the table of all maps to the macro `$callback`. A row consists of
///
/// - the name of the static in proxy-ebpf, and the name of the map in the kernel, on bpffs and in
///   metrics;
/// - the type of the map, as aya names it, with the types of keys and values, which the caller
///   imports. For a trie it is the type of a key's data. `MmapableArray` is an array that userspace
///   maps into its memory (`BPF_F_MMAPABLE`). A `RingBuf` has no keys, and the value is a record;
/// - the [`MapContent`];
/// - the number of entries, or of bytes of a ring buffer. `size` names a field of [`MapSizes`],
///   with its default and its field in `shunt.ebpf.mapSizes` of the configuration unless an earlier
///   row has these. A `fixed` number is no setting; the kernel wants 0 for socket storage.
#[macro_export]
macro_rules! for_each_map {
    ($callback:ident) => {
        $callback! {
            SERVICES "services" HashMap<ServiceKey, ServiceValue> Config
                size services = 131072 "services"; // One entry per frontend.
            ENDPOINTS "endpoints" HashMap<EndpointKey, EndpointValue> Config
                size endpoints = 524288 "endpoints"; // One entry per endpoint of a list.
            MEMBERS "members" HashMap<MemberKey, u8> Config
                size members = 524288 "members"; // Entries of Services with UDP or affinity.
            SOURCE_RANGES "source_ranges" LpmTrie<SourceRange, u32> Config
                size source_ranges = 65536 "sourceRanges"; // `loadBalancerSourceRanges`.
            NODE_ADDRESSES "node_addresses" HashMap<Addr, u8> Config
                size node_addresses = 4096 "nodeAddresses"; // Addresses that serve node ports.
            MAGLEV "maglev" HashMap<MaglevKey, MaglevPage> Config
                size maglev = 131072 "maglev"; // Pages of 216 entries. A table has 76 by default.
            DSR_ENDPOINTS "dsr_endpoints" HashMap<DsrKey, Addr> Config
                fixed 131072; // Endpoints on other nodes of Services with direct server return.
            DSR_NODES "dsr_nodes" HashMap<Addr, u8> Config
                fixed 65536; // Addresses of nodes that send packets through the tunnel.
            NODE "node" Array<u32, NodeValue> Config fixed 1;
            AFFINITY "affinity" LruHashMap<AffinityKey, AffinityValue> State
                size affinity = 65536 "affinity"; // Clients of Services with affinity.
            UDP_FLOWS "udp_flows" LruHashMap<SocketPeer, Endpoint> State
                size udp_flows = 65536 "udpFlows"; // Conversations of unconnected UDP sockets.
            UDP_REPLIES "udp_replies" LruHashMap<SocketPeer, Endpoint> State size udp_flows;
            UDP_SOCKETS "udp_sockets" LruHashMap<u64, UdpSocket> State
                size udp_sockets = 32768 "udpSockets"; // Connected UDP sockets.
            UDP_CONNECTIONS "udp_connections" SkStorage<i32, Connection> State fixed 0;
            TCP_CONNECTIONS "tcp_connections" LruHashMap<u64, Connection> State
                size tcp_connections = 131072 "tcpConnections"; // Connected TCP sockets.
            LOCAL_SOURCES "local_sources" LpmTrie<Addr, u8> Config fixed 4096;
            LOCAL_LINKS "local_links" HashMap<u32, u8> Config fixed 4096; // More than pods.
            EXEMPT_NETNS "exempt_netns" HashMap<u64, u8> Config fixed 4096; // More than pods.
            EXEMPT_SOURCES "exempt_sources" HashMap<Addr, u8> Config fixed 8192; // Two per pod.
            BRIDGE_PORTS "bridge_ports" HashMap<u32, HardwareAddress> Config fixed 4096;
            VLANS "vlans" HashMap<VlanKey, u8> Config fixed 4096; // VLAN links with programs.
            MASQUERADE_ADDRESSES "masquerade_addresses" LpmTrie<MasqueradeSubnet, Addr> Config
                fixed 16384; // More than links and addresses.
            FLOWS "flows" LruHashMap<FlowKey, Flow> State
                size flows = 262144 "flows"; // A flow on links has two entries, or four.
            UNASSURED_FLOWS "unassured_flows" LruHashMap<FlowKey, Flow> State
                size unassured_flows = 65536 "unassuredFlows"; // New flows, and those of floods.
            DSR_RETURNS "dsr_returns" LruHashMap<FlowKey, Addr> State
                size dsr_returns = 65536 "dsrReturns"; // Flows whose replies go through the tunnel.
            DSR_NEW_RETURNS "dsr_new_returns" LruHashMap<FlowKey, Addr> State size dsr_returns;
            DIRECT_LINKS "direct_links" HashMap<u32, u8> Config fixed 4096; // Links of the direct path.
            PEER_LINKS "peer_links" HashMap<u32, u8> Config fixed 4096; // Those with a peer.
            DIRECT_WATCH "direct_watch" Array<u32, DirectWatch> Cache fixed 1;
            XDP_LINKS "xdp_links" HashMap<u32, XdpLinkValue> Config fixed 4096; // Links with XDP.
            DIRECT_FLOWS_V4 "direct_flows_v4" LruHashMap<DirectKeyV4, DirectFlowV4> Cache
                size direct_flows = 32768 "directFlows"; // Directions of flows on the direct path.
            DIRECT_FLOWS_V6 "direct_flows_v6" LruHashMap<DirectKey, DirectFlow> Cache size direct_flows;
            DIRECT_HINTS "direct_hints" Array<u32, u32> Cache
                fixed $crate::layout::DirectHint::PLACES; // Which entries IPv4 may have.
            DIRECT_REQUESTS "direct_requests" RingBuf<u32, DirectKey> Cache
                fixed 65536; // Room for a thousand requests to approve connections.
            ROUTES "routes" PerCpuArray<u32, KnownRoute> Cache
                fixed $crate::layout::KnownRoute::PLACES; // Of whole flows.
            FRAGMENTS "fragments" LruHashMap<FragmentKey, FragmentValue> State
                size fragments = 8192 "fragments"; // Fragmented datagrams on links.
            COUNTERS "counters" PerCpuArray<u32, u64> State fixed $crate::layout::Counter::COUNT;
            PREFILTER "prefilter" MmapableArray<u32, PrefilterTable> State
                fixed 1; // Flows need bits of former endpoints.
            SERVICE_COUNTS "service_counts" Array<u32, ServiceCounts> Counts
                fixed 1; // Userspace computes the number from that of CPUs and service ports.
            PROGRAM_ERRORS "program_errors" PerCpuArray<u32, ProgramErrors> State
                fixed $crate::layout::Program::COUNT;
        }
    };
}

/// What a map holds, and what becomes of it at an upgrade to another layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapContent {
    /// What userspace writes from the Snapshot. The next version's process writes it anew.
    Config,
    /// What programs write, and what they need for it. The next version's process takes it over if
    /// [`STATE_LAYOUT_VERSION`](super::STATE_LAYOUT_VERSION) is the same.
    State,
    /// What programs count for single service ports. It starts at zero in the next version.
    Counts,
    /// What can be found out again. Programs write it, or a thread of userspace. The next version's
    /// process starts without it.
    Cache,
}

/// A field of the configuration that holds a number of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeSetting {
    /// The first map whose number of entries this field sets.
    pub map: &'static str,
    /// The path of the field.
    pub path: &'static str,
    /// The default, in decimal.
    pub default: &'static str,
}

/// The setting for the number of service ports that are counted one by one.
pub const COUNTED_SERVICES: SizeSetting =
    SizeSetting { map: "service_counts", path: "shunt.serviceMetrics.maxServices", default: "4000" };

/// A row of the table of maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapDeclaration {
    /// The name in the kernel, on bpffs and in metrics.
    pub name: &'static str,
    /// The kernel evicts the least recently used entry from a full map.
    pub is_lru: bool,
    /// Its entries stay until room is needed. It is normal that it is full.
    pub fills_up: bool,
    /// Bytes of a key. A ring buffer has none.
    pub key_size: usize,
    /// Bytes of a value. A ring buffer has none.
    pub value_size: usize,
    /// What it holds.
    pub content: MapContent,
}

/// Returns the bytes of a key. In a trie, the length of the prefix comes before the data of a key.
const fn key_size(map_type: &str, data: usize) -> usize {
    match map_type.as_bytes() {
        b"LpmTrie" => size_of::<u32>() + data,
        _ if is_ring(map_type) => 0,
        _ => data,
    }
}

const fn is_ring(map_type: &str) -> bool {
    matches!(map_type.as_bytes(), b"RingBuf")
}

/// Returns true if entries of an LRU map are removed when their connection or socket ends, so that
/// a full map means many of them.
const fn is_swept(map: &str) -> bool {
    matches!(map.as_bytes(), b"flows" | b"tcp_connections" | b"udp_sockets")
}

/// Returns true if it is normal that the map of this name is full.
pub fn fills_up(map: &str) -> bool {
    MAPS.iter().any(|declaration| declaration.name == map && declaration.fills_up)
}

macro_rules! size_setting {
    ($map:literal $setting:literal $default:literal) => {
        SizeSetting {
            map: $map,
            path: concat!("shunt.ebpf.mapSizes.", $setting),
            default: stringify!($default),
        }
    };
}

macro_rules! derive_from_table {
    ($($static:ident $name:literal $type:ident<$key:ty, $value:ty> $content:ident
        $(size $field:ident $(= $default:literal $setting:literal)?)? $(fixed $entries:expr)?;)*) => {
        /// All maps.
        pub const MAPS: &[MapDeclaration] = &[$(MapDeclaration {
            name: $name,
            is_lru: matches!(stringify!($type).as_bytes(), b"LruHashMap"),
            fills_up: matches!(stringify!($type).as_bytes(), b"LruHashMap") && !is_swept($name),
            key_size: key_size(stringify!($type), size_of::<$key>()),
            value_size: if is_ring(stringify!($type)) { 0 } else { size_of::<$value>() },
            content: MapContent::$content,
        },)*];

        /// The settings for numbers of entries.
        pub const SIZE_SETTINGS: &[SizeSetting] =
            &[$($($(size_setting!($name $setting $default),)?)?)*];

        /// The numbers of entries of the maps. In the first six maps, an unused entry costs 16
        /// bytes. The other maps take all their memory when they are created.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct MapSizes {
            $($($(
                #[doc = concat!("Entries of `", $name, "`: `shunt.ebpf.mapSizes.", $setting, "`.")]
                pub $field: u32,
            )?)?)*
            /// Service ports that are counted one by one: [`COUNTED_SERVICES`]. 0 counts none. Each
            /// needs 40 bytes per CPU, up to 80 after rounding to a power of two.
            pub counted_services: u32,
        }

        impl MapSizes {
            /// Asks `entries` for the value of each setting.
            pub fn from_settings(entries: impl Fn(SizeSetting) -> u32) -> Self {
                Self {
                    $($($($field: entries(size_setting!($name $setting $default)),)?)?)*
                    counted_services: entries(COUNTED_SERVICES),
                }
            }

            /// Returns the number of entries of a map; 0 for an unknown name.
            #[expect(clippy::cast_possible_truncation, reason = "the fixed numbers are small")]
            pub fn entries(&self, map: &str) -> u32 {
                match map {
                    $($name => $(self.$field)? $($entries as u32)?,)*
                    _ => 0,
                }
            }
        }
    };
}

for_each_map!(derive_from_table);

impl Default for MapSizes {
    fn default() -> Self {
        Self::from_settings(|setting| setting.default.parse().unwrap_or(0))
    }
}
