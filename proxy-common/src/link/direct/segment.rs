//! Plain segments of known connections of whole flows, if the programs know their route. Most
//! segments of a short connection are like that. They need no general code.

use super::{
    super::{Outcome, dsr, ip_length, not_rewritten},
    leave_on, sample,
};
use crate::{
    Protocol, flow,
    layout::{Direction, Endpoint, Flow, FlowKey, NodeValue, ServiceEvent, flow_state},
    lifetime,
    packet::{
        ETHERNET_HEADER, Frame, IpVersion, PlainEnds, PlainPacket, Route, RoutedPacket, Segment, TcpFlags,
    },
    rewrite,
    tables::Tables,
};

/// Translates a plain segment of a known connection, and sends it on: one with twice NAT or
/// without masquerading, or one that goes through the tunnel. For all other packets, returns
/// `None` and does not change their bytes. They go on to the general code. `from_endpoint` says
/// that the packet may be from an endpoint.
#[inline(never)]
pub(in super::super) fn forward_segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    from_endpoint: bool,
) -> Option<Outcome> {
    let node = tables.node()?;
    if !packet.is_tcp() {
        return None;
    }
    let segment = packet.segment(frame)?;
    let tcp = segment.flags;
    if !tcp.is_after_first() || packet.hops() <= 1 || frame.mark() != 0 || frame.has_vlan_tag() {
        return None;
    }
    let key = packet.flow_key(direction_of(tables, &node, packet, from_endpoint));
    let has_way = |state| has_way(tables, key.direction, state);
    // If there is no route, the general code does the same once more, which changes nothing.
    let now_ns = tables.now_ns();
    let mut flow = Flow::NONE;
    if !observe(tables, &key, &segment, now_ns, has_way, &mut flow) {
        return None;
    }
    if flow.is_dsr() {
        return dsr::send_segment(frame, tables, packet, &flow);
    }
    // `note_packet` does the same and needs more stack.
    if is_reply(&key) && tcp.is_syn_ack() && !flow.is_assured() {
        note_sequence(frame, tables, &key, &flow);
    }
    sample(frame, tables, &flow, tcp, now_ns);
    send(frame, tables, packet, (&key, &flow), now_ns)
}

/// Finds the flow of a segment with this key, and updates it. `flow` becomes what it was before.
///
/// Returns false if there is none, if `is_handled` is false for its state, or if a segment would
/// change more than this: something else translates the flow, the flow is held, the segment
/// removes bits of its state, or it answers a new connection with the same addresses and ports.
#[inline(always)]
pub(in super::super) fn observe(
    tables: &impl Tables,
    key: &FlowKey,
    segment: &Segment,
    now_ns: u64,
    is_handled: impl Fn(u32) -> bool,
    flow: &mut Flow,
) -> bool {
    const NOT: u32 = flow_state::PASS | flow_state::HELD | flow_state::LEFT | flow_state::UNTIL_NEXT;
    let Segment { flags: tcp, acknowledged, .. } = *segment;
    let begins_another = |state| lifetime::is_closed(state) && tcp.is_syn_ack();
    let is_simple = |state| state & NOT == 0 && is_handled(state) && !begins_another(state);
    // The entry of the client's direction has the sequence number of the endpoint's SYN-ACK.
    let answer = if is_reply(key) { tcp } else { TcpFlags(0) };
    let direction = if is_reply(key) { Direction::Reply } else { Direction::Original };
    let observed_by = |state| flow::observed_state(direction, tcp) | dsr::observed_state(state, tcp);
    let observe = |flow: &Flow| is_simple(flow.state).then(|| observed_by(flow.state));
    if !tables.observed_flow(key, (answer, acknowledged), now_ns, observe, flow) {
        return false;
    }
    let observed = observed_by(flow.state);
    if !is_reply(key) && is_only_answered(flow.state) && flow.is_next(acknowledged) {
        flow::assure(tables, key, flow, observed, now_ns);
    } else {
        flow::touch_observed(tables, key, flow, observed, now_ns);
    }
    true
}

/// Notes what a packet shows besides the state of its flow. `flow` is what it was before.
#[inline(always)]
pub(in super::super) fn note_packet<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    (key, flow): (&FlowKey, &Flow),
    tcp: TcpFlags,
    now_ns: u64,
) {
    if is_reply(key) && tcp.is_syn_ack() && !flow.is_assured() {
        note_sequence(frame, tables, key, flow);
    }
    // The packet was sampled where it came in.
    if key.direction != Direction::Masquerade as u8 {
        sample(frame, tables, flow, tcp, now_ns);
    }
}

