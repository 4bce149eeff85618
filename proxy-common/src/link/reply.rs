//! The reply direction: packets of endpoints that leave get the VIP back as their source.

use super::{
    Notes, Outcome, comes_from_endpoint, direct,
    dsr::{
        reply::{enter_with_reply, redirected},
        too_long::tell_endpoint,
    },
    finish_flow_packet, fragment, ip_length, is_settling, malformed, may_be_vip,
};
use crate::{
    Protocol,
    flow::{self, observed_state},
    layout::{Direction, Endpoint, Flow, FlowKey, ServiceEvent, ServiceKey, flow_state},
    packet::{Fragment, Frame, Packet, TcpFlags, Tuple},
    rewrite,
    tables::Tables,
};

/// Returns true if the source of a packet may be an endpoint, or, for a datagram, a VIP of the
/// node.
#[inline(always)]
pub(super) fn may_match(tables: &impl Tables, packet: &Packet, protocol: Protocol) -> bool {
    let [port, _] = packet.ports_or_zeros();
    comes_from_endpoint(tables, packet)
        || !protocol.is_connection_oriented() && may_be_vip(tables, &packet.source, port)
}

/// Handles a TCP or UDP packet that leaves and may belong to a flow.
#[inline(never)]
pub(super) fn transport<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
) -> Outcome {
    let Some((tcp, acknowledged)) = packet.tcp_answer(frame, protocol) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Reply, protocol, packet.tuple(packet.ports_or_zeros()));
    let Some(flow) = tables.answered_flow(&key, tcp, acknowledged) else {
        if !protocol.is_connection_oriented() {
            note_vip_as_source(tables, &key.tuple());
        } else if is_settling(tables, tables.now_ns()) {
            return Outcome::Drop;
        }
        return Outcome::Proceed;
    };
    if forget_if_reused(tables, &key, &flow, tcp) {
        return Outcome::Proceed;
    }
    observe(frame, tables, packet, (&key, &flow), tcp);
    translate(frame, tables, packet, protocol, (&key, &flow))
}

/// Removes the entry of a closed flow if a segment answers a new connection with the same addresses
/// and ports, which is none of ours: the client reused its port for a connection to the endpoint
/// itself, or netfilter masqueraded a connection with that port. Returns true if so.
#[inline(always)]
pub(super) fn forget_if_reused(tables: &impl Tables, key: &FlowKey, flow: &Flow, tcp: TcpFlags) -> bool {
    let is_reused = flow.is_closed() && tcp.is_syn_ack();
    if is_reused {
        tables.remove_flow(key);
    }
    is_reused
}

/// Updates a known flow for a packet of its endpoint.
#[inline(always)]
pub(super) fn observe<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    (key, flow): (&FlowKey, &Flow),
    tcp: TcpFlags,
) {
    let now_ns = tables.now_ns();
    flow::touch(tables, key, flow, observed_state(Direction::Reply, tcp), now_ns);
    direct::sample(frame, tables, flow, tcp, now_ns);
    if tcp.is_syn_ack() && !flow.is_assured() {
        note_sequence(frame, tables, packet, key, flow);
    }
    if key.proto != Protocol::Tcp.number() {
        flow::keep_opposite(tables, key, flow);
    }
}

/// Notes the sequence number that the client must acknowledge for the flow to be assured. A
/// function call of its own, because few packets need it.
#[inline(never)]
fn note_sequence<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, key: &FlowKey, flow: &Flow) {
    if let Some(sequence) = packet.tcp_sequence(frame) {
        tables.set_acknowledged(&flow.opposite_key(key), sequence);
    }
}

#[inline(always)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    (key, flow): (&FlowKey, &Flow),
) -> Outcome {
    if tables.has_tunnel() && flow.state & flow_state::RETURN != 0 {
        let longest = enter_with_reply(frame, tables, packet, key, flow);
        if longest != 0 {
            return tell_endpoint(frame, tables, packet, longest);
        }
    }
    if packet.fragment == Fragment::First && !Notes::is_forwarded(frame, tables) {
        fragment::record_first::<F, _>(tables, packet, Direction::Reply, flow, 0);
    }
    let event = ServiceEvent::ToClient(ip_length(frame, packet.header()));
    let rewritten = rewrite::transport(frame, packet, protocol, key, flow);
    redirected(frame, tables, finish_flow_packet(frame, tables, (key, flow), event, rewritten))
}

/// Adds a flow entry with [`flow_state::PASS`] for a datagram that leaves from a VIP of the node:
/// from a process of the node, or from a pod that something else masqueraded. Its replies look like
/// datagrams of a client to the Service, and the entry keeps them untranslated. TCP needs no such
/// entry, because the first segment shows who opens the connection.
///
/// Keeps the entry of a flow that conntrack translates, if this is a reply.
#[inline(never)]
fn note_vip_as_source<T: Tables>(tables: &T, tuple: &Tuple) {
    let Tuple { source, .. } = tuple;
    if !may_be_vip(tables, &source.addr, source.port) {
        return;
    }
    let replies = tuple.swapped();
    let key = FlowKey::new(Direction::Original, Protocol::Udp, replies);
    let now_ns = tables.now_ns();
    match tables.flow(&key) {
        // A flow of a client. Its translated reply leaves through a second link above the first.
        Some(flow) if flow.state & flow_state::PASS == 0 && !flow.is_expired(Protocol::Udp, now_ns) => {}
        Some(flow) if flow.state & flow_state::PASS != 0 => {
            flow::touch_pass_entry(tables, &key, &flow, now_ns);
        }
        _ if is_vip_of_node(tables, source) => {
            let (source, destination) = (replies.source, replies.destination);
            let flow = Flow { source, destination, state: flow_state::PASS, used_ns: now_ns, ..Flow::NONE };
            // An assured entry that has expired would hide the new one.
            tables.remove_flow(&key);
            tables.put_flow(&key, &flow);
        }
        _ => {}
    }
}

/// Returns true for an address of the node that is a UDP VIP with this port.
#[inline(always)]
fn is_vip_of_node(tables: &impl Tables, Endpoint { addr, port, .. }: &Endpoint) -> bool {
    let is_service = |addr| tables.service(&ServiceKey::new(addr, *port, Protocol::Udp)).is_some();
    tables.is_node_address(addr) && (is_service(addr.any()) || is_service(*addr))
}
