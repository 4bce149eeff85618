//! Masquerades packets as they leave on a link, after netfilter, and translates the replies back as
//! they come in, before netfilter. Conntrack sees neither the address nor the port.

use super::{
    Notes, Outcome, comes_from_endpoint, count_drop, direct, finish, forward, fragment, is_settling,
    malformed, may_be_endpoint,
    original::{ClientPacket, entries, observe},
    reply,
};
use crate::{
    Protocol,
    flow::{self, observed_state},
    layout::{Counter, Direction, Endpoint, Flow, FlowKey, Masquerading, NodeValue, flow_state},
    packet::{Fragment, Frame, Packet},
    rewrite,
    tables::Tables,
};

/// How many source ports are tried for a flow. If 90 % of them are taken, one flow in thirty finds
/// none with its first packet. The client sends the packet again, and other ports are tried.
const TRIES: u32 = 32;

/// From this try on, the port of a flow that has just ended is taken too.
const FIRST_TRY_OF_ENDED: u32 = 24;

impl NodeValue {
    /// Returns true if packets with the mark for masquerading concern the programs.
    #[inline(always)]
    pub(super) const fn masquerades_known_flows(&self) -> bool {
        self.masquerading != Masquerading::Netfilter as u16
    }

    /// Returns true for a source port of flows that the programs masquerade.
    #[inline(always)]
    pub(super) const fn is_masquerade_port(&self, port: u16) -> bool {
        self.masquerades_known_flows() && self.first_port <= port && port <= self.last_port
    }
}

/// Asks the program on the link where the packet leaves to masquerade it. Returns false if the
/// packet needs the mark too: netfilter masquerades it, or its rules in FORWARD must accept it.
///
/// Netfilter's rules masquerade the first packet of a connection that conntrack sees. If conntrack
/// begins to track connections, any packet may be the first one. So once the endpoint has replied,
/// packets have only the note. A filter of another program takes the note away if it comes later
/// and accepts the packet. Where packets take the direct path, userspace knows the links without
/// such filters. `is_whole` says that the packet is no fragment.
#[inline(always)]
pub(super) fn ask(
    frame: &impl Frame,
    tables: &impl Tables,
    node: &NodeValue,
    flow: &Flow,
    is_whole: bool,
) -> bool {
    if !node.masquerades_known_flows() {
        return false;
    }
    Notes::leave(frame, Notes::MASQUERADE);
    flow.state & flow_state::REPLIED != 0
        && is_whole
        && (!node.is_direct() || tables.is_direct_link(frame.link()))
}

/// Handles a TCP or UDP packet that leaves with the mark or the note for masquerading.
#[inline(never)]
pub(super) fn original<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
) -> Outcome {
    let Some(tcp) = packet.tcp_flags(frame, protocol) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Masquerade, protocol, packet.tuple(packet.ports_or_zeros()));
    let mut outgoing = ClientPacket { key, flow: Flow::NONE, protocol, tcp, now_ns: 0 };
    outgoing.now_ns = tables.now_ns();
    if let Some(flow) = tables.flow(&outgoing.key) {
        outgoing.flow = flow;
    } else {
        match unknown(frame, tables, &outgoing) {
            Unknown::Passes => return Outcome::Proceed,
            Unknown::Lost => return count_drop(tables, Counter::NotMasqueraded),
            Unknown::New => {}
        }
    }
    if !may_begin(&outgoing) {
        observe(frame, tables, packet, &outgoing);
    } else if !begin(frame, tables, packet, &mut outgoing) {
        outgoing.trace(frame, tables, Counter::NotMasqueraded);
        return count_drop(tables, Counter::NotMasqueraded);
    }
    translate(frame, tables, packet, protocol, (&outgoing.key, &outgoing.flow), Direction::Reply)
}

/// Handles a packet of an endpoint that comes in for a source port of masqueraded flows. Returns
/// `None` if it belongs to none of them. While flows may be missing, a segment of a connection is
/// dropped: the node would reset the connection.
#[inline(never)]
pub(super) fn reply<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
) -> Option<Outcome> {
    let (tcp, acknowledged) = packet.tcp_answer(frame, protocol)?;
    let key = FlowKey::new(Direction::MasqueradeReply, protocol, packet.tuple(packet.ports_or_zeros()));
    let Some(mut flow) = tables.answered_flow(&key, tcp, acknowledged) else {
        let may_be_missing = protocol.is_connection_oriented() && is_settling(tables, tables.now_ns());
        return may_be_missing.then_some(Outcome::Drop);
    };
    if reply::forget_if_reused(tables, &key, &flow, tcp) {
        return None;
    }
    if flow.state & flow_state::PASS != 0 {
        // Netfilter masqueraded the connection, and conntrack translates the reply.
        flow::touch(tables, &key, &flow, observed_state(Direction::Reply, tcp), tables.now_ns());
        return None;
    }
    reply::observe(frame, tables, packet, (&key, &flow), tcp);
    if flow.has_twice_nat() {
        let outcome = direct::twice::send_or_split::<F, T, { Direction::MasqueradeReply as usize }>(
            frame, tables, packet, &key, &mut flow,
        );
        if !matches!(outcome, Outcome::Proceed) {
            return Some(outcome);
        }
        if flow.state & flow_state::PASS != 0 {
            return None;
        }
    }
    let outcome = translate(frame, tables, packet, protocol, (&key, &flow), Direction::Original);
    Some(forward(outcome, &flow))
}

