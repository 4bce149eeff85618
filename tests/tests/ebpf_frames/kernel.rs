//! The programs in the kernel, loaded once, with maps of their own that nothing else sees.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{
        Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues,
        lpm_trie::{Key, LpmTrie},
    },
    programs::SchedClassifier,
    util::{KernelVersion, nr_cpus},
};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::{
    Addr,
    layout::{
        AffinityKey, AffinityValue, Counter, Endpoint, EndpointKey, Flow, FlowKey, FragmentKey,
        FragmentValue, MemberKey, NodeValue, Program, ProgramError, ProgramErrors, ServiceCounts, ServiceKey,
        ServiceValue, SourceRange,
    },
    link::Outcome,
    prefilter::PrefilterBit,
    testing::{Bed, Given, Hook, Noted, Ran, Sum, World},
};
use proxy_userspace::{
    dataplane::ebpf::OBJECT,
    kernel::bpf::{
        self,
        test_run::{TestFrame, test_run},
    },
};

/// One for all tests: the verifier takes its time.
static KERNEL: LazyLock<Mutex<Kernel>> = LazyLock::new(|| Mutex::new(Kernel::load()));

/// The programs for links, and their maps.
pub(crate) struct Kernel {
    ebpf: Ebpf,
    world: Option<World>,
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    endpoints: HashMap<MapData, EndpointKey, Endpoint>,
    members: HashMap<MapData, MemberKey, u8>,
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    node_addresses: HashMap<MapData, Addr, u8>,
    local_sources: LpmTrie<MapData, Addr, u8>,
    local_links: HashMap<MapData, u32, u8>,
    node: Array<MapData, NodeValue>,
    flows: HashMap<MapData, FlowKey, Flow>,
    fragments: HashMap<MapData, FragmentKey, FragmentValue>,
    affinity: HashMap<MapData, AffinityKey, AffinityValue>,
    counters: PerCpuArray<MapData, u64>,
    service_counts: Array<MapData, ServiceCounts>,
    errors: PerCpuArray<MapData, ProgramErrors>,
    prefilter: Array<MapData, u64>,
}

/// Slots of a CPU, more than there are Services in any test.
const SLOTS: u32 = 64;

/// Their places in the map of errors.
fn programs() -> std::ops::Range<u32> {
    0..u32::try_from(Program::COUNT).expect("few")
}

fn cpus() -> u32 {
    u32::try_from(nr_cpus().expect("sysfs")).expect("few")
}

/// The links' programs.
pub(crate) const PROGRAMS: [&str; 4] = ["shunt_in_eth", "shunt_in_ip", "shunt_out_eth", "shunt_out_ip"];

impl Kernel {
    /// Waits for its turn.
    pub(crate) fn lock() -> MutexGuard<'static, Self> {
        KERNEL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load() -> Self {
        // Kernels before 5.11 charge maps to it. Where it cannot be lifted, loading says what it lacks.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
        let mut loader = EbpfLoader::new();
        for map in ["endpoints", "members", "flows"] {
            loader.map_max_entries(map, 4_096);
        }
        let has_coarse_clock = u8::from(bpf::has_coarse_clock());
        loader.override_global("HAS_COARSE_CLOCK", &has_coarse_clock, true);
        // As the proxy has them by default.
        loader.override_global("AYA_LOG_LEVEL", &0u8, true);
        loader.map_max_entries("service_counts", SLOTS * cpus()).override_global(
            "SERVICE_SLOTS",
            &SLOTS,
            true,
        );
        let mut ebpf = loader.load(OBJECT).expect("root may load maps");
        for name in PROGRAMS {
            let program: &mut SchedClassifier =
                ebpf.program_mut(name).expect("in the object").try_into().expect("for links");
            program.load().expect("the verifier lets it through");
        }
        Self {
            world: None,
            services: map(&mut ebpf, "services"),
            endpoints: map(&mut ebpf, "endpoints"),
            members: map(&mut ebpf, "members"),
            source_ranges: map(&mut ebpf, "source_ranges"),
            node_addresses: map(&mut ebpf, "node_addresses"),
            local_sources: map(&mut ebpf, "local_sources"),
            local_links: map(&mut ebpf, "local_links"),
            node: map(&mut ebpf, "node"),
            flows: map(&mut ebpf, "flows"),
            fragments: map(&mut ebpf, "fragments"),
            affinity: map(&mut ebpf, "affinity"),
            counters: map(&mut ebpf, "counters"),
            service_counts: map(&mut ebpf, "service_counts"),
            errors: map(&mut ebpf, "program_errors"),
            prefilter: map(&mut ebpf, "prefilter"),
            ebpf,
        }
    }

