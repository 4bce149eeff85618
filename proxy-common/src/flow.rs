//! The entries of a flow: their keys, their state, and when they expire.

use crate::{
    Addr, Protocol,
    layout::{Direction, Endpoint, Flow, FlowKey, flow_state as state},
    lifetime,
    packet::{TcpFlags, Tuple},
    tables::Tables,
};

const SECOND: u64 = 1_000_000_000;

/// The longest time for which a flow is held. Usually it takes a thousandth of it.
const HELD_NS: u64 = 10 * SECOND;

/// An endpoint that has the connection answers a SYN (RFC 5961, section 4.2), unless it answered
/// another unexpected segment within the last half second (Linux: `tcp_invalid_ratelimit`). So of
/// two SYNs with this time between them, it answers one.
const CHALLENGED_AGAIN_NS: u64 = 6 * SECOND / 10;

/// If the endpoint has not answered the second of such SYNs for this long, it does not have the
/// connection any more, and cannot be reached. The client sends SYNs at once, after one and after
/// three seconds (RFC 6298), or every second (`tcp_syn_linear_timeouts`).
const ANSWER_NS: u64 = 9 * SECOND / 10;

/// After this silence, a SYN on a TCP connection with [`state::PASS`] begins a new one.
const PASSED_NS: u64 = 60 * SECOND;

/// The longest time for which a flow with [`state::LEFT`] passes. Userspace lists conntrack's flows
/// meanwhile. It then removes those that conntrack does not have.
const LEFT_NS: u64 = 60 * SECOND;

impl FlowKey {
    /// Returns the key of packets of one direction.
    #[inline(always)]
    pub const fn new(direction: Direction, protocol: Protocol, tuple: Tuple) -> Self {
        Self {
            source: tuple.source,
            destination: tuple.destination,
            proto: protocol.number(),
            direction: direction as u8,
            zero: 0,
        }
    }

    /// Returns the protocol. It is `None` only if [`FlowKey::new`] did not create the key.
    pub const fn protocol(&self) -> Option<Protocol> {
        Protocol::from_number(self.proto)
    }

    /// Returns the direction. It is `None` only if [`FlowKey::new`] did not create the key.
    pub const fn direction(&self) -> Option<Direction> {
        match self.direction {
            0 => Some(Direction::Original),
            1 => Some(Direction::Reply),
            2 => Some(Direction::Masquerade),
            3 => Some(Direction::MasqueradeReply),
            _ => None,
        }
    }

    /// Returns source and destination before translation.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple {
        Tuple { source: self.source, destination: self.destination }
    }
}

impl Direction {
    /// All directions, by their numbers.
    pub const ALL: [Self; 4] = [Self::Original, Self::Reply, Self::Masquerade, Self::MasqueradeReply];

    /// Returns the number of the opposite direction, for a flow in this state.
    #[inline(always)]
    const fn opposite_number(number: u8, state: u32) -> u8 {
        const TWICE_NAT: u8 = Direction::Original as u8 ^ Direction::MasqueradeReply as u8;
        number ^ if state & state::TWICE_NAT == 0 { 1 } else { TWICE_NAT }
    }

    /// Returns the direction of masqueraded flows whose packets are translated at the same hook as
    /// those of this direction.
    #[inline(always)]
    pub(crate) const fn masqueraded(self) -> Self {
        match self {
            Self::Original | Self::MasqueradeReply => Self::MasqueradeReply,
            Self::Reply | Self::Masquerade => Self::Masquerade,
        }
    }
}

impl Flow {
    /// No flow.
    pub const NONE: Self = Self {
        source: Endpoint::new(Addr::UNSPECIFIED_V6, 0),
        destination: Endpoint::new(Addr::UNSPECIFIED_V6, 0),
        service: 0,
        generation: 0,
        state: 0,
        acknowledged: 0,
        used_ns: 0,
    };

