//! Whole flows that are masqueraded: their packets are translated once, with both addresses, and
//! leave at once (twice NAT). They cost one lookup and one rewrite each, and the flow has two
//! entries instead of four.
//!
//! Such a packet cannot go through the stack, which drops what comes in with an address of the node
//! as its source. If one must, [`split`] makes the flow one with two translations.

use super::{
    super::{Outcome, finish_flow_packet, ip_length, masquerade, original::ClientPacket},
    hop::{Hop, rewrite_hop},
    route::{find_link, find_way},
    whole::is_whole,
};
use crate::{
    Protocol,
    checksum::Difference,
    flow::TwiceNat,
    layout::{Direction, Endpoint, Flow, FlowKey, ServiceEvent, flow_state},
    packet::{Frame, IpVersion, Packet, PlainEnds, PlainPacket, Route},
    rewrite,
    tables::Tables,
};

/// How many source ports are tried for a flow. The verifier follows each try by itself. If all are
/// taken, the flow gets two translations, for which more are tried.
const TRIES: u32 = 2;

/// Writes the entries of a new flow if it can have twice NAT. Returns false if it cannot, or if
/// there is no free source port: then it may get two translations. A function call of its own saves
/// stack.
#[inline(never)]
pub(in super::super) fn begin<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &mut ClientPacket,
) -> bool {
    const WANTED: u32 = flow_state::WHOLE | flow_state::MASQUERADE;
    const NOT: u32 = flow_state::DSR | flow_state::RETURN;
    let state = incoming.flow.state;
    if !F::IS_ETHERNET || F::IS_TUNNELED || state & (WANTED | NOT) != WANTED || incoming.is_midstream() {
        return false;
    }
    let client = incoming.flow.source;
    if choose_address(frame, tables, packet, incoming) {
        incoming.flow.state = state | flow_state::TWICE_NAT;
        if masquerade::choose_port::<T, TRIES>(tables, incoming) && masquerade::write(frame, tables, incoming)
        {
            return true;
        }
    }
    (incoming.flow.source, incoming.flow.state) = (client, state);
    false
}

/// Sets the source of a new flow to the address of the node for the link where its packets leave.
/// Returns false if they cannot take the direct path.
#[inline(always)]
fn choose_address<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &mut ClientPacket,
) -> bool {
    let link = find_link(frame, tables, packet, incoming);
    link != 0 && take_address(tables, link, incoming)
}

/// Sets the source of a new flow to the address of the node for this link. A function call of its
/// own saves stack.
#[inline(never)]
fn take_address<T: Tables>(tables: &T, link: u32, incoming: &mut ClientPacket) -> bool {
    let endpoint = &incoming.flow.destination.addr;
    let Some(address) = tables.masquerade_address(link, endpoint) else { return false };
    incoming.flow.source = Endpoint::new(address, incoming.key.source.port);
    true
}

/// Translates a packet of a flow with twice NAT and sends it on. `key` is that of the packet,
/// and `FROM` the number of its [`Direction`].
///
/// If it cannot leave at once, the flow is [`split`], and the result is [`Outcome::Proceed`],
/// unless the entry is left from an earlier flow, or the flow is held by now.
#[inline(always)]
pub(in super::super) fn send_or_split<F: Frame, T: Tables, const FROM: usize>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    key: &FlowKey,
    flow: &mut Flow,
) -> Outcome {
    let outcome = send(frame, tables, packet, key, flow);
    if matches!(outcome, Outcome::Proceed) {
        let is_split = split::<T, FROM>(tables, key, flow);
        if is_split && flow.state & flow_state::HELD == 0 { Outcome::Proceed } else { Outcome::Drop }
    } else {
        outcome
    }
}

