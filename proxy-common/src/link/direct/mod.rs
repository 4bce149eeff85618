//! The direct path: a packet of a known flow leaves on another link at once, without the stack.
//!
//! The programs observe what the stack does with a flow. The program on the link where a packet
//! leaves writes down its addresses, links and priority ([`learn`]). For half a second the program
//! on the link where packets come in does the same with them. Then a packet goes through the stack
//! again. If a rule, route or neighbour changes, flows follow within that time. A firewall that
//! drops that packet ends the direct path.
//!
//! Userspace may watch rules, routes and neighbours ([`DirectWatch`](crate::layout::DirectWatch)).
//! As long as it says that none of them changed, the time is longer, and fewer packets go through
//! the stack. It says so for a second at a time. If its process ends, half a second counts again
//! after that second.

mod early;
mod learn;
mod route;
pub(super) mod twice;
mod whole;

pub use self::early::early;

pub(super) use self::{
    learn::learn,
    whole::{is_reply, is_whole, leave_by, send_on, state},
};
use super::{Notes, Outcome, count_drop, ip_length, may_be_endpoint};
use crate::{
    Addr, AddrV4, Protocol,
    checksum::Difference,
    layout::{
        Counter, DirectFlow, DirectKey, DirectPath, Flow, FlowKey, ProgramError, ServiceEvent, direct_flags,
        flow_state,
    },
    packet::{DSCP, ETHERNET_HEADER, Fragment, Frame, IpVersion, Packet, TcpFlags, Tuple},
    rewrite::TransportChecksum,
    tables::Tables,
};

/// How long packets of a flow take the direct path after one that went through the stack, if
/// userspace does not watch.
pub const LEASE_NS: u64 = 500_000_000;

/// A flow is learned if its time is at least this old. So it is not about to end: the programs
/// write the time when a connection begins and ends. A coarse clock makes it the next tick of the
/// kernel. This is a little less than the shortest tick, 1 ms.
const LEARN_AFTER_NS: u64 = 900_000;

/// One in so many packets of an old flow that is not on the direct path may be learned from.
const SAMPLE: u32 = 8;

impl DirectKey {
    /// Returns the key of packets with these addresses as they come in.
    #[inline(always)]
    pub const fn new(protocol: Protocol, tuple: Tuple) -> Self {
        Self { source: tuple.source, destination: tuple.destination, proto: protocol.number(), zero: [0; 3] }
    }
}

impl DirectPath {
    /// Returns true if userspace permits the direct path.
    #[inline(always)]
    pub const fn is_approved(&self) -> bool {
        self.flags & direct_flags::APPROVED != 0
    }
}

/// What an entry of the direct path keeps when it is written again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectProgress {
    /// [`DirectPath::until_ns`], or 0 if there is no entry.
    pub until_ns: u64,
    /// [`DirectPath::acknowledged`].
    pub acknowledged: u32,
    /// [`DirectPath::longest`].
    pub longest: u16,
    /// [`DirectPath::flags`].
    pub flags: u8,
}

impl DirectPath {
    /// Returns true if an entry needs only new times, so that the kernel need not replace it.
    #[inline(always)]
    pub fn is_same_but_for_time(&self, new: &Self) -> bool {
        let Self { until_ns, acknowledged, epoch, longest, .. } = *self;
        *self == Self { until_ns, acknowledged, epoch, longest, ..*new }
    }
}

impl DirectProgress {
    /// Returns what an entry keeps.
    #[inline(always)]
    pub const fn of(path: &DirectPath) -> Self {
        let DirectPath { until_ns, acknowledged, longest, flags, .. } = *path;
        Self { until_ns, acknowledged, longest, flags }
    }

    #[inline(always)]
    const fn is_approved(&self) -> bool {
        self.flags & direct_flags::APPROVED != 0
    }

    #[inline(always)]
    const fn is_none(&self) -> bool {
        self.until_ns == 0
    }
}

