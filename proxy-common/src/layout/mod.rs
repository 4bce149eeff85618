//! The keys and values of all maps. They are `repr(C)` without padding, and their sizes are
//! asserted. Ports are in host byte order, so that `bpftool map dump` is easy to read.
//!
//! Identifiers and flags are plain integers, because BTF shows newtypes as nested structs.
//! Accessors give them types.

pub use self::{counts::*, direct::*, links::*, maps::*, node::*, state::*, trace::*};
use crate::{Addr, Protocol};

/// The version of the layout. Every change of a key or value raises it. A process that finds pinned
/// maps of another version builds its own maps next to them.
pub const LAYOUT_VERSION: u32 = 24;

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
mod direct;
mod links;
mod maps;
mod node;
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
