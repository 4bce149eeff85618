//! Plans the entries of service ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proxy_common::{
    Addr,
    layout::{DsrKey, Endpoint, EndpointKey, EndpointValue, List, MemberKey, ServiceKey, ServiceValue},
};
use smallvec::SmallVec;

use super::{
    Planner, has_table,
    ranges::Range,
    slots,
    state::State,
    step::{MapEntry, Step},
    translate,
};
use crate::{
    model::{ResolvedPort, ServicePortKey},
    parallel,
};

impl<'a> Planner<'a> {
    /// Plans all service ports. Identifiers are given one after the other, and all else in parts.
    pub(super) fn all_ports(&mut self, ports: &BTreeMap<ServicePortKey, Arc<ResolvedPort>>) {
        self.reserve(ports.len());
        let (state, node) = (self.state, self.node);
        let ports: Vec<(&ServicePortKey, &ResolvedPort)> =
            ports.iter().map(|(name, port)| (name, &**port)).collect();
        let known = parallel::in_parts(&ports, |part| {
            part.iter().map(|(name, port)| known_ids(state, name, port)).collect::<Vec<_>>()
        });
        let known = ports.iter().zip(known.into_iter().flatten());
        let identified: Vec<_> = known
            .filter_map(|((name, port), known)| Some((*name, *port, self.serve(name, port, known)?)))
            .collect();
        let planners = parallel::in_parts(&identified, |part| {
            let mut planner = Planner::new(state, node);
            planner.written.reserve(part.len());
            for (name, port, service) in part {
                planner.entries(*service, name, port);
            }
            planner
        });
        for Planner { written, with_new_tables, phases, .. } in planners {
            self.written.extend(written);
            self.with_new_tables.extend(with_new_tables);
            self.phases.extend(phases);
        }
    }

    /// Plans a service port.
    pub(super) fn port(&mut self, name: &ServicePortKey, port: &ResolvedPort) {
        if let Some(service) = self.serve(name, port, known_ids(self.state, name, port)) {
            self.entries(service, name, port);
        }
    }

    /// Returns the identifier of a service port. Removes the service port and returns `None` if
    /// other Services have all its addresses: nothing would lead to its entries, and the next
    /// process could not find them again.
    fn serve(&mut self, name: &ServicePortKey, port: &ResolvedPort, known: KnownIds) -> Option<u32> {
        if port.frontends.is_empty() {
            self.remove_port(name);
            return None;
        }
        Some(self.identifier(name, known))
    }

    /// Plans the entries of a service port with this identifier.
    fn entries(&mut self, service: u32, name: &ServicePortKey, port: &ResolvedPort) {
        let frontends = translate::frontends(port, name.family, name.name.protocol);
        let held: SmallVec<[_; 2]> = self.state.frontends(service).collect();
        let generation = self.slots(service, port, &held);
        self.set_members(service, &translate::members(service, name.name.protocol, port).collect());
        let ranges = translate::source_ranges(port, self.node, name.family).into_iter();
        self.set_ranges(service, &ranges.map(|prefix| Range { service, prefix }).collect());
        let nodes = port.dsr_nodes.iter().map(|(endpoint, node)| (Addr::from(*endpoint), Addr::from(*node)));
        self.set_dsr_nodes(service, &nodes.map(|(addr, node)| (DsrKey { service, addr }, node)).collect());
        for (key, kind) in &frontends {
            let (node, table_size) = (self.node, self.state.table_size);
            let value =
                translate::service_value(service, generation, port, *kind, node, name.family, table_size);
            let value = match key.tunneled {
                0 => value,
                _ => translate::tunneled_value(value, port, table_size),
            };
            let of_service = held.iter().find(|(held, _)| held == key).map(|(_, value)| value);
            let before = of_service.or_else(|| self.state.service(key));
            if gets_table(before, &value, self.state.attached) {
                self.with_new_tables.insert(*key);
            }
            if before != Some(&value) {
                self.phases.switches.push(Step::Put(MapEntry::Service(*key, value)));
            }
            self.written.push(*key);
        }
        let is_wanted = |key| frontends.iter().any(|(wanted, _)| *wanted == key);
        self.phases.closures.extend(held.into_iter().filter(|(key, _)| !is_wanted(*key)));
    }

    /// Returns the identifier of a service port: its own; after a restart that of its frontends;
    /// otherwise a new one.
    fn identifier(&mut self, name: &ServicePortKey, known: KnownIds) -> u32 {
        let of_frontends = match known {
            KnownIds::Own(service) => return service,
            KnownIds::OfFrontends(services) => services,
        };
        let is_free = |service: &u32| !self.state.is_named(*service) && !self.claimed.contains(service);
        let adopted = of_frontends.into_iter().find(is_free);
        let service = adopted.unwrap_or_else(|| self.new_ids.next());
        self.claimed.insert(service);
        self.names.push((name.clone(), Some(service)));
        service
    }

