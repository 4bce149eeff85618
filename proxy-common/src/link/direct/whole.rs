//! Whole flows on the direct path, from the first packet on: the programs ask the kernel for the
//! route, and netfilter sees no packet.

use super::{
    Outcome, comes_from_endpoint,
    hop::count_hop,
    not_rewritten,
    route::{Way, find_way},
};
use crate::{
    Protocol,
    layout::{Direction, FlowKey, flow_state},
    packet::{Frame, Packet, Route, Tuple},
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
pub(in super::super) fn is_reply<T: Tables>(tables: &T, packet: &Packet, protocol: Protocol) -> bool {
    if !comes_from_endpoint(tables, packet) {
        return false;
    }
    let key = FlowKey::new(Direction::Reply, protocol, packet.tuple(packet.ports_or_zeros()));
    tables.flow(&key).is_some_and(|flow| flow.state & flow_state::WHOLE != 0)
}

/// Sends a packet with its final destination out on the link to which the kernel would forward it.
/// [`Outcome::Proceed`] sends it through the stack. `packet` is read again.
#[inline(never)]
pub(in super::super) fn send_on<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet) -> Outcome {
    let mut route = Route::NONE;
    match way_of(frame, tables, packet, &mut route) {
        Some(way) => leave(frame, tables, packet, packet.hops, (way, &route)),
        None => Outcome::Proceed,
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
    let is_written = count_hop(frame, packet, hops).is_some()
        && (way == Way::Asked || frame.store(0, &route.hardware).is_some());
    if !is_written {
        return not_rewritten(tables);
    }
    way.redirect(frame, route);
    Outcome::Redirect
}

/// Finds the way of a packet that is translated already. Returns `None` as [`find_way`].
#[inline(always)]
fn way_of<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &mut Packet, route: &mut Route) -> Option<Way> {
    packet.read(frame)?;
    let Tuple { source, destination } = packet.tuple(packet.ports()?);
    find_way(frame, tables, packet, [&source, &destination], route)
}
