//! The chains of upstream's ipvs mode, and the rules that lead to them (`writeIptablesRules` of `pkg/proxy/ipvs/proxier.go`). They
//! match by sets, so that their number does not depend on Services: a rule is there where its set has entries.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    node::{Node, PlanOptions},
    sets::Set,
};
use crate::model::IpFamily;

/// A table of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    /// What drops and refuses.
    Filter,
    /// What masquerades.
    Nat,
}

impl Table {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::Filter, Self::Nat];

    /// iptables' word for it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
        }
    }
}

/// Where packets to Services go first.
pub(super) const SERVICES: &str = "KUBE-SERVICES";
const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
/// What is for an address of the node.
pub(super) const NODE_PORT: &str = "KUBE-NODE-PORT";
/// Marks what is to be masqueraded.
pub(super) const MARK_MASQ: &str = "KUBE-MARK-MASQ";
const POSTROUTING: &str = "KUBE-POSTROUTING";
const FORWARD: &str = "KUBE-FORWARD";
const PROXY_FIREWALL: &str = "KUBE-PROXY-FIREWALL";
const SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";
const IPVS_FILTER: &str = "KUBE-IPVS-FILTER";
const IPVS_OUT_FILTER: &str = "KUBE-IPVS-OUT-FILTER";

/// All chains, by table.
pub(super) const CHAINS: [(Table, &str); 11] = [
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

/// A rule of a built-in chain that leads to one of ours: table, chain, comment, ours. Of one chain, the first is to come last
/// among those that are put first.
pub(super) const JUMPS: [(Table, &str, &str, &str); 9] = [
    (Table::Filter, "INPUT", "kubernetes health check rules", NODE_PORT),
    (Table::Filter, "INPUT", "kube-proxy firewall rules", PROXY_FIREWALL),
    (Table::Filter, "INPUT", "kubernetes ipvs access filter", IPVS_FILTER),
    (Table::Filter, "FORWARD", "kubernetes forwarding rules", FORWARD),
    (Table::Filter, "FORWARD", "kube-proxy firewall rules", PROXY_FIREWALL),
    (Table::Filter, "OUTPUT", "kubernetes ipvs access filter", IPVS_OUT_FILTER),
    (Table::Nat, "OUTPUT", "kubernetes service portals", SERVICES),
    (Table::Nat, "PREROUTING", "kubernetes service portals", SERVICES),
    (Table::Nat, "POSTROUTING", "kubernetes postrouting rules", POSTROUTING),
];

/// What a jump's rule is after the chain's name.
pub(super) fn jump_rule((_, _, comment, to): (Table, &str, &str, &str)) -> String {
    format!("-m comment --comment \"{comment}\" -j {to}")
}

/// Whether a chain of a table is one of ours.
pub(in crate::dataplane) fn has_chain(table: &str, chain: &str) -> bool {
    CHAINS.iter().any(|(of, name)| of.name() == table && *name == chain)
}

/// Whether a rule of a built-in chain is one of our jumps.
pub(in crate::dataplane) fn has_jump(table: &str, from: &str, rule: &str) -> bool {
    jump(table, from, rule).is_some()
}

/// Which of the jumps a rule of a built-in chain is, by its place in [`JUMPS`].
pub(super) fn jump(table: &str, from: &str, rule: &str) -> Option<usize> {
    let words = words(rule);
    JUMPS
        .iter()
        .position(|jump| jump.0.name() == table && jump.1 == from && self::words(&jump_rule(*jump)) == words)
}

/// The rules of a chain without its name, in the words of iptables-save.
pub(super) type Lines = Vec<String>;

/// What rules depend on that Services change, in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// Sets with entries.
    pub(super) filled: BTreeSet<Set>,
    /// Rules of [`super::desired::Item::NodeDenied`].
    pub(super) denied: BTreeSet<String>,
}

