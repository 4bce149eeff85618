//! The periodic look: what the sync thread reads itself, and what threads compare.

use std::sync::Arc;

use super::{
    Ebpf, EbpfError, State,
    links::xdp,
    maps::{checker::MapChecker, entries::EntryReader},
    program_checker::{Expected, ProgramChecker},
    rules::Rules,
};
use crate::kernel::KernelError;

/// What happens if the kernel differs from what was written.
pub(super) type OnDrift = Arc<dyn Fn() + Send + Sync>;

/// The threads that compare the kernel with what was written.
pub(super) struct Checkers {
    pub(super) maps: MapChecker,
    /// [`Ebpf::refresh`] leaves the maps to the thread, which starts after the plan.
    pub(super) maps_are_due: bool,
    pub(super) programs: ProgramChecker,
    /// The same for links and rules.
    pub(super) programs_are_due: bool,
}

impl Ebpf {
    /// Compares maps, programs on links and rules with what was written in threads from now on,
    /// instead of reading them on the thread that applies plans. `on_drift` is called there if
    /// something differs.
    pub fn check_in_threads(&mut self, on_drift: impl Fn() + Send + Sync + 'static) -> Result<(), EbpfError> {
        let on_drift: OnDrift = Arc::new(on_drift);
        let entries = EntryReader::open(&self.object)?;
        let (prefilter, usage) = (Arc::clone(&self.maps.prefilter), Arc::clone(&self.sweeper.usage));
        let maps = MapChecker::start(entries, prefilter, usage, Arc::clone(&on_drift))?;
        let programs = ProgramChecker::start(self.links.reader(&self.pins)?, on_drift)?;
        self.checkers = Some(Checkers { maps, maps_are_due: false, programs, programs_are_due: false });
        Ok(())
    }

    /// Reads which programs are attached, and whether the rules are installed.
    pub(super) fn observe_programs(&mut self, state: &mut State) -> Result<(), KernelError> {
        // Whatever the thread found before is older than what follows.
        self.checkers.iter().for_each(|checkers| checkers.programs.forget_doubt());
        state.attached = self.is_attached()?;
        state.links = self.links.observe(&self.object, &self.pins)?;
        state.xdp = xdp::observe(&self.object, &self.pins)?;
        let are_installed = self.rules.as_ref().is_none_or(Rules::are_installed);
        state.rules_are_installed = are_installed && self.refuses_as_planned()?;
        state.rule_duties = self.rules.as_ref().map(Rules::duties);
        Ok(())
    }

    /// Returns true if either the rules or the programs refuse packets, and not both.
    fn refuses_as_planned(&self) -> Result<bool, KernelError> {
        let Some(rules) = &self.rules else { return Ok(true) };
        Ok(self.maps.refusing()? == rules.refusing() as u32)
    }

    /// Reads which socket programs are attached, and leaves links and rules to a thread. Reads them
    /// here if they are in doubt, or were not as they must be.
    pub(super) fn refresh_programs(&mut self, state: &mut State) -> Result<(), KernelError> {
        let are_right = state.rules_are_installed && self.refuses_as_planned()?;
        let is_settled = |checkers: &&mut Checkers| are_right && !checkers.programs.is_in_doubt();
        let Some(checkers) = self.checkers.as_mut().filter(is_settled) else {
            return self.observe_programs(state);
        };
        checkers.programs_are_due = true;
        state.attached = self.is_attached()?;
        // There are few. Links that refused a program are asked again.
        state.xdp = xdp::observe(&self.object, &self.pins)?;
        if self.links.expected(&self.object, &state.links).is_none() {
            state.links = self.links.observe(&self.object, &self.pins)?;
        }
        Ok(())
    }

    /// Starts what threads compare for the last [`Self::refresh`]. The changes of its sync are made
    /// by then: the threads take no CPU time from them, and find their result.
    pub(super) fn start_comparisons(&mut self, state: &State) {
        let Some(checkers) = &mut self.checkers else { return };
        if std::mem::take(&mut checkers.maps_are_due) {
            checkers.maps.start_comparison();
        }
        if std::mem::take(&mut checkers.programs_are_due) {
            let links = self.links.expected(&self.object, &state.links);
            checkers.programs.start_comparison(Expected { links, rules: self.rules.clone() });
        }
    }
}