    /// Bits stay, as they do in the proxy's own map.
    fn set_prefilter(&mut self, bits: impl Iterator<Item = PrefilterBit>) {
        for PrefilterBit { word, mask } in bits {
            let bits = self.prefilter.get(&word, 0).expect("there are so many");
            if bits & mask == 0 {
                self.prefilter.set(word, bits | mask, 0).expect("there are so many");
            }
        }
    }

    /// What was counted of Services, by their identifiers.
    fn services(&self) -> BTreeMap<u32, ServiceCounts> {
        let mut services = BTreeMap::new();
        for entry in 0..SLOTS * cpus() {
            let counts = self.service_counts.get(&entry, 0).expect("there are so many");
            if counts != ServiceCounts::NONE {
                services.entry(entry % SLOTS).or_insert(ServiceCounts::NONE).merge(&counts);
            }
        }
        services
    }

    fn errors(&self) -> [u64; ProgramError::COUNT] {
        let of_cpus =
            programs().flat_map(|program| self.errors.get(&program, 0).expect("there are so many").to_vec());
        let mut sums = [0; ProgramError::COUNT];
        for errors in of_cpus {
            sums.iter_mut().zip(errors.counts).for_each(|(sum, count)| *sum += count);
        }
        sums
    }

    fn uncount(&mut self) {
        for (counter, _) in Counter::ALL {
            self.counters.set(counter as u32, one_a_cpu(0), 0).expect("there are so many");
        }
        let none = ProgramErrors { counts: [0; ProgramError::COUNT] };
        for program in programs() {
            self.errors.set(program, one_a_cpu(none), 0).expect("there are so many");
        }
        let counted: Vec<u32> = self.services().into_keys().collect();
        for (service, cpu) in counted.iter().flat_map(|service| (0..cpus()).map(move |cpu| (service, cpu))) {
            let entry = cpu * SLOTS + service;
            self.service_counts.set(entry, ServiceCounts::NONE, 0).expect("there are so many");
        }
    }

    /// Runs a program over a frame. None if the kernel does not take such a frame.
    pub(crate) fn run_program(&mut self, name: &str, frame: &mut TestFrame) -> Option<Outcome> {
        let program: &SchedClassifier =
            self.ebpf.program(name).expect("in the object").try_into().expect("for links");
        let program = program.fd().expect("loaded");
        match test_run(std::os::fd::AsFd::as_fd(program), frame) {
            Ok(-1) => Some(Outcome::Proceed),
            Ok(2) => Some(Outcome::Drop),
            Ok(code) => panic!("{name} returned {code}, which is neither next nor drop"),
            Err(error) if error.raw_os_error() == Some(EINVAL) => None,
            Err(error) => panic!("{name} over {frame:?}: {error}"),
        }
    }
}

const EINVAL: i32 = nix::errno::Errno::EINVAL as i32;

fn one_a_cpu<V: Pod>(value: V) -> PerCpuValues<V> {
    PerCpuValues::try_from(vec![value; nr_cpus().expect("sysfs")]).expect("one a CPU")
}

fn map<M: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &str) -> M {
    M::try_from(ebpf.take_map(name).expect("in the object")).expect("of this type")
}

/// Makes a map hold this and nothing else.
fn fill<K, V>(map: &mut HashMap<MapData, K, V>, wanted: &BTreeMap<K, V>)
where
    K: Pod + Ord + Hash,
    V: Pod + PartialEq,
{
    let held = read(map);
    for key in held.keys().filter(|key| !wanted.contains_key(key)) {
        map.remove(key).expect("it is there");
    }
    for (key, value) in wanted.iter().filter(|(key, value)| held.get(key) != Some(*value)) {
        map.insert(key, value, 0).expect("there is room");
    }
}

