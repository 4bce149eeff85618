//! The keys and values of the maps of the direct path.

use super::Endpoint;
use crate::{Addr, AddrV4, hash};

map_type! {
    /// Key of `direct_flows_v6`: the packets of one direction of a flow as they come in on a link.
    DirectKey, 44 {
        /// The source.
        source: Endpoint,
        /// The destination.
        destination: Endpoint,
        /// The IP protocol number.
        proto: u8,
        /// Zero.
        zero: [u8; 3],
    }
}

map_type! {
    /// Key of `direct_flows_v4`: a [`DirectKey`] of IPv4. With the header that the kernel adds, it
    /// fills a cache line, and the value fills another.
    DirectKeyV4, 16 {
        /// The address of the source.
        source: AddrV4,
        /// The address of the destination.
        destination: AddrV4,
        /// The port of the source, in host byte order.
        source_port: u16,
        /// The port of the destination, in host byte order.
        destination_port: u16,
        /// The IP protocol number.
        proto: u8,
        /// Zero.
        zero: [u8; 3],
    }
}

map_type! {
    /// Value of `direct_flows_v6`: what the stack and the programs made of the last packet that
    /// went through the stack. Until the time is over, the program on the link where packets come
    /// in does the same with them, and passes them to the link where they leave.
    DirectFlow, 88 {
        /// The address of the source of packets that leave.
        source: Addr,
        /// The address of the destination of packets that leave.
        destination: Addr,
        /// All but the addresses.
        path: DirectPath,
    }
}

map_type! {
    /// Value of `direct_flows_v4`: a [`DirectFlow`] of IPv4.
    DirectFlowV4, 64 {
        /// The address of the source of packets that leave.
        source: AddrV4,
        /// The address of the destination of packets that leave.
        destination: AddrV4,
        /// All but the addresses.
        path: DirectPath,
    }
}

map_type! {
    /// What is in the values of `direct_flows_v4` and `direct_flows_v6`.
    DirectPath, 56 {
        /// Packets take the direct path until this time of the monotonic clock, in nanoseconds. In
        /// a pending entry: the time from which userspace may be asked again.
        until_ns: u64,
        /// The Ethernet addresses of packets that leave: destination and source.
        hardware: [u8; 12],
        /// The index of the link on which packets come in.
        in_link: u32,
        /// The index of the link on which packets leave.
        out_link: u32,
        /// [`super::ServiceValue::service`].
        service: u32,
        /// The priority (`skb->priority`) of packets that leave.
        priority: u32,
        /// The acknowledgement number in the last TCP segment that took the direct path.
        acknowledged: u32,
        /// The lower half of [`super::NodeValue::direct_epoch`] when the last packet went through
        /// the stack.
        epoch: u32,
        /// The port of the source of packets that leave, in host byte order.
        source_port: u16,
        /// The port of the destination of packets that leave, in host byte order.
        destination_port: u16,
        /// The difference that the addresses make to a checksum, in network byte order.
        addresses: u16,
        /// The difference that the ports make to a checksum, in network byte order.
        ports: u16,
        /// The bytes of the longest IP packet that left, or would have left after segmentation.
        longest: u16,
        /// The traffic class of packets. Bits of ECN do not matter.
        traffic_class: u8,
        /// [`direct_flags`].
        flags: u8,
    }
}

/// Bits of [`DirectPath::flags`].
pub mod direct_flags {
    /// Userspace permits that packets take the direct path, from the next one on that goes through
    /// the stack. Without it, userspace was asked, and has not answered yet.
    pub const APPROVED: u8 = 1;
    /// Packets go to the endpoint, not to the client.
    pub const TO_ENDPOINT: u8 = 1 << 1;
    /// Packets leave by the peer of the link: `peer_links` had it when the entry was written.
    pub const TO_PEER: u8 = 1 << 2;
}

impl DirectKey {
    /// Returns true for packets of IPv4.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        Addr::are_v4(&self.source.addr, &self.destination.addr)
    }

    /// Returns the key in `direct_flows_v4`, or `None` for IPv6.
    #[inline(always)]
    pub const fn v4(&self) -> Option<DirectKeyV4> {
        let Self { source, destination, proto, zero } = *self;
        if !self.is_v4() {
            return None;
        }
        Some(DirectKeyV4 {
            source: AddrV4::last_of(&source.addr),
            destination: AddrV4::last_of(&destination.addr),
            source_port: source.port,
            destination_port: destination.port,
            proto,
            zero,
        })
    }
}

/// Where `direct_hints` has a flow of IPv4, and what it has there once an entry of the flow was
/// written. The flow that was written last has the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectHint {
    /// The place.
    pub place: u32,
    /// The value. It is not 0.
    pub tag: u32,
}

impl DirectHint {
    /// The number of places. A power of two.
    pub const PLACES: usize = 1 << 14;

    /// Returns the hint of packets with this key.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the tag is a part of the hash")]
    pub const fn of(key: &DirectKeyV4) -> Self {
        let DirectKeyV4 { source, destination, source_port, destination_port, proto, .. } = *key;
        let [source, destination] =
            [u32::from_ne_bytes(source.octets), u32::from_ne_bytes(destination.octets)];
        let ports = (source_port as u32) << 16 | destination_port as u32;
        let hash = hash::of_words([source ^ proto as u32, destination], ports);
        Self { place: hash::place(hash, Self::PLACES), tag: (hash >> 16) as u32 | 1 }
    }
}

impl DirectFlow {
    /// Returns the value for `direct_flows_v4`. Both addresses are of IPv4.
    #[inline(always)]
    pub const fn v4(&self) -> DirectFlowV4 {
        let Self { source, destination, path } = self;
        DirectFlowV4 {
            source: AddrV4::last_of(source),
            destination: AddrV4::last_of(destination),
            path: *path,
        }
    }
}

impl From<DirectKeyV4> for DirectKey {
    #[inline(always)]
    fn from(key: DirectKeyV4) -> Self {
        let DirectKeyV4 { source, destination, source_port, destination_port, proto, zero } = key;
        Self {
            source: Endpoint::new(source.into(), source_port),
            destination: Endpoint::new(destination.into(), destination_port),
            proto,
            zero,
        }
    }
}

impl From<DirectFlowV4> for DirectFlow {
    #[inline(always)]
    fn from(flow: DirectFlowV4) -> Self {
        let DirectFlowV4 { source, destination, path } = flow;
        Self { source: source.into(), destination: destination.into(), path }
    }
}

map_type! {
    /// Value of `routes`: where the kernel forwards packets of whole flows between two addresses.
    /// It is the last answer of the kernel. Ports count only if routes depend on them.
    KnownRoute, 80 {
        /// The source of the packets after translation of the destination.
        source: Endpoint,
        /// Their destination after translation.
        destination: Endpoint,
        /// The Ethernet addresses of packets that leave: destination and source.
        hardware: [u8; 12],
        /// The index of the link on which packets come in.
        in_link: u32,
        /// The index of the link on which packets leave.
        out_link: u32,
        /// The bytes of the longest packet, or segment of one, for which the kernel was asked.
        longest: u16,
        /// The IP protocol number.
        proto: u8,
        /// The traffic class of packets. Bits of ECN do not matter.
        traffic_class: u8,
        /// 1 if packets leave by the peer of the link, and 0 otherwise.
        to_peer: u32,
        /// Zero.
        zero: u32,
        /// The time of the monotonic clock, in nanoseconds, at which the kernel is asked again.
        until_ns: u64,
    }
}