/// Translates a packet, and makes it leave where the kernel would forward it. Returns
/// [`Outcome::Proceed`] if the packet must go through the stack. It is unchanged then. A packet
/// that cannot be rewritten is dropped.
#[inline(never)]
fn send<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, key: &FlowKey, flow: &Flow) -> Outcome {
    let mut route = Route::NONE;
    if !F::IS_ETHERNET || !is_whole(tables) {
        return Outcome::Proceed;
    }
    // The kernel routes packets before it masquerades them.
    let Some(way) = find_way(frame, tables, packet, [&key.source, &flow.destination], &mut route) else {
        return Outcome::Proceed;
    };
    way.redirect_translated(frame, &route);
    // If the way is `Asked`, the kernel overwrites the Ethernet addresses.
    let rewritten = match packet.version {
        IpVersion::V4 => rewrite_v4(frame, &route.hardware, flow),
        IpVersion::V6 => rewrite_v6(frame, packet, &route.hardware, key, flow),
    };
    let bytes = ip_length(frame, packet.header());
    let is_to_endpoint = key.direction == Direction::Original as u8;
    let event = ServiceEvent::of_packet(is_to_endpoint, bytes);
    match finish_flow_packet(frame, tables, (key, flow), event, rewritten) {
        Outcome::Proceed => Outcome::Redirect,
        outcome => outcome,
    }
}

/// Rewrites a packet of IPv4, with its Ethernet addresses. It is plain, because [`find_way`] finds
/// a way for no other packet of IPv4. A function call of its own saves stack.
#[inline(never)]
fn rewrite_v4<F: Frame>(frame: &F, hardware: &[u8; 12], flow: &Flow) -> Option<()> {
    let ends = PlainEnds::of(flow);
    let packet = PlainPacket::read_again(frame)?;
    rewrite::plain(frame, &packet, hardware, &ends, packet.differences(&ends))
}

/// Does the same with a packet of IPv6.
#[inline(never)]
fn rewrite_v6<F: Frame>(
    frame: &F,
    packet: &Packet,
    hardware: &[u8; 12],
    key: &FlowKey,
    flow: &Flow,
) -> Option<()> {
    let hop = Hop {
        source: &flow.source.addr,
        destination: &flow.destination.addr,
        source_port: flow.source.port,
        destination_port: flow.destination.port,
        addresses: Difference::of_addresses(&key.source.addr, &flow.source.addr)
            .and(Difference::of_addresses(&key.destination.addr, &flow.destination.addr)),
        ports: Difference::of_ports(key.source.port, flow.source.port)
            .and(Difference::of_ports(key.destination.port, flow.destination.port)),
    };
    rewrite_hop(frame, packet, Protocol::of_packet(packet.proto)?, hardware, &hop)
}

/// Replaces the entries of a flow with twice NAT by those of a flow with two translations, which
/// may go through the stack. `flow` becomes the entry of `key`. `FROM` is the number of its
/// [`Direction`]: a constant, because the verifier follows each branch. Returns false for an entry
/// that is left from an earlier flow, whose client has another flow by now, and if the kernel has
/// no memory for an entry.
///
/// If another CPU does the same, it writes the same, or a flow with another client port between the
/// translations. Userspace does the same before a handover. What it wrote then stays. The entry of
/// the client's direction is written last: while it has twice NAT, its next packet tries again.
#[inline(never)]
fn split<T: Tables, const FROM: usize>(tables: &T, key: &FlowKey, flow: &mut Flow) -> bool {
    if !refresh(tables, key, flow) {
        return true;
    }
    let mut acknowledged = Acknowledged(0);
    if !acknowledged.read::<T, FROM>(tables, key, flow) {
        // Another CPU may have split the flow meanwhile.
        return !refresh(tables, key, flow);
    }
    let mut port = parts::<FROM>(key, flow, 0).client().port;
    if !is_free::<T, FROM>(tables, key, flow, port) {
        // The client has another flow to the endpoint. It hardly has one from the node's port too.
        port = parts::<FROM>(key, flow, 0).node().port;
    }
    // The packets of both directions restore the first two.
    put::<T, FROM, 1>(tables, key, flow, port, acknowledged);
    put::<T, FROM, 2>(tables, key, flow, port, acknowledged);
    let is_written = put::<T, FROM, 3>(tables, key, flow, port, acknowledged)
        && put::<T, FROM, 0>(tables, key, flow, port, acknowledged);
    *flow = parts::<FROM>(key, flow, port).flow(Direction::ALL[FROM], flow.acknowledged);
    is_written
}

