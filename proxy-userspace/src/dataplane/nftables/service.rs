//! What a resolved service port needs in the table.

use std::{net::SocketAddr, sync::Arc};

use super::{
    own::{self, ChainRules, Sticky, is_load_balancer},
    shared::{By, Shared},
    table::{Base, Basis, Destination, REJECT_CHAIN},
};
use crate::{
    kernel::nftables::{Family, Field, Key, Name, Set, Value, Verdict},
    model::{
        Frontend, FrontendKind, IpFamily, Protocol, ResolvedPort, ServicePortKey, TrafficPolicy, WhenEmpty,
    },
};

/// All that a service port needs.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Elements; some may be others' too.
    pub(super) elements: Vec<(Base, Key, Value)>,
    /// Endpoints by number.
    pub(super) lists: Vec<List>,
    /// Chains that others may use too.
    pub(super) shared: Vec<Shared>,
    /// Chains of its own, those that others lead to first.
    pub(super) chains: Vec<ChainRules>,
    /// Sets of its own.
    pub(super) sets: Vec<Set>,
}

/// Endpoints that a destination leads to.
#[derive(Debug)]
pub(super) struct List {
    pub(super) map: Base,
    pub(super) destination: Destination,
    pub(super) endpoints: Vec<SocketAddr>,
}

/// The family of a service port, as the kernel's tables have it.
pub(super) const fn family(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::Ip,
        IpFamily::V6 => Family::Ip6,
    }
}

/// The number that IP has for a protocol.
const fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}

/// What this service port needs.
pub(super) fn wanted(key: &ServicePortKey, port: &ResolvedPort, basis: &Basis) -> Wanted {
    let family = family(key.family);
    let protocol = number(key.name.protocol);
    let mut wanted = Wanted::default();
    if port.frontends.is_empty() {
        return wanted;
    }
    let sticky =
        port.affinity_timeout.map(|timeout| Sticky::new(&key.name, protocol, port, timeout, basis, family));
    let mut filling = Filling {
        wanted: &mut wanted,
        port,
        protocol,
        sticky: sticky.as_ref(),
        comment: key.name.to_string().into(),
    };
    for frontend in &port.frontends {
        filling.add(frontend);
    }
    filling.add_hairpins();
    if let Some(sticky) = sticky {
        wanted.chains.extend(sticky.chains);
        wanted.sets.extend(sticky.sets);
    }
    wanted.add_firewall(key, port, protocol, basis, family);
    wanted
}

impl Wanted {
    fn add_firewall(
        &mut self,
        key: &ServicePortKey,
        port: &ResolvedPort,
        protocol: u8,
        basis: &Basis,
        family: Family,
    ) {
        let mut guarded = port.frontends.iter().filter(|frontend| is_load_balancer(frontend)).peekable();
        if port.source_ranges.is_empty() || guarded.peek().is_none() {
            return;
        }
        let (chain, rules) = own::firewall(&key.name, port, basis, family);
        let comment: Arc<str> = key.name.to_string().into();
        for frontend in guarded {
            let destination = destination(frontend, protocol);
            let verdict = Value::Verdict(Verdict::Goto(chain.clone()), Some(Arc::clone(&comment)));
            self.elements.push((Base::FirewallIps, destination.key(), verdict));
        }
        self.chains.push((chain, rules));
    }
}

fn destination(frontend: &Frontend, protocol: u8) -> Destination {
    Destination { address: frontend.address, protocol, port: frontend.port.get() }
}

struct Filling<'a> {
    wanted: &'a mut Wanted,
    port: &'a ResolvedPort,
    protocol: u8,
    sticky: Option<&'a Sticky>,
    /// What people read of its elements.
    comment: Arc<str>,
}