/// Returns true if a packet that comes in may be the reply to a masqueraded flow.
#[inline(always)]
pub(super) fn may_be_reply(tables: &impl Tables, packet: &Packet) -> bool {
    tables.node().is_some_and(|node| {
        let [_, port] = packet.ports_or_zeros();
        node.is_masquerade_port(port)
    }) && comes_from_endpoint(tables, packet)
}

/// What happens to a packet whose flow has no source yet.
enum Unknown {
    /// It keeps its source: the programs masquerade no new flows, or netfilter masqueraded the
    /// flow, for another program or before the programs did, or the packet goes to no endpoint. A
    /// pod can leave the note on its own packets.
    Passes,
    /// It begins a flow, or it is of an adopted connection.
    New,
    /// Entries of its flow are lost. The client sends a segment again, and the next segment of the
    /// endpoint restores the entry.
    Lost,
}

/// Finds out what a packet without a masqueraded flow is. A pod gets an address of the node for
/// packets to endpoints only. An entry for packets of the endpoint is not required: it may be one
/// of conntrack's, or lost.
#[inline(never)]
fn unknown<F: Frame, T: Tables>(frame: &F, tables: &T, outgoing: &ClientPacket) -> Unknown {
    let key = &outgoing.key;
    let is_masqueraded = tables.masquerade_address(frame.link(), &key.destination.addr)
        == Some(key.source.addr)
        || tables.is_node_address(&key.source.addr);
    if is_masqueraded || !masquerades_new_flows(tables) {
        return Unknown::Passes;
    }
    let direction = Direction::Reply as u8;
    let reply = FlowKey { source: key.destination, destination: key.source, direction, ..*key };
    let state = tables.flow(&reply).map_or(0, |flow| flow.state);
    if state == 0 && !may_be_endpoint(tables, &key.destination.addr, key.destination.port) {
        return Unknown::Passes;
    }
    let is_adopted = state & (flow_state::MASQUERADE | flow_state::REPLIED) == flow_state::MASQUERADE;
    if outgoing.is_midstream() && !is_adopted { Unknown::Lost } else { Unknown::New }
}

#[inline(always)]
fn masquerades_new_flows(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.masquerading == Masquerading::Programs as u16)
}

/// Returns true if a packet begins a flow, or may repeat the first packet of one, or if its flow is
/// unknown.
#[inline(always)]
fn may_begin(outgoing: &ClientPacket) -> bool {
    let ClientPacket { flow, protocol, tcp, now_ns, .. } = outgoing;
    if flow.is_none() {
        true
    } else if protocol.is_connection_oriented() {
        tcp.is_syn() && !flow.may_be_alive(*now_ns)
    } else {
        flow.is_expired(*protocol, *now_ns)
    }
}

/// Finds a source for a new flow and writes its entries. Returns false if there is no source. An
/// adopted connection gets the same source as before, if that was the first one tried.
///
/// A client that repeats its SYN, or that uses its port again, keeps the source. To the endpoint it
/// is the same host as before, whose sequence numbers and timestamps increase. The endpoint then
/// accepts a SYN even if it has the connection in TIME-WAIT (RFC 6191).
#[inline(always)]
fn begin<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, outgoing: &mut ClientPacket) -> bool {
    if outgoing.is_midstream() {
        outgoing.flow.acknowledged = packet.tcp_acknowledgement(frame).unwrap_or(0);
    }
    if !outgoing.flow.is_none() {
        outgoing.flow.state = outgoing.flow.state & flow_state::ASSURED | direct::state(tables);
        outgoing.flow.used_ns = outgoing.now_ns;
        if entries::reuse(tables, outgoing) {
            return true;
        }
    }
    masquerades_new_flows(tables) && allocate(frame, tables, outgoing)
}

/// Chooses a source that is free, and writes both entries. Returns false if none was found.
#[inline(never)]
fn allocate<F: Frame, T: Tables>(frame: &F, tables: &T, outgoing: &mut ClientPacket) -> bool {
    if !choose_address(frame, tables, outgoing) {
        return false;
    }
    // `insert_reply` refuses the port of the last try if it is taken.
    choose_port::<T, TRIES>(tables, outgoing);
    write(frame, tables, outgoing)
}

