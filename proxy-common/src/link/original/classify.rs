//! Decides what a client's packet is: of an existing flow, the first of a new one, or neither.

use super::{
    super::{direct, dsr, is_settling},
    ClientPacket, entries, set_mark,
};
use crate::{
    Addr,
    layout::{
        AffinityKey, Counter, Endpoint, Flow, FlowKey, LocalDetection, NewFlows, ProgramError, ServiceEvent,
        ServiceValue, flags, flow_state,
    },
    maglev,
    packet::Frame,
    select::Slots,
    service,
    tables::Tables,
    verdict::{self, Verdict},
};

/// The kind of a packet of the original direction.
pub(super) enum Classification {
    /// It belongs to an existing flow, or repeats the first packet of one.
    Existing,
    /// It begins a new flow, whose entries are not written yet.
    New,
    /// It begins a new flow that reuses the entries of a closed one with the same addresses.
    Reused,
    /// It belongs to no Service and passes.
    Proceed,
    /// It is dropped.
    Drop,
    /// It is refused or dropped for this reason. If refused, it has the mark for that.
    Rejected(Counter),
    /// The chosen slot was removed. [`choose_again`] finds another one.
    Retry,
}

/// Classifies a packet. For a new flow, it sets [`ClientPacket::flow`].
#[inline(always)]
pub(super) fn classify<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    incoming: &mut ClientPacket,
) -> Classification {
    if is_existing(tables, incoming) {
        return Classification::Existing;
    }
    if incoming.is_midstream()
        && let Some(class) = unknown_connection(frame, tables, incoming)
    {
        return class;
    }
    let is_local = is_local(frame, tables, &incoming.key);
    match classify_new(frame, tables, incoming, is_local) {
        Classification::Retry => choose_again::<F, T>(tables, incoming, is_local),
        class => class,
    }
}

/// Returns true if the packet belongs to the flow of its entry, and the flow goes on.
///
/// A TCP connection keeps its endpoint, even if the Service changes or goes. So does a SYN on a
/// connection that the endpoint may have: anyone may have sent it, and the endpoint answers with a
/// challenge ACK (RFC 9293, section 3.10.7.4). If the client indeed lost the connection, it resets
/// it then, and its next SYN opens a new one. [`classify_new`] decides whether any other SYN is a
/// retransmission or opens a new connection.
#[inline(always)]
fn is_existing(tables: &impl Tables, incoming: &ClientPacket) -> bool {
    let ClientPacket { flow, protocol, tcp, now_ns, .. } = incoming;
    if flow.is_none() {
        false
    } else if protocol.is_connection_oriented() {
        !tcp.is_syn() || flow.may_be_alive(*now_ns)
    } else if flow.state & flow_state::LEFT != 0 {
        flow.is_left(*now_ns)
    } else {
        !flow.is_expired(*protocol, *now_ns)
            && (flow.state & flow_state::PASS != 0 && flow.service == 0
                || service::is_serving(tables, flow.service, flow.destination))
    }
}

/// Classifies a packet that is not of an existing flow. A function call of its own saves stack, and
/// few packets need it.
#[inline(never)]
fn classify_new<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    incoming: &mut ClientPacket,
    is_local: bool,
) -> Classification {
    let Some(service) = find::<F>(tables, incoming) else {
        entries::remove(tables, incoming);
        return Classification::Proceed;
    };
    if is_retransmitted_syn(incoming, &service) {
        return Classification::Existing;
    }
    if leaves_new_flows(tables) && !F::IS_TUNNELED {
        entries::leave(tables, incoming);
        return Classification::Proceed;
    }
    let in_ranges = || tables.in_source_ranges(service.service, incoming.key.source.addr);
    let verdict = verdict::for_packet(&service, is_local, in_ranges);
    if let Verdict::Translate(slots) = verdict
        && can_reuse_entries(incoming, &service, slots)
    {
        let masquerade =
            masquerade_state(&service, is_local, &incoming.key.source.addr, &incoming.flow.destination.addr);
        incoming.flow.state = masquerade
            | flow_state::of_list(slots.list)
            | direct::state(tables)
            | dsr::reply::state::<F>(tables)
            | incoming.flow.state & (flow_state::ASSURED | twice_nat_of(masquerade));
        incoming.flow.used_ns = incoming.now_ns;
        return Classification::Reused;
    }
    entries::remove(tables, incoming);
    incoming.flow.service = service.service;
    let slots = match verdict {
        Verdict::Translate(slots) => slots,
        Verdict::Pass => return Classification::Proceed,
        Verdict::Refuse => return refuse(frame, tables, service.service, Counter::Refused),
        Verdict::Drop(reason) => return count_drop(tables, service.service, reason.counter()),
    };
    if begin::<F>(tables, incoming, &service, slots, is_local) {
        Classification::New
    } else {
        Classification::Retry
    }
}

