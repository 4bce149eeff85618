//! The rules as iptables chains of shunt: what a table should hold, and the input of iptables-restore that makes it so.

use std::{collections::BTreeSet, fmt};

use super::{MASQUERADED_PORTS, Marks};
use crate::{
    dataplane::iptables_text::{
        Chain, ChainRules, SavedLine, Table, TableWriter, port_unreachable, saved_lines, target,
    },
    model::IpFamily,
};

const FORWARD: Chain = Chain::Fixed("SHUNT-FORWARD");
const REJECT: Chain = Chain::Fixed("SHUNT-REJECT");
const POSTROUTING: Chain = Chain::Fixed("SHUNT-POSTROUTING");
const CHAINS: [Chain; 3] = [FORWARD, REJECT, POSTROUTING];
/// The tables that hold the chains.
pub(super) const TABLES: [Table; 2] = [Table::Filter, Table::Nat];

/// Which of the rules a backend should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// None.
    Nothing,
    /// The rules that accept traffic of Services in FORWARD. The other rules are in nftables.
    Forward,
    /// All rules.
    All {
        /// iptables can choose the source ports of masqueraded connections at random, as from 1.6.2 on.
        random_fully: bool,
    },
}

/// A table as iptables-save prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedTable {
    table: Table,
    forward_policy: Option<String>,
    chains: BTreeSet<String>,
    /// The chain of each rule, and the rest of its line.
    rules: Vec<(String, String)>,
}

/// The chains and jumps of shunt that a table should hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ShuntRules {
    chains: Vec<ChainRules>,
    /// Rules to insert at the top of built-in chains. The last one comes out on top.
    jumps: Vec<(&'static str, String)>,
}

impl SavedTable {
    /// Parses the output of iptables-save for a table.
    pub(super) fn parse(table: Table, saved: &str) -> Self {
        let mut parsed = Self { table, forward_policy: None, chains: BTreeSet::new(), rules: Vec::new() };
        for line in saved_lines(saved) {
            match line {
                SavedLine::Chain { name, policy: None } => drop(parsed.chains.insert(name.to_owned())),
                SavedLine::Chain { name: "FORWARD", policy } => {
                    parsed.forward_policy = policy.map(str::to_owned);
                }
                SavedLine::Chain { .. } => {}
                SavedLine::Rule { chain, rule } => parsed.rules.push((chain.to_owned(), rule.to_owned())),
            }
        }
        parsed
    }

    fn rules_of(&self, chain: &str) -> impl Iterator<Item = &str> {
        self.rules.iter().filter(move |(of, _)| of == chain).map(|(_, rule)| &**rule)
    }

    /// The number of rules of other programs.
    pub(super) fn foreign_rules(&self) -> usize {
        self.rules.iter().filter(|(chain, rule)| !is_own(chain, rule)).count()
    }

    /// Returns true if the table may drop forwarded packets: by its policy, or by rules of other programs.
    pub(super) fn filters_forward(&self) -> bool {
        self.forward_policy.as_ref().is_some_and(|policy| policy != "ACCEPT")
            || self.rules_of("FORWARD").any(|rule| !is_own_jump(rule))
    }

    /// Returns a line for each chain and rule of shunt, in order to detect changes.
    pub(super) fn own_lines(&self) -> Vec<String> {
        let rules = self.rules.iter().filter(|(chain, rule)| is_own(chain, rule));
        let chains = self.chains.iter().filter(|chain| is_own_chain(chain)).cloned();
        chains.chain(rules.map(|(chain, rule)| format!("{chain} {rule}"))).collect()
    }

    /// Returns the input of iptables-restore after which the table holds this extent of shunt's rules; `None` if it
    /// already does. The input leaves everything else alone.
    pub(super) fn repair(&self, family: IpFamily, extent: Extent, marks: Marks) -> Option<String> {
        let desired = shunt_rules(self.table, family, extent, marks);
        let mut writer = TableWriter::new(self.table);
        self.remove_unwanted(&desired, &mut writer);
        self.add_missing(&desired, &mut writer);
        writer.finish()
    }

    /// Removes jumps that are not as they should be, then chains that should not exist.
    fn remove_unwanted(&self, desired: &ShuntRules, writer: &mut TableWriter) {
        for (chain, rule) in &self.rules {
            let is_desired = desired.jumps.iter().any(|(from, jump)| from == chain && jump == rule);
            if is_own_jump(rule) && !is_desired {
                writer.line(format_args!("-D {chain} {rule}"));
            }
        }
        let is_desired = |name: &str| desired.chains.iter().any(|rules| rules.chain.is_named(name));
        // In the order of `CHAINS`.
        let own = CHAINS.iter().filter_map(|chain| self.chains.get(&chain.to_string()));
        let unwanted: Vec<&str> = own.map(String::as_str).filter(|name| !is_desired(name)).collect();
        writer.remove_chains(&unwanted);
    }