/// Returns true if packets may take the direct path.
#[inline(always)]
pub(super) fn is_on(tables: &impl Tables) -> bool {
    tables.node().is_some_and(|node| node.is_direct())
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "half of it tells two epochs apart")]
fn epoch(tables: &impl Tables) -> u32 {
    tables.node().map_or(0, |node| node.direct_epoch as u32)
}

/// Asks the program on the link where a packet leaves to learn from it, if its flow is old enough.
/// So short connections do not pay for it.
#[inline(always)]
pub(super) fn sample<F: Frame, T: Tables>(frame: &F, tables: &T, flow: &Flow, tcp: TcpFlags, now_ns: u64) {
    const NOT: u32 = flow_state::PASS | flow_state::DSR;
    let is_old = now_ns.wrapping_sub(flow.used_ns) >= LEARN_AFTER_NS;
    if F::IS_ETHERNET && is_old && flow.state & NOT == 0 {
        sample_old(frame, tables, tcp);
    }
}

/// A function call of its own, because the verifier follows each branch.
#[inline(never)]
fn sample_old<F: Frame, T: Tables>(frame: &F, tables: &T, tcp: TcpFlags) {
    const NONE: TcpFlags = TcpFlags(0);
    if (tcp == NONE || tcp.is_plain()) && is_on(tables) && tables.random().is_multiple_of(SAMPLE) {
        Notes::leave(frame, Notes::LEARN);
    }
}

/// Handles a packet that comes in for a VIP or from an endpoint. If its flow is not on the direct
/// path, [`Outcome::Proceed`] sends it through the stack.
#[inline(never)]
pub(super) fn forward<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
    ports: [u16; 2],
) -> Outcome {
    let Some((tcp, acknowledged)) = packet.tcp_answer(frame, protocol) else { return Outcome::Proceed };
    let key = DirectKey::new(protocol, packet.tuple(ports));
    let is_plain = !protocol.is_connection_oriented() || tcp.is_plain();
    let Some(flow) = tables.direct_flow(&key, tcp, acknowledged) else { return Outcome::Proceed };
    if !is_plain {
        // A segment that begins or ends a connection. The next connection may have another
        // endpoint.
        tables.remove_direct_flow(&key);
        return Outcome::Proceed;
    }
    let Some(hops) = is_like(frame, tables, packet, protocol, &flow.path) else {
        // Packets that come in on a port of a bridge are learned with the bridge.
        if flow.path.in_link == frame.link() || tables.random().is_multiple_of(SAMPLE) {
            Notes::leave(frame, Notes::LEARN);
        }
        return Outcome::Proceed;
    };
    if rewrite_learned(frame, packet, protocol, &flow, hops).is_none() {
        tables.count_error(ProgramError::NotRewritten);
        return count_drop(tables, Counter::NotRewritten);
    }
    count(frame, tables, packet, &flow.path);
    frame.set_priority(flow.path.priority);
    Notes::leave(frame, Notes::FORWARDED);
    frame.redirect(flow.path.out_link);
    Outcome::Redirect
}

/// Counts a packet for its Service.
#[inline(always)]
fn count(frame: &impl Frame, tables: &impl Tables, packet: &Packet, path: &DirectPath) {
    let bytes = ip_length(frame, packet);
    let is_to_endpoint = path.flags & direct_flags::TO_ENDPOINT != 0;
    let event = if is_to_endpoint { ServiceEvent::ToEndpoint(bytes) } else { ServiceEvent::ToClient(bytes) };
    tables.count_service(path.service, event);
}

/// Returns the number of hops that are left if the stack would do with a packet what it did with
/// the last one of the flow.
#[inline(always)]
fn is_like(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    protocol: Protocol,
    path: &DirectPath,
) -> Option<u8> {
    let Packet { traffic_class, hops, .. } = *packet;
    let is_like = path.is_approved()
        && path.epoch == epoch(tables)
        && is_current(tables, path.until_ns)
        && path.in_link == frame.link()
        && (path.traffic_class ^ traffic_class) & DSCP == 0
        && hops > 1
        && frame.mark() == 0
        && is_plain(frame, packet)
        && longest(frame, packet, protocol.is_connection_oriented())? <= path.longest.into();
    is_like.then_some(hops)
}

