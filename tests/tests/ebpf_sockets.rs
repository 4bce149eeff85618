//! The socket programs in this kernel, with real sockets on loopback: what a process sees that dials a Service.

use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    num::NonZeroU16,
    path::PathBuf,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use proxy_userspace::{
    dataplane::{
        Dataplane, PlanSize as _,
        ebpf::{Ebpf, EbpfSettings, MapSizes, State},
    },
    kernel::cgroup,
    model::{
        Dirty, Frontend, FrontendKind, IpFamily, NamespacedName, NodeView, Protocol, ResolvedEndpoint,
        ResolvedPort, ServicePortKey, ServicePortName, Snapshot, TrafficPolicy,
    },
};

/// Tests here move their process into a cgroup of their own, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A cgroup that holds this process; at the end the process goes back and the cgroup away.
struct OwnCgroup {
    path: PathBuf,
    home: PathBuf,
}

impl OwnCgroup {
    fn enter() -> Self {
        let root = cgroup::find_root().expect("cgroup2");
        let own = fs::read_to_string("/proc/self/cgroup").expect("procfs");
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .expect("cgroup2")
            .to_owned();
        let path = root.join(format!("shunt-sockets-{}", process::id()));
        fs::create_dir(&path).expect("root may create cgroups");
        let cgroup = Self {
            path,
            home: root.join(own),
        };
        fs::write(cgroup.path.join("cgroup.procs"), process::id().to_string()).expect("move this process");
        cgroup
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.home.join("cgroup.procs"), process::id().to_string());
        let _ = fs::remove_dir(&self.path);
    }
}

/// The dataplane, attached to a cgroup of its own.
struct Bench {
    dataplane: Option<Ebpf>,
    state: State,
    snapshot: Snapshot,
    settings: EbpfSettings,
    _cgroup: OwnCgroup,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cgroup = OwnCgroup::enter();
        let settings = EbpfSettings {
            cgroup_root: cgroup.path.clone(),
            pin_dir: format!("/sys/fs/bpf/shunt-sockets-{}", process::id()).into(),
            map_sizes: MapSizes {
                services: 64,
                endpoints: 256,
                ..MapSizes::default()
            },
        };
        let mut dataplane = Ebpf::new(&settings).expect("load");
        let state = dataplane.observe().expect("observe");
        let snapshot = Snapshot::default();
        Self {
            dataplane: Some(dataplane),
            state,
            snapshot,
            settings,
            _cgroup: cgroup,
            _turn: turn,
        }
    }

    fn dataplane(&mut self) -> &mut Ebpf {
        self.dataplane.as_mut().expect("running")
    }

    fn sync(&mut self, dirty: &Dirty) -> usize {
        let plan = Ebpf::plan(&self.state, &self.snapshot, dirty);
        let length = plan.len();
        let Self { dataplane, state, .. } = self;
        dataplane
            .as_mut()
            .expect("running")
            .apply(state, plan)
            .expect("apply");
        length
    }

    /// Serves a port; each of `endpoints` is on this node.
    fn serve(&mut self, protocol: Protocol, address: &str, endpoints: &[SocketAddr]) -> SocketAddr {
        let address: SocketAddr = address.parse().expect("address");
        let name = NamespacedName::new("test", address.to_string());
        let key = ServicePortKey {
            name: ServicePortName {
                service: name,
                port: "".into(),
                protocol,
            },
            family: IpFamily::of(address.ip()),
        };
        let frontend = Frontend {
            kind: FrontendKind::ClusterIp,
            address: Some(address.ip()),
            port: NonZeroU16::new(address.port()).expect("port"),
        };
        self.snapshot
            .ports
            .insert(key, Arc::new(port(vec![frontend], endpoints)));
        self.sync(&Dirty::everything());
        address
    }

    /// Ends the dataplane and starts another, as a restart does.
    fn restart(&mut self) {
        self.dataplane = None;
        self.dataplane = Some(Ebpf::new(&self.settings).expect("load again"));
        self.state = self.dataplane().observe().expect("observe again");
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

fn port(frontends: Vec<Frontend>, endpoints: &[SocketAddr]) -> ResolvedPort {
    ResolvedPort {
        frontends,
        cluster_endpoints: endpoints
            .iter()
            .map(|address| ResolvedEndpoint {
                address: *address,
                is_local: true,
            })
            .collect(),
        local_endpoints: Vec::new(),
        serving: endpoints.to_vec(),
        has_endpoints: !endpoints.is_empty(),
        affinity_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        source_ranges: None,
        health_check_node_port: None,
    }
}

fn tcp_server(address: &str) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(address).expect("loopback");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

fn udp_socket(address: &str) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(address).expect("loopback");
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .expect("timeout");
    let address = socket.local_addr().expect("bound");
    (socket, address)
}