    /// Returns true for [`Flow::NONE`]. A flow always has a time of its last packet.
    #[inline(always)]
    pub const fn is_none(&self) -> bool {
        self.used_ns == 0
    }

    /// Returns source and destination after translation.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple {
        Tuple { source: self.source, destination: self.destination }
    }

    /// Returns the key of the opposite direction. `key` is the key of this entry.
    #[inline(always)]
    pub const fn opposite_key(&self, key: &FlowKey) -> FlowKey {
        let direction = Direction::opposite_number(key.direction, self.state);
        FlowKey { source: self.destination, destination: self.source, direction, ..*key }
    }

    /// Returns the entry of the opposite direction. `key` is the key of this entry.
    #[inline(always)]
    pub const fn opposite(&self, key: &FlowKey) -> Self {
        Self { source: key.destination, destination: key.source, acknowledged: 0, ..*self }
    }

    /// Returns true for a TCP connection that both sides closed, or that was reset. A SYN with the
    /// same ports then opens a new connection. If conntrack has the connection, only the client's
    /// side is known here.
    #[inline(always)]
    pub const fn is_closed(&self) -> bool {
        lifetime::is_closed(self.state)
    }

    /// Returns true for a TCP connection that both sides closed with FIN, without a reset.
    #[inline(always)]
    pub const fn is_finished(&self) -> bool {
        const BOTH: u32 = state::CLIENT_CLOSED | state::ENDPOINT_CLOSED;
        self.state & (BOTH | state::RESET) == BOTH
    }

    /// Returns true for a TCP connection that the endpoint may still have: it accepted it, it is
    /// not closed, and it has not left two SYNs of the client unanswered.
    ///
    /// The programs do not see the answers of a connection that conntrack translates. It counts as
    /// alive while it is not silent.
    #[inline(always)]
    pub const fn may_be_alive(&self, now_ns: u64) -> bool {
        let patience_ns = if self.state & state::PASS != 0 {
            PASSED_NS
        } else if self.state & state::SYNS_UNANSWERED != 0 {
            ANSWER_NS
        } else {
            self.lifetime_seconds(Protocol::Tcp) * SECOND
        };
        self.state & state::REPLIED != 0 && !self.is_closed() && !self.is_silent_for(patience_ns, now_ns)
    }

    /// Returns true for a number that is not much higher than [`Self::acknowledged`].
    ///
    /// The flow of the reply direction: for the sequence number of a reset that the endpoint may
    /// accept. It accepts the number that it expects next (RFC 5961, section 3.2), which can be
    /// higher than the one in its last segment, because it delays acknowledgements.
    ///
    /// The flow of the original direction: for an acknowledgement number of a client that got the
    /// SYN-ACK.
    #[inline(always)]
    pub const fn is_next(&self, sequence: u32) -> bool {
        const UNACKNOWLEDGED: u32 = 1 << 16;
        sequence.wrapping_sub(self.acknowledged) < UNACKNOWLEDGED
    }

    /// Returns true if the entry is in the map `flows`.
    #[inline(always)]
    pub const fn is_assured(&self) -> bool {
        self.state & state::ASSURED != 0
    }

    /// Returns true if the flow was silent for its lifetime.
    #[inline(always)]
    pub const fn is_expired(&self, protocol: Protocol, now_ns: u64) -> bool {
        self.is_silent_for(self.lifetime_seconds(protocol) * SECOND, now_ns)
    }

    /// Returns true if the last packet was at least this long ago.
    #[inline(always)]
    const fn is_silent_for(&self, silence_ns: u64, now_ns: u64) -> bool {
        is_over(self.used_ns, silence_ns, now_ns)
    }

    /// Returns true if the time of the last packet has to be updated.
    #[inline(always)]
    const fn needs_touch(&self, now_ns: u64) -> bool {
        self.is_silent_for(TOUCH_NS, now_ns)
    }

    /// Returns true if a packet that sets these bits changes the entry: one of them is new, or the
    /// time of the last packet has to be updated.
    #[inline(always)]
    pub const fn is_changed_by(&self, observed: u32, now_ns: u64) -> bool {
        observed & !self.state != 0 || self.needs_touch(now_ns)
    }

    /// Returns true while the flow is held. The hold expires if userspace does not end it.
    #[inline(always)]
    pub const fn is_held(&self, now_ns: u64) -> bool {
        self.state & state::HELD != 0 && !self.is_silent_for(HELD_NS, now_ns)
    }

    /// Returns true for a flow that the node began with the port of a VIP.
    #[inline(always)]
    pub(crate) const fn is_of_node(&self) -> bool {
        self.state & state::PASS != 0 && self.service == 0
    }

    /// Returns true for a UDP flow that conntrack translates. Only its replies keep it: they show
    /// that conntrack still has it. If not, nothing translates its datagrams until it expires.
    #[inline(always)]
    pub const fn is_of_conntrack(&self) -> bool {
        self.state & state::PASS != 0 && self.service != 0
    }

    /// Returns true for a flow whose packets go through the tunnel to the endpoint's node.
    #[inline(always)]
    pub const fn is_dsr(&self) -> bool {
        self.state & state::DSR != 0
    }

    /// Returns true for a flow whose packets are translated once, with both addresses.
    #[inline(always)]
    pub const fn has_twice_nat(&self) -> bool {
        self.state & state::TWICE_NAT != 0
    }

    /// Returns how long a silent flow is kept.
    pub const fn lifetime(&self, protocol: Protocol) -> core::time::Duration {
        core::time::Duration::from_secs(self.lifetime_seconds(protocol))
    }

    /// Returns true while a flow that was left to netfilter passes.
    #[inline(always)]
    pub const fn is_left(&self, now_ns: u64) -> bool {
        self.state & state::LEFT != 0 && !self.is_silent_for(LEFT_NS, now_ns)
    }

    /// Returns the seconds for which a silent flow is kept.
    #[inline(always)]
    const fn lifetime_seconds(&self, protocol: Protocol) -> u64 {
        match protocol {
            // The programs do not see the replies.
            Protocol::Udp | Protocol::Sctp if self.is_of_node() => lifetime::ANSWERED as u64,
            _ => lifetime::OF_FLOWS.seconds(self.state, protocol),
        }
    }
}

