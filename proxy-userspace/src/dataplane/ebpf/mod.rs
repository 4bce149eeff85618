//! The eBPF dataplane: Services are entries of maps, and programs on sockets and links translate.

mod apply;
mod checkers;
mod direct;
mod direct_watcher;
mod drift;
mod error;
mod failures;
mod links;
mod maglev;
mod maps;
mod plan;
mod program_checker;
mod rehearsal;
mod rules;
mod settings;
mod sockets;
mod trace;
mod tunnel;
mod upgrade;

#[cfg(test)]
mod tests;

use std::{path::Path, sync::Arc};

pub use proxy_common::layout::MapSizes;
use proxy_common::{
    layout::{MAPS, MapDeclaration, service_slots},
    maglev::TableSize,
};

pub(crate) use self::plan::translate::{
    leaves_pods_to_links, leaves_sockets_of_pods, masquerades, sends_through_tunnel,
};
pub use self::rehearsal::{Rehearsed, rehearse};
use self::{
    checkers::{Checkers, OnDrift},
    direct::DirectApprover,
    direct_watcher::DirectWatcher,
    links::Links,
    maglev::MaglevTables,
    maps::{
        Maps, NodeSettings, counters::Counters, prefilter::PrefilterBits, service_counts::ServiceSlots,
        sweeper::FlowSweeper,
    },
    sockets::SocketReleaser,
    trace::TraceLogger,
    tunnel::Tunnel,
    upgrade::{handover, own_netns, state_maps::StateCopies},
};
pub use self::{
    drift::HeldMaps,
    error::EbpfError,
    links::{HookState, LinkAttachment, LinkHook},
    plan::{
        Plan,
        ranges::{Prefix, Range},
        state::State,
        step::{MapEntry, Step},
    },
    rules::{MASQUERADED_PORTS, Marks, NAMES as RULE_NAMES, RuleDuties, Rules},
    settings::EbpfSettings,
    trace::{TraceRecords, TracingPrograms},
    upgrade::handover::POSSIBLE_PORTS,
};
pub(super) use self::{
    maps::{open_pinned, pinned_fill},
    plan::translate::{depends_on_source, service_key},
};
use super::{
    Dataplane, DisplacedLink, FailureScope, Held, HeldReader, KernelCounts, LeftOutPort, MaglevCount,
    MapFill, lock,
};
use crate::{
    kernel::{
        KernelError,
        bpf::{self, Object, PinDir, Recording},
        capabilities,
        cgroup::Cgroup,
        conntrack::HandoverCounts,
        netns::{self, NetnsCookie},
        tunnel_link,
    },
    model::{Dirty, ServicePortKey, Snapshot},
    net::PortRange,
};

/// The compiled proxy-ebpf. Tests load it too.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/shunt-ebpf"));

/// The dataplane: loaded programs and open maps.
pub struct Ebpf {
    // Its thread ends before the lock of the pins: the next process reads the same ring buffer.
    _direct_approver: DirectApprover,
    object: Object,
    /// The programs of this process while others, which trace, are attached.
    own_object: Option<Object>,
    maps: Maps,
    pins: PinDir,
    cgroup: Cgroup,
    links: Links,
    socket_releaser: SocketReleaser,
    sweeper: FlowSweeper,
    direct_watcher: DirectWatcher,
    maglev: MaglevTables,
    /// The smallest size of their tables.
    table_size: TableSize,
    /// `None` if everything is read on the thread of the caller.
    checkers: Option<Checkers>,
    _log: Option<TraceLogger>,
    /// State to be copied when the programs of this process take over.
    state_copies: StateCopies,
    service_slots: ServiceSlots,
    /// Handed out once, to the metrics.
    counters: Option<Counters>,
    rules: Option<Rules>,
    /// Why the rules are wrong or missing, until an attempt to install them succeeds.
    rules_failure: Option<Arc<KernelError>>,
    /// Marks that replace those of an earlier process once their rules are installed.
    new_marks: Option<Marks>,
    tunnel: Tunnel,
    /// Maps of another layout are in use. Those of this process are built beside them. They take
    /// their place once they are filled and the programs of this process are attached.
    is_staged: bool,
    attached: bool,
    /// The service ports that the last plan left out.
    left_out_ports: Vec<LeftOutPort>,
}

