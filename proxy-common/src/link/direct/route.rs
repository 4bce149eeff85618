//! Where packets of whole flows leave. The programs ask the kernel, and remember its answer for
//! half a second.

use super::{LEASE_NS, Notes, is_bare, leave_on, longest, may_hand_to_peer};
use crate::{
    Protocol, hash,
    layout::{DirectWatch, Endpoint, KnownRoute},
    link::original::ClientPacket,
    packet::{DSCP, Frame, Packet, Route, RoutedPacket},
    tables::Tables,
};

/// How a packet leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Way {
    /// By a route that the kernel has just found. The kernel writes the Ethernet addresses, and so
    /// keeps its entry for the next hop current.
    Asked,
    /// By the route of an earlier packet, with its Ethernet addresses.
    Known,
}

impl Way {
    /// Makes a packet leave, if the program redirects it. For a known route, its Ethernet addresses
    /// must be written too.
    #[inline(always)]
    pub(in super::super) fn redirect(self, frame: &impl Frame, route: &Route) {
        match self {
            Self::Asked => frame.redirect_to(route),
            Self::Known => frame.redirect(route.link),
        }
    }

    /// Does the same with a packet that is wholly translated, and leaves the note that says so.
    #[inline(always)]
    pub(in super::super) fn redirect_translated(self, frame: &impl Frame, route: &Route) {
        match self {
            Self::Asked => {
                Notes::leave(frame, Notes::FORWARDED);
                frame.redirect_to(route);
            }
            Self::Known => leave_on(frame, route.link, route.to_peer),
        }
    }
}

impl KnownRoute {
    /// Routes that a CPU remembers. A power of two.
    pub const PLACES: usize = 1 << 10;

    /// No route.
    pub const NONE: Self = Self {
        source: Endpoint::NONE,
        destination: Endpoint::NONE,
        hardware: [0; 12],
        in_link: 0,
        out_link: 0,
        longest: 0,
        proto: 0,
        traffic_class: 0,
        to_peer: 0,
        zero: 0,
        until_ns: 0,
    };

    /// Returns the place of the route of packets with this source, destination and protocol.
    /// `ports` is [`DirectWatch::port_mask`]. The last 32 bits of each address are enough: two
    /// addresses rarely share them.
    #[inline(always)]
    pub fn place_of(packet: &RoutedPacket<'_>, ports: u16) -> u32 {
        let ends = [packet.source, packet.destination];
        let [.., source] = ends[0].addr.words();
        let [.., destination] = ends[1].addr.words();
        let [source_port, destination_port] = ends.map(|end| u32::from(end.port & ports));
        let words = [source ^ u32::from(packet.proto), destination];
        let hash = hash::of_words(words, source_port << 16 | destination_port);
        hash::place(hash, Self::PLACES)
    }

    /// Returns true if a packet that comes in on a link may leave by the route. `ports` is
    /// [`DirectWatch::port_mask`], and `since_ns` the time of the last change.
    #[inline(always)]
    pub fn is_usable(
        &self,
        packet: &RoutedPacket<'_>,
        link: u32,
        now_ns: u64,
        (ports, since_ns): (u16, u64),
    ) -> bool {
        // Few comparisons, because the verifier follows each branch.
        let others = self.in_link ^ link
            | u32::from(self.proto ^ packet.proto)
            | u32::from((self.traffic_class ^ packet.traffic_class) & DSCP);
        let written_ns = self.until_ns.wrapping_sub(LEASE_NS);
        others == 0
            && different_bits(&self.source, packet.source, ports) == 0
            && different_bits(&self.destination, packet.destination, ports) == 0
            && packet.length <= self.longest
            && now_ns < self.until_ns
            && since_ns <= written_ns
    }

    /// Returns link and Ethernet addresses by `route`.
    #[inline(always)]
    pub const fn give(&self, route: &mut Route) {
        (route.link, route.hardware) = (self.out_link, self.hardware);
        route.to_peer = self.to_peer != 0;
    }

    /// Sets the route that the kernel has found for a packet that came in on a link. `to_peer`
    /// says that packets may be handed to the peer of the link where they leave.
    ///
    /// Each field is written by itself, because a whole value would need stack.
    #[inline(always)]
    pub fn set(
        &mut self,
        packet: &RoutedPacket<'_>,
        link: u32,
        route: &Route,
        (to_peer, now_ns): (bool, u64),
    ) {
        self.source = *packet.source;
        self.destination = *packet.destination;
        self.hardware = route.hardware;
        self.in_link = link;
        self.out_link = route.link;
        self.longest = packet.length;
        self.proto = packet.proto;
        self.traffic_class = packet.traffic_class;
        self.to_peer = to_peer.into();
        self.until_ns = now_ns + LEASE_NS;
    }
}

