//! Hands connections over to conntrack, one by one, when netfilter takes over from the link
//! programs: rules of another mode, or of the backstop. The programs still run meanwhile.
//! Afterwards nothing needs them. The reverse leaves flows to conntrack when the programs take
//! over.
//!
//! At first the programs take no new flow any more. For another mode, all Services are removed from
//! the maps. Then each flow is held: the programs drop packets of both directions at ingress, and
//! the senders retransmit them. Once conntrack has the connection, the programs pass all its
//! packets.

mod facts;
mod flows;

use std::{collections::BTreeSet, net::SocketAddr, path::Path};

use aya::{
    Pod,
    maps::{Array, HashMap, MapData},
};
use proxy_common::layout::{
    Endpoint, Flow, FlowKey, LAYOUT_VERSION, List, Masquerading, MemberKey, NewFlows, NodeValue,
    STATE_LAYOUT_VERSION, ServiceKey, ServiceValue, UdpSocket,
};

use self::flows::Flows;
pub(crate) use self::{
    facts::{has_source, is_left, is_whole, passes},
    flows::pair,
};
use super::super::{
    State,
    maps::{self, open_pinned},
    plan::{has_table, step::DirectEpoch},
};
use crate::{
    kernel::{
        KernelError,
        bpf::{PinDir, Reader},
        conntrack::{self, Connection, HandoverCounts, TrackedConnection},
    },
    model::{IpFamily, Protocol},
    net::PortRange,
};

/// Hands over the connections of the link programs that are pinned in this directory. Does nothing
/// if there are no programs, or if their flows have another layout.
pub(crate) fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, KernelError> {
    let mut counts = HandoverCounts::default();
    let Some(pins) = PinDir::existing(pin_dir)? else { return Ok(counts) };
    let Some((layout, STATE_LAYOUT_VERSION)) = maps::pinned_layouts(pins.path()) else { return Ok(counts) };
    track_flows(&pins)?;
    let is_current = layout == LAYOUT_VERSION;
    if is_current {
        leave_new_flows(&pins)?;
    }
    match clear_services(&pins) {
        // Programs of another version begin flows until they are removed. These are lost.
        Err(error) if !is_current => tracing::debug!(%error, "cannot clear maps of another version"),
        cleared => cleared?,
    }
    counts += hand_flows(&pins)?;
    Ok(counts)
}

/// Removes all Services and UDP sockets from the maps.
fn clear_services(pins: &PinDir) -> Result<(), KernelError> {
    clear::<ServiceKey, ServiceValue>(pins, "services")?;
    // They keep their endpoints. If this mode returns before its programs are removed, the Services
    // have other identifiers, and the sockets would be destroyed.
    clear::<u64, UdpSocket>(pins, "udp_sockets")
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
    let node = maps::pinned_node(pins.path())?;
    let masquerades = node.is_none_or(|node| node.masquerading != Masquerading::Netfilter as u16);
    Ok(masquerades.then(|| ports_of(node)))
}

/// Returns the source ports with which programs masquerade. `node` is `None` if their maps have
/// another layout.
fn ports_of(node: Option<NodeValue>) -> PortRange {
    node.map_or(POSSIBLE_PORTS, |node| PortRange { first: node.first_port, last: node.last_port })
}

/// How often the flows are listed that conntrack does not have.
const MAX_LISTS: usize = 8;

/// Hands over the flows in the map. The programs already leave new flows to netfilter. Afterwards
/// the programs translate no flow, except ended flows that got new packets before each list.
///
/// A packet that was in a program at that moment may begin one more flow, and conntrack has it only
/// when the packet leaves the node. The second pass finds it. The flows that conntrack still does
/// not have then had no packet since conntrack began to track connections on this node.
///
/// Flows that have ended are removed. Otherwise a new conversation from the same client port would
/// continue such a flow, and change its endpoint when the programs leave the link.
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
    for _ in 0..MAX_LISTS {
        let untracked = flows.list();
        flows.split(&untracked.with_twice_nat);
        let stay = flows.forget(untracked.behind);
        // The list has those that were lost so far.
        counts.lost = 0;
        for (family, connections) in &untracked.connections {
            counts += conntrack::hand_over_untracked(*family, connections, &mut flows)?;
        }
        if stay == 0 && untracked.connections.is_empty() {
            break;
        }
    }
    Ok(counts)
}

/// Adds entries to conntrack for the flows that the programs translate. Otherwise conntrack could
/// give a new connection the addresses and ports of such a flow: a client may use one port for
/// several VIPs, and these may have the same endpoint. Does nothing if conntrack cannot be written.
pub(crate) fn track_flows(pins: &PinDir) -> Result<(), KernelError> {
    let untracked = Flows::open(pins)?.list().connections;
    let track = |(family, connections): (&IpFamily, &Vec<Connection>)| conntrack::track(*family, connections);
    match untracked.iter().try_for_each(track) {
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
    // The map evicts its oldest entries. Those that pass packets come last: without one, a flow
    // gets another endpoint.
    reserve_sources(&mut flows)?;
    let stream_timeout = conntrack::udp_stream_timeout()?;
    let mut count = 0;
    for family in IpFamily::ALL {
        conntrack::for_each_connection(family, Protocol::Udp, &mut |udp| {
            if let Some(service) = service_of(&udp.tracked, state) {
                flows.leave(udp, service, stream_timeout);
                count += 1;
            }
        })?;
        conntrack::for_each_connection(family, Protocol::Tcp, &mut |tcp| {
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

/// Keeps the source ports of all connections that conntrack translates.
fn reserve_sources(flows: &mut Flows) -> Result<(), KernelError> {
    for family in IpFamily::ALL {
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            conntrack::for_each_connection(family, protocol, &mut |connection| {
                flows.reserve_source(connection);
            })?;
        }
    }
    Ok(())
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