impl Ebpf {
    /// Loads the socket programs and opens the maps. Uses the maps of an earlier process if they
    /// have the same layout and size. Nothing is attached until the first plan is applied.
    pub fn new(settings: &EbpfSettings) -> Result<Self, EbpfError> {
        capabilities::check_bpf()?;
        let cgroup = Cgroup::open(&settings.cgroup_root)?;
        let pins = PinDir::create(&settings.pin_dir)?;
        let (sizes, cpus) = (settings.map_sizes, bpf::cpus()?);
        let specs = maps::specs(&sizes, cpus);
        let staged = upgrade::stage(&pins, &specs)?;
        let directory = staged.as_ref().map_or(pins.path(), |staged| &*staged.directory);
        let slots = service_slots(sizes.counted_services);
        let mut tunnel = Tunnel::new(settings.tunnel_port);
        tunnel.prepare();
        let recording = Recording::Log(settings.log);
        let mut object = Object::load(OBJECT, &specs, &settings.constants(), recording, directory)?;
        let state_copies = upgrade::state_copies(&pins, &specs, staged.as_ref())?;
        let sweeper = FlowSweeper::start(&object, &sizes, directory)?;
        let direct_watcher = DirectWatcher::open(directory)?;
        let maglev = MaglevTables::start(&object, sizes.maglev)?;
        // New marks wait until only programs of this process are attached and the rules are
        // installed.
        let previous = maps::pinned_marks(pins.path()).filter(|previous| *previous != settings.marks);
        let mut maps = Maps::open(&mut object, sizes, previous.unwrap_or(settings.marks))?;
        let (service_slots, service_counts) =
            ServiceSlots::open(&mut object, sizes.counted_services, slots, cpus)?;
        let counters = Counters::open(&mut object, service_counts, Arc::clone(&maps.prefilter))?;
        maps.set_node(netns::current_cookie()?)?;
        let socket_releaser = SocketReleaser::start(directory)?;
        Ok(Self {
            own_object: None,
            maps,
            _direct_approver: DirectApprover::start(&mut object, directory)?,
            pins,
            cgroup,
            links: Links::open(settings.link_attachment)?,
            socket_releaser,
            sweeper,
            direct_watcher,
            maglev,
            table_size: settings.table_size,
            checkers: None,
            _log: TraceLogger::start(&mut object, settings.log)?,
            object,
            state_copies,
            service_slots,
            counters: Some(counters),
            rules: settings.rules(previous),
            rules_failure: None,
            new_marks: previous.map(|_| settings.marks),
            tunnel,
            is_staged: staged.is_some(),
            attached: false,
            left_out_ports: Vec::new(),
        })
    }

    /// Loads the programs for links with Ethernet headers, which nearly every node has. Call this
    /// at start, so that a kernel that refuses them is reported then, and not at the first link.
    pub fn load_link_programs(&mut self) -> Result<(), EbpfError> {
        Ok(Links::load(&mut self.object)?)
    }

    /// Returns the source ports with which the link programs that are pinned in a directory
    /// masquerade. If they are of a version with other maps, returns [`POSSIBLE_PORTS`].
    pub fn pinned_masquerade_ports(pin_dir: &Path) -> Result<Option<PortRange>, EbpfError> {
        Ok(handover::masquerade_ports(pin_dir)?)
    }

    /// Hands the connections of link programs that are pinned in a directory over to conntrack, if
    /// there are any. The programs take no new connections: another mode serves all Services by
    /// now.
    pub fn hand_over(pin_dir: &Path) -> Result<HandoverCounts, EbpfError> {
        Ok(handover::hand_over(pin_dir)?)
    }

