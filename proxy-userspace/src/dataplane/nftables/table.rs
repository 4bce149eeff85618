//! What the table has whatever the Services: base chains with kube-proxy's names and priorities, and the chains that these
//! lead to.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use libc::{
    NF_INET_FORWARD, NF_INET_LOCAL_IN, NF_INET_LOCAL_OUT, NF_INET_POST_ROUTING, NF_INET_PRE_ROUTING, c_int,
};

use super::{
    lists::{self, List},
    sets::{Base, DESTINATION, DESTINATION_PORT},
};
use crate::{
    kernel::nftables::{Chain, Family, Hook, Rule, Selector, Statement, Verdict},
    model::{IpFamily, LocalTrafficDetector, NodeView},
};

/// The name of the tables.
pub const TABLE: &str = "kube-proxy";
/// What people read of them.
pub(super) const COMMENT: &str = "rules for kube-proxy";

/// What rules depend on besides Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Basis {
    /// The bit of a packet's mark that has it masqueraded.
    pub(super) masquerade: u32,
    pub(super) masquerade_all: bool,
    pub(super) detector: LocalTrafficDetector,
    /// Where addresses of Services are taken from.
    pub(super) service_cidrs: Vec<IpNet>,
    /// The node's own address, by family: V4 and V6.
    pub(super) primary: [Option<IpAddr>; 2],
}

impl Basis {
    pub(super) fn new(masquerade: u32, node: &NodeView) -> Self {
        Self {
            masquerade,
            masquerade_all: node.masquerade_all,
            detector: node.local_detector.clone(),
            service_cidrs: node.service_cidrs.clone(),
            primary: IpFamily::ALL.map(|family| node.primary_addresses.get(&family).copied()),
        }
    }

    /// That the packet comes from a pod of this node, or does not; none where that cannot be told.
    pub(super) fn is_from_pod(&self, family: Family, inside: bool) -> Option<Statement> {
        match &self.detector {
            LocalTrafficDetector::None => None,
            LocalTrafficDetector::Cidrs(cidrs) => {
                let range = cidrs.iter().find(|cidr| Family::of(cidr.addr()) == family)?;
                Some(Statement::Source { range: *range, inside })
            }
            LocalTrafficDetector::BridgeInterface(name) => {
                Some(Statement::InputInterface { name: Arc::clone(name), inside })
            }
            LocalTrafficDetector::InterfaceNamePrefix(prefix) => {
                Some(Statement::InputInterface { name: format!("{prefix}*").into(), inside })
            }
        }
    }

    fn cluster_ip_masquerading(&self, family: Family) -> Option<Rule> {
        let to_cluster_ip = Statement::InSet(vec![Selector::Destination], Base::ClusterIps.name());
        let mark = Statement::SetMark(self.masquerade);
        if self.masquerade_all {
            let rule = Rule::new([to_cluster_ip, mark]);
            return Some(rule.comment("masquerade all clusterIP traffic"));
        }
        let outside = self.is_from_pod(family, false)?;
        let rule = Rule::new([to_cluster_ip, outside, mark]);
        Some(rule.comment("masquerade clusterIP traffic from outside cluster"))
    }
}

/// The chains that are always there, those that others lead to first, with their rules.
///
/// Priorities are kube-proxy's: others order themselves around them. What is refused is so in filter chains, after
/// translation found nothing to translate to, as an answer of a nat chain would not belong to the connection.
pub(super) fn chains(basis: &Basis, family: Family) -> Vec<(Chain, Vec<Rule>)> {
    let mut chains = vec![
        helper("firewall-check", vec![Rule::new([by_address(Base::FirewallIps)])]),
        helper(
            "service-endpoints-check",
            vec![Rule::new([by_address(Base::NoEndpointServices), Statement::Reject])],
        ),
        helper("nodeport-endpoints-check", vec![node_port_without_endpoints()]),
        helper("cluster-ips-check", cluster_ips_check(basis, family)),
    ];
    chains.extend(kinds(basis, family));
    chains.push(helper("nodeports", node_ports()));
    chains.push(helper("services", services(basis, family)));
    chains.push(helper("masquerading", masquerading(basis)));
    let new = |to: &str| Rule::new([Statement::StateNew, jump(to)]);
    let all = |to: &str| Rule::new([jump(to)]);
    chains.extend([
        base("filter-prerouting-pre-dnat", "filter", NF_INET_PRE_ROUTING, -110, vec![new("firewall-check")]),
        base("filter-output-pre-dnat", "filter", NF_INET_LOCAL_OUT, -110, vec![new("firewall-check")]),
        base(
            "filter-input",
            "filter",
            NF_INET_LOCAL_IN,
            0,
            vec![new("nodeport-endpoints-check"), new("service-endpoints-check")],
        ),
        base(
            "filter-forward",
            "filter",
            NF_INET_FORWARD,
            0,
            vec![new("service-endpoints-check"), new("cluster-ips-check")],
        ),
        base(
            "filter-output",
            "filter",
            NF_INET_LOCAL_OUT,
            0,
            vec![new("service-endpoints-check"), new("cluster-ips-check")],
        ),
        base("nat-prerouting", "nat", NF_INET_PRE_ROUTING, -100, vec![all("services")]),
        base("nat-output", "nat", NF_INET_LOCAL_OUT, -100, vec![all("services")]),
        base("nat-postrouting", "nat", NF_INET_POST_ROUTING, 100, vec![all("masquerading")]),
    ]);
    chains
}