    /// Plans the slots. Returns the generation of the lists: the present one if no slot changes.
    ///
    /// Connections remember the generation, so it must not stay if an endpoint leaves. A process
    /// that ended after it wrote slots may not have written the frontends: the slots tell.
    fn slots(&mut self, service: u32, port: &ResolvedPort, frontends: &[(ServiceKey, ServiceValue)]) -> u32 {
        let slots: SmallVec<[_; 8]> = self.state.slots(service).collect();
        let published = frontends.iter().map(|(_, value)| value.generation);
        let last = published.chain(slots.iter().map(|(_, value)| value.generation)).max();
        let last = last.unwrap_or_default();
        let (mut written, mut surplus) = (Vec::new(), Vec::new());
        for (list, wanted) in translate::lists(port) {
            let key = |slot| EndpointKey { service, list: list.number(), slot };
            let held = slots.iter().filter(|(key, _)| key.list == list.number());
            let endpoints = held.clone().map(|(key, value)| (key.slot, value.endpoint));
            let count = u32::try_from(wanted.len()).unwrap_or(u32::MAX);
            let changes = slots::arrange(endpoints, wanted).into_iter();
            written.extend(changes.map(|(slot, endpoint)| (key(slot), endpoint)));
            surplus.extend(held.filter(|(key, _)| key.slot >= count));
        }
        let generation = last + u32::from(!written.is_empty() || !surplus.is_empty());
        let value = |endpoint| EndpointValue { endpoint, generation };
        let put = |(key, endpoint)| Step::Put(MapEntry::Endpoint(key, value(endpoint)));
        self.phases.additions.extend(written.into_iter().map(put));
        self.remove_slots(surplus.into_iter());
        generation
    }

    fn remove_slots(&mut self, slots: impl Iterator<Item = (&'a EndpointKey, &'a EndpointValue)>) {
        let removed = slots.map(|(key, value)| Step::Remove(MapEntry::Endpoint(*key, *value)));
        self.phases.removals.extend(removed);
    }

    /// Plans the members. Also destroys the sockets of members that no longer serve.
    fn set_members(&mut self, service: u32, wanted: &BTreeSet<MemberKey>) {
        let have: BTreeSet<MemberKey> = self.state.members_of(service).copied().collect();
        self.difference(&have, wanted, MapEntry::Member);
        let gone = have.difference(wanted).filter(|member| member.list == List::Serving.number());
        let endpoints: Vec<Endpoint> = gone.map(|member| member.endpoint).collect();
        if !endpoints.is_empty() {
            self.phases.releases.push(Step::ReleaseSockets { service, endpoints });
        }
    }

    fn set_ranges(&mut self, service: u32, wanted: &BTreeSet<Range>) {
        let have = self.state.ranges_of(service).copied().collect();
        self.difference(&have, wanted, MapEntry::SourceRange);
    }

    fn set_dsr_nodes(&mut self, service: u32, wanted: &BTreeMap<DsrKey, Addr>) {
        let have = self.state.dsr_endpoints_of(service).map(|(key, node)| (*key, *node)).collect();
        self.value_difference(&have, wanted, MapEntry::DsrEndpoint);
    }

    pub(super) fn remove_port(&mut self, name: &ServicePortKey) {
        if let Some(service) = self.state.id(name) {
            self.names.push((name.clone(), None));
            self.remove_all(service);
        }
    }

    fn remove_all(&mut self, service: u32) {
        self.phases.closures.extend(self.state.frontends(service));
        self.remove_slots(self.state.slots(service));
        self.set_ranges(service, &BTreeSet::new());
        self.set_members(service, &BTreeSet::new());
        self.set_dsr_nodes(service, &BTreeMap::new());
    }

    /// Removes the entries of an earlier process that no service port took over.
    pub(super) fn remove_unowned(&mut self) {
        for service in self.state.services_in_use() {
            if !self.state.is_named(service) && !self.claimed.contains(&service) {
                self.remove_all(service);
            }
        }
    }
}

/// The identifier that a service port has, or those that it can take over.
enum KnownIds {
    /// It has this one.
    Own(u32),
    /// It has none. Its frontends in the kernel have these.
    OfFrontends(SmallVec<[u32; 4]>),
}

fn known_ids(state: &State, name: &ServicePortKey, port: &ResolvedPort) -> KnownIds {
    if let Some(service) = state.id(name) {
        return KnownIds::Own(service);
    }
    let frontends = translate::frontends(port, name.family, name.name.protocol);
    let held = frontends.iter().filter_map(|(key, _)| state.service(key));
    KnownIds::OfFrontends(held.map(|value| value.service).collect())
}

/// Returns true if a frontend gets a Maglev table, so that the programs adopt connections which
/// they do not know. Before the programs of this process are attached, a frontend that is new to it
/// may have connections too.
fn gets_table(before: Option<&ServiceValue>, value: &ServiceValue, attached: bool) -> bool {
    has_table(value) && before.map_or(!attached, |before| !has_table(before))
}