impl DirectWatch {
    /// No process watches.
    pub const NONE: Self = Self { since_ns: 0, until_ns: 0, portless_until_ns: 0 };

    /// Returns the bits of ports on which routes depend: all or none.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "all bits are the same")]
    pub const fn port_mask(&self, now_ns: u64) -> u16 {
        // Without a comparison, because the verifier follows each branch. Times stay below half of
        // the numbers for 292 years.
        let is_before = now_ns.wrapping_sub(self.portless_until_ns).cast_signed() >> 63;
        !(is_before.cast_unsigned() as u16)
    }
}

/// Returns 0 if both are the same, but for the bits of the port that are not in `ports`.
#[inline(always)]
const fn different_bits(one: &Endpoint, other: &Endpoint, ports: u16) -> u32 {
    one.addr.different_bits(&other.addr) | ((one.port ^ other.port) & ports) as u32
}

/// Finds the way of a packet that the programs may forward, with this source and destination.
/// Returns `None` if it must go through the stack: all packets of IPv4 that are not plain do. A
/// function call of its own saves stack.
#[inline(never)]
pub(super) fn find_way<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    [source, destination]: [&Endpoint; 2],
    route: &mut Route,
) -> Option<Way> {
    let routed = routed(frame, tables, packet, [source, destination]);
    if routed.length == 0 { None } else { way_by(frame, tables, &routed, route) }
}

/// Finds the way of a packet that is routed like this. Returns `None` if the programs may not
/// forward it there.
#[inline(always)]
pub(in super::super) fn way_by<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &RoutedPacket<'_>,
    route: &mut Route,
) -> Option<Way> {
    if know(tables, packet, frame.link(), route) {
        return Some(Way::Known);
    }
    if !ask(frame, tables, packet, route) {
        return None;
    }
    remember(tables, packet, frame.link(), route);
    Some(Way::Asked)
}

/// Returns the link where the first packet of a flow leaves, or 0. A route that the kernel tells is
/// not remembered. Otherwise the packet would leave by it, and the kernel would not check that its
/// next hop still answers. A function call of its own saves stack.
#[inline(never)]
pub(super) fn find_link<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &ClientPacket,
) -> u32 {
    let mut route = Route::NONE;
    let routed = routed(frame, tables, packet, [&incoming.key.source, &incoming.flow.destination]);
    if routed.length != 0
        && (know(tables, &routed, frame.link(), &mut route) || ask(frame, tables, &routed, &mut route))
    {
        route.link
    } else {
        0
    }
}

/// Returns what a route depends on. The length is 0 if the packet must go through the stack.
#[inline(always)]
fn routed<'a>(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    [source, destination]: [&'a Endpoint; 2],
) -> RoutedPacket<'a> {
    let Packet { version, proto, traffic_class, hops, .. } = *packet;
    let may_be_forwarded = hops > 1 && is_bare(frame, packet) && has_own_mark(frame, tables);
    let longest =
        if may_be_forwarded { longest(frame, packet, proto == Protocol::Tcp.number()) } else { None };
    let length = longest.and_then(|longest| longest.try_into().ok()).unwrap_or(0);
    RoutedPacket { version, proto, traffic_class, length, source, destination }
}

/// Looks up the route of an earlier packet. A function call of its own saves stack.
#[inline(never)]
fn know<T: Tables>(tables: &T, packet: &RoutedPacket<'_>, link: u32, route: &mut Route) -> bool {
    tables.known_route(packet, link, tables.now_ns(), route)
}

/// Asks the kernel for the route of a packet. Returns false if the programs may not forward the
/// packet by it. A function call of its own saves stack.
#[inline(never)]
fn ask<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &RoutedPacket<'_>, route: &mut Route) -> bool {
    route.to_peer = false;
    tables.is_direct_link(frame.link())
        && frame.find_route(packet, route)
        && tables.is_direct_link(route.link)
}

/// Remembers a route, if the kernel knows its next hop. A function call of its own saves stack.
#[inline(never)]
fn remember<T: Tables>(tables: &T, packet: &RoutedPacket<'_>, link: u32, route: &Route) {
    let Some(next_hop) = route.hardware.first_chunk::<6>() else { return };
    if *next_hop != [0; 6] {
        tables.remember_route(packet, link, route, may_hand_to_peer(tables, route.link));
    }
}

/// Returns false if the mark has bits that rules of others may look at.
#[inline(always)]
fn has_own_mark(frame: &impl Frame, tables: &impl Tables) -> bool {
    let mark = frame.mark();
    mark == 0 || tables.node().is_some_and(|node| mark & !node.masquerade_mark == 0)
}
