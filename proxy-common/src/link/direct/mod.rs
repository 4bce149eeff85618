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
mod hop;
mod learn;
mod plain;
mod route;
mod segment;
pub(super) mod twice;
mod whole;

pub use self::early::early;

use self::hop::rewrite_learned;
pub(super) use self::{
    learn::learn,
    plain::forward_plain,
    route::{Way, way_by},
    segment::{drop_plain, forward_segment, note_packet, observe},
    whole::{is_reply, is_whole, leave_by, send_on, state},
};
use super::{Notes, Outcome, comes_from_endpoint, goes_to_vip, ip_length, not_rewritten};
use crate::{
    Protocol,
    layout::{
        DirectKey, DirectPath, DirectWatch, Flow, FlowKey, NodeValue, ServiceEvent, direct_flags, flow_state,
    },
    packet::{DSCP, ETHERNET_HEADER, Fragment, Frame, IpVersion, Packet, TcpFlags, Tuple},
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
fn epoch(tables: &impl Tables) -> u32 {
    tables.node().map_or(0, |node| node.short_direct_epoch())
}

/// Asks the program on the link where a packet leaves to learn from it, if its flow is old enough.
/// So short connections do not pay for it.
#[inline(always)]
pub(super) fn sample<F: Frame, T: Tables>(frame: &F, tables: &T, flow: &Flow, tcp: TcpFlags, now_ns: u64) {
    const NOT: u32 = flow_state::PASS | flow_state::DSR | flow_state::RETURN;
    let is_old = now_ns.wrapping_sub(flow.used_ns) >= LEARN_AFTER_NS;
    if F::IS_ETHERNET && is_old && flow.state & NOT == 0 {
        sample_old(frame, tables, tcp);
    }
}

/// A function call of its own, because the verifier follows each branch.
#[inline(never)]
fn sample_old<F: Frame, T: Tables>(frame: &F, tables: &T, tcp: TcpFlags) {
    const NONE: TcpFlags = TcpFlags(0);
    if (tcp == NONE || tcp.is_of_open_connection()) && is_on(tables) && tables.random().is_multiple_of(SAMPLE)
    {
        Notes::leave(frame, Notes::LEARN);
    }
}

/// Handles a packet that comes in, unless it is a [`PlainPacket`](crate::packet::PlainPacket): one
/// of no Service passes, and one of a flow on the direct path leaves. Returns `None` for all
/// others. Packets of IPv4 do not leave here, but may end the direct path of their flow.
#[inline(never)]
pub(super) fn forward<F: Frame, T: Tables>(
    frame: &F,
    tables: &T,
    packet: &Packet,
    protocol: Protocol,
) -> Option<Outcome> {
    if !is_on(tables) {
        return None;
    }
    if !goes_to_vip(tables, packet) && !comes_from_endpoint(tables, packet) {
        return Some(Outcome::Proceed);
    }
    let (tcp, acknowledged) = packet.tcp_answer(frame, protocol)?;
    let key = DirectKey::new(protocol, packet.tuple(packet.ports_or_zeros()));
    let flow = tables.direct_flow(&key, tcp, acknowledged)?;
    if protocol.is_connection_oriented() && !tcp.is_of_open_connection() {
        // A segment that begins or ends a connection. The next connection may have another
        // endpoint.
        tables.remove_direct_flow(&key);
        return None;
    }
    if !may_follow(frame, tables, packet, protocol, &flow.path) {
        note_difference(frame, tables, flow.path.in_link);
        return None;
    }
    let rewritten = rewrite_learned(frame, packet, protocol, &flow);
    Some(leave(frame, tables, packet.header(), &flow.path, rewritten))
}

/// Sends a rewritten packet out on the way of the previous one of its flow. `header` is the offset
/// of the IP header.
#[inline(always)]
fn leave(
    frame: &impl Frame,
    tables: &impl Tables,
    header: u32,
    path: &DirectPath,
    rewritten: Option<()>,
) -> Outcome {
    if rewritten.is_none() {
        return not_rewritten(tables);
    }
    count(frame, tables, header, path);
    let to_peer = path.flags & direct_flags::TO_PEER != 0;
    if !to_peer {
        frame.set_priority(path.priority);
    }
    leave_on(frame, path.out_link, to_peer);
    Outcome::Redirect
}

/// Sends out a packet that is wholly translated. With `to_peer`, it comes in at the other end of
/// the link at once, in the network namespace of the pod. The program where packets leave does
/// not see it. So a packet to learn from leaves on the link. So does one with a mark: in the pod,
/// the packet would keep it.
#[inline(always)]
fn leave_on(frame: &impl Frame, link: u32, to_peer: bool) {
    if to_peer && frame.note() & Notes::LEARN == 0 && frame.mark() == 0 {
        frame.redirect_to_peer(link);
    } else {
        Notes::leave(frame, Notes::FORWARDED);
        frame.redirect(link);
    }
}

/// Asks the program on the link where a packet leaves to learn from it, because it differs from the
/// previous one of its flow. Packets that come in on a port of a bridge are learned with the
/// bridge.
#[inline(always)]
fn note_difference(frame: &impl Frame, tables: &impl Tables, in_link: u32) {
    if in_link == frame.link() || tables.random().is_multiple_of(SAMPLE) {
        Notes::leave(frame, Notes::LEARN);
    }
}

/// Counts a packet for its Service. `header` is the offset of the IP header.
#[inline(always)]
fn count(frame: &impl Frame, tables: &impl Tables, header: u32, path: &DirectPath) {
    let bytes = ip_length(frame, header);
    let is_to_endpoint = path.flags & direct_flags::TO_ENDPOINT != 0;
    tables.count_service(path.service, ServiceEvent::of_packet(is_to_endpoint, bytes));
}

/// Returns true if the stack would do with a packet what it did with the previous one of the flow.
#[inline(always)]
fn may_follow(
    frame: &impl Frame,
    tables: &impl Tables,
    packet: &Packet,
    protocol: Protocol,
    path: &DirectPath,
) -> bool {
    let Packet { traffic_class, hops, .. } = *packet;
    let is_short = || {
        longest(frame, packet, protocol.is_connection_oriented())
            .is_some_and(|longest| longest <= path.longest.into())
    };
    // All packets of IPv4 that could follow are plain.
    matches!(packet.version, IpVersion::V6)
        && tables
            .node()
            .is_some_and(|node| is_like(frame, tables, &node, path, &Arrival { traffic_class, hops }))
        && is_bare(frame, packet)
        && is_short()
}

/// How a packet came in.
struct Arrival {
    traffic_class: u8,
    /// The hop limit.
    hops: u8,
}

/// Returns true if an entry is valid, and if a packet came in as the previous one of the flow did.
#[inline(always)]
fn is_like(
    frame: &impl Frame,
    tables: &impl Tables,
    node: &NodeValue,
    path: &DirectPath,
    &Arrival { traffic_class, hops }: &Arrival,
) -> bool {
    path.is_approved()
        && path.epoch == node.short_direct_epoch()
        && is_current(tables, node, path.until_ns)
        && path.in_link == frame.link()
        && (path.traffic_class ^ traffic_class) & DSCP == 0
        && hops > 1
        && frame.mark() == 0
}

/// Returns true if the time of an entry is not over.
#[inline(always)]
fn is_current(tables: &impl Tables, node: &NodeValue, until_ns: u64) -> bool {
    let now_ns = tables.now_ns();
    now_ns < until_ns || is_watched(tables, node, until_ns, now_ns)
}

/// Returns true if nothing changed since the entry was written, as far as userspace watches.
#[inline(always)]
fn is_watched(tables: &impl Tables, node: &NodeValue, until_ns: u64, now_ns: u64) -> bool {
    let Some(watch) = tables.direct_watch() else { return false };
    let written_ns = written_ns(until_ns);
    watch.since_ns <= written_ns
        && now_ns < watch.until_ns
        && now_ns.wrapping_sub(written_ns) < node.direct_lease_ns
}

/// Flows are not handed to peers for this time after a change. It may be a new qdisc, filter or
/// rule that would see packets on the link, and userspace needs time to find out.
const UNSETTLED_NS: u64 = 3_000_000_000;

/// Returns true if packets that leave on a link may be handed to its peer. While userspace does
/// not watch, this is false: nobody would notice a change.
#[inline(always)]
fn may_hand_to_peer(tables: &impl Tables, link: u32) -> bool {
    let now_ns = tables.now_ns();
    let is_settled =
        |watch: DirectWatch| now_ns < watch.until_ns && watch.since_ns.wrapping_add(UNSETTLED_NS) <= now_ns;
    tables.is_peer_link(link) && tables.direct_watch().is_some_and(is_settled)
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
fn is_bare(frame: &impl Frame, packet: &Packet) -> bool {
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

/// Returns true for the sequence number of a reset that the endpoint may accept, by its last
/// segment on the direct path. `key` and `flow` are of the original direction.
#[inline(never)]
pub(super) fn expects<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, sequence: u32) -> bool {
    const UNACKNOWLEDGED: u32 = 1 << 16;
    if !is_on(tables) {
        return false;
    }
    let Some(reply) = learn::reply_key(tables, key, flow) else { return false };
    if !may_count(tables, &reply) {
        return false;
    }
    // No `Option`: LLVM would leave the number undefined, and the verifier does not permit that.
    let progress = tables.direct_progress(&reply, None);
    !progress.is_none() && sequence.wrapping_sub(progress.acknowledged) < UNACKNOWLEDGED
}

/// Returns true if an entry with this key would count ([`plain::may_count`]).
#[inline(always)]
fn may_count(tables: &impl Tables, key: &DirectKey) -> bool {
    match (tables.node(), key.v4()) {
        (Some(node), Some(key)) => plain::may_count(tables, &node, &key),
        _ => true,
    }
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
