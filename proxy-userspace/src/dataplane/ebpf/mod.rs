//! The eBPF dataplane: Services as map entries, translated by programs on the cgroup's sockets and on the node's links.

mod error;
mod failures;
mod links;
mod maps;
mod plan;
mod rules;
mod sockets;
mod trace;
mod upgrade;

#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

pub use self::{
    error::EbpfError,
    links::{HookState, LinkAttachment, LinkHook},
    plan::{
        Plan,
        ranges::{Prefix, Range},
        state::State,
        step::{MapEntry, Step},
    },
    rules::{MASQUERADED_PORTS, Marks, NAMES as RULE_NAMES, Rules},
};
use self::{
    failures::Failures,
    links::Links,
    maps::{
        Maps,
        counters::Counters,
        service_counts::{ServiceReader, ServiceSlots},
        sweeper::FlowSweeper,
    },
    sockets::SocketReleaser,
    trace::LogWriter,
    upgrade::{MarkChange, Staged, handover, own_netns, state_maps::Copies},
};
pub use proxy_common::layout::MapSizes;
use proxy_common::layout::{MAPS, MapDeclaration, MapType, service_slots};

use super::{Dataplane, KernelCounts, MapFill};
use crate::{
    kernel::{
        KernelError,
        bpf::{self, LogLevel, Object, PinDir},
        capabilities,
        cgroup::Cgroup,
        command::Launcher,
        conntrack::HandoverCounts,
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
    pub netfilter: Option<Launcher>,
    /// What programs tell of single connections and packets.
    pub log: LogLevel,
}

impl EbpfSettings {
    fn rules(&self) -> Option<Rules> {
        self.netfilter.clone().map(|launcher| Rules::new(self.marks, launcher))
    }
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
    _log: Option<LogWriter>,
    /// To be made when this process's programs take over.
    copies: Copies,
    service_slots: ServiceSlots,
    /// To be given away once.
    service_reader: Option<ServiceReader>,
    rules: Option<Rules>,
    /// To be made once the rules are there for it.
    change: Option<MarkChange>,
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
        let specs = maps::specs(&sizes, cpus);
        let staged = upgrade::stage(&pins, &specs)?;
        let directory = staged.as_ref().map_or(pins.path(), |staged| &*staged.directory);
        let slots = service_slots(sizes.counted_services);
        let mut object = Object::load(OBJECT, &specs, &[("SERVICE_SLOTS", slots)], settings.log, directory)?;
        let copies = match &staged {
            Some(Staged { directory, keeps_state: true }) => Copies::between(&pins, &specs, directory)?,
            _ => Copies::default(),
        };
        let sweeper = FlowSweeper::start(&mut object, &sizes)?;
        let log = LogWriter::start(&mut object, settings.log)?;
        let change = MarkChange::of(maps::pinned_marks(pins.path()), settings.marks);
        // Until all programs are this process's, and the rules for it there.
        let at_first = change.map_or(settings.marks, |change| change.before);
        let mut maps = Maps::open(&mut object, sizes, at_first)?;
        let (service_slots, reader) = ServiceSlots::open(&mut object, sizes.counted_services, slots, cpus)?;
        maps.set_node(netns::current_cookie()?)?;
        let releaser = SocketReleaser::start(directory)?;
        let links = Links::open(settings.link_attachment, &mut object)?;
        let is_staged = staged.is_some();
        let rules = settings.rules().map(|rules| match change {
            Some(change) => rules.with_previous_marks(change.before),
            None => rules,
        });
        Ok(Self {
            object,
            maps,
            pins,
            cgroup,
            links,
            releaser,
            sweeper,
            _log: log,
            rules,
            copies,
            service_slots,
            service_reader: Some(reader),
            change,
            is_staged,
            attached: false,
        })
    }

    /// Makes conntrack translate the connections that programs on links do, if any are pinned in a directory, and has these take no
    /// new ones: another mode serves all Services by now.
    pub fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, EbpfError> {
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

    /// Returns true if commands for rules are not started any more.
    fn is_shutting_down(&self) -> bool {
        self.rules.as_ref().is_some_and(Rules::is_shutting_down)
    }

    /// Makes a change and records it, unless what it is for is gone.
    fn execute(&mut self, step: &Step, state: &mut State) -> Result<(), KernelError> {
        if let Step::AttachLink(at, link) = step {
            self.begin_settling()?;
            let running = self.links.attach(&mut self.object, &self.pins, *at, link)?;
            state.links.extend(running.map(|running| (*at, running)));
        } else {
            self.write(step)?;
            state.record(step);
        }
        Ok(())
    }

    /// Gives identifiers to service ports and takes them away, as a plan says, with what is counted under them.
    fn name(&mut self, state: &mut State, plan: &Plan) {
        for (name, service) in &plan.names {
            match service {
                Some(service) => {
                    let is_new = state.frontends(*service).next().is_none();
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
            Step::Put(entry) => self.maps.put(entry),
            Step::Remove(entry) => self.maps.remove(entry),
            Step::SetLocalDetection(detection) => self.maps.set_local_detection(*detection),
            Step::Attach => self.attach(),
            Step::PutRules => self.rules.as_mut().map_or(Ok(()), Rules::install),
            Step::AttachLink(..) => Ok(()),
            Step::DetachLink(at) => self.links.detach(&self.pins, *at),
            Step::ReleaseSockets { .. } => {
                self.releaser.look();
                Ok(())
            }
        }
    }

    /// The cookie of this process's network namespace, as the running programs know it.
    pub fn ask_netns(&mut self) -> Result<NetnsCookie, KernelError> {
        own_netns::learn(&mut self.maps)
    }
}

/// What the programs' names start with, and so the names of their links and filters.
const LINKS: &str = "shunt_";

fn remove_everything(pins: Option<&PinDir>) -> Vec<KernelError> {
    let mut errors = links::remove_all(pins);
    // Names do not depend on sizes.
    errors.extend(
        pins.into_iter().flat_map(|pins| pins.remove_all(&maps::specs(&MapSizes::default(), 1), LINKS)),
    );
    errors
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
        state.rules_are_installed = self.rules.as_mut().is_none_or(Rules::are_installed);
        if state.is_taken_over() {
            self.maps.prefilter.clear_stale(&state, self.sweeper.noted());
        } else {
            self.maps.prefilter.keep_all();
        }
        Ok(state)
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    /// Goes on past a service port or link that fails: what is left of the plan for that one is left out, so that it stays as it
    /// was. Rules that fail hold nothing up either.
    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), EbpfError> {
        self.name(state, &plan);
        let mut failures = Failures::without_room(state, &plan, &self.maps.sizes);
        let mut rules = None;
        for step in &plan.steps {
            let Some(step) = failures.adjust(step, state) else { continue };
            match self.execute(&step, state) {
                Ok(()) => {}
                // No command runs any more, on which what follows may rely.
                Err(source) if *step == Step::PutRules && self.is_shutting_down() => {
                    return Err(EbpfError::Rules { source });
                }
                Err(error) if *step == Step::PutRules => rules = Some(error),
                Err(error) if *step == Step::Attach => return Err(error.into()),
                Err(error) => failures.add(&step, error),
            }
        }
        self.settle();
        if let Err(error) = self.change_marks(state) {
            rules.get_or_insert(error);
        }
        failures.into_result(state)?;
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
        let (sizes, usage) = (&self.maps.sizes, self.sweeper.noted());
        let fill = |map: &MapDeclaration| {
            let entries = match map.map_type {
                MapType::LruHashMap => usage.entries(map.name),
                _ => state.entries(map.name)?,
            };
            Some(MapFill { map: map.name, entries, capacity: sizes.entries(map.name) })
        };
        MAPS.iter().filter_map(fill).collect()
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.links.left_out()
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
