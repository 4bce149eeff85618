//! Makes the steps of a plan.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
};

use super::{
    Ipvs,
    desired::{Item, KernelObject},
    error::IpvsError,
    failures::ApplyFailures,
    rule_features,
    sets::SetEntry,
    state::State,
    step::{SetChange, Step},
    sysctls,
};
use crate::{
    dataplane::{
        families,
        iptables_text::{self, Layout, TableInput},
    },
    kernel::{
        KernelError,
        ipvs::{Change, RealServer, VirtualKey},
    },
    model::IpFamily,
};

/// The maximum number of rejected set entries in one step. Each of them costs one more run of
/// ipset.
const MAX_REJECTED: usize = 64;

/// A plan that is being applied.
pub(super) struct Applying<'a> {
    pub(super) ipvs: &'a mut Ipvs,
    pub(super) state: &'a mut State,
    pub(super) failures: ApplyFailures,
}

impl Applying<'_> {
    /// Makes the safe part of a step and records the result. If one change fails, the changes that
    /// do not depend on it are made.
    pub(super) fn apply(&mut self, step: Step) -> Result<(), IpvsError> {
        let step = self.failures.safe_part(step, self.state);
        match &step {
            Step::Sysctl(setting, value) => sysctls::write(*setting, *value)?,
            Step::Timeouts(timeouts) => self.ipvs.socket.set_timeouts(*timeouts)?,
            Step::Link => self.ipvs.link.create_dummy()?,
            Step::Rules(family, _) if !self.state.writes_rules(*family) => return Ok(()),
            Step::Rules(family, inputs) => self.write_rules(*family, inputs)?,
            Step::Sets(changes) => return self.change_sets(changes.clone()),
            Step::Servers(changes) => return self.change_servers(changes),
            Step::Drain(reals) => return self.drain(reals),
            Step::AddAddresses(addresses) => return self.add_addresses(addresses),
            Step::DeleteAddresses(addresses) => return self.delete_addresses(addresses),
        }
        self.state.record(step);
        Ok(())
    }

    /// Writes the rules of a family. If they need something that iptables refuses, the plan after
    /// the next observation does without it.
    fn write_rules(&mut self, family: IpFamily, inputs: &[TableInput]) -> Result<(), IpvsError> {
        let Some(commands) = self.ipvs.commands.get(&family) else { return Ok(()) };
        self.ipvs.requests.iptables += 1;
        let input = iptables_text::text(inputs, Layout::ChainsFirst);
        let Err(source) = commands.restore_all(input.clone()) else { return Ok(()) };
        self.state.rules.remove(&family);
        self.ipvs.failed_restores.count(family);
        self.ipvs.options.refused.extend(rule_features::refused_by(commands, &input));
        Err(IpvsError::Rules { family, source })
    }

    /// Changes sets. Continues after a rejected entry.
    fn change_sets(&mut self, mut rest: Vec<SetChange>) -> Result<(), IpvsError> {
        for _ in 0..=MAX_REJECTED {
            if rest.is_empty() {
                return Ok(());
            }
            self.ipvs.requests.ipset += 1;
            let Err(error) = self.ipvs.ipset.restore(rest.iter().map(SetChange::line).collect()) else {
                self.state.record(Step::Sets(rest));
                return Ok(());
            };
            let Some((at, rejected)) = rejected_entry(&rest, &error) else {
                self.failures.sets_failed(&rest);
                return Err(error.into());
            };
            let after = rest.split_off(at);
            self.state.record(Step::Sets(std::mem::replace(&mut rest, after[1..].to_vec())));
            // The set has no room for another entry.
            if matches!(&error, KernelError::CommandFailed { stderr, .. } if stderr.contains("is full")) {
                rest.retain(|change| !self.is_rejected_too(*change, rejected));
            }
            self.failures.add(KernelObject::Item(Item::Entry(rejected)), error);
        }
        self.failures.sets_failed(&rest);
        Err(IpvsError::TooManyRejected(MAX_REJECTED))
    }

    /// Returns true if a change adds to the same full set as the rejected entry, and records that.
    fn is_rejected_too(&mut self, change: SetChange, rejected: SetEntry) -> bool {
        let SetChange::Add(entry) = change else { return false };
        let is_same_set = (entry.family, entry.set) == (rejected.family, rejected.set);
        if is_same_set {
            let object = format!("{} to the ipset {}", entry.entry, entry.set.name(entry.family));
            let error = KernelError::call("add", object)(io::Error::other("it is full"));
            self.failures.add(KernelObject::Item(Item::Entry(entry)), error);
        }
        is_same_set
    }

    fn add_addresses(&mut self, addresses: &[IpAddr]) -> Result<(), IpvsError> {
        let mut failed = Vec::new();
        for address in addresses {
            match self.ipvs.link.add(*address) {
                Ok(()) => drop(self.state.addresses.insert(*address)),
                Err(error) if is_rejection(&error) => {
                    self.failures.add(KernelObject::Item(Item::address(*address)), error);
                }
                Err(error) => failed.push((*address, error)),
            }
        }
        failed_addresses(failed)
    }

    fn delete_addresses(&mut self, addresses: &[IpAddr]) -> Result<(), IpvsError> {
        let mut failed = Vec::new();
        for address in addresses {
            match self.ipvs.link.delete(*address) {
                Ok(()) => drop(self.state.addresses.remove(address)),
                Err(error) => failed.push((*address, error)),
            }
        }
        failed_addresses(failed)
    }

    fn change_servers(&mut self, changes: &[Change]) -> Result<(), IpvsError> {
        let made = self.ipvs.socket.commit(changes);
        let made =
            made.inspect_err(|_| changes.iter().for_each(|change| self.failures.server_failed(change)));
        let mut failed = made?.into_iter().peekable();
        let mut failures = Vec::new();
        for (index, change) in changes.iter().enumerate() {
            let Some((_, source)) = failed.next_if(|(failed, _)| *failed == index) else {
                self.state.record_server(change.clone());
                continue;
            };
            match change {
                // The real servers of a rejected virtual server cannot be added either.
                _ if self.failures.contains(KernelObject::VirtualServer(change.server())) => {}
                Change::AddServer(key, _) | Change::SetServer(key, _) if is_rejection(&source) => {
                    self.failures.add(KernelObject::VirtualServer(*key), source);
                }
                Change::AddReal(key, real, _) if is_rejection(&source) => {
                    self.failures.add(KernelObject::RealServer(*key, *real), source);
                }
                _ => {
                    self.failures.server_failed(change);
                    failures.push((change.server().address.ip(), source));
                }
            }
        }
        let (family, count) = (family_of(&failures), failures.len());
        let first = failures.into_iter().next();
        first.map_or(Ok(()), |(_, source)| {
            Err(IpvsError::Servers { count, all: changes.len(), family, source })
        })
    }

    /// Drains real servers: sets their weight to 0 and then removes those without connections. In
    /// this order no connection can begin between the check and the removal.
    fn drain(&mut self, reals: &[(VirtualKey, SocketAddr)]) -> Result<(), IpvsError> {
        let quiet: Vec<Change> = reals.iter().map(|(key, real)| Change::SetReal(*key, *real, 0)).collect();
        self.change_servers(&quiet)?;
        let mut idle = Vec::new();
        let mut observed: BTreeMap<VirtualKey, Vec<RealServer>> = BTreeMap::new();
        for (key, real) in reals {
            if !observed.contains_key(key) {
                observed.insert(*key, self.ipvs.socket.real_servers(*key)?);
            }
            let found = observed.get(key).and_then(|all| all.iter().find(|found| found.address == *real));
            if found.is_some_and(|found| found.connections == 0) {
                idle.push(Change::RemoveReal(*key, *real));
            }
        }
        self.change_servers(&idle)
    }
}

