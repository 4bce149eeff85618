//! The chains that exist independent of Services: base chains with kube-proxy's names and
//! priorities, and the chains to which these lead.

use std::net::IpAddr;

use ipnet::IpNet;
use libc::{
    NF_INET_FORWARD, NF_INET_LOCAL_IN, NF_INET_LOCAL_OUT, NF_INET_POST_ROUTING, NF_INET_PRE_ROUTING, c_int,
};

use super::{
    lists::{self, EndpointList},
    sets::{DESTINATION, DESTINATION_PORT, SharedSet},
};
use crate::{
    kernel::nftables::{Chain, Hook, Rule, Selector, Statement, Verdict},
    model::{IpFamily, LocalTrafficDetector, NodeView, PortRange, Protocol},
};

/// The name of the tables.
pub const TABLE: &str = "kube-proxy";
/// The chains that always exist in shunt's tables and that kube-proxy does not have, besides those
/// of [endpoint lists](lists).
pub(super) const OWN_CHAINS: [&str; 5] =
    ["external", "policy-local", "nodeport-external", "nodeport-policy-local", "nodeports"];
/// The comment of the tables.
pub(super) const COMMENT: &str = "rules for kube-proxy";

/// All inputs of rules that are not Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuleSettings {
    /// The bit of a packet's mark that requests masquerading.
    pub(super) masquerade_mark: u32,
    pub(super) masquerade_all: bool,
    /// The source ports of masqueraded packets; `None` for any.
    pub(super) masquerade_ports: Option<PortRange>,
    pub(super) detector: LocalTrafficDetector,
    /// The ranges of cluster IPs.
    pub(super) service_cidrs: Vec<IpNet>,
    /// The node's own address, by family: V4 and V6.
    pub(super) primary_addresses: [Option<IpAddr>; 2],
}

impl RuleSettings {
    pub(super) fn new(masquerade_mark: u32, node: &NodeView) -> Self {
        Self {
            masquerade_mark,
            masquerade_all: node.masquerade_all,
            masquerade_ports: node.netfilter_ports(),
            detector: node.local_detector.clone(),
            service_cidrs: node.service_cidrs.clone(),
            primary_addresses: IpFamily::ALL.map(|family| node.primary_addresses.get(&family).copied()),
        }
    }

    /// Returns the statement that matches packets from this node's pods, or from others. Returns
    /// `None` if the detector cannot distinguish them.
    pub(super) fn is_from_pod(&self, family: IpFamily, inside: bool) -> Option<Statement> {
        match &self.detector {
            LocalTrafficDetector::None => None,
            LocalTrafficDetector::Cidrs(cidrs) => {
                let range = cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family)?;
                Some(Statement::Source { range: *range, inside })
            }
            LocalTrafficDetector::BridgeInterface(name) => {
                Some(Statement::InputInterface { name: (&**name).into(), inside })
            }
            LocalTrafficDetector::InterfaceNamePrefix(prefix) => {
                Some(Statement::InputInterface { name: format!("{prefix}*").into(), inside })
            }
        }
    }

    fn cluster_ip_masquerading(&self, family: IpFamily) -> Option<Rule> {
        let to_cluster_ip = address_in(SharedSet::ClusterIps);
        let mark = Statement::SetMark(self.masquerade_mark);
        if self.masquerade_all {
            let rule = Rule::new([to_cluster_ip, mark]);
            return Some(rule.comment("masquerade all clusterIP traffic"));
        }
        let outside = self.is_from_pod(family, false)?;
        let rule = Rule::new([to_cluster_ip, outside, mark]);
        Some(rule.comment("masquerade clusterIP traffic from outside cluster"))
    }
}

