//! Compares elements, chains and sets with those that were written.

use std::collections::BTreeMap;

use super::{
    read_table,
    service::PortObjects,
    sets::SharedSet,
    state::{State, Table},
    table::TABLE,
};
use crate::{
    dataplane::drift::difference,
    kernel::{
        KernelError,
        nftables::{self, Change, Name},
    },
    model::{IpFamily, ServicePortKey},
};

/// The contents of the tables. Of rules only their number is read.
pub struct HeldTables([(Table, BTreeMap<Name, usize>); 2]);

impl HeldTables {
    /// Reads the tables in the network namespace of the caller.
    pub(super) fn read() -> Result<Self, KernelError> {
        let mut socket = nftables::Nftables::open()?;
        let mut read = |family| {
            Ok::<_, KernelError>((read_table(&mut socket, family)?, socket.count_rules(family, TABLE)?))
        };
        Ok(Self([read(IpFamily::V4)?, read(IpFamily::V6)?]))
    }

    /// Returns what differs of a service port.
    pub(super) fn differences(&self, state: &State, key: &ServicePortKey) -> Vec<String> {
        let (Some(port), Some(settings)) = (state.ports.get(key), &state.settings) else { return Vec::new() };
        let (wanted, (held, rules)) = (state.table(key.family), &self.0[key.family as usize]);
        let objects = PortObjects::new(key, port, settings);
        let mut found = Vec::new();
        for (set, element) in objects.keys() {
            let at = (set, element);
            let Some(wanted) = wanted.elements.get(&at) else { continue };
            let held = held.elements.get(&at).map(|held| &held.value);
            found.extend(difference(&wanted.value, held, |value| {
                describe(&Change::AddElement(set.definition(), element, value.clone()), key.family)
            }));
        }
        for (name, rules_of_chain) in &objects.chains {
            found.extend(chain_difference(name, rules_of_chain.len(), held, rules));
        }
        let missing = objects.sets.iter().filter(|set| !held.sets.contains_key(&set.name));
        found.extend(missing.map(|set| format!("the set {} is missing", set.name)));
        found
    }

    /// Returns what differs of the chains and sets that all service ports share.
    pub(super) fn differences_of_node(&self, state: &State) -> Vec<String> {
        let mut found = Vec::new();
        for family in IpFamily::ALL {
            let (wanted, (held, rules)) = (state.table(family), &self.0[family as usize]);
            if wanted.exists && !held.exists {
                found.push(format!("the {family} table {TABLE} is missing"));
                continue;
            }
            let settings = state.settings.as_ref();
            for (chain, of_chain) in settings.into_iter().flat_map(|s| super::table::chains(s, family)) {
                let difference = chain_difference(&chain.name, of_chain.len(), held, rules);
                found.extend(difference.map(|difference| format!("{family}: {difference}")));
            }
            let missing = SharedSet::permanent().filter(|set| !held.sets.contains_key(&set.name()));
            found.extend(missing.map(|set| format!("{family}: the set {} is missing", set.name())));
        }
        found
    }
}

fn chain_difference(
    name: &Name,
    wanted: usize,
    held: &Table,
    rules: &BTreeMap<Name, usize>,
) -> Option<String> {
    let count = held.chains.contains_key(name).then(|| rules.get(name).copied().unwrap_or(0));
    match count {
        None => Some(format!("the chain {name} is missing")),
        Some(count) if count != wanted => {
            Some(format!("the chain {name} has {count} rules instead of {wanted}"))
        }
        Some(_) => None,
    }
}

/// Shows an element as nft does.
fn describe(change: &Change, family: IpFamily) -> String {
    let text = change.display(family, TABLE);
    text.strip_prefix("add ").unwrap_or(&text).to_owned()
}
