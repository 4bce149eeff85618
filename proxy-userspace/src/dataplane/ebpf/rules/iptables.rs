//! The rules as iptables chains of our own: what a table shall hold, and the text for iptables-restore that makes it so.

use std::collections::{BTreeMap, BTreeSet};

use super::{MASQUERADED_PORTS, Marks};
use crate::kernel::iptables::Family;

const FORWARD: &str = "SHUNT-FORWARD";
const REJECT: &str = "SHUNT-REJECT";
const POSTROUTING: &str = "SHUNT-POSTROUTING";
/// Every chain of ours.
pub(super) const CHAINS: [&str; 3] = [FORWARD, REJECT, POSTROUTING];
/// Tables that hold them.
pub(super) const TABLES: [&str; 2] = ["filter", "nat"];

/// What a backend shall hold of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Nothing.
    Nothing,
    /// What lets Services' traffic through FORWARD; the rest is in nftables.
    Forward,
    /// All of them.
    All {
        /// iptables from 1.6.2 on can choose ports of masqueraded connections at random.
        random_fully: bool,
    },
}

/// Rules of one table, in the words of iptables-save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    /// Built-in chains by name.
    policies: BTreeMap<String, String>,
    chains: BTreeSet<String>,
    /// Chain and the rest of the line.
    rules: Vec<(String, String)>,
}

/// What a table shall hold of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    chains: Vec<(&'static str, Vec<String>)>,
    /// Rules at the top of built-in chains, the last one topmost.
    jumps: Vec<(&'static str, String)>,
}

impl Table {
    /// Reads the output of iptables-save for one table.
    pub(super) fn parse(saved: &str) -> Self {
        let mut table = Self::default();
        for line in saved.lines() {
            if let Some((chain, rest)) = line.strip_prefix(':').and_then(|line| line.split_once(' ')) {
                match rest.split(' ').next() {
                    None | Some("-") => drop(table.chains.insert(chain.to_owned())),
                    Some(policy) => drop(table.policies.insert(chain.to_owned(), policy.to_owned())),
                }
            } else if let Some((chain, rule)) = line.strip_prefix("-A ").and_then(|line| line.split_once(' '))
            {
                table.rules.push((chain.to_owned(), rule.to_owned()));
            }
        }
        table
    }

    fn rules_of(&self, chain: &str) -> impl Iterator<Item = &str> {
        self.rules.iter().filter(move |(of, _)| of == chain).map(|(_, rule)| &**rule)
    }

    /// How many rules of others there are.
    pub(super) fn others(&self) -> usize {
        self.rules.iter().filter(|(chain, rule)| !is_ours(chain, rule)).count()
    }

    /// Whether it may keep packets from being forwarded: by its policy, or by rules of others.
    pub(super) fn rules_forward(&self) -> bool {
        self.policies.get("FORWARD").is_some_and(|policy| policy != "ACCEPT")
            || self.rules_of("FORWARD").any(|rule| !is_jump_of_ours(rule))
    }

    /// What is ours, a line each: to tell whether it is still as it was.
    pub(super) fn ours(&self) -> Vec<String> {
        let rules = self.rules.iter().filter(|(chain, rule)| is_ours(chain, rule));
        let chains = self.chains.iter().filter(|chain| CHAINS.contains(&chain.as_str())).cloned();
        chains.chain(rules.map(|(chain, rule)| format!("{chain} {rule}"))).collect()
    }

    /// The lines for iptables-restore that make the table hold this extent of ours, and leave all else; none where it does.
    pub(super) fn repair(&self, name: &str, family: Family, extent: Extent, marks: Marks) -> Option<String> {
        let wanted = wanted(name, family, extent, marks);
        let lines: Vec<String> = self.removals(&wanted).into_iter().chain(self.additions(&wanted)).collect();
        (!lines.is_empty()).then(|| format!("*{name}\n{}\nCOMMIT\n", lines.join("\n")))
    }

    /// Chains of ours that are not wanted, after the jumps to them; and jumps that are not as they should be.
    fn removals(&self, wanted: &Wanted) -> Vec<String> {
        let unwanted = |chain: &str, rule: &str| {
            is_jump_of_ours(rule) && !wanted.jumps.iter().any(|(from, jump)| *from == chain && jump == rule)
        };
        let jumps = self.rules.iter().filter(|(chain, rule)| unwanted(chain, rule));
        let chains = CHAINS.iter().filter(|chain| {
            self.chains.contains(**chain) && wanted.chains.iter().all(|(name, _)| name != *chain)
        });
        jumps
            .map(|(chain, rule)| format!("-D {chain} {rule}"))
            // Naming a chain empties it.
            .chain(chains.clone().map(|chain| format!(":{chain} - [0:0]")))
            .chain(chains.map(|chain| format!("-X {chain}")))
            .collect()
    }

