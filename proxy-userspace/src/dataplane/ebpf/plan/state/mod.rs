//! What the kernel holds, as this process knows it, and which service port has which identifier.

mod entries_read;

use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashMap, HashSet};
use proxy_common::{
    Addr,
    layout::{
        DsrKey, Endpoint, EndpointKey, EndpointValue, HardwareAddress, MemberKey, ServiceKey, ServiceValue,
        VlanKey, XdpLinkValue,
    },
    maglev::TableSize,
    prefilter::PrefilterItem,
};

pub(crate) use self::entries_read::EntriesRead;
use super::{
    super::{
        links::{HookState, LinkHook, xdp::XdpState},
        rules::RuleDuties,
    },
    digest::Digest,
    ids::{IdAllocator, ServiceIds},
    ranges::{LinkSubnet, Prefix, Range},
    step::{DirectFields, MapEntry, MasqueradeFields, Step, TunnelFields},
};
use crate::{
    model::{ServicePortKey, XdpMode},
    net::NetnsCookie,
};

/// A copy of the maps, and the state of programs and rules. Keys begin with the service identifier,
/// so that the entries of a service port are adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    services: HashMap<ServiceKey, ServiceValue>,
    frontends: BTreeSet<(u32, ServiceKey)>,
    pub(crate) endpoints: BTreeMap<EndpointKey, EndpointValue>,
    pub(crate) members: BTreeSet<MemberKey>,
    pub(crate) ranges: BTreeSet<Range>,
    pub(crate) node_addresses: BTreeSet<Addr>,
    pub(crate) names: HashMap<ServicePortKey, u32>,
    named: HashSet<u32>,
    pub(crate) ids: ServiceIds,
    pub(crate) local_sources: BTreeSet<Prefix>,
    pub(crate) local_links: BTreeSet<u32>,
    pub(crate) bridge_ports: BTreeMap<u32, HardwareAddress>,
    pub(crate) vlans: BTreeSet<VlanKey>,
    /// How local clients are recognized: [`proxy_common::layout::LocalDetection`], as in the map.
    pub(crate) local_detection: u32,
    pub(crate) exempt_netns: BTreeSet<NetnsCookie>,
    pub(crate) exempt_sources: BTreeSet<Addr>,
    /// [`proxy_common::layout::SocketScope`], as in the map.
    pub(crate) socket_scope: u16,
    /// [`proxy_common::layout::NewFlows`], as in the map.
    pub(crate) new_flows: u16,
    pub(crate) masquerade: MasqueradeFields,
    pub(crate) direct: DirectFields,
    pub(crate) direct_links: BTreeSet<u32>,
    pub(crate) peer_links: BTreeSet<u32>,
    pub(crate) xdp_links: BTreeMap<u32, XdpLinkValue>,
    pub(crate) masquerade_addresses: BTreeMap<LinkSubnet, Addr>,
    pub(crate) dsr_endpoints: BTreeMap<DsrKey, Addr>,
    pub(crate) dsr_nodes: BTreeMap<Addr, u8>,
    pub(crate) tunnel: TunnelFields,
    /// The socket programs are attached.
    pub(crate) attached: bool,
    /// Our programs on links.
    pub(crate) links: BTreeMap<LinkHook, HookState>,
    /// Our XDP programs on links, by index.
    pub(crate) xdp: BTreeMap<u32, XdpState>,
    /// The netfilter rules are as they should be.
    pub(crate) rules_are_installed: bool,
    /// What these rules are to do. `None` if this process installs no rules.
    pub(crate) rule_duties: Option<RuleDuties>,
    /// The smallest size of Maglev tables.
    pub(crate) table_size: TableSize,
    /// The digest of all entries.
    pub(crate) digest: Digest,
    /// The whole Snapshot was planned for this state, and no plan has failed since.
    pub(crate) is_current: bool,
}

impl State {
    /// Records a change that was made to the kernel.
    pub(crate) fn record(&mut self, step: &Step) {
        match step {
            Step::Put(entry) => self.put(entry),
            Step::Remove(entry) => self.remove(entry),
            Step::SetLocalDetection(detection) => self.local_detection = *detection as u32,
            Step::Attach => self.attached = true,
            Step::AttachLink(at, link) => drop(self.links.insert(*at, HookState::Current(link.framing))),
            Step::DetachLink(at, _) | Step::LeaveLink(at) => drop(self.links.remove(at)),
            Step::AttachXdp(index, link) => drop(self.xdp.insert(*index, XdpState::Current(link.mode))),
            Step::DetachXdp(index) => drop(self.xdp.remove(index)),
            Step::InstallRules(duties) => {
                self.rules_are_installed = true;
                self.rule_duties = self.rule_duties.map(|_| *duties);
            }
            Step::SetSocketScope(scope) => self.socket_scope = *scope as u16,
            Step::SetMasquerade(fields) => self.masquerade = *fields,
            Step::SetDirect(fields) => self.direct = *fields,
            Step::SetTunnel(fields) => self.tunnel = *fields,
            Step::SetNewFlows(new_flows) => self.new_flows = *new_flows as u16,
            Step::LetProgramsRefuse(_)
            | Step::ReleaseSockets { .. }
            | Step::ForgetFlows(_)
            | Step::ForgetSource(_)
            | Step::LeaveFlowsToConntrack
            | Step::LeaveConnectionsToConntrack { .. }
            | Step::TrackFlows
            | Step::HandFlowsToConntrack => {}
        }
    }