/// A flow with twice NAT, by one of its two entries, and the four entries that it has with two
/// translations: first the destination, where a packet of the client comes in, and then the source,
/// where it leaves.
#[derive(Clone, Copy, Debug)]
pub struct TwiceNat<'a> {
    /// The entry is that of [`Direction::Original`], and not that of
    /// [`Direction::MasqueradeReply`]. A constant, because the verifier follows each branch.
    pub is_original: bool,
    /// The key of the entry.
    pub key: &'a FlowKey,
    /// The entry.
    pub flow: &'a Flow,
    /// The port of the client between the translations, in host byte order.
    pub port: u16,
}

impl<'a> TwiceNat<'a> {
    /// Returns the client.
    #[inline(always)]
    pub const fn client(&self) -> &'a Endpoint {
        if self.is_original { &self.key.source } else { &self.flow.destination }
    }

    #[inline(always)]
    const fn vip(&self) -> &'a Endpoint {
        if self.is_original { &self.key.destination } else { &self.flow.source }
    }

    #[inline(always)]
    const fn endpoint(&self) -> &'a Endpoint {
        if self.is_original { &self.flow.destination } else { &self.key.source }
    }

    /// Returns the source that the endpoint sees.
    #[inline(always)]
    pub const fn node(&self) -> &'a Endpoint {
        if self.is_original { &self.flow.source } else { &self.key.destination }
    }

    /// Returns true if the entry is left from an earlier flow: `other`, the entry of the opposite
    /// direction, is of another flow. If the four entries are half written, it is of this one.
    #[inline(always)]
    pub fn is_left(&self, other: &Flow) -> bool {
        let is_half_written =
            self.is_original && !other.has_twice_nat() && other.destination.addr == self.client().addr;
        other.tuple() != self.flow.opposite(self.key).tuple() && !is_half_written
    }

    /// Returns the client between the translations.
    #[inline(always)]
    const fn inside(&self) -> Endpoint {
        Endpoint { port: self.port, ..*self.client() }
    }

    /// Returns the key of an entry.
    #[inline(always)]
    pub const fn key(&self, part: Direction) -> FlowKey {
        let (source, destination) = match part {
            Direction::Original => (*self.client(), *self.vip()),
            Direction::Reply => (*self.endpoint(), self.inside()),
            Direction::Masquerade => (self.inside(), *self.endpoint()),
            Direction::MasqueradeReply => (*self.endpoint(), *self.node()),
        };
        FlowKey { source, destination, proto: self.key.proto, direction: part as u8, zero: 0 }
    }

    /// Returns an entry.
    #[inline(always)]
    pub const fn flow(&self, part: Direction, acknowledged: u32) -> Flow {
        let (source, destination) = match part {
            Direction::Original => (self.inside(), *self.endpoint()),
            Direction::Reply => (*self.vip(), *self.client()),
            Direction::Masquerade => (*self.node(), *self.endpoint()),
            Direction::MasqueradeReply => (*self.endpoint(), self.inside()),
        };
        let state = self.flow.state & !state::TWICE_NAT;
        let flow = Flow { source, destination, state, acknowledged, ..*self.flow };
        match part {
            Direction::Original | Direction::Reply => flow,
            Direction::Masquerade | Direction::MasqueradeReply => {
                Flow { service: 0, generation: 0, state: state & state::SEEN & !state::MASQUERADE, ..flow }
            }
        }
    }
}