/// Chooses an endpoint after the chosen slot was removed. Userspace may remove the last slots of a
/// Service, or all of a list that is not in use any more, between two reads. A second read of the
/// Service finds the slots that are left. If the chosen one is removed once more, the packet is
/// dropped and the client retransmits.
///
/// The packet is not classified again: that would nearly double the work of the verifier.
#[inline(never)]
fn choose_again<F: Frame, T: Tables>(
    tables: &T,
    incoming: &mut ClientPacket,
    is_local: bool,
) -> Classification {
    let Some(service) = find::<F>(tables, incoming) else { return Classification::Proceed };
    let slots = if is_local { Slots::inside(&service) } else { Slots::outside(&service) };
    if slots.count > 0 && begin::<F>(tables, incoming, &service, slots, is_local) {
        return Classification::New;
    }
    tables.count_error(ProgramError::EndpointMissing);
    count_drop(tables, incoming.flow.service, Counter::FlowNotRecorded)
}

/// Finds the Service of a packet.
#[inline(always)]
fn find<F: Frame>(tables: &impl Tables, incoming: &ClientPacket) -> Option<ServiceValue> {
    let ClientPacket { key, protocol, .. } = incoming;
    if F::IS_TUNNELED {
        service::find_tunneled(tables, &key.destination, *protocol)
    } else {
        service::find_on_link(tables, &key.destination, *protocol)
    }
}

/// Chooses an endpoint, and sets [`ClientPacket::flow`]. Returns false if the chosen slot was
/// removed after the Service was read.
#[inline(always)]
fn begin<F: Frame>(
    tables: &impl Tables,
    incoming: &mut ClientPacket,
    service: &ServiceValue,
    slots: Slots,
    is_local: bool,
) -> bool {
    let client = || AffinityKey::of_packets(incoming.key.source.addr, service.service);
    let slot = || maglev::slot(tables, service, slots, &incoming.key.source);
    let Some(endpoint) = service::choose_endpoint(tables, service, slots, client, slot) else { return false };
    incoming.flow = Flow {
        source: source_after_translation(tables, incoming),
        destination: endpoint,
        service: service.service,
        generation: service.generation,
        state: masquerade_state(service, is_local, &incoming.key.source.addr, &endpoint.addr)
            | flow_state::of_list(slots.list)
            | direct::state(tables)
            | dsr::state::<F>(tables, service, is_local)
            | dsr::reply::state::<F>(tables),
        acknowledged: 0,
        used_ns: incoming.now_ns,
    };
    true
}

/// Returns the source of a new flow. Netfilter masquerades it later if necessary.
#[inline(always)]
fn source_after_translation(tables: &impl Tables, incoming: &ClientPacket) -> Endpoint {
    let source = incoming.key.source;
    let is_exempt = tables.is_exempt_source(&incoming.key.source.addr);
    let port = if is_exempt { entries::port_apart(source.port) } else { source.port };
    Endpoint { port, ..source }
}

#[inline(always)]
fn count_drop(tables: &impl Tables, service: u32, reason: Counter) -> Classification {
    tables.count(reason);
    tables.count_service(service, ServiceEvent::Drop);
    Classification::Rejected(reason)
}

/// Returns true if a SYN is a retransmission. If the endpoints of the Service changed since the
/// first SYN, it counts as a new connection: the old endpoint may be gone, or a new client uses the
/// port.
#[inline(always)]
fn is_retransmitted_syn(incoming: &ClientPacket, service: &ServiceValue) -> bool {
    let ClientPacket { flow, protocol, .. } = incoming;
    protocol.is_connection_oriented()
        && !flow.is_none()
        && !flow.is_closed()
        && (service.service, service.generation) == (flow.service, flow.generation)
}

/// Returns true if a reused client port may get the endpoint of its last connection, which both
/// sides closed with FIN. That endpoint was a random choice among the same ones, so keeping it is
/// fair. Both entries stay, and removing and inserting them would cost 1.3 % of a short connection.
/// After a reset the endpoint is chosen again, because the last one may have refused.
#[inline(always)]
fn can_reuse_entries(incoming: &ClientPacket, service: &ServiceValue, slots: Slots) -> bool {
    let ClientPacket { flow, protocol, .. } = incoming;
    protocol.is_connection_oriented()
        && flow.is_finished()
        && service.affinity_seconds == 0
        && (service.service, service.generation) == (flow.service, flow.generation)
        && slots.list == flow_state::list(flow.state)
}

