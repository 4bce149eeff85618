//! UDP senders that never pause, while rules change: stale conntrack entries are deleted, all
//! others stay.

use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    num::NonZeroU16,
    sync::Arc,
    time::Duration,
};

use proxy_userspace::{
    dataplane::conntrack::{KernelTable, StaleUdpCleaner, StaleUdpDeletion},
    kernel::{
        KernelError,
        conntrack::{self, AddressPair, Connection, TrackedConnection, UdpFilter, UdpFlow},
    },
    model::{
        Balance, Dirty, Forwarding, Frontend, FrontendKind, IpFamily, NamespacedName, Protocol,
        ResolvedEndpoint, ResolvedPort, ServicePortKey, ServicePortName, Snapshot, TrafficPolicy,
    },
};
use shunt_tests::deadline::Deadline;

use crate::node::Node;

/// The addresses of one family. Endpoints are on the node's loopback link. Service addresses are
/// routed to a link without hosts.
struct Addresses {
    service: IpAddr,
    strangers: IpAddr,
    endpoints: [IpAddr; 2],
    any: IpAddr,
}

/// A node with two endpoints in both families, and the endpoint that is served now.
struct Scene {
    node: Node,
    snapshot: Snapshot,
    stale_udp: StaleUdpCleaner,
}

fn places(family: IpFamily) -> Addresses {
    let texts = match family {
        IpFamily::V4 => ["10.96.0.10", "10.96.0.99", "10.244.1.101", "10.244.1.102", "0.0.0.0"],
        IpFamily::V6 => ["fd96::10", "fd96::99", "fd44:1::101", "fd44:1::102", "::"],
    };
    let [service, strangers, first, second, any] = texts.map(|text| text.parse().expect("an address"));
    Addresses { service, strangers, endpoints: [first, second], any }
}

impl Scene {
    fn new() -> Self {
        let node = Node::new();
        for family in IpFamily::ALL {
            let places = places(family);
            let net = if family == IpFamily::V4 { "10.96.0.0/16" } else { "fd96::/64" };
            node.run("ip", &["route", "replace", net, "dev", "eth0"], "");
            for endpoint in places.endpoints {
                let address = [&endpoint.to_string()[..], "dev", "lo"];
                let nodad = if family == IpFamily::V4 { &[][..] } else { &["nodad"] };
                node.run("ip", &[&["address", "add"], &address[..], nodad].concat(), "");
            }
        }
        let mut scene = Self {
            node,
            snapshot: Snapshot::default(),
            stale_udp: StaleUdpCleaner::with_table(KernelTable, &[]),
        };
        scene.rules("");
        // No entry may expire, however slow the machine is.
        scene.node.within(|| {
            fs::write("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "600").expect("conntrack is there");
            Ok(())
        });
        scene.forget(&Dirty::everything());
        scene
    }

    /// Replaces the rules that translate packets of the node. A rule that matches a conntrack state
    /// keeps conntrack active.
    fn rules(&self, rules: &str) {
        let table = format!(
            "table inet services\ndelete table inet services\ntable inet services {{\nchain output {{\n\
             type nat hook output priority -100;\n{rules}\n}}\nchain tracked {{\n\
             type filter hook output priority 0;\nct state invalid counter\n}}\n}}\n"
        );
        self.node.run("nft", &["-f", "-"], &table);
    }

    /// Serves this endpoint in both families: changes the rules first, then deletes stale entries.
    fn serve(&mut self, endpoint: Option<usize>) -> Vec<StaleUdpDeletion> {
        self.serve_in_rules(endpoint);
        let mut dirty = Dirty::default();
        for family in IpFamily::ALL {
            let places = places(family);
            let endpoints: Vec<_> = endpoint.map(|n| udp(places.endpoints[n])).into_iter().collect();
            self.snapshot.ports.insert(key(family), Arc::new(port(places.service, &endpoints)));
            dirty.ports.insert(key(family));
        }
        self.forget(&dirty)
    }

    fn serve_in_rules(&self, endpoint: Option<usize>) {
        let rule = |family: IpFamily| {
            let places = places(family);
            let rule = |n: usize| dnat("udp", SocketAddr::new(places.service, 53), udp(places.endpoints[n]));
            endpoint.map(rule).unwrap_or_default()
        };
        self.rules(&IpFamily::ALL.map(rule).join("\n"));
    }

    fn remove_service(&mut self) -> Vec<StaleUdpDeletion> {
        self.rules("");
        let ports = std::mem::take(&mut self.snapshot.ports).into_keys().collect();
        self.forget(&Dirty { ports, ..Dirty::default() })
    }

    fn forget(&mut self, dirty: &Dirty) -> Vec<StaleUdpDeletion> {
        let Self { node, snapshot, stale_udp } = self;
        node.within(|| stale_udp.delete_stale(snapshot, dirty))
    }

    fn flows(&self, family: IpFamily) -> Vec<UdpFlow> {
        self.node.within(|| flows(UdpFilter { family, destination_port: None }))
    }

    /// Returns the number of flows to an address, by the endpoint that they lead to.
    fn leading(&self, family: IpFamily, to: IpAddr) -> BTreeMap<IpAddr, usize> {
        let mut counts = BTreeMap::new();
        for flow in self.flows(family).iter().filter(|flow| flow.destination.ip() == to) {
            *counts.entry(flow.reply_source.ip()).or_default() += 1;
        }
        counts
    }

    fn socket(&self, address: SocketAddr) -> UdpSocket {
        let socket = self.node.within(|| Ok(UdpSocket::bind(address).expect("the node's own address")));
        socket.set_nonblocking(true).expect("a socket");
        socket
    }
}

/// A sender and the endpoints that it may reach.
struct Talk {
    client: UdpSocket,
    endpoints: [UdpSocket; 2],
    service: SocketAddr,
}

impl Talk {
    fn new(scene: &Scene, family: IpFamily) -> Self {
        let places = places(family);
        Self {
            client: scene.socket(SocketAddr::new(places.any, 0)),
            endpoints: places.endpoints.map(|address| scene.socket(udp(address))),
            service: SocketAddr::new(places.service, 53),
        }
    }

