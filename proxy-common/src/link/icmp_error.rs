//! ICMP errors: the sender of a packet gets errors about the packet that it sent, so that path MTU
//! discovery and refusals work.

use super::{Notes, Outcome, direct, dsr, finish};
use crate::{
    Protocol,
    layout::{Direction, FlowKey, flow_state},
    packet::{Fragment, Frame, IpVersion, Packet, Tuple},
    rewrite::{self, IcmpError},
    tables::Tables,
};

/// Handles an ICMP packet at the hook where packets of `direction` are translated. If it is an
/// error about a translated packet of the opposite direction, both are translated back: on ingress
/// for the endpoint whose reply it is about, and on egress for the client.
#[inline(never)]
pub(super) fn process<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    direction: Direction,
) -> Outcome {
    let mut inner = Packet::at(outer.payload() + 8, outer.version);
    if !is_about(frame, outer, &mut inner) {
        return Outcome::Proceed;
    }
    if tables.has_tunnel() && !F::IS_TUNNELED && matches!(direction, Direction::Original) {
        let outcome = dsr::send_error(frame, tables, outer, &inner);
        if !matches!(outcome, Outcome::Proceed) {
            return outcome;
        }
    }
    if tables.has_tunnel() && matches!(direction, Direction::Reply) {
        dsr::reply::enter_with_error(frame, tables, outer, &inner);
        return dsr::reply::redirected(frame, tables, translate(frame, tables, outer, &inner, direction));
    }
    translate(frame, tables, outer, &inner, direction)
}

/// Splits the flow that an error is about, if it has twice NAT: the error goes through the stack. A
/// function call of its own, before [`process`], saves stack.
#[inline(never)]
pub(super) fn split_flow<F: Frame, T: Tables>(frame: &F, tables: &T, outer: &Packet) {
    const ORIGINAL: usize = Direction::Original as usize;
    const REPLY: usize = Direction::MasqueradeReply as usize;
    let mut inner = Packet::at(outer.payload() + 8, outer.version);
    if !is_about(frame, outer, &mut inner) {
        return;
    }
    let Some(protocol) = Protocol::of_packet(inner.proto) else { return };
    let Some(ports) = inner.ports() else { return };
    let mut key = FlowKey::new(Direction::Original, protocol, inner.tuple(ports).swapped());
    direct::twice::split_entry::<T, ORIGINAL>(tables, &key);
    key.direction = Direction::MasqueradeReply as u8;
    direct::twice::split_entry::<T, REPLY>(tables, &key);
}

/// Translates an error and its inner packet, if the inner packet was translated. A function call of
/// its own saves stack.
#[inline(never)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    inner: &Packet,
    direction: Direction,
) -> Outcome {
    let Some(protocol) = Protocol::of_packet(inner.proto) else { return Outcome::Proceed };
    let Some(ports) = inner.ports() else { return Outcome::Proceed };
    let before = inner.tuple(ports);
    let mut after = before;
    // No error about a masqueraded packet comes through the tunnel: it is for the node's address.
    if reverse_translation(tables, direction, protocol, &mut after).is_none()
        && (F::IS_TUNNELED
            || reverse_translation(tables, direction.masqueraded(), protocol, &mut after).is_none())
    {
        return Outcome::Proceed;
    }
    let (mut source, mut destination) = (outer.source, outer.destination);
    match direction {
        Direction::Original if destination == before.source.addr => destination = after.source.addr,
        // Errors of the endpoint itself get the VIP as their source, and those of a client that is
        // masqueraded the address of the node. Errors of routers keep theirs.
        // The node to which an error goes through the tunnel sends only what comes from a VIP.
        Direction::Reply if source == before.destination.addr || Notes::is_forwarded(frame, tables) => {
            source = after.destination.addr;
        }
        _ => {}
    }
    let (before, after) = (&before, &after);
    finish(
        tables,
        rewrite::icmp_error(frame, &IcmpError { outer, source, destination, inner, before, after }),
    )
}

/// Replaces the addresses and ports of a translated packet by those before its translation. The
/// entry of the flow's opposite direction, `direction`, has them. A function call of its own saves
/// stack.
#[inline(never)]
fn reverse_translation<T: Tables>(
    tables: &T,
    direction: Direction,
    protocol: Protocol,
    tuple: &mut Tuple,
) -> Option<()> {
    let flow = tables.flow(&FlowKey::new(direction, protocol, tuple.swapped()))?;
    if flow.state & (flow_state::PASS | flow_state::DSR) != 0 {
        return None;
    }
    *tuple = flow.tuple().swapped();
    Some(())
}

/// Reads the packet that an ICMP error is about. Returns false for another packet.
#[inline(always)]
pub(super) fn is_about(frame: &impl Frame, outer: &Packet, inner: &mut Packet) -> bool {
    is_error(frame, outer) && read_inner(frame, inner)
}

/// Reads the inner packet of an error. Returns true if it has ports and a protocol that the
/// programs translate.
#[inline(always)]
fn read_inner(frame: &impl Frame, inner: &mut Packet) -> bool {
    inner.read(frame).is_some()
        && Protocol::of_packet(inner.proto).is_some()
        && !matches!(inner.fragment, Fragment::Later)
}

/// Returns true if an ICMP packet is an error (RFC 792, RFC 4443). Redirects are excluded: they
/// name the route to an endpoint, and a client that used it for the VIP would bypass this node.
#[inline(always)]
fn is_error(frame: &impl Frame, packet: &Packet) -> bool {
    if matches!(packet.fragment, Fragment::Later) {
        return false;
    }
    let Some([kind, _code]) = frame.load(packet.payload()) else { return false };
    match packet.version {
        // Destination unreachable, source quench, time exceeded, parameter problem.
        IpVersion::V4 => matches!(kind, 3 | 4 | 11 | 12),
        // Destination unreachable, packet too big, time exceeded, parameter problem.
        IpVersion::V6 => matches!(kind, 1..=4),
    }
}
