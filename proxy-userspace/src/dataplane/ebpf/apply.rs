//! Makes the changes of a plan, and records them in the state.

use std::{borrow::Cow, mem};

use proxy_common::layout::Refusing;

use super::{
    Ebpf, EbpfError, MapEntry, Plan, State, Step,
    failures::Failures,
    links::{HookState, xdp},
    maps::Maps,
    rules::RuleDuties,
};
use crate::{
    dataplane::lock,
    kernel::{KernelError, tunnel_link},
    model::{Framing, ServicePortKey},
};

/// The maximal number of entries of one map call. If one fails, at most so many are tried again.
const MAX_BATCH: usize = 512;

impl Ebpf {
    /// Continues after a service port or link that fails: the rest of the plan for it is skipped.
    /// Then it stays as it was. It also continues if the rules fail.
    pub(super) fn apply_all(&mut self, state: &mut State, plan: &mut Plan) -> Result<(), EbpfError> {
        self.assign_ids(state, mem::take(&mut plan.names));
        let plan = &*plan;
        let mut failures = Failures::without_room(state, plan, &self.maps.sizes);
        // A whole plan contains the rules unless they are right.
        let mut rules = self.rules_failure.clone().filter(|_| !plan.is_whole);
        self.reserve_prefilter(plan);
        let mut steps = plan.steps.as_slice();
        loop {
            let written = self.put_batch(steps, &failures, state);
            let Some((step, later)) = steps.get(written..).and_then(<[Step]>::split_first) else { break };
            steps = later;
            let Some(step) = failures.adjust(step, state) else { continue };
            if matches!(*step, Step::AttachLink(..)) {
                self.maglev.complete(state, plan);
            }
            match self.apply_step(&step, state) {
                Ok(()) if matches!(*step, Step::InstallRules(_)) => rules = None,
                Ok(()) => {}
                // Commands do not run any more, and the steps that follow may need the rules. If
                // maps are being replaced, the rules of the process before are there.
                Err(error)
                    if matches!(*step, Step::InstallRules(_))
                        && self.is_shutting_down()
                        && !self.is_replacing_state() =>
                {
                    return Err(EbpfError::Rules(error.into()));
                }
                Err(error) if matches!(*step, Step::InstallRules(_) | Step::LetProgramsRefuse(_)) => {
                    rules = Some(error.into());
                }
                // The steps that follow need these.
                Err(error) if matches!(*step, Step::Attach | Step::HandFlowsToConntrack) => {
                    return Err(error.into());
                }
                Err(error) => failures.add(&step, error, state),
            }
        }
        self.finish_state_copies();
        if let Err(error) = self.change_marks(state) {
            rules.get_or_insert(error.into());
        }
        self.rules_failure.clone_from(&rules);
        self.left_out_ports = failures.left_out_ports(state);
        if let Some(error) = rules {
            return Err(EbpfError::Rules(error));
        }
        failures.into_result()
    }

    /// Makes room in the prefilter for what the plan may insert, so that it doubles before the
    /// first of many items and not among them. Most members are endpoints too.
    fn reserve_prefilter(&self, plan: &Plan) {
        let is_item =
            |step: &&Step| matches!(step, Step::Put(MapEntry::Service(..) | MapEntry::Endpoint(..)));
        let items = plan.steps.iter().filter(is_item).count();
        lock(&self.maps.prefilter).reserve(items);
    }

    /// Writes the entries of the first steps by one call if these are several entries of one map
    /// with many entries, and records them in the state. Returns how many: if one fails, it is the
    /// next.
    fn put_batch(&mut self, steps: &[Step], failures: &Failures, state: &mut State) -> usize {
        let Some(Step::Put(first)) = steps.first() else { return 0 };
        if !Maps::takes_batches(first) {
            return 0;
        }
        let entry = |step| match failures.adjust(step, state) {
            Some(Cow::Borrowed(Step::Put(entry))) if entry.map() == first.map() => Some(entry),
            _ => None,
        };
        let entries: Vec<&MapEntry> = steps.iter().map_while(entry).take(MAX_BATCH).collect();
        let written = if entries.len() > 1 { self.maps.put_batch(&entries) } else { 0 };
        entries.iter().take(written).for_each(|entry| state.put(entry));
        written
    }

