//! Compares virtual servers, addresses, sets and rules with those that were written.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    desired::Item,
    read_rules,
    rules_state::RulesState,
    sets::{Entry, Set, SetEntry},
    settings::DUMMY_LINK,
    state::{State, VirtualServerState},
};
use crate::{
    dataplane::drift::difference,
    kernel::{
        KernelError,
        command::Launcher,
        ipset::Ipset,
        iptables::Iptables as Commands,
        ipvs::{Ipvs as Socket, VirtualKey},
        own_link::OwnLink,
    },
    model::{IpFamily, ServicePortKey},
};

/// What the kernel holds of this mode.
#[derive(Default)]
pub struct HeldObjects {
    servers: BTreeMap<VirtualKey, VirtualServerState>,
    entries: BTreeSet<SetEntry>,
    addresses: BTreeSet<IpAddr>,
    rules: BTreeMap<IpFamily, RulesState>,
}

impl HeldObjects {
    /// Reads everything in the network namespace of the caller.
    pub(super) fn read(
        launcher: &Launcher,
        commands: &BTreeMap<IpFamily, Commands>,
    ) -> Result<Self, KernelError> {
        let mut held = Self {
            servers: super::read_servers(&mut Socket::open()?)?,
            addresses: OwnLink::open(DUMMY_LINK)?.addresses()?,
            ..Self::default()
        };
        for (name, saved) in Ipset::new(launcher).save()? {
            let Some((family, set)) = Set::from_name(&name) else { continue };
            let entries = saved.entries.iter().filter_map(|text| Entry::parse(set, text));
            held.entries.extend(entries.map(|entry| SetEntry { family, set, entry }));
        }
        for (family, commands) in commands {
            held.rules.insert(*family, read_rules(commands)?.0);
        }
        Ok(held)
    }

    /// Returns what differs of a service port.
    pub(super) fn differences(&self, state: &State, key: &ServicePortKey) -> Vec<String> {
        let Some(objects) = state.ports.get(key) else { return Vec::new() };
        let mut found = Vec::new();
        for (server, _) in &objects.servers {
            if let Some(wanted) = state.servers.get(server) {
                found.extend(server_differences(*server, wanted, self.servers.get(server)));
            }
        }
        for item in objects.items.iter().filter(|item| state.has_item(item)) {
            // Rules are compared as whole chains.
            let Item::Entry(entry) = item else { continue };
            if !self.entries.contains(entry) {
                found.push(format!("the entry of a set {entry} is missing"));
            }
            if let SetEntry { set: Set::Addresses, entry: Entry::Address(address), .. } = entry
                && state.addresses.contains(address)
                && !self.addresses.contains(address)
            {
                found.push(format!("the address {address} of the link {DUMMY_LINK} is missing"));
            }
        }
        found
    }

    /// Returns what differs of the rules, which all service ports share.
    pub(super) fn differences_of_node(&self, state: &State) -> Vec<String> {
        let mut found = Vec::new();
        for (family, wanted) in &state.rules {
            let Some(held) = self.rules.get(family) else { continue };
            found.extend(wanted.chains_that_differ(held).into_iter().map(|chain| {
                format!("{family}: the chain {chain} is missing, has other rules, or nothing leads to it")
            }));
        }
        found
    }
}

/// Compares a virtual server and its real servers. One that gets no new connections may be gone.
fn server_differences(
    key: VirtualKey,
    wanted: &VirtualServerState,
    held: Option<&VirtualServerState>,
) -> Vec<String> {
    let describe = |_: &_| format!("the virtual server {key}");
    let mut found: Vec<String> =
        difference(&wanted.server, held.map(|held| &held.server), describe).into_iter().collect();
    let Some(held) = held else { return found };
    let weights = |server: &VirtualServerState| -> BTreeMap<_, _> {
        let used = server.reals.iter().filter(|real| real.weight > 0);
        used.map(|real| (real.address, real.weight)).collect()
    };
    let (wanted, held) = (weights(wanted), weights(held));
    for (address, weight) in &wanted {
        found.extend(difference(weight, held.get(address), |_| {
            format!("the real server {address} of the virtual server {key}")
        }));
    }
    let others = held.keys().filter(|address| !wanted.contains_key(address));
    found.extend(
        others.map(|address| format!("the virtual server {key} has the other real server {address}")),
    );
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataplane::ipvs::state::RealServerState, kernel::ipvs::VirtualServer, model::Protocol};

    fn server(reals: &[(&str, u32)]) -> VirtualServerState {
        let real = |(address, weight): &(&str, u32)| RealServerState {
            address: address.parse().expect("an address"),
            weight: *weight,
            is_idle: true,
        };
        VirtualServerState {
            server: VirtualServer::new("rr", [10, 96, 0, 80].into()),
            reals: reals.iter().map(real).collect(),
        }
    }

    #[test]
    fn a_virtual_server_differs_by_its_properties_and_its_real_servers() {
        let key = VirtualKey { protocol: Protocol::Tcp, address: "10.96.0.80:80".parse().expect("a VIP") };
        let wanted = server(&[("10.1.0.1:80", 1), ("10.1.0.2:80", 0)]);
        let differences = |held: Option<&VirtualServerState>| server_differences(key, &wanted, held);
        assert!(differences(Some(&wanted)).is_empty());
        assert!(differences(Some(&server(&[("10.1.0.1:80", 1)]))).is_empty(), "it gets no connections");
        assert_eq!(differences(None), ["the virtual server TCP 10.96.0.80:80 is missing"]);
        let mut persistent = wanted.clone();
        persistent.server = persistent.server.persistent(10);
        assert_eq!(
            differences(Some(&persistent)),
            ["the virtual server TCP 10.96.0.80:80 has another value"]
        );
        assert_eq!(
            differences(Some(&server(&[("10.1.0.1:80", 2), ("10.1.0.3:80", 1)]))),
            [
                "the real server 10.1.0.1:80 of the virtual server TCP 10.96.0.80:80 has another value",
                "the virtual server TCP 10.96.0.80:80 has the other real server 10.1.0.3:80",
            ]
        );
    }
}
