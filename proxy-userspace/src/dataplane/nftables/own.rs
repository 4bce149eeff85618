//! Chains and sets that a Service has to itself, named and built as kube-proxy's: source ranges, and affinity by client.
//!
//! With affinity each endpoint has a set of its clients, so that a client whose endpoint leaves is forgotten with it.

use std::{net::SocketAddr, num::NonZeroU32, time::Duration};

use super::{
    lists::{external, short_circuit},
    names::{self, name},
    table::Basis,
};
use crate::{
    kernel::nftables::{Family, FieldType, Name, Rule, Selector, Set, SetKind, Statement, Verdict},
    model::{Frontend, FrontendKind, ResolvedPort, ServicePortName, TrafficPolicy},
};

/// As kube-proxy's; a client more than these is placed by chance each time.
const CLIENTS: u32 = 65535;
const ADDRESS: &[FieldType] = &[FieldType::Address];

/// A chain with its rules.
pub(super) type ChainRules = (Name, Vec<Rule>);

/// What a service port with affinity has to itself: chains, those that others lead to first, and sets.
#[derive(Debug)]
pub(super) struct Sticky {
    pub(super) chains: Vec<ChainRules>,
    pub(super) sets: Vec<Set>,
    ending: String,
}

impl Sticky {
    pub(super) fn new(
        service: &ServicePortName,
        protocol: u8,
        port: &ResolvedPort,
        timeout: NonZeroU32,
        basis: &Basis,
        family: Family,
    ) -> Self {
        let mut this = Self { chains: Vec::new(), sets: Vec::new(), ending: names::of_port(service) };
        let mut all: Vec<SocketAddr> = [&port.cluster_endpoints, &port.local_endpoints]
            .into_iter()
            .flatten()
            .map(|e| e.address)
            .collect();
        all.sort_unstable();
        all.dedup();
        for endpoint in all {
            this.add_endpoint(service, protocol, endpoint, timeout);
        }
        for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
            let endings: Vec<String> =
                port.endpoints(policy).iter().map(|e| names::of_endpoint(service, e.address)).collect();
            if !endings.is_empty() {
                this.chains.push((this.list(policy), choose(&endings)));
            }
        }
        this.add_external(port, basis, family);
        this
    }

    /// The chain that leads to one of the endpoints of a policy.
    pub(super) fn list(&self, policy: TrafficPolicy) -> Name {
        match policy {
            TrafficPolicy::Cluster => name("service", &self.ending),
            TrafficPolicy::Local => name("local", &self.ending),
        }
    }

    /// The chain for traffic from outside.
    pub(super) fn external(&self) -> Name {
        name("external", &self.ending)
    }

    fn add_endpoint(
        &mut self,
        service: &ServicePortName,
        protocol: u8,
        endpoint: SocketAddr,
        timeout: NonZeroU32,
    ) {
        let ending = names::of_endpoint(service, endpoint);
        let timeout = Duration::from_secs(timeout.get().into());
        let clients = name("affinity", &ending);
        self.sets.push(Set {
            name: clients.clone(),
            key: ADDRESS,
            kind: SetKind::Dynamic(timeout, CLIENTS),
            comment: "",
        });
        let remember = Rule::new([Statement::UpdateSet(clients, vec![Selector::Source])]);
        let translate = Rule::new([Statement::Protocol(protocol), Statement::Dnat(endpoint)]);
        self.chains.push((name("endpoint", &ending), vec![remember, translate]));
    }

    fn add_external(&mut self, port: &ResolvedPort, basis: &Basis, family: Family) {
        if port.frontends.iter().all(|frontend| frontend.kind == FrontendKind::ClusterIp) {
            return;
        }
        let has = |policy| !port.endpoints(policy).is_empty();
        let cluster = self.list(TrafficPolicy::Cluster);
        let rules = match port.external_policy {
            TrafficPolicy::Cluster if has(TrafficPolicy::Cluster) => external(basis, cluster),
            TrafficPolicy::Cluster => return,
            TrafficPolicy::Local => {
                let inside = has(TrafficPolicy::Cluster).then(|| short_circuit(basis, family, &cluster));
                let local = self.list(TrafficPolicy::Local);
                let outside = has(TrafficPolicy::Local).then(|| goto(local));
                inside.into_iter().flatten().chain(outside).collect()
            }
        };
        self.chains.push((self.external(), rules));
    }
}

fn goto(chain: Name) -> Rule {
    Rule::new([Statement::Verdict(Verdict::Goto(chain))])
}

/// The endpoint that knows the client, else one by chance.
fn choose(endings: &[String]) -> Vec<Rule> {
    let to = |ending: &String| Statement::Verdict(Verdict::Goto(name("endpoint", ending)));
    let known = endings.iter().map(|ending| {
        let is_client = Statement::InSet(vec![Selector::Source], name("affinity", ending));
        Rule::new([is_client, to(ending)])
    });
    // One in all that are left, from the first to the last.
    let chosen = endings.iter().zip((1..=endings.len()).rev()).map(|(ending, left)| match left {
        1 => Rule::new([to(ending)]),
        left => Rule::new([Statement::OneIn(u32::try_from(left).unwrap_or(u32::MAX)), to(ending)]),
    });
    known.chain(chosen).collect()
}

/// The chain that drops what is in none of the source ranges. Where the node is in one, its own connections are let in also with
/// the address of the load balancer as their source, which they have where it is on a link of the node.
pub(super) fn firewall(
    service: &ServicePortName,
    port: &ResolvedPort,
    basis: &Basis,
    family: Family,
) -> ChainRules {
    let node = basis.primary[family as usize];
    let lets_node_in = node.is_some_and(|node| port.source_ranges.iter().any(|range| range.contains(&node)));
    let own = port.frontends.iter().filter(|frontend| lets_node_in && is_load_balancer(frontend));
    let own = own.filter_map(|frontend| frontend.address).map(ipnet::IpNet::from);
    let let_in =
        |range| Rule::new([Statement::Source { range, inside: true }, Statement::Verdict(Verdict::Return)]);
    let rules = port.source_ranges.iter().copied().chain(own).map(let_in);
    let drop = Rule::new([Statement::Verdict(Verdict::Drop)]);
    (name("firewall", &names::of_port(service)), rules.chain([drop]).collect())
}

pub(super) fn is_load_balancer(frontend: &Frontend) -> bool {
    frontend.kind == FrontendKind::LoadBalancerIp
}
