//! The endpoint's node sends the packets of an endpoint back through the tunnel, to the node that
//! the client reached (`shunt.dsr.return: tunnel`). That node sends them on to the client. So each
//! node sends only packets with an address of its own as their source.

use super::{enter, fits, has_room, longest_to, segments};
use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, Flow, FlowKey, FragmentValue, flow_state},
    link::{ClientPacket, Notes, Outcome, count_drop, finish, fragment},
    packet::{Fragment, Frame, Packet},
    rewrite,
    tables::Tables,
};

/// Returns the state bit of a new flow.
#[inline(always)]
pub(in super::super) fn state<F: Frame>(tables: &impl Tables) -> u32 {
    if F::IS_TUNNELED && returns(tables) { flow_state::RETURN } else { 0 }
}

#[inline(always)]
fn returns(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.tunnel_returns != 0)
}

/// Finds the node of a flow, whether it is assured or not.
#[inline(always)]
fn node_of(tables: &impl Tables, key: &FlowKey) -> Option<Addr> {
    match tables.dsr_return(key, true) {
        None => tables.dsr_return(key, false),
        node => node,
    }
}

/// Returns the node that [`note_node`] noted for a flow, and that [`node_of`] finds.
#[inline(always)]
fn known_node(tables: &impl Tables, key: &FlowKey, flow: &Flow) -> Option<Addr> {
    if flow.is_assured() { tables.dsr_return(key, true) } else { node_of(tables, key) }
}

/// Notes from which node a packet of a client came, which may change while the connection is open.
/// Limits the segments of the endpoint by what fits into the tunnel.
///
/// The nodes of flows that are not assured are in a map of their own, so that a flood does not
/// evict those of others.
#[inline(never)]
pub(in super::super) fn note_node<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &ClientPacket,
) {
    let ClientPacket { key, flow, tcp, .. } = incoming;
    let node = if F::IS_TUNNELED && returns(tables) { frame.tunnel_source() } else { None };
    let Some(node) = node else {
        // The client reaches this node now, or the setting changed.
        tables.remove_dsr_return(key);
        return;
    };
    if known_node(tables, key, flow) != Some(node) {
        if !flow.is_assured() {
            // Otherwise `node_of` finds the node of an earlier flow from the same port.
            tables.remove_dsr_return(key);
        }
        tables.set_dsr_return(key, &node, flow.is_assured());
    }
    if tcp.is_syn() {
        segments::limit(frame, packet, longest_to(tables, &node));
    }
}

/// Makes a packet of an endpoint enter the tunnel, if its client reached another node. The packet
/// is rewritten after that, and redirected if [`Notes::is_forwarded`]. The result is kept in the
/// note, because the verifier would follow the rewriting once for each result. `key` and `flow` are
/// of the reply direction.
///
/// Returns the bytes of the longest packet that fits if this one is too long, and otherwise 0.
#[inline(never)]
pub(in super::super) fn enter_with_reply<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    key: &FlowKey,
    flow: &Flow,
) -> u32 {
    let Some(node) = node_of(tables, &flow.opposite_key(key)) else { return 0 };
    if !has_room(tables, &node, flow.source.addr.is_v4()) {
        return 0;
    }
    let longest = longest_to(tables, &node);
    if !fits(frame, packet, &node, longest) {
        return longest;
    }
    if enter(frame, tables, &node) && packet.fragment == Fragment::First {
        fragment::record::<F, _>(tables, packet, Direction::Reply, &flow.source.addr, &node);
    }
    0
}

/// Sends a later fragment back through the tunnel. One that is too long is lost, and so was the
/// first, whose sender was told.
#[inline(never)]
pub(in super::super) fn send_later<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    first: &FragmentValue,
) -> Outcome {
    let node = &first.destination;
    if !fits(frame, packet, node, longest_to(tables, node)) {
        return count_drop(tables, Counter::TooLongForTunnel);
    }
    enter(frame, tables, node);
    let rewritten = rewrite::later_fragment(frame, packet, first.source, packet.destination);
    redirected(frame, tables, finish(tables, rewritten))
}

/// Makes an ICMP error enter the tunnel, if it is about a packet that came through it and goes to
/// the client. The error is translated after that.
#[inline(never)]
pub(in super::super) fn enter_with_error<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    inner: &Packet,
) {
    if outer.destination != inner.source {
        return;
    }
    let (Some(protocol), Some(ports)) = (Protocol::of_packet(inner.proto), inner.ports()) else {
        return;
    };
    let key = FlowKey::new(Direction::Reply, protocol, inner.tuple(ports).swapped());
    let Some(flow) = tables.flow(&key).filter(|flow| flow.state & flow_state::RETURN != 0) else {
        return;
    };
    if let Some(node) = node_of(tables, &flow.opposite_key(&key)) {
        enter(frame, tables, &node);
    }
}

/// Redirects a packet that passes, if it has entered the tunnel.
#[inline(always)]
pub(in super::super) fn redirected<F: Frame, T: Tables>(frame: &F, tables: &T, outcome: Outcome) -> Outcome {
    let is_entered = Notes::is_forwarded(frame, tables);
    if is_entered && matches!(outcome, Outcome::Proceed) { Outcome::Redirect } else { outcome }
}
