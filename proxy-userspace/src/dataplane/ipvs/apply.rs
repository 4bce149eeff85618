//! Makes the steps of a plan.

use std::{collections::BTreeMap, io, net::SocketAddr};

use super::{
    Ipvs,
    desired::{Item, KernelObject},
    error::IpvsError,
    failures::ApplyFailures,
    sets::SetEntry,
    state::State,
    step::{SetChange, Step},
    sysctls,
};
use crate::{
    dataplane::iptables_text::{self, Layout},
    kernel::{
        KernelError,
        ipvs::{Change, RealServer, VirtualKey},
    },
};

/// The maximum number of rejected set entries in one step. Each of them costs one more run of ipset.
const MAX_REJECTED: usize = 64;

impl Ipvs {
    /// Makes one step and records the result. If one change of a step fails and the others do not
    /// depend on it, the others are made.
    pub(super) fn apply_step(
        &mut self,
        state: &mut State,
        step: Step,
        failures: &mut ApplyFailures,
    ) -> Result<(), IpvsError> {
        match &step {
            Step::Sysctl(setting, value) => sysctls::write(*setting, *value)?,
            Step::Timeouts(timeouts) => self.socket.set_timeouts(*timeouts)?,
            Step::Link => self.link.create()?,
            Step::Rules(family, inputs) => {
                let Some(commands) = self.commands.get(family) else { return Ok(()) };
                if !state.writes_rules(*family) {
                    return Ok(());
                }
                self.iptables_runs += 1;
                if let Err(source) = commands.restore_all(iptables_text::text(inputs, Layout::ChainsFirst)) {
                    state.rules.remove(family);
                    self.failed_restores.count(*family);
                    return Err(IpvsError::Rules { family: *family, source });
                }
            }
            Step::Sets(_) => return self.change_sets(state, step, failures),
            Step::Servers(changes) => return self.change_servers(state, changes, failures),
            Step::Drain(reals) => return self.drain(state, reals, failures),
            Step::AddAddresses(_) => return self.add_addresses(state, step, failures),
            Step::DeleteAddresses(addresses) => {
                addresses.iter().try_for_each(|address| self.link.delete(*address))?;
            }
        }
        state.record(step);
        Ok(())
    }

    /// Changes sets. Continues after a rejected entry.
    fn change_sets(
        &mut self,
        state: &mut State,
        step: Step,
        failures: &mut ApplyFailures,
    ) -> Result<(), IpvsError> {
        let Step::Sets(mut rest) = step else { return Ok(()) };
        for _ in 0..=MAX_REJECTED {
            if rest.is_empty() {
                return Ok(());
            }
            self.ipset_runs += 1;
            let Err(error) = self.ipset.restore(rest.iter().map(SetChange::line).collect()) else {
                state.record(Step::Sets(rest));
                return Ok(());
            };
            let Some((at, rejected)) = rejected_entry(&rest, &error) else {
                failures.sets_failed(&rest);
                return Err(error.into());
            };
            let after = rest.split_off(at);
            state.record(Step::Sets(std::mem::replace(&mut rest, after[1..].to_vec())));
            if is_set_full(&error) {
                rest.retain(|change| !is_rejected_too(*change, rejected, failures));
            }
            failures.add(KernelObject::Item(Item::Entry(rejected)), error);
        }
        failures.sets_failed(&rest);
        Err(IpvsError::TooManyRejected { max: MAX_REJECTED })
    }

    fn add_addresses(
        &mut self,
        state: &mut State,
        step: Step,
        failures: &mut ApplyFailures,
    ) -> Result<(), IpvsError> {
        let Step::AddAddresses(addresses) = step else { return Ok(()) };
        let (mut added, mut first) = (Vec::new(), None);
        for address in addresses {
            match self.link.add(address) {
                Ok(()) => added.push(address),
                Err(error) if is_rejection(&error) => {
                    failures.add(KernelObject::Item(Item::address(address)), error);
                }
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        state.record(Step::AddAddresses(added));
        first.map_or(Ok(()), |error| Err(error.into()))
    }

    fn change_servers(
        &mut self,
        state: &mut State,
        changes: &[Change],
        failures: &mut ApplyFailures,
    ) -> Result<(), IpvsError> {
        let made = self.socket.commit(changes);
        let made = made.inspect_err(|_| changes.iter().for_each(|change| failures.server_failed(change)));
        let mut failed = made?.into_iter().peekable();
        let (mut first, mut count) = (None, 0);
        for (index, change) in changes.iter().enumerate() {
            let Some((_, source)) = failed.next_if(|(failed, _)| *failed == index) else {
                state.record_server(change.clone());
                continue;
            };
            match change {
                // The real servers of a rejected virtual server cannot be added either.
                _ if failures.contains(KernelObject::VirtualServer(change.server())) => {}
                Change::AddServer(key, _) | Change::SetServer(key, _) if is_rejection(&source) => {
                    failures.add(KernelObject::VirtualServer(*key), source);
                }
                Change::AddReal(key, real, _) if is_rejection(&source) => {
                    failures.add(KernelObject::RealServer(*key, *real), source);
                }
                _ => {
                    failures.server_failed(change);
                    first.get_or_insert(source);
                    count += 1;
                }
            }
        }
        first.map_or(Ok(()), |source| Err(IpvsError::Servers { count, all: changes.len(), source }))
    }

    /// Drains real servers: sets their weight to 0 and then removes those without connections. In
    /// this order no connection can begin between the check and the removal.
    fn drain(
        &mut self,
        state: &mut State,
        reals: &[(VirtualKey, SocketAddr)],
        failures: &mut ApplyFailures,
    ) -> Result<(), IpvsError> {
        let quiet: Vec<Change> = reals.iter().map(|(key, real)| Change::SetReal(*key, *real, 0)).collect();
        self.change_servers(state, &quiet, failures)?;
        let mut idle = Vec::new();
        let mut observed: BTreeMap<VirtualKey, Vec<RealServer>> = BTreeMap::new();
        for (key, real) in reals {
            if !observed.contains_key(key) {
                observed.insert(*key, self.socket.real_servers(*key)?);
            }
            let found = observed.get(key).and_then(|all| all.iter().find(|found| found.address == *real));
            if found.is_some_and(|found| found.connections == 0) {
                idle.push(Change::RemoveReal(*key, *real));
            }
        }
        self.change_servers(state, &idle, failures)
    }
}

/// Returns true if a change adds to the same full set as the rejected entry, and records that.
fn is_rejected_too(change: SetChange, rejected: SetEntry, failures: &mut ApplyFailures) -> bool {
    match change {
        SetChange::Add(entry) if (entry.family, entry.set) == (rejected.family, rejected.set) => {
            let object = format!("{} to the ipset {}", entry.entry, entry.set.name(entry.family));
            let error = KernelError::call("add", object)(io::Error::other("it is full"));
            failures.add(KernelObject::Item(Item::Entry(entry)), error);
            true
        }
        _ => false,
    }
}

/// Returns true if IPVS, or rtnetlink for an address, will never accept the object. Other errors are
/// temporary, or the kernel holds something else than shunt knows.
fn is_rejection(error: &KernelError) -> bool {
    const PERMANENT: [i32; 5] =
        [libc::EINVAL, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP, libc::EADDRNOTAVAIL];
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

/// Returns true if the set has no room for another entry.
fn is_set_full(error: &KernelError) -> bool {
    matches!(error, KernelError::CommandFailed { stderr, .. } if stderr.contains("is full"))
}
