//! Replaces the programs, maps and marks of an earlier process by those of this one. At every
//! moment programs are attached, and they have all Services and flows.

pub(crate) mod handover;
pub(crate) mod own_netns;
pub(crate) mod state_maps;

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use proxy_common::{
    Addr,
    layout::{Flow, FlowKey, LAYOUT_VERSION, STATE_LAYOUT_VERSION, ServiceKey},
};

use self::state_maps::{CopyPass, StateCopies};
use super::{Ebpf, LINKS, State, links, maps, plan::step::StaleFlows, translates_requests};
use crate::{
    causes::with_causes,
    kernel::{
        KernelError,
        bpf::{self, PinDir},
        conntrack::HandoverCounts,
        netns,
    },
};

/// Maps that are built beside the maps in use.
pub(crate) struct StagedMaps {
    pub(crate) directory: PathBuf,
    /// The state in the maps in use can be taken over.
    pub(crate) keeps_state: bool,
}

/// Creates a directory for new maps if the pinned maps have another layout or size.
pub(crate) fn stage(pins: &PinDir, specs: &[bpf::MapSpec]) -> Result<Option<StagedMaps>, KernelError> {
    pins.recover()?;
    if !pins.holds_any(specs.iter().map(|map| map.name)) {
        return Ok(None);
    }
    let (layout, state_layout) = maps::pinned_layouts(pins.path()).unzip();
    let wanted = LAYOUT_VERSION;
    let difference = match pins.holds(specs) {
        Ok(()) if layout == Some(wanted) => return Ok(None),
        Ok(()) => format!("the pinned maps have layout {layout:?}, and this version needs {wanted}"),
        Err(difference) => difference,
    };
    tracing::info!(%difference, "building new maps beside the pinned ones, to replace them");
    let directory = pins.create_next()?;
    let keeps_state = state_layout == Some(STATE_LAYOUT_VERSION);
    if keeps_state {
        state_maps::share(pins, specs, &directory)?;
    }
    Ok(Some(StagedMaps { directory, keeps_state }))
}

/// Returns what is to be copied to new maps when the programs of this process take over.
pub(crate) fn state_copies(
    pins: &PinDir,
    specs: &[bpf::MapSpec],
    staged: Option<&StagedMaps>,
) -> Result<StateCopies, KernelError> {
    match staged {
        Some(StagedMaps { directory, keeps_state: true }) => StateCopies::between(pins, specs, directory),
        _ => Ok(StateCopies::default()),
    }
}

/// How long programs do not refuse unknown connections while maps of another size are filled.
const SETTLING: Duration = Duration::from_secs(5);

impl Ebpf {
    /// Attaches the socket programs and makes the new maps the pinned ones.
    pub(crate) fn attach(&mut self) -> Result<(), KernelError> {
        // The directory may have been removed, with the links that keep the programs attached.
        self.pins.restore()?;
        self.state_copies.run(CopyPass::First);
        let mut programs = self.object.cgroup_programs();
        programs.sort_by_key(|name| translates_requests(name));
        for name in &programs {
            self.object.attach(name, &self.cgroup, &self.pins.link(name))?;
        }
        if self.is_staged {
            self.pins.take_next()?;
            self.is_staged = false;
        }
        // An earlier version may have had other programs.
        let is_on_link =
            |name: &str| links::from_pin_name(name).is_some() || links::xdp::from_pin_name(name).is_some();
        let is_used = |name: &str| programs.iter().any(|used| used == name) || is_on_link(name);
        self.pins.remove_links(|name| name.starts_with(LINKS) && !is_used(name))?;
        self.object.restore_pins(self.pins.path())?;
        if netns::current_cookie()?.is_none() {
            self.find_own_netns();
        }
        self.attached = true;
        self.socket_releaser.wake();
        Ok(())
    }

    /// Begins settling before a link program is replaced. Until all link programs are replaced and
    /// the flows of the old ones are copied, the new ones do not have all flows. The time starts
    /// again for each link: copying, commands for rules and other links may have taken long.
    pub(crate) fn begin_settling(&mut self) -> Result<(), KernelError> {
        if self.state_copies.is_empty() { Ok(()) } else { self.maps.set_settling(SETTLING) }
    }

    /// Returns true if the new maps are in use, and old link programs may still write to the old
    /// ones. The next process could not find what they write, so this one goes on until they are
    /// replaced.
    pub(crate) fn is_replacing_state(&self) -> bool {
        self.attached && !self.state_copies.is_empty()
    }

    /// Copies what the old programs wrote meanwhile, after all programs have been replaced. Ends
    /// settling.
    pub(crate) fn finish_state_copies(&mut self) {
        if !self.is_replacing_state() {
            return;
        }
        // Copying may also take long.
        if let Err(error) = self.begin_settling() {
            tracing::warn!(%error, "cannot write the map node: connections may be reset while flows are copied");
        }
        std::mem::take(&mut self.state_copies).run(CopyPass::Second);
        if let Err(error) = self.maps.set_settling(Duration::ZERO) {
            tracing::warn!(%error, "cannot write the map node: unknown connections are not reset for some seconds");
        }
    }