    /// Makes a change and records it in the state.
    fn apply_step(&mut self, step: &Step, state: &mut State) -> Result<(), KernelError> {
        match step {
            // The link is gone, or it refused the program.
            Step::Put(MapEntry::XdpLink(index, _)) if state.xdp_mode(*index).is_none() => return Ok(()),
            Step::Put(entry) => self.maps.put(entry)?,
            Step::Remove(entry) => self.maps.remove(entry)?,
            Step::SetLocalDetection(detection) => self.maps.set_local_detection(*detection)?,
            Step::SetSocketScope(scope) => self.maps.set_socket_scope(*scope)?,
            Step::SetMasquerade(fields) => self.maps.set_masquerade(*fields)?,
            Step::SetDirect(fields) => self.maps.set_direct(*fields)?,
            Step::SetTunnel(fields) => self.maps.set_tunnel(*fields)?,
            Step::SetNewFlows(new_flows) => self.maps.set_new_flows(*new_flows)?,
            Step::ForgetFlows(which) => self.forget_flows(*which)?,
            Step::ForgetSource(address) => self.forget_source(*address)?,
            Step::LeaveFlowsToConntrack => self.leave_flows(state),
            Step::LeaveConnectionsToConntrack { frontends } => self.leave_connections(state, frontends),
            Step::TrackFlows => self.track_flows()?,
            Step::HandFlowsToConntrack => self.hand_flows()?,
            Step::Attach => self.attach()?,
            Step::LetProgramsRefuse(duties) => self.let_programs_refuse(*duties)?,
            Step::InstallRules(duties) => self.install_rules(*duties, state)?,
            Step::AttachLink(at, link) => {
                self.begin_settling()?;
                let attached = self.links.attach(&mut self.object, &self.pins, *at, link)?;
                if link.framing == Framing::Tunnel && attached.is_some() {
                    tunnel_link::set(true)?;
                }
                // The link may be gone or left out.
                state.links.extend(attached.map(|attached| (*at, attached)));
                return Ok(());
            }
            Step::DetachLink(at, _) => self.links.detach(&self.pins, *at)?,
            Step::LeaveLink(at) => {
                if tunnel_link::index() == Some(at.index) {
                    // Without its program, the kernel would take packets from anybody.
                    tunnel_link::set(false)?;
                }
                self.links.leave(&self.pins, *at)?;
            }
            Step::AttachXdp(index, link) => {
                let attached = self.links.xdp.attach(&mut self.object, &self.pins, *index, link)?;
                // The link may be gone, or it refuses programs.
                state.xdp.extend(attached.map(|attached| (*index, attached)));
                return Ok(());
            }
            Step::DetachXdp(index) => xdp::detach(&self.pins, *index)?,
            Step::ReleaseSockets { .. } => self.socket_releaser.wake(),
        }
        state.record(step);
        Ok(())
    }

    fn let_programs_refuse(&mut self, duties: RuleDuties) -> Result<(), KernelError> {
        let Some(rules) = &mut self.rules else { return Ok(()) };
        rules.set_duties(duties)?;
        if rules.refusing() == Refusing::Programs {
            self.maps.set_refusing(Refusing::Programs)
        } else {
            Ok(())
        }
    }

    /// Installs the rules with these duties. After an error, what refused packets before goes on to
    /// refuse them.
    fn install_rules(&mut self, duties: RuleDuties, state: &mut State) -> Result<(), KernelError> {
        let Some(rules) = &mut self.rules else { return Ok(()) };
        // Programs of an earlier version may only mark packets, and links that are left out have no
        // programs.
        let needs_rules = |hook: &HookState| matches!(hook, HookState::Outdated | HookState::LeftOut);
        let refuse = duties.refuse || state.links.values().any(needs_rules);
        rules.set_duties(RuleDuties { refuse, ..duties })?;
        let is_same = |before: RuleDuties| before.masquerade == duties.masquerade;
        let installed = if state.rules_are_installed && state.rule_duties.is_some_and(is_same) {
            rules.install_table()
        } else {
            rules.install()
        };
        state.rules_are_installed &= installed.is_ok();
        installed?;
        self.maps.set_refusing(rules.refusing())
    }

    /// Assigns and releases the identifiers of service ports, with their slots of counts.
    fn assign_ids(&mut self, state: &mut State, names: Vec<(ServicePortKey, Option<u32>)>) {
        state.reserve_names(names.len());
        for (name, service) in names {
            match service {
                Some(service) => {
                    let is_new = || state.frontends(service).next().is_none();
                    self.service_slots.assign(&name, service, is_new);
                }
                None => state.id(&name).into_iter().for_each(|before| self.service_slots.release(before)),
            }
            state.record_name(name, service);
        }
        self.service_slots.drop_former_owners(|service| state.is_named(service));
    }
}
