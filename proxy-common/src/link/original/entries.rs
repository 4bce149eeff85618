//! Writes and removes the two entries of a flow, while other CPUs do the same.

use super::ClientPacket;
use crate::{
    layout::{Counter, Direction, Flow, ServiceEvent, flow_state},
    packet::Tuple,
    tables::Tables,
};

/// Writes both entries of a new flow. Returns false if that failed. `can_reuse` says that a closed
/// flow with the same addresses may have both.
#[inline(always)]
pub(super) fn write(tables: &impl Tables, incoming: &mut ClientPacket, can_reuse: bool) -> bool {
    if can_reuse {
        if reuse(tables, incoming) {
            return true;
        }
        incoming.flow.state &= !(flow_state::TWICE_NAT | flow_state::ASSURED);
        if incoming.flow.source.addr != incoming.key.source.addr {
            // It had twice NAT.
            incoming.flow.source = incoming.key.source;
        }
    }
    insert(tables, incoming)
}

/// Overwrites the entries of a closed flow. If one of them is missing, the original entry is
/// removed.
#[inline(never)]
pub(in super::super) fn reuse<T: Tables>(tables: &T, incoming: &ClientPacket) -> bool {
    let ClientPacket { key, flow, .. } = incoming;
    let reply_key = flow.opposite_key(key);
    if tables.reuse_flow(&reply_key, &flow.opposite(key)) && tables.reuse_flow(key, flow) {
        count_new(tables, incoming);
        return true;
    }
    // The reply entry stays, because it may belong to another flow by now.
    tables.remove_flow(key);
    false
}

/// How many client ports are tried: that of the client, and a random one if another flow to the
/// endpoint has the same. If that is taken too, which is one case in thousands, the packet is
/// dropped and the client retransmits.
const PORTS: u32 = 2;

/// The lowest port that is not a system port (RFC 6335, section 6).
const FIRST_PORT: u16 = 1024;

/// The lowest port that the kernel chooses for a socket (`net.ipv4.ip_local_port_range`).
const FIRST_EPHEMERAL_PORT: u16 = 32_768;

/// Moves a port that the kernel chose for a socket below the ports that it chooses. Other ports
/// stay, and two ports never become one.
///
/// The sockets of a pod may be served for a while and left alone for a while. A socket that is
/// served sends to the endpoint directly, and the link programs do not see that. The kernel may
/// choose the same port for it and for a socket that sends to a VIP, and both may get the same
/// endpoint. Their packets would then be the same.
#[inline(always)]
pub(super) const fn port_apart(port: u16) -> u16 {
    const OFFSET: u16 = FIRST_EPHEMERAL_PORT - FIRST_PORT;
    const LAST: u16 = FIRST_EPHEMERAL_PORT - 1 + OFFSET;
    if port >= FIRST_EPHEMERAL_PORT && port <= LAST { port - OFFSET } else { port }
}

/// Inserts both entries of a new flow, the reply entry first. If the client has another flow to the
/// endpoint from the same port through another VIP, the new flow gets another client port.
#[inline(always)]
fn insert(tables: &impl Tables, incoming: &mut ClientPacket) -> bool {
    if incoming.flow.is_dsr() {
        return insert_original(tables, incoming);
    }
    for _ in 0..PORTS {
        if insert_reply(tables, incoming) {
            return insert_original(tables, incoming);
        }
        let [a, b, ..] = tables.random().to_ne_bytes();
        incoming.flow.source.port = FIRST_PORT | u16::from_ne_bytes([a, b]) & (FIRST_EPHEMERAL_PORT - 1);
    }
    false
}

/// Inserts the entry for packets of the client. If another CPU inserted one for another packet of
/// the client, that flow counts. It may have another endpoint.
#[inline(never)]
pub(in super::super) fn insert_original<T: Tables>(tables: &T, incoming: &mut ClientPacket) -> bool {
    if tables.add_flow(&incoming.key, &incoming.flow) {
        count_new(tables, incoming);
        return true;
    }
    let ClientPacket { key, flow, .. } = incoming;
    let Some(first) = tables.flow(key) else { return false };
    if first.tuple() != flow.tuple() {
        tables.remove_flow(&flow.opposite_key(key));
    }
    *flow = first;
    true
}

