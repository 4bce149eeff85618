//! Keys and values of every map: `repr(C)` without padding, sizes asserted, ports in host byte order so that
//! `bpftool map dump` reads like the Service it stands for.
//!
//! Identifiers and flags are plain integers here because BTF shows newtypes as nested structs; accessors give them types.

use crate::addr::{Addr, Proto};

/// Changes with any change to what follows: a process that finds pinned maps of another version builds its own beside them.
pub const LAYOUT_VERSION: u32 = 2;

/// Declares a plain map type and asserts that it has the given size, so that no padding slips in.
macro_rules! map_type {
    ($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size, concat!("layout of ", stringify!($name)));
        const _: () = assert!(0 $(+ size_of::<$type>())* == $size, concat!("padding in ", stringify!($name)));
    };
}

/// Which endpoint list of a Service port; also the third set, of all that still serve.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum List {
    /// Endpoints for traffic policy Cluster.
    Cluster = 0,
    /// Endpoints for traffic policy Local.
    Local = 1,
    /// Membership only: every endpoint that serves, chosen or not. A UDP flow to it may go on.
    Serving = 2,
}

impl List {
    /// As keys hold it.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

map_type! {
    /// Key of `services`: a destination that someone dials. Node ports have the family's unspecified address.
    ServiceKey, 20 {
        /// Destination address.
        addr: Addr,
        /// Destination port, host byte order.
        port: u16,
        /// IP protocol number.
        proto: u8,
        /// Zero.
        zero: u8,
    }
}

impl ServiceKey {
    /// The key of a destination; `port` in host byte order.
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16, proto: Proto) -> Self {
        Self { addr, port, proto: proto.number(), zero: 0 }
    }
}

map_type! {
    /// Value of `services`: which endpoints a destination has, and who may have them.
    ServiceValue, 24 {
        /// Identifies the service port in one IP family; all of its destinations share it.
        service: u32,
        /// Generation of its endpoint lists: slots of another generation are not read.
        generation: u32,
        /// Number of slots for callers on this node: its processes and pods.
        inside_count: u32,
        /// Number of slots for all other callers.
        outside_count: u32,
        /// Affinity by client lasts so long after its last connection; 0 without affinity.
        affinity_seconds: u32,
        /// [`List`] for callers on this node.
        inside_list: u8,
        /// [`List`] for all other callers.
        outside_list: u8,
        /// [`flags`].
        flags: u16,
    }
}

/// Bits of [`ServiceValue::flags`].
pub mod flags {
    /// Without endpoints: silence or unreachable, instead of refused.
    pub const DROP_WHEN_EMPTY: u16 = 1;
    /// `loadBalancerSourceRanges` apply to this destination.
    pub const SOURCE_RANGES: u16 = 1 << 1;
    /// The ranges hold the node's own address.
    pub const NODE_IN_RANGES: u16 = 1 << 2;
    /// The ranges hold every pod of this node.
    pub const PODS_IN_RANGES: u16 = 1 << 3;
    /// The ranges hold no pod of this node.
    pub const PODS_OUT_OF_RANGES: u16 = 1 << 4;
}

map_type! {
    /// Key of `endpoints`: one slot of one generation of one list.
    EndpointKey, 16 {
        /// [`ServiceValue::service`].
        service: u32,
        /// [`ServiceValue::generation`].
        generation: u32,
        /// 0 up to the count of the list.
        slot: u32,
        /// [`List`].
        list: u32,
    }
}

map_type! {
    /// An address and port: the value of `endpoints`, `udp_flows` and `udp_replies`, and part of others.
    Endpoint, 20 {
        /// Address.
        addr: Addr,
        /// Port, host byte order.
        port: u16,
        /// Zero.
        zero: u16,
    }
}

impl Endpoint {
    /// From an address and a port in host byte order.
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16) -> Self {
        Self { addr, port, zero: 0 }
    }
}

map_type! {
    /// Key of `members`, a set: this endpoint is in this list of this Service port.
    MemberKey, 28 {
        /// [`ServiceValue::service`].
        service: u32,
        /// [`List`].
        list: u32,
        /// The endpoint.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Data of a key of `source_ranges`, a longest-prefix trie; the prefix counts the bits of both fields.
    SourceRange, 20 {
        /// [`ServiceValue::service`].
        service: u32,
        /// Range of sources.
        addr: Addr,
    }
}

impl SourceRange {
    /// Bits of the key that are not the address's.
    pub const SERVICE_BITS: u32 = 32;
    /// Bits of a full key: what a lookup asks for.
    pub const BITS: u32 = Self::SERVICE_BITS + 128;
}

map_type! {
    /// Key of `affinity`: a client of a Service port.
    AffinityKey, 32 {
        /// Client address, of traffic from outside the sockets; else unspecified.
        addr: Addr,
        /// Network namespace cookie of the client socket: its pod, or the node; else 0.
        netns: u64,
        /// [`ServiceValue::service`].
        service: u32,
        /// Zero.
        zero: u32,
    }
}

map_type! {
    /// Value of `affinity`.
    AffinityValue, 32 {
        /// Where the client goes.
        endpoint: Endpoint,
        /// Zero.
        zero: u32,
        /// Last connection, nanoseconds of the monotonic clock.
        used_ns: u64,
    }
}

map_type! {
    /// Key of `udp_flows` and `udp_replies`: a socket and the other end.
    SocketPeer, 32 {
        /// Socket cookie.
        socket: u64,
        /// `udp_flows`: the address dialled, whose value is the endpoint. `udp_replies`: the other way round.
        peer: Endpoint,
        /// Zero.
        zero: u32,
    }
}

impl SocketPeer {
    /// A socket, by its cookie, and the other end.
    #[inline(always)]
    pub const fn new(socket: u64, peer: Endpoint) -> Self {
        Self { socket, peer, zero: 0 }
    }
}

map_type! {
    /// Value of `connections` (socket storage): what a connected socket dialled and what it got.
    Connection, 40 {
        /// The address dialled: what `getpeername` shows.
        dialled: Endpoint,
        /// The endpoint it was connected to.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Value of `udp_sockets`, keyed by socket cookie: a connected UDP socket, to be destroyed when its endpoint goes.
    UdpSocket, 32 {
        /// Network namespace cookie.
        netns: u64,
        /// [`ServiceValue::service`].
        service: u32,
        /// The endpoint.
        endpoint: Endpoint,
    }
}

map_type! {
    /// The one value of `node`.
    NodeValue, 16 {
        /// Network namespace cookie of the node, or [`NodeValue::NETNS_UNKNOWN`].
        netns: u64,
        /// [`LAYOUT_VERSION`] of all maps beside it.
        layout: u32,
        /// Zero.
        zero: u32,
    }
}

impl NodeValue {
    /// Kernels before 5.14 do not tell userspace the cookie. Until the programs have told it, the node is taken to live in the
    /// initial network namespace. What a new map holds.
    pub const NETNS_UNKNOWN: u64 = 0;
}