/// Returns the chains that always exist, with their rules. A chain comes after the chains to which
/// it leads.
///
/// The priorities are kube-proxy's, so that other programs can order themselves around them.
/// Packets are refused in filter chains, after DNAT found no endpoint: the answer of a nat chain
/// would not belong to the connection.
pub(super) fn chains(settings: &RuleSettings, family: IpFamily) -> Vec<(Chain, Vec<Rule>)> {
    let mut chains = vec![
        regular("firewall-check", vec![Rule::new([by_destination(SharedSet::FirewallIps)])]),
        regular(
            "service-endpoints-check",
            vec![Rule::new([by_destination(SharedSet::NoEndpointServices), Statement::Reject])],
        ),
        regular("nodeport-endpoints-check", vec![node_port_without_endpoints()]),
        regular("cluster-ips-check", cluster_ips_check(settings, family)),
    ];
    chains.extend(external_chains(settings, family));
    chains.push(regular("nodeports", node_ports()));
    chains.push(regular("services", services(settings, family)));
    chains.push(regular("masquerading", masquerading(settings)));
    let new = |to: &str| Rule::new([Statement::StateNew, jump(to)]);
    let all = |to: &str| vec![Rule::new([jump(to)])];
    let firewall = || vec![new("firewall-check")];
    let input = vec![new("nodeport-endpoints-check"), new("service-endpoints-check")];
    let forward_and_output = || vec![new("service-endpoints-check"), new("cluster-ips-check")];
    chains.extend([
        base("filter-prerouting-pre-dnat", "filter", NF_INET_PRE_ROUTING, -110, firewall()),
        base("filter-output-pre-dnat", "filter", NF_INET_LOCAL_OUT, -110, firewall()),
        base("filter-input", "filter", NF_INET_LOCAL_IN, 0, input),
        base("filter-forward", "filter", NF_INET_FORWARD, 0, forward_and_output()),
        base("filter-output", "filter", NF_INET_LOCAL_OUT, 0, forward_and_output()),
        base("nat-prerouting", "nat", NF_INET_PRE_ROUTING, -100, all("services")),
        base("nat-output", "nat", NF_INET_LOCAL_OUT, -100, all("services")),
        base("nat-postrouting", "nat", NF_INET_POST_ROUTING, 100, all("masquerading")),
    ]);
    chains
}

fn regular(name: &str, rules: Vec<Rule>) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: None }, rules)
}

fn base(
    name: &str,
    kind: &'static str,
    number: c_int,
    priority: c_int,
    rules: Vec<Rule>,
) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: Some(Hook { kind, number, priority }) }, rules)
}

fn jump(to: &str) -> Statement {
    Statement::Verdict(Verdict::Jump(to.into()))
}

fn goto(chain: &str) -> Statement {
    Statement::Verdict(Verdict::Goto(chain.into()))
}

fn by_destination(map: SharedSet) -> Statement {
    Statement::VerdictMap(DESTINATION.into(), map.name())
}

fn address_in(set: SharedSet) -> Statement {
    Statement::InSet(vec![Selector::Destination], set.name())
}

/// The element's verdict drops the packet, or continues with the rule, which refuses it.
fn node_port_without_endpoints() -> Rule {
    Rule::new([
        address_in(SharedSet::NodePortIps),
        Statement::VerdictMap(DESTINATION_PORT.into(), SharedSet::NoEndpointNodePorts.name()),
        Statement::Reject,
    ])
}

/// Returns the rules for packets that were not translated. A packet to an unknown port of a cluster
/// IP is refused. A packet to an unallocated cluster IP is dropped, because its Service may just be
/// starting.
fn cluster_ips_check(settings: &RuleSettings, family: IpFamily) -> Vec<Rule> {
    let invalid_port = Rule::new([address_in(SharedSet::ClusterIps), Statement::Reject]);
    let ranges = settings.service_cidrs.iter().filter(|range| IpFamily::of(range.addr()) == family);
    let drop = |range: &IpNet| {
        let rule = Rule::new([Statement::Destination(*range), Statement::Verdict(Verdict::Drop)]);
        rule.comment("Drop traffic to unallocated ClusterIPs")
    };
    let invalid_port = invalid_port.comment("Reject traffic to invalid ports of ClusterIPs");
    [invalid_port].into_iter().chain(ranges.map(drop)).collect()
}

/// Returns the rules that lead VIPs to their chains. Cluster IPs come last, because another kind of
/// frontend can have the same address.
fn services(settings: &RuleSettings, family: IpFamily) -> Vec<Rule> {
    let masquerading = settings.cluster_ip_masquerading(family);
    let list = EndpointList::Services;
    let rules = [
        Rule::new([by_destination(SharedSet::ServiceIps)]),
        Rule::new([list.is_in(SharedSet::ExternalServices), goto("external")]),
        Rule::new([list.is_in(SharedSet::PolicyLocalServices), goto("policy-local")]),
        Rule::new([address_in(SharedSet::ClusterIps), goto(list.chain())]),
        Rule::new([address_in(SharedSet::NodePortIps), goto("nodeports")]),
    ];
    masquerading.into_iter().chain(rules).collect()
}

