//! A dataplane attached to a cgroup that holds just this process, and servers on loopback.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind},
    net::{SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aya::{
    maps::{Map, MapData, MapError, MapInfo},
    programs::{ProgramInfo, loaded_programs},
};
use proxy_common::{layout::NodeValue, maglev::TableSize};
use proxy_userspace::{
    dataplane::{
        Dataplane, PlanSize as _,
        ebpf::{Ebpf, EbpfSettings, LinkAttachment, MapSizes, Marks, State},
    },
    kernel::{
        bpf::{self, LogLevel},
        cgroup,
    },
    model::{Dirty, Protocol, ResolvedPort, Snapshot},
};
use shunt_tests::deadline::{Deadline, scaled};
pub(crate) use shunt_tests::resolved::{key, port};

/// Tests move their process into a cgroup of their own, so only one runs at a time.
static TURN: Mutex<()> = Mutex::new(());

/// A cgroup that contains this process. On drop the process moves back, and the cgroup is removed.
struct OwnCgroup {
    path: PathBuf,
    home: PathBuf,
}

impl OwnCgroup {
    fn enter() -> Self {
        let root = cgroup::find_root().expect("cgroup2");
        let own = fs::read_to_string("/proc/self/cgroup").expect("procfs");
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).expect("cgroup2").to_owned();
        let path = root.join(format!("shunt-sockets-{}", process::id()));
        fs::create_dir(&path).expect("root may create cgroups");
        let cgroup = Self { path, home: root.join(own) };
        fs::write(cgroup.path.join("cgroup.procs"), process::id().to_string()).expect("move this process");
        cgroup
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.home.join("cgroup.procs"), process::id().to_string());
        // Newer kernels keep a cgroup until an ended process in it is reaped.
        Deadline::after(Duration::from_secs(5)).poll(|| remove_directories(&self.path).ok());
    }
}