    fn send(&self) {
        self.client.send_to(b"q", self.service).expect("nothing refuses it");
    }

    /// Sends a datagram, and returns the endpoint that receives it.
    fn reaches(&self) -> usize {
        self.send();
        let arrived = |endpoint: &UdpSocket| match endpoint.recv(&mut [0; 8]) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("{error}"),
        };
        let reached = || self.endpoints.iter().position(arrived);
        Deadline::after(Duration::from_secs(5)).poll(reached).expect("one of them gets it")
    }
}

fn udp(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, 5300)
}

fn dnat(protocol: &str, from: SocketAddr, to: SocketAddr) -> String {
    let family = if from.is_ipv4() { "ip" } else { "ip6" };
    format!("{family} daddr {} {protocol} dport {} dnat {family} to {to}", from.ip(), from.port())
}

/// Returns an assured connection that conntrack does not track.
fn untracked(protocol: Protocol, original: AddressPair, reply: AddressPair) -> Connection {
    let tracked = TrackedConnection { protocol, original, reply, is_dnat: false };
    Connection::untracked(tracked, original, reply, Duration::from_mins(10), true, false)
}

fn flows(filter: UdpFilter) -> Result<Vec<UdpFlow>, KernelError> {
    let mut flows = Vec::new();
    conntrack::for_each_udp(filter, &mut |flow| flows.push(*flow))?;
    flows.sort_unstable();
    Ok(flows)
}

fn key(family: IpFamily) -> ServicePortKey {
    let service = NamespacedName::new("default", "dns");
    ServicePortKey { name: ServicePortName { service, port: "".into(), protocol: Protocol::Udp }, family }
}

fn port(service: IpAddr, endpoints: &[SocketAddr]) -> ResolvedPort {
    let endpoint = |address: &SocketAddr| ResolvedEndpoint { address: *address, is_local: true };
    let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
    let port = NonZeroU16::new(53).expect("not 0");
    ResolvedPort {
        frontends: vec![Frontend { kind: FrontendKind::ClusterIp, address: Some(service), port }],
        cluster_endpoints: endpoints.clone(),
        local_endpoints: Vec::new(),
        has_endpoints: !endpoints.is_empty(),
        serving: endpoints,
        affinity_timeout: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        balance: Balance::Random,
        forwarding: Forwarding::Nat,
        dsr_nodes: BTreeMap::new(),
    }
}

/// Returns the number of deleted entries of each family that was walked.
fn deleted(forgotten: &[StaleUdpDeletion]) -> BTreeMap<IpFamily, usize> {
    forgotten.iter().map(|forgotten| (forgotten.family, forgotten.flows.deleted)).collect()
}

fn one_each() -> BTreeMap<IpFamily, usize> {
    IpFamily::ALL.map(|family| (family, 1)).into()
}

