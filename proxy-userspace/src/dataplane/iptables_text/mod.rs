//! The text that iptables-save prints and iptables-restore reads, and the rules that kube-proxy's
//! iptables and ipvs modes share.

mod input;
mod names;
mod rules;
mod state;

use std::net::IpAddr;

use crate::kernel::{KernelError, iptables::Iptables};

pub(super) use self::{
    input::{Layout, TableInput, TableWriter, text},
    names::{
        CANARY, Chain, EXTERNAL_SERVICES, FORWARD, KUBELET_FIREWALL, MARK_MASQ, NODE_PORTS, NameHash,
        POSTROUTING, PROXY_FIREWALL, Purpose, ROUTES_LOCALNET, SERVICES,
    },
    rules::{
        ChainRules, LocalMatch, add_forward_rules, add_postrouting_rules, mark_masq_rules, masquerades,
        port_unreachable,
    },
    state::{Content, Jump, ModeChains, TableState},
};

/// A table of iptables in which kube-proxy or shunt has chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    /// Holds only the canary and the marker chain of the iptables mode.
    Mangle,
    /// Accepts, refuses and drops packets.
    Filter,
    /// Translates and masquerades packets.
    Nat,
}

impl Table {
    pub(super) const ALL: [Self; 3] = [Self::Mangle, Self::Filter, Self::Nat];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Filter => "filter",
            Self::Nat => "nat",
        }
    }
}

/// Saves tables. Each has a result of its own.
pub(super) fn save(commands: &Iptables, tables: &[Table]) -> Vec<(Table, Result<String, KernelError>)> {
    let names: Vec<&str> = tables.iter().map(|table| table.name()).collect();
    tables.iter().copied().zip(commands.save_tables(&names)).collect()
}

/// A line that iptables-save or `iptables -S` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavedLine<'a> {
    /// A chain.
    Chain {
        name: &'a str,
        /// The policy of a built-in chain.
        policy: Option<&'a str>,
    },
    /// A rule.
    Rule {
        /// The chain that holds it.
        chain: &'a str,
        /// The rule without `-A` and the chain.
        rule: &'a str,
    },
}

/// Returns the chains and rules in the output of iptables-save or `iptables -S`.
pub(super) fn saved_lines(saved: &str) -> impl Iterator<Item = SavedLine<'_>> {
    saved.lines().filter_map(|line| {
        if let Some(rest) = line.strip_prefix("-A ") {
            return rest.split_once(' ').map(|(chain, rule)| SavedLine::Rule { chain, rule });
        }
        let mut words = line.strip_prefix(':').or_else(|| line.strip_prefix("-N "))?.split(' ');
        Some(SavedLine::Chain { name: words.next()?, policy: words.next().filter(|policy| *policy != "-") })
    })
}

/// Returns true if iptables-save printed this chain.
pub(super) fn has_chain(saved: &str, chain: Chain) -> bool {
    saved_lines(saved).any(|line| matches!(line, SavedLine::Chain { name, .. } if chain.is_named(name)))
}

/// Returns the target of a rule. A comment ends in a quotation mark, so that text in it is not
/// taken for a target.
pub(super) fn target(rule: &str) -> Option<&str> {
    let options = rule.rsplit_once('"').map_or(rule, |(_, after)| after);
    let (_, after) = options.rsplit_once("-j ").or_else(|| options.rsplit_once("-g "))?;
    after.split(' ').next()
}

/// Returns the words of a rule in alphabetical order. Versions of iptables differ in the order of
/// matches, in what they put in quotation marks, and in how they escape quotation marks.
pub(super) fn sorted_words(rule: &str) -> Vec<&str> {
    let mut words: Vec<_> = rule.split([' ', '"', '\'', '\\']).filter(|word| !word.is_empty()).collect();
    words.sort_unstable();
    words
}

/// Returns the length of the prefix that holds one address only.
pub(super) const fn host_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}