/// What the choice of a source port needs to know of another flow.
#[derive(Clone, Copy, Debug)]
pub struct PortUse {
    /// [`Flow::state`].
    pub state: u32,
    /// [`Flow::used_ns`].
    pub used_ns: u64,
}

impl PortUse {
    /// Returns true if a new flow may take the port. If `is_scarce`, it may also take the port of a
    /// connection that has just closed.
    #[inline(always)]
    pub const fn has_ended(&self, protocol: Protocol, is_scarce: bool, now_ns: u64) -> bool {
        let lifetimes = if is_scarce { &lifetime::OF_SCARCE_PORTS } else { &lifetime::OF_PORTS };
        is_over(self.used_ns, lifetimes.seconds(self.state, protocol) * SECOND, now_ns)
    }
}

/// Returns true if a time that began then is over. The sum does not wrap, because both numbers are
/// small. A saturating subtraction would be one more branch for the verifier.
#[inline(always)]
const fn is_over(began_ns: u64, duration_ns: u64, now_ns: u64) -> bool {
    now_ns >= began_ns.wrapping_add(duration_ns)
}

/// Returns the state bits that a packet sets. A reset of the endpoint is no answer: what the client
/// sends after it shows nothing.
#[inline(always)]
pub const fn observed_state(direction: Direction, tcp: TcpFlags) -> u32 {
    let (replied, closed) = match direction {
        Direction::Original | Direction::Masquerade => (0, state::CLIENT_CLOSED),
        Direction::Reply | Direction::MasqueradeReply => (state::REPLIED, state::ENDPOINT_CLOSED),
    };
    if tcp.has_rst() {
        return state::RESET;
    }
    replied | if tcp.has_fin() { closed } else { 0 }
}

/// The interval in which the time of the last packet is written, so that most packets write
/// nothing.
const TOUCH_NS: u64 = SECOND;

/// Updates state and time of a flow for a packet. Packets of one direction keep both entries alive,
/// and restore an evicted entry of the opposite direction.
#[inline(always)]
pub fn touch(tables: &impl Tables, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    let changed = observed & !flow.state | flow.state & !observed & state::UNTIL_NEXT;
    if changed != 0 || flow.needs_touch(now_ns) {
        update_entries(tables, key, flow, observed, now_ns);
    }
}

