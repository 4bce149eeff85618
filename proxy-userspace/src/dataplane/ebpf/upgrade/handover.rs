//! Hands connections over to conntrack, one by one, when netfilter takes over from the link
//! programs: rules of another mode, or of the backstop. The programs still run meanwhile.
//! Afterwards nothing needs them. The reverse leaves flows to conntrack when the programs take
//! over.
//!
//! At first the programs take no new flow any more. For another mode, all Services are removed from
//! the maps. Then each flow is held: the programs drop packets of both directions at ingress, and
//! the senders retransmit them. Once conntrack has the connection, the programs pass all its
//! packets.

use std::{collections::BTreeSet, net::SocketAddr, ops::RangeInclusive, path::Path, time::Duration};

use aya::{
    Pod,
    maps::{Array, HashMap, MapData},
};
use proxy_common::{
    Addr,
    layout::{
        Direction, Endpoint, Flow, FlowKey, LAYOUT_VERSION, List, Masquerading, MemberKey, NewFlows,
        NodeValue, STATE_LAYOUT_VERSION, ServiceKey, ServiceValue, UdpSocket, flow_state,
    },
    packet::Tuple,
    prefilter::{PrefilterItem, PrefilterTable, sized},
};

use super::super::{
    State,
    maps::{self, open_pinned},
    plan::{has_table, step::DirectEpoch},
};
use crate::{
    kernel::{
        KernelError,
        bpf::{MappedWords, PinDir, Reader},
        clock,
        conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection, Translator},
    },
    model::{IpFamily, Protocol},
    net::PortRange,
};

/// Hands over the connections of the link programs that are pinned in this directory. Does nothing
/// if there are no programs, or if their maps have another layout.
pub(crate) fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, KernelError> {
    let mut counts = HandoverCounts::default();
    let Some(pins) = PinDir::existing(pin_dir)? else { return Ok(counts) };
    let Some((layout, STATE_LAYOUT_VERSION)) = maps::pinned_layouts(pins.path()) else { return Ok(counts) };
    track_flows(&pins)?;
    if layout == LAYOUT_VERSION {
        leave_new_flows(&pins)?;
    }
    clear::<ServiceKey, ServiceValue>(&pins, "services")?;
    // They keep their endpoints. If this mode returns before its programs are removed, the Services
    // have other identifiers, and the sockets would be destroyed.
    clear::<u64, UdpSocket>(&pins, "udp_sockets")?;
    counts += hand_flows(&pins)?;
    Ok(counts)
}

/// The ports with which programs of any version may masquerade by default.
pub const POSSIBLE_PORTS: PortRange = PortRange { first: 1, last: 32_767 };

/// Returns the source ports with which the pinned link programs masquerade.
pub(crate) fn masquerade_ports(pin_dir: &Path) -> Result<Option<PortRange>, KernelError> {
    let pins = match PinDir::existing(pin_dir) {
        Err(KernelError::NoBpffs(_)) => None,
        pins => pins?,
    };
    let Some(pins) = pins else { return Ok(None) };
    if pins.link_names()?.is_empty() {
        return Ok(None);
    }
    if maps::pinned_layouts(pins.path()).is_none_or(|(layout, _)| layout != LAYOUT_VERSION) {
        return Ok(Some(POSSIBLE_PORTS));
    }
    let node: Array<MapData, NodeValue> = open_pinned(pins.path(), "node")?;
    let node = node.get(&0, 0).map_err(KernelError::bpf("read", "map node"))?;
    let ports = PortRange { first: node.first_port, last: node.last_port };
    Ok((node.masquerading != Masquerading::Netfilter as u16).then_some(ports))
}

