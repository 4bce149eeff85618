//! The keys and values of all maps. They are `repr(C)` without padding, and their sizes are
//! asserted. Ports are in host byte order, so that `bpftool map dump` is easy to read.
//!
//! Identifiers and flags are plain integers, because BTF shows newtypes as nested structs.
//! Accessors give them types.

pub use self::{counts::*, maps::*, state::*, trace::*};
use crate::{Addr, Protocol};

/// The version of the layout. Every change of a key or value raises it. A process that finds pinned
/// maps of another version builds its own maps next to them.
pub const LAYOUT_VERSION: u32 = 18;

/// The identifier of the virtual network (VNI) of the tunnel to other nodes.
pub const TUNNEL_NETWORK: u32 = 0x7368;

/// Declares the type of a key or value, and asserts its size and that it has no padding.
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

/// Declares an enum with numbers from 0 on that are keys of a map, and with names for metrics and
/// logs.
macro_rules! named_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// The number of variants.
            pub const COUNT: usize = [$($number),*].len();
            /// All variants, in the order of their numbers.
            pub const ALL: [Self; Self::COUNT] = [$(Self::$variant),*];

            /// Returns the name in metrics and logs.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

mod counts;
mod maps;
mod state;
#[cfg(test)]
mod tests;
mod trace;

/// An endpoint list of a service port, or the set of its serving endpoints.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum List {
    /// The endpoints for traffic policy Cluster.
    Cluster = 0,
    /// The endpoints for traffic policy Local.
    Local = 1,
    /// All serving endpoints, which have no slots. A UDP flow to one of them goes on.
    Serving = 2,
}

impl List {
    /// Returns the number in keys.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

map_type! {
    /// Value of `bridge_ports`, whose keys are interface indexes of bridge ports: the hardware
    /// address of the bridge.
    HardwareAddress, 8 {
        /// The address.
        bytes: [u8; 6],
        /// Zero.
        zero: [u8; 2],
    }
}

impl HardwareAddress {
    /// Returns the value for an address.
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self { bytes, zero: [0; 2] }
    }
}

/// Value of `dsr_nodes`: what an address is to a node that announces the tunnel.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DsrAddress {
    /// Packets of the tunnel go to it, and come from it.
    End = 1,
    /// It is another address of the node.
    Other = 2,
}

map_type! {
    /// Key of `vlans`: a VLAN whose link has programs of its own.
    VlanKey, 8 {
        /// The interface index of the link beneath, where frames come in with the tag.
        link: u32,
        /// The identifier in the tag.
        id: u16,
        /// The protocol of the tag, as an Ethernet type in host byte order.
        protocol: u16,
    }
}

map_type! {
    /// Value of `xdp_links`, whose keys are the interface indexes of links with an XDP program.
    XdpLinkValue, 8 {
        /// The hardware address of the link.
        address: [u8; 6],
        /// 1 if the link takes frames that XDP programs of other links redirect to it.
        takes_frames: u8,
        /// 1 if frames that leave on the link where they came in are redirected to it, because its
        /// driver may not send them otherwise (veth).
        redirects_to_itself: u8,
    }
}

map_type! {
    /// Key of `services`: a frontend. A node port has the unspecified address of the IP family.
    ServiceKey, 20 {
        /// The address of the frontend.
        addr: Addr,
        /// The port of the frontend, in host byte order.
        port: u16,
        /// The IP protocol number.
        proto: u8,
        /// 1 for packets that come through the tunnel from another node, 0 for all others.
        tunneled: u8,
    }
}

impl ServiceKey {
    /// Returns the key of a frontend. The port is in host byte order.
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16, protocol: Protocol) -> Self {
        Self { addr, port, proto: protocol.number(), tunneled: 0 }
    }

    /// Returns the key of the same frontend for packets that come through the tunnel.
    #[must_use]
    #[inline(always)]
    pub const fn tunneled(self) -> Self {
        Self { tunneled: 1, ..self }
    }
}