#[test]
fn a_tcp_connection_reaches_the_endpoint_and_its_peer_is_the_address_dialled() {
    let mut bench = Bench::new();
    for (service, local) in [("10.96.0.1:80", "127.0.0.1:0"), ("[fd96::1]:80", "[::1]:0")] {
        let (server, endpoint) = tcp_server(local);
        let vip = bench.serve(Protocol::Tcp, service, &[endpoint]);
        let mut client = TcpStream::connect(vip).expect("connect");
        assert_eq!(client.peer_addr().expect("peer"), vip);
        let (mut accepted, _) = server.accept().expect("accept");
        accepted.write_all(b"x").expect("answer");
        let mut answer = [0];
        client.read_exact(&mut answer).expect("answer");
    }
}

#[test]
fn an_ipv4_mapped_address_on_an_ipv6_socket_is_the_ipv4_service() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    bench.serve(Protocol::Tcp, "10.96.0.1:80", &[endpoint]);
    let mapped: SocketAddr = "[::ffff:10.96.0.1]:80".parse().expect("address");
    let client = TcpStream::connect(mapped).expect("connect");
    assert_eq!(client.peer_addr().expect("peer"), mapped);

    let (server, endpoint) = udp_socket("127.0.0.1:0");
    bench.serve(Protocol::Udp, "10.96.0.1:53", &[endpoint]);
    let (client, _) = udp_socket("[::]:0");
    let mapped: SocketAddr = "[::ffff:10.96.0.1]:53".parse().expect("address");
    client.send_to(b"q", mapped).expect("send");
    let mut buffer = [0; 8];
    let (_, from) = server.recv_from(&mut buffer).expect("question");
    server.send_to(b"a", from).expect("answer");
    assert_eq!(client.recv_from(&mut buffer).expect("answer").1, mapped);
}

#[test]
fn without_endpoints_connect_and_send_are_refused() {
    let mut bench = Bench::new();
    let vip = bench.serve(Protocol::Tcp, "10.96.0.2:80", &[]);
    assert_eq!(
        TcpStream::connect(vip).expect_err("no endpoint").kind(),
        ErrorKind::ConnectionRefused
    );
    let vip = bench.serve(Protocol::Udp, "10.96.0.2:53", &[]);
    let (client, _) = udp_socket("0.0.0.0:0");
    assert_eq!(
        client.send_to(b"q", vip).expect_err("no endpoint").kind(),
        ErrorKind::ConnectionRefused
    );
}

#[test]
fn answers_to_an_unconnected_udp_socket_come_from_the_address_that_was_asked() {
    let mut bench = Bench::new();
    let (server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.3:53", &[endpoint]);
    let (client, _) = udp_socket("0.0.0.0:0");
    let mut buffer = [0; 8];
    for _ in 0..3 {
        client.send_to(b"q", vip).expect("send");
        let (_, from) = server.recv_from(&mut buffer).expect("question");
        server.send_to(b"a", from).expect("answer");
        assert_eq!(client.recv_from(&mut buffer).expect("answer").1, vip);
    }
    server
        .send_to(
            b"a",
            client
                .local_addr()
                .map(|a| SocketAddr::new(IpAddr::from([127, 0, 0, 1]), a.port()))
                .expect("bound"),
        )
        .expect("send");
    assert_eq!(
        client.recv_from(&mut buffer).expect("answer").1,
        vip,
        "the endpoint keeps the name it was asked by"
    );
}

#[test]
fn a_udp_conversation_stays_with_its_endpoint_until_that_leaves() {
    let mut bench = Bench::new();
    let servers: Vec<_> = (0..3).map(|_| udp_socket("127.0.0.1:0")).collect();
    let addresses: Vec<SocketAddr> = servers.iter().map(|(_, address)| *address).collect();
    let mut sorted = addresses.clone();
    sorted.sort();
    let vip = bench.serve(Protocol::Udp, "10.96.0.4:53", &sorted[..2]);
    let (client, _) = udp_socket("0.0.0.0:0");
    let ask = || {
        client.send_to(b"q", vip).expect("send");
        let deadline = std::iter::repeat_n(Duration::from_millis(5), 1000);
        for pause in deadline {
            for (server, address) in &servers {
                server.set_nonblocking(true).expect("nonblocking");
                if server.recv_from(&mut [0; 8]).is_ok() {
                    return *address;
                }
            }
            std::thread::sleep(pause);
        }
        panic!("nobody was asked")
    };
    let first = ask();
    assert!((0..8).all(|_| ask() == first), "the conversation stays");
    bench.serve(Protocol::Udp, "10.96.0.4:53", &sorted);
    assert!((0..8).all(|_| ask() == first), "another endpoint does not matter");
    let rest: Vec<SocketAddr> = sorted
        .iter()
        .copied()
        .filter(|address| *address != first)
        .collect();
    bench.serve(Protocol::Udp, "10.96.0.4:53", &rest);
    assert_ne!(ask(), first, "it moves at the next datagram");
}

#[test]
fn a_connected_udp_socket_is_destroyed_when_its_endpoint_leaves_and_an_unconnected_one_is_not() {
    let mut bench = Bench::new();
    let (_server, endpoint) = udp_socket("127.0.0.1:0");
    let vip = bench.serve(Protocol::Udp, "10.96.0.5:53", &[endpoint]);
    let (connected, _) = udp_socket("0.0.0.0:0");
    connected.connect(vip).expect("connect");
    assert_eq!(connected.peer_addr().expect("peer"), vip);
    connected.send(b"q").expect("send");
    let (unconnected, _) = udp_socket("0.0.0.0:0");
    unconnected.send_to(b"q", vip).expect("send");

    let (_other, replacement) = udp_socket("127.0.0.1:0");
    bench.serve(Protocol::Udp, "10.96.0.5:53", &[replacement]);
    let destroyed = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        connected.send(b"q").is_err()
    });
    assert!(destroyed, "the application is told");
    unconnected
        .send_to(b"q", vip)
        .expect("an unconnected socket lives on");
}

