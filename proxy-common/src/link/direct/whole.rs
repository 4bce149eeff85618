//! Whole flows on the direct path, from the first packet on: the programs ask the kernel for the
//! route, and netfilter sees no packet.

use super::{Outcome, count_drop, difference_of_hops, is_plain, longest, may_be_endpoint, store_hops_v6};
use crate::{
    Protocol,
    layout::{Counter, Direction, Endpoint, FlowKey, ProgramError, flow_state},
    packet::{Frame, IpVersion, Packet, Route, RoutedPacket, Tuple},
    tables::Tables,
};

/// Returns true if packets take the direct path from the first one of a flow on.
#[inline(always)]
pub(in super::super) fn is_whole(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.is_whole())
}

/// Returns the state bit of a new flow. A flow that began in the stack stays there or is learned:
/// conntrack may have changed its source port.
#[inline(always)]
pub(in super::super) fn state(tables: &impl Tables) -> u32 {
    if is_whole(tables) { flow_state::WHOLE } else { 0 }
}

/// Returns true if a packet that comes in is of an endpoint and belongs to a whole flow. It is
/// translated on the link where it leaves.
#[inline(never)]
pub(in super::super) fn is_reply<T: Tables>(
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    ports: [u16; 2],
) -> bool {
    if !may_be_endpoint(tables, &packet.source, ports[0]) {
        return false;
    }
    let key = FlowKey::new(Direction::Reply, protocol, packet.tuple(ports));
    tables.flow(&key).is_some_and(|flow| flow.state & flow_state::WHOLE != 0)
}

/// Sends a packet with its final destination out on the link to which the kernel would forward it.
/// [`Outcome::Proceed`] sends it through the stack. `packet` is read again.
#[inline(never)]
pub(in super::super) fn send_on<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet) -> Outcome {
    let mut route = Route::NONE;
    if !route_of(frame, tables, packet, &mut route) {
        return Outcome::Proceed;
    }
    leave_by(frame, tables, packet, packet.hops, &route)
}

/// Sends a packet with so many hops left out by a route.
#[inline(always)]
pub(in super::super) fn leave_by(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    hops: u8,
    route: &Route,
) -> Outcome {
    if count_hop(frame, packet, hops).is_none() {
        tables.count_error(ProgramError::NotRewritten);
        return count_drop(tables, Counter::NotRewritten);
    }
    frame.redirect_to(route);
    Outcome::Redirect
}

/// Finds the route of a packet that is translated already.
#[inline(always)]
fn route_of<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet, route: &mut Route) -> bool {
    if packet.read(frame).is_none() {
        return false;
    }
    let Some(ports) = packet.ports() else { return false };
    let Tuple { source, destination } = packet.tuple(ports);
    find_route(frame, tables, packet, [&source, &destination], route)
}

/// Finds the route of a packet that the programs may forward, with this source and destination.
/// Returns false if there is none. A function call of its own saves stack.
#[inline(never)]
pub(super) fn find_route<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    [source, destination]: [&Endpoint; 2],
    route: &mut Route,
) -> bool {
    let Packet { version, proto, traffic_class, hops, .. } = *packet;
    if hops <= 1
        || !is_plain(frame, packet)
        || !tables.is_direct_link(frame.link())
        || !has_own_mark(frame, tables)
    {
        return false;
    }
    let Some(length) = longest(frame, packet, proto == Protocol::Tcp.number()) else { return false };
    let Ok(length) = length.try_into() else { return false };
    let routed = RoutedPacket { version, proto, traffic_class, length, source, destination };
    frame.find_route(&routed, route) && tables.is_direct_link(route.link)
}

/// Returns false if the mark has bits that rules of others may look at.
#[inline(always)]
fn has_own_mark(frame: &impl Frame, tables: &impl Tables) -> bool {
    let mark = frame.mark();
    mark == 0 || tables.node().is_some_and(|node| mark & !node.masquerade_mark == 0)
}

/// Writes the hop limit of a packet that is forwarded.
#[inline(always)]
fn count_hop(frame: &impl Frame, packet: &Packet, hops: u8) -> Option<()> {
    match packet.version {
        IpVersion::V4 => {
            let [a, b] = difference_of_hops(packet, hops).apply(packet.checksum);
            frame.store(packet.header() + 8, &[hops - 1, packet.proto, a, b])
        }
        IpVersion::V6 => {
            let next = if packet.has_plain_header() { packet.proto } else { next_header(frame, packet)? };
            store_hops_v6(frame, packet, next, hops - 1)
        }
    }
}

/// Returns what follows an IPv6 header.
#[inline(always)]
fn next_header(frame: &impl Frame, packet: &Packet) -> Option<u8> {
    let [next, _]: [u8; 2] = frame.load(packet.header() + 6)?;
    Some(next)
}