impl Needs {
    /// What either needs.
    pub(super) fn union(&self, other: &Self) -> Self {
        Self {
            filled: self.filled.union(&other.filled).copied().collect(),
            denied: self.denied.union(&other.denied).cloned().collect(),
        }
    }
}

/// All chains of a family with their rules.
pub(super) fn chains(
    family: IpFamily,
    options: &PlanOptions,
    node: &Node,
    needs: &Needs,
) -> BTreeMap<(Table, &'static str), Lines> {
    let writing = Writing { family, options, node, needs };
    let lines = |(table, chain)| ((table, chain), writing.chain(table, chain));
    CHAINS.into_iter().map(lines).collect()
}

struct Writing<'a> {
    family: IpFamily,
    options: &'a PlanOptions,
    node: &'a Node,
    needs: &'a Needs,
}

impl Writing<'_> {
    fn chain(&self, table: Table, chain: &str) -> Lines {
        match (table, chain) {
            (Table::Filter, FORWARD) => self.forward(),
            (Table::Filter, IPVS_FILTER) => self.access_filter(),
            (Table::Filter, IPVS_OUT_FILTER) => self.needs.denied.iter().cloned().collect(),
            (Table::Filter, NODE_PORT) => {
                let set = Set::HealthCheckNodePort;
                vec![format!("{} -j ACCEPT", self.commented_match(set, "dst"))]
            }
            (Table::Filter, PROXY_FIREWALL) => {
                self.each(&[(Set::LoadBalancerFirewall, "", "dst,dst", SOURCE_RANGES)])
            }
            (Table::Filter, SOURCE_RANGES) => self.source_ranges(),
            (Table::Nat, LOAD_BALANCER) => {
                let mut lines = self.each(&[(Set::LoadBalancerLocal, "", "dst,dst", "RETURN")]);
                lines.push(format!("-j {MARK_MASQ}"));
                lines
            }
            (Table::Nat, MARK_MASQ) => {
                let mark = self.options.settings.masquerade_mark;
                vec![format!("-j MARK --set-xmark {mark:#x}/{mark:#x}")]
            }
            (Table::Nat, NODE_PORT) => self.node_ports(),
            (Table::Nat, POSTROUTING) => self.postrouting(),
            (Table::Nat, SERVICES) => self.services(),
            _ => Lines::new(),
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

    /// A rule for each of these sets that has entries: what comes before its match, directions, target.
    fn each(&self, rules: &[(Set, &str, &str, &str)]) -> Lines {
        let filled = rules.iter().filter(|(set, ..)| self.has(*set));
        let line = |(set, before, directions, target): &(Set, &str, &str, &str)| {
            format!("{before}{} -j {target}", self.commented_match(*set, directions))
        };
        filled.map(line).collect()
    }

    fn forward(&self) -> Lines {
        let mark = self.options.settings.masquerade_mark;
        vec![
            format!(
                "-m comment --comment \"kubernetes forwarding rules\" -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT"
            ),
            "-m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
                .into(),
        ]
    }

    /// The node's own ports cannot be reached by addresses of Services, which are the node's since they are on the dummy link.
    fn access_filter(&self) -> Lines {
        let sets = [Set::LoadBalancer, Set::ClusterIp, Set::ExternalIp, Set::ExternalIpLocal];
        let mut lines: Lines =
            sets.iter().map(|set| format!("{} -j RETURN", self.set_match(*set, "dst,dst"))).collect();
        lines.push(format!("{} -j RETURN", self.set_match(Set::HealthCheckNodePort, "dst")));
        let refusal = match self.family {
            IpFamily::V4 => "icmp-port-unreachable",
            IpFamily::V6 => "icmp6-port-unreachable",
        };
        lines.push(format!(
            "-m conntrack --ctstate NEW {} -j REJECT --reject-with {refusal}",
            self.set_match(Set::Addresses, "dst")
        ));
        lines
    }

    fn source_ranges(&self) -> Lines {
        let mut lines = self.each(&[
            (Set::LoadBalancerSourceCidr, "", "dst,dst,src", "RETURN"),
            (Set::LoadBalancerSourceIp, "", "dst,dst,src", "RETURN"),
        ]);
        lines.push("-j DROP".into());
        lines
    }

    fn node_ports(&self) -> Lines {
        self.each(&[
            (Set::NodePortLocalTcp, "-p tcp ", "dst", "RETURN"),
            (Set::NodePortTcp, "-p tcp ", "dst", MARK_MASQ),
            (Set::NodePortLocalUdp, "-p udp ", "dst", "RETURN"),
            (Set::NodePortUdp, "-p udp ", "dst", MARK_MASQ),
            (Set::NodePortLocalSctp, "-p sctp ", "dst,dst", "RETURN"),
            (Set::NodePortSctp, "-p sctp ", "dst,dst", MARK_MASQ),
        ])
    }

    /// The mark is taken off again, so that a packet that passes once more is not masqueraded twice.
    fn postrouting(&self) -> Lines {
        let mark = self.options.settings.masquerade_mark;
        let mut lines = self.each(&[(Set::LoopBack, "", "dst,dst,src", "MASQUERADE")]);
        lines.push(format!("-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN"));
        lines.push(format!("-j MARK --set-xmark {mark:#x}/0x0"));
        let random = if self.options.random_fully.contains(&self.family) { " --random-fully" } else { "" };
        lines.push(format!(
            "-m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE{random}"
        ));
        lines
    }

    fn services(&self) -> Lines {
        let loopback = if self.family == IpFamily::V4 { "127.0.0.0/8" } else { "::1/128" };
        let mut lines = vec![format!("-s {loopback} -j RETURN")];
        lines.extend(self.each(&[(Set::LoadBalancer, "", "dst,dst", LOAD_BALANCER)]));
        if self.has(Set::ClusterIp) {
            lines.push(self.cluster_ips());
        }
        if self.has(Set::ExternalIp) {
            lines.extend(self.each(&[(Set::ExternalIp, "", "dst,dst", MARK_MASQ)]));
        }
        lines.extend(self.external_ips(Set::ExternalIp));
        lines.extend(self.external_ips(Set::ExternalIpLocal));
        lines.push(format!("-m addrtype --dst-type LOCAL -j {NODE_PORT}"));
        // Rules of others shall not get hold of what is for a virtual server. These come last.
        let accepted = [Set::ClusterIp, Set::LoadBalancer].into_iter().filter(|set| self.has(*set));
        lines.extend(accepted.map(|set| format!("{} -j ACCEPT", self.set_match(set, "dst,dst"))));
        lines
    }

    /// Where pods cannot be told, what the node sends is masqueraded that has a cluster IP for its source too, which it gets
    /// since that is on the dummy link.
    fn cluster_ips(&self) -> String {
        let matches = |directions| self.commented_match(Set::ClusterIp, directions);
        match self.node.not_local.get(&self.family) {
            _ if self.node.masquerade_all => format!("{} -j {MARK_MASQ}", matches("dst,dst")),
            Some(not_local) => format!("{not_local} {} -j {MARK_MASQ}", matches("dst,dst")),
            None => format!("{} -j {MARK_MASQ}", matches("src,dst")),
        }
    }

    /// What comes from outside, and what is for an address that this node has.
    fn external_ips(&self, set: Set) -> Lines {
        if !self.has(set) {
            return Lines::new();
        }
        let matches = self.commented_match(set, "dst,dst");
        vec![
            format!("{matches} -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT"),
            format!("{matches} -m addrtype --dst-type LOCAL -j ACCEPT"),
        ]
    }
}

/// The order of matches and what stands in quotation marks differ between versions, and quotation marks within others are escaped.
pub(super) fn words(rule: &str) -> Vec<String> {
    let mut words: Vec<_> =
        rule.split([' ', '"', '\'', '\\']).filter(|word| !word.is_empty()).map(String::from).collect();
    words.sort_unstable();
    words
}
