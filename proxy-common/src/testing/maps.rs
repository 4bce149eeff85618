//! The content of the maps as plain data: of those that userspace writes, and of those that
//! programs write.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, DirectFlow, DirectKey, DirectWatch, DsrKey, EndpointKey,
        EndpointValue, Flow, FlowKey, FragmentKey, FragmentValue, LAYOUT_VERSION, LocalDetection, MaglevKey,
        MaglevPage, Masquerading, MemberKey, NewFlows, NodeValue, ProgramError, Refusing,
        STATE_LAYOUT_VERSION, ServiceCounts, ServiceKey, ServiceValue, SocketScope, XdpLinkValue,
    },
    prefilter::PrefilterItem,
};

/// The maps that userspace writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMaps {
    /// `services`.
    pub services: BTreeMap<ServiceKey, ServiceValue>,
    /// `endpoints`.
    pub endpoints: BTreeMap<EndpointKey, EndpointValue>,
    /// `maglev`.
    pub maglev: BTreeMap<MaglevKey, MaglevPage>,
    /// `members`.
    pub members: BTreeSet<MemberKey>,
    /// `source_ranges`: the service, and the address and length of the prefix, of 128 bits.
    pub source_ranges: BTreeSet<(u32, Addr, u32)>,
    /// `node_addresses`.
    pub node_addresses: BTreeSet<Addr>,
    /// `local_sources`: address and length of the prefix, of 128 bits.
    pub local_sources: BTreeSet<(Addr, u32)>,
    /// `exempt_sources`.
    pub exempt_sources: BTreeSet<Addr>,
    /// `local_links`.
    pub local_links: BTreeSet<u32>,
    /// `masquerade_addresses`: the link, and the address and length of the prefix, of 128 bits.
    pub masquerade_addresses: BTreeMap<(u32, Addr, u32), Addr>,
    /// `direct_links`.
    pub direct_links: BTreeSet<u32>,
    /// `peer_links`.
    pub peer_links: BTreeSet<u32>,
    /// `direct_watch`.
    pub direct_watch: DirectWatch,
    /// `xdp_links`.
    pub xdp_links: BTreeMap<u32, XdpLinkValue>,
    /// `dsr_endpoints`.
    pub dsr_endpoints: BTreeMap<DsrKey, Addr>,
    /// `dsr_nodes`: the addresses where packets of the tunnel come from.
    pub dsr_nodes: BTreeSet<Addr>,
    /// `dsr_nodes`: other addresses of these nodes.
    pub dsr_others: BTreeSet<Addr>,
    /// `node`.
    pub node: NodeValue,
}

impl Default for ConfigMaps {
    fn default() -> Self {
        Self {
            services: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            maglev: BTreeMap::new(),
            members: BTreeSet::new(),
            source_ranges: BTreeSet::new(),
            node_addresses: BTreeSet::new(),
            local_sources: BTreeSet::new(),
            exempt_sources: BTreeSet::new(),
            local_links: BTreeSet::new(),
            masquerade_addresses: BTreeMap::new(),
            direct_links: BTreeSet::new(),
            peer_links: BTreeSet::new(),
            direct_watch: DirectWatch::NONE,
            xdp_links: BTreeMap::new(),
            dsr_endpoints: BTreeMap::new(),
            dsr_nodes: BTreeSet::new(),
            dsr_others: BTreeSet::new(),
            node: NodeValue {
                netns: NodeValue::NETNS_UNKNOWN,
                layout: LAYOUT_VERSION,
                masquerade_mark: NodeValue::MASQUERADE_MARK,
                reject_mark: NodeValue::REJECT_MARK,
                local_detection: LocalDetection::None as u32,
                state_layout: STATE_LAYOUT_VERSION,
                socket_scope: SocketScope::All as u16,
                new_flows: NewFlows::Translate as u16,
                settling_until_ns: 0,
                masquerading: Masquerading::Netfilter as u16,
                first_port: 0,
                last_port: 0,
                direct_scope: 0,
                direct_epoch: 0,
                direct_lease_ns: 0,
                tunnel_link: 0,
                tunnel_mtu: 0,
                tunnel_v4: Addr::UNSPECIFIED_V6,
                tunnel_v6: Addr::UNSPECIFIED_V6,
                tunnel_returns: 0,
                refusing: Refusing::Netfilter as u32,
            },
        }
    }
}