/// Removes a cgroup and those that a test created in it.
fn remove_directories(cgroup: &Path) -> io::Result<()> {
    for child in fs::read_dir(cgroup)? {
        let child = child?;
        if child.file_type()?.is_dir() {
            fs::remove_dir(child.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

/// The dataplane, attached to a cgroup of its own.
pub(crate) struct Bench {
    /// `None` between the end of a process and the start of the next.
    pub(crate) dataplane: Option<Ebpf>,
    pub(crate) state: State,
    pub(crate) snapshot: Snapshot,
    pub(crate) settings: EbpfSettings,
    _cgroup: OwnCgroup,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cgroup = OwnCgroup::enter();
        let settings = EbpfSettings {
            cgroup_root: cgroup.path.clone(),
            pin_dir: format!("/sys/fs/bpf/shunt-sockets-{}", process::id()).into(),
            map_sizes: MapSizes { services: 64, endpoints: 256, ..MapSizes::default() },
            table_size: TableSize::default(),
            link_attachment: LinkAttachment::Probe,
            marks: Marks { masquerade: NodeValue::MASQUERADE_MARK, reject: NodeValue::REJECT_MARK },
            netfilter_masquerades: true,
            netfilter: None,
            log: LogLevel::Off,
            tunnel_port: None,
        };
        let mut dataplane = Ebpf::new(&settings).expect("load");
        let state = dataplane.observe().expect("observe");
        let snapshot = Snapshot::default();
        Self { dataplane: Some(dataplane), state, snapshot, settings, _cgroup: cgroup, _turn: turn }
    }

    pub(crate) fn dataplane(&mut self) -> &mut Ebpf {
        self.dataplane.as_mut().expect("running")
    }

    pub(crate) fn sync(&mut self, dirty: &Dirty) -> usize {
        let plan = Ebpf::plan(&self.state, &self.snapshot, dirty);
        let length = plan.len();
        let Self { dataplane, state, .. } = self;
        dataplane.as_mut().expect("running").apply(state, plan).expect("apply");
        length
    }

    /// Reads the kernel again, as every `syncPeriod`, and repairs drift. Returns the number of
    /// changes.
    pub(crate) fn verify(&mut self) -> usize {
        self.state = self.dataplane().observe().expect("observe");
        self.sync(&Dirty::everything())
    }

    /// Serves a cluster IP and port with these endpoints.
    pub(crate) fn serve(
        &mut self,
        protocol: Protocol,
        address: &str,
        endpoints: &[SocketAddr],
    ) -> SocketAddr {
        self.serve_as(protocol, address, endpoints, |_| {})
    }

    /// The same, with a service port that `change` modifies.
    pub(crate) fn serve_as(
        &mut self,
        protocol: Protocol,
        address: &str,
        endpoints: &[SocketAddr],
        change: impl FnOnce(&mut ResolvedPort),
    ) -> SocketAddr {
        let address: SocketAddr = address.parse().expect("address");
        let (key, mut port) = (key(&address.to_string(), protocol, address.ip()), port(address, endpoints));
        change(&mut port);
        self.snapshot.ports.insert(key, Arc::new(port));
        self.sync(&Dirty::everything());
        address
    }

    /// Ends the dataplane and starts a new one, as a restart does.
    pub(crate) fn restart(&mut self) {
        self.dataplane = None;
        self.dataplane = Some(Ebpf::new(&self.settings).expect("load again"));
        self.state = self.dataplane().observe().expect("observe again");
    }
}

impl Bench {
    /// Opens a pinned map, to inspect or break it.
    pub(crate) fn pinned<M>(&self, map: &str) -> M
    where
        M: TryFrom<Map, Error = MapError>,
    {
        let data = MapData::from_pin(self.settings.pin_dir.join(map)).expect("pinned");
        Map::from_map_data(data).and_then(M::try_from).expect("of this type")
    }

    /// Returns the number of instructions of each program of these maps, after the verifier.
    pub(crate) fn programs(&self) -> BTreeMap<String, u32> {
        let size = |program: &ProgramInfo| program.size_translated().expect("root may read it") / 8;
        let named = |program: &ProgramInfo| (program.name_as_str().expect("text").to_owned(), size(program));
        self.loaded().iter().map(named).collect()
    }

    /// Returns the ids of these programs.
    pub(crate) fn program_ids(&self) -> Vec<u32> {
        self.loaded().iter().map(ProgramInfo::id).collect()
    }

    /// Returns the programs that use one of the pinned maps.
    fn loaded(&self) -> Vec<ProgramInfo> {
        let pins = fs::read_dir(&self.settings.pin_dir).expect("a pin directory").flatten();
        let maps: Vec<u32> = pins.filter_map(|pin| Some(MapInfo::from_pin(pin.path()).ok()?.id())).collect();
        let uses = |program: &ProgramInfo| {
            let used = program.map_ids().ok().flatten().unwrap_or_default();
            used.iter().any(|map| maps.contains(map))
        };
        loaded_programs().filter_map(Result::ok).filter(uses).collect()
    }
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

/// Returns the error that a caller sees if programs choose `chosen`: EPERM on kernels before 6.1,
/// where they cannot choose.
pub(crate) fn failure(chosen: ErrorKind) -> ErrorKind {
    if bpf::may_choose_errors() { chosen } else { ErrorKind::PermissionDenied }
}

/// Returns true if a condition becomes true within a few seconds.
pub(crate) fn soon(mut is_true: impl FnMut() -> bool) -> bool {
    Deadline::after(Duration::from_secs(5)).poll(|| is_true().then_some(())).is_some()
}

/// Returns a listener and its address.
pub(crate) fn tcp_server(address: &str) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(address).expect("loopback");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// Returns a bound socket with a receive timeout, and its address.
pub(crate) fn udp_socket(address: &str) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(address).expect("loopback");
    socket.set_read_timeout(Some(scaled(Duration::from_secs(5)))).expect("timeout");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}
