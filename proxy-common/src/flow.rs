//! The life of a translated flow: its two entries, what its packets say of its state, and when it is over.

use crate::{
    Addr, Protocol,
    layout::{Direction, Endpoint, Flow, FlowKey, flow_state as state},
    packet::{TcpFlags, Tuple},
    tables::Tables,
};

const SECOND: u64 = 1_000_000_000;

/// The longest that packets of a flow are kept back; a thousandth of it is usual.
const HELD_NS: u64 = 10 * SECOND;

impl FlowKey {
    /// The key of packets of one direction.
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

    /// Returns the protocol. It is `None` only for a key that [`FlowKey::new`] did not make.
    pub const fn protocol(&self) -> Option<Protocol> {
        Protocol::from_number(self.proto)
    }

    /// Its packets before translation.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple {
        Tuple { source: self.source, destination: self.destination }
    }
}

impl Direction {
    #[inline(always)]
    const fn number_of_other(number: u8) -> u8 {
        number ^ 1
    }
}

impl Flow {
    /// Stands for no flow.
    pub const NONE: Self = Self {
        source: Endpoint::new(Addr::UNSPECIFIED_V6, 0),
        destination: Endpoint::new(Addr::UNSPECIFIED_V6, 0),
        service: 0,
        generation: 0,
        state: 0,
        list: 0,
        used_ns: 0,
    };

    /// Is [`Flow::NONE`]: a flow was used at some time.
    #[inline(always)]
    pub const fn is_none(&self) -> bool {
        self.used_ns == 0
    }

    /// Its packets after translation.
    #[inline(always)]
    pub const fn tuple(&self) -> Tuple {
        Tuple { source: self.source, destination: self.destination }
    }

    /// The key of the other direction of the flow whose one direction has this key and value.
    #[inline(always)]
    pub const fn opposite_key(&self, key: &FlowKey) -> FlowKey {
        let direction = Direction::number_of_other(key.direction);
        FlowKey { source: self.destination, destination: self.source, direction, ..*key }
    }

    /// The value of the other direction.
    #[inline(always)]
    pub const fn opposite(&self, key: &FlowKey) -> Self {
        Self { source: key.destination, destination: key.source, ..*self }
    }

    /// A TCP connection that both sides have closed, or one has reset: what comes after on the same ports is a new one.
    #[inline(always)]
    pub const fn is_closed(&self) -> bool {
        const BOTH: u32 = state::CLIENT_CLOSED | state::ENDPOINT_CLOSED;
        self.state & BOTH == BOTH || self.state & state::RESET != 0
    }

    /// A TCP connection that both sides have closed in good order.
    #[inline(always)]
    pub const fn is_finished(&self) -> bool {
        const BOTH: u32 = state::CLIENT_CLOSED | state::ENDPOINT_CLOSED;
        self.state & (BOTH | state::RESET) == BOTH
    }

    /// A TCP connection that an endpoint has accepted, that is not over, and that had packets in the last minute.
    #[inline(always)]
    pub const fn is_in_use(&self, now_ns: u64) -> bool {
        const SILENT: u64 = 60 * SECOND;
        self.state & state::REPLIED != 0 && !self.is_closed() && now_ns.saturating_sub(self.used_ns) <= SILENT
    }

    /// Whether it was silent for longer than flows of its kind are kept.
    #[inline(always)]
    pub const fn is_expired(&self, protocol: Protocol, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.used_ns) > self.lifetime_seconds(protocol) * SECOND
    }

    /// The time of its last packet is to be noted anew.
    #[inline(always)]
    const fn needs_touch(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.used_ns) >= TOUCH_NS
    }

    /// Its packets are kept back. That ends by itself, should userspace not come to end it.
    #[inline(always)]
    pub const fn is_held(&self, now_ns: u64) -> bool {
        self.state & state::HELD != 0 && now_ns.saturating_sub(self.used_ns) < HELD_NS
    }

    /// How long it is kept without a packet. No shorter than the kernel keeps its own entry for the flow, which masquerades it:
    /// the defaults of `nf_conntrack`, and for TCP those that kube-proxy sets (`KubeProxyConntrackConfiguration`).
    #[inline(always)]
    const fn lifetime_seconds(&self, protocol: Protocol) -> u64 {
        const CLOSED: u32 = state::CLIENT_CLOSED | state::ENDPOINT_CLOSED;
        let has_replied = self.state & state::REPLIED != 0;
        match protocol {
            Protocol::Udp | Protocol::Sctp if has_replied || self.state & state::PASS != 0 => 120,
            Protocol::Udp | Protocol::Sctp => 30,
            Protocol::Tcp if self.is_closed() || !has_replied => 120,
            Protocol::Tcp if self.state & CLOSED != 0 => 3_600,
            Protocol::Tcp => 86_400,
        }
    }
}

/// What a packet says of its flow.
#[inline(always)]
pub const fn observed_state(direction: Direction, tcp: TcpFlags) -> u32 {
    let (seen, closed) = match direction {
        Direction::Original => (0, state::CLIENT_CLOSED),
        Direction::Reply => (state::REPLIED, state::ENDPOINT_CLOSED),
    };
    let closed = if tcp.has_fin() { closed } else { 0 };
    let reset = if tcp.has_rst() { state::RESET } else { 0 };
    seen | closed | reset
}

/// The time of the last packet is noted no more often, so that most packets write nothing.
const TOUCH_NS: u64 = SECOND;

/// Notes a packet of a flow. Both directions are kept as long as packets of one pass, and one that the map dropped to make
/// room comes back.
#[inline(always)]
pub fn touch(tables: &impl Tables, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    let news = observed & !flow.state | flow.state & !observed & state::RESET;
    if news != 0 || flow.needs_touch(now_ns) {
        refresh(tables, key, flow, observed, now_ns);
    }
}

/// Notes a packet of a flow that is not translated, and so has no other direction.
#[inline(always)]
pub fn touch_pass_entry(tables: &impl Tables, key: &FlowKey, flow: &Flow, now_ns: u64) {
    if flow.needs_touch(now_ns) {
        tables.touch_flow(key, 0, now_ns);
    }
}

/// A call of its own, as few packets need it.
#[inline(never)]
fn refresh<T: Tables>(tables: &T, key: &FlowKey, flow: &Flow, observed: u32, now_ns: u64) {
    tables.touch_flow(key, observed, now_ns);
    if flow.state & state::PASS != 0 {
        return;
    }
    let opposite = flow.opposite_key(key);
    if !tables.touch_flow(&opposite, observed, now_ns) {
        let flow = Flow { state: state::after(flow.state, observed), used_ns: now_ns, ..flow.opposite(key) };
        tables.put_flow(&opposite, &flow);
    }
}
