//! Packets that come in for a Service: a flow begins, goes on or is turned away.

use super::{Outcome, bytes, delivered, dropped, fragment, is_settling, malformed};
use crate::{
    Addr, Protocol,
    flow::{self, observed},
    layout::{
        AffinityKey, Counter, Direction, Endpoint, Flow, FlowKey, LocalDetection, NodeValue, ProgramError,
        ServiceValue, Tally, flags, flow_state,
    },
    packet::{Fragment, Frame, Packet, TcpFlags},
    rewrite,
    select::Slots,
    service,
    tables::Tables,
    verdict::{self, Verdict},
};

/// Whether a packet may be for a Service, by where it goes. A call of its own, for its stack.
#[inline(never)]
pub(super) fn may_concern<T: Tables>(tables: &T, packet: &Packet, [_, port]: [u16; 2]) -> bool {
    service::may_be(tables, &packet.destination, port)
}

/// A TCP or UDP packet that may be for a Service comes in on a link.
#[inline(never)]
pub(super) fn transport<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    ports: [u16; 2],
) -> Outcome {
    let Some(tcp) = packet.tcp_flags(frame, protocol) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Original, protocol, packet.tuple(ports));
    let mut client_packet = ClientPacket { key, flow: Flow::NONE, protocol, tcp, now_ns: 0 };
    client_packet.now_ns = tables.now_ns();
    if let Some(flow) = tables.flow(&client_packet.key) {
        client_packet.flow = flow;
    }
    let classification = if continues(tables, &client_packet) {
        Classification::Known
    } else {
        classify(frame, tables, &mut client_packet)
    };
    match classification {
        Classification::Known => {
            let ClientPacket { key, flow, now_ns, .. } = &client_packet;
            if flow.is_held(*now_ns) {
                return Outcome::Drop;
            }
            // Else SYNs of a client that forgot its connection would keep it from ever falling silent.
            if !tcp.begins() || flow.state & flow_state::REPLIED == 0 {
                flow::touch(tables, key, flow, observed(Direction::Original, tcp), *now_ns);
            }
        }
        Classification::Again | Classification::New => {
            let is_noted = matches!(classification, Classification::Again) && reopen(tables, &client_packet)
                || insert_flow(tables, &mut client_packet);
            if !is_noted {
                tables.tally(client_packet.flow.service, Tally::Drop);
                client_packet.trace(tables, Counter::FlowNotRecorded);
                return dropped(tables, Counter::FlowNotRecorded);
            }
            client_packet.trace(tables, Counter::FlowsBegun);
        }
        Classification::Proceed => return Outcome::Proceed,
        Classification::Drop | Classification::Unsettled => return Outcome::Drop,
        Classification::TurnedAway(why) => {
            client_packet.trace(tables, why);
            let is_refused = matches!(why, Counter::Refused | Counter::UnknownConnection);
            return if is_refused { Outcome::Proceed } else { Outcome::Drop };
        }
    }
    if client_packet.flow.state & flow_state::PASS != 0 {
        return Outcome::Proceed;
    }
    translate(frame, tables, packet, &client_packet)
}

/// A packet that came in, with the flow it belongs to or begins.
struct ClientPacket {
    key: FlowKey,
    /// [`Flow::NONE`] if none is known.
    flow: Flow,
    protocol: Protocol,
    tcp: TcpFlags,
    now_ns: u64,
}

impl ClientPacket {
    /// Traces what became of the packet.
    #[inline(always)]
    fn trace(&self, tables: &impl Tables, verdict: Counter) {
        tables.trace(verdict, &self.key, &self.flow);
    }
}

#[inline(always)]
fn translate<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    client_packet: &ClientPacket,
) -> Outcome {
    let mark = if client_packet.flow.state & flow_state::MASQUERADE == 0 {
        0
    } else {
        mark(frame, tables, |node| node.masquerade_mark)
    };
    if let Fragment::First { .. } = packet.fragment {
        fragment::note(tables, packet, Direction::Original, &client_packet.flow, mark);
    }
    // As it came in: what is rewritten keeps its length.
    let tally = Tally::ToEndpoint(bytes(frame, packet));
    let done =
        rewrite::transport(frame, packet, client_packet.protocol, &client_packet.key, &client_packet.flow);
    delivered(tables, &client_packet.key, &client_packet.flow, tally, done)
}

