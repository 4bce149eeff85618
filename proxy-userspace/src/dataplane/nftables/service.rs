//! The elements, chains and sets that a resolved service port needs.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    lists::{EndpointList, ListSize, SizedList},
    port_chains::{self, AffinityChains, ChainRules, is_load_balancer},
    sets::{Destination, SharedSet},
    table::RuleSettings,
};
use crate::{
    kernel::nftables::{self, ElementKey, ElementValue, Field, Name, Set, Verdict},
    model::{
        Frontend, FrontendKind, IpFamily, NoEndpointVerdict, ResolvedPort, ServicePortKey, TrafficPolicy,
    },
};

/// Everything that a service port needs.
#[derive(Debug, Default)]
pub(super) struct PortObjects {
    /// Elements. Other service ports may need some of them too.
    pub(super) elements: Vec<(SharedSet, ElementKey, ElementValue)>,
    /// Endpoints, which have numbers instead of keys.
    pub(super) lists: Vec<DestinationEndpoints>,
    /// The chains of this service port. A chain comes after the chains to which it leads.
    pub(super) chains: Vec<ChainRules>,
    /// The sets of this service port.
    pub(super) sets: Vec<Set>,
}

/// The endpoints of a destination.
#[derive(Debug)]
pub(super) struct DestinationEndpoints {
    pub(super) list: EndpointList,
    pub(super) destination: Destination,
    pub(super) endpoints: Vec<SocketAddr>,
}

impl DestinationEndpoints {
    pub(super) fn sized(&self) -> SizedList {
        SizedList { list: self.list, size: ListSize::of(self.endpoints.len()) }
    }

    /// Returns the number of endpoints that have a number. The numbers start at 0.
    pub(super) fn numbers(&self) -> u32 {
        let max = self.sized().size.numbers();
        u32::try_from(self.endpoints.len()).map_or(max, |count| count.min(max))
    }
}

/// Returns true if the service port can have chains of its own.
pub(super) fn has_chains(port: &ResolvedPort) -> bool {
    port.affinity_timeout.is_some() || !port.source_ranges.is_empty()
}

impl PortObjects {
    pub(super) fn new(key: &ServicePortKey, port: &ResolvedPort, settings: &RuleSettings) -> Self {
        if port.frontends.is_empty() {
            return Self::default();
        }
        let affinity = port
            .affinity_timeout
            .map(|timeout| AffinityChains::new(&key.name, port, timeout, settings, key.family));
        let comment = nftables::comment(&key.name.to_string());
        let objects = Self::default();
        let mut builder = Builder { objects, key, port, affinity: affinity.as_ref(), comment };
        for frontend in &port.frontends {
            builder.add(frontend);
        }
        builder.add_hairpins();
        builder.add_firewall(settings);
        let mut objects = builder.objects;
        if let Some(affinity) = affinity {
            objects.chains.splice(0..0, affinity.chains);
            objects.sets.extend(affinity.sets);
        }
        objects
    }

    /// Returns the keys of all elements, including endpoints.
    pub(super) fn keys(&self) -> impl Iterator<Item = (SharedSet, ElementKey)> {
        let slots = self.lists.iter().flat_map(|list| {
            let numbers = 0..list.numbers();
            numbers.map(|number| (list.list.endpoints(), list.destination.slot(number)))
        });
        self.elements.iter().map(|(set, key, _)| (*set, *key)).chain(slots)
    }

    /// Returns the names of the service port's chains and sets.
    pub(super) fn into_names(self) -> impl Iterator<Item = Name> {
        let chains = self.chains.into_iter().map(|(name, _)| name);
        chains.chain(self.sets.into_iter().map(|set| set.name))
    }
}

struct Builder<'a> {
    objects: PortObjects,
    key: &'a ServicePortKey,
    port: &'a ResolvedPort,
    affinity: Option<&'a AffinityChains>,
    /// The comment of its elements.
    comment: Arc<str>,
}

