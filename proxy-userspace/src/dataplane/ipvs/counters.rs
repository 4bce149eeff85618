//! Counts the traffic of service ports for metrics, from the counters of IPVS.
//!
//! IPVS counts by virtual server, and a service port can have several. IPVS forgets the counters
//! when a virtual server is removed. The counts here only grow: the last known counters of a
//! virtual server stay with its service port.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use proxy_common::layout::ServiceCounts;

use super::{
    settings::IpvsSettings,
    state::{ServerUsers, State},
};
use crate::{
    dataplane::{KernelCounts, ServiceCount, lock},
    kernel::{
        KernelError,
        ipvs::{Ipvs as Socket, Traffic, VirtualKey},
    },
    model::ServicePortKey,
};

/// The service ports that are counted individually, with their virtual servers. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct CountedPorts {
    max: usize,
    servers: Arc<Mutex<CountedServers>>,
}

#[derive(Debug, Default)]
struct CountedServers {
    /// The owner of each virtual server. `None` if the owner is not counted individually.
    owners: BTreeMap<VirtualKey, Option<ServicePortKey>>,
    /// The number of virtual servers of each service port.
    by_port: BTreeMap<ServicePortKey, usize>,
    /// A full plan has set all owners. Before that, virtual servers of an earlier process would
    /// count as unowned.
    is_complete: bool,
}

impl CountedServers {
    fn set_owner(&mut self, key: VirtualKey, port: Option<&ServicePortKey>, max: usize) {
        if port.is_some() && self.owners.get(&key).and_then(Option::as_ref) == port {
            return;
        }
        if let Some(Some(before)) = self.owners.remove(&key)
            && let Some(servers) = self.by_port.get_mut(&before)
        {
            *servers -= 1;
            if *servers == 0 {
                self.by_port.remove(&before);
            }
        }
        let Some(port) = port else { return };
        let is_individual = self.by_port.len() < max || self.by_port.contains_key(port);
        if is_individual {
            *self.by_port.entry(port.clone()).or_default() += 1;
        }
        self.owners.insert(key, is_individual.then(|| port.clone()));
    }
}

impl CountedPorts {
    /// Counts at most `max` service ports individually, the first ones that come.
    pub(super) fn new(max: u32) -> Self {
        Self { max: usize::try_from(max).unwrap_or(usize::MAX), servers: Arc::default() }
    }

    /// Sets the owners of these virtual servers: the first of their users.
    pub(super) fn update<'a>(&self, users: impl IntoIterator<Item = (&'a VirtualKey, &'a ServerUsers)>) {
        let mut servers = lock(&self.servers);
        for (key, users) in users {
            servers.set_owner(*key, users.first().map(|(_, port)| port), self.max);
        }
    }

    /// Forgets the virtual servers that have no users in the state. Called after a full plan.
    pub(super) fn retain(&self, state: &State) {
        let mut servers = lock(&self.servers);
        servers.is_complete = true;
        let is_gone = |key: &&VirtualKey| !state.server_users.contains_key(key);
        let gone: Vec<_> = servers.owners.keys().filter(is_gone).copied().collect();
        for key in gone {
            servers.set_owner(key, None, self.max);
        }
    }

    /// Reads the kernel's counters, adds them to the totals and returns these. Reads nothing before
    /// all owners are known.
    fn count(
        &self,
        totals: &mut TrafficTotals,
        read: impl FnOnce() -> Result<Vec<(VirtualKey, Traffic)>, KernelError>,
    ) -> Result<Vec<ServiceCount>, KernelError> {
        if !lock(&self.servers).is_complete {
            return Ok(Vec::new());
        }
        let all = read()?;
        let servers = lock(&self.servers);
        totals.update(&all, &servers.owners);
        totals.removed.retain(|port, _| port.as_ref().is_none_or(|port| servers.by_port.contains_key(port)));
        drop(servers);
        Ok(totals.counts())
    }

    /// Returns a reader of the counts, or `None` if counting is disabled.
    pub(super) fn reader(&self, settings: &IpvsSettings) -> Option<Result<CountReader, KernelError>> {
        let open = || {
            let socket = Mutex::new((Socket::open()?, TrafficTotals::default()));
            Ok(CountReader { socket, ports: self.clone(), settings: settings.clone() })
        };
        (self.max > 0).then(open)
    }
}

