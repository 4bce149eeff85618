//! Lists the clients with affinity, as the kernel has them.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use proxy_common::layout::{AffinityKey, AffinityValue, ServiceKey, ServiceValue};

use super::{
    ebpf::{open_pinned, service_key},
    iptables_text::{Chain, NameHash, Purpose},
    nftables,
};
use crate::{
    kernel::{
        KernelError, bpf, clock,
        ipvs::{self, Persistence},
        nftables::Nftables,
        xt_recent::{self, TimerTicks},
    },
    model::{Protocol, ResolvedPort, ServicePortKey},
    net::NetnsCookie,
};

/// A service port with affinity.
#[derive(Clone, Debug)]
pub struct AffinityPort {
    /// Its name and family.
    pub key: ServicePortKey,
    /// What it was resolved to.
    pub port: Arc<ResolvedPort>,
}

/// What keeps the affinity of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AffinityKeeper {
    /// The map of the programs, which is pinned in this directory.
    Programs(PathBuf),
    /// The sets of the nftables mode.
    Nftables,
    /// The lists of the match `recent` of the iptables mode.
    Iptables,
    /// The persistence templates of IPVS.
    Ipvs,
}

/// Who has affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AffinityClient {
    /// Packets with this source address.
    Address(IpAddr),
    /// Sockets in the network namespace with this cookie: of a pod, or of the node.
    Namespace(NetnsCookie),
}

/// A client whose next connection to a service port goes to the same endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownAffinity {
    /// The service port.
    pub port: ServicePortKey,
    /// The client.
    pub client: AffinityClient,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// How long, if the client does not connect again. `None` if the kernel does not tell it.
    pub remaining: Option<Duration>,
}

/// Returns the clients of these service ports. Those of endpoints that a service port has no more
/// are left out: they get another endpoint.
pub fn known_affinity(
    keeper: &AffinityKeeper,
    ports: &[AffinityPort],
) -> Result<Vec<KnownAffinity>, KernelError> {
    match keeper {
        AffinityKeeper::Programs(pins) => of_programs(pins, ports),
        AffinityKeeper::Nftables => of_nftables(ports),
        AffinityKeeper::Iptables => of_iptables(ports),
        AffinityKeeper::Ipvs => Ok(of_ipvs(&ipvs::persistent_clients()?, ports)),
    }
}

impl AffinityPort {
    /// Returns the addresses of its endpoints, in any list.
    fn endpoints(&self) -> BTreeSet<SocketAddr> {
        let lists = [&self.port.cluster_endpoints, &self.port.local_endpoints];
        lists.into_iter().flatten().map(|endpoint| endpoint.address).collect()
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.port.affinity_timeout.map_or(0, |seconds| seconds.get().into()))
    }
}

fn of_programs(pins: &Path, ports: &[AffinityPort]) -> Result<Vec<KnownAffinity>, KernelError> {
    let services: aya::maps::HashMap<_, ServiceKey, ServiceValue> = open_pinned(pins, "services")?;
    let identified = ports.iter().filter_map(|port| {
        let frontend = port.port.frontends.first()?;
        let key = service_key(frontend, port.key.family, port.key.name.protocol);
        Some((services.get(&key, 0).ok()?.service, (port, port.endpoints())))
    });
    let by_id: HashMap<u32, _> = identified.collect();
    let now_ns = clock::nanos(clock::monotonic()?);
    let mut found = Vec::new();
    let mut reader = bpf::pinned_reader::<AffinityKey, AffinityValue>(pins, "affinity")?;
    let visit = |key: AffinityKey, value: AffinityValue| {
        let Some((port, endpoints)) = by_id.get(&key.service) else { return };
        found.extend(of_entry(port, endpoints, &key, &value, now_ns));
    };
    reader.read_all(visit).map_err(KernelError::call("read map", "affinity"))?;
    Ok(found)
}

/// Returns `None` for an entry that is over.
fn of_entry(
    port: &AffinityPort,
    endpoints: &BTreeSet<SocketAddr>,
    key: &AffinityKey,
    value: &AffinityValue,
    now_ns: u64,
) -> Option<KnownAffinity> {
    let endpoint = SocketAddr::from(value.endpoint);
    let unused = Duration::from_nanos(now_ns.saturating_sub(value.used_ns));
    let remaining = port.timeout().checked_sub(unused).filter(|_| endpoints.contains(&endpoint))?;
    let client = match key.netns {
        0 => AffinityClient::Address(key.addr.into()),
        cookie => AffinityClient::Namespace(NetnsCookie(cookie)),
    };
    Some(KnownAffinity { port: port.key.clone(), client, endpoint, remaining: Some(remaining) })
}

fn of_nftables(ports: &[AffinityPort]) -> Result<Vec<KnownAffinity>, KernelError> {
    let mut socket = Nftables::open()?;
    of_endpoints(ports, |port, endpoint| {
        let set = nftables::affinity_set(&port.key.name, endpoint);
        let clients = socket.list_addresses(port.key.family, nftables::TABLE, &set)?;
        Ok(clients.into_iter().map(|(client, expires)| (client, Some(expires))).collect())
    })
}

fn of_iptables(ports: &[AffinityPort]) -> Result<Vec<KnownAffinity>, KernelError> {
    let ticks = TimerTicks::now();
    of_endpoints(ports, |port, endpoint| {
        let list = Chain::Of(Purpose::Endpoint, NameHash::of_endpoint(&port.key.name, endpoint));
        let clients = xt_recent::list(&list.to_string())?.into_iter();
        let remaining = |last_seen| Some(port.timeout().checked_sub(ticks?.since(last_seen)));
        Ok(clients.map(|client| (client.address, remaining(client.last_seen))).collect())
    })
}