#[test]
fn sender_without_pause_moves_when_its_endpoint_leaves() {
    let mut scene = Scene::new();
    let talks = IpFamily::ALL.map(|family| Talk::new(&scene, family));
    let reached = || talks.each_ref().map(Talk::reaches);
    scene.serve(Some(0));
    assert_eq!(reached(), [0, 0]);
    scene.serve_in_rules(Some(1));
    assert_eq!(reached(), [0, 0], "changed rules move no flow");
    assert_eq!(deleted(&scene.serve(Some(1))), one_each());
    assert_eq!(reached(), [1, 1]);
    assert!(deleted(&scene.serve(Some(1))).is_empty(), "nothing changed");
    scene.serve(Some(0));
    assert_eq!(reached(), [0, 0]);
}

#[test]
fn sender_that_started_first_reaches_the_first_endpoint() {
    let mut scene = Scene::new();
    scene.serve(None);
    let talks = IpFamily::ALL.map(|family| Talk::new(&scene, family));
    for (talk, family) in talks.iter().zip(IpFamily::ALL) {
        talk.send();
        let service = talk.service.ip();
        assert_eq!(scene.leading(family, service), [(service, 1)].into(), "it has no endpoint");
    }
    scene.serve_in_rules(Some(0));
    for (talk, family) in talks.iter().zip(IpFamily::ALL) {
        talk.send();
        let service = talk.service.ip();
        assert_eq!(scene.leading(family, service), [(service, 1)].into(), "changed rules do not move it");
    }
    assert_eq!(deleted(&scene.serve(Some(0))), one_each());
    for talk in &talks {
        assert_eq!(talk.reaches(), 0);
    }
}

#[test]
fn flows_are_deleted_with_the_last_endpoint_and_with_the_service() {
    let mut scene = Scene::new();
    let talks = IpFamily::ALL.map(|family| Talk::new(&scene, family));
    scene.serve(Some(0));
    assert_eq!(talks.each_ref().map(Talk::reaches), [0, 0]);
    assert_eq!(deleted(&scene.serve(None)), one_each());
    for (talk, family) in talks.iter().zip(IpFamily::ALL) {
        assert_eq!(scene.leading(family, talk.service.ip()), BTreeMap::new());
    }
    scene.serve(Some(1));
    assert_eq!(talks.each_ref().map(Talk::reaches), [1, 1]);
    assert_eq!(deleted(&scene.remove_service()), one_each());
    for (talk, family) in talks.iter().zip(IpFamily::ALL) {
        assert_eq!(scene.leading(family, talk.service.ip()), BTreeMap::new());
    }
}

#[test]
fn tcp_connections_and_foreign_flows_stay() {
    let mut scene = Scene::new();
    for family in IpFamily::ALL {
        let Addresses { service, strangers, endpoints, any } = places(family);
        let tcp_service = SocketAddr::new(service, 53);
        let stranger = SocketAddr::new(strangers, 53);
        let rules = [
            dnat("tcp", tcp_service, udp(endpoints[0])),
            dnat("udp", tcp_service, udp(endpoints[0])),
            dnat("udp", stranger, udp(endpoints[0])),
        ];
        scene.rules(&rules.join("\n"));
        scene.snapshot.ports.insert(key(family), Arc::new(port(service, &[udp(endpoints[0])])));
        scene.forget(&Dirty::everything());

        let mut stream = scene.node.within(|| {
            let listener = TcpListener::bind(udp(endpoints[0])).expect("the node's own address");
            let stream = TcpStream::connect(tcp_service).expect("led to the endpoint");
            Ok((listener.accept().expect("the connection").0, stream))
        });
        let client = scene.socket(SocketAddr::new(any, 0));
        for to in [stranger, SocketAddr::new(strangers, 54), SocketAddr::new(service, 54), tcp_service] {
            client.send_to(b"q", to).expect("nothing refuses it");
        }
        let before = scene.flows(family);
        scene.remove_service();
        let after = scene.flows(family);
        let stay: Vec<_> = before.iter().copied().filter(|flow| flow.destination != tcp_service).collect();
        assert_eq!((before.len() - 1, after), (stay.len(), stay));

        // Without its conntrack entry the connection would fail.
        for end in [&stream.0, &stream.1] {
            end.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
        }
        let mut answer = [0; 4];
        stream.1.write_all(b"ping").expect("connected");
        stream.0.read_exact(&mut answer).expect("its other end");
        assert_eq!(&answer, b"ping");
    }
}

