//! What IPVS counts of each service port, for metrics: read from the kernel whenever they are asked for.
//!
//! IPVS counts by virtual server, of which a service port has several, and forgets when one goes. Here counts only grow: what a
//! virtual server had when it was last looked at stays with its service port.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    node::Terms,
    state::{Owners, State},
};
use crate::{
    dataplane::{KernelCounts, ProgramErrorCount, ServiceCount},
    kernel::{
        KernelError,
        ipvs::{Ipvs as Socket, Traffic, VirtualKey},
    },
    model::ServicePortKey,
};

/// The service ports that are counted apart, and their virtual servers. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    most: usize,
    ports: Arc<Mutex<Ports>>,
}

#[derive(Debug, Default)]
struct Ports {
    /// All that have an owner; none where that one is not counted apart.
    of: BTreeMap<VirtualKey, Option<ServicePortKey>>,
    /// How many virtual servers each has.
    servers: BTreeMap<ServicePortKey, usize>,
    /// All owners were known once. Until then servers that a process before this one made would be nobody's.
    are_known: bool,
}

impl Ports {
    fn set(&mut self, key: VirtualKey, port: Option<&ServicePortKey>, most: usize) {
        if port.is_some() && self.of.get(&key).and_then(Option::as_ref) == port {
            return;
        }
        if let Some(Some(before)) = self.of.remove(&key)
            && let Some(servers) = self.servers.get_mut(&before)
        {
            *servers -= 1;
            if *servers == 0 {
                self.servers.remove(&before);
            }
        }
        let Some(port) = port else { return };
        let is_apart = self.servers.len() < most || self.servers.contains_key(port);
        if is_apart {
            *self.servers.entry(port.clone()).or_default() += 1;
        }
        self.of.insert(key, is_apart.then(|| port.clone()));
    }
}

impl Counted {
    /// So many service ports at most, the first that come.
    pub(super) fn new(most: u32) -> Self {
        Self { most: usize::try_from(most).unwrap_or(usize::MAX), ports: Arc::default() }
    }

    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These virtual servers have other owners.
    pub(super) fn update<'a>(&self, owners: impl IntoIterator<Item = (&'a VirtualKey, &'a Owners)>) {
        let mut ports = self.ports();
        for (key, owners) in owners {
            ports.set(*key, owners.first().map(|(_, port)| port), self.most);
        }
    }

    /// All virtual servers that have owners are known: others are gone.
    pub(super) fn keep(&self, state: &State) {
        let mut ports = self.ports();
        ports.are_known = true;
        let gone: Vec<_> = ports.of.keys().filter(|key| !state.owners.contains_key(key)).copied().collect();
        for key in gone {
            ports.set(key, None, self.most);
        }
    }

    /// Takes what the kernel counts into a tally and returns its sums; nothing as long as it is not known whose it is.
    fn take(
        &self,
        tally: &mut Tally,
        read: impl FnOnce() -> Result<Vec<(VirtualKey, Traffic)>, KernelError>,
    ) -> Result<Vec<ServiceCount>, KernelError> {
        if !self.ports().are_known {
            return Ok(Vec::new());
        }
        let all = read()?;
        let ports = self.ports();
        tally.take(&all, &ports.of);
        tally.gone.retain(|port, _| port.as_ref().is_none_or(|port| ports.servers.contains_key(port)));
        drop(ports);
        Ok(tally.counts())
    }

    /// What reads the counts; none where nothing is to be counted.
    pub(super) fn reader(&self, terms: &Terms) -> Option<Result<Reader, KernelError>> {
        let open = || {
            let socket = Mutex::new((Socket::open()?, Tally::default()));
            Ok(Reader { socket, counted: self.clone(), terms: terms.clone() })
        };
        (self.most > 0).then(open)
    }
}