    /// Returns true if shunt pinned something in a directory. Others may have pins there too.
    pub fn has_pins(pins: &PinDir) -> bool {
        pins.holds_any(MAPS.iter().map(|map| map.name))
            || pins.link_names().is_ok_and(|names| names.iter().any(|name| name.starts_with(LINKS)))
    }

    /// Removes everything that any process pinned in a directory. Loads nothing.
    pub fn cleanup_at(pin_dir: &Path) -> Vec<EbpfError> {
        let removed = match PinDir::existing(pin_dir) {
            Ok(pins) => remove_everything(pin_dir, pins.as_ref()),
            Err(error) => vec![error],
        };
        removed.into_iter().map(EbpfError::from).collect()
    }

    /// Removes the netfilter rules that any process installed in this network namespace.
    pub fn remove_rules(settings: &EbpfSettings) -> Vec<EbpfError> {
        let errors = settings.rules(None).map_or_else(Vec::new, |mut rules| rules.remove());
        errors.into_iter().map(EbpfError::from).collect()
    }

    /// Returns true if commands for rules are not started any more.
    fn is_shutting_down(&self) -> bool {
        self.rules.as_ref().is_some_and(Rules::is_shutting_down)
    }

    /// Returns the cookie of this process's network namespace, as the attached programs see it.
    pub fn ask_netns(&mut self) -> Result<NetnsCookie, KernelError> {
        own_netns::learn(&mut self.maps)
    }
}

/// The prefix of the names of programs, and so of their links and filters.
const LINKS: &str = "shunt_";

/// Returns true for the socket programs that translate requests. They are attached after the
/// others, which translate replies and the addresses of peers, and removed before them.
///
/// The removal may be interrupted, and the next process writes Services before it attaches its
/// programs. Meanwhile no request is translated without a program that translates its replies.
fn translates_requests(program: &str) -> bool {
    program.contains("connect") || program.contains("sendmsg")
}

fn remove_everything(pin_dir: &Path, pins: Option<&PinDir>) -> Vec<KernelError> {
    let mut errors: Vec<KernelError> = tunnel_link::remove().err().into_iter().collect();
    errors.extend(links::remove_all(pin_dir, pins));
    let is_map = |name: &str| MAPS.iter().any(|map| map.name == name);
    if let Some(pins) = pins {
        errors.extend(pins.remove_links(|name| name.starts_with(LINKS) && translates_requests(name)).err());
        errors.extend(pins.remove_all(is_map, LINKS));
    }
    errors
}

impl Dataplane for Ebpf {
    type State = State;
    type Plan = Plan;
    type Error = EbpfError;

    fn observe(&mut self) -> Result<State, EbpfError> {
        self.tunnel.repair();
        let mut state = self.maps.read(self.service_slots.unused_ids(), self.table_size)?;
        self.maglev.forget();
        self.observe_programs(&mut state)?;
        self.tunnel.set_up(&state);
        let mut prefilter = lock(&self.maps.prefilter);
        let words = prefilter.words();
        if state.is_taken_over() {
            prefilter.clear_stale(&PrefilterBits::of_state(&state, words), &self.sweeper.usage);
        } else {
            prefilter.keep_stale();
        }
        Ok(state)
    }

    /// Threads read maps, links and rules after the next plan, and notify the sync loop if they
    /// differ.
    fn refresh(&mut self, state: &mut State) -> Result<bool, EbpfError> {
        self.tunnel.repair();
        let is_certain = state.is_current
            && state.is_taken_over()
            && self.maps.node_settings()? == NodeSettings::of_state(state)
            && self.checkers.as_ref().is_some_and(|checkers| !checkers.maps.take_doubt());
        if is_certain {
            self.checkers.iter_mut().for_each(|checkers| checkers.maps_are_due = true);
            self.refresh_programs(state)?;
            self.tunnel.set_up(state);
            self.maglev.compare();
        }
        Ok(is_certain)
    }