/// Reads the counts of service ports.
pub(super) struct CountReader {
    socket: Mutex<(Socket, TrafficTotals)>,
    ports: CountedPorts,
    settings: IpvsSettings,
}

impl KernelCounts for CountReader {
    fn services(&self) -> Vec<ServiceCount> {
        let mut guard = lock(&self.socket);
        let (socket, totals) = &mut *guard;
        let counted = self.ports.count(totals, || {
            let mut all = socket.traffic()?;
            all.retain(|(key, _)| !self.settings.excludes(key.address.ip()));
            Ok(all)
        });
        counted.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the counters of IPVS");
            Vec::new()
        })
    }

    /// Rules refuse and drop, and they do not know Services.
    fn counts_failures(&self) -> bool {
        false
    }
}

/// The counters of a virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServerTraffic {
    /// The owner. `None` stands for all owners that are not counted individually.
    owner: Option<ServicePortKey>,
    /// The counters when the owner got the virtual server.
    base: Traffic,
    /// The counters when they were last read.
    last: Traffic,
}

/// The traffic so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TrafficTotals {
    servers: BTreeMap<VirtualKey, ServerTraffic>,
    /// The traffic of virtual servers that were removed or got another owner.
    removed: BTreeMap<Option<ServicePortKey>, Traffic>,
}

impl TrafficTotals {
    /// Updates the totals from the kernel's counters.
    ///
    /// A virtual server that still has its owner can be missing: the kernel's dump skips some while
    /// servers are added and removed. Its next counters show whether it continued or is a new one.
    fn update(
        &mut self,
        all: &[(VirtualKey, Traffic)],
        owners: &BTreeMap<VirtualKey, Option<ServicePortKey>>,
    ) {
        let existing: BTreeSet<&VirtualKey> = all.iter().map(|(key, _)| key).collect();
        let is_gone = |key: &VirtualKey, server: &mut ServerTraffic| {
            !existing.contains(key) && owners.get(key) != Some(&server.owner)
        };
        let gone: Vec<_> = self.servers.extract_if(.., is_gone).map(|(_, server)| server).collect();
        for server in gone {
            self.remove(server);
        }
        for (key, now) in all {
            let owner = owners.get(key).cloned().flatten();
            let server = match self.servers.remove(key) {
                Some(held) if held.owner == owner && now.is_since(held.last) => {
                    ServerTraffic { last: *now, ..held }
                }
                Some(held) => {
                    // A new virtual server counts from zero. Otherwise the same one has a new
                    // owner.
                    let base = if now.is_since(held.last) { held.last } else { Traffic::default() };
                    self.remove(held);
                    ServerTraffic { owner, base, last: *now }
                }
                None => ServerTraffic { owner, base: Traffic::default(), last: *now },
            };
            self.servers.insert(*key, server);
        }
    }

    fn remove(&mut self, server: ServerTraffic) {
        self.removed.entry(server.owner).or_default().add(server.last.since(server.base));
    }