map_type! {
    /// Value of `services`: the endpoints of a frontend, and the clients that may use them.
    ServiceValue, 24 {
        /// The service identifier: the number of a service port in one IP family. All of its
        /// frontends have it.
        service: u32,
        /// The generation of the endpoint lists: each change of one of them raises it.
        generation: u32,
        /// The number of slots for clients inside: processes and pods of this node.
        inside_count: u32,
        /// The number of slots for clients outside.
        outside_count: u32,
        /// The timeout of affinity after the last connection of a client, or 0 without affinity.
        affinity_seconds: u32,
        /// The [`List`] for clients inside.
        inside_list: u8,
        /// The [`List`] for clients outside.
        outside_list: u8,
        /// [`flags`].
        flags: u16,
    }
}

/// Bits of [`ServiceValue::flags`].
pub mod flags {
    /// Without endpoints, packets are dropped and system calls fail as unreachable, instead of a
    /// refusal.
    pub const DROP_WHEN_EMPTY: u16 = 1;
    /// `loadBalancerSourceRanges` apply to this frontend.
    pub const SOURCE_RANGES: u16 = 1 << 1;
    /// The ranges contain the address of the node.
    pub const NODE_IN_RANGES: u16 = 1 << 2;
    /// Packets of clients outside go through the tunnel to the endpoint's node, if it takes them
    /// (direct server return).
    pub const DSR: u16 = 1 << 3;
    /// Packets of clients inside are masqueraded.
    pub const MASQUERADE_INSIDE: u16 = 1 << 5;
    /// Packets of clients outside are masqueraded.
    pub const MASQUERADE_OUTSIDE: u16 = 1 << 6;
    /// Clients outside get an endpoint by a Maglev table of this
    /// [`TableSize`](crate::maglev::TableSize), not at random. 0 is no table.
    pub const MAGLEV_SIZE: u16 = 0b1111 << 8;
}

map_type! {
    /// Key of `endpoints`: one slot of one list.
    EndpointKey, 12 {
        /// [`ServiceValue::service`].
        service: u32,
        /// [`List`].
        list: u32,
        /// The slot, from 0 up to the count of the list.
        slot: u32,
    }
}

map_type! {
    /// Value of `endpoints`.
    EndpointValue, 24 {
        /// The endpoint.
        endpoint: Endpoint,
        /// The [`ServiceValue::generation`] that brought the endpoint to this slot. If no frontend
        /// has it yet, the change is not complete.
        generation: u32,
    }
}

map_type! {
    /// Key of `maglev`: a page of the Maglev table of a list.
    MaglevKey, 16 {
        /// [`ServiceValue::service`].
        service: u32,
        /// [`List`].
        list: u32,
        /// The number of entries of the table. A table of another size has other keys, so that
        /// pages of two tables are never mixed.
        size: u32,
        /// The page, from 0 on. The last one may be shorter than the others.
        page: u32,
    }
}

map_type! {
    /// Value of `maglev`.
    MaglevPage, 432 {
        /// Slots of the list, or [`MaglevPage::NO_SLOT`] behind the last entry of the table.
        slots: [u16; MaglevPage::SLOTS as usize],
    }
}

impl MaglevPage {
    /// The entries of a page. With the headers that the kernel adds, a page takes 504 bytes, just
    /// less than an allocation of 512.
    pub const SLOTS: u32 = 216;
    /// No slot.
    pub const NO_SLOT: u16 = u16::MAX;
    /// A page without entries.
    pub const EMPTY: Self = Self { slots: [Self::NO_SLOT; Self::SLOTS as usize] };
}

map_type! {
    /// An address and port: the value of `udp_flows` and `udp_replies`, and a field of other types.
    Endpoint, 20 {
        /// The address.
        addr: Addr,
        /// The port, in host byte order.
        port: u16,
        /// Zero.
        zero: u16,
    }
}

impl Endpoint {
    /// No endpoint.
    pub const NONE: Self = Self::new(Addr::UNSPECIFIED_V6, 0);

    /// Returns an endpoint. The port is in host byte order.
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16) -> Self {
        Self { addr, port, zero: 0 }
    }
}

