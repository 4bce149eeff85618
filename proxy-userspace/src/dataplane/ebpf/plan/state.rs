//! What the maps hold, mirrored in this process, and which service port owns which identifier.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use proxy_common::{
    Addr,
    layout::{BridgeAddress, Endpoint, EndpointKey, MemberKey, ServiceKey, ServiceValue},
    prefilter::PrefilterBit,
};

use super::{
    super::links::{LinkHook, Running},
    ids::{Fresh, Ids},
    ranges::{Prefix, Range},
    step::Step,
};
use crate::model::ServicePortKey;

/// A mirror of the maps. Keys begin with the service identifier, so that all a service port has is one range of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    services: HashMap<ServiceKey, ServiceValue>,
    destinations: BTreeSet<(u32, ServiceKey)>,
    pub(crate) endpoints: BTreeMap<EndpointKey, Endpoint>,
    pub(crate) members: BTreeSet<MemberKey>,
    pub(crate) ranges: BTreeSet<Range>,
    pub(crate) node_addresses: BTreeSet<Addr>,
    names: HashMap<ServicePortKey, u32>,
    named: HashSet<u32>,
    ids: Ids,
    pub(crate) local_sources: BTreeSet<Prefix>,
    pub(crate) local_links: BTreeSet<u32>,
    pub(crate) bridge_ports: BTreeMap<u32, BridgeAddress>,
    /// How local callers are told: [`proxy_common::layout::LocalDetection`], as the map holds it.
    pub(crate) local_detection: u32,
    /// The programs on sockets run.
    pub(crate) attached: bool,
    /// What runs on links.
    pub(crate) links: BTreeMap<LinkHook, Running>,
    /// The netfilter rules are as they should be.
    pub(crate) rules_are_put: bool,
}

impl State {
    /// Empty maps, with what decides which identifiers are given.
    pub(crate) fn with_ids(ids: Ids) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Records a change that was made to the maps.
    pub(crate) fn record(&mut self, step: &Step) {
        match step {
            Step::PutNodeAddress(address) => drop(self.node_addresses.insert(*address)),
            Step::PutEndpoint(key, endpoint) => drop(self.endpoints.insert(*key, *endpoint)),
            Step::PutMember(key) => drop(self.members.insert(*key)),
            Step::PutRange(range) => drop(self.ranges.insert(*range)),
            Step::PutService(key, value) => self.put_service(*key, *value),
            Step::PutLocalSource(source) => drop(self.local_sources.insert(*source)),
            Step::PutLocalLink(index) => drop(self.local_links.insert(*index)),
            Step::PutBridgePort(index, bridge) => drop(self.bridge_ports.insert(*index, *bridge)),
            Step::SetLocalDetection(detection) => self.local_detection = *detection as u32,
            Step::Attach => self.attached = true,
            Step::AttachLink(at, link) => drop(self.links.insert(*at, Running::Current(link.framing))),
            Step::DetachLink(at) => drop(self.links.remove(at)),
            Step::PutRules => self.rules_are_put = true,
            Step::RemoveService(key, service) => {
                self.services.remove(key);
                self.destinations.remove(&(*service, *key));
            }
            Step::RemoveEndpoint(key) => drop(self.endpoints.remove(key)),
            Step::RemoveMember(key) => drop(self.members.remove(key)),
            Step::RemoveRange(range) => drop(self.ranges.remove(range)),
            Step::RemoveNodeAddress(address) => drop(self.node_addresses.remove(address)),
            Step::RemoveLocalSource(source) => drop(self.local_sources.remove(source)),
            Step::RemoveLocalLink(index) => drop(self.local_links.remove(index)),
            Step::RemoveBridgePort(index) => drop(self.bridge_ports.remove(index)),
            Step::ReleaseSockets { .. } => {}
        }
    }

    pub(crate) fn put_service(&mut self, key: ServiceKey, value: ServiceValue) {
        if let Some(before) = self.services.insert(key, value)
            && before.service != value.service
        {
            self.destinations.remove(&(before.service, key));
        }
        self.destinations.insert((value.service, key));
        self.ids.see(value.service);
    }