fn helper(name: &str, rules: Vec<Rule>) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: None, comment: "" }, rules)
}

fn base(
    name: &str,
    kind: &'static str,
    number: c_int,
    priority: c_int,
    rules: Vec<Rule>,
) -> (Chain, Vec<Rule>) {
    (Chain { name: name.into(), hook: Some(Hook { kind, number, priority }), comment: "" }, rules)
}

fn jump(to: &str) -> Statement {
    Statement::Verdict(Verdict::Jump(to.into()))
}

fn by_address(map: Base) -> Statement {
    Statement::VerdictMap(DESTINATION.into(), map.name())
}

/// The element says to drop the packet, or to go on with the rule.
fn node_port_without_endpoints() -> Rule {
    Rule::new([
        Statement::InSet(vec![Selector::Destination], Base::NodePortIps.name()),
        Statement::VerdictMap(DESTINATION_PORT.into(), Base::NoEndpointNodePorts.name()),
        Statement::Reject,
    ])
}

/// What gets here was translated nowhere: to a port that no Service has is refused, to an address that none has dropped, since it may
/// be one that is just being made.
fn cluster_ips_check(basis: &Basis, family: Family) -> Vec<Rule> {
    let to_cluster_ip = Statement::InSet(vec![Selector::Destination], Base::ClusterIps.name());
    let invalid_port = Rule::new([to_cluster_ip, Statement::Reject]);
    let of_family = basis.service_cidrs.iter().filter(|range| Family::of(range.addr()) == family);
    let drop = |range: &IpNet| {
        let rule = Rule::new([Statement::Destination(*range), Statement::Verdict(Verdict::Drop)]);
        rule.comment("Drop traffic to unallocated ClusterIPs")
    };
    let invalid_port = invalid_port.comment("Reject traffic to invalid ports of ClusterIPs");
    [invalid_port].into_iter().chain(of_family.map(drop)).collect()
}

/// What the addresses of a Service lead to, cluster IPs last, since others may be the same.
fn services(basis: &Basis, family: Family) -> Vec<Rule> {
    let masquerading = basis.cluster_ip_masquerading(family);
    let to = |set: Base| Statement::InSet(vec![Selector::Destination], set.name());
    let rules = [
        Rule::new([by_address(Base::ServiceIps)]),
        Rule::new([List::Services.is_in(Base::ExternalServices), goto("external")]),
        Rule::new([List::Services.is_in(Base::PolicyLocalServices), goto("policy-local")]),
        Rule::new([to(Base::ClusterIps), goto(List::Services.chain())]),
        Rule::new([to(Base::NodePortIps), goto("nodeports")]),
    ];
    masquerading.into_iter().chain(rules).collect()
}

fn node_ports() -> Vec<Rule> {
    vec![
        Rule::new([Statement::VerdictMap(DESTINATION_PORT.into(), Base::ServiceNodePorts.name())]),
        Rule::new([List::NodePorts.is_in(Base::ExternalNodePorts), goto("nodeport-external")]),
        Rule::new([List::NodePorts.is_in(Base::PolicyLocalNodePorts), goto("nodeport-policy-local")]),
    ]
}

/// What becomes of traffic from outside before an endpoint is chosen.
fn kinds(basis: &Basis, family: Family) -> Vec<(Chain, Vec<Rule>)> {
    let of = |all: List, local: List, external: &str, policy_local: &str| {
        let mut rules = lists::short_circuit(basis, family, &all.chain().into());
        rules.push(Rule::new([goto(local.chain())]));
        let external = helper(external, lists::external(basis, all.chain().into()));
        [external, helper(policy_local, rules)]
    };
    let addresses = of(List::Services, List::LocalServices, "external", "policy-local");
    let ports = of(List::NodePorts, List::LocalNodePorts, "nodeport-external", "nodeport-policy-local");
    addresses.into_iter().chain(ports).collect()
}

fn goto(chain: &str) -> Statement {
    Statement::Verdict(Verdict::Goto(chain.into()))
}

/// The mark is taken off, since the packet may pass here again, as when it is put into a tunnel.
fn masquerading(basis: &Basis) -> Vec<Rule> {
    let bit = basis.masquerade;
    let hairpin =
        vec![Selector::Source, Selector::Destination, Selector::Protocol, Selector::DestinationPort];
    vec![
        Rule::new([Statement::HasMark(bit), Statement::ToggleMark(bit), Statement::Masquerade]),
        Rule::new([
            Statement::StatusDnat,
            Statement::InSet(hairpin, Base::HairpinConnections.name()),
            Statement::Masquerade,
        ]),
    ]
}