/// The maps that programs write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateMaps {
    /// `flows`.
    pub flows: BTreeMap<FlowKey, Flow>,
    /// `unassured_flows`.
    pub unassured_flows: BTreeMap<FlowKey, Flow>,
    /// `direct_flows_v4` and `direct_flows_v6`.
    pub direct_flows: BTreeMap<DirectKey, DirectFlow>,
    /// `dsr_returns`.
    pub dsr_returns: BTreeMap<FlowKey, Addr>,
    /// `dsr_new_returns`.
    pub dsr_new_returns: BTreeMap<FlowKey, Addr>,
    /// `fragments`.
    pub fragments: BTreeMap<FragmentKey, FragmentValue>,
    /// `affinity`.
    pub affinity: BTreeMap<AffinityKey, AffinityValue>,
    /// `counters`, summed over the CPUs.
    pub counters: [u64; Counter::COUNT],
    /// `service_counts` that are not zero, by service and summed over the CPUs.
    pub services: BTreeMap<u32, ServiceCounts>,
    /// `program_errors` by [`ProgramError`], summed over the programs and CPUs.
    pub errors: [u64; ProgramError::COUNT],
}

impl ConfigMaps {
    /// Returns the frontends and endpoints in the prefilter.
    pub fn prefilter_items(&self) -> impl Iterator<Item = PrefilterItem> {
        let services = self.services.keys().map(|key| PrefilterItem::of_service(&key.addr, key.port));
        let endpoints = self.endpoints.values().map(|value| value.endpoint);
        services.chain(endpoints.map(|endpoint| PrefilterItem::of_endpoint(&endpoint.addr, endpoint.port)))
    }
}

impl StateMaps {
    /// Returns the items of the prefilter that the flows need.
    pub fn prefilter_items(&self) -> impl Iterator<Item = PrefilterItem> {
        self.all_flows().flat_map(|(key, flow)| PrefilterItem::of_flow(key, flow))
    }

    /// Returns the entries of both maps of flows, in the order in which programs look for them.
    pub fn all_flows(&self) -> impl Iterator<Item = (&FlowKey, &Flow)> {
        self.flows.iter().chain(&self.unassured_flows)
    }

    /// Returns the values of both maps.
    pub fn all_flows_mut(&mut self) -> impl Iterator<Item = &mut Flow> {
        self.flows.values_mut().chain(self.unassured_flows.values_mut())
    }

    /// Returns the map with the nodes of flows that are assured, or of those that are not.
    pub const fn dsr_returns(&mut self, is_assured: bool) -> &mut BTreeMap<FlowKey, Addr> {
        if is_assured { &mut self.dsr_returns } else { &mut self.dsr_new_returns }
    }

    /// Returns the map for a flow in this state.
    pub const fn flows_with(&mut self, flow: &Flow) -> &mut BTreeMap<FlowKey, Flow> {
        if flow.is_assured() { &mut self.flows } else { &mut self.unassured_flows }
    }

    /// Returns the entry that programs find.
    pub fn flow(&self, key: &FlowKey) -> Option<&Flow> {
        self.flows.get(key).or_else(|| self.unassured_flows.get(key))
    }

    /// Returns the entry that programs find.
    pub fn flow_mut(&mut self, key: &FlowKey) -> Option<&mut Flow> {
        self.flows.get_mut(key).or_else(|| self.unassured_flows.get_mut(key))
    }

    /// Removes the entries of both maps. Returns true if there was one.
    pub fn remove_flow(&mut self, key: &FlowKey) -> bool {
        let removed = [self.flows.remove(key), self.unassured_flows.remove(key)];
        removed.iter().any(Option::is_some)
    }

    /// Returns the same with all counters at zero.
    #[must_use]
    pub fn without_counts(self) -> Self {
        Self { counters: Default::default(), services: BTreeMap::new(), errors: Default::default(), ..self }
    }

    /// Returns the same with entries that are older by this time. Returns `None` if an entry would
    /// be older than the clock.
    pub fn aged(mut self, seconds: u64) -> Option<Self> {
        let older = |time: &mut u64| {
            *time = time.checked_sub(seconds * 1_000_000_000)?;
            Some(())
        };
        self.all_flows_mut().try_for_each(|flow| older(&mut flow.used_ns))?;
        self.direct_flows.values_mut().try_for_each(|flow| older(&mut flow.path.until_ns))?;
        self.affinity.values_mut().try_for_each(|value| older(&mut value.used_ns))?;
        Some(self)
    }

    /// Returns the same with all times at zero, because two clocks never agree.
    #[must_use]
    pub fn without_times(mut self) -> Self {
        self.all_flows_mut().for_each(|flow| flow.used_ns = 0);
        self.direct_flows.values_mut().for_each(|flow| flow.path.until_ns = 0);
        self.affinity.values_mut().for_each(|value| value.used_ns = 0);
        self.fragments.values_mut().for_each(|value| value.created_seconds = 0);
        self
    }
}