/// Hands over the flows in the map. The programs already leave new flows to netfilter.
///
/// A packet that was in a program at that moment may begin one more flow, and conntrack has it only
/// when the packet leaves the node. The second pass finds it. The flows that conntrack still does
/// not have then had no packet since conntrack began to track connections on this node.
pub(crate) fn hand_flows(pins: &PinDir) -> Result<HandoverCounts, KernelError> {
    let mut flows = Flows::open(pins)?;
    let mut counts = HandoverCounts::default();
    for _ in 0..2 {
        for family in IpFamily::ALL {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                counts += conntrack::hand_over(family, protocol, &mut flows)?;
            }
        }
    }
    for family in IpFamily::ALL {
        let untracked = flows.untracked(family);
        counts += conntrack::hand_over_untracked(family, &untracked, &mut flows)?;
    }
    Ok(counts)
}

/// Adds entries to conntrack for the flows that the programs translate. Otherwise conntrack could
/// give a new connection the addresses and ports of such a flow: a client may use one port for
/// several VIPs, and these may have the same endpoint. Does nothing if conntrack cannot be written.
pub(crate) fn track_flows(pins: &PinDir) -> Result<(), KernelError> {
    let flows = Flows::open(pins)?;
    let track = |family| conntrack::track(family, &flows.untracked(family));
    match IpFamily::ALL.into_iter().try_for_each(track) {
        Err(KernelError::NoConntrackNetlink(_)) => Ok(()),
        tracked => tracked,
    }
}

/// The maps of flows, in the order in which programs look for a flow.
pub(crate) const FLOW_MAPS: [&str; 2] = ["flows", "unassured_flows"];

/// Removes these entries of a map of flows. `capacity` is the size of the map.
pub(crate) fn forget(
    pins: &PinDir,
    map: &'static str,
    mut entries: Reader<FlowKey, Flow>,
    capacity: u32,
    is_forgotten: &dyn Fn(&FlowKey, &Flow) -> bool,
) -> Result<(), KernelError> {
    let mut flows: HashMap<MapData, FlowKey, Flow> = open_pinned(pins.path(), map)?;
    for _ in 0..Reader::<FlowKey, Flow>::max_calls(capacity) {
        for (key, flow) in entries.read().map_err(KernelError::call("read map", map))? {
            if is_forgotten(&key, &flow) {
                maps::removed(map, flows.remove(&key))?;
            }
        }
        if entries.is_at_beginning() {
            break;
        }
    }
    Ok(())
}

/// Makes the programs pass the packets of UDP flows that conntrack translates to serving endpoints,
/// and of TCP connections that are not established yet. A SYN that the client retransmits must not
/// begin another connection. The same for all TCP connections of Services with Maglev tables.
/// Returns the number of these flows.
pub(crate) fn leave_flows(pins: &PinDir, state: &State) -> Result<usize, KernelError> {
    let mut flows = Flows::open(pins)?;
    let mut count = 0;
    for family in IpFamily::ALL {
        conntrack::for_each_connection(family, Protocol::Udp, &mut |udp| {
            flows.reserve_source(udp);
            if let Some(service) = service_of(&udp.tracked, state) {
                flows.leave(udp, service);
                count += 1;
            }
        })?;
        conntrack::for_each_connection(family, Protocol::Tcp, &mut |tcp| {
            flows.reserve_source(tcp);
            let is_adopted = |value: &ServiceValue| has_table(value) && !tcp.is_over();
            let stays = |value: &ServiceValue| {
                tcp.is_half_open() && tcp.tracked.is_dnat || is_translated(tcp) && is_adopted(value)
            };
            let vip = tcp.tracked.original.destination;
            if service_at(vip, Protocol::Tcp, state).is_some_and(stays) {
                flows.leave_connection(tcp.tracked.original);
                count += 1;
            }
        })?;
    }
    Ok(count)
}

/// Makes the programs pass the packets of TCP connections to these frontends that conntrack
/// translates. Returns the number of these connections.
///
/// Other connections need no entry: netfilter refuses no segment that conntrack translates. But if
/// a frontend has a Maglev table, the programs adopt connections that they do not know.
pub(crate) fn leave_connections(
    pins: &PinDir,
    state: &State,
    frontends: &BTreeSet<ServiceKey>,
) -> Result<usize, KernelError> {
    let mut flows = Flows::open(pins)?;
    let mut count = 0;
    for family in IpFamily::ALL {
        conntrack::for_each_connection(family, Protocol::Tcp, &mut |tcp| {
            let mut keys = keys_at(tcp.tracked.original.destination, Protocol::Tcp, state);
            if is_translated(tcp) && !tcp.is_over() && keys.any(|key| frontends.contains(&key)) {
                flows.leave_connection(tcp.tracked.original);
                count += 1;
            }
        })?;
    }
    Ok(count)
}

