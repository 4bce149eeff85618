//! Direct server return: packets of clients outside go through a tunnel to the endpoint's node.
//! That node translates them, and answers the client itself. So the pod sees the client's address,
//! and replies save one node.
//!
//! The packet in the tunnel is that of the client, with the VIP as its destination. The other node
//! needs nothing else: it knows the Service, and chooses one of its own endpoints.

mod forward;
mod plain;
pub(super) mod reply;
mod segments;
pub(super) mod too_long;

pub(super) use self::plain::{receive_segment, send_segment};
use super::{
    ClientPacket, Notes, Outcome, count_drop, direct, finish, finish_flow_packet, fragment, ip_length,
    process_read,
};
use crate::{
    Addr, Protocol,
    layout::{
        Counter, Direction, DsrKey, Endpoint, Flow, FlowKey, ServiceEvent, ServiceValue, flags, flow_state,
    },
    packet::{Fragment, Frame, IpVersion, Packet, TUNNEL_HEADERS_V4, TcpFlags},
    tables::Tables,
};

/// The bytes that the tunnel adds to a packet between addresses of IPv6: IPv6 header, UDP header,
/// VXLAN-GPE header.
const HEADERS_V6: u32 = 40 + 8 + 8;

/// Handles a packet that came through the tunnel. It goes on only if it comes from a known node,
/// and is for a Service or sent back by its endpoint.
#[inline(always)]
pub fn tunneled<F: Frame, T: Tables>(frame: &F, tables: &T, header: u32, version: IpVersion) -> Outcome {
    if !is_from_node(frame, tables) {
        return count_drop(tables, Counter::TunnelRefused);
    }
    let mut packet = Packet::at(header, version);
    if packet.read(frame).is_none() {
        return count_drop(tables, Counter::TunnelRefused);
    }
    if forward::is_reply(frame, tables, &packet) {
        return forward::forward(frame, tables, &packet);
    }
    match process_read(frame, tables, &packet, Direction::Original, false) {
        Outcome::Proceed if !is_translated(frame, tables, &packet) => {
            count_drop(tables, Counter::TunnelRefused)
        }
        Outcome::Forward if direct::is_whole(tables) => forward::deliver(frame, tables, &mut packet),
        outcome => outcome.of_program(),
    }
}

/// Returns true if a known node sent a packet. A function call of its own saves stack.
#[inline(never)]
fn is_from_node<F: Frame, T: Tables>(frame: &F, tables: &T) -> bool {
    frame.tunnel_source().is_some_and(|node| tables.is_dsr_node(&node))
}

/// Returns true for a packet to the tunnel of another node that does not come from a node. If this
/// node masquerades its pods, such a packet leaves with the node's address. The other node would
/// accept it, with a client and a VIP that the pod chose. A function call of its own saves stack.
#[inline(never)]
pub(super) fn is_injected<T: Tables>(tables: &T, packet: &Packet) -> bool {
    packet.proto == Protocol::Udp.number()
        && packet.ports().is_some_and(|[_, destination]| destination == tables.tunnel_port())
        && enters_tunnel(tables, &packet.source, &packet.destination)
}

/// Returns true if a packet with these addresses goes to a node and does not come from one. A
/// function call of its own saves stack.
#[inline(never)]
fn enters_tunnel<T: Tables>(tables: &T, source: &Addr, destination: &Addr) -> bool {
    tables.is_dsr_node(destination) && !tables.is_dsr_node(source)
}

/// Returns true if a packet is translated, or if netfilter is to reject it.
#[inline(never)]
fn is_translated<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet) -> bool {
    let is_rejected = || tables.node().is_some_and(|node| frame.mark() & node.reject_mark != 0);
    !packet.destination.is_unspecified() && packet.has_other_destination(frame) || is_rejected()
}