    /// Records an entry that was written or read.
    pub(crate) fn put(&mut self, entry: &MapEntry) {
        self.held(entry).iter().for_each(|held| self.digest.remove(held));
        self.digest.add(entry);
        match *entry {
            MapEntry::Service(key, value) => self.put_service(key, value),
            MapEntry::Endpoint(key, value) => drop(self.endpoints.insert(key, value)),
            MapEntry::Member(key) => drop(self.members.insert(key)),
            MapEntry::SourceRange(range) => drop(self.ranges.insert(range)),
            MapEntry::MasqueradeAddress(subnet, address) => {
                self.masquerade_addresses.insert(subnet, address);
            }
            MapEntry::NodeAddress(address) => drop(self.node_addresses.insert(address)),
            MapEntry::LocalSource(source) => drop(self.local_sources.insert(source)),
            MapEntry::LocalLink(index) => drop(self.local_links.insert(index)),
            MapEntry::DirectLink(index) => drop(self.direct_links.insert(index)),
            MapEntry::PeerLink(index) => drop(self.peer_links.insert(index)),
            MapEntry::XdpLink(index, value) => drop(self.xdp_links.insert(index, value)),
            MapEntry::DsrEndpoint(key, node) => drop(self.dsr_endpoints.insert(key, node)),
            MapEntry::DsrNode(address, kind) => drop(self.dsr_nodes.insert(address, kind)),
            MapEntry::BridgePort(index, bridge) => drop(self.bridge_ports.insert(index, bridge)),
            MapEntry::Vlan(vlan) => drop(self.vlans.insert(vlan)),
            MapEntry::ExemptNetns(cookie) => drop(self.exempt_netns.insert(cookie)),
            MapEntry::ExemptSource(address) => drop(self.exempt_sources.insert(address)),
        }
    }

    fn remove(&mut self, entry: &MapEntry) {
        self.held(entry).iter().for_each(|held| self.digest.remove(held));
        match entry {
            MapEntry::Service(key, value) => {
                self.services.remove(key);
                self.frontends.remove(&(value.service, *key));
            }
            MapEntry::Endpoint(key, _) => drop(self.endpoints.remove(key)),
            MapEntry::Member(key) => drop(self.members.remove(key)),
            MapEntry::SourceRange(range) => drop(self.ranges.remove(range)),
            MapEntry::MasqueradeAddress(subnet, _) => drop(self.masquerade_addresses.remove(subnet)),
            MapEntry::NodeAddress(address) => drop(self.node_addresses.remove(address)),
            MapEntry::LocalSource(source) => drop(self.local_sources.remove(source)),
            MapEntry::LocalLink(index) => drop(self.local_links.remove(index)),
            MapEntry::DirectLink(index) => drop(self.direct_links.remove(index)),
            MapEntry::PeerLink(index) => drop(self.peer_links.remove(index)),
            MapEntry::XdpLink(index, _) => drop(self.xdp_links.remove(index)),
            MapEntry::DsrEndpoint(key, _) => drop(self.dsr_endpoints.remove(key)),
            MapEntry::DsrNode(address, _) => drop(self.dsr_nodes.remove(address)),
            MapEntry::BridgePort(index, _) => drop(self.bridge_ports.remove(index)),
            MapEntry::Vlan(vlan) => drop(self.vlans.remove(vlan)),
            MapEntry::ExemptNetns(cookie) => drop(self.exempt_netns.remove(cookie)),
            MapEntry::ExemptSource(address) => drop(self.exempt_sources.remove(address)),
        }
    }