/// Returns true if conntrack or IPVS translates the destination of a connection.
fn is_translated(connection: &Connection) -> bool {
    let TrackedConnection { original, reply, .. } = &connection.tracked;
    reply.source != original.destination
}

/// Returns the service identifier of a UDP flow that conntrack translates, if its endpoint serves.
fn service_of(tracked: &TrackedConnection, state: &State) -> Option<u32> {
    let TrackedConnection { original, reply, is_dnat, .. } = tracked;
    let service = service_at(original.destination, Protocol::Udp, state)?.service;
    let member = MemberKey { service, list: List::Serving.number(), endpoint: Endpoint::from(reply.source) };
    (*is_dnat && state.members.contains(&member)).then_some(service)
}

/// Returns the Service of a VIP.
fn service_at(vip: SocketAddr, protocol: Protocol, state: &State) -> Option<&ServiceValue> {
    keys_at(vip, protocol, state).find_map(|key| state.service(&key))
}

/// Returns the keys that a VIP may have: that of its address, and that of a node port.
fn keys_at(vip: SocketAddr, protocol: Protocol, state: &State) -> impl Iterator<Item = ServiceKey> {
    let vip = Endpoint::from(vip);
    let is_node_address = state.node_addresses.contains(&vip.addr.node_address());
    let node_port = is_node_address.then(|| vip.addr.any());
    [vip.addr].into_iter().chain(node_port).map(move |addr| ServiceKey::new(addr, vip.port, protocol))
}

/// Leaves new flows to netfilter. If this mode returns before its programs are removed, its process
/// then knows that conntrack has flows that the programs do not know.
fn leave_new_flows(pins: &PinDir) -> Result<(), KernelError> {
    let mut node: Array<MapData, NodeValue> = open_pinned(pins.path(), "node")?;
    maps::update_node(&mut node, |node| {
        node.new_flows = NewFlows::Leave as u16;
        // Packets on the direct path would not be held.
        node.direct_epoch = DirectEpoch(node.direct_epoch).off().0;
    })
}

/// Removes all entries of a map.
fn clear<K: Pod, V: Pod>(pins: &PinDir, map: &'static str) -> Result<(), KernelError> {
    let mut entries: HashMap<MapData, K, V> = open_pinned(pins.path(), map)?;
    let keys: Vec<K> = entries.keys().filter_map(Result::ok).collect();
    keys.iter().try_for_each(|key| maps::removed(map, entries.remove(key)))
}

/// The maps of flows, with the prefilter that leads packets to them.
struct Flows {
    assured: HashMap<MapData, FlowKey, Flow>,
    unassured: HashMap<MapData, FlowKey, Flow>,
    prefilter: MappedWords,
    /// The source ports of the flows that the programs masquerade.
    ports: RangeInclusive<u16>,
    /// When the maps were opened, on the monotonic clock.
    opened: Duration,
}

impl Flows {
    fn open(pins: &PinDir) -> Result<Self, KernelError> {
        let node: Array<MapData, NodeValue> = open_pinned(pins.path(), "node")?;
        let node = node.get(&0, 0).map_err(KernelError::bpf("read", "map node"))?;
        Ok(Self {
            ports: node.first_port..=node.last_port,
            assured: open_pinned(pins.path(), "flows")?,
            unassured: open_pinned(pins.path(), "unassured_flows")?,
            prefilter: pins.mapped("prefilter", PrefilterTable::LENGTH)?,
            opened: clock::monotonic().unwrap_or(Duration::ZERO),
        })
    }

