//! The link programs in the kernel, with their own maps that nothing else uses.

use std::{
    collections::BTreeMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues, lpm_trie::LpmTrie},
    programs::{SchedClassifier, Xdp},
    util::{KernelVersion, nr_cpus},
};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, DirectWatch, DsrAddress, DsrKey, EndpointKey, EndpointValue,
        Flow, FlowKey, FragmentKey, FragmentValue, MaglevKey, MaglevPage, MasqueradeSubnet, MemberKey,
        NodeValue, Program, ProgramError, ProgramErrors, ServiceCounts, ServiceKey, ServiceValue,
        SourceRange, XdpLinkValue,
    },
    link::Outcome,
    prefilter::{PrefilterItem, PrefilterTable, sized::SizedPrefilter},
    testing::{
        ChecksumState, ConfigMaps, FrameResult, FrameRunner, Hook, InputFrame, LO, StateMaps, TUNNEL_PORT,
    },
};
use proxy_userspace::{
    dataplane::ebpf::OBJECT,
    kernel::bpf::{
        self, MappedWords,
        test_run::{TestFrame, test_run, test_run_xdp},
    },
};

use crate::content::{DirectFlows, fill, fill_trie, map, members, read};

/// All tests share the programs, because the verifier is slow.
static KERNEL: LazyLock<Mutex<Kernel>> = LazyLock::new(|| Mutex::new(Kernel::load()));

/// The link programs and their maps.
pub(crate) struct Kernel {
    ebpf: Ebpf,
    config: Option<ConfigMaps>,
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    endpoints: HashMap<MapData, EndpointKey, EndpointValue>,
    maglev: HashMap<MapData, MaglevKey, MaglevPage>,
    members: HashMap<MapData, MemberKey, u8>,
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    node_addresses: HashMap<MapData, Addr, u8>,
    local_sources: LpmTrie<MapData, Addr, u8>,
    exempt_sources: HashMap<MapData, Addr, u8>,
    local_links: HashMap<MapData, u32, u8>,
    direct_links: HashMap<MapData, u32, u8>,
    peer_links: HashMap<MapData, u32, u8>,
    direct_watch: Array<MapData, DirectWatch>,
    xdp_links: HashMap<MapData, u32, XdpLinkValue>,
    masquerade_addresses: LpmTrie<MapData, MasqueradeSubnet, Addr>,
    dsr_endpoints: HashMap<MapData, DsrKey, Addr>,
    dsr_nodes: HashMap<MapData, Addr, u8>,
    node: Array<MapData, NodeValue>,
    flows: HashMap<MapData, FlowKey, Flow>,
    unassured_flows: HashMap<MapData, FlowKey, Flow>,
    direct_flows: DirectFlows,
    dsr_returns: HashMap<MapData, FlowKey, Addr>,
    dsr_new_returns: HashMap<MapData, FlowKey, Addr>,
    fragments: HashMap<MapData, FragmentKey, FragmentValue>,
    affinity: HashMap<MapData, AffinityKey, AffinityValue>,
    counters: PerCpuArray<MapData, u64>,
    service_counts: Array<MapData, ServiceCounts>,
    errors: PerCpuArray<MapData, ProgramErrors>,
    prefilter: SizedPrefilter<MappedWords>,
}

/// The number of entries of each map of flows.
pub(crate) const FLOWS: u32 = 4_096;

/// The slots of each CPU: more than the Services of any test.
const SLOTS: u32 = 64;

/// The keys of the map of errors.
fn programs() -> std::ops::Range<u32> {
    0..u32::try_from(Program::COUNT).expect("few")
}

fn cpus() -> u32 {
    u32::try_from(nr_cpus().expect("sysfs")).expect("few")
}

/// The link programs.
pub(crate) const PROGRAMS: [&str; 5] =
    ["shunt_in_eth", "shunt_in_ip", "shunt_in_tunnel", "shunt_out_eth", "shunt_out_ip"];

/// The XDP program.
const XDP: &str = "shunt_xdp";

