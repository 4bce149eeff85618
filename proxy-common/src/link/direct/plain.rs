//! Plain packets of learned flows. Most packets on the direct path are plain, so one load reads
//! what they are, and one store writes what they become.

use super::{super::Outcome, Arrival, is_like, leave, note_difference};
use crate::{
    Protocol,
    checksum::Difference,
    layout::{DirectFlowV4, DirectKeyV4, DirectPath, NodeValue},
    packet::{ETHERNET_HEADER, Frame, PlainEnds, PlainPacket, Segment},
    rewrite,
    tables::Tables,
};

/// Handles a plain packet that comes in for a VIP or from an endpoint. Returns `None` if its flow
/// is not on the direct path.
#[inline(always)]
pub(in super::super) fn forward_plain<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    node: &NodeValue,
    packet: &PlainPacket,
) -> Option<Outcome> {
    let segment = packet.segment(frame)?;
    let key = packet.direct_key();
    if !may_count(tables, node, &key) {
        return None;
    }
    let flow = tables.direct_flow_v4(&key, segment.flags, segment.acknowledged)?;
    if packet.is_tcp() && !segment.flags.is_of_open_connection() {
        forget(tables, &key);
        return None;
    }
    if !may_follow_plain(frame, tables, node, packet, &segment, &flow.path) {
        note_difference(frame, tables, flow.path.in_link);
        return None;
    }
    let rewritten = rewrite_plain(frame, packet, &flow);
    Some(leave(frame, tables, ETHERNET_HEADER, &flow.path, rewritten))
}

/// Returns true if an entry with this key would count. Segments of whole flows leave at once
/// without an entry, too. So with whole flows, the entry of a connection counts only as long as
/// it has its hint, and most segments are not looked up. A SYN without a hint removes no entry:
/// who uses an entry must ask here.
#[inline(always)]
pub(super) fn may_count(tables: &impl Tables, node: &NodeValue, key: &DirectKeyV4) -> bool {
    let needs_hint = node.is_for_whole_flows() && key.proto == Protocol::Tcp.number();
    !needs_hint || tables.has_direct_hint(key)
}

/// Returns true if the stack would do with a packet what it did with the previous one of the flow.
#[inline(always)]
pub(super) fn may_follow_plain(
    frame: &impl Frame,
    tables: &impl Tables,
    node: &NodeValue,
    packet: &PlainPacket,
    segment: &Segment,
    path: &DirectPath,
) -> bool {
    let arrival = Arrival { traffic_class: packet.traffic_class(), hops: packet.hops() };
    is_like(frame, tables, node, path, &arrival)
        && !frame.has_vlan_tag()
        && packet.longest(frame, segment) <= path.longest.into()
}

/// Rewrites a packet of a learned flow. Returns `None` as [`rewrite::plain`].
#[inline(always)]
pub(super) fn rewrite_plain(frame: &impl Frame, packet: &PlainPacket, flow: &DirectFlowV4) -> Option<()> {
    let DirectFlowV4 { source, destination, path } = flow;
    let ends =
        PlainEnds { addresses: [*source, *destination], ports: [path.source_port, path.destination_port] };
    let differences = [path.addresses, path.ports].map(Difference::from_folded);
    rewrite::plain(frame, packet, &path.hardware, &ends, differences)
}

/// Removes the entry of a connection that begins or ends. A function call of its own, because few
/// packets need it.
#[inline(never)]
fn forget<T: Tables>(tables: &T, key: &DirectKeyV4) {
    tables.remove_direct_flow(&(*key).into());
}
