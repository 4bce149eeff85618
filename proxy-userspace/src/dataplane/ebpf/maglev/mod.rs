//! The Maglev tables of the Services that ask for them: which ones the state needs, and whether the
//! map has room for them. A thread fills and writes them.

mod builder;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU32,
    time::Duration,
};

use proxy_common::{
    layout::{EndpointKey, EndpointValue},
    maglev::TableSize,
};

use self::{
    builder::{ServiceTables, TableBuilder, WantedTable},
    table::Candidate,
};
use super::plan::{
    Plan, has_table,
    state::State,
    step::{MapEntry, Step},
};
use crate::{
    dataplane::MaglevCount,
    kernel::{KernelError, bpf::Object},
};

/// The tables of all service ports.
pub(super) struct MaglevTables {
    builder: TableBuilder,
    /// The number of pages that the map can have.
    capacity: usize,
    /// The pages of the tables of a service port, by identifier.
    pages: BTreeMap<u32, usize>,
    /// The sum of these.
    used: usize,
    /// The service ports whose tables have no room.
    without_room: BTreeSet<u32>,
    /// The state was read anew, and the tables do not follow it yet.
    is_behind: bool,
}

/// How long the first link programs wait for tables. A thousand tables take half a second.
const PATIENCE: Duration = Duration::from_secs(10);

impl MaglevTables {
    /// Starts the thread. `capacity` is the number of pages that the map can have.
    pub(super) fn start(object: &Object, capacity: u32) -> Result<Self, KernelError> {
        Ok(Self {
            builder: TableBuilder::start(object)?,
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
            pages: BTreeMap::new(),
            used: 0,
            without_room: BTreeSet::new(),
            is_behind: true,
        })
    }

    /// Records that the state was read anew: the next whole plan tells which tables are needed.
    pub(super) fn forget(&mut self) {
        self.is_behind = true;
    }

    /// Compares all pages with what was written, in the thread.
    pub(super) fn compare(&self) {
        if !self.pages.is_empty() {
            self.builder.compare();
        }
    }

    /// Returns the number of pages in the map.
    pub(super) fn pages(&self) -> usize {
        self.builder.pages()
    }

    /// Returns how many service ports have tables.
    pub(super) fn count(&self) -> MaglevCount {
        MaglevCount { with_tables: self.pages.len(), without_room: self.without_room.len() }
    }

    /// Makes the tables follow a plan whose frontends are written, before it attaches the first
    /// link programs. Otherwise a connection that the node does not know could get another endpoint
    /// than it has, for as long as its table is missing.
    pub(super) fn complete(&mut self, state: &State, plan: &Plan) {
        if self.is_behind && plan.is_whole {
            self.follow(state, plan);
            self.builder.wait(PATIENCE);
        }
    }

    /// Makes the tables follow the state after a plan. It looks only at service ports that the plan
    /// changed: each change of a list that has a frontend changes the frontend, too.
    pub(super) fn follow(&mut self, state: &State, plan: &Plan) {
        let catches_up = self.is_behind && plan.is_whole;
        let changed: BTreeSet<u32> = if catches_up {
            let known = self.pages.keys().chain(&self.without_room).copied();
            let with_table = state.frontend_values().filter(|value| has_table(value));
            known.chain(with_table.map(|value| value.service)).collect()
        } else {
            plan.steps.iter().filter_map(|step| self.changed_service(step)).collect()
        };
        let (used, rejected) = (self.used, self.without_room.clone());
        for service in changed {
            self.update(state, service);
        }
        if self.used < used {
            let waiting = std::mem::take(&mut self.without_room);
            for service in waiting {
                self.update(state, service);
            }
        }
        self.report(state, &(&self.without_room - &rejected));
        if catches_up {
            self.is_behind = false;
            // An earlier process may have left tables that nothing needs.
            self.builder.compare();
        }
    }

    /// Returns the service port that a step is for, if it has tables or gets them.
    fn changed_service(&self, step: &Step) -> Option<u32> {
        let (Step::Put(entry) | Step::Remove(entry)) = step else { return None };
        let gets_table = matches!(entry, MapEntry::Service(_, value) if has_table(value));
        let is_known =
            |service: &u32| self.pages.contains_key(service) || self.without_room.contains(service);
        entry.service().filter(|service| gets_table || is_known(service))
    }

    /// Replaces the tables of a service port, if there is room.
    fn update(&mut self, state: &State, service: u32) {
        let tables = tables_of(state, service);
        let pages: usize = tables.values().map(|table| table.size.pages() as usize).sum();
        self.used -= self.pages.remove(&service).unwrap_or(0);
        if self.used + pages > self.capacity {
            self.without_room.insert(service);
            return self.builder.set(service, ServiceTables::new());
        }
        self.without_room.remove(&service);
        if pages > 0 {
            self.used += pages;
            self.pages.insert(service, pages);
        }
        self.builder.set(service, tables);
    }

    /// Logs for which service ports there is no room.
    fn report(&self, state: &State, rejected: &BTreeSet<u32>) {
        let Some(service) = rejected.first().and_then(|first| state.name(*first)) else { return };
        tracing::warn!(
            service_ports = rejected.len(),
            first = %service,
            capacity = self.capacity,
            "the map maglev has no room for the tables of these service ports, whose clients may get \
             another endpoint at another node: raise shunt.ebpf.mapSizes.maglev, or lower \
             shunt.links.maglevTableSize"
        );
    }
}

/// Returns the tables that the frontends of a service port name.
fn tables_of(state: &State, service: u32) -> ServiceTables {
    let mut tables = ServiceTables::new();
    for (_, value) in state.frontends(service) {
        let list = u32::from(value.outside_list);
        if let Some(size) = TableSize::of_flags(value.flags) {
            let candidates =
                || candidates(state, EndpointKey { service, list, slot: 0 }, value.outside_count);
            tables.entry(list).or_insert_with(|| WantedTable { size, candidates: candidates() });
        }
    }
    tables
}

/// Returns the endpoints in the first slots of a list. All have the same weight, because Kubernetes
/// has none.
fn candidates(state: &State, first: EndpointKey, count: u32) -> Vec<Candidate> {
    let slots = state.slots_from(first).take_while(|(key, _)| key.slot < count);
    let candidate = |(key, value): (&EndpointKey, &EndpointValue)| {
        let slot = u16::try_from(key.slot).ok()?;
        Some(Candidate { slot, endpoint: value.endpoint, weight: NonZeroU32::MIN })
    };
    slots.filter_map(candidate).collect()
}