fn load_programs(ebpf: &mut Ebpf) {
    for name in PROGRAMS {
        let program: &mut SchedClassifier =
            ebpf.program_mut(name).expect("in the object").try_into().expect("for links");
        program.load().expect("the verifier accepts it");
    }
    let program: &mut Xdp = ebpf.program_mut(XDP).expect("in the object").try_into().expect("for XDP");
    program.load().expect("the verifier accepts it");
}

impl Kernel {
    /// Waits until no other test uses the programs.
    pub(crate) fn lock() -> MutexGuard<'static, Self> {
        KERNEL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load() -> Self {
        // Kernels before 5.11 charge maps to this limit. If it stays, loading fails with a cause.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
        let mut loader = EbpfLoader::new();
        for map in ["endpoints", "members", "flows", "unassured_flows"] {
            loader.map_max_entries(map, FLOWS);
        }
        let (has_coarse_clock, tunnel_port): (_, u32) =
            (u8::from(bpf::has_coarse_clock()), TUNNEL_PORT.into());
        loader.override_global("HAS_COARSE_CLOCK", &has_coarse_clock, true);
        loader.override_global("TUNNEL_PORT", &tunnel_port, true);
        // The default of the proxy.
        loader.override_global("AYA_LOG_LEVEL", &0u8, true).override_global("SERVICE_SLOTS", &SLOTS, true);
        loader.map_max_entries("service_counts", SLOTS * cpus());
        let mut ebpf = loader.load(OBJECT).expect("root may load maps");
        load_programs(&mut ebpf);
        Self {
            config: None,
            services: map(&mut ebpf, "services"),
            endpoints: map(&mut ebpf, "endpoints"),
            maglev: map(&mut ebpf, "maglev"),
            members: map(&mut ebpf, "members"),
            source_ranges: map(&mut ebpf, "source_ranges"),
            node_addresses: map(&mut ebpf, "node_addresses"),
            local_sources: map(&mut ebpf, "local_sources"),
            exempt_sources: map(&mut ebpf, "exempt_sources"),
            local_links: map(&mut ebpf, "local_links"),
            direct_links: map(&mut ebpf, "direct_links"),
            peer_links: map(&mut ebpf, "peer_links"),
            direct_watch: map(&mut ebpf, "direct_watch"),
            xdp_links: map(&mut ebpf, "xdp_links"),
            masquerade_addresses: map(&mut ebpf, "masquerade_addresses"),
            dsr_endpoints: map(&mut ebpf, "dsr_endpoints"),
            dsr_nodes: map(&mut ebpf, "dsr_nodes"),
            node: map(&mut ebpf, "node"),
            flows: map(&mut ebpf, "flows"),
            unassured_flows: map(&mut ebpf, "unassured_flows"),
            direct_flows: DirectFlows::take(&mut ebpf),
            dsr_returns: map(&mut ebpf, "dsr_returns"),
            dsr_new_returns: map(&mut ebpf, "dsr_new_returns"),
            fragments: map(&mut ebpf, "fragments"),
            affinity: map(&mut ebpf, "affinity"),
            counters: map(&mut ebpf, "counters"),
            service_counts: map(&mut ebpf, "service_counts"),
            errors: map(&mut ebpf, "program_errors"),
            prefilter: prefilter(&mut ebpf),
            ebpf,
        }
    }

    /// Returns how many instructions the verifier followed in each program, if the kernel tells.
    pub(crate) fn verified_instructions(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let instructions = |name| {
            let program = self.ebpf.program(name).expect("in the object");
            program.info().expect("it is loaded").verified_instruction_count()
        };
        PROGRAMS.into_iter().chain([XDP]).filter_map(move |name| Some((name, instructions(name)?)))
    }

    /// Inserts items, which doubles the prefilter now and then. Bits are never cleared here.
    fn insert_in_prefilter(&mut self, items: impl Iterator<Item = PrefilterItem>) {
        items.for_each(|item| self.prefilter.insert(item));
    }

    /// Returns the counts of each service, by its identifier.
    fn services(&self) -> BTreeMap<u32, ServiceCounts> {
        let mut services = BTreeMap::new();
        for entry in 0..SLOTS * cpus() {
            let counts = self.service_counts.get(&entry, 0).expect("in the map");
            if counts != ServiceCounts::NONE {
                services.entry(entry % SLOTS).or_insert(ServiceCounts::NONE).merge(&counts);
            }
        }
        services
    }