map_type! {
    /// Key of `members`, a set: the endpoint is in the list of the service port.
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
    /// Key of `dsr_endpoints`: an endpoint on another node. The value is the address at which that
    /// node takes packets of the tunnel.
    DsrKey, 20 {
        /// [`ServiceValue::service`].
        service: u32,
        /// The address of the endpoint.
        addr: Addr,
    }
}

map_type! {
    /// Key of `source_ranges`, a longest-prefix trie. The prefix length counts the bits of both
    /// fields.
    SourceRange, 20 {
        /// [`ServiceValue::service`].
        service: u32,
        /// The address of the source range.
        addr: Addr,
    }
}

impl SourceRange {
    /// The bits of the key before the address.
    pub const SERVICE_BITS: u32 = 32;
    /// The bits of a whole key, for lookups.
    pub const BITS: u32 = Self::SERVICE_BITS + 128;
}

map_type! {
    /// Key of `masquerade_addresses`, a longest-prefix trie. The values are addresses of the node.
    /// The prefix length counts the bits of both fields.
    MasqueradeSubnet, 20 {
        /// The index of the link on which packets leave.
        link: u32,
        /// The address of the endpoint.
        addr: Addr,
    }
}

impl MasqueradeSubnet {
    /// The bits of the key before the address.
    pub const LINK_BITS: u32 = 32;
    /// The bits of a whole key, for lookups.
    pub const BITS: u32 = Self::LINK_BITS + 128;
}

named_enum! {
    /// The counters of the link programs. The number is the key in `counters`. They count packets
    /// unless the comment says otherwise.
    Counter {
        /// New flows on links.
        FlowsBegun = 0, "flow_begun";
        /// Refused: the Service has no endpoints.
        Refused = 1, "refused";
        /// Dropped: the traffic policy is Local, and no endpoint is on this node.
        NoLocalEndpoint = 2, "no_local_endpoint";
        /// Dropped: the source is not in the source ranges of the Service.
        SourceNotAllowed = 3, "source_not_allowed";
        /// Dropped: the entries of the flow could not be written.
        FlowNotRecorded = 4, "flow_not_recorded";
        /// Refused: a TCP segment of an unknown connection.
        UnknownConnection = 5, "unknown_connection";
        /// Dropped: the packet could not be rewritten.
        NotRewritten = 6, "not_rewritten";
        /// Dropped: no address or no port was free to masquerade the flow, or the flow is unknown.
        NotMasqueraded = 7, "not_masqueraded";
        /// Ports that were not taken for a masqueraded flow, because a socket of the node has them.
        PortOfSocket = 8, "port_of_socket";
        /// Sent on another link, or on the same one, before the stack (XDP).
        SentBeforeStack = 9, "sent_before_stack";
        /// Sent through the tunnel to the endpoint's node.
        SentThroughTunnel = 10, "sent_through_tunnel";
        /// Answered with an ICMP error: too long for the tunnel.
        TooLongForTunnel = 11, "too_long_for_tunnel";
        /// Dropped: the packet came through the tunnel from no known node, or for no Service.
        TunnelRefused = 12, "tunnel_refused";
        /// Sent on to the client: a reply that came back through the tunnel.
        ReplyForwarded = 13, "reply_forwarded";
    }
}

