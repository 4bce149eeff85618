//! Plain packets. Most of them are of no Service, or of a flow on the direct path. A few fields of
//! a packet are enough to find out.

use super::{Outcome, direct, known};
use crate::{
    layout::Direction,
    packet::{Frame, PlainPacket},
    prefilter::PrefilterItem,
    service,
    tables::Tables,
};

/// What is known of a packet that comes in, once it was looked at as a plain one.
pub(super) enum Finding {
    /// It is decided what happens to it.
    Decided(Outcome),
    /// It goes on. It is plain, and may be from an endpoint.
    FromEndpoint,
    /// It goes on. It is not plain, or not from an endpoint, or for the tunnel.
    Other,
}

/// Handles a plain packet that comes in: one of no Service passes, and one of a flow on the direct
/// path leaves. All others go on, and `plain` becomes the packet, if it is plain.
#[inline(never)]
pub(super) fn ingress<F: Frame, T: Tables>(frame: &F, tables: &T, plain: &mut PlainPacket) -> Finding {
    let Some(packet) = PlainPacket::read(frame) else { return Finding::Other };
    if may_be_of_tunnel(tables, &packet) {
        *plain = packet;
        return Finding::Other;
    }
    let [endpoint, service, node_port] = tables.prefilter_missing_bits(items(&packet));
    let from_endpoint = endpoint == 0;
    if !from_endpoint && service != 0 && node_port != 0 {
        return Finding::Decided(Outcome::Proceed);
    }
    *plain = packet;
    let Some(node) = tables.node() else { return Finding::Other };
    if node.is_direct()
        && let Some(outcome) = direct::forward_plain(frame, tables, &node, &packet)
    {
        return Finding::Decided(outcome);
    }
    let is_for_vip = service == 0 || node_port == 0;
    let [_, to] = packet.ports();
    if !is_for_vip && !node.is_whole() && !node.is_masquerade_port(to) {
        // It is translated where it leaves.
        return Finding::Decided(Outcome::Proceed);
    }
    if from_endpoint { Finding::FromEndpoint } else { Finding::Other }
}

/// Returns true for a packet to the port of the tunnel. It may be for this node, or for another
/// one and dropped ([`dsr::is_injected`](super::dsr)).
#[inline(always)]
pub(super) fn may_be_of_tunnel(tables: &impl Tables, packet: &PlainPacket) -> bool {
    let [_, to] = packet.ports();
    tables.has_tunnel() && !packet.is_tcp() && to == tables.tunnel_port()
}

/// Returns true if a packet that comes in may be for a VIP or from an endpoint.
#[inline(always)]
pub(super) fn may_be_of_service(tables: &impl Tables, packet: &PlainPacket) -> bool {
    tables.prefilter_may_contain_any(items(packet))
}

/// Returns what the prefilter has of a packet that comes in for a VIP or from an endpoint: the
/// endpoint, and the VIP as an address and as a node port.
#[inline(always)]
fn items(packet: &PlainPacket) -> [PrefilterItem; 3] {
    let [from, to] = packet.ports();
    let [service, node_port] = service::items_of_vip(&packet.destination(), to);
    [PrefilterItem::of_endpoint(&packet.source(), from), service, node_port]
}

/// Handles a plain packet that leaves: one of no Service passes, and a segment of a known
/// connection is translated. Returns `None` for all others. They go on. If such a packet is a
/// plain datagram, `datagram` becomes the packet: there is no stack here to translate it.
/// `is_masqueraded` says that the programs masquerade the packet if they know its flow.
#[inline(never)]
pub(super) fn egress<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    datagram: &mut PlainPacket,
    is_masqueraded: bool,
) -> Option<Outcome> {
    let packet = PlainPacket::read(frame)?;
    if !is_masqueraded && leaves_without_service(tables, &packet) {
        return Some(Outcome::Proceed);
    }
    if packet.is_udp() {
        *datagram = packet;
        return None;
    }
    if is_masqueraded {
        known::segment(frame, tables, &packet, Direction::Masquerade)
    } else {
        known::segment(frame, tables, &packet, Direction::Reply)
    }
}

/// Returns true if a packet that leaves is of no Service. Then `reply::may_match` would return
/// false.
#[inline(always)]
fn leaves_without_service(tables: &impl Tables, packet: &PlainPacket) -> bool {
    let (source, [port, _]) = (packet.source(), packet.ports());
    let endpoint = PrefilterItem::of_endpoint(&source, port);
    if packet.is_tcp() {
        return !tables.prefilter_may_contain(endpoint);
    }
    let [service, node_port] = service::items_of_vip(&source, port);
    !tables.prefilter_may_contain_any([endpoint, service, node_port])
}