    /// Returns the totals of service ports with traffic. The last item is the total of those that
    /// are not counted individually.
    fn counts(&self) -> Vec<ServiceCount> {
        let mut totals = self.removed.clone();
        for server in self.servers.values() {
            totals.entry(server.owner.clone()).or_default().add(server.last.since(server.base));
        }
        let others = totals.remove(&None).map(|traffic| (None, traffic));
        let used = totals.into_iter().chain(others).filter(|(_, traffic)| *traffic != Traffic::default());
        let count = |(port, traffic): (_, Traffic)| ServiceCount {
            port,
            counts: ServiceCounts {
                connections: traffic.connections,
                bytes_to_endpoints: traffic.bytes_in,
                bytes_to_clients: traffic.bytes_out,
                ..ServiceCounts::NONE
            },
        };
        used.map(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataplane::ipvs::desired::ServerReason, model::testing};

    fn server(last: u8) -> VirtualKey {
        let address = std::net::SocketAddr::from(([10, 96, 0, last], 80));
        VirtualKey { protocol: crate::model::Protocol::Tcp, address }
    }

    fn traffic(connections: u64) -> Traffic {
        Traffic { connections, bytes_in: connections * 100, bytes_out: connections * 10 }
    }

    /// Returns the connections by service port.
    fn connections(totals: &TrafficTotals) -> Vec<(String, u64)> {
        let name = |port: Option<ServicePortKey>| port.map_or("other".into(), |port| port.to_string());
        totals.counts().into_iter().map(|count| (name(count.port), count.counts.connections)).collect()
    }

    #[test]
    fn counts_of_a_service_port_never_shrink() {
        let (web, dns) = (testing::key("default/web", ""), testing::key("default/dns", ""));
        let shown = |port: &ServicePortKey, count| (port.to_string(), count);
        let mut totals = TrafficTotals::default();
        let of = |one: Option<&ServicePortKey>, nine: Option<&ServicePortKey>| {
            BTreeMap::from([(server(1), one.cloned()), (server(9), nine.cloned())])
        };
        let mut owners = of(Some(&web), None);
        owners.insert(server(2), Some(web.clone()));
        totals.update(&[(server(1), traffic(3)), (server(2), traffic(4)), (server(9), traffic(5))], &owners);
        assert_eq!(connections(&totals), [shown(&web, 7), ("other".into(), 5)]);
        // One is removed, one is created again, and one continues.
        totals.update(&[(server(1), traffic(1)), (server(9), traffic(6))], &of(Some(&web), None));
        assert_eq!(connections(&totals), [shown(&web, 8), ("other".into(), 6)]);
        // Counts stay with the old Service when an address moves to another Service.
        totals.update(&[(server(1), traffic(2)), (server(9), traffic(6))], &of(Some(&dns), Some(&dns)));
        assert_eq!(connections(&totals), [shown(&dns, 1), shown(&web, 8), ("other".into(), 6)]);
        let bytes: Vec<_> = totals
            .counts()
            .iter()
            .map(|count| (count.counts.bytes_to_endpoints, count.counts.bytes_to_clients))
            .collect();
        assert_eq!(bytes, [(100, 10), (800, 80), (600, 60)]);
    }

    #[test]
    fn a_server_that_a_dump_skips_is_not_counted_twice() {
        let web = testing::key("default/web", "");
        let owners = BTreeMap::from([(server(1), Some(web.clone())), (server(2), None)]);
        let all = [(server(1), traffic(3)), (server(2), traffic(4))];
        let shown = [(web.to_string(), 3), ("other".to_owned(), 4)];
        let mut totals = TrafficTotals::default();
        for dumped in [&all[..], &all[..1], &all[..], &all[1..], &all[..]] {
            totals.update(dumped, &owners);
            assert_eq!(connections(&totals), shown, "{dumped:?}");
        }
        // A virtual server that was missing was created again.
        totals.update(&all[1..], &owners);
        totals.update(&[(server(1), traffic(1)), all[1]], &owners);
        assert_eq!(connections(&totals), [(web.to_string(), 4), ("other".to_owned(), 4)]);
    }

    #[test]
    fn at_most_max_service_ports_are_counted_individually() {
        let counted = CountedPorts::new(1);
        let of = |name: &str| -> ServerUsers {
            [(ServerReason::NodePort, testing::key(&format!("default/{name}"), ""))].into()
        };
        let (web, dns, none) = (of("web"), of("dns"), ServerUsers::new());
        counted.update([(&server(1), &web), (&server(2), &dns), (&server(3), &web)]);
        let names = || {
            lock(&counted.servers).by_port.iter().map(|(port, n)| (port.to_string(), *n)).collect::<Vec<_>>()
        };
        assert_eq!(names(), [(testing::key("default/web", "").to_string(), 2)]);
        counted.update([(&server(1), &none), (&server(3), &none), (&server(2), &dns)]);
        assert_eq!(names(), [(testing::key("default/dns", "").to_string(), 1)]);
        assert!(CountedPorts::new(0).max == 0);
    }

    #[test]
    fn nothing_is_counted_before_a_full_plan() {
        let (counted, mut totals) = (CountedPorts::new(1), TrafficTotals::default());
        let web: ServerUsers = [(ServerReason::NodePort, testing::key("default/web", ""))].into();
        let mut state = State::of_empty_kernel(&IpvsSettings::default());
        let early = counted.count(&mut totals, || panic!("counters are read too early")).expect("no counts");
        assert_eq!((early, &totals), (Vec::new(), &TrafficTotals::default()));
        state.server_users.insert(server(1), web.clone());
        counted.update([(&server(1), &web)]);
        counted.retain(&state);
        counted.count(&mut totals, || Ok(vec![(server(1), traffic(3))])).expect("the counts");
        assert_eq!(connections(&totals), [(testing::key("default/web", "").to_string(), 3)]);
    }
}
