//! What the kernel holds, and which service ports need which parts of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    desired::{DesiredObjects, Item, ServerReason},
    node::{Node, PlanOptions},
    rejections::Rejections,
    rule_features::RefusedFeatures,
    rules::Needs,
    rules_state::RulesState,
    sets::{Destination, Entry, Set, SetEntry},
    settings::IpvsSettings,
    step::{SetChange, Step},
};
use crate::{
    kernel::{
        ipvs::{Change, RealServer, Timeouts, VirtualKey, VirtualServer},
        sysctl::Sysctl,
    },
    model::{IpFamily, ServicePortKey},
};

/// A real server in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServerState {
    /// Its address and port.
    pub address: SocketAddr,
    /// Its weight. A real server of weight 0 gets no new connections.
    pub weight: u32,
    /// It had no connections when it was observed. It can have new ones since then.
    pub is_idle: bool,
}

impl From<RealServer> for RealServerState {
    fn from(real: RealServer) -> Self {
        Self { address: real.address, weight: real.weight, is_idle: real.connections == 0 }
    }
}

/// A virtual server in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServerState {
    /// Its properties.
    pub server: VirtualServer,
    /// Its real servers, sorted by address.
    pub reals: Vec<RealServerState>,
}

/// The service ports that need a virtual server. The first is its owner: the virtual server has the
/// properties and endpoints of that service port.
pub(super) type ServerUsers = BTreeSet<(ServerReason, ServicePortKey)>;

/// The state of an ipset entry or a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ItemState {
    /// The kernel has it.
    pub(super) exists: bool,
    /// The number of service ports that need it.
    pub(super) users: usize,
}

/// What the kernel holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The settings that plans use.
    pub(super) options: PlanOptions,
    /// Sysctls to change, with the right value.
    pub(super) sysctls: Vec<(Sysctl, i64)>,
    /// Timeouts to change. Zero means no change.
    pub(super) timeouts: Timeouts,
    /// The dummy link exists.
    pub(super) has_link: bool,
    /// The addresses of the dummy link.
    pub addresses: BTreeSet<IpAddr>,
    /// The sets that exist.
    pub sets: BTreeSet<(IpFamily, Set)>,
    /// Set entries and rules of service ports.
    pub(super) items: BTreeMap<Item, ItemState>,
    /// The rules of each family. A family is missing if its rules could not be read or written. Its
    /// rules then stay as they are.
    pub(super) rules: BTreeMap<IpFamily, RulesState>,
    /// The needs that the rules were written for. A family is missing if they are unknown.
    pub(super) needs: BTreeMap<IpFamily, Needs>,
    /// The virtual servers.
    pub servers: BTreeMap<VirtualKey, VirtualServerState>,
    /// The service ports that need each virtual server.
    pub(super) server_users: BTreeMap<VirtualKey, ServerUsers>,
    /// The objects that each service port needs.
    pub(super) ports: BTreeMap<ServicePortKey, DesiredObjects>,
    /// The objects that the kernel rejected.
    pub(super) rejections: Rejections,
    /// The node of the last full plan. `None` requests a full plan.
    pub(super) node: Option<Node>,
}

impl State {
    /// Returns the state of a kernel without any object of shunt, on a node with both families and
    /// an iptables that knows `--random-fully`.
    pub fn of_empty_kernel(settings: &IpvsSettings) -> Self {
        let families = IpFamily::ALL;
        Self::empty(PlanOptions {
            families: families.into(),
            settings: settings.clone(),
            random_fully: families.into(),
            refused: RefusedFeatures::new(),
        })
    }

    /// Returns the state of a kernel without any object of shunt.
    pub(super) fn empty(options: PlanOptions) -> Self {
        let rules = options.families.iter().map(|family| (*family, RulesState::default())).collect();
        Self { options, rules, ..Self::default() }
    }

    /// Returns true if the rules of a family are known and may be changed.
    pub(super) fn writes_rules(&self, family: IpFamily) -> bool {
        self.rules.contains_key(&family)
    }

    /// Returns true if the kernel has the item.
    pub(super) fn has_item(&self, item: &Item) -> bool {
        self.items.get(item).is_some_and(|item| item.exists)
    }

    /// Returns the items that the kernel has.
    pub fn existing_items(&self) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(|(_, state)| state.exists).map(|(item, _)| item)
    }

    /// Returns true if only source ranges may connect to a virtual server.
    pub(super) fn has_source_ranges(&self, key: VirtualKey) -> bool {
        let VirtualKey { protocol, address } = key;
        let to = Destination { address: address.ip(), protocol, port: address.port() };
        let (family, set) = (IpFamily::of(address.ip()), Set::LoadBalancerFirewall);
        self.has_item(&Item::Entry(SetEntry { family, set, entry: Entry::Destination(to) }))
    }

    /// Records that a step was made.
    pub(super) fn record(&mut self, step: Step) {
        match step {
            Step::Sysctl(setting, _) => self.sysctls.retain(|(held, _)| *held != setting),
            Step::Timeouts(_) => self.timeouts = Timeouts::default(),
            Step::Link => self.has_link = true,
            Step::Sets(changes) => changes.into_iter().for_each(|change| self.record_set(change)),
            Step::Rules(family, change) => self.rules.entry(family).or_default().record(&change),
            Step::Servers(changes) => changes.into_iter().for_each(|change| self.record_server(change)),
            Step::Drain(reals) => {
                for (key, real) in reals {
                    self.record_server(Change::SetReal(key, real, 0));
                }
            }
            Step::AddAddresses(addresses) => self.addresses.extend(addresses),
            Step::DeleteAddresses(addresses) => {
                for address in addresses {
                    self.addresses.remove(&address);
                }
            }
        }
    }

    fn record_set(&mut self, change: SetChange) {
        match change {
            SetChange::Create(family, set) => drop(self.sets.insert((family, set))),
            SetChange::Add(entry) => self.record_entry(entry),
            SetChange::Delete(entry) => {
                self.rejections.entry_deleted(entry);
                self.update_item(Item::Entry(entry), |item| item.exists = false);
            }
        }
    }

    /// Records that the kernel has an entry.
    pub(super) fn record_entry(&mut self, entry: SetEntry) {
        self.update_item(Item::Entry(entry), |item| item.exists = true);
    }

    /// Changes an item. Forgets it if the kernel does not have it and no service port needs it.
    pub(super) fn update_item(&mut self, item: Item, change: impl FnOnce(&mut ItemState)) {
        let state = self.items.entry(item).or_default();
        change(state);
        if *state == ItemState::default() {
            self.items.remove(&item);
        }
    }

    /// Records that a change of virtual or real servers was made.
    pub(super) fn record_server(&mut self, change: Change) {
        let key = change.server();
        match (change, self.servers.get_mut(&key)) {
            (Change::AddServer(_, server), _) => {
                self.servers.insert(key, VirtualServerState { server, reals: Vec::new() });
            }
            (Change::RemoveServer(_), _) => drop(self.servers.remove(&key)),
            (Change::SetServer(_, server), Some(state)) => state.server = server,
            (Change::AddReal(_, address, weight) | Change::SetReal(_, address, weight), Some(state)) => {
                let real = RealServerState { address, weight, is_idle: false };
                match state.reals.binary_search_by_key(&address, |real| real.address) {
                    Ok(at) => state.reals[at] = real,
                    Err(at) => state.reals.insert(at, real),
                }
            }
            (Change::RemoveReal(_, address), Some(state)) => {
                state.reals.retain(|real| real.address != address);
            }
            (_, None) => {}
        }
    }
}
