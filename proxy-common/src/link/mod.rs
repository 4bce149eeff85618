//! Translates packets on links: as they come in, before netfilter sees them, and back as they
//! leave, after netfilter. Conntrack therefore sees one consistent flow between client and
//! endpoint.

mod answer;
pub mod direct;
mod dsr;
mod fragment;
mod icmp_error;
mod known;
mod masquerade;
mod original;
mod plain;
mod refusal;
mod reply;

pub use self::dsr::tunneled;
use self::{original::ClientPacket, plain::Finding};
use crate::{
    Addr, Protocol,
    layout::{Counter, Direction, Flow, FlowKey, ProgramError, ServiceEvent, flow_state},
    packet::{Fragment, Frame, ICMP, ICMPV6, IpVersion, Packet, PlainPacket},
    service,
    tables::Tables,
};

/// What happens to a packet after the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It passes, and other programs on the link see it too.
    Proceed,
    /// It leaves at once if the kernel has a route for it, and passes otherwise. No program returns
    /// it.
    Forward,
    /// It is refused: the sender gets an answer. No program returns it.
    Refuse,
    /// It is dropped.
    Drop,
    /// It leaves on another link at once.
    Redirect,
    /// It leaves at once on the link on which it came in. Only [`direct::early`] returns it.
    Transmit,
}

impl Outcome {
    #[inline(always)]
    const fn of_program(self) -> Self {
        if matches!(self, Self::Forward | Self::Refuse) { Self::Proceed } else { self }
    }
}

/// Handles a packet for this node that comes in on a link.
#[inline(always)]
pub fn ingress<F: Frame>(frame: &F, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    if F::IS_ETHERNET && PlainPacket::is_at(header, version) {
        let mut packet = PlainPacket::NONE;
        let from_endpoint = match plain::ingress(frame, tables, &mut packet) {
            Finding::Decided(outcome) => return outcome,
            Finding::FromEndpoint => true,
            Finding::Other => false,
        };
        if direct::is_whole(tables) {
            if let Some(outcome) = direct::forward_segment(frame, tables, &packet, from_endpoint) {
                return outcome;
            }
            if tables.has_tunnel()
                && let Some(outcome) = dsr::receive_segment(frame, tables, &packet)
            {
                return outcome;
            }
        } else if let Some(outcome) = known::ingress(frame, tables, &packet, from_endpoint) {
            return outcome;
        }
    }
    let mut packet = Packet::at(header, version);
    match process(frame, tables, &mut packet, Direction::Original, false) {
        Outcome::Forward if F::IS_ETHERNET && direct::is_whole(tables) => {
            direct::send_on(frame, tables, &mut packet)
        }
        Outcome::Refuse => refusal::answer(frame, tables, &packet),
        outcome => outcome.of_program(),
    }
}

/// Returns true for a packet that took the direct path to the link where it leaves, and that has
/// nothing else to be done. Takes its note. Most packets on the direct path need no more.
#[inline(always)]
pub fn leaves_at_once(frame: &impl Frame) -> bool {
    let note = frame.note();
    let is_done = note & Notes::ALL == Notes::FORWARDED && frame.mark() == 0;
    if is_done {
        frame.set_note(note & !Notes::FORWARDED);
    }
    is_done
}

/// Handles a packet that leaves on a link, unless it [`leaves_at_once`].
#[inline(always)]
pub fn egress<F: Frame>(frame: &F, tables: &impl Tables, header: u32, version: IpVersion) -> Outcome {
    let notes = Notes::take(frame);
    if notes.has(Notes::FORWARDED) {
        // Twice NAT leaves the mark for masquerading, which other programs may have set.
        take_marks(frame, tables, notes);
        if F::IS_ETHERNET && notes.has(Notes::LEARN) {
            direct::learn(frame, tables, &mut Packet::at(header, version), false);
        }
        return Outcome::Proceed;
    }
    let is_masqueraded = take_marks(frame, tables, notes);
    let mut decided = None;
    if F::IS_ETHERNET && PlainPacket::is_at(header, version) {
        let mut datagram = PlainPacket::NONE;
        decided = plain::egress(frame, tables, &mut datagram, is_masqueraded);
        if decided.is_none() && datagram.is_udp() {
            let direction = if is_masqueraded { Direction::Masquerade } else { Direction::Reply };
            decided = known::datagram(frame, tables, &datagram, direction);
        }
    }
    let mut packet = Packet::at(header, version);
    let outcome = match decided {
        Some(outcome) => outcome,
        None => process(frame, tables, &mut packet, Direction::Reply, is_masqueraded).of_program(),
    };
    if F::IS_ETHERNET
        && matches!(outcome, Outcome::Proceed)
        && (Notes::take_learn(frame) || notes.has(Notes::LEARN))
    {
        direct::learn(frame, tables, &mut packet, is_masqueraded);
    }
    outcome
}