#[test]
fn no_other_connection_gets_the_port_of_a_connection_that_was_added() {
    let scene = Scene::new();
    scene.serve_in_rules(Some(0));
    for family in IpFamily::ALL {
        let Addresses { service, endpoints, any, .. } = places(family);
        let endpoint = scene.socket(udp(endpoints[0]));
        for is_tracked in [false, true] {
            let client = scene.socket(SocketAddr::new(any, 0));
            client.connect(SocketAddr::new(service, 53)).expect("routed to eth0");
            let own = client.local_addr().expect("bound");
            if is_tracked {
                let original = AddressPair { source: own, destination: udp(endpoints[0]) };
                let connection = untracked(Protocol::Udp, original, original.swapped());
                let twice = [connection.clone(), connection];
                scene.node.within(|| conntrack::track(family, &twice));
            }
            client.send(b"q").expect("nothing refuses it");
            let received = || endpoint.recv_from(&mut [0; 8]).ok();
            let (_, from) = Deadline::after(Duration::from_secs(5)).poll(received).expect("translated");
            assert_eq!(from.port() != own.port(), is_tracked, "{family:?}: {from} for {own}");
        }
    }
}

#[test]
fn source_of_a_masqueraded_connection_is_reserved() {
    let scene = Scene::new();
    for family in IpFamily::ALL {
        let Addresses { service, strangers, endpoints, .. } = places(family);
        let [client, node] = [SocketAddr::new(strangers, 40_000), SocketAddr::new(service, 20_000)];
        let pair = |source, destination| AddressPair { source, destination };
        let [original, reply] = [pair(client, udp(endpoints[0])), pair(udp(endpoints[0]), node)];
        let mut originals = Vec::new();
        scene.node.within(|| {
            conntrack::track(family, &[untracked(Protocol::Tcp, original, reply)])?;
            conntrack::for_each_connection(family, Protocol::Tcp, &mut |connection| {
                originals.push(connection.tracked.original);
            })
        });
        originals.sort_unstable_by_key(|pair| pair.source);
        let mut expected = [original, reply];
        expected.sort_unstable_by_key(|pair| pair.source);
        assert_eq!(originals, expected);
    }
}

#[test]
fn flows_to_a_departed_endpoint_are_deleted_in_every_zone() {
    const SENDERS: usize = 300;
    let mut scene = Scene::new();
    scene.node.run(
        "nft",
        &["-f", "-"],
        "table inet zones {\nchain output {\ntype filter hook output priority raw;\n\
         udp sport 20000-20099 ct zone set 7\n}\n}\n",
    );
    scene.serve(Some(0));
    for (family, endpoint) in [(IpFamily::V4, 0), (IpFamily::V6, 1)] {
        let Addresses { service, strangers, endpoints, any } = places(family);
        scene.serve(Some(endpoint));
        let senders = |first: u16| (first..).take(SENDERS).map(|port| SocketAddr::new(any, port));
        for sender in senders(20_000) {
            let socket = scene.socket(sender);
            for to in [service, strangers] {
                socket.send_to(b"q", SocketAddr::new(to, 53)).expect("nothing refuses it");
            }
        }
        let zones = scene.flows(family).iter().filter(|flow| flow.zone == 7).count();
        assert_eq!(zones, 200, "a hundred ports to two places");
        // Half as many flows lead to the endpoint that stays.
        scene.serve_in_rules(Some(1 - endpoint));
        for sender in senders(21_000).take(SENDERS / 2) {
            scene.socket(sender).send_to(b"q", SocketAddr::new(service, 53)).expect("nothing refuses it");
        }
        let led = |counts: [(IpAddr, usize); 2]| BTreeMap::from(counts);
        let (old, new) = (endpoints[endpoint], endpoints[1 - endpoint]);
        assert_eq!(scene.leading(family, service), led([(old, SENDERS), (new, SENDERS / 2)]));
        let forgotten = scene.serve(Some(1 - endpoint));
        assert_eq!(deleted(&forgotten)[&family], SENDERS, "{forgotten:?}");
        assert_eq!(scene.leading(family, service), [(new, SENDERS / 2)].into());
        assert_eq!(scene.leading(family, strangers), [(strangers, SENDERS)].into());
    }
}

#[test]
fn kernel_filters_by_family_and_port() {
    let scene = Scene::new();
    let places = IpFamily::ALL.map(places);
    for places in &places {
        let client = scene.socket(SocketAddr::new(places.any, 0));
        for port in [53, 54] {
            client.send_to(b"q", SocketAddr::new(places.strangers, port)).expect("nothing refuses it");
        }
    }
    for (places, family) in places.iter().zip(IpFamily::ALL) {
        let seen = |destination_port| {
            let filter = UdpFilter { family, destination_port };
            let flows = scene.node.within(|| flows(filter));
            let to = flows.iter().map(|flow| flow.destination).filter(|to| to.ip() == places.strangers);
            to.map(|to| to.port()).collect::<Vec<_>>()
        };
        assert_eq!((seen(None), seen(Some(54)), seen(Some(55))), (vec![53, 54], vec![54], vec![]));
    }
}
