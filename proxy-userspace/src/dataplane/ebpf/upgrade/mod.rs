//! This process's programs, maps and marks in the place of the last one's, with no moment in which nothing runs or nothing is known.

pub(crate) mod handover;
pub(crate) mod own_netns;
pub(crate) mod state_maps;

use std::{path::PathBuf, time::Duration};

use proxy_common::layout::{LAYOUT_VERSION, STATE_LAYOUT_VERSION};

use self::state_maps::Pass;
use super::{Ebpf, LINKS, Marks, State, links, maps};
use crate::kernel::{
    KernelError,
    bpf::{self, PinDir},
    netns,
};

/// Maps that are built beside those in use.
pub(crate) struct Staged {
    pub(crate) directory: PathBuf,
    /// What programs noted in those in use can be taken along.
    pub(crate) keeps_state: bool,
}

/// Where to build the maps: beside those that are pinned, if they are of another layout or size.
pub(crate) fn stage(pins: &PinDir, specs: &[bpf::MapSpec]) -> Result<Option<Staged>, KernelError> {
    pins.recover()?;
    if !pins.holds_any(specs) {
        return Ok(None);
    }
    let (layout, state_layout) = maps::pinned_layouts(pins.path()).unzip();
    let wanted = LAYOUT_VERSION;
    let difference = match pins.holds(specs) {
        Ok(()) if layout == Some(wanted) => return Ok(None),
        Ok(()) => format!("their layout is {layout:?}, and this program's is {wanted}"),
        Err(difference) => difference,
    };
    tracing::info!(%difference, "building new maps beside the pinned ones");
    let directory = pins.create_next()?;
    let keeps_state = state_layout == Some(STATE_LAYOUT_VERSION);
    if keeps_state {
        state_maps::share(pins, specs, &directory)?;
    }
    Ok(Some(Staged { directory, keeps_state }))
}

/// Another process marked packets otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MarkChange {
    pub(crate) before: Marks,
    after: Marks,
}

impl MarkChange {
    pub(crate) fn of(before: Option<Marks>, after: Marks) -> Option<Self> {
        before.filter(|before| *before != after).map(|before| Self { before, after })
    }
}

/// What taking over from maps of another size may take, before segments of unknown connections are answered again.
const SETTLING: Duration = Duration::from_secs(5);

impl Ebpf {
    pub(crate) fn attach(&mut self) -> Result<(), KernelError> {
        // Someone may have removed it, with all that keeps the programs running.
        self.pins.restore()?;
        self.copies.run(Pass::Before);
        let mut programs: Vec<_> = self.object.cgroup_programs_mut().collect();
        // What translates back runs before anything is translated.
        programs.sort_by_key(|(name, _)| name.contains("connect") || name.contains("sendmsg"));
        for (name, program) in programs {
            bpf::attach(program, &self.cgroup, &self.pins.link(name))?;
        }
        if self.is_staged {
            self.pins.take_next()?;
            self.is_staged = false;
        }
        let names: Vec<String> = self.object.cgroup_programs_mut().map(|(name, _)| name.to_owned()).collect();
        // An earlier version may have had more of them.
        let is_known =
            |name: &str| names.iter().any(|known| known == name) || links::from_pin_name(name).is_some();
        self.pins.remove_links(|name| name.starts_with(LINKS) && !is_known(name))?;
        self.object.restore_pins(self.pins.path())?;
        if netns::current_cookie()?.is_none() {
            self.learn_netns();
        }
        self.attached = true;
        self.releaser.look();
        Ok(())
    }

    /// A program on a link is about to be replaced: until all are, and what the old ones noted is copied, the new ones know not all
    /// flows. Each link has all of the time, whatever was done before it: copying, commands for rules, other links.
    pub(crate) fn begin_settling(&mut self) -> Result<(), KernelError> {
        if self.copies.is_empty() { Ok(()) } else { self.maps.set_settling(SETTLING) }
    }

    /// The programs on links have been replaced too: what the old ones noted meanwhile is copied.
    pub(crate) fn settle(&mut self) {
        if self.copies.is_empty() || !self.attached {
            return;
        }
        // Copying may take long too.
        if let Err(error) = self.begin_settling() {
            tracing::warn!(%error, "connections may be told that nothing is known of them while that is copied");
        }
        std::mem::take(&mut self.copies).run(Pass::After);
        if let Err(error) = self.maps.set_settling(Duration::ZERO) {
            tracing::warn!(%error, "connections that nothing is known of are not told so for some seconds");
        }
    }

    /// Packets are marked otherwise than by the process before: rules for both ways are there and all programs are this process's, so
    /// that they may begin to, and then the rules for the old way go.
    pub(crate) fn change_marks(&mut self, state: &mut State) -> Result<(), KernelError> {
        // Of a process that ends the rules for the new marks could not be put any more.
        let is_ready = state.is_taken_over() && state.rules_are_installed && !self.is_shutting_down();
        let Some(MarkChange { after, .. }) = self.change.filter(|_| is_ready) else { return Ok(()) };
        self.maps.set_marks(after)?;
        self.change = None;
        let Some(rules) = &mut self.rules else { return Ok(()) };
        rules.set_marks(after);
        // Until they are.
        state.rules_are_installed = false;
        rules.install()?;
        state.rules_are_installed = true;
        Ok(())
    }

    /// Failing costs little: where the node's namespace is the initial one, as it is but for nodes in containers, the programs
    /// know it anyhow; and a process outside the cgroup that is served cannot ask them.
    fn learn_netns(&mut self) {
        if let Err(error) = self.ask_netns().and_then(|netns| self.maps.set_node(Some(netns))) {
            tracing::warn!(%error, "cannot tell this network namespace; taking the initial one for the node's");
        }
    }

    pub(crate) fn is_attached(&mut self) -> Result<bool, KernelError> {
        if !self.attached || !self.object.is_pinned(self.pins.path()) {
            return Ok(false);
        }
        for (name, _) in self.object.cgroup_programs_mut() {
            if !bpf::is_attached(&self.cgroup, &self.pins.link(name))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
