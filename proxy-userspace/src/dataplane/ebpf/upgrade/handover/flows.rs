//! The maps of flows during a handover.

use std::{collections::BTreeMap, net::SocketAddr, ops::RangeInclusive, time::Duration};

use aya::maps::{HashMap, MapData};
use proxy_common::{
    flow::TwiceNat,
    layout::{Direction, Endpoint, Flow, FlowKey, flow_state},
    packet::Tuple,
    prefilter::{PrefilterItem, PrefilterTable, sized},
};

use super::{
    super::super::maps::{self, open_pinned},
    facts::{
        has_ended, is_masqueraded, is_translated_here, last_packet, passes, source_at_endpoint,
        state_of_conntrack, state_of_reserved, stays_behind,
    },
    ports_of,
};
use crate::{
    kernel::{
        KernelError,
        bpf::{MappedWords, PinDir},
        clock,
        conntrack::{AddressPair, Connection, TrackedConnection, Translator},
    },
    model::{IpFamily, Protocol},
    net::PortRange,
};

/// The maps of flows, with the prefilter that leads packets to them.
pub(super) struct Flows {
    assured: HashMap<MapData, FlowKey, Flow>,
    unassured: HashMap<MapData, FlowKey, Flow>,
    prefilter: MappedWords,
    /// The source ports of the flows that the programs masquerade.
    ports: RangeInclusive<u16>,
    /// When the maps were opened, on the monotonic clock.
    opened: Duration,
    /// The entries that connections had before they were held.
    before: Vec<(FlowKey, Option<Flow>)>,
}

/// The flows that the programs translate.
#[derive(Default)]
pub(super) struct Translated {
    /// Those that conntrack gets, unless it has them.
    pub(super) connections: BTreeMap<IpFamily, Vec<Connection>>,
    /// Those of these connections that have twice NAT.
    pub(super) with_twice_nat: Vec<(FlowKey, Flow)>,
    /// Those that have ended, and those of a flood.
    pub(super) behind: Vec<(FlowKey, Flow)>,
}

impl Flows {
    pub(super) fn open(pins: &PinDir) -> Result<Self, KernelError> {
        let PortRange { first, last } = ports_of(maps::pinned_node(pins.path())?);
        Ok(Self {
            ports: first..=last,
            assured: open_pinned(pins.path(), "flows")?,
            unassured: open_pinned(pins.path(), "unassured_flows")?,
            prefilter: pins.mapped("prefilter", PrefilterTable::LENGTH)?,
            opened: clock::monotonic().unwrap_or(Duration::ZERO),
            before: Vec::new(),
        })
    }

    /// Gives flows with twice NAT the entries of two translations, as the programs do with a packet
    /// that must go through the stack. Conntrack never had such a flow.
    pub(super) fn split(&mut self, flows: &[(FlowKey, Flow)]) {
        for (key, _) in flows {
            // Its packets may have changed it since it was listed.
            let Some(flow) = self.entry(key).filter(Flow::has_twice_nat) else { continue };
            if self.is_left(key, &flow) {
                self.remove(key);
            } else {
                self.split_flow(key, &flow);
            }
        }
    }

    /// Returns true if the map evicted the entry for replies, and another flow has the source port
    /// by now.
    fn is_left(&self, key: &FlowKey, flow: &Flow) -> bool {
        let parts = TwiceNat { is_original: true, key, flow, port: key.source.port };
        self.entry(&flow.opposite_key(key)).is_some_and(|reply| parts.is_left(&reply))
    }

    fn split_flow(&mut self, key: &FlowKey, flow: &Flow) {
        let mut parts = TwiceNat { is_original: true, key, flow, port: key.source.port };
        let is_taken = |part| {
            let other = self.entry(&parts.key(part));
            other.is_some_and(|other| other.tuple() != parts.flow(part, 0).tuple())
        };
        if is_taken(Direction::Reply) || is_taken(Direction::Masquerade) {
            parts.port = parts.node().port;
        }
        let acknowledged = |part| self.entry(&parts.key(part)).map_or(0, |entry| entry.acknowledged);
        let to_endpoint = acknowledged(Direction::Original);
        let to_client = acknowledged(Direction::MasqueradeReply);
        for (part, acknowledged) in [
            (Direction::Reply, to_client),
            (Direction::Masquerade, to_endpoint),
            (Direction::MasqueradeReply, to_client),
            (Direction::Original, to_endpoint),
        ] {
            self.write(parts.key(part), parts.flow(part, acknowledged));
        }
    }

