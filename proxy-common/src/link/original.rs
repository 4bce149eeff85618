//! Packets that come in for a Service: a flow begins, goes on or is turned away.

use super::{Outcome, bytes, delivered, dropped, fragment, is_settling, malformed};
use crate::{
    Addr, Proto,
    flow::{self, observed},
    layout::{
        AffinityKey, Counter, Direction, Endpoint, Flow, FlowKey, LocalDetection, NodeValue, ProgramError,
        ServiceValue, Tally, flags, flow_state,
    },
    packet::{Fragment, Frame, Packet, TCP, TcpFlags, UDP},
    rewrite,
    select::Slots,
    service,
    tables::Tables,
    told::Told,
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
    ports: [u16; 2],
) -> Outcome {
    let Some(tcp) = packet.tcp_flags(frame) else { return malformed(tables) };
    let key = FlowKey::new(Direction::Original, packet.proto, packet.tuple(ports));
    let mut arrival = Arrival { key, flow: Flow::NONE, tcp, now_ns: 0 };
    arrival.now_ns = tables.now_ns();
    if let Some(flow) = tables.flow(&arrival.key) {
        arrival.flow = flow;
    }
    let beginning =
        if goes_on(tables, &arrival) { Beginning::Known } else { begin(frame, tables, &mut arrival) };
    match beginning {
        Beginning::Known => {
            let Arrival { key, flow, now_ns, .. } = &arrival;
            if flow.is_held(*now_ns) {
                return Outcome::Drop;
            }
            // Else SYNs of a client that forgot its connection would keep it from ever falling silent.
            if !tcp.begins() || flow.state & flow_state::REPLIED == 0 {
                flow::touch(tables, key, flow, observed(Direction::Original, tcp), *now_ns);
            }
        }
        Beginning::Again | Beginning::New => {
            let is_noted = matches!(beginning, Beginning::Again) && reopen(tables, &arrival)
                || record(tables, &arrival.key, &mut arrival.flow);
            if !is_noted {
                tables.tally(arrival.flow.service, Tally::Drop);
                arrival.tell(tables, Counter::FlowNotRecorded);
                return dropped(tables, Counter::FlowNotRecorded);
            }
            arrival.tell(tables, Counter::FlowsBegun);
        }
        Beginning::Proceed => return Outcome::Proceed,
        Beginning::Drop | Beginning::Unsettled => return Outcome::Drop,
        Beginning::TurnedAway(why) => {
            arrival.tell(tables, why);
            let is_refused = matches!(why, Counter::Refused | Counter::UnknownConnection);
            return if is_refused { Outcome::Proceed } else { Outcome::Drop };
        }
    }
    if arrival.flow.state & flow_state::PASS != 0 {
        return Outcome::Proceed;
    }
    translate(frame, tables, packet, &arrival)
}

/// A packet that came in, with the flow it belongs to or begins.
struct Arrival {
    key: FlowKey,
    /// [`Flow::NONE`] if none is known.
    flow: Flow,
    tcp: TcpFlags,
    now_ns: u64,
}

impl Arrival {
    /// Tells what became of the packet.
    #[inline(always)]
    fn tell(&self, tables: &impl Tables, what: Counter) {
        tables.tell(&Told::of_flow(what, &self.key, &self.flow));
    }
}

#[inline(always)]
fn translate<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, arrival: &Arrival) -> Outcome {
    let mark = if arrival.flow.state & flow_state::MASQUERADE == 0 {
        0
    } else {
        mark(frame, tables, |node| node.masquerade_mark)
    };
    if let Fragment::First { .. } = packet.fragment {
        fragment::note(tables, packet, Direction::Original, &arrival.flow, mark);
    }
    // As it came in: what is rewritten keeps its length.
    let tally = Tally::ToEndpoint(bytes(frame, packet));
    let done = rewrite::transport(frame, packet, &arrival.key, &arrival.flow);
    delivered(tables, &arrival.key, &arrival.flow, tally, done)
}

/// Whether a packet belongs to the flow that is known for its addresses and ports, and the flow goes on. A TCP connection stays
/// where it is, whatever becomes of the Service. A SYN on top of one that is in use changes nothing: it is an old copy, or forged,
/// and else the endpoint asks the client back (RFC 9293, section 3.10.7.4). Whether any other SYN is repeated or opens another
/// connection is asked in [`look`].
#[inline(always)]
fn goes_on(tables: &impl Tables, arrival: &Arrival) -> bool {
    let Arrival { key, flow, tcp, now_ns } = arrival;
    if flow.is_none() {
        false
    } else if key.proto == UDP {
        !flow.is_over(UDP, *now_ns)
            && (flow.state & flow_state::PASS != 0
                || service::still_serves(tables, flow.service, flow.destination))
    } else {
        !tcp.begins() || flow.is_in_use(*now_ns)
    }
}