/// Returns [`flow_state::DSR`] for a new flow that is to go through the tunnel. [`take`] decides.
#[inline(always)]
pub(super) fn state<F: Frame>(tables: &impl Tables, service: &ServiceValue, is_local: bool) -> u32 {
    let is_wanted = tables.has_tunnel() && !F::IS_TUNNELED && service.flags & flags::DSR != 0 && !is_local;
    if is_wanted { flow_state::DSR } else { 0 }
}

/// Makes a new flow go through the tunnel, if its endpoint is on another node that takes packets of
/// it. A process of such a node would get its own packets back, and drop them.
#[inline(never)]
pub(super) fn take<T: Tables>(tables: &T, flow: &mut Flow) {
    let is_of_node = tables.is_of_dsr_node(&flow.source.addr);
    match node_of(tables, flow) {
        Some(node) if !is_of_node => {
            flow.source = Endpoint::new(node, 0);
            flow.state &= !(flow_state::MASQUERADE | flow_state::WHOLE);
        }
        _ => flow.state &= !flow_state::DSR,
    }
}

/// Returns the node of a flow's endpoint, if packets for it go through the tunnel.
#[inline(always)]
fn node_of(tables: &impl Tables, flow: &Flow) -> Option<Addr> {
    let key = DsrKey { service: flow.service, addr: flow.destination.addr };
    let node = if has_link(tables) { tables.dsr_node(&key) } else { None };
    node.filter(|node| has_room(tables, node, key.addr.is_v4()))
}

/// Returns true if the tunnel to a node has room for packets of a family. Each IPv6 packet of 1,280
/// bytes must fit: a host ignores the error that asks for a shorter one (RFC 8201, section 4).
#[inline(always)]
fn has_room(tables: &impl Tables, node: &Addr, is_v4: bool) -> bool {
    const SHORTEST_V6: u32 = 1_280;
    is_v4 || longest_to(tables, node) >= SHORTEST_V6
}

#[inline(always)]
fn has_link(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.tunnel_link != 0)
}

/// Returns true if the flow of a packet still goes through the tunnel. A connection stays at its
/// node while there is a tunnel. A SYN and a datagram do so while the node takes packets for the
/// endpoint.
#[inline(never)]
pub(super) fn goes_on<F: Frame, T: Tables>(tables: &T, incoming: &ClientPacket) -> bool {
    let flow = &incoming.flow;
    if !tables.has_tunnel() || F::IS_TUNNELED {
        return false;
    }
    if incoming.is_midstream() {
        return has_link(tables);
    }
    node_of(tables, flow).is_some_and(|node| node == flow.source.addr)
}

/// Notes a SYN on a connection that goes through the tunnel. It may begin a new one, which is not
/// closed. The endpoint's node decides.
#[inline(never)]
pub(super) fn note_syn<T: Tables>(tables: &T, incoming: &ClientPacket) {
    let ClientPacket { key, flow, now_ns, .. } = incoming;
    if flow.state & flow_state::CLIENT_CLOSED != 0 {
        let state = flow.state & !flow_state::CLIENT_CLOSED;
        tables.put_flow(key, &Flow { state, used_ns: *now_ns, ..*flow });
    }
}

/// Returns the state bits that a packet of the client sets in a flow with this state.
#[inline(always)]
pub(super) const fn observed_state(state: u32, tcp: TcpFlags) -> u32 {
    if state & flow_state::DSR != 0 && tcp.has_ack() && !tcp.is_syn_ack() { flow_state::REPLIED } else { 0 }
}

/// Returns true if the packets of a flow go through the tunnel.
#[inline(always)]
pub(super) fn sends<F: Frame>(tables: &impl Tables, flow: &Flow) -> bool {
    tables.has_tunnel() && !F::IS_TUNNELED && flow.is_dsr()
}

/// Sends a packet of a client through the tunnel.
#[inline(never)]
pub(super) fn send_client_packet<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    incoming: &ClientPacket,
) -> Outcome {
    let ClientPacket { key, flow, .. } = incoming;
    if packet.fragment == Fragment::First {
        fragment::record_first::<F, _>(tables, packet, Direction::Original, flow, 0);
    }
    let event = ServiceEvent::ToEndpoint(ip_length(frame, packet.header()));
    let outcome = send(frame, tables, packet, &flow.source.addr);
    let sent = if matches!(outcome, Outcome::Redirect) { Some(()) } else { None };
    finish_flow_packet(frame, tables, (key, flow), event, sent);
    outcome
}

