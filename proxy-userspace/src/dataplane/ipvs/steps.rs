//! Carries out the steps of a plan.

use std::{collections::BTreeMap, io, net::SocketAddr};

use super::{
    Ipvs, IpvsError,
    plan::{SetChange, Step},
    refusals::{Refused, Refusing, is_full, is_refusal, refused_entry},
    sets::{Entry, Set},
    state::State,
};
use crate::{
    kernel::{
        KernelError,
        ipvs::{Change, RealServer, VirtualKey},
    },
    model::IpFamily,
};

/// Entries of sets that may be refused in one step, each a further run of ipset.
const MOST_REFUSED: usize = 64;

impl Ipvs {
    /// Makes one step and notes what came of it; of changes that can fail by themselves all others are made.
    pub(super) fn step(
        &mut self,
        state: &mut State,
        step: Step,
        refusing: &mut Refusing,
    ) -> Result<(), IpvsError> {
        match &step {
            Step::Setting(setting, value) => super::set(*setting, *value)?,
            Step::Timeouts(timeouts) => self.socket.set_timeouts(*timeouts)?,
            Step::Link => self.link.create()?,
            Step::Rules(family, change) => {
                let Some(commands) = self.commands.get(family) else { return Ok(()) };
                if !state.writes_rules(*family) {
                    return Ok(());
                }
                self.runs.1 += 1;
                if let Err(source) = commands.restore_all(change.input()) {
                    state.rules.remove(family);
                    self.failed_restores.count(*family);
                    return Err(IpvsError::Rules { family: *family, source });
                }
            }
            Step::Sets(_) => return self.change_sets(state, step, refusing),
            Step::Servers(changes) => return self.change_servers(state, changes, refusing),
            Step::Retire(reals) => return self.retire(state, reals, refusing),
            Step::AddAddresses(_) => return self.add_addresses(state, step, refusing),
            Step::DeleteAddresses(addresses) => {
                addresses.iter().try_for_each(|address| self.link.delete(*address))?;
            }
        }
        state.record(step);
        Ok(())
    }

    /// Goes on after an entry that is refused.
    fn change_sets(
        &mut self,
        state: &mut State,
        step: Step,
        refusing: &mut Refusing,
    ) -> Result<(), IpvsError> {
        let Step::Sets(mut rest) = step else { return Ok(()) };
        for _ in 0..=MOST_REFUSED {
            if rest.is_empty() {
                return Ok(());
            }
            self.runs.0 += 1;
            let Err(error) = self.ipset.restore(rest.iter().map(SetChange::line).collect()) else {
                state.record(Step::Sets(rest));
                return Ok(());
            };
            let Some((at, family, set, entry)) = refused_entry(&rest, &error) else {
                refusing.may_lack(&rest);
                return Err(error.into());
            };
            let after = rest.split_off(at);
            state.record(Step::Sets(std::mem::replace(&mut rest, after[1..].to_vec())));
            if is_full(&error) {
                rest.retain(|change| !is_refused_too(*change, family, set, refusing));
            }
            refusing.add_entry(family, set, entry, error);
        }
        refusing.may_lack(&rest);
        Err(IpvsError::TooManyRefused { most: MOST_REFUSED })
    }

    fn add_addresses(
        &mut self,
        state: &mut State,
        step: Step,
        refusing: &mut Refusing,
    ) -> Result<(), IpvsError> {
        let Step::AddAddresses(addresses) = step else { return Ok(()) };
        let (mut added, mut first) = (Vec::new(), None);
        for address in addresses {
            match self.link.add(address) {
                Ok(()) => added.push(address),
                Err(error) if is_refusal(&error) => {
                    let entry = Entry::Address(address);
                    refusing.add_entry(IpFamily::of(address), Set::Addresses, entry, error);
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
        refusing: &mut Refusing,
    ) -> Result<(), IpvsError> {
        let made = self.socket.commit(changes);
        let made = made.inspect_err(|_| changes.iter().for_each(|change| refusing.may_stay(change)));
        let mut failures = made?.into_iter().peekable();
        let (mut first, mut count) = (None, 0);
        for (index, change) in changes.iter().enumerate() {
            let Some((_, source)) = failures.next_if(|(failed, _)| *failed == index) else {
                state.record_server(change.clone());
                continue;
            };
            match change {
                // Of a server that is not there, nothing is.
                _ if refusing.has(Refused::Server(change.server())) => {}
                Change::AddServer(key, _) | Change::SetServer(key, _) if is_refusal(&source) => {
                    refusing.add(Refused::Server(*key), source);
                }
                Change::AddReal(key, real, _) if is_refusal(&source) => {
                    refusing.add(Refused::Real(*key, *real), source);
                }
                _ => {
                    refusing.may_stay(change);
                    first.get_or_insert(source);
                    count += 1;
                }
            }
        }
        first.map_or(Ok(()), |source| Err(IpvsError::Refused { count, all: changes.len(), source }))
    }

    /// No new connections first, so that none comes between the look and the removal.
    fn retire(
        &mut self,
        state: &mut State,
        reals: &[(VirtualKey, SocketAddr)],
        refusing: &mut Refusing,
    ) -> Result<(), IpvsError> {
        let quiet: Vec<Change> = reals.iter().map(|(key, real)| Change::SetReal(*key, *real, 0)).collect();
        self.change_servers(state, &quiet, refusing)?;
        let mut idle = Vec::new();
        let mut looked_at: BTreeMap<VirtualKey, Vec<RealServer>> = BTreeMap::new();
        for (key, real) in reals {
            if !looked_at.contains_key(key) {
                looked_at.insert(*key, self.socket.real_servers(*key)?);
            }
            let found = looked_at.get(key).and_then(|all| all.iter().find(|found| found.address == *real));
            if found.is_some_and(|found| found.connections == 0) {
                idle.push(Change::RemoveReal(*key, *real));
            }
        }
        self.change_servers(state, &idle, refusing)
    }
}

/// Whether a change adds to this set too, which is full.
fn is_refused_too(change: SetChange, family: IpFamily, set: Set, refusing: &mut Refusing) -> bool {
    match change {
        SetChange::Add(of, it, entry) if (of, it) == (family, set) => {
            let error = KernelError::call("add", format!("{entry} to the ipset {}", set.name(family)))(
                io::Error::other("it is full"),
            );
            refusing.add_entry(family, set, entry, error);
            true
        }
        _ => false,
    }
}