    /// Returns the entry with the key of this one.
    fn held(&self, entry: &MapEntry) -> Option<MapEntry> {
        let is_held = match entry {
            MapEntry::Service(key, _) => {
                return self.services.get(key).map(|value| MapEntry::Service(*key, *value));
            }
            MapEntry::Endpoint(key, _) => {
                return self.endpoints.get(key).map(|value| MapEntry::Endpoint(*key, *value));
            }
            MapEntry::BridgePort(index, _) => {
                return self.bridge_ports.get(index).map(|bridge| MapEntry::BridgePort(*index, *bridge));
            }
            MapEntry::XdpLink(index, _) => {
                return self.xdp_links.get(index).map(|value| MapEntry::XdpLink(*index, *value));
            }
            MapEntry::MasqueradeAddress(subnet, _) => {
                let address = self.masquerade_addresses.get(subnet);
                return address.map(|address| MapEntry::MasqueradeAddress(*subnet, *address));
            }
            MapEntry::DsrEndpoint(key, _) => {
                return self.dsr_endpoints.get(key).map(|node| MapEntry::DsrEndpoint(*key, *node));
            }
            MapEntry::DsrNode(address, _) => {
                return self.dsr_nodes.get(address).map(|kind| MapEntry::DsrNode(*address, *kind));
            }
            MapEntry::Vlan(vlan) => self.vlans.contains(vlan),
            MapEntry::Member(key) => self.members.contains(key),
            MapEntry::SourceRange(range) => self.ranges.contains(range),
            MapEntry::NodeAddress(address) => self.node_addresses.contains(address),
            MapEntry::LocalSource(source) => self.local_sources.contains(source),
            MapEntry::LocalLink(index) => self.local_links.contains(index),
            MapEntry::DirectLink(index) => self.direct_links.contains(index),
            MapEntry::PeerLink(index) => self.peer_links.contains(index),
            MapEntry::ExemptNetns(cookie) => self.exempt_netns.contains(cookie),
            MapEntry::ExemptSource(address) => self.exempt_sources.contains(address),
        };
        is_held.then_some(*entry)
    }

    fn put_service(&mut self, key: ServiceKey, value: ServiceValue) {
        if let Some(before) = self.services.insert(key, value)
            && before.service != value.service
        {
            self.frontends.remove(&(before.service, key));
        }
        self.frontends.insert((value.service, key));
        self.ids.record(value.service);
    }

    /// Returns the number of entries of a map that userspace writes and whose size is a setting.
    pub(crate) fn entries(&self, map: &str) -> Option<usize> {
        match map {
            "services" => Some(self.services.len()),
            "endpoints" => Some(self.endpoints.len()),
            "members" => Some(self.members.len()),
            "source_ranges" => Some(self.ranges.len()),
            "node_addresses" => Some(self.node_addresses.len()),
            _ => None,
        }
    }

    /// Makes room for so many names. After a start these are all.
    pub(crate) fn reserve_names(&mut self, names: usize) {
        if self.names.is_empty() {
            self.names.reserve(names);
            self.named.reserve(names);
        }
    }

    /// Records that a service port got an identifier, or lost its own.
    pub(crate) fn record_name(&mut self, name: ServicePortKey, service: Option<u32>) {
        let before = match service {
            Some(service) => {
                self.ids.assign(service);
                self.named.insert(service);
                self.names.insert(name, service)
            }
            None => self.names.remove(&name),
        };
        if let Some(before) = before.filter(|before| Some(*before) != service) {
            self.named.remove(&before);
            self.ids.release(before);
        }
    }

    /// Forgets which service port has which identifier, after maps were read. The next plan finds
    /// the service port of an identifier by its frontends.
    pub(crate) fn forget_names(&mut self) {
        self.names.clear();
        self.named.clear();
        let in_use = self.services_in_use();
        self.ids.reset(in_use);
    }

    /// Returns the identifier of a service port.
    pub(crate) fn id(&self, name: &ServicePortKey) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// Returns the service port of an identifier. It searches, and is meant for messages.
    pub(crate) fn name(&self, service: u32) -> Option<&ServicePortKey> {
        self.names.iter().find_map(|(name, id)| (*id == service).then_some(name))
    }