    /// Returns the flows of a family that the programs translate. Conntrack may have some of them.
    fn untracked(&self, family: IpFamily) -> Vec<Connection> {
        let now = clock::monotonic().unwrap_or(Duration::ZERO);
        let entries = self.assured.iter().chain(self.unassured.iter());
        let connection = |(key, flow): (FlowKey, Flow)| {
            let untranslated = pair(key.tuple());
            let is_original = key.direction() == Some(Direction::Original) && is_translated_here(&flow);
            if !is_original || IpFamily::of(untranslated.source.ip()) != family {
                return None;
            }
            self.untracked_connection(key.protocol()?, untranslated, &flow, now)
        };
        entries.filter_map(Result::ok).filter_map(connection).collect()
    }

    fn untracked_connection(
        &self,
        protocol: Protocol,
        untranslated: AddressPair,
        flow: &Flow,
        now: Duration,
    ) -> Option<Connection> {
        if stays_behind(flow, protocol, now, now.saturating_sub(self.opened)) {
            return None;
        }
        let silence = now.saturating_sub(Duration::from_nanos(flow.used_ns));
        if !protocol.is_connection_oriented() && silence >= CONVERSATION_FOR {
            return None;
        }
        let original = pair(flow.tuple());
        let source = source_at_endpoint(flow, original.source, self.source(protocol, original))?;
        let reply = AddressPair { source: original.destination, destination: source };
        let expires_after = flow.lifetime(protocol).saturating_sub(silence);
        let tracked = TrackedConnection { protocol, original, reply, is_dnat: false };
        let is_closed = protocol.is_connection_oriented() && flow.is_closed();
        Some(Connection::untracked(tracked, untranslated, reply, expires_after, flow.is_assured(), is_closed))
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
    fn leave(&mut self, udp: &Connection, service: u32) {
        let TrackedConnection { original, reply, .. } = udp.tracked;
        let entry = self.entry(&key(Direction::Original, Protocol::Udp, original));
        if entry.is_some_and(|flow| !passes(&flow)) {
            return;
        }
        let replied = if udp.is_assured() { flow_state::REPLIED } else { 0 };
        let state = flow_state::PASS | flow_state::ASSURED | replied;
        let destination = Endpoint::from(reply.source);
        let flow = Flow { service, destination, state, ..untranslated_flow(Protocol::Udp, original, 0) };
        let used_ns =
            last_packet(self.opened, flow.lifetime(Protocol::Udp), udp.expires_after(), entry.as_ref());
        self.put_entry(Protocol::Udp, original, Flow { used_ns, ..flow });
    }

    /// Keeps the source port of a connection that conntrack translates, if the programs could give
    /// it to another flow to the endpoint.
    fn reserve_source(&mut self, connection: &Connection) {
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
        let flow = untranslated_flow(*protocol, *reply, 0);
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
    fn leave_connection(&mut self, pair: AddressPair) {
        if self.flow(&key(Direction::Original, Protocol::Tcp, pair)).is_none() {
            self.put(Protocol::Tcp, pair, untranslated_flow(Protocol::Tcp, pair, 0));
        }
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
        let flow = Flow { used_ns: flow.used_ns.max(1), ..flow };
        let flows = if flow.is_assured() { &mut self.assured } else { &mut self.unassured };
        if let Err(error) = flows.insert(key, flow, 0) {
            tracing::debug!(%error, "cannot write a flow that is handed over: the connection may break");
        }
        let Endpoint { addr, port, .. } = key.destination;
        sized::insert(&self.prefilter, PrefilterItem::of_service(&addr, port));
    }
}

/// Returns true for the entries of flows that the programs masquerade with this address.
pub(crate) fn has_source(address: Addr, key: &FlowKey, flow: &Flow) -> bool {
    match key.direction() {
        Some(Direction::Masquerade) => flow.source.addr == address,
        Some(Direction::MasqueradeReply) => key.destination.addr == address,
        _ => false,
    }
}

/// Returns true if the programs or netfilter masquerade a flow.
const fn is_masqueraded(flow: &Flow) -> bool {
    flow.state & flow_state::MASQUERADE != 0
}

/// Returns the source that the endpoint of a flow sees. `of_programs` is the source with which the
/// programs masquerade flows with this client and endpoint. It may be that of an earlier flow: the
/// client may have used its port for another VIP.
///
/// Returns `None` if netfilter masquerades the flow: only conntrack knows the source. If conntrack
/// has forgotten it, the flow has ended. An entry without the source would let a new flow of the
/// same client port reach the endpoint without being masqueraded.
fn source_at_endpoint(
    flow: &Flow,
    client: SocketAddr,
    of_programs: Option<SocketAddr>,
) -> Option<SocketAddr> {
    if is_masqueraded(flow) { of_programs } else { Some(client) }
}

/// Returns true if no packet of a flow goes through the stack.
pub(crate) const fn is_whole(flow: &Flow) -> bool {
    flow.state & flow_state::WHOLE != 0
}

/// Returns true if the programs pass the packets of a flow unchanged.
pub(crate) const fn passes(flow: &Flow) -> bool {
    flow.state & flow_state::PASS != 0
}

/// Returns true if the programs translate the packets of a flow, and do not pass them or send them
/// to another node.
const fn is_translated_here(flow: &Flow) -> bool {
    !passes(flow) && !flow.is_dsr()
}

/// Returns the time of the last packet of a flow that conntrack translates, in nanoseconds of the
/// monotonic clock. The list of conntrack's entries began at `listed`.
///
/// A packet may have passed since its entry was read. Conntrack then keeps the entry longer than it
/// said, and `entry`, which the programs have, knows the time.
fn last_packet(
    listed: Duration,
    lifetime: Duration,
    expires_after: Option<Duration>,
    entry: Option<&Flow>,
) -> u64 {
    let silence = expires_after.map_or(Duration::ZERO, |left| lifetime.saturating_sub(left));
    clock::nanos(listed.saturating_sub(silence)).max(entry.map_or(0, |flow| flow.used_ns))
}

/// A closed connection that was silent for this long gets no packets any more. Its client port may
/// be in use again.
const CLOSED_FOR: Duration = Duration::from_secs(2);
/// A flow that is not assured and was silent for this long is neither a handshake nor a question
/// that waits for its answer. After a flood there are tens of thousands, and each takes about a
/// millisecond.
const UNASSURED_FOR: Duration = Duration::from_secs(3);
/// From this time on, flows that are not assured stay behind. A flood may begin them faster than
/// they are handed over.
const UNASSURED_WITHIN: Duration = Duration::from_secs(5);

/// After this silence conntrack forgets a conversation (`nf_conntrack_udp_timeout`). The client may
/// use its port for another one.
const CONVERSATION_FOR: Duration = Duration::from_secs(30);

/// Returns true for a flow that conntrack need not have, at a time after the handover began.
fn stays_behind(flow: &Flow, protocol: Protocol, now: Duration, after: Duration) -> bool {
    let silence = now.saturating_sub(Duration::from_nanos(flow.used_ns));
    flow.is_expired(protocol, clock::nanos(now))
        || protocol.is_connection_oriented() && flow.is_closed() && silence >= CLOSED_FOR
        || !flow.is_assured() && (silence >= UNASSURED_FOR || after >= UNASSURED_WITHIN)
}

impl Translator for Flows {
    /// A flow that ended is not handed over: if another connection with the same addresses began
    /// since, conntrack would lose that one. Nor are the flows of a flood.
    fn untranslated(&mut self, tracked: &TrackedConnection) -> Option<AddressPair> {
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, tracked.original.swapped()))?;
        let now = clock::monotonic().unwrap_or(Duration::ZERO);
        if stays_behind(&flow, tracked.protocol, now, now.saturating_sub(self.opened)) {
            return None;
        }
        Some(pair(flow.tuple().swapped()))
    }