/// Whether a packet belongs to the flow that is known for its addresses and ports, and the flow goes on. A TCP connection stays
/// where it is, whatever becomes of the Service. A SYN on top of one that is in use changes nothing: it is an old copy, or forged,
/// and else the endpoint asks the client back (RFC 9293, section 3.10.7.4). Whether any other SYN is repeated or opens another
/// connection is asked in [`classify_new`].
#[inline(always)]
fn continues(tables: &impl Tables, client_packet: &ClientPacket) -> bool {
    let ClientPacket { flow, protocol, tcp, now_ns, .. } = client_packet;
    if flow.is_none() {
        false
    } else if protocol.is_connection_oriented() {
        !tcp.begins() || flow.is_in_use(*now_ns)
    } else {
        !flow.is_over(*protocol, *now_ns)
            && (flow.state & flow_state::PASS != 0
                || service::still_serves(tables, flow.service, flow.destination))
    }
}

/// What a packet begins.
enum Classification {
    /// Nothing; it goes on with the flow that is known, or repeats its first packet.
    Known,
    /// A new flow, which is still to be noted.
    New,
    /// The same between the same ends as one that is finished, whose entries it takes over.
    Again,
    /// Nothing; the packet goes on.
    Proceed,
    /// Nothing; the packet ends here.
    Drop,
    /// Nothing, for this reason: netfilter is asked to reject the packet, or it ends here.
    TurnedAway(Counter),
    /// Nothing yet: the endpoint that was chosen is gone, and another look finds one that is not.
    Unsettled,
}

/// A chosen slot may be gone: userspace switched the Service to other slots and removed the old ones between the two reads.
/// The Service, read again, then leads to slots that are there; should it change once more, the client's next try finds them.
/// Every turn of a loop multiplies what the verifier has to look at.
const READS: u32 = 2;

/// Finds out what a packet begins that no flow in use is known for.
#[inline(always)]
fn classify<F: Frame, T: Tables>(frame: &F, tables: &T, client_packet: &mut ClientPacket) -> Classification {
    for _ in 0..READS {
        let classification = classify_new(frame, tables, client_packet);
        if !matches!(classification, Classification::Unsettled) {
            return classification;
        }
    }
    endpoint_missing(tables, client_packet.flow.service)
}

/// Looks once. A call of its own: few packets need it, and its stack is not that of all others.
#[inline(never)]
fn classify_new<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    client_packet: &mut ClientPacket,
) -> Classification {
    let protocol = client_packet.protocol;
    if protocol.is_connection_oriented() && !client_packet.tcp.begins() {
        return unknown_connection(frame, tables, client_packet);
    }
    let is_local = is_local(frame, tables, &client_packet.key);
    let Some(service) = service::find_on_link(tables, &client_packet.key.destination, protocol) else {
        forget(tables, client_packet);
        return Classification::Proceed;
    };
    if repeats_first_segment(client_packet, &service) {
        return Classification::Known;
    }
    let source = client_packet.key.source.addr;
    let in_ranges = || tables.in_source_ranges(service.service, source);
    let verdict = verdict::for_packet(&service, is_local, in_ranges);
    if let Verdict::Translate(slots) = verdict
        && may_reuse_entries(client_packet, &service, slots)
    {
        client_packet.flow.state = masquerade(&service, is_local, source, client_packet.flow.destination);
        client_packet.flow.used_ns = client_packet.now_ns;
        return Classification::Again;
    }
    forget(tables, client_packet);
    client_packet.flow.service = service.service;
    let slots = match verdict {
        Verdict::Translate(slots) => slots,
        Verdict::Pass(_) => return Classification::Proceed,
        Verdict::Refuse => return refuse(frame, tables, service.service, Counter::Refused),
        Verdict::Drop(why) => {
            tables.count(why.counter());
            tables.tally(service.service, Tally::Drop);
            return Classification::TurnedAway(why.counter());
        }
    };
    let client = || AffinityKey::of_packets(source, service.service);
    let Some(endpoint) = service::choose(tables, &service, slots, client) else {
        return Classification::Unsettled;
    };
    client_packet.flow = Flow {
        source: client_packet.key.source,
        destination: endpoint,
        service: service.service,
        generation: service.generation,
        state: masquerade(&service, is_local, source, endpoint),
        list: slots.list,
        used_ns: client_packet.now_ns,
    };
    Classification::New
}