    /// Gives a service port its identifier, or takes it away.
    pub(crate) fn record_name(&mut self, name: &ServicePortKey, service: Option<u32>) {
        let before = match service {
            Some(service) => {
                self.ids.take(service);
                self.named.insert(service);
                self.names.insert(name.clone(), service)
            }
            None => self.names.remove(name),
        };
        if let Some(before) = before.filter(|before| Some(*before) != service) {
            self.named.remove(&before);
            self.ids.release(before);
        }
    }

    /// After reading maps: which service port an identifier belongs to is found anew, by the destinations it has.
    pub(crate) fn forget_names(&mut self) {
        self.names.clear();
        self.named.clear();
        let in_use = self.services_in_use();
        self.ids.restart(in_use);
    }

    /// The identifier of a service port.
    pub(crate) fn id(&self, name: &ServicePortKey) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// The service port of an identifier; for messages, as it searches.
    pub(crate) fn name(&self, service: u32) -> Option<&ServicePortKey> {
        self.names.iter().find_map(|(name, id)| (*id == service).then_some(name))
    }

    /// Names of all service ports.
    pub(crate) fn all_names(&self) -> impl Iterator<Item = &ServicePortKey> {
        self.names.keys()
    }

    /// Whether an identifier belongs to a service port already.
    pub(crate) fn is_named(&self, service: u32) -> bool {
        self.named.contains(&service)
    }

    /// Gives new identifiers.
    pub(crate) fn fresh_ids(&self) -> Fresh<'_> {
        self.ids.fresh()
    }

    /// What a destination leads to.
    pub(crate) fn service(&self, key: &ServiceKey) -> Option<&ServiceValue> {
        self.services.get(key)
    }

    /// Where packets of all destinations and endpoints are looked for in the bitmap. An endpoint that drains is a member only, and
    /// sockets that talk to it may note it anew.
    pub(crate) fn places(&self) -> impl Iterator<Item = PrefilterBit> {
        let services = self.services.keys().map(|key| PrefilterBit::of_service(&key.addr, key.port));
        let endpoints = self.endpoints.values().chain(self.members.iter().map(|key| &key.endpoint));
        services.chain(endpoints.map(|endpoint| PrefilterBit::of_endpoint(&endpoint.addr, endpoint.port)))
    }

    /// This process's programs run, and no others of ours.
    pub(crate) fn is_taken_over(&self) -> bool {
        self.attached && !self.links.values().any(|running| *running == Running::Outdated)
    }

    /// The number of destinations.
    pub(crate) fn service_count(&self) -> usize {
        self.services.len()
    }

    /// The destinations of an identifier.
    pub(crate) fn destinations(&self, service: u32) -> impl Iterator<Item = (ServiceKey, ServiceValue)> {
        self.destinations
            .range((service, MIN_SERVICE_KEY)..)
            .take_while(move |(owner, _)| *owner == service)
            .filter_map(|(_, key)| self.services.get(key).map(|value| (*key, *value)))
    }

    /// The slots of an identifier, of every generation.
    pub(crate) fn slots(&self, service: u32) -> impl Iterator<Item = (&EndpointKey, &Endpoint)> {
        let first = EndpointKey { service, generation: 0, slot: 0, list: 0 };
        self.endpoints.range(first..).take_while(move |(key, _)| key.service == service)
    }

    /// The members of an identifier's lists.
    pub(crate) fn members_of(&self, service: u32) -> impl Iterator<Item = &MemberKey> {
        let first = MemberKey { service, list: 0, endpoint: Endpoint::new(Addr::UNSPECIFIED_V6, 0) };
        self.members.range(first..).take_while(move |key| key.service == service)
    }

    /// The source ranges of an identifier.
    pub(crate) fn ranges_of(&self, service: u32) -> impl Iterator<Item = &Range> {
        let first = Range { service, addr: Addr::UNSPECIFIED_V6, prefix_len: 0 };
        self.ranges.range(first..).take_while(move |range| range.service == service)
    }

    /// Every identifier that anything belongs to.
    pub(crate) fn services_in_use(&self) -> BTreeSet<u32> {
        let destinations = self.destinations.iter().map(|(service, _)| *service);
        destinations
            .chain(self.endpoints.keys().map(|key| key.service))
            .chain(self.members.iter().map(|key| key.service))
            .chain(self.ranges.iter().map(|range| range.service))
            .collect()
    }
}

const MIN_SERVICE_KEY: ServiceKey = ServiceKey { addr: Addr::UNSPECIFIED_V6, port: 0, proto: 0, zero: 0 };
