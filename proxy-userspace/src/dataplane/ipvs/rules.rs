//! The chains of upstream's ipvs mode, and the rules that lead to them (`writeIptablesRules` of `pkg/proxy/ipvs/proxier.go`). They
//! match by sets, so that their number does not depend on Services: a rule is there where its set has entries.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::{
    node::{Node, Terms},
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

const SERVICES: &str = "KUBE-SERVICES";
const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
const NODE_PORT: &str = "KUBE-NODE-PORT";
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

fn jump(table: &str, from: &str, rule: &str) -> Option<usize> {
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
    /// Rules of [`super::claims::Item::NodeDenied`].
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
    terms: &Terms,
    node: &Node,
    needs: &Needs,
) -> BTreeMap<(Table, &'static str), Lines> {
    let writing = Writing { family, terms, node, needs };
    let lines = |(table, chain)| ((table, chain), writing.chain(table, chain));
    CHAINS.into_iter().map(lines).collect()
}

struct Writing<'a> {
    family: IpFamily,
    terms: &'a Terms,
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
                let mark = self.terms.masquerade_mark;
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
        let mark = self.terms.masquerade_mark;
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
        let mark = self.terms.masquerade_mark;
        let mut lines = self.each(&[(Set::LoopBack, "", "dst,dst,src", "MASQUERADE")]);
        lines.push(format!("-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN"));
        lines.push(format!("-j MARK --set-xmark {mark:#x}/0x0"));
        let random = if self.terms.random_fully { " --random-fully" } else { "" };
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

/// What iptables-save prints of ours: chains with their rules, and the jumps that are there, by their place in [`JUMPS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Chains with their rules, each with its words in alphabetical order: their order differs between versions.
    pub(super) chains: BTreeMap<(Table, String), Vec<Vec<String>>>,
    /// Jumps.
    pub(super) jumps: BTreeSet<usize>,
}

impl Held {
    /// Adds what a table holds.
    pub(super) fn read(&mut self, table: Table, saved: &str) {
        let ours = |chain: &str| has_chain(table.name(), chain);
        for line in saved.lines() {
            if let Some(chain) = line.strip_prefix(':').and_then(|rest| rest.split(' ').next()) {
                if ours(chain) {
                    self.chains.entry((table, chain.to_owned())).or_default();
                }
            } else if let Some((chain, rule)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' '))
            {
                if ours(chain) {
                    self.chains.entry((table, chain.to_owned())).or_default().push(words(rule));
                } else {
                    self.jumps.extend(jump(table.name(), chain, rule));
                }
            }
        }
    }

    /// What has to be written so that these chains are there with these rules; none where nothing has.
    pub(super) fn difference(&self, wanted: &BTreeMap<(Table, &'static str), Lines>) -> Option<RulesChange> {
        let mut change = RulesChange::default();
        for ((table, chain), lines) in wanted {
            let held = self.chains.get(&(*table, (*chain).to_owned()));
            let is_same = held.is_some_and(|held| {
                held.len() == lines.len() && held.iter().zip(lines).all(|(held, line)| *held == words(line))
            });
            if !is_same {
                change.chains.push((*table, chain, lines.clone()));
            }
        }
        change.jumps = (0..JUMPS.len()).filter(|jump| !self.jumps.contains(jump)).collect();
        (!change.chains.is_empty() || !change.jumps.is_empty()).then_some(change)
    }

    /// A change was made.
    pub(super) fn record(&mut self, change: &RulesChange) {
        for (table, chain, lines) in &change.chains {
            let lines = lines.iter().map(|line| words(line)).collect();
            self.chains.insert((*table, (*chain).to_owned()), lines);
        }
        self.jumps.extend(&change.jumps);
    }

    /// Another mode's rules send traffic for Services elsewhere as long as this chain holds them.
    pub(super) fn is_of_another_mode(&self) -> bool {
        let services = self.chains.get(&(Table::Nat, SERVICES.to_owned()));
        let leads_elsewhere = |word: &String| word.starts_with("KUBE-SVC-") || word.starts_with("KUBE-EXT-");
        services.is_some_and(|rules| rules.iter().flatten().any(leads_elsewhere))
    }
}

