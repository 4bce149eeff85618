//! Plain segments of known connections with twice NAT, if the programs know their route. Most
//! segments of a short connection are like that. They need no general code.

use super::super::{
    super::{Outcome, ip_length, not_rewritten},
    leave_on, sample,
};
use crate::{
    Protocol, flow,
    layout::{Direction, Endpoint, Flow, FlowKey, NodeValue, ServiceEvent, flow_state},
    packet::{ETHERNET_HEADER, Frame, IpVersion, PlainEnds, PlainPacket, Route, RoutedPacket, TcpFlags},
    rewrite,
    tables::Tables,
};

/// Translates a plain segment of a known connection with twice NAT, and sends it on. For all other
/// packets, returns `None` and does not change their bytes. They go on to the general code.
#[inline(never)]
pub(in super::super::super) fn forward_segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
) -> Option<Outcome> {
    let node = tables.node()?;
    let packet = PlainPacket::read(frame)?;
    if !packet.is_tcp() {
        return None;
    }
    let segment = packet.segment(frame)?;
    let tcp = segment.flags;
    if !tcp.is_after_first() {
        return None;
    }
    let key = packet.flow_key(direction_of(&node, &packet));
    let is_reply = key.direction != Direction::Original as u8;
    // The entry of the client's direction has the sequence number of the endpoint's SYN-ACK.
    let answer = if is_reply { tcp } else { TcpFlags(0) };
    let flow = tables.answered_flow(&key, answer, segment.acknowledged)?;
    if !has_simple_state(&flow) || flow.is_closed() && tcp.is_syn_ack() {
        return None;
    }
    // If there is no route, the general code does the same once more, which changes nothing.
    let (observed, now_ns) = (observed_by(is_reply, tcp), tables.now_ns());
    if !is_reply && is_only_answered(&flow) && flow.is_next(segment.acknowledged) {
        flow::assure(tables, &key, &flow, observed, now_ns);
    } else {
        flow::touch(tables, &key, &flow, observed, now_ns);
    }
    if is_reply && tcp.is_syn_ack() && !flow.is_assured() {
        note_sequence(frame, tables, &key, &flow);
    }
    sample(frame, tables, &flow, tcp, now_ns);
    send(frame, tables, &packet, &key, &flow)
}

/// Returns the direction of the flow that a packet may belong to.
#[inline(always)]
const fn direction_of(node: &NodeValue, packet: &PlainPacket) -> Direction {
    let [_, port] = packet.ports();
    if node.is_masquerade_port(port) { Direction::MasqueradeReply } else { Direction::Original }
}

/// Returns true for a flow with twice NAT if [`flow::touch`] and [`flow::assure`] do all that a
/// segment changes. This is false if something else translates the flow, if it is held, or if the
/// next segment removes bits of its state.
#[inline(always)]
const fn has_simple_state(flow: &Flow) -> bool {
    const WANTED: u32 = flow_state::WHOLE | flow_state::TWICE_NAT;
    const NOT: u32 =
        flow_state::PASS | flow_state::HELD | flow_state::LEFT | flow_state::DSR | flow_state::UNTIL_NEXT;
    flow.state & (WANTED | NOT) == WANTED
}

/// Returns the state bits that a segment sets.
#[inline(always)]
const fn observed_by(is_reply: bool, tcp: TcpFlags) -> u32 {
    flow::observed_state(if is_reply { Direction::Reply } else { Direction::Original }, tcp)
}

/// Returns true if the endpoint has answered, and the client has not shown that it got the answer.
#[inline(always)]
const fn is_only_answered(flow: &Flow) -> bool {
    flow.state & (flow_state::REPLIED | flow_state::ASSURED) == flow_state::REPLIED
}

/// Notes the sequence number that the client must acknowledge. A function call of its own, because
/// few packets need it.
#[inline(never)]
fn note_sequence<F: Frame, T: Tables>(frame: &F, tables: &T, key: &FlowKey, flow: &Flow) {
    if let Some(sequence) = PlainPacket::tcp_sequence(frame) {
        tables.set_acknowledged(&flow.opposite_key(key), sequence);
    }
}

/// Translates a packet, and makes it leave by the route of an earlier one. Returns `None` if there
/// is none. A function call of its own saves stack.
#[inline(never)]
fn send<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    key: &FlowKey,
    flow: &Flow,
) -> Option<Outcome> {
    let mut route = Route::NONE;
    if !finds_route(frame, tables, packet, [&key.source, &flow.destination], &mut route) {
        return None;
    }
    let ends = PlainEnds::of(flow);
    if rewrite::plain(frame, packet, &route.hardware, &ends, packet.differences(&ends)).is_none() {
        // Without a trace, for which there is no stack.
        tables.count_service(flow.service, ServiceEvent::Drop);
        return Some(not_rewritten(tables));
    }
    let bytes = ip_length(frame, ETHERNET_HEADER);
    let is_to_endpoint = key.direction == Direction::Original as u8;
    tables.count_service(flow.service, ServiceEvent::of_packet(is_to_endpoint, bytes));
    leave_on(frame, route.link, route.to_peer);
    Some(Outcome::Redirect)
}

/// Finds the route of an earlier packet with this source and destination, if a packet may leave by
/// it. A function call of its own saves stack.
#[inline(never)]
fn finds_route<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    [source, destination]: [&Endpoint; 2],
    route: &mut Route,
) -> bool {
    let Some(segment) = packet.segment(frame) else { return false };
    let routed = RoutedPacket {
        version: IpVersion::V4,
        proto: Protocol::Tcp.number(),
        traffic_class: packet.traffic_class(),
        // 0 is a packet that is too long for any route.
        length: packet.longest(frame, &segment).try_into().unwrap_or(0),
        // The kernel routes packets before it masquerades them.
        source,
        destination,
    };
    let may_leave = routed.length != 0 && packet.hops() > 1 && frame.mark() == 0 && !frame.has_vlan_tag();
    may_leave && tables.known_route(&routed, frame.link(), route)
}
