//! A node with pods and a client, the ipvs mode on it, and its Services.

use std::{
    collections::BTreeMap,
    fs::File,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Result, ensure};
use proxy_userspace::{
    dataplane::{
        Dataplane as _, KernelCounts, PlanSize as _, ServiceCount,
        iptables::{Iptables, IptablesSettings},
        ipvs::{self, Ipvs, IpvsError, IpvsSettings, LinkRemoval, RequestCounts, State},
    },
    kernel::{
        KernelError,
        ipvs::{Change, Ipvs as Socket, VirtualKey, VirtualServer},
        netns,
    },
    model::{
        Balance, Dirty, Forwarding, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NamespacedName,
        Protocol, ResolvedEndpoint, ResolvedPort, ServicePortKey, ServicePortName, Snapshot, TrafficPolicy,
    },
};
use shunt_tests::{
    agent::Agent,
    world::{Host, World},
};

/// The host node1 with its pods and a client.
pub(super) struct Node {
    world: World,
    namespace: (PathBuf, File),
}

/// The ipvs dataplane on a node, with its state.
pub(super) struct Mode {
    settings: IpvsSettings,
    dataplane: Ipvs,
    state: State,
    reader: Option<Box<dyn KernelCounts>>,
}

impl Node {
    pub(super) fn new() -> Result<Self> {
        let hosts = [Host::Node1, Host::A1, Host::A2, Host::A3, Host::Client];
        let world = World::build(&hosts, &std::env::current_exe()?)?;
        let path = PathBuf::from(format!("/run/netns/{}-node1", world.name()));
        let file = File::open(&path)?;
        Ok(Self { world, namespace: (path, file) })
    }

    /// Runs a function in node1's network namespace.
    fn within<T: Send>(&self, job: impl FnOnce() -> Result<T, KernelError> + Send) -> Result<T> {
        Ok(netns::within(&self.namespace.0, &self.namespace.1, job)?)
    }

    pub(super) fn agent(&mut self, host: Host) -> Result<&mut Agent> {
        self.world.agent(host)
    }

    pub(super) fn world(&mut self) -> &mut World {
        &mut self.world
    }

    pub(super) fn run(&self, line: &str) -> Result<String> {
        self.world.run(Host::Node1, line)
    }

    pub(super) fn try_mode(&self, settings: IpvsSettings) -> Result<Mode, IpvsError> {
        let made = self.within(|| {
            let mut dataplane = match Ipvs::new(settings.clone()) {
                Ok(dataplane) => dataplane,
                Err(error) => return Ok(Err(error)),
            };
            Ok(dataplane.observe().map(|state| Mode { settings, dataplane, state, reader: None }))
        });
        made.unwrap_or_else(|error| {
            let message = std::io::Error::other(format!("{error:#}"));
            Err(KernelError::Call { operation: "enter", object: "node1".into(), source: message }.into())
        })
    }

    /// Creates a dataplane and observes the kernel.
    pub(super) fn mode(&self, settings: IpvsSettings) -> Result<Mode> {
        Ok(self.try_mode(settings)?)
    }

    /// Reads IPVS directly.
    pub(super) fn ipvs<T: Send>(
        &self,
        read: impl FnOnce(&mut Socket) -> Result<T, KernelError> + Send,
    ) -> Result<T> {
        self.within(|| read(&mut Socket::open()?))
    }

    /// Changes IPVS as another program would.
    pub(super) fn change(&self, changes: &[Change]) -> Result<()> {
        let failures = self.ipvs(|ipvs| ipvs.commit(changes))?;
        ensure!(failures.is_empty(), "{failures:?}");
        Ok(())
    }

    /// Returns all rules, sets, links and virtual servers.
    pub(super) fn everything(&self) -> Result<String> {
        self.run("iptables-save -t filter | sed 's/ \\[.*//; /^#/d'; iptables-save -t nat | sed 's/ \\[.*//; /^#/d'; ipset save | sed 's/ initval.*//'; ip -o link | cut -d: -f2; cat /proc/net/ip_vs")
    }
}

impl Mode {
    pub(super) fn requests(&self) -> RequestCounts {
        self.dataplane.requests()
    }

    /// Returns the counts of Services, from the reader that metrics use.
    pub(super) fn counts(&mut self, node: &Node) -> Result<Vec<ServiceCount>> {
        if self.reader.is_none() {
            self.reader = node.within(|| Ok(self.dataplane.kernel_counts()))?;
        }
        Ok(self.reader.as_ref().map_or_else(Vec::new, |reader| reader.services()))
    }

