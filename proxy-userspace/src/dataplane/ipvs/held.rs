//! The rules that are there, what has to be written so that others are, and how iptables-restore is told.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::rules::{JUMPS, Lines, SERVICES, Table, has_chain, jump, jump_rule, words};

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

#[cfg(test)]
mod tests {
    use super::{
        super::{
            node::{Node, PlanOptions},
            rules::{CHAINS, NODE_PORT, Needs, chains},
            sets::Set,
            settings::IpvsSettings,
        },
        *,
    };
    use crate::model::IpFamily;

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
        let options = PlanOptions {
            families: vec![IpFamily::V4],
            settings: IpvsSettings::default(),
            random_fully: [IpFamily::V4].into(),
        };
        let needs = Needs { filled: [Set::NodePortSctp].into(), denied: BTreeSet::new() };
        let wanted = chains(IpFamily::V4, &options, &Node::default(), &needs);
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