fn node_ports() -> Vec<Rule> {
    let list = EndpointList::NodePorts;
    vec![
        Rule::new([Statement::VerdictMap(DESTINATION_PORT.into(), SharedSet::ServiceNodePorts.name())]),
        Rule::new([list.is_in(SharedSet::ExternalNodePorts), goto("nodeport-external")]),
        Rule::new([list.is_in(SharedSet::PolicyLocalNodePorts), goto("nodeport-policy-local")]),
    ]
}

/// Returns the chains for external frontends, before an endpoint is selected.
fn external_chains(settings: &RuleSettings, family: IpFamily) -> Vec<(Chain, Vec<Rule>)> {
    let of = |all: EndpointList, local: EndpointList, external: &str, policy_local: &str| {
        let mut rules = lists::short_circuit(settings, family, &all.chain().into());
        rules.push(Rule::new([goto(local.chain())]));
        let external = regular(external, lists::external(settings, all.chain().into()));
        [external, regular(policy_local, rules)]
    };
    let addresses = of(EndpointList::Services, EndpointList::LocalServices, "external", "policy-local");
    let (all, local) = (EndpointList::NodePorts, EndpointList::LocalNodePorts);
    let ports = of(all, local, "nodeport-external", "nodeport-policy-local");
    addresses.into_iter().chain(ports).collect()
}

/// Returns the rules that masquerade. They remove the mark, because the packet can pass here again,
/// for example in a tunnel.
fn masquerading(settings: &RuleSettings) -> Vec<Rule> {
    let bit = settings.masquerade_mark;
    let hairpin =
        vec![Selector::Source, Selector::Destination, Selector::Protocol, Selector::DestinationPort];
    let is_hairpin = [Statement::StatusDnat, Statement::InSet(hairpin, SharedSet::HairpinConnections.name())];
    let masquerades = masquerades(settings.masquerade_ports);
    let marked = masquerades.iter().map(|(protocol, masquerade)| {
        let statements = [Statement::HasMark(bit)].into_iter().chain(protocol.clone());
        Rule::new(statements.chain([Statement::ToggleMark(bit), masquerade.clone()]))
    });
    let hairpins = masquerades.iter().map(|(protocol, masquerade)| {
        Rule::new(is_hairpin.iter().cloned().chain(protocol.clone()).chain([masquerade.clone()]))
    });
    marked.chain(hairpins).collect()
}

/// Returns the statements that masquerade, each with the protocol that it is for; `None` for all.
/// Only protocols with ports have a range of them.
fn masquerades(ports: Option<PortRange>) -> Vec<(Option<Statement>, Statement)> {
    let of_ports = |PortRange { first, last }| {
        let to = |protocol| (Some(Statement::Protocol(protocol)), Statement::MasqueradeTo { first, last });
        [Protocol::Tcp, Protocol::Udp].map(to)
    };
    ports.into_iter().flat_map(of_ports).chain([(None, Statement::Masquerade)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chains that a version of kube-proxy has too.
    const KUBE_PROXYS: [&str; 14] = [
        "cluster-ips-check",
        "filter-forward",
        "filter-input",
        "filter-output",
        "filter-output-pre-dnat",
        "filter-prerouting-pre-dnat",
        "firewall-check",
        "masquerading",
        "nat-output",
        "nat-postrouting",
        "nat-prerouting",
        "nodeport-endpoints-check",
        "service-endpoints-check",
        "services",
    ];

    #[test]
    fn every_chain_is_either_kube_proxys_or_shunts_own() {
        let mut known = [&KUBE_PROXYS[..], &OWN_CHAINS].concat();
        let chains = chains(&RuleSettings::new(0, &NodeView::default()), IpFamily::V4);
        let mut names: Vec<&str> = chains.iter().map(|(chain, _)| &*chain.name).collect();
        known.sort_unstable();
        names.sort_unstable();
        assert_eq!(names, known);
    }
}