    /// Looks at the kernel and plans everything, without operation it.
    pub(super) fn plan(&mut self, node: &Node, snapshot: &Snapshot) -> Result<PlanText> {
        let state = node.within(|| Ok(self.dataplane.observe()))??;
        let plan = Ipvs::plan(&state, snapshot, &Dirty::everything());
        Ok(PlanText { changes: plan.len(), text: format!("{plan:?}").chars().take(2000).collect() })
    }

    /// Makes a full sync. Returns the number of kernel changes.
    pub(super) fn sync(&mut self, node: &Node, snapshot: &Snapshot) -> Result<usize> {
        self.state = node.within(|| Ok(self.dataplane.observe()))??;
        self.apply(node, snapshot, &Dirty::everything())
    }

    /// Makes a full sync that can fail.
    pub(super) fn try_sync(&mut self, node: &Node, snapshot: &Snapshot) -> Result<Result<usize, IpvsError>> {
        self.state = node.within(|| Ok(self.dataplane.observe()))??;
        self.try_apply(node, snapshot, &Dirty::everything())
    }

    /// Makes a partial sync for one changed Service. Returns the number of kernel changes.
    pub(super) fn change(&mut self, node: &Node, snapshot: &Snapshot, service: &str) -> Result<usize> {
        let keys = [Protocol::Tcp, Protocol::Udp].map(|protocol| port_key(service, protocol, IpFamily::V4));
        self.apply(node, snapshot, &Dirty { ports: keys.into(), ..Dirty::default() })
    }

    fn apply(&mut self, node: &Node, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize> {
        Ok(self.try_apply(node, snapshot, dirty)??)
    }

    fn try_apply(
        &mut self,
        node: &Node,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Result<usize, IpvsError>> {
        let plan = Ipvs::plan(&self.state, snapshot, dirty);
        let changes = plan.len();
        let applied = node.within(|| Ok(self.dataplane.apply(&mut self.state, plan)))?;
        Ok(applied.map(|()| changes))
    }

    /// Removes everything as `--cleanup` does.
    pub(super) fn clean_up(&self, node: &Node) -> Result<()> {
        let launcher = self.settings.launcher.clone();
        let iptables = IptablesSettings { masquerade_mark: 1 << 14, localhost_node_ports: false, launcher };
        let settings = &self.settings;
        let errors = node.within(|| {
            let rules = Iptables::remove(&iptables).into_iter().map(|error| error.to_string());
            let rest = ipvs::remove(settings, LinkRemoval::Now).into_iter().map(|error| error.to_string());
            Ok(rules.chain(rest).collect::<Vec<_>>())
        })?;
        ensure!(errors.is_empty(), "{errors:?}");
        Ok(())
    }
}

/// A plan as text.
pub(super) struct PlanText {
    changes: usize,
    text: String,
}

impl PlanText {
    pub(super) fn is_empty(&self) -> bool {
        self.changes == 0
    }
}

impl std::fmt::Display for PlanText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} changes: {}", self.changes, self.text)
    }
}

/// Returns a cluster IP by its number.
pub(super) fn cluster_ip(number: u16) -> IpAddr {
    let [high, low] = (number + 1).to_be_bytes();
    Ipv4Addr::new(10, 96, high, low).into()
}

/// Returns endpoints at port 8080 of pods of this node. Pods are numbered from 1.
pub(super) fn endpoints(pods: &[u8]) -> Vec<ResolvedEndpoint> {
    let address = |pod: &u8| SocketAddr::from(([10, 244, 1, 10 + pod], 8080));
    pods.iter().map(|pod| ResolvedEndpoint { address: address(pod), is_local: true }).collect()
}

fn port_key(name: &str, protocol: Protocol, family: IpFamily) -> ServicePortKey {
    let service = NamespacedName::parse("default", name).expect("a valid name");
    let name = ServicePortName { service, port: "".into(), protocol };
    ServicePortKey { name, family }
}

/// Returns a service port with a cluster IP.
pub(super) fn service(
    name: &str,
    address: IpAddr,
    protocol: Protocol,
    endpoints: &[ResolvedEndpoint],
) -> (ServicePortKey, Arc<ResolvedPort>) {
    let frontends = vec![frontend(FrontendKind::ClusterIp, Some(address), 80)];
    (port_key(name, protocol, IpFamily::of(address)), Arc::new(port(frontends, endpoints)))
}