    /// Returns all service ports with their identifiers.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&ServicePortKey, u32)> {
        self.names.iter().map(|(name, service)| (name, *service))
    }

    /// Returns true if a service port has this identifier.
    pub(crate) fn is_named(&self, service: u32) -> bool {
        self.named.contains(&service)
    }

    /// Returns an allocator of new identifiers.
    pub(crate) fn new_ids(&self) -> IdAllocator<'_> {
        self.ids.allocator()
    }

    /// Returns the value of a frontend.
    pub(crate) fn service(&self, key: &ServiceKey) -> Option<&ServiceValue> {
        self.services.get(key)
    }

    /// Returns the values of all frontends.
    pub(crate) fn frontend_values(&self) -> impl Iterator<Item = &ServiceValue> {
        self.services.values()
    }

    /// Returns the items of the prefilter that entries of the maps need. An endpoint that
    /// terminates is only a member, but sockets that are connected to it may record it again.
    pub(crate) fn prefilter_items(&self) -> impl Iterator<Item = PrefilterItem> {
        let services = self.services.keys().map(|key| PrefilterItem::of_service(&key.addr, key.port));
        let slots = self.endpoints.values().map(|value| &value.endpoint);
        let endpoints = slots.chain(self.members.iter().map(|key| &key.endpoint));
        services.chain(endpoints.map(|endpoint| PrefilterItem::of_endpoint(&endpoint.addr, endpoint.port)))
    }

    /// Records that the programs of this process are others now, so that none is attached.
    pub(crate) fn outdate_programs(&mut self) {
        self.attached = false;
        let ours = |state: &&mut HookState| !matches!(state, HookState::LeftOut);
        self.links.values_mut().filter(ours).for_each(|state| *state = HookState::Outdated);
        let replaced = |state: &XdpState| !matches!(state, XdpState::Refused(_));
        let xdp = self.xdp.values_mut().filter(|state| replaced(state));
        xdp.for_each(|state| *state = XdpState::Outdated(state.mode()));
    }

    /// Returns the mode of our XDP program on a link, if it is there. It may be that of an earlier
    /// process.
    pub(crate) fn xdp_mode(&self, index: u32) -> Option<XdpMode> {
        self.xdp.get(&index).filter(|state| !matches!(state, XdpState::Refused(_))).map(|state| state.mode())
    }

    /// Returns true if only programs of this process are attached.
    pub(crate) fn is_taken_over(&self) -> bool {
        self.attached
            && !self.links.values().any(|state| *state == HookState::Outdated)
            && !self.xdp.values().any(|state| matches!(state, XdpState::Outdated(_)))
    }

    /// Returns the frontends of an identifier.
    pub(crate) fn frontends(&self, service: u32) -> impl Iterator<Item = (ServiceKey, ServiceValue)> {
        self.frontends
            .range((service, MIN_SERVICE_KEY)..)
            .take_while(move |(owner, _)| *owner == service)
            .filter_map(|(_, key)| self.services.get(key).map(|value| (*key, *value)))
    }

    /// Returns the slots of the lists of an identifier.
    pub(crate) fn slots(&self, service: u32) -> impl Iterator<Item = (&EndpointKey, &EndpointValue)> {
        let first = EndpointKey { service, list: 0, slot: 0 };
        self.endpoints.range(first..).take_while(move |(key, _)| key.service == service)
    }

    /// Returns the slots of a list from this slot on.
    pub(crate) fn slots_from(
        &self,
        first: EndpointKey,
    ) -> impl Iterator<Item = (&EndpointKey, &EndpointValue)> {
        let last = EndpointKey { slot: u32::MAX, ..first };
        self.endpoints.range(first..=last)
    }

    /// Returns the members of the lists of an identifier.
    pub(crate) fn members_of(&self, service: u32) -> impl Iterator<Item = &MemberKey> {
        let first = MemberKey { service, list: 0, endpoint: Endpoint::new(Addr::UNSPECIFIED_V6, 0) };
        self.members.range(first..).take_while(move |key| key.service == service)
    }

    /// Returns the source ranges of an identifier.
    pub(crate) fn ranges_of(&self, service: u32) -> impl Iterator<Item = &Range> {
        let first = Range { service, prefix: Prefix { addr: Addr::UNSPECIFIED_V6, prefix_len: 0 } };
        self.ranges.range(first..).take_while(move |range| range.service == service)
    }

    /// Returns the nodes of the endpoints of an identifier.
    pub(crate) fn dsr_endpoints_of(&self, service: u32) -> impl Iterator<Item = (&DsrKey, &Addr)> {
        let first = DsrKey { service, addr: Addr::UNSPECIFIED_V6 };
        self.dsr_endpoints.range(first..).take_while(move |(key, _)| key.service == service)
    }

    /// Returns every identifier that an entry belongs to, sorted.
    pub(crate) fn services_in_use(&self) -> Vec<u32> {
        let frontends = self.frontends.iter().map(|(service, _)| *service);
        let every = frontends
            .chain(self.endpoints.keys().map(|key| key.service))
            .chain(self.members.iter().map(|key| key.service))
            .chain(self.ranges.iter().map(|range| range.service))
            .chain(self.dsr_endpoints.keys().map(|key| key.service));
        // The keys of each kind are sorted, so most repeat the one before.
        let mut services: Vec<u32> = Vec::new();
        for service in every {
            if services.last() != Some(&service) {
                services.push(service);
            }
        }
        services.sort_unstable();
        services.dedup();
        services
    }
}

const MIN_SERVICE_KEY: ServiceKey = ServiceKey { addr: Addr::UNSPECIFIED_V6, port: 0, proto: 0, tunneled: 0 };
