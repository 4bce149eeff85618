//! The keys and values of the maps that programs write: connections, flows and affinity. The
//! process of the next version takes them over.

use super::Endpoint;
use crate::addr::Addr;

/// The version of the layout of the maps that programs write. Every change of their keys and values
/// raises it. While it is the same, the process of the next version takes the maps over, so that
/// flows and connections survive an upgrade. A new bit of [`flow_state`] does not raise it: no
/// program sets a bit that it does not know, and all of them keep it.
pub const STATE_LAYOUT_VERSION: u32 = 5;

map_type! {
    /// Key of `affinity`: a client of a service port.
    AffinityKey, 32 {
        /// The address of the client for packets, or the unspecified address for sockets.
        addr: Addr,
        /// The network namespace cookie for sockets of a pod or the node, or 0 for packets.
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
        /// The endpoint of the last connection.
        endpoint: Endpoint,
        /// Zero.
        zero: u32,
        /// The time of the last connection, in nanoseconds of the monotonic clock.
        used_ns: u64,
    }
}

map_type! {
    /// Key of `udp_flows` and `udp_replies`: a socket and its peer.
    SocketPeer, 32 {
        /// The socket cookie.
        socket: u64,
        /// In `udp_flows` the VIP, whose value is the endpoint. In `udp_replies` the endpoint,
        /// whose value is the VIP.
        peer: Endpoint,
        /// Zero.
        zero: u32,
    }
}

impl SocketPeer {
    /// Returns the key of a socket cookie and a peer.
    #[inline(always)]
    pub const fn new(socket: u64, peer: Endpoint) -> Self {
        Self { socket, peer, zero: 0 }
    }
}

map_type! {
    /// Value of `tcp_connections`, whose keys are socket cookies, and of `udp_connections` (socket
    /// storage): VIP and endpoint of a connected socket.
    Connection, 40 {
        /// The VIP, which `getpeername` returns.
        vip: Endpoint,
        /// The endpoint.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Value of `udp_sockets`, whose keys are socket cookies: a connected UDP socket. Userspace
    /// destroys it if its endpoint goes.
    UdpSocket, 32 {
        /// The network namespace cookie.
        netns: u64,
        /// [`super::ServiceValue::service`].
        service: u32,
        /// The endpoint.
        endpoint: Endpoint,
    }
}

map_type! {
    /// Key of `flows` and `unassured_flows`: the packets of one direction of a flow before
    /// translation.
    FlowKey, 44 {
        /// The source.
        source: Endpoint,
        /// The destination.
        destination: Endpoint,
        /// The IP protocol number.
        proto: u8,
        /// The [`Direction`].
        direction: u8,
        /// Zero.
        zero: u16,
    }
}

/// The direction of packets of a flow.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the client to the VIP. Packets are translated as they come in on a link.
    Original = 0,
    /// From the endpoint to the client. Packets are translated back as they leave on a link.
    Reply = 1,
    /// From the client to the endpoint, after translation. Packets are masqueraded as they leave on
    /// a link: they get an address of this node as their source.
    Masquerade = 2,
    /// From the endpoint to that address. Packets are translated back as they come in on a link.
    MasqueradeReply = 3,
}

map_type! {
    /// Value of `flows` and `unassured_flows`. Each of the two entries of a flow has all data to
    /// restore the other: the key of the other is the translated addresses of this one, swapped,
    /// and the opposite direction.
    Flow, 64 {
        /// The source after translation.
        source: Endpoint,
        /// The destination after translation.
        destination: Endpoint,
        /// [`super::ServiceValue::service`].
        service: u32,
        /// [`super::ServiceValue::generation`] when the flow began.
        generation: u32,
        /// [`flow_state`].
        state: u32,
        /// TCP. In the entry of the reply direction: the acknowledgement number in the endpoint's
        /// last segment. In the entry of the original direction, until the flow is assured: the
        /// sequence number of the endpoint's SYN-ACK.
        acknowledged: u32,
        /// The time of the last packet, exact to about a second, in nanoseconds of the monotonic
        /// clock.
        used_ns: u64,
    }
}

/// Bits of [`Flow::state`]. Packets set them. All but [`UNTIL_NEXT`](flow_state::UNTIL_NEXT) stay
/// for the life of the flow. The upper 16 bits are the [`List`](super::List) of the chosen
/// endpoint.
pub mod flow_state {
    /// The endpoint replied.
    pub const REPLIED: u32 = 1;
    /// The client closed its side (TCP).
    pub const CLIENT_CLOSED: u32 = 1 << 1;
    /// The endpoint closed its side (TCP).
    pub const ENDPOINT_CLOSED: u32 = 1 << 2;
    /// The endpoint reset the connection (TCP), or the client did with the sequence number that the
    /// endpoint expects. No other segment followed. The endpoint ignores a reset that is too late.
    pub const RESET: u32 = 1 << 3;
    /// Packets of the original direction are masqueraded.
    pub const MASQUERADE: u32 = 1 << 4;
    /// Packets of the flow pass unchanged. Either it belongs to no Service: the node began it with
    /// the port of a VIP (UDP). Or conntrack translates it. If the flow then names a service
    /// ([`Flow::service`](super::Flow)) and the endpoint, it ends when the endpoint no longer
    /// serves (UDP), and [`REPLIED`] says that conntrack has the longer timeout for it.
    pub const PASS: u32 = 1 << 5;
    /// The flow is held: packets of the original direction are dropped, and the sender retransmits
    /// them, while userspace hands the connection to conntrack.
    pub const HELD: u32 = 1 << 6;
    /// The flow began while the programs left new flows to netfilter (UDP, with [`PASS`]). It
    /// passes for some seconds. Until then userspace finds out whether conntrack translates it, and
    /// replaces the entry by one that names service and endpoint.
    pub const LEFT: u32 = 1 << 7;

