//! What programs write: connections and flows, and where affinity led. The next version's process takes it over.

use super::Endpoint;
use crate::addr::Addr;

/// Changes with any change to the keys and values of the maps that programs write: the next version's process takes those over
/// as they are while this is the same, so that flows and connections outlive an upgrade.
pub const STATE_LAYOUT_VERSION: u32 = 3;

map_type! {
    /// Key of `affinity`: a client of a Service port.
    AffinityKey, 32 {
        /// Client address, of traffic from outside the sockets; else unspecified.
        addr: Addr,
        /// Network namespace cookie of the client socket: its pod, or the node; else 0.
        netns: u64,
        /// [`super::ServiceValue::service`].
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
        /// `udp_flows`: the VIP, whose value is the endpoint. `udp_replies`: the other way round.
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
    /// Value of `tcp_connections`, whose keys are sockets' cookies, and of `udp_connections` (socket storage): the VIP that a
    /// connected socket connected to, and the endpoint that it got.
    Connection, 40 {
        /// The VIP: what `getpeername` shows.
        vip: Endpoint,
        /// The endpoint it was connected to.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Value of `udp_sockets`, keyed by socket cookie: a connected UDP socket, to be destroyed when its endpoint goes.
    UdpSocket, 32 {
        /// Network namespace cookie.
        netns: u64,
        /// [`super::ServiceValue::service`].
        service: u32,
        /// The endpoint.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Key of `flows`: the packets of one direction of a translated flow, as they are before translation.
    FlowKey, 44 {
        /// Where they come from.
        source: Endpoint,
        /// Where they go to.
        destination: Endpoint,
        /// IP protocol number.
        proto: u8,
        /// [`Direction`].
        direction: u8,
        /// Zero.
        zero: u16,
    }
}

/// Which packets of a flow an entry is for.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the client to the VIP it connected to; translated as they come in on a link.
    Original = 0,
    /// From the endpoint to the client; translated back as they leave on a link.
    Reply = 1,
}

map_type! {
    /// Value of `flows`. Each of the two entries of a flow says enough to make the other anew: the other's key is this one's
    /// translated addresses, swapped.
    Flow, 64 {
        /// Source after translation.
        source: Endpoint,
        /// Destination after translation.
        destination: Endpoint,
        /// [`super::ServiceValue::service`].
        service: u32,
        /// [`super::ServiceValue::generation`] when it began.
        generation: u32,
        /// [`flow_state`].
        state: u32,
        /// [`List`](super::List) that the destination was chosen from.
        list: u32,
        /// Last packet, to the second or so: nanoseconds of the monotonic clock.
        used_ns: u64,
    }
}

/// Bits of [`Flow::state`]. Packets set them; all but [`RESET`](flow_state::RESET) stay for the life of the flow.
pub mod flow_state {
    /// The endpoint answered.
    pub const REPLIED: u32 = 1;
    /// The client closed its side (TCP).
    pub const CLIENT_CLOSED: u32 = 1 << 1;
    /// The endpoint closed its side (TCP).
    pub const ENDPOINT_CLOSED: u32 = 1 << 2;
    /// One of them reset the connection (TCP), and no other segment came since: of a reset that was forged, or came too late, both
    /// sides take no notice.
    pub const RESET: u32 = 1 << 3;
    /// Packets of the original direction get an address of the node as their source.
    pub const MASQUERADE: u32 = 1 << 4;
    /// No Service's: begun from this side with a node port's number, its answers are left alone (UDP).
    pub const PASS: u32 = 1 << 5;
    /// Packets of the original direction are dropped for a moment, to be sent again: userspace is telling the kernel's
    /// connection tracking of the flow, which is to translate it from then on.
    pub const HELD: u32 = 1 << 6;

    /// The state after a packet that says this of its flow.
    #[inline(always)]
    pub const fn after(state: u32, observed: u32) -> u32 {
        state & !RESET | observed
    }
}

map_type! {
    /// Key of `fragments`: the fragments of one datagram, as they are before translation.
    FragmentKey, 40 {
        /// Where they come from.
        source: Addr,
        /// Where they go to.
        destination: Addr,
        /// The datagram's identification.
        id: u32,
        /// IP protocol number, of the first fragment; IPv6 tells it in each.
        proto: u8,
        /// [`Direction`].
        direction: u8,
        /// Zero.
        zero: u16,
    }
}

map_type! {
    /// Value of `fragments`: what became of the first fragment, which alone has ports.
    FragmentValue, 40 {
        /// Source after translation.
        source: Addr,
        /// Destination after translation.
        destination: Addr,
        /// Bits that packets of it are marked with.
        mark: u32,
        /// When it passed: seconds of the monotonic clock.
        created_seconds: u32,
    }
}
