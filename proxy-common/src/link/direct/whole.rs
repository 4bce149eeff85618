//! Whole flows on the direct path, from the first packet on: the programs ask the kernel for the
//! route, and netfilter sees no packet.

use super::{
    Outcome, count_drop, difference_of_hops, may_be_endpoint,
    route::{Way, find_way},
    store_hops_v6,
};
use crate::{
    Protocol,
    layout::{Counter, Direction, FlowKey, ProgramError, flow_state},
    packet::{Frame, IpVersion, Packet, Route, Tuple},
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
    let way = way_of(frame, tables, packet, &mut route);
    if way == Way::Stack {
        Outcome::Proceed
    } else {
        leave(frame, tables, packet, packet.hops, (way, &route))
    }
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
    leave(frame, tables, packet, hops, (Way::Asked, route))
}

/// Counts the hop of a packet with so many hops left, and sends it out. In this order: a packet of
/// a link without Ethernet headers gets one as it leaves, and all offsets change.
#[inline(always)]
fn leave(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    hops: u8,
    (way, route): (Way, &Route),
) -> Outcome {
    if count_hop(frame, packet, hops).is_some() && way.leave(frame, route) {
        return Outcome::Redirect;
    }
    tables.count_error(ProgramError::NotRewritten);
    count_drop(tables, Counter::NotRewritten)
}

/// Finds the way of a packet that is translated already.
#[inline(always)]
fn way_of<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet, route: &mut Route) -> Way {
    if packet.read(frame).is_none() {
        return Way::Stack;
    }
    let Some(ports) = packet.ports() else { return Way::Stack };
    let Tuple { source, destination } = packet.tuple(ports);
    find_way(frame, tables, packet, [&source, &destination], route)
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