/// Returns [`flow_state::TWICE_NAT`] for [`flow_state::MASQUERADE`], and nothing without it: a flow
/// that is not masqueraded any more cannot reuse entries with the source of the node.
#[inline(always)]
const fn twice_nat_of(masquerade: u32) -> u32 {
    const SHIFT: u32 = flow_state::TWICE_NAT.trailing_zeros() - flow_state::MASQUERADE.trailing_zeros();
    masquerade << SHIFT
}

/// Classifies a segment of an unknown connection: the node restarted, or the flow was silent for
/// too long. A reset saves the client from waiting for a timeout. A segment to an address of the
/// node passes instead, and the node itself answers it: the segment may belong to a connection of
/// the node, whose source port may be the port of a load-balancer IP.
///
/// Returns `None` if the connection is adopted as a new flow: a Maglev table leads the client to
/// the endpoint that it has. If the endpoint does not know the connection, it resets it. A function
/// call of its own saves stack, and few packets need it.
#[inline(never)]
fn unknown_connection<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    incoming: &ClientPacket,
) -> Option<Classification> {
    let destination = &incoming.key.destination;
    if is_settling(tables, incoming.now_ns) {
        return Some(Classification::Drop);
    }
    if incoming.tcp.has_rst() || leaves_new_flows(tables) && !F::IS_TUNNELED {
        return Some(Classification::Proceed);
    }
    if F::IS_TUNNELED {
        let service = find::<F>(tables, incoming)?;
        let is_adopted = may_be_adopted(incoming, &service);
        return (!is_adopted).then(|| refuse(frame, tables, service.service, Counter::UnknownConnection));
    }
    match service::find_by_address(tables, destination, incoming.protocol) {
        Some(service) if !tables.is_node_address(&destination.addr) => {
            let is_adopted = may_be_adopted(incoming, &service) && !is_local(frame, tables, &incoming.key);
            (!is_adopted).then(|| refuse(frame, tables, service.service, Counter::UnknownConnection))
        }
        _ if tables.has_tunnel()
            && may_be_of_node_port(frame, tables, incoming)
            && !frame.has_socket(incoming.protocol, &incoming.key.tuple()) =>
        {
            None
        }
        _ => Some(Classification::Proceed),
    }
}

/// Returns true if a segment to an address of the node may belong to a connection to a node port
/// that goes through the tunnel. It may also belong to a socket of the node.
#[inline(never)]
fn may_be_of_node_port<F: Frame, T: Tables>(frame: &F, tables: &T, incoming: &ClientPacket) -> bool {
    let Some(service) = find::<F>(tables, incoming) else { return false };
    service.flags & flags::DSR != 0
        && may_be_adopted(incoming, &service)
        && !is_local(frame, tables, &incoming.key)
}

/// Returns true if a segment may belong to a connection that a Maglev table leads to its endpoint.
#[inline(always)]
fn may_be_adopted(incoming: &ClientPacket, service: &ServiceValue) -> bool {
    incoming.tcp.has_ack() && !incoming.tcp.is_syn_ack() && service.flags & flags::MAGLEV_SIZE != 0
}

/// Returns true if netfilter translates what these programs do not know.
#[inline(always)]
fn leaves_new_flows(tables: &impl Tables) -> bool {
    const LEAVE: u16 = NewFlows::Leave as u16;
    tables.node().is_some_and(|node| node.new_flows == LEAVE)
}

/// Marks the packet as refused. Netfilter rejects it by the mark, unless the program answers it.
#[inline(always)]
fn refuse(frame: &impl Frame, tables: &impl Tables, service: u32, reason: Counter) -> Classification {
    tables.count(reason);
    tables.count_service(service, ServiceEvent::Refusal);
    set_mark(frame, tables, |node| node.reject_mark);
    Classification::Rejected(reason)
}

/// Returns true if local detection (`detectLocalMode`) takes the client for local. A function call
/// of its own saves stack.
#[inline(never)]
fn is_local<F: Frame, T: Tables>(frame: &F, tables: &T, key: &FlowKey) -> bool {
    const SOURCE: u32 = LocalDetection::Source as u32;
    const LINK: u32 = LocalDetection::Link as u32;
    match tables.node().map(|node| node.local_detection) {
        Some(SOURCE) => tables.is_local_source(key.source.addr),
        Some(LINK) => tables.is_local_link(frame.link()),
        _ => false,
    }
}

/// Returns [`flow_state::MASQUERADE`] if the Service requires masquerading, or for a hairpin
/// connection, whose endpoint would otherwise reply to itself and bypass this node.
#[inline(always)]
fn masquerade_state(service: &ServiceValue, is_local: bool, source: &Addr, endpoint: &Addr) -> u32 {
    let flag = if is_local { flags::MASQUERADE_INSIDE } else { flags::MASQUERADE_OUTSIDE };
    if service.flags & flag != 0 || endpoint == source { flow_state::MASQUERADE } else { 0 }
}