/// Gives up on a Service whose endpoints change all the time.
#[inline(never)]
fn endpoint_missing<T: Tables>(tables: &T, service: u32) -> Classification {
    tables.count(Counter::FlowNotRecorded);
    tables.tally(service, Tally::Drop);
    tables.failed(ProgramError::EndpointMissing);
    Classification::TurnedAway(Counter::FlowNotRecorded)
}

/// Whether the first packet of a connection comes again. Where the Service's endpoints have changed since, it may as well be
/// that of a new client on an old port, and the old endpoint gone.
#[inline(always)]
fn repeats_first_segment(client_packet: &ClientPacket, service: &ServiceValue) -> bool {
    let ClientPacket { flow, protocol, .. } = client_packet;
    protocol.is_connection_oriented()
        && !flow.is_none()
        && !flow.is_closing()
        && (service.service, service.generation) == (flow.service, flow.generation)
}

/// Whether a client that uses its port anew, after a connection that both sides closed in good order, may as well be led to the same
/// endpoint: it was chosen by chance among the same ones. That leaves both entries where they are, where removing and making two of
/// them costs 1.3 % of a short connection. After a reset chance decides anew, for the endpoint may have refused.
#[inline(always)]
fn may_reuse_entries(client_packet: &ClientPacket, service: &ServiceValue, slots: Slots) -> bool {
    let ClientPacket { flow, protocol, .. } = client_packet;
    protocol.is_connection_oriented()
        && flow.is_finished()
        && service.affinity_seconds == 0
        && (service.service, service.generation, slots.list) == (flow.service, flow.generation, flow.list)
}

/// Notes a new flow in the entries of the finished one; else none of them is left.
#[inline(never)]
fn reopen<T: Tables>(tables: &T, client_packet: &ClientPacket) -> bool {
    let ClientPacket { key, flow, .. } = client_packet;
    let partner = flow.partner_key(key);
    if tables.reopen_flow(&partner, &flow.partner(key)) && tables.reopen_flow(key, flow) {
        tables.count(Counter::FlowsBegun);
        tables.tally(flow.service, Tally::Connection);
        return true;
    }
    // The answers' entry, if there is one, may be that of another flow by now.
    tables.remove_flow(key);
    false
}

/// A segment of a connection nobody knows: the node came up anew, or the flow was silent for too long. A client that dials an
/// address of the node hears so from the node itself, to which the segment may belong: the port of a load balancer's address may
/// be one that the node dials from. For other addresses a reset saves the client from waiting.
#[inline(always)]
fn unknown_connection(
    frame: &impl Frame,
    tables: &impl Tables,
    client_packet: &ClientPacket,
) -> Classification {
    let destination = &client_packet.key.destination;
    if is_settling(tables, client_packet.now_ns) {
        return Classification::Drop;
    }
    if client_packet.tcp.resets() {
        return Classification::Proceed;
    }
    match service::exact(tables, destination, client_packet.protocol) {
        Some(service) if !tables.is_node_address(&destination.addr) => {
            refuse(frame, tables, service.service, Counter::UnknownConnection)
        }
        _ => Classification::Proceed,
    }
}

/// Asks netfilter to reject the packet.
#[inline(always)]
fn refuse(frame: &impl Frame, tables: &impl Tables, service: u32, why: Counter) -> Classification {
    tables.count(why);
    tables.tally(service, Tally::Refusal);
    mark(frame, tables, |node| node.reject_mark);
    Classification::TurnedAway(why)
}