/// Returns true if the time of an entry is not over.
#[inline(always)]
fn is_current(tables: &impl Tables, until_ns: u64) -> bool {
    let now_ns = tables.now_ns();
    now_ns < until_ns || is_watched(tables, until_ns, now_ns)
}

/// Returns true if nothing changed since the entry was written, as far as userspace watches.
#[inline(never)]
fn is_watched<T: Tables>(tables: &T, until_ns: u64, now_ns: u64) -> bool {
    let (Some(node), Some(watch)) = (tables.node(), tables.direct_watch()) else { return false };
    let written_ns = written_ns(until_ns);
    watch.since_ns <= written_ns
        && now_ns < watch.until_ns
        && now_ns.wrapping_sub(written_ns) < node.direct_lease_ns
}

/// Returns true if an entry is older than a change. The MTU of a link may be lower since then.
#[inline(never)]
fn is_before_change<T: Tables>(tables: &T, until_ns: u64) -> bool {
    tables.direct_watch().is_some_and(|watch| written_ns(until_ns) < watch.since_ns)
}

/// Returns when an approved entry was written, by its [`DirectPath::until_ns`].
#[inline(always)]
const fn written_ns(until_ns: u64) -> u64 {
    until_ns.saturating_sub(LEASE_NS)
}

/// Returns true for a whole packet without options and without a VLAN tag.
#[inline(always)]
fn is_plain(frame: &impl Frame, packet: &Packet) -> bool {
    let has_tag = packet.header() != ETHERNET_HEADER || frame.has_vlan_tag();
    matches!(packet.fragment, Fragment::Whole) && packet.has_plain_header() && !has_tag
}

/// Returns the bytes of the packet, or of its longest segment if the kernel will cut it. Ethernet
/// pads short packets, so the length is that of the IP header.
#[inline(always)]
pub(super) fn longest(frame: &impl Frame, packet: &Packet, is_connection: bool) -> Option<u32> {
    const UDP_HEADER: u32 = 8;
    let segment = frame.segment_size();
    if segment == 0 {
        return packet.length(frame);
    }
    let header = if is_connection { packet.tcp_header(frame)? } else { UDP_HEADER };
    Some(packet.payload() - packet.header() + header + segment)
}

/// What changes in a packet on its way through the node.
struct Hop<'a> {
    source: &'a Addr,
    destination: &'a Addr,
    source_port: u16,
    destination_port: u16,
    /// The difference that the addresses make to a checksum.
    addresses: Difference,
    /// The difference that the ports make.
    ports: Difference,
    /// The hop limit with which the packet came in.
    hops: u8,
}

impl<'a> Hop<'a> {
    /// What the programs and the stack did with the last packet of a flow.
    #[inline(always)]
    const fn of(flow: &'a DirectFlow, hops: u8) -> Self {
        let DirectFlow { source, destination, path } = flow;
        Self {
            source,
            destination,
            source_port: path.source_port,
            destination_port: path.destination_port,
            addresses: Difference::from_folded(path.addresses),
            ports: Difference::from_folded(path.ports),
            hops,
        }
    }
}

/// Rewrites a packet of a learned flow, with its Ethernet addresses. Returns `None` as [`rewrite`].
#[inline(always)]
fn rewrite_learned(
    frame: &impl Frame,
    packet: &Packet,
    protocol: Protocol,
    flow: &DirectFlow,
    hops: u8,
) -> Option<()> {
    frame.store::<12>(0, &flow.path.hardware)?;
    rewrite(frame, packet, protocol, &Hop::of(flow, hops))
}

