//! The size of the input of iptables-restore for one change.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use proxy_userspace::{
    dataplane::{
        Dataplane as _,
        iptables::{Iptables, RuleOptions, State},
    },
    kernel::iptables::Backend,
    model::{
        Balance, Dirty, Forwarding, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NamespacedName,
        Protocol, ResolvedEndpoint, ResolvedPort, ServicePortKey, ServicePortName, Snapshot, TrafficPolicy,
    },
};

const ENDPOINTS: usize = 4;
const OPTIONS: RuleOptions = RuleOptions {
    masquerade_mark: 1 << 14,
    localhost_node_ports: true,
    random_fully: true,
    be_liberal: false,
    counters: true,
};

fn key(number: usize) -> ServicePortKey {
    let service = NamespacedName::parse("bench", &format!("svc-{number}")).expect("a valid name");
    let name = ServicePortName { service, port: "http".into(), protocol: Protocol::Tcp };
    ServicePortKey { name, family: IpFamily::V4 }
}

fn address(base: [u8; 4], number: usize) -> IpAddr {
    Ipv4Addr::from(u32::from_be_bytes(base) + u32::try_from(number).expect("few")).into()
}

fn port(number: usize, first_endpoint: IpAddr) -> ResolvedPort {
    let number = number % 60_000;
    let endpoint = |address| ResolvedEndpoint { address: (address, 8080).into(), is_local: false };
    let others = (1..ENDPOINTS).map(|index| address([10, 244, 0, 0], number * ENDPOINTS + index));
    let mut endpoints: Vec<_> = std::iter::once(first_endpoint).chain(others).map(endpoint).collect();
    endpoints.sort_unstable();
    let frontend = Frontend {
        kind: FrontendKind::ClusterIp,
        address: Some(address([10, 96, 0, 0], number)),
        port: NonZeroU16::MIN,
    };
    ResolvedPort {
        frontends: vec![frontend],
        cluster_endpoints: endpoints,
        local_endpoints: Vec::new(),
        serving: Vec::new(),
        has_endpoints: true,
        affinity_timeout: None::<NonZeroU32>,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        balance: Balance::Random,
        forwarding: Forwarding::Nat,
        dsr_nodes: BTreeMap::new(),
    }
}

fn cluster(services: usize) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.node.local_detector =
        LocalTrafficDetector::Cidrs(vec!["10.244.0.0/16".parse().expect("a range")]);
    for number in 0..services {
        let first = address([10, 244, 0, 0], number * ENDPOINTS);
        snapshot.ports.insert(key(number), Arc::new(port(number, first)));
    }
    snapshot
}

/// Returns the input for IPv4.
fn plan(state: &mut State, snapshot: &Snapshot, dirty: &Dirty) -> String {
    let plan = Iptables::plan(state, snapshot, dirty);
    let (_, input) = plan.inputs(Backend::Nft).into_iter().next().expect("IPv4");
    plan.record(state);
    input
}

fn dirty(key: ServicePortKey) -> Dirty {
    Dirty { ports: [key].into(), ..Dirty::default() }
}

/// Returns the bytes for the first sync, for one more endpoint, and for one more Service.
fn sizes(services: usize) -> [usize; 3] {
    let mut snapshot = cluster(services);
    let mut state = State::of_empty_tables(OPTIONS);
    let first = plan(&mut state, &snapshot, &Dirty::everything()).len();
    let changed = key(services / 2);
    snapshot.ports.insert(changed.clone(), Arc::new(port(services / 2, address([10, 245, 0, 0], 0))));
    let endpoint = plan(&mut state, &snapshot, &dirty(changed));
    assert!(!endpoint.contains("KUBE-SERVICES"), "{endpoint}");
    let added = key(services);
    snapshot.ports.insert(added.clone(), Arc::new(port(services, address([10, 245, 0, 1], 0))));
    let service = plan(&mut state, &snapshot, &dirty(added));
    let own = service.lines().filter(|line| !line.contains("-A KUBE-SERVICES")).map(str::len).sum::<usize>();
    assert!(own < 2500, "the Service's own part: {own} bytes");
    [first, endpoint.len(), service.len()]
}

#[test]
fn the_input_for_one_endpoint_does_not_grow_with_services() {
    let [few, many, most] = [100, 1000, 10_000].map(|services| {
        let sizes = sizes(services);
        println!("{services} Services: first sync, one endpoint, one Service: {sizes:?} bytes");
        sizes
    });
    // Names get a digit or two longer. From 1,000 endpoints on, comments are left out.
    assert!(many[1] <= few[1] && most[1] <= many[1] + 50, "{few:?} {many:?} {most:?}");
}