    /// Removes flows that are out of date.
    ///
    /// The connections of those that the link programs only pass may have ended, and the rules that
    /// translated them may be gone: a new connection from the same client port would pass too, and
    /// nothing would serve it. If netfilter translated meanwhile, a connection that it began may
    /// have the client port of any flow that had ended before, and another endpoint.
    pub(crate) fn forget_flows(&self, stale: StaleFlows) -> Result<(), KernelError> {
        self.forget(&|_, flow| match stale {
            StaleFlows::All => true,
            StaleFlows::Passed => handover::passes(flow),
            StaleFlows::Left => handover::is_left(flow),
        })
    }

    /// Removes the entries of flows that the programs masquerade with an address that the node has
    /// no more. A UDP flow that continues gets another address.
    pub(crate) fn forget_source(&self, address: Addr) -> Result<(), KernelError> {
        self.forget(&|key, flow| handover::has_source(address, key, flow))
    }

    fn forget(&self, is_forgotten: &dyn Fn(&FlowKey, &Flow) -> bool) -> Result<(), KernelError> {
        for map in handover::FLOW_MAPS {
            let capacity = self.maps.sizes.entries(map);
            handover::forget(&self.pins, map, self.object.reader(map)?, capacity, is_forgotten)?;
        }
        Ok(())
    }

    /// Leaves the flows that conntrack translates to it: those of UDP, and TCP connections that are
    /// not established yet. A failure is no reason to serve less: these flows may get another
    /// endpoint.
    pub(crate) fn leave_flows(&mut self, state: &State) {
        self.keep_nat_chain(false);
        match handover::leave_flows(&self.pins, state) {
            Ok(0) | Err(KernelError::NoConntrackNetlink(_)) => {}
            Ok(flows) => tracing::info!(flows, "conntrack keeps the flows that it translates"),
            Err(error) => {
                let error = with_causes(&error);
                tracing::warn!(
                    error,
                    "cannot read the flows of conntrack: those of UDP may change their endpoint"
                );
            }
        }
    }

    /// Leaves the TCP connections to these frontends that conntrack translates to it, before these
    /// get Maglev tables. A failure is no reason to serve less: such connections may break.
    pub(crate) fn leave_connections(&self, state: &State, frontends: &BTreeSet<ServiceKey>) {
        match handover::leave_connections(&self.pins, state, frontends) {
            Ok(0) | Err(KernelError::NoConntrackNetlink(_)) => {}
            Ok(connections) => tracing::info!(connections, "conntrack keeps connections that it translates"),
            Err(error) => {
                let error = with_causes(&error);
                tracing::warn!(error, "cannot read the connections of conntrack: some may break");
            }
        }
    }

    /// Adds entries to conntrack for the flows of the link programs.
    pub(crate) fn track_flows(&self) -> Result<(), KernelError> {
        handover::track_flows(&self.pins)
    }

    /// Hands the flows of the link programs over to conntrack.
    pub(crate) fn hand_flows(&self) -> Result<(), KernelError> {
        let HandoverCounts { connections, lost } = handover::hand_flows(&self.pins)?;
        if connections + lost > 0 {
            tracing::info!(connections, lost, "conntrack took over the flows of the link programs");
        }
        // Conntrack may get connections with the addresses of those that stayed behind.
        self.forget(&|_, flow| handover::is_whole(flow))
    }

    /// Makes conntrack go on to translate its connections: see [`Rules::keep_nat`]. The rules for
    /// that also refuse packets. A failure is no reason to serve less.
    pub(super) fn keep_nat_chain(&mut self, others_translate: bool) {
        let Some(rules) = &mut self.rules else { return };
        let kept = rules.keep_nat(others_translate);
        let refuses = self.maps.set_refusing(rules.refusing());
        if let Err(error) = refuses.and(kept) {
            let error = with_causes(&error);
            tracing::warn!(error, "connections that conntrack translates may break");
        }
    }

    /// Makes the programs use the new marks, and then removes the rules for the old marks. Waits
    /// until only programs of this process are attached and the rules for both are installed.
    pub(crate) fn change_marks(&mut self, state: &mut State) -> Result<(), KernelError> {
        // A process that ends cannot install the rules for the new marks alone any more.
        let is_ready = state.is_taken_over() && state.rules_are_installed && !self.is_shutting_down();
        let Some(marks) = self.new_marks.filter(|_| is_ready) else { return Ok(()) };
        self.maps.set_marks(marks)?;
        self.new_marks = None;
        let Some(rules) = &mut self.rules else { return Ok(()) };
        rules.set_marks(marks);
        // If the installation fails, the next full sync retries it.
        state.rules_are_installed = false;
        rules.install()?;
        state.rules_are_installed = true;
        Ok(())
    }

    /// Finds the network namespace of the node. A failure matters little: programs take the initial
    /// namespace for the node's, which is right unless the node is a container. A process outside
    /// the cgroup that is served always fails.
    fn find_own_netns(&mut self) {
        if let Err(error) = self.ask_netns().and_then(|netns| self.maps.set_node(Some(netns))) {
            tracing::warn!(%error, "cannot find this network namespace: programs take the initial one for the node's");
        }
    }

    /// Returns true if all socket programs are attached and all maps are pinned.
    pub(crate) fn is_attached(&mut self) -> Result<bool, KernelError> {
        if !self.attached || !self.object.is_pinned(self.pins.path()) {
            return Ok(false);
        }
        for name in self.object.cgroup_programs() {
            if !bpf::is_attached(&self.cgroup, &self.pins.link(&name))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
