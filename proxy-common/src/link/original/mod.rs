//! The original direction: packets of clients that come in for a Service.

mod classify;
pub(super) mod entries;

use self::classify::{Classification, classify};
use super::{
    Outcome, count_drop, direct, dsr, finish_flow_packet, forward, fragment, ip_length, malformed, masquerade,
};
use crate::{
    Protocol,
    flow::{self, observed_state},
    layout::{Counter, Direction, Flow, FlowKey, NodeValue, Refusing, ServiceEvent, flow_state},
    packet::{Fragment, Frame, Packet, TcpFlags},
    rewrite,
    tables::Tables,
};

/// A packet of a client, with the flow that it belongs to or begins.
pub(super) struct ClientPacket {
    pub(super) key: FlowKey,
    /// [`Flow::NONE`] if there is no entry for the key.
    pub(super) flow: Flow,
    pub(super) protocol: Protocol,
    /// No flag is set unless the protocol is TCP.
    pub(super) tcp: TcpFlags,
    pub(super) now_ns: u64,
}

impl ClientPacket {
    /// Returns true for a segment that opens no connection.
    #[inline(always)]
    pub(super) fn is_midstream(&self) -> bool {
        self.protocol.is_connection_oriented() && !self.tcp.is_syn()
    }

    #[inline(always)]
    pub(super) fn trace(&self, frame: &impl Frame, tables: &impl Tables, verdict: Counter) {
        tables.trace(verdict, frame.link(), &self.key, &self.flow);
    }
}

/// Handles a TCP or UDP packet that comes in and may be for a Service.
#[inline(never)]
pub(super) fn transport<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
) -> Outcome {
    let Some(tcp) = packet.tcp_flags(frame, protocol) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Original, protocol, packet.tuple(packet.ports_or_zeros()));
    let mut incoming = ClientPacket { key, flow: Flow::NONE, protocol, tcp, now_ns: 0 };
    incoming.now_ns = tables.now_ns();
    find_flow::<F>(tables, &mut incoming);
    match classify(frame, tables, &mut incoming) {
        Classification::Existing => {
            let ClientPacket { flow, now_ns, .. } = &incoming;
            if flow.is_held(*now_ns) {
                return Outcome::Drop;
            }
            if flow.state & flow_state::LEFT != 0 {
                return Outcome::Proceed;
            }
            observe(frame, tables, packet, &incoming);
            direct::sample(frame, tables, flow, incoming.tcp, *now_ns);
        }
        class @ (Classification::New | Classification::Reused) => {
            let is_reused = matches!(class, Classification::Reused);
            if !begin(frame, tables, packet, &mut incoming, is_reused) {
                return count_drop(tables, Counter::FlowNotRecorded);
            }
        }
        Classification::Proceed => return Outcome::Proceed,
        Classification::Drop | Classification::Retry => return Outcome::Drop,
        Classification::Rejected(reason) => {
            incoming.trace(frame, tables, reason);
            let is_refused = matches!(reason, Counter::Refused | Counter::UnknownConnection);
            return if is_refused { refused(tables) } else { Outcome::Drop };
        }
    }
    if incoming.flow.has_twice_nat() {
        let ClientPacket { key, flow, .. } = &mut incoming;
        let outcome = direct::twice::send_or_split::<F, T, { Direction::Original as usize }>(
            frame, tables, packet, key, flow,
        );
        if !matches!(outcome, Outcome::Proceed) {
            return outcome;
        }
    }
    if incoming.flow.state & flow_state::PASS != 0 {
        return Outcome::Proceed;
    }
    if tables.has_tunnel() && incoming.flow.state & flow_state::RETURN != 0 {
        dsr::reply::note_node(frame, tables, packet, &incoming);
    }
    if dsr::sends::<F>(tables, &incoming.flow) {
        return dsr::send_client_packet(frame, tables, packet, &incoming);
    }
    translate(frame, tables, packet, &incoming)
}

/// Returns what happens to a packet that is refused.
#[inline(always)]
fn refused(tables: &impl Tables) -> Outcome {
    let is_answered = tables.node().is_some_and(|node| node.refusing == Refusing::Programs as u32);
    if is_answered { Outcome::Refuse } else { Outcome::Proceed }
}

/// Writes the entries of a new flow. Returns false if that failed. `is_reused` says that a closed
/// flow with the same addresses has entries.
#[inline(always)]
fn begin<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &mut ClientPacket,
    is_reused: bool,
) -> bool {
    if tables.has_tunnel() && incoming.flow.is_dsr() {
        dsr::take(tables, &mut incoming.flow);
    }
    if incoming.is_midstream() {
        adopt(frame, packet, incoming);
    }
    let is_written = !is_reused && direct::twice::begin(frame, tables, packet, incoming)
        || entries::write(tables, incoming, is_reused);
    if is_written {
        incoming.trace(frame, tables, Counter::FlowsBegun);
    } else {
        tables.count_service(incoming.flow.service, ServiceEvent::Drop);
        incoming.trace(frame, tables, Counter::FlowNotRecorded);
    }
    is_written
}