#[test]
fn a_restarted_proxy_takes_over_with_nothing_to_write_and_connections_go_on() {
    let mut bench = Bench::new();
    let (server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.6:80", &[endpoint]);
    let mut before = TcpStream::connect(vip).expect("connect");
    bench.dataplane = None;
    TcpStream::connect(vip).expect("works while no proxy runs");
    bench.restart();
    assert_eq!(
        bench.sync(&Dirty::everything()),
        1,
        "only the programs are replaced"
    );
    let after = TcpStream::connect(vip).expect("connect");
    assert_eq!(
        before.peer_addr().expect("peer"),
        after.peer_addr().expect("peer")
    );
    let (mut accepted, _) = server.accept().expect("accept");
    accepted.write_all(b"x").expect("answer");
    before
        .read_exact(&mut [0])
        .expect("an established connection lives on");
}

#[test]
fn a_proxy_with_other_map_sizes_builds_its_maps_beside_and_swaps_them() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.7:80", &[endpoint]);
    bench.settings.map_sizes.services = 128;
    bench.restart();
    TcpStream::connect(vip).expect("the old maps serve until the new ones are full");
    assert!(bench.sync(&Dirty::everything()) > 1);
    TcpStream::connect(vip).expect("the new ones serve");
    bench.restart();
    assert_eq!(
        bench.sync(&Dirty::everything()),
        1,
        "they are pinned in place now"
    );
}

#[test]
fn a_full_map_names_itself_and_the_service_and_leaves_the_others_alone() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.1.0:80", &[endpoint]);
    let mut ports = BTreeMap::new();
    for last in 1..=100u8 {
        let address = IpAddr::from([10, 96, 2, last]);
        let key = ServicePortKey {
            name: ServicePortName {
                service: NamespacedName::new("test", format!("many-{last}")),
                port: "".into(),
                protocol: Protocol::Tcp,
            },
            family: IpFamily::V4,
        };
        let frontend = Frontend {
            kind: FrontendKind::ClusterIp,
            address: Some(address),
            port: NonZeroU16::new(80).expect("port"),
        };
        ports.insert(key, Arc::new(port(vec![frontend], &[endpoint])));
    }
    bench.snapshot.ports.append(&mut ports);
    let plan = Ebpf::plan(&bench.state, &bench.snapshot, &Dirty::everything());
    let Bench { dataplane, state, .. } = &mut bench;
    let error = dataplane
        .as_mut()
        .expect("running")
        .apply(state, plan)
        .expect_err("64 fit");
    let message = error.to_string();
    assert!(
        message.contains("map services is full") && message.contains("test/many-"),
        "{message}"
    );
    TcpStream::connect(vip).expect("the first Service still works");
    bench
        .snapshot
        .ports
        .retain(|key, _| !key.name.service.name.starts_with("many"));
    bench.sync(&Dirty::everything());
    let view = NodeView::default();
    assert_eq!(bench.snapshot.node, view);
}
