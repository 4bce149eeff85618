//! Plain packets. Most of them are of no Service, or of a flow on the direct path. A few fields of
//! a packet are enough to find out.

use super::{Outcome, direct};
use crate::{
    packet::{Frame, PlainPacket},
    prefilter::PrefilterItem,
    service,
    tables::Tables,
};

/// Handles a plain packet that comes in: one of no Service passes, and one of a flow on the direct
/// path leaves. Returns `None` for all others. They go on to the general code.
#[inline(never)]
pub(super) fn ingress<F: Frame, T: Tables>(frame: &F, tables: &T) -> Option<Outcome> {
    let packet = PlainPacket::read(frame)?;
    if may_be_of_tunnel(tables, &packet) {
        return None;
    }
    if !may_be_of_service(tables, &packet) {
        return Some(Outcome::Proceed);
    }
    let node = tables.node()?;
    if node.is_direct() { direct::forward_plain(frame, tables, &node, &packet) } else { None }
}

/// Returns true for a packet to the port of the tunnel. It may be for this node, or for another
/// one and dropped ([`dsr::is_injected`](super::dsr)).
#[inline(always)]
fn may_be_of_tunnel(tables: &impl Tables, packet: &PlainPacket) -> bool {
    let [_, to] = packet.ports();
    tables.has_tunnel() && !packet.is_tcp() && to == tables.tunnel_port()
}

/// Returns true if a packet that comes in may be for a VIP or from an endpoint.
#[inline(always)]
pub(super) fn may_be_of_service(tables: &impl Tables, packet: &PlainPacket) -> bool {
    let [from, to] = packet.ports();
    let [service, node_port] = service::items_of_vip(&packet.destination(), to);
    tables.prefilter_may_contain_any([service, node_port, PrefilterItem::of_endpoint(&packet.source(), from)])
}

/// Returns true if a packet that leaves is plain and of no Service. Then `reply::may_match` would
/// return false. Call it only for packets without a note and a mark.
#[inline(never)]
pub(super) fn leaves_without_service<F: Frame, T: Tables>(frame: &F, tables: &T) -> bool {
    let Some(packet) = PlainPacket::read(frame) else { return false };
    let (source, [port, _]) = (packet.source(), packet.ports());
    let endpoint = PrefilterItem::of_endpoint(&source, port);
    if packet.is_tcp() {
        return !tables.prefilter_may_contain(endpoint);
    }
    let [service, node_port] = service::items_of_vip(&source, port);
    !tables.prefilter_may_contain_any([endpoint, service, node_port])
}
