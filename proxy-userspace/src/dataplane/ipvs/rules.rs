//! The chains of kube-proxy's ipvs mode, and the jumps to them (`writeIptablesRules` of
//! `pkg/proxy/ipvs/proxier.go`). The rules match ipsets: a rule exists if its set has entries, so
//! that the number of rules does not grow with Services.

use std::{collections::BTreeSet, fmt};

use super::{
    node::{Node, PlanOptions},
    rule_features::RuleFeature,
    sets::Set,
};
use crate::{
    dataplane::iptables_text::{
        Chain, ChainRules, Content, FORWARD, Jump, MARK_MASQ, ModeChains, POSTROUTING, PROXY_FIREWALL,
        SERVICES, Table, add_forward_rules, add_postrouting_rules, mark_masq_rules, masquerades,
        port_unreachable,
    },
    model::IpFamily,
};

const LOAD_BALANCER: Chain = Chain::Fixed("KUBE-LOAD-BALANCER");
/// Packets to addresses of the node.
pub(super) const NODE_PORT: Chain = Chain::Fixed("KUBE-NODE-PORT");
const SOURCE_RANGES: Chain = Chain::Fixed("KUBE-SOURCE-RANGES-FIREWALL");
const IPVS_FILTER: Chain = Chain::Fixed("KUBE-IPVS-FILTER");
const IPVS_OUT_FILTER: Chain = Chain::Fixed("KUBE-IPVS-OUT-FILTER");

pub(super) const TABLES: [Table; 2] = [Table::Filter, Table::Nat];

pub(in crate::dataplane) const CHAINS: [(Table, Chain); 11] = [
    (Table::Filter, FORWARD),
    (Table::Filter, IPVS_FILTER),
    (Table::Filter, IPVS_OUT_FILTER),
    (Table::Filter, NODE_PORT),
    (Table::Filter, PROXY_FIREWALL),
    (Table::Filter, SOURCE_RANGES),
    (Table::Nat, LOAD_BALANCER),
    (Table::Nat, MARK_MASQ),
    (Table::Nat, NODE_PORT),
    (Table::Nat, POSTROUTING),
    (Table::Nat, SERVICES),
];

/// The chains and jumps of this mode.
pub(in crate::dataplane) static MODE: ModeChains = ModeChains {
    parse: |table, name| {
        let chain = CHAINS.iter().find(|(of, chain)| *of == table && chain.is_named(name));
        chain.map(|(_, chain)| *chain)
    },
    jumps: &JUMPS,
    content: Content::of_words,
};

/// Of the jumps in one built-in chain, each is inserted above those before it.
const JUMPS: [Jump; 9] = [
    Jump::new(Table::Filter, "INPUT", NODE_PORT, "kubernetes health check rules"),
    Jump::new(Table::Filter, "INPUT", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump::new(Table::Filter, "INPUT", IPVS_FILTER, "kubernetes ipvs access filter"),
    Jump::new(Table::Filter, "FORWARD", FORWARD, "kubernetes forwarding rules"),
    Jump::new(Table::Filter, "FORWARD", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump::new(Table::Filter, "OUTPUT", IPVS_OUT_FILTER, "kubernetes ipvs access filter"),
    Jump::new(Table::Nat, "OUTPUT", SERVICES, "kubernetes service portals"),
    Jump::new(Table::Nat, "PREROUTING", SERVICES, "kubernetes service portals"),
    Jump::new(Table::Nat, "POSTROUTING", POSTROUTING, "kubernetes postrouting rules"),
];

/// What Services change in the rules of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// The sets that have entries.
    pub(super) filled: BTreeSet<Set>,
    /// The rules of [`super::desired::Item::NodeDenied`].
    pub(super) denied: BTreeSet<String>,
}

impl Needs {
    pub(super) fn union(&self, other: &Self) -> Self {
        Self {
            filled: self.filled.union(&other.filled).copied().collect(),
            denied: self.denied.union(&other.denied).cloned().collect(),
        }
    }
}

/// Returns all chains of a family with their rules, in the order of [`CHAINS`].
pub(super) fn chains(
    family: IpFamily,
    options: &PlanOptions,
    node: &Node,
    needs: &Needs,
) -> Vec<(Table, ChainRules)> {
    let writer = RuleWriter { family, options, node, needs };
    let rules = |(table, chain)| {
        let mut rules = ChainRules::new(chain);
        writer.add_rules(table, &mut rules);
        (table, rules)
    };
    CHAINS.into_iter().map(rules).collect()
}

struct RuleWriter<'a> {
    family: IpFamily,
    options: &'a PlanOptions,
    node: &'a Node,
    needs: &'a Needs,
}