map_type! {
    /// The only value of `node`. The first two fields have the same place in every layout.
    NodeValue, 112 {
        /// The [`LAYOUT_VERSION`] of the maps in the directory.
        layout: u32,
        /// The [`STATE_LAYOUT_VERSION`] of the maps in the directory that programs write.
        state_layout: u32,
        /// The network namespace cookie of the node, or [`NodeValue::NETNS_UNKNOWN`].
        netns: u64,
        /// The bit of the mark that makes netfilter masquerade a packet, or the program on the
        /// link where it leaves.
        masquerade_mark: u32,
        /// The bit of the mark that makes netfilter reject a packet.
        reject_mark: u32,
        /// The [`LocalDetection`].
        local_detection: u32,
        /// The [`SocketScope`].
        socket_scope: u16,
        /// The [`NewFlows`].
        new_flows: u16,
        /// The end of settling on the monotonic clock. Until then flows may be missing, because
        /// these maps replaced maps of another size.
        settling_until_ns: u64,
        /// The [`Masquerading`].
        masquerading: u16,
        /// The first source port of masqueraded flows.
        first_port: u16,
        /// The last source port of masqueraded flows.
        last_port: u16,
        /// The [`DirectScope`].
        direct_scope: u16,
        /// The epoch of the direct path. If it is odd, packets take the direct path by the entries
        /// of `direct_flows` with the same epoch.
        direct_epoch: u64,
        /// For how many nanoseconds packets take the direct path after one that went through the
        /// stack, if [`DirectWatch`] says that nothing changed. With 0, it makes no difference.
        direct_lease_ns: u64,
        /// The interface index of the tunnel to other nodes, or 0 without one.
        tunnel_link: u32,
        /// The bytes of the longest packet that leaves the node in one piece with the headers of
        /// the tunnel, including these.
        tunnel_mtu: u32,
        /// The source of packets of the tunnel to nodes with an IPv4 address. `::` if this node
        /// has none: the kernel chooses.
        tunnel_v4: Addr,
        /// The same for nodes with an IPv6 address.
        tunnel_v6: Addr,
        /// 1 if replies of new flows from the tunnel go back through it.
        tunnel_returns: u32,
        /// Zero.
        zero: u32,
    }
}

map_type! {
    /// The only value of `direct_watch`: what userspace knows of changes to what the kernel does
    /// with forwarded packets. Times are nanoseconds of the monotonic clock.
    DirectWatch, 16 {
        /// When userspace last learned of a change, or began to watch.
        since_ns: u64,
        /// When the value ceases to count. While userspace watches, it raises this time.
        until_ns: u64,
    }
}

/// The test for packets of local clients (`detectLocalMode`).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LocalDetection {
    /// All clients are outside.
    None = 0,
    /// Clients are inside if their source is in `local_sources`.
    Source = 1,
    /// Clients are inside if their packets come in on a link of `local_links`.
    Link = 2,
}

/// The sockets that the socket programs serve.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SocketScope {
    /// All.
    All = 0,
    /// Those in the network namespace of the node.
    Node = 1,
    /// All but those in the network namespaces in `exempt_netns`.
    NotExempt = 2,
}

/// What the link programs do with new flows. Known flows go on in any case.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NewFlows {
    /// They translate them.
    Translate = 0,
    /// They leave them to netfilter.
    Leave = 1,
}

/// What masquerades packets.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Masquerading {
    /// Netfilter.
    Netfilter = 0,
    /// The programs masquerade the flows that they know, and netfilter masquerades new ones.
    KnownFlows = 1,
    /// The programs.
    Programs = 2,
}

/// Which packets of a flow take the direct path.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DirectScope {
    /// Those that are as the ones that went through the stack before.
    Learned = 0,
    /// All, from the first one on. The programs ask for the route.
    Whole = 1,
}

impl NodeValue {
    /// The cookie is unknown, as in a new map. Userspace can read it from kernel 5.14 on. On older
    /// kernels it learns the cookie from the programs. Until then the programs take the node to be
    /// in the initial network namespace.
    pub const NETNS_UNKNOWN: u64 = 0;
    /// Returns true if packets take the direct path.
    #[inline(always)]
    pub const fn is_direct(&self) -> bool {
        self.direct_epoch & 1 != 0
    }

    /// Returns true if packets take the direct path from the first one of a flow on. Then netfilter
    /// must not masquerade them.
    #[inline(always)]
    pub const fn is_whole(&self) -> bool {
        self.is_direct()
            && self.direct_scope == DirectScope::Whole as u16
            && self.masquerading == Masquerading::Programs as u16
    }

    /// The default masquerade bit of kube-proxy, 14.
    pub const MASQUERADE_MARK: u32 = 1 << 14;
    /// The bit of kube-proxy for packets that it drops, 15.
    pub const REJECT_MARK: u32 = 1 << 15;
}
