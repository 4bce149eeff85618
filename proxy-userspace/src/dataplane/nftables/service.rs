//! What a resolved service port needs in the table.

use std::{net::SocketAddr, sync::Arc};

use super::{
    lists::{List, Size, Sized},
    own::{self, ChainRules, Sticky, is_load_balancer},
    sets::{Base, Destination},
    table::Basis,
};
use crate::{
    kernel::nftables::{self, ElementKey, ElementValue, Family, Field, Name, Set, Verdict},
    model::{
        Frontend, FrontendKind, IpFamily, NoEndpointVerdict, ResolvedPort, ServicePortKey, TrafficPolicy,
    },
};

/// All that a service port needs.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Elements; some may be others' too.
    pub(super) elements: Vec<(Base, ElementKey, ElementValue)>,
    /// Endpoints by number.
    pub(super) lists: Vec<Listed>,
    /// Chains of its own, those that others lead to first.
    pub(super) chains: Vec<ChainRules>,
    /// Sets of its own.
    pub(super) sets: Vec<Set>,
}

/// Endpoints that a destination leads to.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) list: List,
    pub(super) destination: Destination,
    pub(super) endpoints: Vec<SocketAddr>,
}

impl Listed {
    /// The list and its size.
    pub(super) fn sized(&self) -> Sized {
        Sized { list: self.list, size: Size::of(self.endpoints.len()) }
    }

    /// How many of them have a number: from 0 on.
    pub(super) fn numbers(&self) -> u32 {
        let most = self.sized().size.numbers();
        u32::try_from(self.endpoints.len()).map_or(most, |count| count.min(most))
    }
}

/// The family of a service port, as the kernel's tables have it.
pub(super) const fn family(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::Ip,
        IpFamily::V6 => Family::Ip6,
    }
}

/// Whether there may be chains of its own.
pub(super) fn has_rules(port: &ResolvedPort) -> bool {
    port.affinity_timeout.is_some() || !port.source_ranges.is_empty()
}

/// What this service port needs.
pub(super) fn wanted(key: &ServicePortKey, port: &ResolvedPort, basis: &Basis) -> Wanted {
    let family = family(key.family);
    let protocol = key.name.protocol.number();
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
        comment: nftables::comment(&key.name.to_string()),
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
    /// All elements, endpoints included.
    pub(super) fn keys(&self) -> impl Iterator<Item = (Base, ElementKey)> {
        let slots = self.lists.iter().flat_map(|listed| {
            let numbers = 0..listed.numbers();
            numbers.map(|number| (listed.list.endpoints(), listed.destination.slot(number)))
        });
        self.elements.iter().map(|(base, key, _)| (*base, *key)).chain(slots)
    }

    /// The chains and sets of its own.
    pub(super) fn into_names(self) -> impl Iterator<Item = Name> {
        let chains = self.chains.into_iter().map(|(name, _)| name);
        chains.chain(self.sets.into_iter().map(|set| set.name))
    }

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
        let comment = nftables::comment(&key.name.to_string());
        for frontend in guarded {
            let destination = destination(frontend, protocol);
            let verdict = ElementValue::verdict(Verdict::Goto(chain.clone()), Some(Arc::clone(&comment)));
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
            FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp => {
                self.add_external(destination);
            }
        }
    }

    fn add_cluster_ip(&mut self, destination: Destination) {
        let address = destination.address.map(Field::Address);
        let member = |ip| (Base::ClusterIps, ElementKey::new(&[ip]), ElementValue::Member(None));
        self.wanted.elements.extend(address.map(member));
        let endpoints = self.addresses(self.port.internal_policy);
        match self.sticky {
            _ if endpoints.is_empty() => self.add_without_endpoints(destination),
            Some(sticky) => self.lead(destination, sticky.list(self.port.internal_policy)),
            None => self.add_list(List::Services, destination, endpoints),
        }
    }

    fn add_external(&mut self, destination: Destination) {
        let cluster = self.addresses(TrafficPolicy::Cluster);
        let local = self.addresses(TrafficPolicy::Local);
        let is_local = self.port.external_policy == TrafficPolicy::Local;
        if (if is_local { &local } else { &cluster }).is_empty() {
            self.add_without_endpoints(destination);
        }
        if cluster.is_empty() && (local.is_empty() || !is_local) {
            return;
        }
        if let Some(sticky) = self.sticky {
            return self.lead(destination, sticky.external());
        }
        let is_address = destination.address.is_some();
        let (all, near) = if is_address {
            (List::Services, List::LocalServices)
        } else {
            (List::NodePorts, List::LocalNodePorts)
        };
        let kind = match (is_local, is_address) {
            (true, true) => Base::PolicyLocalServices,
            (true, false) => Base::PolicyLocalNodePorts,
            (false, true) => Base::ExternalServices,
            (false, false) => Base::ExternalNodePorts,
        };
        self.wanted.elements.push((kind, destination.key(), ElementValue::Member(None)));
        if is_local {
            self.add_list(near, destination, local.clone());
        }
        // What comes from this node is led somewhere wherever there is an endpoint.
        self.add_list(all, destination, if cluster.is_empty() { local } else { cluster });
    }

    fn addresses(&self, policy: TrafficPolicy) -> Vec<SocketAddr> {
        self.port.endpoints(policy).iter().map(|endpoint| endpoint.address).collect()
    }

    /// To a chain of the service port's own.
    fn lead(&mut self, destination: Destination, chain: Name) {
        let map = if destination.address.is_some() { Base::ServiceIps } else { Base::ServiceNodePorts };
        let verdict = ElementValue::verdict(Verdict::Goto(chain), Some(Arc::clone(&self.comment)));
        self.wanted.elements.push((map, destination.key(), verdict));
    }

    fn add_list(&mut self, list: List, destination: Destination, endpoints: Vec<SocketAddr>) {
        if endpoints.is_empty() {
            return;
        }
        let listed = Listed { list, destination, endpoints };
        let member = ElementValue::Member(Some(Arc::clone(&self.comment)));
        self.wanted.elements.push((Base::Sized(listed.sized()), destination.key(), member));
        self.wanted.lists.push(listed);
    }

    fn add_without_endpoints(&mut self, destination: Destination) {
        // What goes on is refused by the rest of the rule.
        let verdict = match self.port.no_endpoint_verdict() {
            NoEndpointVerdict::Refuse => Verdict::Continue,
            NoEndpointVerdict::Drop => Verdict::Drop,
        };
        let map = match destination.address {
            Some(_) => Base::NoEndpointServices,
            None => Base::NoEndpointNodePorts,
        };
        let verdict = ElementValue::verdict(verdict, Some(Arc::clone(&self.comment)));
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
            self.wanted.elements.push((
                Base::HairpinConnections,
                ElementKey::new(&key),
                ElementValue::Member(None),
            ));
        }
    }
}

/// The addresses of this node that node ports are served on. As kube-proxy in this mode, not those of loopback.
pub(super) fn node_port_ips(
    addresses: impl IntoIterator<Item = std::net::IpAddr>,
) -> Vec<(Family, ElementKey)> {
    let served = addresses.into_iter().filter(|address| !address.is_loopback());
    served.map(|address| (Family::of(address), ElementKey::new(&[Field::Address(address)]))).collect()
}