impl Builder<'_> {
    fn destination(&self, frontend: &Frontend) -> Destination {
        Destination { address: frontend.address, protocol: self.key.name.protocol, port: frontend.port.get() }
    }

    fn add(&mut self, frontend: &Frontend) {
        let destination = self.destination(frontend);
        match frontend.kind {
            FrontendKind::ClusterIp => self.add_cluster_ip(destination),
            FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp => {
                self.add_external(destination);
            }
        }
    }

    fn add_cluster_ip(&mut self, destination: Destination) {
        if let Some(address) = destination.address {
            self.add_member(SharedSet::ClusterIps, ElementKey::new(&[Field::Address(address)]), None);
        }
        let endpoints = self.addresses(self.port.internal_policy);
        match self.affinity {
            _ if endpoints.is_empty() => self.add_without_endpoints(destination),
            Some(affinity) => self.lead_to(destination, affinity.endpoints(self.port.internal_policy)),
            None => self.add_list(EndpointList::Services, destination, endpoints),
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
        if let Some(affinity) = self.affinity {
            return self.lead_to(destination, affinity.external());
        }
        let is_address = destination.address.is_some();
        let (all, on_node) = if is_address {
            (EndpointList::Services, EndpointList::LocalServices)
        } else {
            (EndpointList::NodePorts, EndpointList::LocalNodePorts)
        };
        let set = match (is_local, is_address) {
            (true, true) => SharedSet::PolicyLocalServices,
            (true, false) => SharedSet::PolicyLocalNodePorts,
            (false, true) => SharedSet::ExternalServices,
            (false, false) => SharedSet::ExternalNodePorts,
        };
        self.add_member(set, destination.key(), None);
        if is_local {
            self.add_list(on_node, destination, local.clone());
        }
        // Traffic from inside goes to local endpoints if the cluster list is empty.
        self.add_list(all, destination, if cluster.is_empty() { local } else { cluster });
    }

    fn addresses(&self, policy: TrafficPolicy) -> Vec<SocketAddr> {
        self.port.endpoints(policy).iter().map(|endpoint| endpoint.address).collect()
    }

    fn add_member(&mut self, set: SharedSet, key: ElementKey, comment: Option<Arc<str>>) {
        self.objects.elements.push((set, key, ElementValue::Member(comment)));
    }

    fn add_verdict(&mut self, map: SharedSet, destination: Destination, verdict: Verdict) {
        let value = ElementValue::verdict(verdict, Some(Arc::clone(&self.comment)));
        self.objects.elements.push((map, destination.key(), value));
    }

    /// Leads a destination to a chain of the service port.
    fn lead_to(&mut self, destination: Destination, chain: Name) {
        let is_address = destination.address.is_some();
        let map = if is_address { SharedSet::ServiceIps } else { SharedSet::ServiceNodePorts };
        self.add_verdict(map, destination, Verdict::Goto(chain));
    }

    fn add_list(&mut self, list: EndpointList, destination: Destination, endpoints: Vec<SocketAddr>) {
        if endpoints.is_empty() {
            return;
        }
        let list = DestinationEndpoints { list, destination, endpoints };
        let comment = Some(Arc::clone(&self.comment));
        self.add_member(SharedSet::Sized(list.sized()), destination.key(), comment);
        self.objects.lists.push(list);
    }

    fn add_without_endpoints(&mut self, destination: Destination) {
        let verdict = match self.port.no_endpoint_verdict() {
            // The rest of the rule refuses the packet.
            NoEndpointVerdict::Refuse => Verdict::Continue,
            NoEndpointVerdict::Drop => Verdict::Drop,
        };
        let is_address = destination.address.is_some();
        let map = if is_address { SharedSet::NoEndpointServices } else { SharedSet::NoEndpointNodePorts };
        self.add_verdict(map, destination, verdict);
    }

    /// Adds the hairpin connections of local endpoints. They are masqueraded.
    fn add_hairpins(&mut self) {
        let lists = [&self.port.cluster_endpoints, &self.port.local_endpoints].into_iter().flatten();
        let mut local: Vec<SocketAddr> = lists.filter(|e| e.is_local).map(|e| e.address).collect();
        local.sort_unstable();
        local.dedup();
        for endpoint in local {
            let address = Field::Address(endpoint.ip());
            let key =
                [address, address, Field::Protocol(self.key.name.protocol), Field::Port(endpoint.port())];
            self.add_member(SharedSet::HairpinConnections, ElementKey::new(&key), None);
        }
    }

    /// Adds the source ranges of load-balancer addresses.
    fn add_firewall(&mut self, settings: &RuleSettings) {
        let mut guarded = self.port.frontends.iter().filter(|frontend| is_load_balancer(frontend)).peekable();
        if self.port.source_ranges.is_empty() || guarded.peek().is_none() {
            return;
        }
        let (chain, rules) = port_chains::firewall(&self.key.name, self.port, settings, self.key.family);
        for frontend in guarded {
            let verdict = Verdict::Goto(chain.clone());
            self.add_verdict(SharedSet::FirewallIps, self.destination(frontend), verdict);
        }
        self.objects.chains.push((chain, rules));
    }
}

/// Returns the node's addresses that serve node ports. As in kube-proxy's nftables mode, loopback
/// addresses do not serve them.
pub(super) fn node_port_ips(
    addresses: impl IntoIterator<Item = IpAddr>,
) -> impl Iterator<Item = (IpFamily, ElementKey)> {
    let served = addresses.into_iter().filter(|address| !address.is_loopback());
    served.map(|address| (IpFamily::of(address), ElementKey::new(&[Field::Address(address)])))
}
