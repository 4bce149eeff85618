//! The eBPF dataplane: Services as map entries, translated by programs on the cgroup's sockets and on the node's links.

mod carry;
mod counters;
mod failures;
mod flows;
mod handover;
mod ids;
mod links;
mod maps;
mod own_netns;
mod plan;
mod ranges;
mod room;
mod rules;
mod service_counts;
mod sockets;
mod state;
mod translate;

#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

pub(crate) use self::translate::proto;
use self::{
    carry::{Copies, Pass},
    counters::Counters,
    failures::Failures,
    flows::FlowSweeper,
    links::Links,
    maps::Maps,
    service_counts::{ServiceReader, ServiceSlots},
    sockets::SocketReleaser,
};
pub use self::{
    links::{LinkAttachment, LinkHook, Running},
    maps::MapSizes,
    plan::{Plan, Step},
    ranges::{Prefix, Range},
    rules::{Marks, NAMES as RULE_NAMES, Rules},
    state::State,
};
use proxy_common::layout::{LAYOUT_VERSION, STATE_LAYOUT_VERSION, service_slots};

use super::{Dataplane, KernelCounts, MapFill};
use crate::{
    kernel::{
        KernelError,
        bpf::{self, Object, PinDir},
        capabilities,
        cgroup::Cgroup,
        command::SearchPath,
        conntrack::HandedOver,
        netns::{self, NetnsCookie},
    },
    model::{Dirty, Snapshot},
};

/// The object that the build made of proxy-ebpf. Tests load it too.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/shunt-ebpf"));

/// What the eBPF dataplane needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EbpfSettings {
    /// Sockets of processes in this cgroup and below are translated: the root of cgroup v2, except in tests.
    pub cgroup_root: PathBuf,
    /// Where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// Capacities of the maps.
    pub map_sizes: MapSizes,
    /// How programs get onto links.
    pub link_attachment: LinkAttachment,
    /// How packets are marked for netfilter.
    pub marks: Marks,
    /// Where the commands for netfilter rules are looked for; `None` leaves netfilter alone.
    pub netfilter: Option<SearchPath>,
}

impl EbpfSettings {
    fn rules(&self) -> Option<Rules> {
        self.netfilter.clone().map(|path| Rules::new(self.marks, path))
    }
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The kernel refused something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The netfilter rules are not as they should be; all service ports are.
    #[error("cannot put the netfilter rules: {source}")]
    Rules {
        /// Why.
        source: KernelError,
    },
    /// Some service ports or links are not as they should be; all others are.
    #[error("{what} could not be programmed; the first is {first}: {source}")]
    Incomplete {
        /// How many of which.
        what: String,
        /// One of them, and what may help.
        first: String,
        /// Why.
        source: Box<KernelError>,
    },
}

/// The dataplane: loaded programs and open maps.
#[derive(Debug)]
pub struct Ebpf {
    object: Object,
    maps: Maps,
    pins: PinDir,
    cgroup: Cgroup,
    links: Links,
    releaser: SocketReleaser,
    sweeper: FlowSweeper,
    /// To be made when this process's programs take over.
    copies: Copies,
    service_slots: ServiceSlots,
    /// To be given away once.
    service_reader: Option<ServiceReader>,
    rules: Option<Rules>,
    /// Maps of another layout are in use: this process's are built beside them, and take their place once they are full and its
    /// programs run.
    is_staged: bool,
    attached: bool,
}

impl Ebpf {
    /// Loads the programs and opens the maps: those of an earlier process where they are of the same layout and size. Nothing
    /// runs until the first plan is applied.
    pub fn new(settings: &EbpfSettings) -> Result<Self, EbpfError> {
        capabilities::check_bpf()?;
        let cgroup = Cgroup::open(&settings.cgroup_root)?;
        let pins = PinDir::create(&settings.pin_dir)?;
        let (sizes, cpus) = (settings.map_sizes, bpf::cpus()?);
        let specs = sizes.specs(cpus);
        let staged = stage(&pins, &specs)?;
        let directory = staged.as_ref().map_or(pins.path(), |staged| &*staged.directory);
        let slots = service_slots(sizes.counted_services);
        let mut object = Object::load(OBJECT, &specs, &[("SERVICE_SLOTS", slots)], directory)?;
        let copies = match &staged {
            Some(Staged { directory, keeps_state: true }) => Copies::between(&pins, &specs, directory)?,
            _ => Copies::default(),
        };
        let sweeper = FlowSweeper::start(&mut object, sizes.flows)?;
        let mut maps = Maps::open(&mut object, sizes, settings.marks)?;
        let (service_slots, reader) = ServiceSlots::open(&mut object, sizes.counted_services, cpus)?;
        maps.set_node(netns::current_cookie()?)?;
        let releaser = SocketReleaser::start(directory)?;
        let links = Links::open(settings.link_attachment)?;
        let is_staged = staged.is_some();
        let rules = settings.rules();
        Ok(Self {
            object,
            maps,
            pins,
            cgroup,
            links,
            releaser,
            sweeper,
            rules,
            copies,
            service_slots,
            service_reader: Some(reader),
            is_staged,
            attached: false,
        })
    }