    /// The client sent a SYN on an answered connection (TCP), and only SYNs followed. An endpoint
    /// that has the connection answers with a challenge ACK (RFC 9293, section 3.10.7.4).
    pub const SYN_UNANSWERED: u32 = 1 << 8;
    /// The entry is in the map `flows`, not in `unassured_flows`. The client answered the endpoint:
    /// it sent a segment that acknowledges the SYN-ACK (TCP), or a datagram after one of the
    /// endpoint (UDP). So the client has its address, and no flood of packets with forged sources
    /// evicts the flow. Entries that userspace writes with [`PASS`] are in `flows`. One for
    /// datagrams of the node is there once an answer came.
    pub const ASSURED: u32 = 1 << 9;
    /// The whole flow takes the direct path: it began there, and conntrack does not have it.
    pub const WHOLE: u32 = 1 << 10;
    /// Packets go through the tunnel to the endpoint's node, unchanged. The source after
    /// translation is the address of that node. The flow has only the entry of the original
    /// direction, which never is [`ASSURED`]: replies do not come through this node, so nothing
    /// shows that the client has its address. [`REPLIED`] says that the client sent a segment that
    /// acknowledges one (TCP).
    pub const DSR: u32 = 1 << 11;
    /// The flow began with a packet that came through the tunnel, and replies go back through it,
    /// to the node that `dsr_returns` names, or `dsr_new_returns` if the flow is not assured.
    pub const RETURN: u32 = 1 << 12;
    /// One more SYN followed, long enough after the first one for another challenge ACK.
    pub const SYNS_UNANSWERED: u32 = 1 << 13;
    /// Packets are translated once, where they come in, with both source and destination (twice
    /// NAT, RFC 2663, section 4.4). Such a flow has two entries and not four: one of
    /// [`Direction::Original`](super::Direction), whose source after translation is that of this
    /// node, and one of [`Direction::MasqueradeReply`](super::Direction), which leads to VIP and
    /// client. Only whole flows have it. A packet that must go through the stack ends it: the
    /// kernel drops what comes in with an address of the node as its source.
    pub const TWICE_NAT: u32 = 1 << 14;
    /// The bits that a packet removes unless it sets them.
    pub const UNTIL_NEXT: u32 = RESET | SYN_UNANSWERED | SYNS_UNANSWERED;

    const LIST_SHIFT: u32 = 16;
    /// All bits but those of the list.
    pub const SEEN: u32 = (1 << LIST_SHIFT) - 1;

    /// Returns the bits for the number of a [`List`](super::super::List).
    #[inline(always)]
    pub const fn of_list(list: u32) -> u32 {
        list << LIST_SHIFT
    }

    /// Returns the bits for what packets were seen, whatever their path.
    #[inline(always)]
    pub const fn observed(state: u32) -> u32 {
        state & SEEN & !(ASSURED | WHOLE)
    }

    /// Returns the number of the list.
    #[inline(always)]
    pub const fn list(state: u32) -> u32 {
        state >> LIST_SHIFT
    }

    /// Returns the state after a packet that sets these bits.
    #[inline(always)]
    pub const fn after(state: u32, observed: u32) -> u32 {
        state & !UNTIL_NEXT | observed
    }
}

map_type! {
    /// Key of `fragments`: the fragments of one datagram before translation.
    FragmentKey, 40 {
        /// The source.
        source: Addr,
        /// The destination.
        destination: Addr,
        /// The identification of the datagram.
        id: u32,
        /// The IP protocol number. IPv6 has it in each fragment header.
        proto: u8,
        /// The [`Direction`].
        direction: u8,
        /// 1 for fragments that come through the tunnel from another node, 0 for all others.
        tunneled: u8,
        /// Zero.
        zero: u8,
    }
}

map_type! {
    /// Value of `fragments`: the translation of the first fragment, which alone has ports.
    FragmentValue, 40 {
        /// The source after translation.
        source: Addr,
        /// The destination after translation. The unspecified address if the fragments go through
        /// the tunnel: the source is then the address of the endpoint's node. In the reply
        /// direction: the node to which they go through the tunnel, if it is not the destination of
        /// the fragments.
        destination: Addr,
        /// The bits of the mark that are set on all fragments.
        mark: u32,
        /// The time of the first fragment, in seconds of the monotonic clock.
        created_seconds: u32,
    }
}