/// Returns true for the key of what an endpoint sends.
#[inline(always)]
const fn is_reply(key: &FlowKey) -> bool {
    key.direction & Direction::Reply as u8 != 0
}

/// Returns the direction of the flow that a packet may belong to. A VIP may have a port of those
/// for masquerading. On nodes without the tunnel, few flows are not masqueraded, and the general
/// code sends on what their endpoints send.
#[inline(always)]
fn direction_of(
    tables: &impl Tables,
    node: &NodeValue,
    packet: &PlainPacket,
    from_endpoint: bool,
) -> Direction {
    let [_, to] = packet.ports();
    if from_endpoint && node.is_masquerade_port(to) {
        Direction::MasqueradeReply
    } else if from_endpoint && tables.has_tunnel() {
        Direction::Reply
    } else {
        Direction::Original
    }
}

/// Returns true if [`forward_segment`] sends on packets of this direction of a flow with this
/// state.
#[inline(always)]
fn has_way(tables: &impl Tables, direction: u8, state: u32) -> bool {
    const ORIGINAL: u8 = Direction::Original as u8;
    const REPLY: u8 = Direction::Reply as u8;
    const WAY: u32 = flow_state::WHOLE | flow_state::TWICE_NAT | flow_state::DSR | flow_state::RETURN;
    match state & WAY {
        way if way == flow_state::WHOLE | flow_state::TWICE_NAT => direction != REPLY,
        // Nothing comes in for the reply entry of a masqueraded flow.
        flow_state::WHOLE => {
            direction == REPLY || direction == ORIGINAL && state & flow_state::MASQUERADE == 0
        }
        flow_state::DSR => tables.has_tunnel() && direction == ORIGINAL,
        _ => false,
    }
}

/// Returns true if the endpoint has answered, and the client has not shown that it got the
/// answer.
#[inline(always)]
const fn is_only_answered(state: u32) -> bool {
    const STATE: u32 = flow_state::REPLIED | flow_state::ASSURED | flow_state::DSR;
    state & STATE == flow_state::REPLIED
}

/// Notes the sequence number that the client must acknowledge. A function call of its own,
/// because few packets need it.
#[inline(never)]
fn note_sequence<F: Frame, T: Tables>(frame: &F, tables: &T, key: &FlowKey, flow: &Flow) {
    if let Some(sequence) = PlainPacket::tcp_sequence(frame) {
        tables.set_acknowledged(&flow.opposite_key(key), sequence);
    }
}

/// Translates a packet, and makes it leave by the route of an earlier one. Returns `None` if
/// there is none. A function call of its own saves stack.
#[inline(never)]
fn send<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    (key, flow): (&FlowKey, &Flow),
    now_ns: u64,
) -> Option<Outcome> {
    let mut route = Route::NONE;
    let ends = [&key.source, &flow.destination];
    if !finds_route(frame, tables, packet, (ends, now_ns), &mut route) {
        return None;
    }
    let ends = PlainEnds::of(flow);
    if rewrite::plain(frame, packet, &route.hardware, &ends, packet.differences(&ends)).is_none() {
        return Some(drop_plain(tables, flow));
    }
    let bytes = ip_length(frame, ETHERNET_HEADER);
    let is_to_endpoint = key.direction == Direction::Original as u8;
    tables.count_service(flow.service, ServiceEvent::of_packet(is_to_endpoint, bytes));
    leave_on(frame, route.link, route.to_peer);
    Some(Outcome::Redirect)
}

/// Drops a plain packet whose headers could not be written. There is no stack for a trace.
#[inline(always)]
pub(in super::super) fn drop_plain(tables: &impl Tables, flow: &Flow) -> Outcome {
    tables.count_service(flow.service, ServiceEvent::Drop);
    not_rewritten(tables)
}

/// Finds the route of an earlier packet with this source and destination, unless this one is too
/// long for it. A function call of its own saves stack.
#[inline(never)]
fn finds_route<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    ([source, destination], now_ns): ([&Endpoint; 2], u64),
    route: &mut Route,
) -> bool {
    let routed = RoutedPacket {
        version: IpVersion::V4,
        proto: Protocol::Tcp.number(),
        traffic_class: packet.traffic_class(),
        // 0 is a packet that is too long for any route.
        length: packet.longest_segment(frame).try_into().unwrap_or(0),
        // The kernel routes packets before it masquerades them.
        source,
        destination,
    };
    routed.length != 0 && tables.known_route(&routed, frame.link(), now_ns, route)
}