    fn additions(&self, wanted: &Wanted) -> Vec<String> {
        let mut lines = Vec::new();
        for (chain, rules) in &wanted.chains {
            if !self.chains.contains(*chain) || !self.rules_of(chain).eq(rules.iter().map(String::as_str)) {
                lines.push(format!(":{chain} - [0:0]"));
                lines.extend(rules.iter().map(|rule| format!("-A {chain} {rule}")));
            }
        }
        // Once only, where it is put first: two programs that both insist on the top would move each other for ever.
        let missing =
            wanted.jumps.iter().filter(|(from, jump)| !self.rules_of(from).any(|rule| rule == jump));
        lines.extend(missing.map(|(from, jump)| format!("-I {from} 1 {jump}")));
        lines
    }
}

fn is_ours(chain: &str, rule: &str) -> bool {
    CHAINS.contains(&chain) || is_jump_of_ours(rule)
}

fn is_jump_of_ours(rule: &str) -> bool {
    let target = rule.rsplit_once("-j ").map(|(_, target)| target.trim());
    target.is_some_and(|target| CHAINS.contains(&target))
}

/// Rules as iptables-save prints them. FORWARD's are those of upstream's `KUBE-FORWARD`, but that only what would have to be
/// masqueraded has to be known to conntrack; the others are explained at [`super::nft::script`].
fn wanted(table: &str, family: Family, extent: Extent, marks: Marks) -> Wanted {
    let [(masquerade, not_masqueraded), (reject, _)] = [marks.masquerade, marks.reject].map(matches);
    let unreachable = match family {
        Family::V4 => "icmp-port-unreachable",
        Family::V6 => "icmp6-port-unreachable",
    };
    let forward = || {
        let rules = vec![
            format!("{masquerade} -m conntrack --ctstate INVALID -j DROP"),
            format!("{masquerade} -j ACCEPT"),
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT".into(),
        ];
        ((FORWARD, rules), ("FORWARD", comment("traffic of Services", FORWARD)))
    };
    match (table, extent) {
        ("filter", Extent::Forward) => {
            let (chain, jump) = forward();
            Wanted { chains: vec![chain], jumps: vec![jump] }
        }
        ("filter", Extent::All { .. }) => {
            let (chain, jump) = forward();
            let refuse = vec![
                "-p tcp -m conntrack --ctstate ESTABLISHED,DNAT -j RETURN".into(),
                "-p tcp -j REJECT --reject-with tcp-reset".into(),
                format!("-j REJECT --reject-with {unreachable}"),
            ];
            let jump_to_refuse = format!("{reject} {}", comment("Services without endpoints", REJECT));
            let jumps = vec![jump, ("FORWARD", jump_to_refuse.clone()), ("INPUT", jump_to_refuse)];
            Wanted { chains: vec![chain, (REJECT, refuse)], jumps }
        }
        ("nat", Extent::All { random_fully }) => {
            let at_random = if random_fully { " --random-fully" } else { "" };
            let (first, last) = MASQUERADED_PORTS.into_inner();
            let rules = vec![
                format!("{not_masqueraded} -j RETURN"),
                format!("-j MARK --set-xmark 0x0/{:#x}", marks.masquerade),
                format!("-p udp -j MASQUERADE --to-ports {first}-{last}{at_random}"),
                format!("-j MASQUERADE{at_random}"),
            ];
            let jump = comment("answers of a Service come back through this node", POSTROUTING);
            Wanted { chains: vec![(POSTROUTING, rules)], jumps: vec![("POSTROUTING", jump)] }
        }
        _ => Wanted::default(),
    }
}

/// What matches packets that are marked with one of these bits, and what those with none: in the words of iptables-save, and of
/// upstream where it is one bit.
fn matches(bits: u32) -> (String, String) {
    if bits.is_power_of_two() {
        let mark = format!("--mark {bits:#x}/{bits:#x}");
        return (format!("-m mark {mark}"), format!("-m mark ! {mark}"));
    }
    let none = format!("--mark 0x0/{bits:#x}");
    (format!("-m mark ! {none}"), format!("-m mark {none}"))
}

fn comment(text: &str, target: &str) -> String {
    format!("-m comment --comment \"shunt: {text}\" -j {target}")
}