impl RuleWriter<'_> {
    fn add_rules(&self, table: Table, to: &mut ChainRules) {
        let mark = self.options.settings.masquerade_mark;
        match (table, to.chain) {
            (Table::Filter, FORWARD) => add_forward_rules(to, mark),
            (Table::Filter, IPVS_FILTER) => self.add_access_filter(to),
            (Table::Filter, IPVS_OUT_FILTER) => self.needs.denied.iter().for_each(|rule| to.add(rule)),
            (Table::Filter, NODE_PORT) => {
                let matches = self.commented_match(Set::HealthCheckNodePort, "dst");
                to.add(format_args!("{matches} -j ACCEPT"));
            }
            (Table::Filter, PROXY_FIREWALL) => {
                self.add_if_filled(to, Set::LoadBalancerFirewall, "", "dst,dst", SOURCE_RANGES);
            }
            (Table::Filter, SOURCE_RANGES) => {
                self.add_if_filled(to, Set::LoadBalancerSourceCidr, "", "dst,dst,src", "RETURN");
                self.add_if_filled(to, Set::LoadBalancerSourceIp, "", "dst,dst,src", "RETURN");
                to.add("-j DROP");
            }
            (Table::Nat, LOAD_BALANCER) => {
                self.add_if_filled(to, Set::LoadBalancerLocal, "", "dst,dst", "RETURN");
                to.add(format_args!("-j {MARK_MASQ}"));
            }
            (Table::Nat, MARK_MASQ) => *to = mark_masq_rules(mark),
            (Table::Nat, NODE_PORT) => self.add_node_ports(to),
            (Table::Nat, POSTROUTING) => {
                let ports = self.node.masquerade_ports;
                for (protocol, target) in masquerades(ports) {
                    self.add_if_filled(to, Set::LoopBack, protocol, "dst,dst,src", target);
                }
                add_postrouting_rules(to, mark, self.options.random_fully.contains(&self.family), ports);
            }
            (Table::Nat, SERVICES) => self.add_services(to),
            _ => {}
        }
    }

    fn has(&self, set: Set) -> bool {
        self.needs.filled.contains(&set)
    }

    fn set_match(&self, set: Set, directions: &str) -> String {
        format!("-m set --match-set {} {directions}", set.name(self.family))
    }

    fn commented_match(&self, set: Set, directions: &str) -> String {
        format!("-m comment --comment \"{}\" {}", set.comment(), self.set_match(set, directions))
    }

    /// Adds a rule if the set has entries. `before` stands before the match of the set.
    fn add_if_filled(
        &self,
        to: &mut ChainRules,
        set: Set,
        before: &str,
        directions: &str,
        target: impl fmt::Display,
    ) {
        if self.has(set) {
            to.add(format_args!("{before}{} -j {target}", self.commented_match(set, directions)));
        }
    }

    /// Refuses packets to the node's own ports at VIPs. The VIPs are addresses of the node, because
    /// they are on the dummy link.
    fn add_access_filter(&self, to: &mut ChainRules) {
        for set in [Set::LoadBalancer, Set::ClusterIp, Set::ExternalIp, Set::ExternalIpLocal] {
            to.add(format_args!("{} -j RETURN", self.set_match(set, "dst,dst")));
        }
        to.add(format_args!("{} -j RETURN", self.set_match(Set::HealthCheckNodePort, "dst")));
        to.add(format_args!(
            "-m conntrack --ctstate NEW {} -j REJECT --reject-with {}",
            self.set_match(Set::Addresses, "dst"),
            port_unreachable(self.family)
        ));
    }

    fn add_node_ports(&self, to: &mut ChainRules) {
        self.add_if_filled(to, Set::NodePortLocalTcp, "-p tcp ", "dst", "RETURN");
        self.add_if_filled(to, Set::NodePortTcp, "-p tcp ", "dst", MARK_MASQ);
        self.add_if_filled(to, Set::NodePortLocalUdp, "-p udp ", "dst", "RETURN");
        self.add_if_filled(to, Set::NodePortUdp, "-p udp ", "dst", MARK_MASQ);
        self.add_if_filled(to, Set::NodePortLocalSctp, "-p sctp ", "dst,dst", "RETURN");
        self.add_if_filled(to, Set::NodePortSctp, "-p sctp ", "dst,dst", MARK_MASQ);
    }

    fn add_services(&self, to: &mut ChainRules) {
        let loopback = if self.family == IpFamily::V4 { "127.0.0.0/8" } else { "::1/128" };
        to.add(format_args!("-s {loopback} -j RETURN"));
        self.add_if_filled(to, Set::LoadBalancer, "", "dst,dst", LOAD_BALANCER);
        self.add_cluster_ips(to);
        self.add_if_filled(to, Set::ExternalIp, "", "dst,dst", MARK_MASQ);
        self.add_external_ips(to, Set::ExternalIp);
        self.add_external_ips(to, Set::ExternalIpLocal);
        to.add(format_args!("-m addrtype --dst-type LOCAL -j {NODE_PORT}"));
        // Keeps rules of other programs from packets to virtual servers. These rules come last.
        for set in [Set::ClusterIp, Set::LoadBalancer] {
            if self.has(set) {
                to.add(format_args!("{} -j ACCEPT", self.set_match(set, "dst,dst")));
            }
        }
    }

    /// Without a local detector, packets of the node that have a cluster IP as source are
    /// masqueraded too. They get it because cluster IPs are on the dummy link.
    fn add_cluster_ips(&self, to: &mut ChainRules) {
        let (before, directions) = match self.node.not_local.get(&self.family) {
            _ if self.node.masquerade_all => (String::new(), "dst,dst"),
            Some(not_local) => (format!("{not_local} "), "dst,dst"),
            None => (String::new(), "src,dst"),
        };
        self.add_if_filled(to, Set::ClusterIp, &before, directions, MARK_MASQ);
    }

    /// Accepts packets from outside, and packets to addresses of this node.
    fn add_external_ips(&self, to: &mut ChainRules, set: Set) {
        let from_outside = "-m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL";
        if self.has(set) {
            let matches = self.commented_match(set, "dst,dst");
            if !self.options.refused.contains_key(&(self.family, RuleFeature::PhysdevMatch)) {
                to.add(format_args!("{matches} {from_outside} -j ACCEPT"));
            }
            to.add(format_args!("{matches} -m addrtype --dst-type LOCAL -j ACCEPT"));
        }
    }
}