/// Chains that are written anew, and jumps that are put first; one iptables-restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RulesChange {
    /// Chains with their rules.
    pub(super) chains: Vec<(Table, &'static str, Lines)>,
    /// By their place in [`JUMPS`].
    pub(super) jumps: Vec<usize>,
}

impl RulesChange {
    /// How many things change.
    pub(super) fn len(&self) -> usize {
        self.chains.len() + self.jumps.len()
    }

    /// The input of iptables-restore.
    pub(super) fn input(&self) -> String {
        let mut text = String::new();
        for table in Table::ALL {
            let chains: Vec<_> = self.chains.iter().filter(|(of, ..)| *of == table).collect();
            let jumps: Vec<_> =
                self.jumps.iter().map(|jump| JUMPS[*jump]).filter(|jump| jump.0 == table).collect();
            if chains.is_empty() && jumps.is_empty() {
                continue;
            }
            // Writing to a String cannot fail.
            let _ = writeln!(text, "*{}", table.name());
            for (_, chain, _) in &chains {
                let _ = writeln!(text, ":{chain} - [0:0]");
            }
            for jump in jumps {
                let _ = writeln!(text, "-I {} {}", jump.1, jump_rule(jump));
            }
            for (_, chain, lines) in chains {
                for line in lines {
                    let _ = writeln!(text, "-A {chain} {line}");
                }
            }
            text.push_str("COMMIT\n");
        }
        text
    }
}

/// The order of matches and what stands in quotation marks differ between versions, and quotation marks within others are escaped.
fn words(rule: &str) -> Vec<String> {
    let mut words: Vec<_> =
        rule.split([' ', '"', '\'', '\\']).filter(|word| !word.is_empty()).map(String::from).collect();
    words.sort_unstable();
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-NODE-PORT - [0:0]\n:KUBE-SVC-X - [0:0]\n\
        -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
        -A PREROUTING -j KUBE-SERVICES\n\
        -A KUBE-NODE-PORT -p sctp -m comment --comment \"Kubernetes nodeport SCTP port for masquerade purpose with type \\'hash ip:port\\'\" \
        -m set --match-set KUBE-NODE-PORT-SCTP-HASH dst,dst -j KUBE-MARK-MASQ\nCOMMIT\n";

    #[test]
    fn what_is_saved_is_told_from_what_is_wanted_whatever_its_quotation_marks() {
        let mut held = Held::default();
        held.read(Table::Nat, SAVED);
        assert_eq!(held.jumps.len(), 1, "that of others is none of ours");
        let terms = Terms {
            families: vec![IpFamily::V4],
            scheduler: "rr".into(),
            exclude_cidrs: Vec::new(),
            masquerade_mark: 1 << 14,
            random_fully: true,
        };
        let needs = Needs { filled: [Set::NodePortSctp].into(), denied: BTreeSet::new() };
        let wanted = chains(IpFamily::V4, &terms, &Node::default(), &needs);
        let change = held.difference(&wanted).expect("other chains are missing");
        assert!(change.chains.iter().all(|(table, chain, _)| (*table, *chain) != (Table::Nat, NODE_PORT)));
        assert_eq!(change.chains.len(), CHAINS.len() - 1);
        assert_eq!(change.jumps.len(), JUMPS.len() - 1);
    }

    #[test]
    fn rules_of_the_iptables_mode_are_told_apart() {
        let mut held = Held::default();
        held.read(Table::Nat, "*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN\n");
        assert!(!held.is_of_another_mode());
        held.read(Table::Nat, "*nat\n-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-FYZB2HTOW53NRIPL\n");
        assert!(held.is_of_another_mode());
    }
}