/// What a packet begins.
enum Beginning {
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
fn begin<F: Frame, T: Tables>(frame: &F, tables: &T, arrival: &mut Arrival) -> Beginning {
    for _ in 0..READS {
        let beginning = look(frame, tables, arrival);
        if !matches!(beginning, Beginning::Unsettled) {
            return beginning;
        }
    }
    endpoint_missing(tables, arrival.flow.service)
}

/// Looks once. A call of its own: few packets need it, and its stack is not that of all others.
#[inline(never)]
fn look<F: Frame, T: Tables>(frame: &F, tables: &T, arrival: &mut Arrival) -> Beginning {
    let proto = if arrival.key.proto == TCP { Proto::Tcp } else { Proto::Udp };
    if proto == Proto::Tcp && !arrival.tcp.begins() {
        return stray(frame, tables, arrival);
    }
    let is_local = is_local(frame, tables, &arrival.key);
    let Some(service) = service::find_on_link(tables, &arrival.key.destination, proto) else {
        forget(tables, arrival);
        return Beginning::Proceed;
    };
    if repeats(arrival, &service) {
        return Beginning::Known;
    }
    let source = arrival.key.source.addr;
    let in_ranges = || tables.in_source_ranges(service.service, source);
    let verdict = verdict::for_packet(&service, is_local, in_ranges);
    if let Verdict::Translate(slots) = verdict
        && leads_there_again(arrival, &service, slots)
    {
        arrival.flow.state = masquerade(&service, is_local, source, arrival.flow.destination);
        arrival.flow.used_ns = arrival.now_ns;
        return Beginning::Again;
    }
    forget(tables, arrival);
    arrival.flow.service = service.service;
    let slots = match verdict {
        Verdict::Translate(slots) => slots,
        Verdict::Pass(_) => return Beginning::Proceed,
        Verdict::Refuse => return refuse(frame, tables, service.service, Counter::Refused),
        Verdict::Drop(why) => {
            tables.count(why.counter());
            tables.tally(service.service, Tally::Drop);
            return Beginning::TurnedAway(why.counter());
        }
    };
    let client = || AffinityKey::of_packets(source, service.service);
    let Some(endpoint) = service::choose(tables, &service, slots, client) else {
        return Beginning::Unsettled;
    };
    arrival.flow = Flow {
        source: arrival.key.source,
        destination: endpoint,
        service: service.service,
        generation: service.generation,
        state: masquerade(&service, is_local, source, endpoint),
        list: slots.list,
        used_ns: arrival.now_ns,
    };
    Beginning::New
}

/// Gives up on a Service whose endpoints change all the time.
#[inline(never)]
fn endpoint_missing<T: Tables>(tables: &T, service: u32) -> Beginning {
    tables.count(Counter::FlowNotRecorded);
    tables.tally(service, Tally::Drop);
    tables.failed(ProgramError::EndpointMissing);
    Beginning::TurnedAway(Counter::FlowNotRecorded)
}

/// Whether the first packet of a connection comes again. Where the Service's endpoints have changed since, it may as well be
/// that of a new client on an old port, and the old endpoint gone.
#[inline(always)]
fn repeats(arrival: &Arrival, service: &ServiceValue) -> bool {
    let Arrival { key, flow, .. } = arrival;
    key.proto == TCP
        && !flow.is_none()
        && !flow.is_closing()
        && (service.service, service.generation) == (flow.service, flow.generation)
}

/// Whether a client that uses its port anew, after a connection that both sides closed in good order, may as well be led to the same
/// endpoint: it was chosen by chance among the same ones. That leaves both entries where they are, where removing and making two of
/// them costs 1.3 % of a short connection. After a reset chance decides anew, for the endpoint may have refused.
#[inline(always)]
fn leads_there_again(arrival: &Arrival, service: &ServiceValue, slots: Slots) -> bool {
    let Arrival { key, flow, .. } = arrival;
    key.proto == TCP
        && flow.is_finished()
        && service.affinity_seconds == 0
        && (service.service, service.generation, slots.list) == (flow.service, flow.generation, flow.list)
}

/// Notes a new flow in the entries of the finished one; else none of them is left.
#[inline(never)]
fn reopen<T: Tables>(tables: &T, arrival: &Arrival) -> bool {
    let Arrival { key, flow, .. } = arrival;
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
fn stray(frame: &impl Frame, tables: &impl Tables, arrival: &Arrival) -> Beginning {
    let dialled = &arrival.key.destination;
    if is_settling(tables, arrival.now_ns) {
        return Beginning::Drop;
    }
    if arrival.tcp.resets() {
        return Beginning::Proceed;
    }
    match service::exact(tables, dialled, Proto::Tcp) {
        Some(service) if !tables.is_node_address(&dialled.addr) => {
            refuse(frame, tables, service.service, Counter::UnknownConnection)
        }
        _ => Beginning::Proceed,
    }
}

/// Asks netfilter to reject the packet.
#[inline(always)]
fn refuse(frame: &impl Frame, tables: &impl Tables, service: u32, why: Counter) -> Beginning {
    tables.count(why);
    tables.tally(service, Tally::Refusal);
    mark(frame, tables, |node| node.reject_mark);
    Beginning::TurnedAway(why)
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
fn forget(tables: &impl Tables, arrival: &mut Arrival) {
    let Arrival { key, flow, .. } = arrival;
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
fn record(tables: &impl Tables, key: &FlowKey, flow: &mut Flow) -> bool {
    for _ in 0..PORTS {
        if claim(tables, key, flow) {
            return settle(tables, key, flow);
        }
        let [a, b, ..] = tables.random().to_ne_bytes();
        flow.source.port = FIRST_PORT | u16::from_ne_bytes([a, b]);
    }
    false
}

/// Notes the direction of the client's packets. Where another CPU just did so for another packet of the same client, that one's
/// flow counts: it may have another endpoint.
#[inline(never)]
fn settle<T: Tables>(tables: &T, key: &FlowKey, flow: &mut Flow) -> bool {
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
fn claim<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow) -> bool {
    let reply_key = flow.partner_key(key);
    let reply = flow.partner(key);
    if tables.add_flow(&reply_key, &reply) {
        return true;
    }
    if let Some(other) = tables.flow(&reply_key) {
        let other_key = other.partner_key(&reply_key);
        if other_key != *key {
            if !other.is_closing() && !other.is_over(key.proto, flow.used_ns) {
                return false;
            }
            tables.remove_flow(&other_key);
        }
    }
    tables.put_flow(&reply_key, &reply)
}
