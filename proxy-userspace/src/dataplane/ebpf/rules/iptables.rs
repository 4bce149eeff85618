//! The rules as iptables chains of shunt: what a table should hold, and the input of
//! iptables-restore that makes it so.

use super::{MASQUERADED_PORTS, Marks};
use crate::{
    dataplane::iptables_text::{
        Chain, ChainRules, SavedLine, Table, TableWriter, has_chain, port_unreachable, saved_lines, target,
    },
    model::IpFamily,
};

const FORWARD: Chain = Chain::Fixed("SHUNT-FORWARD");
const REJECT: Chain = Chain::Fixed("SHUNT-REJECT");
const POSTROUTING: Chain = Chain::Fixed("SHUNT-POSTROUTING");
const CHAINS: [Chain; 3] = [FORWARD, REJECT, POSTROUTING];
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
        /// With the rules that masquerade.
        masquerade: bool,
        /// iptables can choose the source ports of masqueraded connections at random, as from 1.6.2
        /// on.
        random_fully: bool,
    },
}

/// A table as iptables-save prints it.
#[derive(Clone, Debug)]
pub(super) struct SavedTable {
    pub(super) table: Table,
    pub(super) saved: String,
}

/// The chains and jumps of shunt that a table should hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ShuntRules {
    chains: Vec<ChainRules>,
    /// Rules to insert at the top of built-in chains. The last one comes out on top.
    jumps: Vec<(&'static str, String)>,
}

impl SavedTable {
    /// Returns the rules, each with its chain.
    fn rules(&self) -> impl Iterator<Item = (&str, &str)> {
        saved_lines(&self.saved).filter_map(|line| match line {
            SavedLine::Rule { chain, rule } => Some((chain, rule)),
            SavedLine::Chain { .. } => None,
        })
    }

    /// The number of rules of other programs.
    pub(super) fn foreign_rules(&self) -> usize {
        self.rules().filter(|(chain, rule)| !is_own_chain(chain) && !is_own_jump(rule)).count()
    }

    /// Returns true if the table may drop forwarded packets: by its policy, or by rules of other
    /// programs.
    pub(super) fn filters_forward(&self) -> bool {
        saved_lines(&self.saved).any(|line| match line {
            SavedLine::Chain { name, policy } => name == "FORWARD" && policy.is_some_and(|it| it != "ACCEPT"),
            SavedLine::Rule { chain, rule } => chain == "FORWARD" && !is_own_jump(rule),
        })
    }

    /// Returns a line for each chain and rule of shunt, in order to detect changes.
    pub(super) fn own_lines(&self) -> Vec<String> {
        let own = saved_lines(&self.saved).filter_map(|line| match line {
            SavedLine::Chain { name, .. } => is_own_chain(name).then(|| name.to_owned()),
            SavedLine::Rule { chain, rule } => {
                (is_own_chain(chain) || is_own_jump(rule)).then(|| format!("{chain} {rule}"))
            }
        });
        own.collect()
    }

    /// Returns the input of iptables-restore after which the table holds this extent of shunt's
    /// rules; `None` if it already does. The input leaves everything else alone.
    pub(super) fn repair(&self, family: IpFamily, extent: Extent, marks: Marks) -> Option<String> {
        let desired = shunt_rules(self.table, family, extent, marks);
        let mut writer = TableWriter::new(self.table);
        self.remove_unwanted(&desired, &mut writer);
        self.add_missing(&desired, &mut writer);
        writer.finish()
    }

    /// Removes jumps that are not as they should be, then chains that should not exist.
    fn remove_unwanted(&self, desired: &ShuntRules, writer: &mut TableWriter) {
        for (chain, rule) in self.rules() {
            let is_desired = desired.jumps.iter().any(|(from, jump)| *from == chain && jump == rule);
            if is_own_jump(rule) && !is_desired {
                writer.line(format_args!("-D {chain} {rule}"));
            }
        }
        let is_desired = |chain: &Chain| desired.chains.iter().any(|rules| rules.chain == *chain);
        let unwanted =
            CHAINS.into_iter().filter(|chain| has_chain(&self.saved, *chain) && !is_desired(chain));
        writer.remove_chains(&unwanted.collect::<Vec<_>>());
    }

    fn add_missing(&self, desired: &ShuntRules, writer: &mut TableWriter) {
        for rules in &desired.chains {
            let mut current = ChainRules::new(rules.chain);
            let own = self.rules().filter(|(chain, _)| rules.chain.is_named(chain));
            own.for_each(|(_, rule)| current.add(rule));
            if !has_chain(&self.saved, rules.chain) || current != *rules {
                writer.flush([rules.chain]);
                writer.rules(rules);
            }
        }
        // A jump that exists stays where it is: two programs that both insist on the top would move
        // each other forever.
        for (from, jump) in &desired.jumps {
            if self.rules().all(|rule| rule != (*from, jump)) {
                writer.line(format_args!("-I {from} 1 {jump}"));
            }
        }
    }
}

fn is_own_chain(name: &str) -> bool {
    CHAINS.iter().any(|chain| chain.is_named(name))
}

fn is_own_jump(rule: &str) -> bool {
    target(rule).is_some_and(is_own_chain)
}

/// Returns the rules of an extent as iptables-save prints them. Those in FORWARD are the rules of
/// upstream's `KUBE-FORWARD`, but only packets to be masqueraded have to be known to conntrack.
/// [`super::nft::script`] explains the others.
fn shunt_rules(table: Table, family: IpFamily, extent: Extent, marks: Marks) -> ShuntRules {
    let mut rules = ShuntRules::default();
    if table == Table::Filter && extent != Extent::Nothing {
        rules.chains.push(forward_rules(marks));
        rules.jumps.push(("FORWARD", commented_jump("traffic of Services", FORWARD)));
    }
    match (table, extent) {
        (Table::Filter, Extent::All { .. }) => {
            let (matches, _) = mark_matches(marks.reject);
            let jump = format!("{matches} {}", commented_jump("Services without endpoints", REJECT));
            rules.chains.push(reject_rules(family));
            rules.jumps.extend([("FORWARD", jump.clone()), ("INPUT", jump)]);
        }
        (Table::Nat, Extent::All { masquerade: true, random_fully }) => {
            let jump = commented_jump("replies of a Service return through this node", POSTROUTING);
            rules.chains.push(postrouting_rules(marks, random_fully));
            rules.jumps.push(("POSTROUTING", jump));
        }
        _ => {}
    }
    rules
}

fn forward_rules(marks: Marks) -> ChainRules {
    let (masquerade, _) = mark_matches(marks.masquerade);
    let mut rules = ChainRules::new(FORWARD);
    rules.add(format_args!("{masquerade} -m conntrack --ctstate INVALID -j DROP"));
    rules.add(format_args!("{masquerade} -j ACCEPT"));
    rules.add("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
    rules
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

/// Returns the matches of packets that have any of these bits, and of packets that have none. They
/// are written as iptables-save prints them; for a single bit, as upstream writes them.
fn mark_matches(bits: u32) -> (String, String) {
    if bits.is_power_of_two() {
        let mark = format!("--mark {bits:#x}/{bits:#x}");
        return (format!("-m mark {mark}"), format!("-m mark ! {mark}"));
    }
    let none = format!("--mark 0x0/{bits:#x}");
    (format!("-m mark ! {none}"), format!("-m mark {none}"))
}

fn commented_jump(comment: &str, target: Chain) -> String {
    format!("-m comment --comment \"shunt: {comment}\" -j {target}")
}
