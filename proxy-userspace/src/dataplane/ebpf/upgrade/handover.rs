//! Leaving eBPF for a mode that translates in netfilter: connections that programs on links translate are handed over to conntrack,
//! one by one, while the programs run. Afterwards nothing needs them.
//!
//! The programs take no new flows from then on, since no Service is left in their maps. A flow that is handed over is first held:
//! both what the client sends and what the endpoint sends to where it sees its client is dropped as it comes in, and sent
//! again a moment later. Once conntrack has the connection, the programs let all of it pass.

use std::{net::SocketAddr, path::Path, time::Duration};

use aya::{
    Pod,
    maps::{HashMap, Map, MapData},
};
use proxy_common::{
    layout::{
        Direction, Endpoint, Flow, FlowKey, STATE_LAYOUT_VERSION, ServiceKey, ServiceValue, flow_state,
    },
    packet::Tuple,
    prefilter::{self, PrefilterBit},
};

use super::super::maps;
use crate::{
    kernel::{
        KernelError,
        bpf::{MappedWords, PinDir},
        clock,
        conntrack::{self, AddressPair, Connection, HandoverCounts, TrackedConnection, Translator},
    },
    model::{IpFamily, Protocol},
};

/// Hands over what the programs pinned in this directory translate, and has them translate nothing else. Without programs, or
/// where they are of another layout, there is nothing to do.
pub(crate) fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, KernelError> {
    let mut done = HandoverCounts::default();
    let Some(pins) = PinDir::existing(pin_dir)? else { return Ok(done) };
    if maps::pinned_layouts(pins.path()).is_none_or(|(_, state)| state != STATE_LAYOUT_VERSION) {
        return Ok(done);
    }
    remove_services(&pins)?;
    let mut flows = Flows::open(&pins)?;
    for family in IpFamily::ALL {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            done += conntrack::hand_over(family, protocol, &mut flows)?;
        }
    }
    Ok(done)
}

fn open<K: Pod, V: Pod>(pins: &PinDir, name: &str) -> Result<HashMap<MapData, K, V>, KernelError> {
    let failed = || KernelError::bpf("open map", name);
    let map = MapData::from_pin(pins.path().join(name)).map_err(failed())?;
    Map::from_map_data(map).map_err(failed())?.try_into().map_err(failed())
}

fn remove_services(pins: &PinDir) -> Result<(), KernelError> {
    let mut services: HashMap<MapData, ServiceKey, ServiceValue> = open(pins, "services")?;
    let keys: Vec<ServiceKey> = services.keys().filter_map(Result::ok).collect();
    keys.iter().try_for_each(|key| maps::removed("services", services.remove(key)))
}

/// What the programs noted.
struct Flows {
    flows: HashMap<MapData, FlowKey, Flow>,
    prefilter: MappedWords,
}

impl Flows {
    fn open(pins: &PinDir) -> Result<Self, KernelError> {
        Ok(Self { flows: open(pins, "flows")?, prefilter: pins.mapped("prefilter", prefilter::WORDS)? })
    }

    fn flow(&self, key: &FlowKey) -> Option<Flow> {
        self.flows.get(key, 0).ok().filter(|flow| flow.state & flow_state::PASS == 0)
    }

    /// Notes what becomes of packets with these ends as they come in.
    fn note(&mut self, protocol: Protocol, ends: AddressPair, flow: Flow) {
        let key = key(Direction::Original, protocol, ends);
        let used_ns = clock::monotonic().unwrap_or(Duration::ZERO).as_nanos();
        let flow = Flow { used_ns: u64::try_from(used_ns).unwrap_or(u64::MAX), ..flow };
        if let Err(error) = self.flows.insert(key, flow, 0) {
            tracing::debug!(%error, "cannot note a flow that is handed over");
        }
        let PrefilterBit { word, mask } =
            PrefilterBit::of_service(&key.destination.addr, key.destination.port);
        self.prefilter.set(word, mask);
    }
}

impl Translator for Flows {
    fn untranslated(&mut self, tracked: &TrackedConnection) -> Option<AddressPair> {
        let AddressPair { source, destination } = tracked.original;
        let answer = AddressPair { source: destination, destination: source };
        let flow = self.flow(&key(Direction::Reply, tracked.protocol, answer))?;
        Some(AddressPair { source: address(flow.destination), destination: address(flow.source) })
    }

    fn hold(&mut self, connection: &Connection) {
        let TrackedConnection { protocol, reply, .. } = connection.tracked;
        for ends in [connection.untranslated, reply] {
            let held = passing(protocol, ends, flow_state::HELD);
            let flow = self.flow(&key(Direction::Original, protocol, ends)).unwrap_or(held);
            self.note(protocol, ends, Flow { state: flow.state | flow_state::HELD, ..flow });
        }
    }

    fn release(&mut self, connection: &Connection) {
        let TrackedConnection { protocol, reply, .. } = connection.tracked;
        for ends in [connection.untranslated, reply] {
            self.note(protocol, ends, passing(protocol, ends, 0));
        }
    }
}

/// A flow that is left as it is.
fn passing(protocol: Protocol, ends: AddressPair, state: u32) -> Flow {
    let FlowKey { source, destination, .. } = key(Direction::Original, protocol, ends);
    Flow { source, destination, state: flow_state::PASS | flow_state::REPLIED | state, ..Flow::NONE }
}

fn key(direction: Direction, protocol: Protocol, ends: AddressPair) -> FlowKey {
    let AddressPair { source, destination } = ends;
    let [source, destination] = [source, destination].map(|end| Endpoint::new(end.ip().into(), end.port()));
    FlowKey::new(direction, protocol, Tuple { source, destination })
}

fn address(endpoint: Endpoint) -> SocketAddr {
    SocketAddr::new(endpoint.addr.into(), endpoint.port)
}
