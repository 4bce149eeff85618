//! Learns what the stack does with a flow from a packet that leaves.

use super::{LEASE_NS, epoch, is_bare, is_before_change, longest, may_count, may_hand_to_peer};
use crate::{
    Protocol,
    checksum::Difference,
    layout::{DirectKey, DirectPath, Direction, Endpoint, Flow, FlowKey, direct_flags, flow_state},
    packet::{Frame, Packet, Tuple},
    tables::Tables,
};

/// The time after which userspace is asked again.
const ASK_AGAIN_NS: u64 = 1_000_000_000;

/// How a packet that leaves came in, and what is known of its flow.
struct Passage {
    /// The key of packets of this direction as they come in.
    key: DirectKey,
    service: u32,
    state: u32,
    /// It goes to an endpoint. If that is not known yet, false.
    to_endpoint: bool,
}

impl Passage {
    /// Records what is known of the flow.
    #[inline(always)]
    const fn know(&mut self, flow: &Flow) {
        (self.service, self.state) = (flow.service, flow.state);
    }
}

/// Learns from a packet that came in on a link of the direct path, went through the stack, and is
/// translated now. `packet` is read again. `is_masqueraded` says that the packet had the mark or
/// the note for masquerading, so that it goes to an endpoint.
#[inline(never)]
pub(in super::super) fn learn<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &mut Packet,
    is_masqueraded: bool,
) {
    if frame.mark() == 0 && tables.is_direct_link(frame.ingress_link()) && packet.read(frame).is_some() {
        let _ = learn_from(frame, tables, packet, is_masqueraded);
    }
}

/// Returns `None` if nothing can be learned.
#[inline(always)]
fn learn_from<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    is_masqueraded: bool,
) -> Option<()> {
    let protocol = Protocol::of_packet(packet.proto)?;
    let ports = packet.ports()?;
    let key = DirectKey::new(protocol, packet.tuple(ports));
    let mut passage = Passage { key, service: 0, state: 0, to_endpoint: is_masqueraded };
    if is_bare(frame, packet)
        && find_passage(tables, protocol, &mut passage)
        && may_be_learned(protocol, &passage)
    {
        write(frame, tables, packet, ports, &passage);
    }
    Some(())
}

/// Writes the entry for packets of this direction, if it is time.
#[inline(never)]
fn write<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, ports: [u16; 2], passage: &Passage) {
    let _ = try_write(frame, tables, packet, ports, passage);
}

#[inline(always)]
fn try_write(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    ports: [u16; 2],
    passage: &Passage,
) -> Option<()> {
    let (key, now_ns) = (&passage.key, tables.now_ns());
    let known = tables.direct_progress(key, Some([&packet.source, &packet.destination]));
    let is_connection = key.proto == Protocol::Tcp.number();
    // An entry without a hint may be of an earlier connection. Userspace approves each connection
    // that conntrack may have. It has no whole flows.
    let is_of_this = || passage.state & flow_state::WHOLE != 0 || may_count(tables, key);
    let is_approved = known.is_approved() && is_of_this() || known.is_none() && !is_connection;
    if !is_approved && (now_ns < known.until_ns || !tables.request_direct(key)) {
        return None;
    }
    let (approved, valid_ns) =
        if is_approved { (direct_flags::APPROVED, LEASE_NS) } else { (0, ASK_AGAIN_NS) };
    let mut longest: u16 = longest(frame, packet, is_connection)?.try_into().ok()?;
    if longest < known.longest && !is_before_change(tables, known.until_ns) {
        longest = known.longest;
    }
    let path = DirectPath {
        until_ns: now_ns + valid_ns,
        hardware: frame.load(0)?,
        in_link: frame.ingress_link(),
        out_link: frame.link(),
        service: passage.service,
        priority: frame.priority(),
        acknowledged: known.acknowledged,
        epoch: epoch(tables),
        source_port: ports[0],
        destination_port: ports[1],
        addresses: difference_of_addresses(key, packet),
        ports: difference_of_ports(key, ports),
        longest,
        traffic_class: packet.traffic_class,
        flags: approved
            | if passage.to_endpoint { direct_flags::TO_ENDPOINT } else { 0 }
            | if may_hand_to_peer(tables, frame.link()) { direct_flags::TO_PEER } else { 0 },
    };
    tables.put_direct_flow(key, &packet.source, &packet.destination, &path);
    Some(())
}