    /// Conntrack sees packets before the programs masquerade them.
    fn masqueraded_source(&mut self, tracked: &TrackedConnection) -> Option<SocketAddr> {
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, tracked.original.swapped()))?;
        self.source(tracked.protocol, tracked.original).filter(|_| is_masqueraded(&flow))
    }

    /// A flow that expired meanwhile may have been left to netfilter with its next datagram.
    fn hold(&mut self, connection: &Connection) -> bool {
        let TrackedConnection { protocol, original, .. } = connection.tracked;
        let of_client = key(Direction::Original, protocol, connection.untranslated);
        let is_left = self.entry(&of_client).is_some_and(|flow| passes(&flow));
        if is_left || self.untranslated(&connection.tracked) != Some(connection.untranslated) {
            return false;
        }
        for pair in [connection.untranslated, connection.reply] {
            let held = untranslated_flow(protocol, pair, flow_state::HELD);
            let flow = self.flow(&key(Direction::Original, protocol, pair)).unwrap_or(held);
            // A held entry is in `flows` even if the flow was not assured. A program that assures
            // the flow at this moment finds the entry and does not replace it.
            let state = flow.state | flow_state::HELD | flow_state::ASSURED;
            self.put(protocol, pair, Flow { state, ..flow });
        }
        // From now on the replies meet the entry that holds them.
        self.remove(&key(Direction::MasqueradeReply, protocol, connection.reply));
        self.remove(&key(Direction::Masquerade, protocol, original));
        true
    }

    fn release(&mut self, connection: &Connection) {
        let protocol = connection.tracked.protocol;
        for pair in [connection.untranslated, connection.reply] {
            self.put(protocol, pair, untranslated_flow(protocol, pair, 0));
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_000);

    /// Returns true if a TCP flow in this state stays behind after this silence, at this time after
    /// the handover began.
    fn stays(state: u32, silent_seconds: u64, after_seconds: u64) -> bool {
        let [silence, after] = [silent_seconds, after_seconds].map(Duration::from_secs);
        let flow = Flow { state, used_ns: clock::nanos(NOW.saturating_sub(silence)), ..Flow::NONE };
        stays_behind(&flow, Protocol::Tcp, NOW, after)
    }

    #[test]
    fn packet_that_passed_after_conntrack_was_read_keeps_its_flow() {
        const LIFETIME: Duration = Duration::from_secs(30);
        let left = Some(Duration::from_secs(1));
        assert_eq!(last_packet(NOW, LIFETIME, left, None), clock::nanos(Duration::from_secs(971)));
        let answered = Flow { used_ns: clock::nanos(NOW), ..Flow::NONE };
        assert_eq!(last_packet(NOW, LIFETIME, left, Some(&answered)), clock::nanos(NOW));
    }

    #[test]
    fn flow_gets_the_source_that_its_endpoint_sees_or_no_entry() {
        let client = SocketAddr::from(([192, 0, 2, 1], 40_000));
        let node = SocketAddr::from(([192, 0, 2, 9], 20_000));
        let masqueraded = Flow { state: flow_state::MASQUERADE, ..Flow::NONE };
        assert_eq!(source_at_endpoint(&masqueraded, client, None), None);
        assert_eq!(source_at_endpoint(&masqueraded, client, Some(node)), Some(node));
        for of_earlier_flow in [None, Some(node)] {
            assert_eq!(source_at_endpoint(&Flow::NONE, client, of_earlier_flow), Some(client));
        }
    }

    #[test]
    fn handshakes_are_handed_over_and_the_flows_of_a_flood_stay_behind() {
        for state in [0, flow_state::REPLIED] {
            assert!(!stays(state, 1, 1), "a handshake");
            assert!(stays(state, 3, 1), "a forged SYN some time ago");
            assert!(stays(state, 1, 5), "a flood that goes on");
        }
    }

    #[test]
    fn assured_connections_are_handed_over_until_they_have_closed() {
        const OPEN: u32 = flow_state::REPLIED | flow_state::ASSURED;
        assert!(!stays(OPEN, 900, 60));
        assert!(!stays(OPEN | flow_state::RESET, 1, 60), "its last segments");
        assert!(stays(OPEN | flow_state::RESET, 2, 0));
    }
}