/// Writes addresses, ports and hop limit, and updates the checksums. Returns `None` if the packet
/// is truncated, or if the kernel has no memory. The packet may then be partly changed.
#[inline(always)]
fn rewrite(frame: &impl Frame, packet: &Packet, protocol: Protocol, hop: &Hop<'_>) -> Option<()> {
    let checksum = TransportChecksum::of(frame, packet, protocol)?;
    match packet.version {
        IpVersion::V4 => store_v4(frame, packet, hop)?,
        IpVersion::V6 => store_v6(frame, packet, hop)?,
    }
    checksum.fix(frame, packet.version, hop.addresses, hop.ports)
}

/// Writes hop limit, checksum, addresses and ports, which are adjacent.
#[inline(always)]
fn store_v4(frame: &impl Frame, packet: &Packet, hop: &Hop<'_>) -> Option<()> {
    let hops = hop.hops;
    let [source, destination] = [hop.source, hop.destination].map(|addr| AddrV4::last_of(addr).octets);
    let [a, b] = hop.addresses.and(difference_of_hops(packet, hops)).apply(packet.checksum);
    let first =
        u64::from_ne_bytes([hops - 1, packet.proto, a, b, source[0], source[1], source[2], source[3]]);
    let ports = u64::from(hop.source_port.to_be()) << 32 | u64::from(hop.destination_port.to_be()) << 48;
    let second = u64::from(u32::from_le_bytes(destination)) | ports;
    let bytes = u128::from(first) | u128::from(second) << 64;
    frame.store::<16>(packet.header() + 8, &bytes.to_le_bytes())
}

/// Returns the difference that one hop makes to the checksum of an IPv4 header.
#[inline(always)]
const fn difference_of_hops(packet: &Packet, hops: u8) -> Difference {
    Difference::of_bytes([hops, packet.proto], [hops - 1, packet.proto])
}

/// Writes hop limit, addresses and ports.
#[inline(always)]
fn store_v6(frame: &impl Frame, packet: &Packet, hop: &Hop<'_>) -> Option<()> {
    store_hops_v6(frame, packet, packet.proto, hop.hops - 1)?;
    frame.store(packet.header() + 8, &hop.source.octets)?;
    frame.store(packet.header() + 24, &hop.destination.octets)?;
    let ports = u32::from(hop.source_port.to_be()) | u32::from(hop.destination_port.to_be()) << 16;
    frame.store(packet.payload(), &ports.to_le_bytes())
}

/// Writes the hop limit, with the next header before it: programs reach no single byte. No checksum
/// covers it, so a sum of the hardware changes with it.
#[inline(always)]
fn store_hops_v6(frame: &impl Frame, packet: &Packet, next: u8, hops: u8) -> Option<()> {
    frame.store(packet.header() + 6, &[next, hops])?;
    frame.update_hardware_checksum(Difference::of_bytes([next, hops + 1], [next, hops]));
    Some(())
}

/// Returns true for the sequence number of a reset that the endpoint may accept, by its last
/// segment on the direct path. `key` and `flow` are of the original direction.
#[inline(never)]
pub(super) fn expects<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, sequence: u32) -> bool {
    const UNACKNOWLEDGED: u32 = 1 << 16;
    if !is_on(tables) {
        return false;
    }
    let Some(reply) = learn::reply_key(tables, key, flow) else { return false };
    // No `Option`: LLVM would leave the number undefined, and the verifier does not permit that.
    let progress = tables.direct_progress(&reply);
    !progress.is_none() && sequence.wrapping_sub(progress.acknowledged) < UNACKNOWLEDGED
}

/// Sends the next packet of the endpoint through the stack, after a SYN or a reset of its client.
/// That packet shows whether the endpoint still has the connection. `key` and `flow` are of the
/// original direction.
#[inline(never)]
pub(super) fn forget_reply<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow) {
    if is_on(tables)
        && let Some(reply) = learn::reply_key(tables, key, flow)
    {
        tables.remove_direct_flow(&reply);
    }
}

#[cfg(test)]
mod tests;
