//! Keys and values of every map: `repr(C)` without padding, sizes asserted, ports in host byte order so that
//! `bpftool map dump` reads like the Service it stands for.
//!
//! Identifiers and flags are plain integers here because BTF shows newtypes as nested structs; accessors give them types.

pub use self::{counts::*, maps::*, state::*, trace::*};
use crate::{Addr, Protocol};

/// Changes with any change to what follows: a process that finds pinned maps of another version builds its own beside them.
pub const LAYOUT_VERSION: u32 = 6;

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

mod counts;
mod maps;
mod state;
mod trace;

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
    /// Value of `bridge_ports`, whose keys are indexes of links: the hardware address of the bridge that the link is a port of.
    BridgeAddress, 8 {
        /// The address.
        bytes: [u8; 6],
        /// Zero.
        zero: [u8; 2],
    }
}

impl BridgeAddress {
    /// An address as the map holds it.
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self { bytes, zero: [0; 2] }
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
    pub const fn new(addr: Addr, port: u16, protocol: Protocol) -> Self {
        Self { addr, port, proto: protocol.number(), zero: 0 }
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
    /// Packets of local callers get one of this node's addresses as their source.
    pub const MASQUERADE_INSIDE: u16 = 1 << 5;
    /// Packets of all other callers do.
    pub const MASQUERADE_OUTSIDE: u16 = 1 << 6;
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
    /// Stands for none.
    pub const NONE: Self = Self::new(Addr::UNSPECIFIED_V6, 0);

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

/// What the programs count, a slot of `counters` each; packets unless it says otherwise.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Counter {
    /// Flows begun on a link.
    FlowsBegun = 0,
    /// Refused for want of endpoints.
    Refused = 1,
    /// Dropped: no endpoint on this node, and the policy is Local.
    NoLocalEndpoint = 2,
    /// Dropped: the source is in none of the Service's source ranges.
    SourceNotAllowed = 3,
    /// Dropped: the flow could not be recorded.
    FlowNotRecorded = 4,
    /// Refused: of a TCP connection nothing is known of.
    UnknownConnection = 5,
    /// Dropped: rewriting the packet failed.
    NotRewritten = 6,
}

impl Counter {
    /// All of them, with the names that people see.
    pub const ALL: [(Self, &str); 7] = [
        (Self::FlowsBegun, "flow_begun"),
        (Self::Refused, "refused"),
        (Self::NoLocalEndpoint, "no_local_endpoint"),
        (Self::SourceNotAllowed, "source_not_allowed"),
        (Self::FlowNotRecorded, "flow_not_recorded"),
        (Self::UnknownConnection, "unknown_connection"),
        (Self::NotRewritten, "not_rewritten"),
    ];
    /// The number of slots.
    pub const COUNT: usize = Self::ALL.len();
}

map_type! {
    /// The one value of `node`. It may grow; its first two fields are where they are in every version.
    NodeValue, 40 {
        /// [`LAYOUT_VERSION`] of all maps beside it.
        layout: u32,
        /// [`STATE_LAYOUT_VERSION`] of the maps beside it that programs write.
        state_layout: u32,
        /// Network namespace cookie of the node, or [`NodeValue::NETNS_UNKNOWN`].
        netns: u64,
        /// Bit that asks netfilter to masquerade a packet.
        masquerade_mark: u32,
        /// Bit that asks netfilter to reject a packet.
        reject_mark: u32,
        /// [`LocalDetection`]: how local callers are told from others.
        local_detection: u32,
        /// Zero.
        zero: u32,
        /// Until then, on the monotonic clock, flows may be missing: these maps take the place of others of another size.
        settling_until_ns: u64,
    }
}

/// How packets of local callers are told from those of others: upstream's `detectLocalMode`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LocalDetection {
    /// They are not; all count as others.
    None = 0,
    /// Their source is in `local_sources`.
    Source = 1,
    /// They came in on a link of `local_links`.
    Link = 2,
}

impl NodeValue {
    /// Kernels before 5.14 do not tell userspace the cookie. Until the programs have told it, the node is taken to live in the
    /// initial network namespace. What a new map holds.
    pub const NETNS_UNKNOWN: u64 = 0;
    /// Upstream's default masquerade bit, 14.
    pub const MASQUERADE_MARK: u32 = 1 << 14;
    /// Upstream's bit for packets to be rejected or dropped, 15.
    pub const REJECT_MARK: u32 = 1 << 15;
}
