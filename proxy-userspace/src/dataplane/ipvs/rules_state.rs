//! What iptables holds of this mode, and what has to be written so that it holds other rules.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::{MODE, TABLES};
use crate::dataplane::iptables_text::{
    Chain, ChainRules, Content, SERVICES, SavedLine, Table, TableInput, TableState, saved_lines,
};

/// What iptables holds of this mode in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RulesState {
    tables: BTreeMap<Table, TableState>,
    /// `KUBE-SERVICES` holds rules of the iptables mode, which send traffic of Services to other
    /// chains.
    pub(super) is_of_iptables_mode: bool,
}

impl RulesState {
    /// Adds the output of iptables-save for a table.
    pub(super) fn read(&mut self, table: Table, saved: &str) {
        self.tables.insert(table, TableState::read(&MODE, table, saved));
        self.is_of_iptables_mode |= table == Table::Nat && has_rules_of_iptables_mode(saved);
    }

    /// Returns what has to be written so that these chains exist with these rules; nothing if they
    /// do.
    pub(super) fn difference(&self, chains: &[(Table, ChainRules)]) -> Vec<TableInput> {
        let empty = TableState::default();
        let mut inputs = TABLES.map(TableInput::new);
        for input in &mut inputs {
            let state = self.tables.get(&input.table).unwrap_or(&empty);
            let differs =
                |rules: &&ChainRules| state.chains.get(&rules.chain) != Some(&(MODE.content)(&rules.lines));
            let of_table = chains.iter().filter(|(table, _)| *table == input.table);
            input.filled = of_table.map(|(_, rules)| rules).filter(differs).cloned().collect();
            input.jumps = state.missing_jumps(&MODE, input.table);
        }
        inputs.into_iter().filter(|input| !input.is_empty()).collect()
    }

    /// Returns the chains that are not the same in another state, and those to which no jump leads
    /// there.
    pub(super) fn chains_that_differ(&self, other: &Self) -> BTreeSet<Chain> {
        let empty = TableState::default();
        let mut found = BTreeSet::new();
        for (table, own) in &self.tables {
            let other = other.tables.get(table).unwrap_or(&empty);
            let differs = |(chain, content): &(&Chain, &Content)| other.chains.get(chain) != Some(content);
            found.extend(own.chains.iter().filter(differs).map(|(chain, _)| *chain));
            found.extend(own.jumps.difference(&other.jumps).map(|jump| jump.to));
        }
        found
    }

    /// Records that iptables-restore accepted inputs.
    pub(super) fn record(&mut self, inputs: &[TableInput]) {
        for input in inputs {
            self.tables.entry(input.table).or_default().record(&MODE, input);
            self.is_of_iptables_mode &= !(input.table == Table::Nat && input.fills(SERVICES));
        }
    }
}

fn has_rules_of_iptables_mode(nat: &str) -> bool {
    saved_lines(nat).any(|line| {
        matches!(line, SavedLine::Rule { chain, rule } if SERVICES.is_named(chain)
            && (rule.contains(" KUBE-SVC-") || rule.contains(" KUBE-EXT-")))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{
        super::{
            node::{Node, PlanOptions},
            rule_features::RefusedFeatures,
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
    fn rules_are_equal_whatever_their_quotation_marks() {
        let mut state = RulesState::default();
        state.read(Table::Nat, SAVED);
        let jumps = &state.tables[&Table::Nat].jumps;
        assert_eq!(jumps.len(), 1, "the jump of another program is not counted");
        let options = PlanOptions {
            families: vec![IpFamily::V4],
            settings: IpvsSettings::default(),
            random_fully: [IpFamily::V4].into(),
            refused: RefusedFeatures::new(),
        };
        let needs = Needs { filled: [Set::NodePortSctp].into(), denied: BTreeSet::new() };
        let change = state.difference(&chains(IpFamily::V4, &options, &Node::default(), &needs));
        assert!(change.iter().all(|input| input.table != Table::Nat || !input.fills(NODE_PORT)));
        assert_eq!(change.iter().map(|input| input.filled.len()).sum::<usize>(), CHAINS.len() - 1);
        assert_eq!(change.iter().map(|input| input.jumps.len()).sum::<usize>(), MODE.jumps.len() - 1);
    }

    #[test]
    fn rules_of_the_iptables_mode_are_recognized() {
        let mut state = RulesState::default();
        state.read(Table::Nat, "*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN\n");
        assert!(!state.is_of_iptables_mode);
        state.read(Table::Nat, "*nat\n-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-FYZB2HTOW53NRIPL\n");
        assert!(state.is_of_iptables_mode);
    }
}