/// Reads what was counted.
pub(super) struct Reader {
    socket: Mutex<(Socket, Tally)>,
    counted: Counted,
    terms: Terms,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

impl Reader {
    fn read(&self) -> Result<Vec<ServiceCount>, KernelError> {
        let mut guard = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let (socket, tally) = &mut *guard;
        self.counted.take(tally, || {
            let mut all = socket.traffic()?;
            all.retain(|(key, _)| !self.terms.excludes(key.address.ip()));
            Ok(all)
        })
    }
}

impl KernelCounts for Reader {
    fn packets(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn errors(&self) -> Vec<ProgramErrorCount> {
        Vec::new()
    }

    fn services(&self) -> Vec<ServiceCount> {
        self.read().unwrap_or_else(|error| {
            tracing::debug!(%error, "what IPVS counts cannot be read");
            Vec::new()
        })
    }

    /// Rules refuse and drop, which do not know Services.
    fn tells_failures(&self) -> bool {
        false
    }
}

/// A virtual server's counts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    /// Whose they are; none for all that are not counted apart.
    port: Option<ServicePortKey>,
    /// What is not that service port's.
    before: Traffic,
    /// What was seen last.
    last: Traffic,
}

impl Seen {
    fn own(&self) -> Traffic {
        self.last.since(self.before)
    }
}

/// What was seen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    servers: BTreeMap<VirtualKey, Seen>,
    /// Of virtual servers that went, or went to another service port.
    gone: BTreeMap<Option<ServicePortKey>, Traffic>,
}

impl Tally {
    /// Takes in what the kernel counts now, of virtual servers with these owners.
    ///
    /// One that its owner still has may be missing: where servers come and go while the kernel lists them, it passes over some. What
    /// tells whether such a one went on or was made anew is what it counts then.
    fn take(&mut self, all: &[(VirtualKey, Traffic)], owners: &BTreeMap<VirtualKey, Option<ServicePortKey>>) {
        let there: BTreeSet<&VirtualKey> = all.iter().map(|(key, _)| key).collect();
        let is_gone =
            |key: &VirtualKey, seen: &Seen| !there.contains(key) && owners.get(key) != Some(&seen.port);
        let gone: Vec<Seen> =
            self.servers.extract_if(.., |key, seen| is_gone(key, seen)).map(|(_, seen)| seen).collect();
        for seen in gone {
            self.put_by(seen);
        }
        for (key, now) in all {
            let port = owners.get(key).cloned().flatten();
            let held = self.servers.remove(key);
            let seen = match held {
                Some(held) if held.port == port && now.is_since(held.last) => Seen { last: *now, ..held },
                Some(held) => {
                    // Made anew it counts from zero; else it goes on, for somebody else.
                    let before = if now.is_since(held.last) { held.last } else { Traffic::default() };
                    self.put_by(held);
                    Seen { port, before, last: *now }
                }
                None => Seen { port, before: Traffic::default(), last: *now },
            };
            self.servers.insert(*key, seen);
        }
    }

    fn put_by(&mut self, seen: Seen) {
        let own = seen.own();
        self.gone.entry(seen.port).or_default().add(own);
    }

    /// The sums, of service ports that had any traffic, those that are not counted apart last.
    fn counts(&self) -> Vec<ServiceCount> {
        let mut sums = self.gone.clone();
        for seen in self.servers.values() {
            sums.entry(seen.port.clone()).or_default().add(seen.own());
        }
        let others = sums.remove(&None).map(|traffic| (None, traffic));
        let used = |(_, traffic): &(Option<ServicePortKey>, Traffic)| *traffic != Traffic::default();
        sums.into_iter().chain(others).filter(used).map(|(port, traffic)| count(port, traffic)).collect()
    }
}

