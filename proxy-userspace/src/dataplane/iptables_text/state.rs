//! What a table holds of a mode's chains and jumps, as read from iptables-save and as written since.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hasher as _},
};

use super::{Chain, ChainRules, SavedLine, Table, TableInput, saved_lines, sorted_words};

/// A rule of a built-in chain that leads to a chain of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::dataplane) struct Jump {
    /// The table of both chains.
    pub(in crate::dataplane) table: Table,
    /// The built-in chain.
    pub(in crate::dataplane) from: &'static str,
    /// The mode's chain.
    pub(in crate::dataplane) to: Chain,
    /// Matches, each with a space at the end.
    pub(in crate::dataplane) matches: &'static str,
    /// The comment; empty for none.
    pub(in crate::dataplane) comment: &'static str,
}

impl Jump {
    /// The rule without the built-in chain, as iptables-save prints it.
    pub(in crate::dataplane) fn rule(&self) -> String {
        let Self { matches, comment, to, .. } = self;
        if comment.is_empty() {
            format!("{matches}-j {to}")
        } else {
            format!("{matches}-m comment --comment \"{comment}\" -j {to}")
        }
    }
}

/// The chains and jumps that a mode writes, and how their rules are compared.
#[derive(Debug)]
pub(in crate::dataplane) struct ModeChains {
    /// Returns the chain with this name in a table; `None` if the mode does not write it.
    pub(in crate::dataplane) parse: fn(Table, &str) -> Option<Chain>,
    /// The jumps, in the order in which each is inserted before the rules that exist.
    pub(in crate::dataplane) jumps: &'static [Jump],
    /// Returns the content of a chain with these rules, given as lines `-A CHAIN RULE`.
    pub(in crate::dataplane) content: fn(&str) -> Content,
}

impl ModeChains {
    /// Returns the jump that a rule of a built-in chain is.
    pub(in crate::dataplane) fn jump(&self, table: Table, from: &str, rule: &str) -> Option<Jump> {
        let words = sorted_words(rule);
        let is_same =
            |jump: &&Jump| jump.table == table && jump.from == from && sorted_words(&jump.rule()) == words;
        self.jumps.iter().find(is_same).copied()
    }
}

/// What a chain holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dataplane) struct Content {
    /// A hash of its rules in order.
    digest: u64,
    /// The number of rules.
    pub(in crate::dataplane) rules: usize,
}

impl Content {
    /// The content of a chain with these rules, a line each.
    pub(in crate::dataplane) fn of(lines: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(lines.as_bytes());
        Self { digest: hasher.finish(), rules: lines.lines().count() }
    }
}

/// What a table holds of a mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::dataplane) struct TableState {
    /// The mode's chains.
    pub(in crate::dataplane) chains: BTreeMap<Chain, Content>,
    /// The number of rules in all of these chains.
    pub(in crate::dataplane) rules: usize,
    /// The jumps that exist.
    pub(in crate::dataplane) jumps: BTreeSet<Jump>,
}

impl TableState {
    /// Reads what iptables-save or `iptables -S` printed of a table.
    pub(in crate::dataplane) fn read(mode: &ModeChains, table: Table, saved: &str) -> Self {
        let mut chains: BTreeMap<Chain, ChainRules> = BTreeMap::new();
        let mut state = Self::default();
        for line in saved_lines(saved) {
            let (SavedLine::Chain { name, .. } | SavedLine::Rule { chain: name, .. }) = line;
            let chain = (mode.parse)(table, name);
            let rules = chain.map(|chain| chains.entry(chain).or_insert_with(|| ChainRules::new(chain)));
            match (line, rules) {
                (SavedLine::Rule { rule, .. }, Some(rules)) => rules.add(rule),
                (SavedLine::Rule { rule, .. }, None) => state.jumps.extend(mode.jump(table, name, rule)),
                (SavedLine::Chain { .. }, _) => {}
            }
        }
        for (chain, rules) in chains {
            state.fill(chain, (mode.content)(&rules.lines));
        }
        state
    }

    /// Records that a chain now holds this.
    pub(in crate::dataplane) fn fill(&mut self, chain: Chain, content: Content) {
        self.remove(chain);
        self.chains.insert(chain, content);
        self.rules += content.rules;
    }

    /// Records that a chain was removed.
    fn remove(&mut self, chain: Chain) {
        if let Some(old) = self.chains.remove(&chain) {
            self.rules -= old.rules;
        }
    }

    /// Records that iptables-restore accepted an input.
    pub(in crate::dataplane) fn record(&mut self, mode: &ModeChains, input: &TableInput) {
        for rules in &input.filled {
            self.fill(rules.chain, (mode.content)(&rules.lines));
        }
        input.removed.iter().for_each(|chain| self.remove(*chain));
        self.jumps.extend(&input.jumps);
    }

    /// Returns the jumps that the table should hold and does not hold.
    pub(in crate::dataplane) fn missing_jumps(&self, mode: &ModeChains, table: Table) -> Vec<Jump> {
        let is_missing = |jump: &&Jump| jump.table == table && !self.jumps.contains(*jump);
        mode.jumps.iter().filter(is_missing).copied().collect()
    }
}
