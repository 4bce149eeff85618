//! A dataplane in its own network namespace, with links that tests create and remove, and an empty
//! cgroup.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use futures::TryStreamExt as _;
use netlink_packet_route::{
    link::LinkAttribute,
    tc::{TcAttribute, TcFilterBpfOption, TcMessage, TcOption},
};
use nix::sched::{CloneFlags, setns, unshare};
use proxy_common::{layout::NodeValue, maglev::TableSize};
use proxy_userspace::{
    dataplane::{
        Dataplane as _, PlanSize as _,
        ebpf::{Ebpf, EbpfError, EbpfSettings, LinkAttachment, MapSizes, Marks, Plan, State, Step},
        ipvs,
    },
    kernel::{
        KernelError,
        bpf::{
            LogLevel,
            tc::{Hook, tcx},
        },
        cgroup, links,
    },
    model::{
        Delta, Dirty, MacAddress, Model, ModelSettings, NodeFacts, Snapshot, WatchEvent, XdpLink, XdpMode,
    },
};
use rtnetlink::{Handle, LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth};
use shunt_tests::{deadline::Deadline, process::run_with_timeout};
use tokio::{runtime::Runtime, sync::watch};

/// Both ways to attach programs to links. This kernel has both.
pub(crate) const ATTACHMENTS: [LinkAttachment; 2] = [LinkAttachment::Probe, LinkAttachment::Clsact];
pub(crate) const HOOKS: [Hook; 2] = [Hook::Egress, Hook::Ingress];

/// The time limit of everything.
pub(crate) const WITHIN: Duration = Duration::from_secs(30);

/// A network namespace for the calling thread, which returns to its old one on drop.
struct Namespace {
    home: File,
}

impl Namespace {
    fn enter() -> Self {
        let home = File::open("/proc/thread-self/ns/net").expect("procfs");
        unshare(CloneFlags::CLONE_NEWNET).expect("root may create network namespaces");
        // Tests count program runs. With IPv6, new links would send packets of their own for
        // seconds.
        fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").expect("a namespace of its own");
        Self { home }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = setns(&self.home, CloneFlags::CLONE_NEWNET);
    }
}

/// A cgroup without processes.
struct EmptyCgroup(PathBuf);

impl Drop for EmptyCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// The dataplane in its network namespace.
pub(crate) struct Bench {
    /// `None` between the end of a process and the start of the next.
    pub(crate) dataplane: Option<Ebpf>,
    pub(crate) state: State,
    pub(crate) settings: EbpfSettings,
    pub(crate) model_settings: ModelSettings,
    pub(crate) runtime: Runtime,
    handle: Handle,
    _cgroup: EmptyCgroup,
    _namespace: Namespace,
}

impl Bench {
    pub(crate) fn new(attachment: LinkAttachment) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let namespace = Namespace::enter();
        let name = format!("shunt-links-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let cgroup = EmptyCgroup(cgroup::find_root().expect("cgroup2").join(&name));
        fs::create_dir(&cgroup.0).expect("root may create cgroups");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        let handle = {
            let _inside = runtime.enter();
            let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
            runtime.spawn(connection);
            handle
        };
        let settings = EbpfSettings {
            cgroup_root: cgroup.0.clone(),
            pin_dir: Path::new("/sys/fs/bpf").join(name),
            map_sizes: small_maps(),
            table_size: TableSize::default(),
            link_attachment: attachment,
            marks: Marks { masquerade: NodeValue::MASQUERADE_MARK, reject: NodeValue::REJECT_MARK },
            netfilter_masquerades: true,
            netfilter: None,
            log: LogLevel::Off,
            tunnel_port: None,
        };
        let mut dataplane = Ebpf::new(&settings).expect("load");
        let state = dataplane.observe().expect("observe");
        Self {
            dataplane: Some(dataplane),
            state,
            settings,
            model_settings: model_settings(),
            runtime,
            handle,
            _cgroup: cgroup,
            _namespace: namespace,
        }
    }

    pub(crate) fn dataplane(&mut self) -> &mut Ebpf {
        self.dataplane.as_mut().expect("running")
    }

    /// Returns the steps of a sync for the current links.
    pub(crate) fn planned(&self) -> Vec<Step> {
        self.planned_from(&self.state)
    }

    /// Returns the same steps for another kernel state.
    pub(crate) fn planned_from(&self, state: &State) -> Vec<Step> {
        let model = model(&self.model_settings, self.facts());
        Ebpf::plan(state, model.snapshot(), &Dirty::everything()).steps
    }