    /// Lists the flows that the programs translate. Conntrack may have some of them.
    pub(super) fn list(&self) -> Translated {
        let now = clock::monotonic().unwrap_or(Duration::ZERO);
        let mut translated = Translated::default();
        for (key, flow) in self.assured.iter().chain(self.unassured.iter()).filter_map(Result::ok) {
            if key.direction() != Some(Direction::Original) || !is_translated_here(&flow) {
                continue;
            }
            let Some(connection) = self.untracked_connection(&key, &flow, now) else {
                translated.behind.push((key, flow));
                continue;
            };
            if flow.has_twice_nat() {
                translated.with_twice_nat.push((key, flow));
            }
            let family = IpFamily::of(connection.untranslated.source.ip());
            translated.connections.entry(family).or_default().push(connection);
        }
        translated
    }

    fn untracked_connection(&self, key: &FlowKey, flow: &Flow, now: Duration) -> Option<Connection> {
        let (protocol, untranslated) = (key.protocol()?, pair(key.tuple()));
        if has_ended(flow, protocol, now, now.saturating_sub(self.opened)) {
            return None;
        }
        let silence = now.saturating_sub(Duration::from_nanos(flow.used_ns));
        let mut original = pair(flow.tuple());
        let source = if flow.has_twice_nat() {
            std::mem::replace(&mut original.source, untranslated.source)
        } else {
            source_at_endpoint(flow, original.source, self.source(protocol, original))?
        };
        let reply = AddressPair { source: original.destination, destination: source };
        let expires_after = flow.lifetime(protocol).saturating_sub(silence);
        let tracked = TrackedConnection { protocol, original, reply, is_dnat: false };
        let is_closed = protocol.is_connection_oriented() && flow.is_closed();
        Some(Connection::untracked(tracked, untranslated, reply, expires_after, flow.is_assured(), is_closed))
    }

    /// Removes the entries of flows, which have the direction [`Direction::Original`]. Their next
    /// packets find netfilter. Flows that had a packet since they were listed stay: they may be
    /// conversations that have begun meanwhile. Returns their number.
    pub(super) fn forget(&mut self, flows: Vec<(FlowKey, Flow)>) -> usize {
        let mut stay = 0;
        for (key, listed) in flows {
            match self.entry(&key) {
                Some(flow) if flow.used_ns != listed.used_ns || !is_translated_here(&flow) => stay += 1,
                _ => self.remove_flow(&key, &listed),
            }
        }
        stay
    }

    /// Removes the entries of a flow.
    fn remove_flow(&mut self, of_client: &FlowKey, flow: &Flow) {
        let of_endpoint = flow.opposite_key(of_client);
        // A packet restores the entry of the other direction. Both may be on their way.
        for key in [of_endpoint, *of_client, of_endpoint] {
            self.remove(&key);
        }
        let Flow { source, destination, .. } = *flow;
        let direction = Direction::Masquerade as u8;
        let masquerade = FlowKey { source, destination, direction, ..*of_client };
        if let Some(masqueraded) = self.entry(&masquerade) {
            self.remove(&masqueraded.opposite_key(&masquerade));
            self.remove(&masquerade);
        }
    }

    /// Returns the source with which the programs masquerade a flow.
    fn source(&self, protocol: Protocol, original: AddressPair) -> Option<SocketAddr> {
        self.entry(&key(Direction::Masquerade, protocol, original)).map(|flow| flow.source.into())
    }

