//! What the kernel holds, and which service ports want what of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    IpvsSettings,
    claims::{Claims, Item, Reason},
    held::Held,
    node::{Node, Terms},
    plan::{SetChange, Step},
    refusals::Refusals,
    rules::Needs,
    sets::{Destination, Entry, Set},
};
use crate::{
    kernel::{
        ipvs::{Change, Timeouts, VirtualKey, VirtualServer},
        sysctl::NetSetting,
    },
    model::{IpFamily, ServicePortKey},
};

/// A real server that the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Real {
    /// Where it is.
    pub(super) address: SocketAddr,
    /// 0 where it gets no new connections.
    pub(super) weight: u32,
    /// It had no connections when it was looked at; what it gets from then on is not known.
    pub(super) is_idle: bool,
}

/// A virtual server that the kernel has, with its real servers by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Running {
    /// How it works.
    pub(super) server: VirtualServer,
    /// Sorted by address.
    pub(super) reals: Vec<Real>,
}

/// Who wants a virtual server: the first has it.
pub(super) type Owners = BTreeSet<(Reason, ServicePortKey)>;

/// An entry or a rule: whether the kernel has it, and how many service ports want it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Presence {
    /// The kernel has it.
    pub(super) is_there: bool,
    /// So many want it.
    pub(super) users: usize,
}

/// What the kernel holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// What is the same as long as the process runs.
    pub(super) terms: Terms,
    /// Settings of the kernel that are to be changed.
    pub(super) settings: Vec<(NetSetting, i64)>,
    /// Timeouts that are to be changed; zero where they are not.
    pub(super) timeouts: Timeouts,
    /// The dummy link is there.
    pub(super) has_link: bool,
    /// Its addresses.
    pub(super) addresses: BTreeSet<IpAddr>,
    /// Sets that are there.
    pub(super) sets: BTreeSet<(IpFamily, Set)>,
    /// Entries and rules of service ports.
    pub(super) items: BTreeMap<Item, Presence>,
    /// Rules, but of families where they could not be read or written: there they are left as they are.
    pub(super) rules: BTreeMap<IpFamily, Held>,
    /// What those were written for; none where that is not known.
    pub(super) needs: BTreeMap<IpFamily, Needs>,
    /// Virtual servers.
    pub(super) servers: BTreeMap<VirtualKey, Running>,
    /// Who wants them.
    pub(super) owners: BTreeMap<VirtualKey, Owners>,
    /// What each service port wants.
    pub(super) ports: BTreeMap<ServicePortKey, Claims>,
    /// What the kernel does not take.
    pub(super) refused: Refusals,
    /// The node that everything was planned for; none as long as not everything was.
    pub(super) node: Option<Node>,
}

impl State {
    /// A kernel without anything of ours, on a node with both families and an iptables that masquerades to random ports.
    pub fn of_empty_kernel(settings: &IpvsSettings) -> Self {
        let mut terms = Terms::new(settings, IpFamily::ALL.to_vec());
        for family in IpFamily::ALL {
            terms.take_randomly(family, true);
        }
        Self::empty(terms)
    }

    /// A kernel without anything of ours.
    pub(super) fn empty(terms: Terms) -> Self {
        Self {
            rules: terms.families.iter().map(|family| (*family, Held::default())).collect(),
            terms,
            settings: Vec::new(),
            timeouts: Timeouts::default(),
            has_link: false,
            addresses: BTreeSet::new(),
            sets: BTreeSet::new(),
            items: BTreeMap::new(),
            needs: BTreeMap::new(),
            servers: BTreeMap::new(),
            owners: BTreeMap::new(),
            ports: BTreeMap::new(),
            refused: Refusals::default(),
            node: None,
        }
    }

    /// Whether rules of a family can be relied on, and changed.
    pub(super) fn writes_rules(&self, family: IpFamily) -> bool {
        self.rules.contains_key(&family)
    }

    /// Whether a virtual server is to be reached from source ranges alone.
    pub(super) fn has_source_ranges(&self, key: VirtualKey) -> bool {
        let VirtualKey { protocol, address } = key;
        let to = Destination { address: address.ip(), protocol, port: address.port() };
        let family = IpFamily::of(address.ip());
        let item = Item::Entry(family, Set::LoadBalancerFirewall, Entry::Destination(to));
        self.items.get(&item).is_some_and(|presence| presence.is_there)
    }

    /// A step was made.
    pub(super) fn record(&mut self, step: Step) {
        match step {
            Step::Setting(setting, _) => self.settings.retain(|(held, _)| *held != setting),
            Step::Timeouts(_) => self.timeouts = Timeouts::default(),
            Step::Link => self.has_link = true,
            Step::Sets(changes) => changes.into_iter().for_each(|change| self.record_set(change)),
            Step::Rules(family, change) => self.rules.entry(family).or_default().record(&change),
            Step::Servers(changes) => changes.into_iter().for_each(|change| self.record_server(change)),
            Step::Retire(reals) => {
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
            SetChange::Add(family, set, entry) => self.found(family, set, entry),
            SetChange::Delete(family, set, entry) => {
                let item = Item::Entry(family, set, entry);
                self.refused.has_left(family, set, entry);
                if let Some(presence) = self.items.get_mut(&item) {
                    presence.is_there = false;
                    if presence.users == 0 {
                        self.items.remove(&item);
                    }
                }
            }
        }
    }

    /// A change of servers was made.
    pub(super) fn record_server(&mut self, change: Change) {
        let key = change.server();
        match change {
            Change::AddServer(_, server) => {
                self.servers.insert(key, Running { server, reals: Vec::new() });
            }
            Change::RemoveServer(_) => drop(self.servers.remove(&key)),
            Change::SetServer(_, server) => {
                if let Some(running) = self.servers.get_mut(&key) {
                    running.server = server;
                }
            }
            Change::AddReal(_, address, weight) | Change::SetReal(_, address, weight) => {
                let Some(running) = self.servers.get_mut(&key) else { return };
                let real = Real { address, weight, is_idle: false };
                match running.reals.binary_search_by_key(&address, |real| real.address) {
                    Ok(at) => running.reals[at] = real,
                    Err(at) => running.reals.insert(at, real),
                }
            }
            Change::RemoveReal(_, address) => {
                if let Some(running) = self.servers.get_mut(&key) {
                    running.reals.retain(|real| real.address != address);
                }
            }
        }
    }

    /// Notes an entry that the kernel has.
    pub(super) fn found(&mut self, family: IpFamily, set: Set, entry: Entry) {
        self.items.entry(Item::Entry(family, set, entry)).or_default().is_there = true;
    }
}