    /// Makes conntrack translate the connections that programs on links do, if any are pinned in a directory, and has these take no
    /// new ones: another mode serves all Services by now.
    pub fn hand_over(pin_dir: &Path) -> Result<HandedOver, EbpfError> {
        Ok(handover::hand_over(pin_dir)?)
    }

    /// Removes all that any process ever pinned in a directory, without loading anything.
    pub fn cleanup_at(pin_dir: &Path) -> Vec<EbpfError> {
        let removed = match PinDir::existing(pin_dir) {
            Ok(pins) => remove_everything(pins.as_ref()),
            Err(error) => vec![error],
        };
        removed.into_iter().map(EbpfError::from).collect()
    }

    /// Removes the netfilter rules that any process ever put into this network namespace.
    pub fn remove_rules(settings: &EbpfSettings) -> Vec<EbpfError> {
        let errors = settings.rules().map_or_else(Vec::new, |mut rules| rules.remove());
        errors.into_iter().map(EbpfError::from).collect()
    }

    /// Makes a change; false where what it is for is gone.
    fn execute(&mut self, step: &Step) -> Result<bool, KernelError> {
        let Step::AttachLink(at, link) = step else {
            return self.write(step).map(|()| true);
        };
        self.links.attach(&self.object, &self.pins, *at, link.framing)
    }

    /// Gives identifiers to service ports and takes them away, as a plan says, with what is counted under them.
    fn name(&mut self, state: &mut State, plan: &Plan) {
        for (name, service) in &plan.names {
            match service {
                Some(service) => {
                    let is_new = state.destinations(*service).next().is_none();
                    self.service_slots.give(name, *service, is_new);
                }
                None => state.id(name).into_iter().for_each(|before| self.service_slots.take_back(before)),
            }
            state.record_name(name, *service);
        }
        self.service_slots.settle(|service| state.is_named(service));
    }

    fn write(&mut self, step: &Step) -> Result<(), KernelError> {
        match step {
            Step::PutNodeAddress(address) => self.maps.put_node_address(*address),
            Step::PutEndpoint(key, endpoint) => self.maps.put_endpoint(*key, *endpoint),
            Step::PutMember(key) => self.maps.put_member(*key),
            Step::PutRange(range) => self.maps.put_range(*range),
            Step::PutService(key, value) => self.maps.put_service(*key, *value),
            Step::PutLocalSource(source) => self.maps.put_local_source(*source),
            Step::PutLocalLink(index) => self.maps.put_local_link(*index),
            Step::PutBridgePort(index, bridge) => self.maps.put_bridge_port(*index, *bridge),
            Step::SetLocalDetection(detection) => self.maps.set_local_detection(*detection),
            Step::Attach => self.attach(),
            Step::PutRules => self.rules.as_mut().map_or(Ok(()), Rules::put),
            Step::AttachLink(..) => Ok(()),
            Step::DetachLink(at) => self.links.detach(&self.pins, *at),
            Step::RemoveService(key, _) => self.maps.remove_service(key),
            Step::RemoveEndpoint(key) => self.maps.remove_endpoint(key),
            Step::RemoveMember(key) => self.maps.remove_member(key),
            Step::RemoveRange(range) => self.maps.remove_range(range),
            Step::RemoveNodeAddress(address) => self.maps.remove_node_address(address),
            Step::RemoveLocalSource(source) => self.maps.remove_local_source(source),
            Step::RemoveLocalLink(index) => self.maps.remove_local_link(*index),
            Step::RemoveBridgePort(index) => self.maps.remove_bridge_port(*index),
            Step::ReleaseSockets { .. } => {
                self.releaser.look();
                Ok(())
            }
        }
    }