    /// Returns a flow that the programs translate.
    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        self.entry(key).filter(is_translated_here)
    }

    /// Returns the entry of a flow, which the programs translate or pass.
    fn entry(&self, key: &FlowKey) -> Option<Flow> {
        self.assured.get(key, 0).or_else(|_| self.unassured.get(key, 0)).ok()
    }

    /// Passes the packets of a flow that conntrack translates, unless the programs translate it.
    /// The entry must not outlive that of conntrack: a new conversation from the same client port
    /// would pass too, and nothing would translate it.
    /// `stream_timeout` is how long conntrack keeps an assured flow.
    pub(super) fn leave(&mut self, udp: &Connection, service: u32, stream_timeout: Option<Duration>) {
        let TrackedConnection { original, reply, .. } = udp.tracked;
        let entry = self.entry(&key(Direction::Original, Protocol::Udp, original));
        if entry.is_some_and(|flow| !passes(&flow)) {
            return;
        }
        let state = state_of_conntrack(udp.is_assured(), stream_timeout);
        let destination = Endpoint::from(reply.source);
        let flow = Flow { service, destination, state, ..untranslated_flow(Protocol::Udp, original, 0) };
        let used_ns =
            last_packet(self.opened, flow.lifetime(Protocol::Udp), udp.expires_after(), entry.as_ref());
        self.put_entry(Protocol::Udp, original, Flow { used_ns, ..flow });
    }

    /// Keeps the source port of a connection that conntrack translates, if the programs could give
    /// it to another flow to the endpoint.
    pub(super) fn reserve_source(&mut self, connection: &Connection) {
        let TrackedConnection { protocol, original, reply, is_dnat } = &connection.tracked;
        let is_masqueraded = reply.destination.ip() != original.source.ip();
        let direction = match is_masqueraded {
            true if self.ports.contains(&reply.destination.port()) => Direction::MasqueradeReply,
            false if *is_dnat => Direction::Reply,
            _ => return,
        };
        let key = key(direction, *protocol, *reply);
        if self.entry(&key).is_some() {
            return;
        }
        let flow = untranslated_flow(*protocol, *reply, state_of_reserved(connection.is_over()));
        let used_ns = if is_masqueraded {
            clock::nanos(self.opened)
        } else {
            // The programs do not see its replies.
            last_packet(self.opened, flow.lifetime(*protocol), connection.expires_after(), None)
        };
        let flow = Flow { used_ns: used_ns.max(1), ..flow };
        if let Err(error) = self.assured.insert(key, flow, 0) {
            tracing::debug!(%error, "cannot reserve the source port of a connection: its replies may be lost");
        }
    }

    /// Passes the packets of a TCP connection that conntrack translates, unless the programs
    /// translate it.
    pub(super) fn leave_connection(&mut self, pair: AddressPair) {
        if self.flow(&key(Direction::Original, Protocol::Tcp, pair)).is_none() {
            self.put(Protocol::Tcp, pair, untranslated_flow(Protocol::Tcp, pair, 0));
        }
    }

    /// Returns true if the programs translate a connection of conntrack that is to be handed over.
    fn is_translated(&self, connection: &Connection) -> bool {
        let TrackedConnection { protocol, original, .. } = connection.tracked;
        let of_client = key(Direction::Original, protocol, connection.untranslated);
        let Some(flow) = self.entry(&of_client) else {
            // The next packet of the endpoint restores the entry.
            return self.untranslated(&connection.tracked) == Some(connection.untranslated);
        };
        is_translated_here(&flow) && pair(flow.tuple()) == original && !self.stays_behind(&flow, protocol)
    }

    /// Returns true for a flow that conntrack need not have, even if it has an entry.
    fn stays_behind(&self, flow: &Flow, protocol: Protocol) -> bool {
        let now = clock::monotonic().unwrap_or(Duration::ZERO);
        stays_behind(flow, protocol, now, now.saturating_sub(self.opened))
    }

    /// Takes the entries that a connection had before it was held.
    fn take_before(&mut self, connection: &Connection) -> Vec<(FlowKey, Option<Flow>)> {
        let keys = changed_keys(connection);
        self.before.extract_if(.., |(key, _)| keys.contains(key)).collect()
    }

    /// Removes an entry, if there is one.
    fn remove(&mut self, key: &FlowKey) {
        for flows in [&mut self.assured, &mut self.unassured] {
            if let Err(error) = maps::removed("flows", flows.remove(key)) {
                tracing::debug!(%error, "cannot remove a flow that is handed over: the connection may break");
            }
        }
    }

    /// Sets what the programs do at ingress with packets that have these addresses.
    fn put(&mut self, protocol: Protocol, pair: AddressPair, flow: Flow) {
        let used_ns = clock::nanos(clock::monotonic().unwrap_or(Duration::ZERO));
        self.put_entry(protocol, pair, Flow { used_ns, ..flow });
    }

    /// Does the same for a flow with the time of its last packet.
    fn put_entry(&mut self, protocol: Protocol, pair: AddressPair, flow: Flow) {
        let key = key(Direction::Original, protocol, pair);
        // 0 would be no flow.
        self.write(key, Flow { used_ns: flow.used_ns.max(1), ..flow });
        let Endpoint { addr, port, .. } = key.destination;
        sized::insert(&self.prefilter, PrefilterItem::of_service(&addr, port));
    }

    /// Writes an entry, and removes one that the programs wrote to the map of flows that are not
    /// assured: it would count again once the map of assured flows has evicted this one. A program
    /// that found no entry just before may still write one.
    fn write(&mut self, key: FlowKey, flow: Flow) {
        let flows = if flow.is_assured() { &mut self.assured } else { &mut self.unassured };
        let mut written = flows.insert(key, flow, 0).map_err(maps::failed("write", "flows"));
        if written.is_ok() && flow.is_assured() {
            written = maps::removed("unassured_flows", self.unassured.remove(&key));
        }
        if let Err(error) = written {
            tracing::debug!(%error, "cannot write a flow that is handed over: the connection may break");
        }
    }
}