/// Marks a packet; says with what.
#[inline(always)]
fn mark(frame: &impl Frame, tables: &impl Tables, bits: impl FnOnce(&NodeValue) -> u32) -> u32 {
    let bits = tables.node().map_or(0, |node| bits(&node));
    frame.set_mark(frame.mark() | bits);
    bits
}

/// Forgets a flow that does not go on.
#[inline(always)]
fn forget(tables: &impl Tables, client_packet: &mut ClientPacket) {
    let ClientPacket { key, flow, .. } = client_packet;
    if flow.is_none() {
        return;
    }
    tables.remove_flow(key);
    if flow.state & flow_state::PASS == 0 {
        tables.remove_flow(&flow.partner_key(key));
    }
    *flow = Flow::NONE;
}

/// Whether the caller counts as local to the cluster or node, as `detectLocalMode` has it.
#[inline(always)]
fn is_local(frame: &impl Frame, tables: &impl Tables, key: &FlowKey) -> bool {
    const SOURCE: u32 = LocalDetection::Source as u32;
    const LINK: u32 = LocalDetection::Link as u32;
    match tables.node().map(|node| node.local_detection) {
        Some(SOURCE) => tables.is_local_source(key.source.addr),
        Some(LINK) => tables.is_local_link(frame.link()),
        _ => false,
    }
}

/// Whether the endpoint sees the node as its client: where the Service says so, and where it is its own client, which would
/// else answer itself past this node.
#[inline(always)]
fn masquerade(service: &ServiceValue, is_local: bool, source: Addr, endpoint: Endpoint) -> u32 {
    let flag = if is_local { flags::MASQUERADE_INSIDE } else { flags::MASQUERADE_OUTSIDE };
    if service.flags & flag != 0 || endpoint.addr == source { flow_state::MASQUERADE } else { 0 }
}

/// Ports that are tried for a client: its own, and another if its packets would look like those of another flow to the same
/// endpoint. Should that be taken too, which is one in thousands, the client's next try gets another.
const PORTS: u32 = 2;

/// The first of the ports that programs may use without privileges (RFC 6335, section 6).
const FIRST_PORT: u16 = 1024;

/// Notes both directions of a new flow, answers first. Where the client has another flow to the endpoint from the same port,
/// through another address, this one gets a port of its own.
#[inline(always)]
fn insert_flow(tables: &impl Tables, client_packet: &mut ClientPacket) -> bool {
    for _ in 0..PORTS {
        if insert_reply(tables, client_packet) {
            return insert_original(tables, client_packet);
        }
        let [a, b, ..] = tables.random().to_ne_bytes();
        client_packet.flow.source.port = FIRST_PORT | u16::from_ne_bytes([a, b]);
    }
    false
}

/// Notes the direction of the client's packets. Where another CPU just did so for another packet of the same client, that one's
/// flow counts: it may have another endpoint.
#[inline(never)]
fn insert_original<T: Tables>(tables: &T, client_packet: &mut ClientPacket) -> bool {
    let ClientPacket { key, flow, .. } = client_packet;
    if tables.add_flow(key, flow) {
        tables.count(Counter::FlowsBegun);
        tables.tally(flow.service, Tally::Connection);
        return true;
    }
    let Some(first) = tables.flow(key) else { return false };
    if first.tuple() != flow.tuple() {
        tables.remove_flow(&flow.partner_key(key));
    }
    *flow = first;
    true
}

/// Notes the answers' direction, unless another flow that is not over has it.
#[inline(never)]
fn insert_reply<T: Tables>(tables: &T, client_packet: &ClientPacket) -> bool {
    let ClientPacket { key, flow, protocol, .. } = client_packet;
    let reply_key = flow.partner_key(key);
    let reply = flow.partner(key);
    if tables.add_flow(&reply_key, &reply) {
        return true;
    }
    if let Some(other) = tables.flow(&reply_key) {
        let other_key = other.partner_key(&reply_key);
        if other_key != *key {
            if !other.is_closing() && !other.is_over(*protocol, flow.used_ns) {
                return false;
            }
            tables.remove_flow(&other_key);
        }
    }
    tables.put_flow(&reply_key, &reply)
}