    fn attach(&mut self) -> Result<(), KernelError> {
        // Someone may have removed it, with all that keeps the programs running.
        self.pins.restore()?;
        if !self.copies.is_empty() {
            self.maps.set_settling(SETTLING)?;
        }
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

    /// The programs on links have been replaced too: what the old ones noted meanwhile is copied.
    fn settle(&mut self) {
        if self.copies.is_empty() || !self.attached {
            return;
        }
        std::mem::take(&mut self.copies).run(Pass::After);
        if let Err(error) = self.maps.set_settling(Duration::ZERO) {
            tracing::warn!(%error, "connections that nothing is known of are not told so for some seconds");
        }
    }

    /// Failing costs little: where the node's namespace is the initial one, as it is but for nodes in containers, the programs
    /// know it anyhow; and a process outside the cgroup that is served cannot ask them.
    fn learn_netns(&mut self) {
        if let Err(error) = self.ask_netns().and_then(|netns| self.maps.set_node(Some(netns))) {
            tracing::warn!(%error, "cannot tell this network namespace; taking the initial one for the node's");
        }
    }

    /// The cookie of this process's network namespace, as the running programs know it.
    pub fn ask_netns(&mut self) -> Result<NetnsCookie, KernelError> {
        own_netns::learn(&mut self.maps)
    }

    fn is_attached(&mut self) -> Result<bool, KernelError> {
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

/// What taking over from maps of another size may take, before segments of unknown connections are answered again.
const SETTLING: Duration = Duration::from_secs(5);

/// What the programs' names start with, and so the names of their links and filters.
const LINKS: &str = "shunt_";

fn remove_everything(pins: Option<&PinDir>) -> Vec<KernelError> {
    let mut errors = links::remove_all(pins);
    // Names do not depend on sizes.
    errors.extend(pins.into_iter().flat_map(|pins| pins.remove_all(&MapSizes::default().specs(1), LINKS)));
    errors
}

/// Maps that are built beside those in use.
struct Staged {
    directory: PathBuf,
    /// What programs noted in those in use can be taken along.
    keeps_state: bool,
}

/// Where to build the maps: beside those that are pinned, if they are of another layout or size.
fn stage(pins: &PinDir, specs: &[bpf::MapSpec]) -> Result<Option<Staged>, KernelError> {
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
        carry::share(pins, specs, &directory)?;
    }
    Ok(Some(Staged { directory, keeps_state }))
}

impl Dataplane for Ebpf {
    type State = State;
    type Plan = Plan;
    type Error = EbpfError;

    fn observe(&mut self) -> Result<State, EbpfError> {
        let mut state = self.maps.read(self.service_slots.ids())?;
        self.service_slots.reread();
        state.attached = self.is_attached()?;
        state.links = self.links.observe(&self.object, &self.pins)?;
        state.rules_are_put = self.rules.as_mut().is_none_or(Rules::are_put);
        Ok(state)
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// Goes on past a service port or link that fails: what is left of the plan for that one is left out, so that it stays as it
    /// was. Rules that fail hold nothing up either.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), EbpfError> {
        self.name(state, &plan);
        let mut failures = Failures::of_those_without_room(state, &plan, &self.maps.sizes);
        let mut rules = None;
        for step in &plan.steps {
            let Some(step) = failures.instead_of(step, state) else { continue };
            match self.execute(&step) {
                Ok(true) => state.record(&step),
                Ok(false) => {}
                Err(error) if *step == Step::PutRules => rules = Some(error),
                Err(error) if *step == Step::Attach => return Err(error.into()),
                Err(error) => failures.add(&step, error),
            }
        }
        self.settle();
        failures.outcome(state)?;
        rules.map_or(Ok(()), |source| Err(EbpfError::Rules { source }))
    }

    fn is_partial(error: &EbpfError) -> bool {
        match error {
            EbpfError::Incomplete { .. } | EbpfError::Rules { .. } => true,
            EbpfError::Kernel(error) => matches!(error, KernelError::MapFull { .. }),
        }
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        let counters = Counters::open(&mut self.object, self.service_reader.take()?)
            .inspect_err(|error| tracing::warn!(%error, "what programs count is not in metrics"));
        counters.ok().map(|counters| Box::new(counters) as Box<dyn KernelCounts>)
    }

    fn map_fill(&self, state: &State) -> Vec<MapFill> {
        let sizes = &self.maps.sizes;
        [
            ("services", state.service_count(), sizes.services),
            ("endpoints", state.endpoints.len(), sizes.endpoints),
            ("members", state.members.len(), sizes.members),
            ("source_ranges", state.ranges.len(), sizes.source_ranges),
            ("node_addresses", state.node_addresses.len(), sizes.node_addresses),
            ("flows", self.sweeper.entries(), sizes.flows),
        ]
        .map(|(map, entries, capacity)| MapFill { map, entries, capacity })
        .into()
    }

    fn cleanup(&mut self) -> Vec<EbpfError> {
        let mut errors = remove_everything(Some(&self.pins));
        if !errors.is_empty() {
            // Programs that cannot be removed find no Service any more; flows that they know go on.
            errors.extend(self.maps.remove_all_services().err());
        }
        errors.extend(self.rules.as_mut().map_or_else(Vec::new, Rules::remove));
        errors.into_iter().map(EbpfError::from).collect()
    }
}