/// Returns the only family of failed changes that concern these addresses.
fn family_of(failures: &[(IpAddr, KernelError)]) -> Option<IpFamily> {
    families::only_family(failures.iter().map(|(address, _)| IpFamily::of(*address)))
}

fn failed_addresses(failures: Vec<(IpAddr, KernelError)>) -> Result<(), IpvsError> {
    let family = family_of(&failures);
    let first = failures.into_iter().next();
    first.map_or(Ok(()), |(_, source)| Err(IpvsError::Addresses { family, source }))
}

/// Returns true if IPVS, or rtnetlink for an address, will never accept the object. Other errors
/// are temporary, or the kernel holds something else than shunt knows. A link on which IPv6 is
/// disabled accepts no address of it (EACCES).
fn is_rejection(error: &KernelError) -> bool {
    const PERMANENT: [i32; 6] = [
        libc::EINVAL,
        libc::EAFNOSUPPORT,
        libc::EPROTONOSUPPORT,
        libc::EOPNOTSUPP,
        libc::EADDRNOTAVAIL,
        libc::EACCES,
    ];
    matches!(error, KernelError::Call { source, .. }
        if source.raw_os_error().is_some_and(|number| PERMANENT.contains(&number)))
}

/// Returns the entry that `ipset restore` rejected, and its position. All changes before it were
/// made. Returns `None` if the error is about something else.
fn rejected_entry(changes: &[SetChange], error: &KernelError) -> Option<(usize, SetEntry)> {
    let KernelError::CommandFailed { stderr, .. } = error else { return None };
    let (_, rest) = stderr.split_once("Error in line ")?;
    let (number, message) = rest.split_once(':')?;
    let at = number.parse::<usize>().ok()?.checked_sub(1)?;
    let &SetChange::Add(entry) = changes.get(at)? else { return None };
    // For example, the next full plan creates a set again that somebody destroyed.
    let is_about_entry =
        !["does not exist", "Kernel error received"].iter().any(|other| message.contains(other));
    is_about_entry.then_some((at, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(number: i32) -> KernelError {
        KernelError::call("add", "it")(io::Error::from_raw_os_error(number))
    }

    #[test]
    fn an_address_of_a_disabled_family_is_rejected() {
        assert!(is_rejection(&error(libc::EACCES)));
        assert!(!is_rejection(&error(libc::ENOBUFS)));
    }

    #[test]
    fn failures_of_addresses_of_one_family_are_of_this_family() {
        let failed = |addresses: &[&str]| {
            let failures = addresses.iter().map(|text| (text.parse().unwrap(), error(libc::ENOBUFS)));
            failed_addresses(failures.collect()).map_err(|error| error.family())
        };
        assert_eq!(failed(&[]), Ok(()));
        assert_eq!(failed(&["fd96::1", "fd96::2"]), Err(Some(IpFamily::V6)));
        assert_eq!(failed(&["fd96::1", "10.96.0.1"]), Err(None));
    }
}
