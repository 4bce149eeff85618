//! The chains and sets that belong to one service port: for session affinity and source ranges.
//! Names and rules are kube-proxy's.
//!
//! With affinity, each endpoint has a set of its clients. When an endpoint is removed, its set is
//! removed, so that its clients are no longer assigned.

use std::{net::SocketAddr, num::NonZeroU32, time::Duration};

use super::{
    lists::{external, short_circuit},
    names::{self, name},
    table::RuleSettings,
};
use crate::{
    kernel::nftables::{FieldType, Name, Rule, Selector, Set, SetKind, Statement, Verdict},
    model::{Frontend, FrontendKind, IpFamily, ResolvedPort, ServicePortName, TrafficPolicy},
};

/// The maximum number of clients of an endpoint, which is kube-proxy's. Each connection of a client
/// beyond it goes to a random endpoint.
const MAX_CLIENTS: u32 = 65535;
const ADDRESS: &[FieldType] = &[FieldType::Address];

/// A chain with its rules.
pub(super) type ChainRules = (Name, Vec<Rule>);

/// The chains and sets of a service port with affinity. A chain comes after the chains to which it
/// leads.
#[derive(Debug)]
pub(super) struct AffinityChains {
    pub(super) chains: Vec<ChainRules>,
    pub(super) sets: Vec<Set>,
    suffix: String,
}

impl AffinityChains {
    pub(super) fn new(
        service: &ServicePortName,
        port: &ResolvedPort,
        timeout: NonZeroU32,
        settings: &RuleSettings,
        family: IpFamily,
    ) -> Self {
        let mut this = Self { chains: Vec::new(), sets: Vec::new(), suffix: names::of_port(service) };
        let mut all: Vec<SocketAddr> = [&port.cluster_endpoints, &port.local_endpoints]
            .into_iter()
            .flatten()
            .map(|e| e.address)
            .collect();
        all.sort_unstable();
        all.dedup();
        for endpoint in all {
            this.add_endpoint(service, endpoint, timeout);
        }
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            let suffixes: Vec<String> =
                port.endpoints(policy).iter().map(|e| names::of_endpoint(service, e.address)).collect();
            if !suffixes.is_empty() {
                this.chains.push((this.endpoints(policy), select_endpoint(&suffixes)));
            }
        }
        this.add_external(port, settings, family);
        this
    }

    /// Returns the chain that selects an endpoint of a policy.
    pub(super) fn endpoints(&self, policy: TrafficPolicy) -> Name {
        selecting_chain(policy, &self.suffix)
    }

    /// Returns the chain for traffic from outside.
    pub(super) fn external(&self) -> Name {
        name("external", &self.suffix)
    }

    fn add_endpoint(&mut self, service: &ServicePortName, endpoint: SocketAddr, timeout: NonZeroU32) {
        let suffix = names::of_endpoint(service, endpoint);
        let timeout = Duration::from_secs(timeout.get().into());
        let clients = name(names::AFFINITY, &suffix);
        let kind = SetKind::Dynamic(timeout, MAX_CLIENTS);
        self.sets.push(Set { name: clients.clone(), key: ADDRESS, kind, comment: "" });
        let add_client = Rule::new([Statement::UpdateSet(clients, vec![Selector::Source])]);
        let translate = Rule::new([Statement::Protocol(service.protocol), Statement::Dnat(endpoint)]);
        self.chains.push((name("endpoint", &suffix), vec![add_client, translate]));
    }

    fn add_external(&mut self, port: &ResolvedPort, settings: &RuleSettings, family: IpFamily) {
        if port.frontends.iter().all(|frontend| frontend.kind == FrontendKind::ClusterIp) {
            return;
        }
        let has = |policy| !port.endpoints(policy).is_empty();
        let cluster = self.endpoints(TrafficPolicy::Cluster);
        let rules = match port.external_policy {
            TrafficPolicy::Cluster if has(TrafficPolicy::Cluster) => external(settings, cluster),
            TrafficPolicy::Cluster => return,
            TrafficPolicy::Local => {
                let inside = has(TrafficPolicy::Cluster).then(|| short_circuit(settings, family, &cluster));
                let local = Statement::Verdict(Verdict::Goto(self.endpoints(TrafficPolicy::Local)));
                let outside = has(TrafficPolicy::Local).then(|| Rule::new([local]));
                inside.into_iter().flatten().chain(outside).collect()
            }
        };
        self.chains.push((self.external(), rules));
    }
}

/// Returns the names of the chains that select an endpoint, whether the service port has them or
/// not.
pub(super) fn selecting(service: &ServicePortName) -> [Name; 2] {
    [TrafficPolicy::Cluster, TrafficPolicy::Local]
        .map(|policy| selecting_chain(policy, &names::of_port(service)))
}

fn selecting_chain(policy: TrafficPolicy, suffix: &str) -> Name {
    match policy {
        TrafficPolicy::Cluster => name("service", suffix),
        TrafficPolicy::Local => name("local", suffix),
    }
}

/// Returns rules that lead to the endpoint to which the client is assigned, or else to a random
/// one.
fn select_endpoint(suffixes: &[String]) -> Vec<Rule> {
    let to = |suffix: &String| Statement::Verdict(Verdict::Goto(name("endpoint", suffix)));
    let assigned = suffixes.iter().map(|suffix| {
        let is_client = Statement::InSet(vec![Selector::Source], name(names::AFFINITY, suffix));
        Rule::new([is_client, to(suffix)])
    });
    // Each endpoint gets one of N connections, where N is the number of remaining endpoints.
    let random = suffixes.iter().zip((1..=suffixes.len()).rev()).map(|(suffix, remaining)| match remaining {
        1 => Rule::new([to(suffix)]),
        n => Rule::new([Statement::OneIn(u32::try_from(n).unwrap_or(u32::MAX)), to(suffix)]),
    });
    assigned.chain(random).collect()
}

/// Returns the chain that drops traffic from outside the source ranges.
///
/// If the node is in a source range, connections from the load balancer's address are accepted too.
/// The node's own connections have this source address if it is on one of the node's links.
pub(super) fn firewall(
    service: &ServicePortName,
    port: &ResolvedPort,
    settings: &RuleSettings,
    family: IpFamily,
) -> ChainRules {
    let node = settings.primary_addresses[family as usize];
    let accepts_node = node.is_some_and(|node| port.source_ranges.iter().any(|range| range.contains(&node)));
    let own = port.frontends.iter().filter(|frontend| accepts_node && is_load_balancer(frontend));
    let own = own.filter_map(|frontend| frontend.address).map(ipnet::IpNet::from);
    let accept =
        |range| Rule::new([Statement::Source { range, inside: true }, Statement::Verdict(Verdict::Return)]);
    let rules = port.source_ranges.iter().copied().chain(own).map(accept);
    let drop = Rule::new([Statement::Verdict(Verdict::Drop)]);
    (name("firewall", &names::of_port(service)), rules.chain([drop]).collect())
}

pub(super) fn is_load_balancer(frontend: &Frontend) -> bool {
    frontend.kind == FrontendKind::LoadBalancerIp
}
