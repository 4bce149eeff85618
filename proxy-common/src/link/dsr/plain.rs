//! Plain segments of known connections, on nodes with whole flows: the programs write and remove
//! the headers of the tunnel themselves, and the segments leave at once. They save the stack and
//! the kernel's link for the tunnel. All other packets go through that link.

use super::{
    super::{Notes, Outcome, direct, ip_length},
    longest_to,
};
use crate::{
    Addr, AddrV4, Protocol,
    layout::{Counter, Direction, Endpoint, Flow, FlowKey, ServiceEvent, flow_state},
    packet::{
        ETHERNET_HEADER, Frame, InnerSegment, IpVersion, PlainEnds, PlainPacket, Route, RoutedPacket,
        TUNNEL_HEADERS_V4, TunnelStart,
    },
    rewrite,
    tables::Tables,
};

/// Sends a plain segment of a client through the tunnel. Returns `None` if it must go through the
/// kernel's link. Its bytes are unchanged then.
#[inline(never)]
pub(in super::super) fn send_segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    flow: &Flow,
) -> Option<Outcome> {
    let mut route = Route::NONE;
    let way = way_to(frame, tables, packet, &flow.source, &mut route)?;
    let bytes = ip_length(frame, ETHERNET_HEADER);
    frame.insert_tunnel_headers(TUNNEL_HEADERS_V4)?;
    if write_headers(frame, tables, packet, &flow.source.addr, &route.hardware).is_none() {
        return Some(direct::drop_plain(tables, flow));
    }
    tables.count(Counter::SentThroughTunnel);
    tables.count_service(flow.service, ServiceEvent::ToEndpoint(bytes));
    Notes::leave(frame, Notes::FORWARDED);
    way.redirect(frame, &route);
    Some(Outcome::Redirect)
}

/// Finds the way to a node for a segment in the tunnel. What the kernel put together from several
/// segments, or will cut, has none: kernels differ in how they cut it. A function call of its own
/// saves stack.
#[inline(never)]
fn way_to<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    to: &Endpoint,
    route: &mut Route,
) -> Option<direct::Way> {
    let node = tables.node()?;
    let length = u32::from(packet.length());
    let may_enter = node.tunnel_link != 0
        && frame.segment_size() == 0
        && to.addr.is_v4()
        && !node.tunnel_v4.is_unspecified()
        && length <= longest_to(tables, &to.addr);
    if !may_enter || has_routes_by_port(tables) {
        return None;
    }
    let source = Endpoint::new(node.tunnel_v4, 0);
    let routed = RoutedPacket {
        version: IpVersion::V4,
        proto: Protocol::Udp.number(),
        traffic_class: 0,
        length: (length + TUNNEL_HEADERS_V4).try_into().ok()?,
        source: &source,
        destination: to,
    };
    direct::way_by(frame, tables, &routed, route)
}

/// Returns true if routes may depend on ports. The way to a node is asked for without them.
#[inline(always)]
fn has_routes_by_port(tables: &impl Tables) -> bool {
    tables.direct_watch().is_none_or(|watch| watch.port_mask(tables.now_ns()) != 0)
}

/// Writes the headers of the tunnel, with these Ethernet addresses. A function call of its own
/// saves stack.
#[inline(never)]
fn write_headers<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    to: &Addr,
    hardware: &[u8; 12],
) -> Option<()> {
    let ends = [AddrV4::last_of(&tables.node()?.tunnel_v4), AddrV4::last_of(to)];
    let id = tables.random().to_le_bytes();
    let start = TunnelStart::new(hardware, ends, tables.tunnel_port(), ([id[0], id[1]], packet));
    frame.store(0, start.bytes()?)
}

/// Takes a plain segment of a known connection out of the tunnel, translates it, and sends it to
/// its endpoint. For all other packets, returns `None` and does not change their bytes. The
/// kernel takes them out of the tunnel, and [`super::tunneled`] handles them.
#[inline(never)]
pub(in super::super) fn receive_segment<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &PlainPacket,
) -> Option<Outcome> {
    let InnerSegment { packet, segment } = read_inner(frame, tables, outer)?;
    if !segment.flags.is_after_first() {
        return None;
    }
    let key = packet.flow_key(Direction::Original);
    // If there is no route, `super::tunneled` does the same once more, which changes nothing.
    let mut flow = Flow::NONE;
    if !direct::observe(tables, &key, &segment, tables.now_ns(), is_delivered, &mut flow) {
        return None;
    }
    deliver(frame, tables, &packet, &key, &flow)
}

/// Reads a segment within a packet of the tunnel that a known node sent to this one.
#[inline(always)]
fn read_inner(frame: &impl Frame, tables: &impl Tables, outer: &PlainPacket) -> Option<InnerSegment> {
    let [_, port] = outer.ports();
    let is_for_tunnel = !outer.is_tcp()
        && port == tables.tunnel_port()
        && frame.segment_size() == 0
        && frame.mark() == 0
        && !frame.has_vlan_tag()
        && tables.node().is_some_and(|node| node.tunnel_link != 0 && node.tunnel_v4 == outer.destination())
        && tables.is_dsr_node(&outer.source());
    if is_for_tunnel { InnerSegment::read(frame, outer) } else { None }
}

/// Returns true for the state of a flow whose segments go to an endpoint of this node at once.
#[inline(always)]
const fn is_delivered(state: u32) -> bool {
    const NOT: u32 = flow_state::DSR | flow_state::RETURN | flow_state::TWICE_NAT | flow_state::MASQUERADE;
    state & (flow_state::WHOLE | NOT) == flow_state::WHOLE
}

/// Removes the headers of the tunnel, translates the segment, and makes it leave. A function call
/// of its own saves stack.
#[inline(never)]
fn deliver<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    key: &FlowKey,
    flow: &Flow,
) -> Option<Outcome> {
    let mut route = Route::NONE;
    let way = way_of_inner(frame, tables, packet, [&key.source, &flow.destination], &mut route)?;
    frame.remove_tunnel_headers(TUNNEL_HEADERS_V4)?;
    if translate(frame, packet, flow, &route.hardware).is_none() {
        return Some(direct::drop_plain(tables, flow));
    }
    tables.count_service(flow.service, ServiceEvent::ToEndpoint(ip_length(frame, ETHERNET_HEADER)));
    way.redirect_translated(frame, &route);
    Some(Outcome::Redirect)
}

/// Finds the way of a segment to its endpoint. A function call of its own saves stack.
#[inline(never)]
fn way_of_inner<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &PlainPacket,
    [source, destination]: [&Endpoint; 2],
    route: &mut Route,
) -> Option<direct::Way> {
    if packet.hops() <= 1 {
        return None;
    }
    let routed = RoutedPacket {
        version: IpVersion::V4,
        proto: Protocol::Tcp.number(),
        traffic_class: packet.traffic_class(),
        length: packet.length(),
        source,
        destination,
    };
    direct::way_by(frame, tables, &routed, route)
}

/// A function call of its own saves stack.
#[inline(never)]
fn translate<F: Frame>(frame: &F, packet: &PlainPacket, flow: &Flow, hardware: &[u8; 12]) -> Option<()> {
    let ends = PlainEnds::of(flow);
    rewrite::plain(frame, packet, hardware, &ends, packet.differences(&ends))
}