/// Adds an external IP to a service port.
pub(super) fn with_external_ip(
    (key, mut port): (ServicePortKey, Arc<ResolvedPort>),
    address: IpAddr,
) -> (ServicePortKey, Arc<ResolvedPort>) {
    Arc::make_mut(&mut port).frontends.push(frontend(FrontendKind::ExternalIp, Some(address), 80));
    (key, port)
}

fn frontend(kind: FrontendKind, address: Option<IpAddr>, port: u16) -> Frontend {
    Frontend { kind, address, port: NonZeroU16::new(port).unwrap_or(NonZeroU16::MIN) }
}

fn port(frontends: Vec<Frontend>, endpoints: &[ResolvedEndpoint]) -> ResolvedPort {
    ResolvedPort {
        frontends,
        cluster_endpoints: endpoints.to_vec(),
        local_endpoints: Vec::new(),
        serving: endpoints.to_vec(),
        has_endpoints: !endpoints.is_empty(),
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

/// Returns a Snapshot of node1 with these service ports.
pub(super) fn of_ports(ports: impl IntoIterator<Item = (ServicePortKey, Arc<ResolvedPort>)>) -> Snapshot {
    let mut snapshot = Snapshot { ports: ports.into_iter().collect(), ..Snapshot::default() };
    let of = |texts: &[&str]| texts.iter().filter_map(|text| text.parse::<IpAddr>().ok()).collect();
    let node = &mut snapshot.node;
    node.local_addresses = of(&["127.0.0.1", "::1", "192.168.57.11", "fd57::11", "10.244.1.1"]);
    node.node_port_addresses = node.local_addresses.clone();
    let cidrs = ["10.244.0.0/16", "fd44::/16"].iter().filter_map(|text| text.parse().ok());
    node.local_detector = LocalTrafficDetector::Cidrs(cidrs.collect());
    snapshot
}

/// Returns a Snapshot with this number of Services, each with two endpoints.
pub(super) fn services(count: u16) -> Snapshot {
    let all = 1..=count;
    of_ports(all.map(|i| service(&format!("s{i}"), cluster_ip(i), Protocol::Tcp, &endpoints(&[1, 2]))))
}

/// Returns a virtual server that no Service has.
pub(super) fn server_of(protocol: Protocol, address: &str) -> (VirtualKey, VirtualServer) {
    let address = address.parse().unwrap_or(SocketAddr::from(([192, 0, 2, 1], 1)));
    (VirtualKey { protocol, address }, VirtualServer::new("rr", address.ip()))
}

/// Returns a Snapshot with every kind of Service in both families.
pub(super) fn every_kind() -> Snapshot {
    let mut ports = Vec::new();
    for (family, inner, outer, pod, range) in [
        (IpFamily::V4, "10.96.0.", "198.51.100.", "10.244.1.11", "192.0.2.0/24"),
        (IpFamily::V6, "fd96::", "2001:db8:51::", "fd44:1::11", "2001:db8:9::/64"),
    ] {
        let address = |prefix: &str, number: u16| format!("{prefix}{number}").parse().ok();
        let pods: Vec<_> = pod.parse().ok().map(|ip: IpAddr| SocketAddr::new(ip, 8080)).into_iter().collect();
        let local: Vec<_> =
            pods.iter().map(|address| ResolvedEndpoint { address: *address, is_local: true }).collect();
        let all = |number: u16| {
            vec![
                frontend(FrontendKind::ClusterIp, address(inner, number), 80),
                frontend(FrontendKind::NodePort, None, 30_000 + number),
                frontend(FrontendKind::ExternalIp, address(outer, number), 80),
                frontend(FrontendKind::LoadBalancerIp, address(outer, number + 10), 80),
            ]
        };
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
            ports.push((port_key("open", protocol, family), Arc::new(port(all(1), &local))));
        }
        let guarded = ResolvedPort {
            source_ranges: range.parse().ok().into_iter().collect(),
            affinity_timeout: 10_800.try_into().ok(),
            external_policy: TrafficPolicy::Local,
            local_endpoints: local.clone(),
            health_check_node_port: NonZeroU16::new(31_002),
            ..port(all(2), &local)
        };
        ports.push((port_key("guarded", Protocol::Tcp, family), Arc::new(guarded)));
        ports.push((port_key("empty", Protocol::Tcp, family), Arc::new(port(all(3), &[]))));
    }
    of_ports(ports)
}
