//! Plain segments of known connections that go on through the stack, or come from there. They
//! need no general code.

use super::{Outcome, direct, ip_length, original::mark};
use crate::{
    layout::{Direction, Flow, FlowKey, ServiceEvent, flow_state},
    packet::{ETHERNET_HEADER, Frame, PlainEnds, PlainPacket},
    rewrite,
    tables::Tables,
};

/// Translates a plain segment of a known connection that comes in. For all other packets, returns
/// `None` and does not change their bytes. They go on to the general code. `from_endpoint` says
/// that the packet may be from an endpoint.
#[inline(never)]
pub(super) fn ingress<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    from_endpoint: bool,
) -> Option<Outcome> {
    let [_, to] = packet.ports();
    let is_reply = from_endpoint && tables.node()?.is_masquerade_port(to);
    let direction = if is_reply { Direction::MasqueradeReply } else { Direction::Original };
    translate(frame, tables, packet, direction)
}

/// Translates a plain segment of a known connection, at the hook where packets of this direction
/// are translated.
#[inline(always)]
pub(super) fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    direction: Direction,
) -> Option<Outcome> {
    const NOT: u32 = flow_state::TWICE_NAT | flow_state::DSR | flow_state::RETURN;
    if !packet.is_tcp() {
        return None;
    }
    let segment = packet.segment(frame)?;
    let tcp = segment.flags;
    if !tcp.is_after_first() {
        return None;
    }
    let key = packet.flow_key(direction);
    let is_translated = |state| state & NOT == 0;
    let now_ns = tables.now_ns();
    let mut flow = Flow::NONE;
    if !direct::observe(tables, &key, &segment, now_ns, is_translated, &mut flow) {
        return None;
    }
    direct::note_segment(frame, tables, (&key, &flow), tcp, now_ns);
    if matches!(direction, Direction::Original) && flow.state & flow_state::MASQUERADE != 0 {
        mark(frame, tables, &flow, true);
    }
    Some(rewrite(frame, tables, packet, &key, &flow))
}

/// Writes addresses and ports of a packet, and counts it. A function call of its own saves stack.
#[inline(never)]
fn rewrite<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    key: &FlowKey,
    flow: &Flow,
) -> Outcome {
    if rewrite::segment(frame, packet, &PlainEnds::of(flow)).is_none() {
        return direct::drop_segment(tables, flow);
    }
    // A packet that is masqueraded is counted at the hook where its other address is translated.
    if key.direction <= Direction::Reply as u8 {
        let is_to_endpoint = key.direction == Direction::Original as u8;
        let event = ServiceEvent::of_packet(is_to_endpoint, ip_length(frame, ETHERNET_HEADER));
        tables.count_service(flow.service, event);
    }
    Outcome::Proceed
}