    fn distrust(&mut self) {
        self.checkers.iter().for_each(|checkers| checkers.programs.doubt());
    }

    fn compares_all(&self) -> bool {
        self.checkers.is_some()
    }

    fn is_current(state: &State) -> bool {
        state.is_current
    }

    fn keep_nat(&mut self) {
        if let Some(checkers) = &self.checkers {
            // A comparison that runs now expects the rules of before.
            checkers.programs.begin_plan(&[], true);
        }
        self.keep_nat_chain(true);
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        plan::plan(state, snapshot, dirty)
    }

    fn apply(&mut self, state: &mut State, mut plan: Plan) -> Result<(), EbpfError> {
        if let Some(checkers) = &self.checkers {
            if !plan.steps.is_empty() {
                checkers.maps.begin_plan();
            }
            checkers.programs.begin_plan(&plan.steps, self.new_marks.is_some());
        }
        let result = self.apply_all(state, &mut plan);
        state.is_current = result.is_ok() && (plan.is_whole || state.is_current);
        self.maglev.follow(state, &plan);
        self.direct_watcher.start_for(state.direct);
        self.checkers.iter().for_each(|checkers| checkers.maps.end_plan(state.digest));
        self.start_comparisons(state);
        result
    }

    /// Maps of another layout are replaced soon.
    fn held_reader(&self) -> Option<HeldReader> {
        let pins = self.pins.path().to_owned();
        let read: HeldReader = Box::new(move || HeldMaps::open(&pins).map(Held::Programs));
        (!self.is_staged).then_some(read)
    }

    fn differences(state: &State, held: &Held, _: &Snapshot, of: Option<&ServicePortKey>) -> Vec<String> {
        let Held::Programs(held) = held else { return Vec::new() };
        of.map_or_else(|| held.differences_of_node(state), |key| held.differences(state, key))
    }

    fn failure_scope(error: &EbpfError) -> FailureScope {
        match error {
            EbpfError::Incomplete { only_ports: true, .. } => FailureScope::ServicePorts,
            EbpfError::Incomplete { .. }
            | EbpfError::Rules(_)
            | EbpfError::Kernel(KernelError::MapFull { .. }) => FailureScope::Node,
            EbpfError::Kernel(_) => FailureScope::Everything,
        }
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        self.left_out_ports.clone()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.counters.take().map(|counters| Box::new(counters) as Box<dyn KernelCounts>)
    }

    fn map_fill(&self, state: &State) -> Vec<MapFill> {
        let (sizes, usage) = (&self.maps.sizes, &self.sweeper.usage);
        let fill = |map: &MapDeclaration| {
            let entries = match map.name {
                "maglev" => self.maglev.pages(),
                name if map.is_lru => usage.entries(name),
                name => state.entries(name)?,
            };
            Some(MapFill { map: map.name, entries, capacity: sizes.entries(map.name) })
        };
        MAPS.iter().filter_map(fill).collect()
    }

    fn maglev_count(&self) -> Option<MaglevCount> {
        Some(self.maglev.count())
    }

    fn trace(&mut self, state: &mut State, programs: Option<TracingPrograms>) -> bool {
        self.exchange(state, programs)
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.links.left_out()
    }

    fn displaced(&self) -> Vec<DisplacedLink> {
        self.links.displaced()
    }

    fn cleanup(&mut self) -> Vec<EbpfError> {
        let mut errors = remove_everything(self.pins.path(), Some(&self.pins));
        if !errors.is_empty() {
            // Programs that cannot be removed find no Service any more. Flows in the map continue.
            errors.extend(self.maps.remove_all_services().err());
        }
        errors.extend(self.rules.as_mut().map_or_else(Vec::new, Rules::remove));
        errors.into_iter().map(EbpfError::from).collect()
    }
}