/// Does the same after [`Tables::observed_flow`], which has updated the entry of `key` itself.
/// The packet removes no bit. `flow` is as it was before.
#[inline(always)]
pub fn touch_observed(tables: &impl Tables, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    if flow.is_changed_by(observed, now_ns) {
        update_opposite(tables, key, flow, observed, now_ns);
    }
}

/// Notes that the client sent a SYN on an answered connection: the first one that is not answered,
/// and the first one that comes [`CHALLENGED_AGAIN_NS`] later. The time of the flow is then the
/// time of this SYN.
#[inline(always)]
pub fn note_syn(tables: &impl Tables, key: &FlowKey, flow: &Flow, now_ns: u64) {
    if flow.state & (state::SYNS_UNANSWERED | state::PASS) != 0 {
        return;
    }
    if flow.state & state::SYN_UNANSWERED == 0 {
        update_entries(tables, key, flow, state::SYN_UNANSWERED, now_ns);
    } else if flow.is_silent_for(CHALLENGED_AGAIN_NS, now_ns) {
        update_entries(tables, key, flow, state::SYN_UNANSWERED | state::SYNS_UNANSWERED, now_ns);
    }
}

/// Updates the time of a flow with [`state::PASS`], which has only one entry.
#[inline(always)]
pub fn touch_pass_entry(tables: &impl Tables, key: &FlowKey, flow: &Flow, now_ns: u64) {
    if flow.needs_touch(now_ns) {
        tables.touch_flow(key, flow, 0, now_ns);
    }
}

/// Moves the entries of a flow to the map of assured flows. `key` is that of the original
/// direction. Entries of another packet's flow that are there already stay. A flow with
/// [`state::PASS`] has only this entry.
#[inline(never)]
pub fn assure<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    let state = state::after(flow.state, observed) | state::ASSURED;
    let opposite = flow.opposite_key(key);
    let acknowledged = tables.flow(&opposite).map_or(0, |reply| reply.acknowledged);
    // One value for both entries, because stack is scarce.
    let mut flow = Flow { state, acknowledged: 0, used_ns: now_ns, ..*flow };
    if tables.assure_flow(key, &flow) && flow.state & state::PASS == 0 {
        (flow.source, flow.destination, flow.acknowledged) = (key.destination, key.source, acknowledged);
        tables.assure_flow(&opposite, &flow);
    }
}

/// Restores an evicted entry of the opposite direction, without the delay of [`touch`]. A datagram
/// to a client may leave through a second link above the first, where only that entry shows that it
/// was translated just now and is not of the node.
#[inline(never)]
pub fn keep_opposite<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow) {
    let opposite = flow.opposite_key(key);
    if tables.flow(&opposite).is_none() {
        tables.put_flow(&opposite, &flow.opposite(key));
    }
}

/// A function call of its own, because few packets need it.
#[inline(never)]
fn update_entries<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    tables.touch_flow(key, flow, observed, now_ns);
    write_opposite(tables, key, flow, observed, now_ns);
}

/// A function call of its own, because few packets need it.
#[inline(never)]
fn update_opposite<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    write_opposite(tables, key, flow, observed, now_ns);
}

/// Updates the entry of the opposite direction, if the flow has one.
#[inline(always)]
fn write_opposite(tables: &impl Tables, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    if flow.state & (state::PASS | state::DSR) != 0 {
        return;
    }
    let opposite_key = flow.opposite_key(key);
    let mut opposite = flow.opposite(key);
    opposite.used_ns = now_ns;
    if !tables.touch_flow(&opposite_key, &opposite, observed, now_ns) {
        opposite.state = state::after(opposite.state, observed);
        tables.put_flow(&opposite_key, &opposite);
    }
}