fn count(port: Option<ServicePortKey>, traffic: Traffic) -> ServiceCount {
    let Traffic { connections, bytes_in, bytes_out } = traffic;
    ServiceCount {
        port,
        connections,
        refusals: 0,
        drops: 0,
        bytes_to_endpoints: bytes_in,
        bytes_to_clients: bytes_out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        dataplane::ipvs::{IpvsSettings, claims::Reason},
        model::testing,
    };

    fn server(last: u8) -> VirtualKey {
        let address = std::net::SocketAddr::from(([10, 96, 0, last], 80));
        VirtualKey { protocol: crate::model::Protocol::Tcp, address }
    }

    fn traffic(connections: u64) -> Traffic {
        Traffic { connections, bytes_in: connections * 100, bytes_out: connections * 10 }
    }

    /// Connections by name.
    fn connections(tally: &Tally) -> Vec<(String, u64)> {
        let name = |port: Option<ServicePortKey>| port.map_or("other".into(), |port| port.to_string());
        tally.counts().into_iter().map(|count| (name(count.port), count.connections)).collect()
    }

    #[test]
    fn counts_of_a_service_port_are_the_sum_of_its_servers_and_never_shrink() {
        let (web, dns) = (testing::key("default/web", ""), testing::key("default/dns", ""));
        let shown = |port: &ServicePortKey, count| (port.to_string(), count);
        let mut tally = Tally::default();
        let of = |one: Option<&ServicePortKey>, nine: Option<&ServicePortKey>| {
            BTreeMap::from([(server(1), one.cloned()), (server(9), nine.cloned())])
        };
        let mut owners = of(Some(&web), None);
        owners.insert(server(2), Some(web.clone()));
        tally.take(&[(server(1), traffic(3)), (server(2), traffic(4)), (server(9), traffic(5))], &owners);
        assert_eq!(connections(&tally), [shown(&web, 7), ("other".into(), 5)]);
        // One goes, one is made anew, and one goes on.
        tally.take(&[(server(1), traffic(1)), (server(9), traffic(6))], &of(Some(&web), None));
        assert_eq!(connections(&tally), [shown(&web, 8), ("other".into(), 6)]);
        // An address that goes to another Service takes nothing along.
        tally.take(&[(server(1), traffic(2)), (server(9), traffic(6))], &of(Some(&dns), Some(&dns)));
        assert_eq!(connections(&tally), [shown(&dns, 1), shown(&web, 8), ("other".into(), 6)]);
        let bytes: Vec<_> =
            tally.counts().iter().map(|count| (count.bytes_to_endpoints, count.bytes_to_clients)).collect();
        assert_eq!(bytes, [(100, 10), (800, 80), (600, 60)]);
    }

    #[test]
    fn a_server_that_a_listing_passes_over_is_not_counted_twice() {
        let web = testing::key("default/web", "");
        let owners = BTreeMap::from([(server(1), Some(web.clone())), (server(2), None)]);
        let all = [(server(1), traffic(3)), (server(2), traffic(4))];
        let shown = [(web.to_string(), 3), ("other".to_owned(), 4)];
        let mut tally = Tally::default();
        for listed in [&all[..], &all[..1], &all[..], &all[1..], &all[..]] {
            tally.take(listed, &owners);
            assert_eq!(connections(&tally), shown, "{listed:?}");
        }
        // One that came back was made anew.
        tally.take(&all[1..], &owners);
        tally.take(&[(server(1), traffic(1)), all[1]], &owners);
        assert_eq!(connections(&tally), [(web.to_string(), 4), ("other".to_owned(), 4)]);
    }

    #[test]
    fn no_more_service_ports_are_counted_apart_than_asked_for_and_room_is_used_again() {
        let counted = Counted::new(1);
        let of = |name: &str| -> Owners {
            [(Reason::NodePort, testing::key(&format!("default/{name}"), ""))].into()
        };
        let (web, dns, none) = (of("web"), of("dns"), Owners::new());
        counted.update([(&server(1), &web), (&server(2), &dns), (&server(3), &web)]);
        let names =
            || counted.ports().servers.iter().map(|(port, n)| (port.to_string(), *n)).collect::<Vec<_>>();
        assert_eq!(names(), [(testing::key("default/web", "").to_string(), 2)]);
        counted.update([(&server(1), &none), (&server(3), &none), (&server(2), &dns)]);
        assert_eq!(names(), [(testing::key("default/dns", "").to_string(), 1)]);
        assert!(Counted::new(0).most == 0);
    }

    #[test]
    fn nothing_is_counted_before_it_is_known_whose_it_is() {
        let (counted, mut tally) = (Counted::new(1), Tally::default());
        let web: Owners = [(Reason::NodePort, testing::key("default/web", ""))].into();
        let mut state = State::empty(Terms::new(&IpvsSettings::default(), Vec::new()));
        let early = counted.take(&mut tally, || panic!("it is read too early")).expect("nothing");
        assert_eq!((early, &tally), (Vec::new(), &Tally::default()));
        state.owners.insert(server(1), web.clone());
        counted.update([(&server(1), &web)]);
        counted.keep(&state);
        counted.take(&mut tally, || Ok(vec![(server(1), traffic(3))])).expect("it is read");
        assert_eq!(connections(&tally), [(testing::key("default/web", "").to_string(), 3)]);
    }
}