fn read<K, V>(map: &HashMap<impl Borrow<MapData>, K, V>) -> BTreeMap<K, V>
where
    K: Pod + Ord,
    V: Pod,
{
    map.iter().collect::<Result<_, _>>().expect("nothing else writes")
}

fn members<K: Ord + Copy>(set: &BTreeSet<K>) -> BTreeMap<K, u8> {
    set.iter().map(|key| (*key, 0)).collect()
}

/// Makes a trie of prefixes hold this and nothing else.
fn fill_trie<K: Pod, V: Pod>(
    trie: &mut LpmTrie<MapData, K, V>,
    wanted: impl IntoIterator<Item = (u32, K, V)>,
) {
    let held: Vec<Key<K>> = trie.keys().collect::<Result<_, _>>().expect("nothing else writes");
    for key in held {
        trie.remove(&key).expect("it is there");
    }
    for (length, key, value) in wanted {
        trie.insert(&Key::new(length, key), value, 0).expect("there is room");
    }
}

impl Bed for Kernel {
    fn configure(&mut self, world: &World) {
        if self.world.as_ref() == Some(world) {
            return;
        }
        fill(&mut self.services, &world.services);
        fill(&mut self.endpoints, &world.endpoints);
        fill(&mut self.members, &members(&world.members));
        fill(&mut self.node_addresses, &members(&world.node_addresses));
        fill(&mut self.local_links, &members(&world.local_links));
        let ranges = world.source_ranges.iter().map(|(service, addr, length)| {
            (SourceRange::SERVICE_BITS + length, SourceRange { service: *service, addr: *addr }, *service)
        });
        fill_trie(&mut self.source_ranges, ranges);
        fill_trie(
            &mut self.local_sources,
            world.local_sources.iter().map(|(addr, length)| (*length, *addr, 0)),
        );
        self.node.set(0, world.node, 0).expect("it has one");
        self.set_prefilter(world.prefilter_bits());
        self.world = Some(world.clone());
    }

    fn noted(&mut self) -> Noted {
        let count = |number| -> u64 {
            let values = self.counters.get(&number, 0).expect("there are so many");
            values.iter().sum()
        };
        Noted {
            flows: read(&self.flows),
            fragments: read(&self.fragments),
            affinity: read(&self.affinity),
            counters: std::array::from_fn(|number| count(u32::try_from(number).expect("few"))),
            services: self.services(),
            errors: self.errors(),
        }
    }

    fn set_noted(&mut self, noted: &Noted) {
        fill(&mut self.flows, &noted.flows);
        fill(&mut self.fragments, &noted.fragments);
        fill(&mut self.affinity, &noted.affinity);
        self.set_prefilter(noted.prefilter_bits());
        self.uncount();
    }

    fn run(&mut self, hook: Hook, given: &Given) -> Option<Ran> {
        let has_sum = match given.sum {
            Sum::None => false,
            // Nothing makes the kernel take a test frame for such a one.
            Sum::Partial => return None,
            Sum::Complete => true,
        };
        let mut frame = TestFrame {
            bytes: given.bytes.clone(),
            mark: given.mark,
            ifindex: 0,
            segments: given.segments.unwrap_or_default(),
            has_sum,
        };
        let name = match hook {
            Hook::Ingress => "shunt_in_eth",
            Hook::Egress => "shunt_out_eth",
        };
        let Some(outcome) = self.run_program(name, &mut frame) else {
            let knows_sums = KernelVersion::current().expect("uname") >= KernelVersion::new(6, 18, 0);
            if has_sum && knows_sums {
                frame.has_sum = false;
                let plain = self.run_program(name, &mut frame);
                assert_eq!(plain, None, "this kernel takes {given:?} without a sum, and should with one");
            }
            return None;
        };
        Some(Ran { given: given.clone(), bytes: frame.bytes, mark: frame.mark, outcome })
    }
}