/// Writes both entries of a flow with a source port that seems free. Returns false if it is not.
#[inline(always)]
pub(super) fn write<F: Frame, T: Tables>(frame: &F, tables: &T, outgoing: &mut ClientPacket) -> bool {
    avoid_sockets(frame, tables, outgoing)
        && entries::insert_reply(tables, outgoing)
        && entries::insert_original(tables, outgoing)
}

/// Tries so many ports until one is free. If none of them is, the flow gets one more port without a
/// look, and the result is false.
///
/// The first try is the port of the client if it is in the range (RFC 4787, section 4.2.1).
/// Otherwise it depends on client and endpoint, and is the same again if all entries were lost.
#[inline(never)]
pub(super) fn choose_port<T: Tables, const TRIES: u32>(tables: &T, outgoing: &mut ClientPacket) -> bool {
    let [first, last] = port_range(tables);
    let mut reply_key = outgoing.flow.opposite_key(&outgoing.key);
    let port = outgoing.key.source.port;
    if port < first || port > last {
        let number = hash(&outgoing.key.source, &outgoing.flow.destination);
        reply_key.destination.port = port_of_range([first, last], number);
    }
    let mut is_free = false;
    // The verifier follows each try by itself, so a try is one lookup in each map.
    for attempt in 0..TRIES {
        let is_scarce = attempt >= FIRST_TRY_OF_ENDED;
        match tables.port_use(&reply_key) {
            Some(other) if !other.has_ended(outgoing.protocol, is_scarce, outgoing.now_ns) => {}
            _ => {
                is_free = true;
                break;
            }
        }
        reply_key.destination.port = port_of_range([first, last], tables.random());
    }
    outgoing.flow.source.port = reply_key.destination.port;
    is_free
}

/// Chooses another port if a socket of the node has the port. The flow would get the packets that
/// the endpoint sends to the socket. Returns false if a socket has the other port too. Few sockets
/// have a port of the range, so the next packet of the client finds a free one. A function call of
/// its own saves stack.
#[inline(never)]
fn avoid_sockets<F: Frame, T: Tables>(frame: &F, tables: &T, outgoing: &mut ClientPacket) -> bool {
    for _ in 0..2 {
        let ClientPacket { key, flow, protocol, .. } = &*outgoing;
        if !frame.has_socket(*protocol, &flow.opposite_key(key).tuple()) {
            return true;
        }
        tables.count(Counter::PortOfSocket);
        outgoing.flow.source.port = port_of_range(port_range(tables), tables.random());
    }
    false
}

/// Sets the flow, with the address of the node and the port of the client. Returns false if there
/// is no address. A function call of its own saves stack.
#[inline(never)]
fn choose_address<F: Frame, T: Tables>(frame: &F, tables: &T, outgoing: &mut ClientPacket) -> bool {
    let FlowKey { source: client, destination, .. } = outgoing.key;
    let Some(address) = tables.masquerade_address(frame.link(), &destination.addr) else { return false };
    let (source, state) = (Endpoint::new(address, client.port), direct::state(tables));
    let acknowledged = if outgoing.is_midstream() { outgoing.flow.acknowledged } else { 0 };
    outgoing.flow = Flow { source, destination, state, acknowledged, used_ns: outgoing.now_ns, ..Flow::NONE };
    true
}

/// Returns the first and the last source port.
#[inline(always)]
fn port_range(tables: &impl Tables) -> [u16; 2] {
    tables.node().map_or([0, 0], |node| [node.first_port, node.last_port])
}

/// Returns a port of the range for a number.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the remainder is less than 65,536")]
fn port_of_range([first, last]: [u16; 2], number: u32) -> u16 {
    let count = u32::from(last.wrapping_sub(first)) + 1;
    first.wrapping_add((number % count) as u16)
}

/// Returns a number for the flow of a client to an endpoint.
#[inline(always)]
fn hash(client: &Endpoint, endpoint: &Endpoint) -> u32 {
    // The odd number that is nearest to 2^32 divided by the golden ratio.
    const FACTOR: u32 = 0x9e37_79b1;
    let ports = u32::from(client.port) << 16 | u32::from(endpoint.port);
    let [client, endpoint] = [client, endpoint].map(|end| end.addr.words());
    // The upper words of IPv4 addresses are all the same.
    let words = [client[0] ^ endpoint[0], client[1] ^ endpoint[1], client[2], client[3], endpoint[3], ports];
    words.into_iter().fold(0, |hash, word| (hash ^ word).wrapping_mul(FACTOR).rotate_left(15))
}

/// Rewrites a packet of a flow. `hook` is the direction whose packets are translated at this hook.
#[inline(always)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    (key, flow): (&FlowKey, &Flow),
    hook: Direction,
) -> Outcome {
    if packet.fragment == Fragment::First {
        fragment::record_first::<F, _>(tables, packet, hook, flow, 0);
    }
    finish(tables, rewrite::transport(frame, packet, protocol, key, flow))
}

#[cfg(test)]
mod tests;
