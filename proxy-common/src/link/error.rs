//! ICMP errors: who is told of a packet is told of it as it was sent, so that path MTU discovery and refusals work.

use super::{Outcome, rewritten};
use crate::{
    layout::{Direction, Flow, FlowKey, flow_state},
    packet::{Fragment, Frame, IpVersion, Packet, TCP, Tuple, UDP},
    rewrite::{self, Error},
    tables::Tables,
};

/// An error comes in. If it tells an endpoint of its answer, which left translated back, both are translated.
#[inline(never)]
pub(super) fn about_reply<F: Frame, T: Tables>(frame: &F, tables: &T, outer: &Packet) -> Outcome {
    let mut inner = Packet::at(outer.payload + 8, outer.version);
    if !is_error(frame, outer) || !is_told(frame, &mut inner) {
        return Outcome::Proceed;
    }
    let Some(ports) = inner.ports(frame) else { return Outcome::Proceed };
    let before = inner.tuple(ports);
    let Some(flow) = flow_of(tables, Direction::Original, &inner, &before) else { return Outcome::Proceed };
    let after = flow.tuple().swapped();
    let destination =
        if outer.destination == before.source.addr { after.source.addr } else { outer.destination };
    let (inner, before, after) = (&inner, &before, &after);
    let error = Error { outer, source: outer.source, destination, inner, before, after };
    rewritten(tables, rewrite::error(frame, &error))
}

/// An error leaves. If it tells a client of its packet, which was translated as it came in, both are translated back.
#[inline(never)]
pub(super) fn about_original<F: Frame, T: Tables>(frame: &F, tables: &T, outer: &Packet) -> Outcome {
    let mut inner = Packet::at(outer.payload + 8, outer.version);
    if !is_error(frame, outer) || !is_told(frame, &mut inner) {
        return Outcome::Proceed;
    }
    let Some(ports) = inner.ports(frame) else { return Outcome::Proceed };
    let before = inner.tuple(ports);
    let Some(flow) = flow_of(tables, Direction::Reply, &inner, &before) else { return Outcome::Proceed };
    let after = flow.tuple().swapped();
    // Errors of the endpoint itself come from the address that was dialled; those of routers stay the routers'.
    let source = if outer.source == before.destination.addr { after.destination.addr } else { outer.source };
    let (inner, before, after) = (&inner, &before, &after);
    let error = Error { outer, source, destination: outer.destination, inner, before, after };
    rewritten(tables, rewrite::error(frame, &error))
}

/// The flow whose packets of a direction answer the packet that an error tells of.
#[inline(always)]
fn flow_of(tables: &impl Tables, direction: Direction, inner: &Packet, told: &Tuple) -> Option<Flow> {
    let flow = tables.flow(&FlowKey::new(direction, inner.proto, told.swapped()))?;
    (flow.state & flow_state::PASS == 0).then_some(flow)
}

/// Reads the packet that an error tells of: TCP or UDP, with its ports.
#[inline(always)]
fn is_told(frame: &impl Frame, inner: &mut Packet) -> bool {
    inner.read(frame).is_some()
        && matches!(inner.proto, TCP | UDP)
        && !matches!(inner.fragment, Fragment::Later { .. })
}

/// Whether an ICMP packet is of a type that tells of trouble with another (RFC 792, RFC 4443). Redirects are not: they are about
/// the way to an endpoint, and a client that took one for the way to the address it dialled would go past this node.
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
