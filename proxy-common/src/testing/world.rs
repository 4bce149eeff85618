//! What the maps hold, as plain data: what userspace writes, and what the programs note.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey,
        FragmentValue, LAYOUT_VERSION, LocalDetection, MemberKey, NodeValue, ProgramError,
        STATE_LAYOUT_VERSION, ServiceCounts, ServiceKey, ServiceValue,
    },
    prefilter::PrefilterBit,
};

/// What userspace writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Destinations.
    pub services: BTreeMap<ServiceKey, ServiceValue>,
    /// Slots.
    pub endpoints: BTreeMap<EndpointKey, Endpoint>,
    /// Lists' members.
    pub members: BTreeSet<MemberKey>,
    /// Source ranges: the service, the range's address and the length of its prefix, of 128 bits.
    pub source_ranges: BTreeSet<(u32, Addr, u32)>,
    /// Where node ports are served.
    pub node_addresses: BTreeSet<Addr>,
    /// Sources that count as local: addresses and lengths of prefixes, of 128 bits.
    pub local_sources: BTreeSet<(Addr, u32)>,
    /// Links that do.
    pub local_links: BTreeSet<u32>,
    /// The node.
    pub node: NodeValue,
}

impl Default for World {
    fn default() -> Self {
        Self {
            services: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            members: BTreeSet::new(),
            source_ranges: BTreeSet::new(),
            node_addresses: BTreeSet::new(),
            local_sources: BTreeSet::new(),
            local_links: BTreeSet::new(),
            node: NodeValue {
                netns: NodeValue::NETNS_UNKNOWN,
                layout: LAYOUT_VERSION,
                masquerade_mark: NodeValue::MASQUERADE_MARK,
                reject_mark: NodeValue::REJECT_MARK,
                local_detection: LocalDetection::None as u32,
                state_layout: STATE_LAYOUT_VERSION,
                zero: 0,
                settling_until_ns: 0,
            },
        }
    }
}

/// What the programs note.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// Flows, both directions.
    pub flows: BTreeMap<FlowKey, Flow>,
    /// What became of first fragments.
    pub fragments: BTreeMap<FragmentKey, FragmentValue>,
    /// Where clients went.
    pub affinity: BTreeMap<AffinityKey, AffinityValue>,
    /// Counters, by number.
    pub counters: [u64; Counter::COUNT],
    /// What was counted of Services, by their identifiers; of those of which something was.
    pub services: BTreeMap<u32, ServiceCounts>,
    /// What went wrong, by [`ProgramError`].
    pub errors: [u64; ProgramError::COUNT],
}

impl World {
    /// The addresses and ports of Services and endpoints.
    pub fn prefilter_bits(&self) -> impl Iterator<Item = PrefilterBit> {
        let services = self.services.keys().map(|key| PrefilterBit::of_service(&key.addr, key.port));
        services.chain(
            self.endpoints.values().map(|endpoint| PrefilterBit::of_endpoint(&endpoint.addr, endpoint.port)),
        )
    }
}

impl Noted {
    /// Addresses and ports that were those of a Service or an endpoint when a flow began, and no others.
    pub fn prefilter_bits(&self) -> impl Iterator<Item = PrefilterBit> {
        self.flows.iter().flat_map(|(key, flow)| PrefilterBit::of_flow(key, flow))
    }

    /// The same with nothing counted.
    #[must_use]
    pub fn uncounted(self) -> Self {
        Self { counters: Default::default(), services: BTreeMap::new(), errors: Default::default(), ..self }
    }

    /// The same, as if it had been noted so much earlier. None if that is before the clock began.
    pub fn aged(mut self, seconds: u64) -> Option<Self> {
        let flows = self.flows.values_mut().map(|flow| &mut flow.used_ns);
        for time in flows.chain(self.affinity.values_mut().map(|value| &mut value.used_ns)) {
            *time = time.checked_sub(seconds * 1_000_000_000)?;
        }
        Some(self)
    }

    /// The same without times, which no two clocks agree on.
    #[must_use]
    pub fn timeless(mut self) -> Self {
        self.flows.values_mut().for_each(|flow| flow.used_ns = 0);
        self.affinity.values_mut().for_each(|value| value.used_ns = 0);
        self.fragments.values_mut().for_each(|value| value.noted_seconds = 0);
        self
    }
}