impl Translator for Flows {
    /// A flow that ended is not handed over: if another connection with the same addresses began
    /// since, conntrack would lose that one. Nor are the flows of a flood.
    fn untranslated(&self, tracked: &TrackedConnection) -> Option<AddressPair> {
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, tracked.original.swapped()))?;
        (!self.stays_behind(&flow, tracked.protocol)).then(|| pair(flow.tuple().swapped()))
    }

    /// Conntrack sees packets before the programs masquerade them.
    fn masqueraded_source(&self, tracked: &TrackedConnection) -> Option<SocketAddr> {
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, tracked.original.swapped()))?;
        self.source(tracked.protocol, tracked.original).filter(|_| is_masqueraded(&flow))
    }

    /// A flow that expired meanwhile may have been left to netfilter with its next datagram.
    fn hold(&mut self, connection: &Connection) -> bool {
        let protocol = connection.tracked.protocol;
        if !self.is_translated(connection) {
            return false;
        }
        let keys = changed_keys(connection);
        let before = keys.map(|key| (key, self.entry(&key)));
        self.before.extend(before);
        for pair in [connection.untranslated, connection.reply] {
            let held = untranslated_flow(protocol, pair, flow_state::HELD);
            let flow = self.flow(&key(Direction::Original, protocol, pair)).unwrap_or(held);
            // A held entry is in `flows` even if the flow was not assured. A program that assures
            // the flow at this moment finds the entry and does not replace it.
            let state = flow.state | flow_state::HELD | flow_state::ASSURED;
            self.put(protocol, pair, Flow { state, ..flow });
        }
        // From now on the replies meet the entry that holds them.
        keys[2..].iter().for_each(|key| self.remove(key));
        true
    }

    fn release(&mut self, connection: &Connection) {
        let protocol = connection.tracked.protocol;
        self.take_before(connection);
        for pair in [connection.untranslated, connection.reply] {
            self.put(protocol, pair, untranslated_flow(protocol, pair, 0));
        }
    }

    fn restore(&mut self, connection: &Connection) {
        for (key, flow) in self.take_before(connection) {
            self.remove(&key);
            if let Some(flow) = flow {
                self.write(key, flow);
            }
        }
    }
}

/// Returns the entries that holding a connection writes, and then those that it removes.
fn changed_keys(connection: &Connection) -> [FlowKey; 4] {
    let TrackedConnection { protocol, original, .. } = connection.tracked;
    [
        key(Direction::Original, protocol, connection.untranslated),
        key(Direction::Original, protocol, connection.reply),
        key(Direction::MasqueradeReply, protocol, connection.reply),
        key(Direction::Masquerade, protocol, original),
    ]
}

/// Returns a flow that the programs do not translate.
fn untranslated_flow(protocol: Protocol, pair: AddressPair, state: u32) -> Flow {
    let FlowKey { source, destination, .. } = key(Direction::Original, protocol, pair);
    let passed = flow_state::PASS | flow_state::ASSURED | flow_state::REPLIED;
    Flow { source, destination, state: passed | state, ..Flow::NONE }
}

fn key(direction: Direction, protocol: Protocol, pair: AddressPair) -> FlowKey {
    let AddressPair { source, destination } = pair;
    let [source, destination] = [source, destination].map(Endpoint::from);
    FlowKey::new(direction, protocol, Tuple { source, destination })
}

/// Returns source and destination as conntrack has them.
pub(crate) fn pair(Tuple { source, destination }: Tuple) -> AddressPair {
    AddressPair { source: source.into(), destination: destination.into() }
}