/// Inserts the entry for packets of the endpoint, unless another flow has it that has not ended, or
/// another CPU inserts one meanwhile.
#[inline(always)]
pub(in super::super) fn insert_reply(tables: &impl Tables, incoming: &ClientPacket) -> bool {
    add_reply(tables, incoming) || remove_ended(tables, incoming) && add_reply(tables, incoming)
}

/// Adds the entry for packets of the endpoint. Returns false if there is one.
#[inline(never)]
fn add_reply<T: Tables>(tables: &T, incoming: &ClientPacket) -> bool {
    let ClientPacket { key, flow, .. } = incoming;
    tables.add_flow(&flow.opposite_key(key), &flow.opposite(key))
}

/// Removes the entry for packets of the endpoint, with the other entry of its flow. Returns false
/// if it is of another flow that has not ended. A function call of its own saves stack.
///
/// A closed connection that conntrack translated keeps the client's port until it expires.
/// Conntrack knows it for as long (`TIME_WAIT`), and would give a new flow another port, but only
/// while its packets go through the stack: a whole flow would break when that begins. Conntrack
/// does not see the ports with which the programs masquerade. A segment that opens no connection
/// is of that connection.
#[inline(never)]
fn remove_ended<T: Tables>(tables: &T, incoming: &ClientPacket) -> bool {
    let ClientPacket { key, flow, .. } = incoming;
    let reply_key = flow.opposite_key(key);
    let Some(other) = tables.flow(&reply_key) else { return true };
    let other_key = other.opposite_key(&reply_key);
    if other_key != *key {
        let is_of_conntrack =
            reply_key.direction == Direction::Reply as u8 && other.state & flow_state::PASS != 0;
        let is_kept = is_of_conntrack && !incoming.is_midstream();
        let is_over = other.is_closed() && !is_kept;
        // With `is_expired` last, the JIT compiler of kernel 5.10 cannot lay out the jumps (x86).
        if !(other.is_expired(incoming.protocol, incoming.now_ns) || is_over) {
            return false;
        }
        tables.remove_flow(&other_key);
    }
    tables.remove_flow(&reply_key);
    true
}

/// Counts a new flow, but not a second time if it is masqueraded.
#[inline(always)]
fn count_new(tables: &impl Tables, incoming: &ClientPacket) {
    if incoming.key.direction == Direction::Original as u8 {
        tables.count(Counter::FlowsBegun);
        tables.count_service(incoming.flow.service, ServiceEvent::Connection);
    }
}

/// Removes the entries of a flow that does not go on, because netfilter has new flows. The flow of
/// a datagram stays with netfilter when the programs take new flows again. A connection needs no
/// entry: only a SYN begins a flow.
#[inline(always)]
pub(super) fn leave(tables: &impl Tables, incoming: &mut ClientPacket) {
    remove(tables, incoming);
    if incoming.protocol.is_connection_oriented() {
        return;
    }
    let Tuple { source, destination } = incoming.key.tuple();
    let state = flow_state::PASS | flow_state::LEFT;
    let left = Flow { source, destination, state, used_ns: incoming.now_ns, ..Flow::NONE };
    // If there is an entry by now, userspace wrote it, and it says more.
    tables.add_flow(&incoming.key, &left);
}

/// Removes the entries of a flow that does not go on.
#[inline(always)]
pub(super) fn remove(tables: &impl Tables, incoming: &mut ClientPacket) {
    let ClientPacket { key, flow, .. } = incoming;
    if flow.is_none() {
        return;
    }
    tables.remove_flow(key);
    if flow.state & flow_state::PASS == 0 {
        tables.remove_flow(&flow.opposite_key(key));
    }
    *flow = Flow::NONE;
}
