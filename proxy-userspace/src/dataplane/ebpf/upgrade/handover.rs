//! Hands connections over to conntrack, one by one, when another mode takes over from eBPF. The
//! link programs still run meanwhile. Afterwards nothing needs them.
//!
//! First all Services are removed from the maps, so that the programs take no new flow. Then each
//! flow is held: the programs drop packets of both directions at ingress, and the senders
//! retransmit them. Once conntrack has the connection, the programs pass all its packets.

use std::{net::SocketAddr, path::Path, time::Duration};

use aya::maps::{HashMap, MapData};
use proxy_common::{
    layout::{
        Direction, Endpoint, Flow, FlowKey, STATE_LAYOUT_VERSION, ServiceKey, ServiceValue, flow_state,
    },
    packet::Tuple,
    prefilter::{self, PrefilterBit},
};

use super::super::maps::{self, open_pinned};
use crate::{
    kernel::{
        KernelError,
        bpf::{MappedWords, PinDir},
        clock,
        conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection, Translator},
    },
    model::{IpFamily, Protocol},
};

/// Hands over the connections of the link programs that are pinned in this directory. Does nothing
/// if there are no programs, or if their maps have another layout.
pub(crate) fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, KernelError> {
    let mut counts = HandoverCounts::default();
    let Some(pins) = PinDir::existing(pin_dir)? else { return Ok(counts) };
    if maps::pinned_layouts(pins.path()).is_none_or(|(_, state)| state != STATE_LAYOUT_VERSION) {
        return Ok(counts);
    }
    remove_services(&pins)?;
    let mut flows = Flows::open(&pins)?;
    for family in IpFamily::ALL {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            counts += conntrack::hand_over(family, protocol, &mut flows)?;
        }
    }
    Ok(counts)
}

fn remove_services(pins: &PinDir) -> Result<(), KernelError> {
    let mut services: HashMap<MapData, ServiceKey, ServiceValue> = open_pinned(pins.path(), "services")?;
    let keys: Vec<ServiceKey> = services.keys().filter_map(Result::ok).collect();
    keys.iter().try_for_each(|key| maps::removed("services", services.remove(key)))
}

/// The map `flows`, with the prefilter that leads packets to it.
struct Flows {
    flows: HashMap<MapData, FlowKey, Flow>,
    prefilter: MappedWords,
}

impl Flows {
    fn open(pins: &PinDir) -> Result<Self, KernelError> {
        Ok(Self {
            flows: open_pinned(pins.path(), "flows")?,
            prefilter: pins.mapped("prefilter", prefilter::WORDS)?,
        })
    }

    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        self.flows.get(key, 0).ok().filter(|flow| flow.state & flow_state::PASS == 0)
    }

    /// Sets what the programs do at ingress with packets that have these addresses.
    fn put(&mut self, protocol: Protocol, pair: AddressPair, flow: Flow) {
        let key = key(Direction::Original, protocol, pair);
        let used_ns = clock::monotonic().unwrap_or(Duration::ZERO).as_nanos();
        let flow = Flow { used_ns: u64::try_from(used_ns).unwrap_or(u64::MAX), ..flow };
        if let Err(error) = self.flows.insert(key, flow, 0) {
            tracing::debug!(%error, "cannot write a flow that is handed over: the connection may break");
        }
        let PrefilterBit { word, mask } =
            PrefilterBit::of_service(&key.destination.addr, key.destination.port);
        self.prefilter.set(word, mask);
    }
}

impl Translator for Flows {
    fn untranslated(&mut self, tracked: &TrackedConnection) -> Option<AddressPair> {
        let AddressPair { source, destination } = tracked.original;
        let reply = AddressPair { source: destination, destination: source };
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, reply))?;
        Some(AddressPair { source: address(flow.destination), destination: address(flow.source) })
    }

    fn hold(&mut self, connection: &Connection) {
        let TrackedConnection { protocol, reply, .. } = connection.tracked;
        for pair in [connection.untranslated, reply] {
            let held = untranslated_flow(protocol, pair, flow_state::HELD);
            let flow = self.flow(&key(Direction::Original, protocol, pair)).unwrap_or(held);
            self.put(protocol, pair, Flow { state: flow.state | flow_state::HELD, ..flow });
        }
    }

    fn release(&mut self, connection: &Connection) {
        let TrackedConnection { protocol, reply, .. } = connection.tracked;
        for pair in [connection.untranslated, reply] {
            self.put(protocol, pair, untranslated_flow(protocol, pair, 0));
        }
    }
}

/// Returns a flow that the programs do not translate.
fn untranslated_flow(protocol: Protocol, pair: AddressPair, state: u32) -> Flow {
    let FlowKey { source, destination, .. } = key(Direction::Original, protocol, pair);
    Flow { source, destination, state: flow_state::PASS | flow_state::REPLIED | state, ..Flow::NONE }
}

fn key(direction: Direction, protocol: Protocol, pair: AddressPair) -> FlowKey {
    let AddressPair { source, destination } = pair;
    let [source, destination] =
        [source, destination].map(|address| Endpoint::new(address.ip().into(), address.port()));
    FlowKey::new(direction, protocol, Tuple { source, destination })
}

fn address(endpoint: Endpoint) -> SocketAddr {
    SocketAddr::new(endpoint.addr.into(), endpoint.port)
}