/// A client with the remaining time: `None` if it is not known, `Some(None)` if it is over.
type Client = (IpAddr, Option<Option<Duration>>);

/// Lists the clients of each endpoint.
fn of_endpoints(
    ports: &[AffinityPort],
    mut clients_of: impl FnMut(&AffinityPort, SocketAddr) -> Result<Vec<Client>, KernelError>,
) -> Result<Vec<KnownAffinity>, KernelError> {
    let mut found = Vec::new();
    for port in ports {
        for endpoint in port.endpoints() {
            for (client, remaining) in clients_of(port, endpoint)? {
                if remaining != Some(None) {
                    let client = AffinityClient::Address(client);
                    let remaining = remaining.flatten();
                    found.push(KnownAffinity { port: port.key.clone(), client, endpoint, remaining });
                }
            }
        }
    }
    Ok(found)
}

fn of_ipvs(clients: &[Persistence], ports: &[AffinityPort]) -> Vec<KnownAffinity> {
    type Served = (Option<IpAddr>, Protocol, NonZeroU16);
    let mut by_frontend: HashMap<Served, &AffinityPort> = HashMap::new();
    for port in ports {
        for frontend in &port.port.frontends {
            by_frontend.insert((frontend.address, port.key.name.protocol, frontend.port), port);
        }
    }
    let known = |client: &Persistence| {
        let to = NonZeroU16::new(client.server.address.port())?;
        let of = |address| by_frontend.get(&(address, client.server.protocol, to));
        // A node port is a virtual server for each address of the node.
        let port = of(Some(client.server.address.ip())).or_else(|| of(None))?;
        Some(KnownAffinity {
            port: port.key.clone(),
            client: AffinityClient::Address(client.client),
            endpoint: client.real,
            remaining: Some(client.expires_after),
        })
    };
    clients.iter().filter_map(known).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proxy_common::layout::Endpoint;

    use super::*;
    use crate::{
        kernel::ipvs::VirtualKey,
        model::{Balance, Forwarding, Frontend, FrontendKind, TrafficPolicy, testing::key},
    };

    const SECOND: u64 = 1_000_000_000;

    fn socket(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn port(frontends: &[(FrontendKind, Option<&str>, u16)]) -> AffinityPort {
        let frontend = |(kind, address, port): &(FrontendKind, Option<&str>, u16)| Frontend {
            kind: *kind,
            address: address.map(|address| address.parse().expect("an address")),
            port: NonZeroU16::new(*port).expect("a port"),
        };
        let port = ResolvedPort {
            frontends: frontends.iter().map(frontend).collect(),
            cluster_endpoints: Vec::new(),
            local_endpoints: Vec::new(),
            serving: Vec::new(),
            has_endpoints: true,
            affinity_timeout: std::num::NonZeroU32::new(10),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            source_ranges: Vec::new(),
            health_check_node_port: None,
            balance: Balance::Random,
            forwarding: Forwarding::Nat,
            dsr_nodes: BTreeMap::new(),
        };
        AffinityPort { key: key("shop/web", ""), port: port.into() }
    }

    #[test]
    fn an_entry_is_kept_until_its_timeout_and_while_its_endpoint_is_there() {
        let (port, pod) = (port(&[]), socket("10.1.0.1:8080"));
        let key = |netns| AffinityKey {
            addr: "192.0.2.1".parse::<IpAddr>().expect("an address").into(),
            netns,
            service: 1,
            zero: 0,
        };
        let value = AffinityValue { endpoint: Endpoint::from(pod), zero: 0, used_ns: SECOND };
        let of = |netns, endpoints: &[SocketAddr], now| {
            let endpoints = endpoints.iter().copied().collect();
            of_entry(&port, &endpoints, &key(netns), &value, now * SECOND)
        };
        let known = of(0, &[pod], 5).expect("a client");
        assert_eq!(known.remaining, Some(Duration::from_secs(6)));
        assert_eq!(known.client, AffinityClient::Address("192.0.2.1".parse().expect("an address")));
        let of_socket = of(7, &[pod], 5).expect("a client");
        assert_eq!(of_socket.client, AffinityClient::Namespace(NetnsCookie(7)));
        assert_eq!(of(0, &[pod], 12), None, "the timeout is over");
        assert_eq!(of(0, &[socket("10.1.0.2:8080")], 5), None, "the endpoint is gone");
    }

    #[test]
    fn a_persistence_template_belongs_to_the_service_port_of_its_virtual_server() {
        let ports = [port(&[
            (FrontendKind::ClusterIp, Some("10.96.0.80"), 80),
            (FrontendKind::NodePort, None, 30080),
        ])];
        let client = |server: &str| Persistence {
            client: "192.0.2.1".parse().expect("an address"),
            server: VirtualKey { protocol: Protocol::Tcp, address: socket(server) },
            real: socket("10.1.0.1:8080"),
            expires_after: Duration::from_secs(9),
        };
        for (server, is_known) in
            [("10.96.0.80:80", true), ("192.0.2.11:30080", true), ("10.96.0.80:81", false)]
        {
            assert_eq!(of_ipvs(&[client(server)], &ports).len(), usize::from(is_known), "{server}");
        }
    }
}