/// Reads the entry of a flow again. The packet may have changed its state, and moved it to the map
/// of assured flows. Returns false if it has no twice NAT any more. A function call of its own
/// saves stack.
#[inline(never)]
fn refresh<T: Tables>(tables: &T, key: &FlowKey, flow: &mut Flow) -> bool {
    if let Some(current) = tables.flow(key) {
        *flow = current;
    }
    flow.has_twice_nat()
}

/// Returns the flow of an entry of the [`Direction`] with this number.
#[inline(always)]
const fn parts<'a, const FROM: usize>(key: &'a FlowKey, flow: &'a Flow, port: u16) -> TwiceNat<'a> {
    TwiceNat { is_original: FROM == Direction::Original as usize, key, flow, port }
}

/// Returns true if no other flow has the entry for replies with this port of the client. A function
/// call of its own saves stack.
#[inline(never)]
fn is_free<T: Tables, const FROM: usize>(tables: &T, key: &FlowKey, flow: &Flow, port: u16) -> bool {
    let twice = parts::<FROM>(key, flow, port);
    let other = tables.flow(&twice.key(Direction::Reply));
    other.is_none_or(|other| other.tuple() == twice.flow(Direction::Reply, 0).tuple())
}

/// Writes the entry of a [`Direction`] with the number `PART`. A function call for each saves
/// stack.
#[inline(never)]
fn put<T: Tables, const FROM: usize, const PART: usize>(
    tables: &T,
    key: &FlowKey,
    flow: &Flow,
    port: u16,
    acknowledged: Acknowledged,
) -> bool {
    let (twice, direction) = (parts::<FROM>(key, flow, port), Direction::ALL[PART]);
    tables.put_flow(&twice.key(direction), &twice.flow(direction, acknowledged.of_entry(direction)))
}

/// [`Flow::acknowledged`] of both entries before the split: that of the client's direction in the
/// lower half. One number, because stack is scarce.
#[derive(Clone, Copy)]
struct Acknowledged(u64);

impl Acknowledged {
    /// Reads the other entry too. Returns false if it is of another flow. A function call of its
    /// own saves stack.
    #[inline(never)]
    fn read<T: Tables, const FROM: usize>(&mut self, tables: &T, key: &FlowKey, flow: &Flow) -> bool {
        let mut opposite = 0;
        if let Some(other) = tables.flow(&flow.opposite_key(key)) {
            if parts::<FROM>(key, flow, 0).is_left(&other) {
                return false;
            }
            opposite = other.acknowledged;
        }
        let (to_endpoint, to_client) = if parts::<FROM>(key, flow, 0).is_original {
            (flow.acknowledged, opposite)
        } else {
            (opposite, flow.acknowledged)
        };
        self.0 = u64::from(to_client) << 32 | u64::from(to_endpoint);
        true
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "one of the halves")]
    const fn of_entry(self, part: Direction) -> u32 {
        match part {
            Direction::Original | Direction::Masquerade => self.0 as u32,
            Direction::Reply | Direction::MasqueradeReply => (self.0 >> 32) as u32,
        }
    }
}

/// Splits the flow with this entry of the [`Direction`] with the number `FROM`, if it has twice
/// NAT.
#[inline(never)]
pub(in super::super) fn split_entry<T: Tables, const FROM: usize>(tables: &T, key: &FlowKey) {
    let mut flow = Flow::NONE;
    split::<T, FROM>(tables, key, &mut flow);
}
