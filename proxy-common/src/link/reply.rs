//! Packets that leave: an endpoint's answers get the VIP back as their source.

use super::{Outcome, bytes, delivered, fragment, is_settling, malformed};
use crate::{
    Protocol,
    flow::{self, observed},
    layout::{Direction, Flow, FlowKey, ServiceKey, Tally, flow_state},
    packet::{Fragment, Frame, Packet, Tuple},
    rewrite, service,
    tables::Tables,
};

/// Whether a packet may be of a flow, by where it comes from.
#[inline(always)]
pub(super) fn may_concern(
    tables: &impl Tables,
    packet: &Packet,
    protocol: Protocol,
    [port, _]: [u16; 2],
) -> bool {
    service::may_be_endpoint(tables, &packet.source, port)
        || !protocol.is_connection_oriented() && may_be_own(tables, packet, port)
}

/// Whether a datagram may leave from the number of a node port, or from the port of a Service at an address of the node. A call of
/// its own, for its stack.
#[inline(never)]
fn may_be_own<T: Tables>(tables: &T, packet: &Packet, port: u16) -> bool {
    service::may_be(tables, &packet.source, port)
}

/// A TCP or UDP packet that may be of a flow leaves on a link.
#[inline(never)]
pub(super) fn transport<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    ports: [u16; 2],
) -> Outcome {
    let Some(tcp) = packet.tcp_flags(frame, protocol) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Reply, protocol, packet.tuple(ports));
    let Some(flow) = tables.flow(&key) else {
        if !protocol.is_connection_oriented() {
            note_own_flow(tables, &key.tuple());
        } else if is_settling(tables, tables.now_ns()) {
            return Outcome::Drop;
        }
        return Outcome::Proceed;
    };
    if flow.is_closing() && tcp.agrees() {
        // The client uses its port anew, past the Service.
        tables.remove_flow(&key);
        return Outcome::Proceed;
    }
    flow::touch(tables, &key, &flow, observed(Direction::Reply, tcp), tables.now_ns());
    translate(frame, tables, packet, protocol, (&key, &flow))
}

#[inline(always)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    (key, flow): (&FlowKey, &Flow),
) -> Outcome {
    if let Fragment::First { .. } = packet.fragment {
        fragment::note(tables, packet, Direction::Reply, flow, 0);
    }
    let tally = Tally::ToClient(bytes(frame, packet));
    delivered(tables, key, flow, tally, rewrite::transport(frame, packet, protocol, key, flow))
}

/// A datagram that leaves from a node port's number, or from the port of a Service whose address is the node's: of a process of
/// the node, or of a pod that something else masqueraded. Its answers look like a client's datagrams to the Service, and must
/// not be taken for them. TCP needs no such note: its first packet tells who began.
#[inline(never)]
fn note_own_flow<T: Tables>(tables: &T, tuple: &Tuple) {
    let Tuple { source, .. } = tuple;
    let is_service = |addr| tables.service(&ServiceKey::new(addr, source.port, Protocol::Udp)).is_some();
    if !tables.is_node_address(&source.addr) || !(is_service(source.addr.any()) || is_service(source.addr)) {
        return;
    }
    let answers = tuple.swapped();
    let key = FlowKey::new(Direction::Original, Protocol::Udp, answers);
    let now_ns = tables.now_ns();
    match tables.flow(&key) {
        // A client's flow, whose translated answer leaves through another link on top of the first.
        Some(flow) if flow.state & flow_state::PASS == 0 && !flow.is_over(Protocol::Udp, now_ns) => {}
        Some(flow) if flow.state & flow_state::PASS != 0 => {
            flow::touch_alone(tables, &key, &flow, now_ns);
        }
        _ => {
            let (source, destination) = (answers.source, answers.destination);
            let state = flow_state::PASS;
            let flow =
                Flow { source, destination, service: 0, generation: 0, state, list: 0, used_ns: now_ns };
            tables.put_flow(&key, &flow);
        }
    }
}
