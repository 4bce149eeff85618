//! The endpoint's node sends the packets of an endpoint back through the tunnel, to the node that
//! the client reached (`shunt.dsr.return: tunnel`). That node sends them on to the client. So each
//! node sends only packets with an address of its own as their source.

use super::{enter, fits, longest_to, segments};
use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, Flow, FlowKey, FragmentValue, flow_state},
    link::{ClientPacket, Outcome, count_drop, finish, fragment},
    packet::{Fragment, Frame, Packet},
    rewrite,
    tables::Tables,
};

/// The way of a packet of an endpoint. A number, because a program returns no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Way(u32);

impl Way {
    /// The kernel routes it to the client.
    pub(in super::super) const ROUTED: Self = Self(0);
    /// It goes through the tunnel. The program rewrites it, and then redirects it.
    const TUNNEL: Self = Self(1);

    #[inline(always)]
    pub(in super::super) const fn is_routed(self) -> bool {
        self.0 == Self::ROUTED.0
    }

    /// Returns the outcome for a packet whose outcome is this one apart from its way.
    #[inline(always)]
    pub(in super::super) const fn after(self, outcome: Outcome) -> Outcome {
        redirected(outcome, self.0 == Self::TUNNEL.0)
    }

    /// Returns the bytes of the longest packet that fits into the tunnel, if this one does not.
    #[inline(always)]
    pub(in super::super) const fn longest(self) -> Option<u32> {
        if self.0 > Self::TUNNEL.0 { Some(self.0) } else { None }
    }
}

/// Returns the state bit of a new flow.
#[inline(always)]
pub(in super::super) fn state<F: Frame>(tables: &impl Tables) -> u32 {
    if F::IS_TUNNELED && returns(tables) { flow_state::RETURN } else { 0 }
}

#[inline(always)]
fn returns(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.tunnel_returns != 0)
}

/// Finds the node of a flow of which only the key is known for sure.
#[inline(always)]
fn node_of(tables: &impl Tables, key: &FlowKey) -> Option<Addr> {
    match tables.dsr_return(key, true) {
        None => tables.dsr_return(key, false),
        node => node,
    }
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
    if tables.dsr_return(key, flow.is_assured()) != Some(node) {
        tables.set_dsr_return(key, &node, flow.is_assured());
    }
    if tcp.is_syn() {
        segments::limit(frame, packet, longest_to(tables, &node));
    }
}

/// Finds the way of a packet of an endpoint, before it is rewritten. `key` and `flow` are of the
/// reply direction.
#[inline(never)]
pub(in super::super) fn find_way<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    key: &FlowKey,
    flow: &Flow,
) -> Way {
    let Some(node) = node_of(tables, &flow.opposite_key(key)) else { return Way::ROUTED };
    let longest = longest_to(tables, &node);
    if !fits(frame, packet, &node, longest) {
        return Way(longest);
    }
    if !enter(frame, tables, &node) {
        return Way::ROUTED;
    }
    if packet.fragment == Fragment::First {
        fragment::record(tables, packet, Direction::Reply, &flow.source.addr, &node);
    }
    Way::TUNNEL
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
    let is_entered = enter(frame, tables, node);
    let rewritten = rewrite::later_fragment(frame, packet, first.source, packet.destination);
    redirected(finish(tables, rewritten), is_entered)
}

/// Makes an ICMP error enter the tunnel, if it is about a packet that came through it and goes to
/// the client. The error is translated after that. Returns false for another error.
#[inline(never)]
pub(in super::super) fn enter_with_error<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    inner: &Packet,
) -> bool {
    if outer.destination != inner.source {
        return false;
    }
    let (Some(protocol), Some(ports)) = (Protocol::of_packet(inner.proto), inner.ports()) else {
        return false;
    };
    let key = FlowKey::new(Direction::Reply, protocol, inner.tuple(ports).swapped());
    let Some(flow) = tables.flow(&key).filter(|flow| flow.state & flow_state::RETURN != 0) else {
        return false;
    };
    node_of(tables, &flow.opposite_key(&key)).is_some_and(|node| enter(frame, tables, &node))
}

/// Returns the outcome for a packet that passes, if it is to enter the tunnel.
#[inline(always)]
pub(in super::super) const fn redirected(outcome: Outcome, is_entered: bool) -> Outcome {
    if is_entered && matches!(outcome, Outcome::Proceed) { Outcome::Redirect } else { outcome }
}