impl Filling<'_> {
    fn add(&mut self, frontend: &Frontend) {
        let destination = destination(frontend, self.protocol);
        match frontend.kind {
            FrontendKind::ClusterIp => self.add_cluster_ip(destination),
            FrontendKind::NodePort => self.add_external(destination, By::NodePort),
            FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp => {
                self.add_external(destination, By::Address);
            }
        }
    }

    fn add_cluster_ip(&mut self, destination: Destination) {
        let address = destination.address.map(Field::Address);
        self.wanted.elements.extend(address.map(|ip| (Base::ClusterIps, Key::new(&[ip]), Value::Member)));
        let policy = self.port.internal_policy;
        match self.count(policy) {
            0 => self.add_without_endpoints(destination),
            count => {
                let shared = Shared::Endpoints(By::Address, count);
                let chain = self.sticky.map(|sticky| sticky.list(policy));
                self.lead(destination, chain, shared);
                self.add_list(Base::ServiceEndpoints, destination, policy);
            }
        }
    }

    fn add_external(&mut self, destination: Destination, by: By) {
        let (local, cluster) = (self.count(TrafficPolicy::Local), self.count(TrafficPolicy::Cluster));
        let chain = self.sticky.map(Sticky::external);
        match self.port.external_policy {
            TrafficPolicy::Cluster if cluster == 0 => self.add_without_endpoints(destination),
            TrafficPolicy::Cluster => {
                self.lead(destination, chain, Shared::External(by, cluster));
                self.add_list(by.endpoints(), destination, TrafficPolicy::Cluster);
            }
            TrafficPolicy::Local => {
                if local == 0 {
                    self.add_without_endpoints(destination);
                }
                if local + cluster > 0 {
                    self.lead(destination, chain, Shared::Local { by, local, cluster });
                    self.add_list(by.endpoints(), destination, TrafficPolicy::Cluster);
                    self.add_list(by.local_endpoints(), destination, TrafficPolicy::Local);
                }
            }
        }
    }

    fn count(&self, policy: TrafficPolicy) -> u32 {
        u32::try_from(self.port.endpoints(policy).len()).unwrap_or(u32::MAX)
    }

    /// To a chain of the service port's own if there is one, else to the shared one.
    fn lead(&mut self, destination: Destination, own: Option<Name>, shared: Shared) {
        let chain = own.unwrap_or_else(|| {
            self.wanted.shared.extend(shared.leads_to().into_iter().chain([shared]));
            shared.name()
        });
        let map = if destination.address.is_some() { Base::ServiceIps } else { Base::ServiceNodePorts };
        let verdict = Value::Verdict(Verdict::Goto(chain), Some(Arc::clone(&self.comment)));
        self.wanted.elements.push((map, destination.key(), verdict));
    }

    fn add_list(&mut self, map: Base, destination: Destination, policy: TrafficPolicy) {
        if self.sticky.is_none() {
            let endpoints = self.port.endpoints(policy).iter().map(|endpoint| endpoint.address).collect();
            self.wanted.lists.push(List { map, destination, endpoints });
        }
    }

    fn add_without_endpoints(&mut self, destination: Destination) {
        let verdict = match self.port.when_empty() {
            WhenEmpty::Refuse => Verdict::Goto(REJECT_CHAIN.into()),
            WhenEmpty::Drop => Verdict::Drop,
        };
        let map = match destination.address {
            Some(_) => Base::NoEndpointServices,
            None => Base::NoEndpointNodePorts,
        };
        let verdict = Value::Verdict(verdict, Some(Arc::clone(&self.comment)));
        self.wanted.elements.push((map, destination.key(), verdict));
    }

    /// An endpoint of this node that is sent to itself through a Service has to see another source than itself.
    fn add_hairpins(&mut self) {
        let lists = [&self.port.cluster_endpoints, &self.port.local_endpoints].into_iter().flatten();
        let mut local: Vec<SocketAddr> = lists.filter(|e| e.is_local).map(|e| e.address).collect();
        local.sort_unstable();
        local.dedup();
        for endpoint in local {
            let address = Field::Address(endpoint.ip());
            let key = [address, address, Field::Protocol(self.protocol), Field::Port(endpoint.port())];
            self.wanted.elements.push((Base::HairpinConnections, Key::new(&key), Value::Member));
        }
    }
}

/// The addresses of this node that node ports are served on. As kube-proxy in this mode, not those of loopback.
pub(super) fn node_port_ips(addresses: impl IntoIterator<Item = std::net::IpAddr>) -> Vec<(Family, Key)> {
    let served = addresses.into_iter().filter(|address| !address.is_loopback());
    served.map(|address| (Family::of(address), Key::new(&[Field::Address(address)]))).collect()
}
