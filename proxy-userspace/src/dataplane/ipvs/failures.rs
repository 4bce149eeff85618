//! What failed while a plan is applied, and which later steps must not be made because of it.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    desired::{DesiredObjects, Item, KernelObject},
    error::IpvsError,
    sets::{Set, SetEntry},
    state::State,
    step::{SetChange, Step},
};
use crate::{
    kernel::{
        KernelError,
        ipvs::{Change, VirtualKey},
    },
    model::{IpFamily, ServicePortKey},
};

/// The failures so far of a plan that is being applied.
#[derive(Debug, Default)]
pub(super) struct ApplyFailures {
    rejected: Vec<(KernelObject, KernelError)>,
    /// Virtual servers with source ranges whose entry in the firewall set may be missing.
    unprotected: BTreeSet<VirtualKey>,
    /// Virtual servers that should be removed but may still exist.
    not_removed: BTreeSet<VirtualKey>,
}

impl ApplyFailures {
    /// Records that the kernel rejected an object.
    pub(super) fn add(&mut self, object: KernelObject, error: KernelError) {
        self.rejected.push((object, error));
    }

    /// Records that these changes of sets failed, not because of one entry.
    pub(super) fn sets_failed(&mut self, changes: &[SetChange]) {
        self.unprotected.extend(changes.iter().filter_map(|change| match change {
            SetChange::Add(SetEntry { set: Set::LoadBalancerFirewall, entry, .. }) => entry.server(),
            _ => None,
        }));
    }

    /// Records that this change failed.
    pub(super) fn server_failed(&mut self, change: &Change) {
        if let Change::RemoveServer(key) = change {
            self.not_removed.insert(*key);
        }
    }

    /// Returns true if the kernel rejected this object.
    pub(super) fn contains(&self, object: KernelObject) -> bool {
        self.rejected.iter().any(|(rejected, _)| *rejected == object)
    }

    /// Removes the parts of a step that are unsafe after the failures so far:
    ///
    /// - a new virtual server, if a set entry or rule that protects it is missing,
    /// - an address without a virtual server, because the node's own ports would answer there,
    /// - the deletion of set entries that protect a virtual server which could not be removed.
    pub(super) fn safe_part(&self, mut step: Step, state: &State) -> Step {
        match &mut step {
            Step::Sets(changes) if !self.not_removed.is_empty() => changes.retain(|change| match change {
                SetChange::Delete(SetEntry { entry, .. }) => {
                    entry.server().is_none_or(|key| !self.not_removed.contains(&key))
                }
                _ => true,
            }),
            Step::Servers(changes) if self.has_failures(state) => changes.retain(|change| match change {
                Change::AddServer(key, _) | Change::AddReal(key, ..) => self.is_protected(*key, state),
                _ => true,
            }),
            Step::AddAddresses(addresses) if self.has_failures(state) => {
                addresses.retain(|address: &IpAddr| {
                    !self.contains(KernelObject::Item(Item::address(*address)))
                        && state.servers.keys().any(|key| key.address.ip() == *address)
                });
            }
            _ => {}
        }
        step
    }

    fn has_failures(&self, state: &State) -> bool {
        let is_clean = self.rejected.is_empty() && self.unprotected.is_empty();
        !is_clean || state.options.families.iter().any(|family| !state.writes_rules(*family))
    }

    /// Returns false if the restriction to source ranges may be missing, because rules of the
    /// family or set entries failed.
    fn is_protected(&self, key: VirtualKey, state: &State) -> bool {
        let family = IpFamily::of(key.address.ip());
        let lacks_ranges =
            self.unprotected.contains(&key) || (!state.writes_rules(family) && state.has_source_ranges(key));
        let is_entry_of_server = |object: &KernelObject| match object {
            KernelObject::Item(Item::Entry(SetEntry { set, entry, .. })) => {
                *set != Set::LoopBack && entry.server() == Some(key)
            }
            _ => false,
        };
        (state.servers.contains_key(&key) || !lacks_ranges)
            && !self.rejected.iter().any(|(object, _)| is_entry_of_server(object))
    }

    /// Records each rejection with the service ports that need the object, of those that were
    /// planned and those from before. An object that no service port needs is an error of its own.
    pub(super) fn record(
        self,
        state: &mut State,
        planned: &[(ServicePortKey, Option<DesiredObjects>)],
    ) -> Result<(), IpvsError> {
        let mut unowned = None;
        for (object, error) in self.rejected {
            let planned = planned.iter().filter_map(|(key, desired)| Some((key, desired.as_ref()?)));
            let all = planned.chain(&state.ports).filter(|(_, desired)| desired.contains(object));
            let ports: BTreeSet<_> = all.map(|(key, _)| key.clone()).collect();
            let message = error.to_string();
            if ports.is_empty() {
                unowned.get_or_insert(error);
            }
            for key in ports {
                state.rejections.add(key, object, message.clone());
            }
        }
        unowned.map_or(Ok(()), |error| Err(error.into()))
    }
}
