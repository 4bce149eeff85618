//! Plain packets of known flows that go on through the stack, or come from there. They need no
//! general code.

use super::{Outcome, direct, ip_length, original::mark, plain::may_be_of_tunnel};
use crate::{
    Protocol,
    flow::{self, observed_state},
    layout::{Direction, Flow, FlowKey, ServiceEvent, flow_state},
    packet::{ETHERNET_HEADER, Frame, PlainEnds, PlainPacket, TcpFlags},
    rewrite, service,
    tables::Tables,
};

/// Other code translates flows with one of these bits.
const OTHERS: u32 = flow_state::TWICE_NAT | flow_state::DSR | flow_state::RETURN;

/// Translates a plain packet of a known flow that comes in. For all other packets, returns `None`
/// and does not change their bytes. They go on to the general code. `from_endpoint` says that the
/// packet may be from an endpoint.
#[inline(always)]
pub(super) fn ingress(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &PlainPacket,
    from_endpoint: bool,
) -> Option<Outcome> {
    let [_, to] = packet.ports();
    let is_reply = from_endpoint && tables.node()?.is_masquerade_port(to);
    let direction = if is_reply { Direction::MasqueradeReply } else { Direction::Original };
    if packet.is_tcp() {
        incoming_segment(frame, tables, packet, direction)
    } else if packet.is_udp() && !may_be_of_tunnel(tables, packet) {
        datagram(frame, tables, packet, direction)
    } else {
        None
    }
}

/// The same as [`segment`]. A function call of its own saves stack where packets come in.
#[inline(never)]
fn incoming_segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    direction: Direction,
) -> Option<Outcome> {
    segment(frame, tables, packet, direction)
}

/// Translates a plain segment of a known connection, unless it begins one or may do so, at the
/// hook where packets of this direction are translated.
#[inline(always)]
pub(super) fn segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    direction: Direction,
) -> Option<Outcome> {
    let segment = packet.segment(frame)?;
    let tcp = segment.flags;
    if !tcp.is_after_first() {
        return None;
    }
    let key = packet.flow_key(direction);
    let is_translated = |state| state & OTHERS == 0;
    let now_ns = tables.now_ns();
    let mut flow = Flow::NONE;
    if !direct::observe(tables, &key, &segment, now_ns, is_translated, &mut flow) {
        return None;
    }
    direct::note_packet(frame, tables, (&key, &flow), tcp, now_ns);
    Some(rewrite(frame, tables, packet, &key, &flow))
}

/// Translates a plain datagram of a flow that is assured, at the hook where packets of this
/// direction are translated. The client's datagrams need more: the flow must not be expired, and
/// its endpoint must serve.
#[inline(never)]
pub(super) fn datagram<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    direction: Direction,
) -> Option<Outcome> {
    const NO_TCP: TcpFlags = TcpFlags(0);
    const NOT: u32 = OTHERS | flow_state::PASS | flow_state::HELD | flow_state::LEFT;
    let key = packet.flow_key(direction);
    let now_ns = tables.now_ns();
    let is_reply = matches!(direction, Direction::Reply | Direction::MasqueradeReply);
    let observed = observed_state(direction, NO_TCP);
    let observe = |flow: &Flow| {
        let is_simple = flow.state & (NOT | flow_state::ASSURED) == flow_state::ASSURED
            && (is_reply || !flow.is_expired(Protocol::Udp, now_ns));
        is_simple.then_some(observed)
    };
    let mut flow = Flow::NONE;
    if !tables.observed_flow(&key, (NO_TCP, 0), now_ns, observe, &mut flow) {
        return None;
    }
    let is_original = matches!(direction, Direction::Original);
    if is_original && !service::is_serving(tables, flow.service, flow.destination) {
        return None;
    }
    flow::touch_observed(tables, &key, &flow, observed, now_ns);
    if is_reply {
        flow::keep_opposite(tables, &key, &flow);
    }
    direct::note_packet(frame, tables, (&key, &flow), NO_TCP, now_ns);
    Some(rewrite(frame, tables, packet, &key, &flow))
}

/// Marks a packet that is masqueraded, writes its addresses and ports, and counts it. A function
/// call of its own saves stack.
#[inline(never)]
fn rewrite<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    key: &FlowKey,
    flow: &Flow,
) -> Outcome {
    if key.direction == Direction::Original as u8 && flow.state & flow_state::MASQUERADE != 0 {
        mark(frame, tables, flow, true);
    }
    if rewrite::plain_in_place(frame, packet, &PlainEnds::of(flow)).is_none() {
        return direct::drop_plain(tables, flow);
    }
    // A packet that is masqueraded is counted at the hook where its other address is translated.
    if key.direction <= Direction::Reply as u8 {
        let is_to_endpoint = key.direction == Direction::Original as u8;
        let event = ServiceEvent::of_packet(is_to_endpoint, ip_length(frame, ETHERNET_HEADER));
        tables.count_service(flow.service, event);
    }
    Outcome::Proceed
}