    fn errors(&self) -> [u64; ProgramError::COUNT] {
        let of_cpus =
            programs().flat_map(|program| self.errors.get(&program, 0).expect("in the map").to_vec());
        let mut sums = [0; ProgramError::COUNT];
        for errors in of_cpus {
            sums.iter_mut().zip(errors.counts).for_each(|(sum, count)| *sum += count);
        }
        sums
    }

    fn reset_counters(&mut self) {
        for counter in Counter::ALL {
            self.counters.set(counter as u32, one_per_cpu(0), 0).expect("in the map");
        }
        let none = ProgramErrors { counts: [0; ProgramError::COUNT] };
        for program in programs() {
            self.errors.set(program, one_per_cpu(none), 0).expect("in the map");
        }
        let counted: Vec<u32> = self.services().into_keys().collect();
        for (service, cpu) in counted.iter().flat_map(|service| (0..cpus()).map(move |cpu| (service, cpu))) {
            let entry = cpu * SLOTS + service;
            self.service_counts.set(entry, ServiceCounts::NONE, 0).expect("in the map");
        }
    }

    /// Runs a program over a frame. Returns `None` if the kernel does not accept such a frame.
    pub(crate) fn run_program(&mut self, name: &str, frame: &mut TestFrame) -> Option<Outcome> {
        let program: &SchedClassifier =
            self.ebpf.program(name).expect("in the object").try_into().expect("for links");
        let program = program.fd().expect("loaded");
        match test_run(std::os::fd::AsFd::as_fd(program), frame) {
            Ok(-1) => Some(Outcome::Proceed),
            Ok(2) => Some(Outcome::Drop),
            Ok(7) => Some(Outcome::Redirect),
            Ok(code) => panic!("{name} returned {code}, which is neither next, drop nor redirect"),
            Err(error) if error.raw_os_error() == Some(EINVAL) => None,
            Err(error) => panic!("{name} over {frame:?}: {error}"),
        }
    }

    /// Runs the XDP program over a frame.
    fn run_xdp(&mut self, input: &InputFrame) -> FrameResult {
        let program: &Xdp = self.ebpf.program(XDP).expect("in the object").try_into().expect("for XDP");
        let program = program.fd().expect("loaded");
        let mut bytes = input.bytes.clone();
        let outcome = match test_run_xdp(std::os::fd::AsFd::as_fd(program), &mut bytes) {
            Ok(1) => Outcome::Drop,
            Ok(2) => Outcome::Proceed,
            Ok(3) => Outcome::Transmit,
            Ok(4) => Outcome::Redirect,
            Ok(code) => panic!("{XDP} returned {code}, which is neither drop, pass, transmit nor redirect"),
            Err(error) => panic!("{XDP} over {input:?}: {error}"),
        };
        FrameResult::of_kernel(input, bytes, input.mark, outcome)
    }
}

const EINVAL: i32 = nix::errno::Errno::EINVAL as i32;

fn one_per_cpu<V: Pod>(value: V) -> PerCpuValues<V> {
    PerCpuValues::try_from(vec![value; nr_cpus().expect("sysfs")]).expect("one for each CPU")
}

fn prefilter(ebpf: &mut Ebpf) -> SizedPrefilter<MappedWords> {
    let Some(Map::Array(map)) = ebpf.take_map("prefilter") else { panic!("no array in the object") };
    SizedPrefilter::open(MappedWords::new(map.fd(), PrefilterTable::LENGTH).expect("it can be mapped"))
}