/// Handles a packet at the hook where packets of this direction are translated. The direction is a
/// constant in each program. `is_masqueraded` says that the programs masquerade the packet if they
/// know its flow, or if it begins one.
#[inline(always)]
fn process(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &mut Packet,
    direction: Direction,
    is_masqueraded: bool,
) -> Outcome {
    if packet.read(frame).is_none() {
        return Outcome::Proceed;
    }
    if tables.has_tunnel() && matches!(direction, Direction::Original) && dsr::is_injected(tables, packet) {
        return count_drop(tables, Counter::TunnelRefused);
    }
    process_read(frame, tables, packet, direction, is_masqueraded)
}

/// Does the same with a packet whose headers are read.
#[inline(always)]
fn process_read<F: Frame>(
    frame: &F,
    tables: &impl Tables,
    packet: &Packet,
    direction: Direction,
    is_masqueraded: bool,
) -> Outcome {
    let Some(protocol) = Protocol::of_packet(packet.proto) else {
        return match (packet.version, packet.proto) {
            (IpVersion::V4, ICMP) | (IpVersion::V6, ICMPV6) => {
                if matches!(direction, Direction::Original) && !F::IS_TUNNELED {
                    icmp_error::split_flow(frame, tables, packet);
                }
                icmp_error::process(frame, tables, packet, direction)
            }
            _ => Outcome::Proceed,
        };
    };
    match packet.fragment {
        Fragment::Whole => {}
        Fragment::First => fragment::remove::<F, _>(tables, packet, direction),
        Fragment::Later => return fragment::translate_later(frame, tables, packet, direction),
    }
    if !packet.has_ports() {
        return Outcome::Proceed;
    }
    if matches!(direction, Direction::Original) {
        incoming(frame, tables, packet, protocol)
    } else if is_masqueraded {
        masquerade::original(frame, tables, packet, protocol)
    } else if reply::may_match(tables, packet, protocol) {
        reply::transport(frame, tables, packet, protocol)
    } else {
        Outcome::Proceed
    }
}

/// Handles a TCP or UDP packet that comes in.
#[inline(always)]
fn incoming<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, protocol: Protocol) -> Outcome {
    // For a plain packet, `plain::ingress` has done the same. Tunneled packets have no direct path.
    if F::IS_ETHERNET
        && !F::IS_TUNNELED
        && !packet.is_plain()
        && let Some(outcome) = direct::forward(frame, tables, packet, protocol)
    {
        return outcome;
    }
    let outcome = translate(frame, tables, packet, protocol);
    let passes = F::IS_ETHERNET && matches!(outcome, Outcome::Proceed);
    if passes && direct::is_whole(tables) && direct::is_reply(tables, packet, protocol) {
        Outcome::Forward
    } else {
        outcome
    }
}

/// Translates a TCP or UDP packet that comes in, if it is for a VIP or a masqueraded flow.
#[inline(always)]
fn translate<F: Frame, T: Tables>(frame: &F, tables: &T, packet: &Packet, protocol: Protocol) -> Outcome {
    if !F::IS_TUNNELED
        && masquerade::may_be_reply(tables, packet)
        && let Some(outcome) = masquerade::reply(frame, tables, packet, protocol)
    {
        outcome
    } else if goes_to_vip(tables, packet) {
        original::transport(frame, tables, packet, protocol)
    } else {
        Outcome::Proceed
    }
}

/// Returns true if an address and port may be a VIP. A function call of its own saves stack.
#[inline(never)]
fn may_be_vip<T: Tables>(tables: &T, address: &Addr, port: u16) -> bool {
    service::may_be_vip(tables, address, port)
}

/// Returns true if the destination of a packet may be a VIP. A function call of its own saves
/// stack.
#[inline(never)]
fn goes_to_vip<T: Tables>(tables: &T, packet: &Packet) -> bool {
    let [_, port] = packet.ports_or_zeros();
    service::may_be_vip(tables, &packet.destination, port)
}

/// Returns true if the source of a packet may be an endpoint. A function call of its own saves
/// stack.
#[inline(never)]
fn comes_from_endpoint<T: Tables>(tables: &T, packet: &Packet) -> bool {
    let [port, _] = packet.ports_or_zeros();
    service::may_be_endpoint(tables, &packet.source, port)
}

/// Returns true if an address and port may be an endpoint. A function call of its own saves stack.
#[inline(never)]
fn may_be_endpoint<T: Tables>(tables: &T, address: &Addr, port: u16) -> bool {
    service::may_be_endpoint(tables, address, port)
}

/// Passes a truncated packet that may belong to a Service. A function call of its own saves stack.
#[inline(never)]
fn malformed<T: Tables>(tables: &T) -> Outcome {
    tables.count_error(ProgramError::Malformed);
    Outcome::Proceed
}

/// The notes that the program on the link where a packet comes in leaves for the one on the link
/// where it leaves: the highest bits of `skb->tc_index`, of which other programs use the low ones.
#[derive(Clone, Copy)]
struct Notes(u32);