/// Finds the flow of a packet. Removes one that went through the tunnel and cannot go on.
#[inline(always)]
fn find_flow<F: Frame>(tables: &impl Tables, incoming: &mut ClientPacket) {
    if let Some(flow) = tables.flow(&incoming.key) {
        incoming.flow = flow;
    }
    if incoming.flow.is_dsr() && !dsr::goes_on::<F, _>(tables, incoming) {
        tables.remove_flow(&incoming.key);
        incoming.flow = Flow::NONE;
    }
}

/// Prepares the entry of a connection that the node does not know. The client acknowledged more
/// than the endpoint's SYN-ACK long ago, so its next acknowledgement shows that the flow is
/// assured.
#[inline(always)]
fn adopt(frame: &impl Frame, packet: &Packet, incoming: &mut ClientPacket) {
    incoming.flow.acknowledged = packet.tcp_acknowledgement(frame).unwrap_or(0);
    incoming.flow.state |= observed_state(Direction::Original, incoming.tcp);
}

/// Updates a known flow for a packet of its client.
#[inline(always)]
pub(super) fn observe<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, incoming: &ClientPacket) {
    let ClientPacket { key, flow, tcp, now_ns, .. } = incoming;
    if tcp.is_syn() && flow.is_dsr() {
        dsr::note_syn(tables, incoming);
    } else if tcp.is_syn() && flow.state & flow_state::REPLIED != 0 {
        direct::forget_reply(tables, key, flow);
        flow::note_syn(tables, key, flow, *now_ns);
    } else if !tcp.has_rst() || is_acceptable_reset(frame, tables, packet, incoming) {
        if tcp.has_rst() {
            direct::forget_reply(tables, key, flow);
        }
        let observed = observed_state(Direction::Original, *tcp) | dsr::observed_state(flow.state, *tcp);
        if assures(frame, packet, incoming) {
            flow::assure(tables, key, flow, observed, *now_ns);
        } else if !flow.is_of_conntrack() {
            flow::touch(tables, key, flow, observed, *now_ns);
        }
    }
}

/// Returns true if a reset of the client changes the state of its connection. One that anybody may
/// have sent passes, and the endpoint ignores it or answers it.
#[inline(never)]
fn is_acceptable_reset<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &ClientPacket,
) -> bool {
    let ClientPacket { key, flow, .. } = incoming;
    if flow.state & flow_state::REPLIED == 0 {
        return true;
    }
    let Some(sequence) = packet.tcp_sequence(frame) else { return false };
    tables.flow(&flow.opposite_key(key)).is_some_and(|reply| reply.is_next(sequence))
        || direct::expects(tables, key, flow, sequence)
}

/// Returns true if a packet shows that its sender got the answer of the endpoint. A sender with a
/// forged address does not know the sequence number of the endpoint. A packet of a flow that the
/// node began is the answer.
#[inline(always)]
fn assures(frame: &impl Frame, packet: &Packet, incoming: &ClientPacket) -> bool {
    // An endpoint that resets an adopted connection has not answered its client.
    const ANSWERED: u32 =
        flow_state::REPLIED | flow_state::ASSURED | flow_state::PASS | flow_state::RESET | flow_state::DSR;
    let ClientPacket { flow, protocol, tcp, .. } = incoming;
    if flow.is_of_node() {
        return !flow.is_assured();
    }
    if flow.state & ANSWERED != flow_state::REPLIED || tcp.has_rst() {
        return false;
    }
    if !protocol.is_connection_oriented() {
        return true;
    }
    tcp.has_ack() && packet.tcp_acknowledgement(frame).is_some_and(|acknowledged| flow.is_next(acknowledged))
}

#[inline(always)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &ClientPacket,
) -> Outcome {
    let ClientPacket { key, flow, protocol, .. } = incoming;
    let mark = if flow.state & flow_state::MASQUERADE == 0 {
        0
    } else {
        mark(frame, tables, flow, matches!(packet.fragment, Fragment::Whole))
    };
    if packet.fragment == Fragment::First {
        fragment::record_first::<F, _>(tables, packet, Direction::Original, flow, mark);
    }
    let event = ServiceEvent::ToEndpoint(ip_length(frame, packet.header()));
    let rewritten = rewrite::transport(frame, packet, *protocol, key, flow);
    forward(finish_flow_packet(frame, tables, (key, flow), event, rewritten), flow)
}

/// Marks a packet to be masqueraded, and returns the bits of the mark that it needs. `is_whole`
/// says that it is no fragment.
#[inline(always)]
pub(super) fn mark(frame: &impl Frame, tables: &impl Tables, flow: &Flow, is_whole: bool) -> u32 {
    set_mark(frame, tables, |node| {
        if masquerade::ask(frame, tables, node, flow, is_whole) { 0 } else { node.masquerade_mark }
    })
}

/// Sets bits of the mark, and returns them.
#[inline(always)]
fn set_mark(frame: &impl Frame, tables: &impl Tables, bits: impl FnOnce(&NodeValue) -> u32) -> u32 {
    let bits = tables.node().map_or(0, |node| bits(&node));
    frame.set_mark(frame.mark() | bits);
    bits
}
