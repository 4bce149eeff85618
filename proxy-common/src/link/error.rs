//! ICMP errors: who is told of a packet is told of it as it was sent, so that path MTU discovery and refusals work.

use super::{Outcome, rewritten};
use crate::{
    Protocol,
    layout::{Direction, FlowKey, flow_state},
    packet::{Fragment, Frame, IpVersion, Packet, Tuple},
    rewrite::{self, Error},
    tables::Tables,
};

/// An error comes in. If it tells an endpoint of its answer, which left translated back, both are translated.
#[inline(always)]
pub(super) fn about_reply(frame: &impl Frame, tables: &impl Tables, outer: &Packet) -> Outcome {
    about(frame, tables, outer, Direction::Original)
}

/// An error leaves. If it tells a client of its packet, which was translated as it came in, both are translated back.
#[inline(always)]
pub(super) fn about_original(frame: &impl Frame, tables: &impl Tables, outer: &Packet) -> Outcome {
    about(frame, tables, outer, Direction::Reply)
}

/// An error passes; of a direction is what answers the packet it tells of.
#[inline(never)]
fn about<F: Frame, T: Tables>(frame: &F, tables: &T, outer: &Packet, answered: Direction) -> Outcome {
    let mut inner = Packet::at(outer.payload + 8, outer.version);
    if !is_error(frame, outer) || !is_told(frame, &mut inner) {
        return Outcome::Proceed;
    }
    translate(frame, tables, outer, &inner, answered)
}

/// Translates an error and the packet it tells of, if that was translated. A call of its own, for its stack.
#[inline(never)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    inner: &Packet,
    answered: Direction,
) -> Outcome {
    let Some(protocol) = Protocol::of_packet(inner.proto) else { return Outcome::Proceed };
    let Some(ports) = inner.ports(frame) else { return Outcome::Proceed };
    let before = inner.tuple(ports);
    let mut after = before;
    if translate_back(tables, answered, protocol, &mut after).is_none() {
        return Outcome::Proceed;
    }
    let (mut source, mut destination) = (outer.source, outer.destination);
    match answered {
        Direction::Original if destination == before.source.addr => destination = after.source.addr,
        // Errors of the endpoint itself come from the VIP; those of routers stay the routers'.
        Direction::Reply if source == before.destination.addr => source = after.destination.addr,
        _ => {}
    }
    let (before, after) = (&before, &after);
    rewritten(tables, rewrite::error(frame, &Error { outer, source, destination, inner, before, after }))
}

/// Makes of a packet's addresses and ports those that it had before it was translated: what answers it, in a direction, is of a flow that
/// says so. A call of its own, for its stack.
#[inline(never)]
fn translate_back<T: Tables>(
    tables: &T,
    direction: Direction,
    protocol: Protocol,
    told: &mut Tuple,
) -> Option<()> {
    let flow = tables.flow(&FlowKey::new(direction, protocol, told.swapped()))?;
    if flow.state & flow_state::PASS != 0 {
        return None;
    }
    *told = flow.tuple().swapped();
    Some(())
}

/// Reads the packet that an error tells of: TCP or UDP, with its ports.
#[inline(always)]
fn is_told(frame: &impl Frame, inner: &mut Packet) -> bool {
    inner.read(frame).is_some()
        && Protocol::of_packet(inner.proto).is_some()
        && !matches!(inner.fragment, Fragment::Later { .. })
}

/// Whether an ICMP packet is of a type that tells of trouble with another (RFC 792, RFC 4443). Redirects are not: they are about
/// the way to an endpoint, and a client that took one for the way to the VIP it connected to would go past this node.
#[inline(always)]
fn is_error(frame: &impl Frame, packet: &Packet) -> bool {
    if matches!(packet.fragment, Fragment::Later { .. }) {
        return false;
    }
    let Some([kind]) = frame.load(packet.payload) else { return false };
    match packet.version {
        // Destination unreachable, source quench, time exceeded, parameter problem.
        IpVersion::V4 => matches!(kind, 3 | 4 | 11 | 12),
        // Destination unreachable, packet too big, time exceeded, parameter problem.
        IpVersion::V6 => matches!(kind, 1..=4),
    }
}