/// Sends an ICMP error through the tunnel, if it is about a packet of an endpoint behind it.
#[inline(never)]
pub(super) fn send_error<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    outer: &Packet,
    inner: &Packet,
) -> Outcome {
    match node_of_reply(tables, inner) {
        Some(node) => send(frame, tables, outer, &node),
        None => Outcome::Proceed,
    }
}

/// Returns the node of the endpoint that sent a packet.
#[inline(always)]
fn node_of_reply(tables: &impl Tables, reply: &Packet) -> Option<Addr> {
    let protocol = Protocol::of_packet(reply.proto)?;
    let tuple = reply.tuple(reply.ports()?).swapped();
    let flow = tables.flow(&FlowKey::new(Direction::Original, protocol, tuple))?;
    flow.is_dsr().then_some(flow.source.addr)
}

/// Sends a packet through the tunnel to a node. The sender of a packet that is too long gets an
/// ICMP error.
#[inline(never)]
pub(super) fn send<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, node: &Addr) -> Outcome {
    if !has_link(tables) {
        return finish(tables, None);
    }
    let longest = longest_to(tables, node);
    if !fits(frame, packet, node, longest) {
        return too_long::tell_client(frame, tables, packet, longest);
    }
    if enter(frame, tables, node) { Outcome::Redirect } else { finish(tables, None) }
}

/// Returns the bytes of the longest packet that fits into the tunnel to a node.
#[inline(always)]
fn longest_to(tables: &impl Tables, node: &Addr) -> u32 {
    let mtu = tables.node().map_or(0, |node| node.tunnel_mtu);
    mtu.saturating_sub(if node.is_v4() { TUNNEL_HEADERS_V4 } else { HEADERS_V6 })
}

/// Makes a packet enter the tunnel to a node, if the program returns [`Outcome::Redirect`]. Returns
/// false if there is no tunnel, or if the kernel has no memory.
#[inline(always)]
fn enter<F: Frame, T: Tables>(frame: &F, tables: &T, node: &Addr) -> bool {
    let link = tables.node().map_or(0, |node| node.tunnel_link);
    if link == 0 || choose_node(frame, tables, node).is_none() {
        return false;
    }
    tables.count(Counter::SentThroughTunnel);
    Notes::leave(frame, Notes::FORWARDED);
    frame.redirect(link);
    true
}

/// A function call of its own saves stack.
#[inline(never)]
fn choose_node<F: Frame, T: Tables>(frame: &F, tables: &T, node: &Addr) -> Option<()> {
    if node.is_v4() {
        let source = tables.node().map_or(Addr::UNSPECIFIED_V6, |this| this.tunnel_v4);
        frame.tunnel_to(node, &source)
    } else {
        let source = tables.node().map_or(Addr::UNSPECIFIED_V6, |this| this.tunnel_v6);
        frame.tunnel_to(node, &source)
    }
}

/// Returns true if a packet fits into the tunnel, or if the kernel may cut it: an IPv4 packet whose
/// sender permits it, between nodes that talk by IPv4.
#[inline(always)]
fn fits(frame: &impl Frame, packet: &Packet, node: &Addr, longest: u32) -> bool {
    const DO_NOT_FRAGMENT: u8 = 0x40;
    let is_connection = packet.proto == Protocol::Tcp.number();
    let Some(length) = direct::longest(frame, packet, is_connection) else { return true };
    if length <= longest {
        return true;
    }
    let may_be_cut = |flags: [u8; 2]| flags[0] & DO_NOT_FRAGMENT == 0;
    matches!(packet.version, IpVersion::V4)
        && node.is_v4()
        && frame.load(packet.header() + 6).is_some_and(may_be_cut)
}

#[cfg(test)]
mod tests;