    /// Applies steps.
    pub(crate) fn apply(&mut self, steps: &[Step]) {
        self.try_apply(steps).expect("apply");
    }

    /// Attaches the XDP program to a link, if the link takes it.
    pub(crate) fn attach_xdp(&mut self, name: &str, mode: XdpMode) {
        let link = XdpLink {
            name: name.into(),
            mode,
            address: MacAddress([0; 6]),
            takes_frames: true,
            redirects_to_itself: false,
            forwards: true,
        };
        self.apply(&[Step::AttachXdp(self.index(name), link)]);
    }

    /// Applies steps that may fail.
    pub(crate) fn try_apply(&mut self, steps: &[Step]) -> Result<(), EbpfError> {
        let plan = Plan { steps: steps.to_vec(), ..Plan::default() };
        let Self { dataplane, state, .. } = self;
        dataplane.as_mut().expect("running").apply(state, plan)
    }

    /// Returns the Snapshot of the current node, without Services.
    pub(crate) fn snapshot(&self) -> Snapshot {
        model(&self.model_settings, self.facts()).snapshot().clone()
    }

    /// Syncs with the current node. Returns the number of steps.
    pub(crate) fn sync(&mut self) -> usize {
        let snapshot = self.snapshot();
        let plan = Ebpf::plan(&self.state, &snapshot, &Dirty::everything());
        let length = plan.len();
        let Self { dataplane, state, .. } = self;
        dataplane.as_mut().expect("running").apply(state, plan).expect("apply");
        length
    }

    /// Reads the kernel again, as every `syncPeriod`, and repairs drift. Returns the number of
    /// steps.
    pub(crate) fn verify(&mut self) -> usize {
        self.state = self.dataplane().observe().expect("observe");
        self.sync()
    }

    pub(crate) fn stop(&mut self) {
        self.dataplane = None;
    }

    pub(crate) fn restart(&mut self) {
        self.stop();
        self.dataplane = Some(start(&self.settings));
        self.state = self.dataplane().observe().expect("observe again");
    }

    fn facts(&self) -> NodeFacts {
        self.runtime.block_on(async {
            let (to, mut from) = watch::channel(None);
            let reporting = tokio::spawn(links::report(ipvs::DUMMY_LINK, to, Arc::default()));
            let facts = from.wait_for(Option::is_some).await.expect("rtnetlink").clone();
            reporting.abort();
            facts.expect("waited for")
        })
    }
}

/// Starts a dataplane. Retries while the pin directory is locked: between fork and exec, a command
/// that another thread starts has a copy of all descriptors, including the lock of the last
/// dataplane.
fn start(settings: &EbpfSettings) -> Ebpf {
    let start = || match Ebpf::new(settings) {
        Err(EbpfError::Kernel(KernelError::PinsInUse { .. })) => None,
        started => Some(started.expect("load again")),
    };
    Deadline::after(WITHIN).poll(start).expect("no process uses the pins")
}

fn small_maps() -> MapSizes {
    MapSizes {
        // Each CPU keeps up to 128 free entries of a map for itself (kernel/bpf/bpf_lru_list.c). If
        // one CPU has all of them, an insertion on another one evicts entries.
        flows: 1024,
        affinity: 64,
        udp_flows: 64,
        udp_sockets: 64,
        tcp_connections: 64,
        fragments: 64,
        ..MapSizes::default()
    }
}

fn model_settings() -> ModelSettings {
    ModelSettings { node_name: "node1".into(), loopback_node_ports: true, ..ModelSettings::default() }
}

/// Returns a model without objects.
fn model(settings: &ModelSettings, facts: NodeFacts) -> Model {
    let mut model = Model::new(settings.clone());
    for event in no_objects() {
        model.apply(event);
    }
    model.set_node_facts(facts);
    model.resolve();
    model
}

pub(crate) fn no_objects() -> [WatchEvent; 3] {
    [
        WatchEvent::Services(Delta::Replace(Vec::new())),
        WatchEvent::EndpointSlices(Delta::Replace(Vec::new())),
        WatchEvent::Nodes(Delta::Replace(Vec::new())),
    ]
}

/// Links and their programs.
impl Bench {
    /// Creates a veth pair and sets it up.
    pub(crate) fn add_veth(&self, name: &str, peer: &str) {
        let request = self.handle.link().add(LinkVeth::new(name, peer).build());
        self.runtime.block_on(request.execute()).expect("add veth");
        for end in [name, peer] {
            let up = LinkMessageBuilder::<LinkUnspec>::new().index(self.index(end)).up().build();
            self.runtime.block_on(self.handle.link().set(up).execute()).expect("set up");
        }
    }