impl FrameRunner for Kernel {
    fn configure(&mut self, config: &ConfigMaps) {
        if self.config.as_ref() == Some(config) {
            return;
        }
        fill(&mut self.services, &config.services);
        fill(&mut self.endpoints, &config.endpoints);
        fill(&mut self.maglev, &config.maglev);
        fill(&mut self.members, &members(&config.members));
        fill(&mut self.node_addresses, &members(&config.node_addresses));
        fill(&mut self.exempt_sources, &members(&config.exempt_sources));
        fill(&mut self.local_links, &members(&config.local_links));
        fill(&mut self.direct_links, &members(&config.direct_links));
        fill(&mut self.peer_links, &members(&config.peer_links));
        fill(&mut self.xdp_links, &config.xdp_links);
        fill(&mut self.dsr_endpoints, &config.dsr_endpoints);
        let others = config.dsr_others.iter().map(|address| (*address, DsrAddress::Other as u8));
        let ends = config.dsr_nodes.iter().map(|address| (*address, DsrAddress::End as u8));
        fill(&mut self.dsr_nodes, &others.chain(ends).collect());
        let ranges = config.source_ranges.iter().map(|(service, addr, length)| {
            (SourceRange::SERVICE_BITS + length, SourceRange { service: *service, addr: *addr }, *service)
        });
        fill_trie(&mut self.source_ranges, ranges);
        fill_trie(
            &mut self.local_sources,
            config.local_sources.iter().map(|(addr, length)| (*length, *addr, 0)),
        );
        let subnets = config.masquerade_addresses.iter().map(|((link, addr, length), address)| {
            (MasqueradeSubnet::LINK_BITS + length, MasqueradeSubnet { link: *link, addr: *addr }, *address)
        });
        fill_trie(&mut self.masquerade_addresses, subnets);
        self.node.set(0, config.node, 0).expect("in the map");
        self.direct_watch.set(0, config.direct_watch, 0).expect("in the map");
        self.insert_in_prefilter(config.prefilter_items());
        self.config = Some(config.clone());
    }

    fn state(&mut self) -> StateMaps {
        let count = |number| -> u64 {
            let values = self.counters.get(&number, 0).expect("in the map");
            values.iter().sum()
        };
        StateMaps {
            flows: read(&self.flows),
            unassured_flows: read(&self.unassured_flows),
            direct_flows: self.direct_flows.read(),
            dsr_returns: read(&self.dsr_returns),
            dsr_new_returns: read(&self.dsr_new_returns),
            fragments: read(&self.fragments),
            affinity: read(&self.affinity),
            counters: std::array::from_fn(|number| count(u32::try_from(number).expect("few"))),
            services: self.services(),
            errors: self.errors(),
        }
    }

    fn set_state(&mut self, state: &StateMaps) {
        fill(&mut self.flows, &state.flows);
        fill(&mut self.unassured_flows, &state.unassured_flows);
        self.direct_flows.fill(&state.direct_flows);
        fill(&mut self.dsr_returns, &state.dsr_returns);
        fill(&mut self.dsr_new_returns, &state.dsr_new_returns);
        fill(&mut self.fragments, &state.fragments);
        fill(&mut self.affinity, &state.affinity);
        self.insert_in_prefilter(state.prefilter_items());
        self.reset_counters();
    }

    fn run(&mut self, hook: Hook, input: &InputFrame) -> Option<FrameResult> {
        if input.note != 0 || input.ingress_link != 0 || input.link != LO {
            return None;
        }
        if hook == Hook::Xdp {
            let is_plain = input.checksum == ChecksumState::None && input.segments.is_none();
            return (is_plain && input.mark == 0).then(|| self.run_xdp(input));
        }
        let has_sum = match input.checksum {
            ChecksumState::None => false,
            // The kernel has no way to set this state for a test frame.
            ChecksumState::Partial => return None,
            ChecksumState::Complete => true,
        };
        let mut frame = TestFrame {
            bytes: input.bytes.clone(),
            mark: input.mark,
            ifindex: 0,
            segments: input.segments.unwrap_or_default(),
            has_sum,
        };
        let name = match hook {
            // The frame would have to come through a tunnel.
            Hook::Tunnel => return None,
            Hook::Ingress => "shunt_in_eth",
            Hook::Egress => "shunt_out_eth",
            Hook::Xdp => XDP,
        };
        let Some(outcome) = self.run_program(name, &mut frame) else {
            let knows_sums = KernelVersion::current().expect("uname") >= KernelVersion::new(6, 18, 0);
            if has_sum && knows_sums {
                frame.has_sum = false;
                let plain = self.run_program(name, &mut frame);
                assert_eq!(
                    plain, None,
                    "this kernel accepts {input:?} without a hardware sum, and should accept it with one"
                );
            }
            return None;
        };
        Some(FrameResult::of_kernel(input, frame.bytes, frame.mark, outcome))
    }
}