    fn add_missing(&self, desired: &ShuntRules, writer: &mut TableWriter) {
        for rules in &desired.chains {
            let chain = rules.chain.to_string();
            let mut current = ChainRules::new(rules.chain);
            self.rules_of(&chain).for_each(|rule| current.add(rule));
            if !self.chains.contains(&chain) || current != *rules {
                writer.flush(&chain);
                writer.rules(rules);
            }
        }
        // A jump that exists stays where it is: two programs that both insist on the top would move each other forever.
        for (from, jump) in &desired.jumps {
            if self.rules_of(from).all(|rule| rule != jump) {
                writer.line(format_args!("-I {from} 1 {jump}"));
            }
        }
    }
}

fn is_own_chain(name: &str) -> bool {
    CHAINS.iter().any(|chain| chain.is_named(name))
}

fn is_own(chain: &str, rule: &str) -> bool {
    is_own_chain(chain) || is_own_jump(rule)
}

fn is_own_jump(rule: &str) -> bool {
    target(rule).is_some_and(is_own_chain)
}

/// Returns the rules of an extent as iptables-save prints them. Those in FORWARD are the rules of upstream's
/// `KUBE-FORWARD`, but only packets to be masqueraded have to be known to conntrack. [`super::nft::script`] explains the
/// others.
fn shunt_rules(table: Table, family: IpFamily, extent: Extent, marks: Marks) -> ShuntRules {
    match (table, extent) {
        (Table::Filter, Extent::Forward) => {
            let (chain, jump) = forward(marks);
            ShuntRules { chains: vec![chain], jumps: vec![jump] }
        }
        (Table::Filter, Extent::All { .. }) => {
            let (chain, jump) = forward(marks);
            let (reject, _) = mark_matches(marks.reject);
            let jump_to_reject = format!("{reject} {}", commented_jump("Services without endpoints", REJECT));
            let jumps = vec![jump, ("FORWARD", jump_to_reject.clone()), ("INPUT", jump_to_reject)];
            ShuntRules { chains: vec![chain, reject_rules(family)], jumps }
        }
        (Table::Nat, Extent::All { random_fully }) => {
            let jump = commented_jump("answers of a Service come back through this node", POSTROUTING);
            let chains = vec![postrouting_rules(marks, random_fully)];
            ShuntRules { chains, jumps: vec![("POSTROUTING", jump)] }
        }
        _ => ShuntRules::default(),
    }
}

fn forward(marks: Marks) -> (ChainRules, (&'static str, String)) {
    let (masquerade, _) = mark_matches(marks.masquerade);
    let mut rules = ChainRules::new(FORWARD);
    rules.add(format_args!("{masquerade} -m conntrack --ctstate INVALID -j DROP"));
    rules.add(format_args!("{masquerade} -j ACCEPT"));
    rules.add("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
    (rules, ("FORWARD", commented_jump("traffic of Services", FORWARD)))
}

fn reject_rules(family: IpFamily) -> ChainRules {
    let mut rules = ChainRules::new(REJECT);
    rules.add("-p tcp -m conntrack --ctstate ESTABLISHED,DNAT -j RETURN");
    rules.add("-p tcp -j REJECT --reject-with tcp-reset");
    rules.add(format_args!("-j REJECT --reject-with {}", port_unreachable(family)));
    rules
}

fn postrouting_rules(marks: Marks, random_fully: bool) -> ChainRules {
    let (_, not_masqueraded) = mark_matches(marks.masquerade);
    let random = if random_fully { " --random-fully" } else { "" };
    let (first, last) = MASQUERADED_PORTS.into_inner();
    let mut rules = ChainRules::new(POSTROUTING);
    rules.add(format_args!("{not_masqueraded} -j RETURN"));
    rules.add(format_args!("-j MARK --set-xmark 0x0/{:#x}", marks.masquerade));
    rules.add(format_args!("-p udp -j MASQUERADE --to-ports {first}-{last}{random}"));
    rules.add(format_args!("-j MASQUERADE{random}"));
    rules
}

/// Returns the matches of packets that have any of these bits, and of packets that have none. They are written as
/// iptables-save prints them; for a single bit, as upstream writes them.
fn mark_matches(bits: u32) -> (String, String) {
    if bits.is_power_of_two() {
        let mark = format!("--mark {bits:#x}/{bits:#x}");
        return (format!("-m mark {mark}"), format!("-m mark ! {mark}"));
    }
    let none = format!("--mark 0x0/{bits:#x}");
    (format!("-m mark ! {none}"), format!("-m mark {none}"))
}

fn commented_jump(comment: &str, target: impl fmt::Display) -> String {
    format!("-m comment --comment \"shunt: {comment}\" -j {target}")
}