/// Finds out how a packet came in. It leaves with the addresses and ports of the key.
#[inline(never)]
fn find_passage<T: Tables>(tables: &T, protocol: Protocol, passage: &mut Passage) -> bool {
    let Passage { key, .. } = passage;
    let left = Tuple { source: key.source, destination: key.destination };
    // Packets of the reply direction leave from the VIP to the client.
    let original = FlowKey::new(Direction::Original, protocol, left.swapped());
    if !passage.to_endpoint
        && let Some(flow) = tables.flow(&original)
    {
        let Some(source) = source_at_endpoint(tables, &original, &flow) else { return false };
        (key.source, key.destination) = (flow.destination, source);
        passage.know(&flow);
        return true;
    }
    // Packets of the original direction leave for the endpoint, from the client or masqueraded.
    let mut reply = FlowKey::new(Direction::MasqueradeReply, protocol, left.swapped());
    if let Some(flow) = tables.flow(&reply) {
        if flow.has_twice_nat() {
            (key.source, key.destination) = (flow.destination, flow.source);
            passage.know(&flow);
            passage.to_endpoint = true;
            return true;
        }
        reply.destination = flow.destination;
    }
    reply.direction = Direction::Reply as u8;
    let Some(flow) = tables.flow(&reply) else { return false };
    (key.source, key.destination) = (flow.destination, flow.source);
    passage.know(&flow);
    passage.to_endpoint = true;
    true
}

/// Returns the source that the endpoint sees. `None` if netfilter chose it.
#[inline(always)]
fn source_at_endpoint(tables: &impl Tables, original: &FlowKey, flow: &Flow) -> Option<Endpoint> {
    if flow.state & flow_state::MASQUERADE == 0 || flow.has_twice_nat() {
        return Some(flow.source);
    }
    let masquerade = FlowKey {
        source: flow.source,
        destination: flow.destination,
        direction: Direction::Masquerade as u8,
        ..*original
    };
    tables.flow(&masquerade).map(|flow| flow.source)
}

/// Returns the key of packets of the endpoint on the direct path. `key` and `flow` are of the
/// original direction.
#[inline(always)]
pub(super) fn reply_key(tables: &impl Tables, key: &FlowKey, flow: &Flow) -> Option<DirectKey> {
    let destination = source_at_endpoint(tables, key, flow)?;
    Some(DirectKey { source: flow.destination, destination, proto: key.proto, zero: [0; 3] })
}

/// Returns true if a flow may take the direct path: both sides have answered, neither closes,
/// nothing else translates it, and its replies do not return through the tunnel.
#[inline(always)]
fn may_be_learned(protocol: Protocol, passage: &Passage) -> bool {
    const ESTABLISHED: u32 = flow_state::REPLIED | flow_state::ASSURED;
    const NOT: u32 = flow_state::CLIENT_CLOSED
        | flow_state::ENDPOINT_CLOSED
        | flow_state::RESET
        | flow_state::SYN_UNANSWERED
        | flow_state::PASS
        | flow_state::HELD
        | flow_state::LEFT
        | flow_state::RETURN;
    matches!(protocol, Protocol::Tcp | Protocol::Udp) && passage.state & (ESTABLISHED | NOT) == ESTABLISHED
}

/// A function call of its own saves stack.
#[inline(never)]
const fn difference_of_addresses(key: &DirectKey, left: &Packet) -> u16 {
    let source = Difference::of_addresses(&key.source.addr, &left.source);
    source.and(Difference::of_addresses(&key.destination.addr, &left.destination)).folded()
}

#[inline(always)]
const fn difference_of_ports(key: &DirectKey, [source, destination]: [u16; 2]) -> u16 {
    let source = Difference::of_ports(key.source.port, source);
    source.and(Difference::of_ports(key.destination.port, destination)).folded()
}