    pub(crate) fn add_bridge(&self, name: &str, ports: &[&str]) {
        let request = self.handle.link().add(LinkBridge::new(name).up().build());
        self.runtime.block_on(request.execute()).expect("add bridge");
        for port in ports {
            let port = LinkUnspec::new_with_index(self.index(port)).controller(self.index(name)).build();
            self.runtime.block_on(self.handle.link().set(port).execute()).expect("join");
        }
    }

    pub(crate) fn remove(&self, name: &str) {
        let index = self.index(name);
        self.runtime.block_on(self.handle.link().del(index).execute()).expect("remove link");
    }

    pub(crate) fn index(&self, name: &str) -> u32 {
        let found = self.handle.link().get().match_name(name).execute();
        let found = self.runtime.block_on(async { std::pin::pin!(found).try_next().await });
        found.expect("look up").expect("a link of this name").header.index
    }

    /// Returns the number of packets that came in on a link.
    pub(crate) fn received(&self, name: &str) -> u64 {
        let found = self.handle.link().get().match_name(name.to_owned()).execute();
        let found = self.runtime.block_on(async { std::pin::pin!(found).try_next().await });
        let link = found.expect("look up").expect("a link of this name");
        let counted = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Stats64(stats) => Some(stats.rx_packets),
            _ => None,
        });
        counted.expect("every link counts")
    }

    /// Returns all programs on a hook of a link, in the order in which they run.
    pub(crate) fn programs(&self, link: &str, hook: Hook) -> Vec<ProgramInfo> {
        match in_this_kernel(self.settings.link_attachment) {
            LinkAttachment::Probe => {
                let attach_type = match hook {
                    Hook::Ingress => TcAttachType::Ingress,
                    Hook::Egress => TcAttachType::Egress,
                };
                SchedClassifier::query_tcx(link, attach_type).expect("TCX").1
            }
            LinkAttachment::Clsact => {
                let filters = self.filters(link, hook);
                let ids = filters.iter().filter_map(program_id);
                let of_id = |id| loaded_programs().flatten().find(|program| program.id() == id);
                ids.filter_map(of_id).collect()
            }
        }
    }

    /// Returns the names of these programs.
    pub(crate) fn names(&self, link: &str, hook: Hook) -> Vec<String> {
        let programs = self.programs(link, hook);
        programs.iter().map(|program| program.name_as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Returns all filters with a handle on a hook of a link.
    pub(crate) fn filters(&self, link: &str, hook: Hook) -> Vec<TcMessage> {
        let index = self.index(link).cast_signed();
        let mut handle = self.handle.traffic_filter(index);
        let request = match hook {
            Hook::Ingress => handle.get().ingress(),
            Hook::Egress => handle.get().egress(),
        };
        let filters: Vec<TcMessage> =
            self.runtime.block_on(request.execute().try_collect()).expect("filters");
        filters.into_iter().filter(|filter| u32::from(filter.header.handle) != 0).collect()
    }
}

/// Returns the effective attachment: kernels before 6.6 have no TCX, and programs become filters.
pub(crate) fn in_this_kernel(attachment: LinkAttachment) -> LinkAttachment {
    if tcx::is_supported() { attachment } else { LinkAttachment::Clsact }
}

/// Returns the attachments that differ in this kernel.
pub(crate) fn attachments() -> impl Iterator<Item = LinkAttachment> {
    ATTACHMENTS.into_iter().filter(|attachment| in_this_kernel(*attachment) == *attachment)
}

pub(crate) fn has_clsact(link: &str) -> bool {
    tc(&["qdisc", "show", "dev", link]).contains("clsact")
}

fn program_id(filter: &TcMessage) -> Option<u32> {
    filter.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => options.iter().find_map(|option| match option {
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
            _ => None,
        }),
        _ => None,
    })
}

/// Runs `tc` in this thread's network namespace, and returns its output.
pub(crate) fn tc(arguments: &[&str]) -> String {
    run("tc", arguments)
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let finished = run_with_timeout(Path::new(program), arguments, WITHIN).expect("iproute2");
    assert!(finished.status.success(), "{program} {arguments:?}: {}", finished.stderr);
    finished.stdout
}

impl Drop for Bench {
    fn drop(&mut self) {
        let errors = Ebpf::cleanup_at(&self.settings.pin_dir);
        if !std::thread::panicking() {
            assert!(errors.is_empty(), "{errors:?}");
            assert!(!self.settings.pin_dir.exists(), "cleanup leaves nothing");
        }
    }
}