impl Notes {
    /// The packet is to be masqueraded.
    const MASQUERADE: u32 = 1 << 15;
    /// The packet shows what the stack does with its flow: [`direct::learn`].
    const LEARN: u32 = 1 << 14;
    /// The packet took the direct path. It is translated already.
    const FORWARDED: u32 = 1 << 13;
    const ALL: u32 = Self::MASQUERADE | Self::LEARN | Self::FORWARDED;

    /// Leaves a note.
    #[inline(always)]
    fn leave(frame: &impl Frame, note: u32) {
        frame.set_note(frame.note() | note);
    }

    /// Returns true if the program has decided that the packet goes through the tunnel.
    #[inline(always)]
    fn is_forwarded<F: Frame, T: Tables>(frame: &F, tables: &T) -> bool {
        tables.has_tunnel() && frame.note() & Self::FORWARDED != 0
    }

    /// Takes the notes of a packet.
    #[inline(always)]
    fn take(frame: &impl Frame) -> Self {
        let note = frame.note();
        if note & Self::ALL != 0 {
            frame.set_note(note & !Self::ALL);
        }
        Self(note)
    }

    /// Takes the note [`Self::LEARN`] that a reply left as it was translated. Returns true if it
    /// did.
    #[inline(always)]
    fn take_learn(frame: &impl Frame) -> bool {
        let note = frame.note();
        if note & Self::LEARN == 0 {
            return false;
        }
        frame.set_note(note & !Self::LEARN);
        true
    }

    #[inline(always)]
    const fn has(self, note: u32) -> bool {
        self.0 & note != 0
    }
}

/// Clears the bits of the mark for netfilter, which has done its work when the packet leaves.
/// Packets of a tunnel inherit the mark and must not be masqueraded or rejected again. Returns true
/// if the programs masquerade packets and this one had the mark or the note for it.
#[inline(always)]
fn take_marks(frame: &impl Frame, tables: &impl Tables, notes: Notes) -> bool {
    let (mark, is_noted) = (frame.mark(), notes.has(Notes::MASQUERADE));
    if mark == 0 && !is_noted {
        return false;
    }
    let Some(node) = tables.node() else { return false };
    let bits = mark & (node.masquerade_mark | node.reject_mark);
    if bits != 0 {
        frame.set_mark(mark & !bits);
    }
    node.masquerades_known_flows() && (is_noted || bits & node.masquerade_mark != 0)
}

/// Returns true while flows may be missing, because a map of another size is replacing the map
/// `flows`. A segment of an unknown connection is then dropped, and the sender retransmits it.
#[inline(always)]
fn is_settling(tables: &impl Tables, now_ns: u64) -> bool {
    tables.node().is_some_and(|node| now_ns < node.settling_until_ns)
}

/// Passes a rewritten packet. Drops a packet that could not be rewritten, because it may be partly
/// changed.
#[inline(always)]
fn finish(tables: &impl Tables, rewritten: Option<()>) -> Outcome {
    if rewritten.is_some() { Outcome::Proceed } else { not_rewritten(tables) }
}

/// Does the same for a packet of a flow, and counts it for the service.
#[inline(always)]
fn finish_flow_packet<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    (key, flow): (&FlowKey, &Flow),
    event: ServiceEvent,
    rewritten: Option<()>,
) -> Outcome {
    if rewritten.is_none() {
        return drop_flow_packet(frame, tables, key, flow);
    }
    tables.count_service(flow.service, event);
    Outcome::Proceed
}

/// Drops a packet that could not be rewritten.
#[inline(always)]
fn not_rewritten(tables: &impl Tables) -> Outcome {
    tables.count_error(ProgramError::NotRewritten);
    count_drop(tables, Counter::NotRewritten)
}

/// Drops a packet of a flow that could not be rewritten. A function call of its own saves stack.
#[inline(never)]
fn drop_flow_packet<F: Frame, T: Tables>(frame: &F, tables: &T, key: &FlowKey, flow: &Flow) -> Outcome {
    tables.count_service(flow.service, ServiceEvent::Drop);
    tables.trace(Counter::NotRewritten, frame.link(), key, flow);
    not_rewritten(tables)
}

/// Makes a packet of a whole flow take the direct path, unless it is dropped.
#[inline(always)]
const fn forward(outcome: Outcome, flow: &Flow) -> Outcome {
    match outcome {
        Outcome::Proceed if flow.state & flow_state::WHOLE != 0 => Outcome::Forward,
        outcome => outcome,
    }
}

/// Returns the length in bytes of the IP packet whose header has this offset.
#[inline(always)]
fn ip_length(frame: &impl Frame, header: u32) -> u32 {
    frame.length().wrapping_sub(header)
}

#[inline(always)]
fn count_drop(tables: &impl Tables, reason: Counter) -> Outcome {
    tables.count(reason);
    Outcome::Drop
}

#[cfg(test)]
mod tests;
