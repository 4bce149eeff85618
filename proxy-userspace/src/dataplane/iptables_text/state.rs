//! What a table holds of a mode's chains and jumps, as read from iptables-save and as written
//! since.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hasher as _},
};

use super::{Chain, ChainRules, SavedLine, Table, TableInput, saved_lines, sorted_words};

/// A rule of a built-in chain that leads to a chain of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Jump {
    /// The table of both chains.
    pub(crate) table: Table,
    /// The built-in chain.
    pub(crate) from: &'static str,
    /// The mode's chain.
    pub(crate) to: Chain,
    matches: &'static str,
    comment: &'static str,
}

impl Jump {
    /// A jump with this comment, unless it is empty.
    pub(crate) const fn new(table: Table, from: &'static str, to: Chain, comment: &'static str) -> Self {
        Self { table, from, to, matches: "", comment }
    }

    /// The same jump, for new connections only.
    pub(crate) const fn of_new_connections(self) -> Self {
        Self { matches: "-m conntrack --ctstate NEW ", ..self }
    }

    /// Returns the rule without the built-in chain, as iptables-save prints it.
    pub(crate) fn rule(&self) -> String {
        let Self { matches, comment, to, .. } = self;
        if comment.is_empty() {
            return format!("{matches}-j {to}");
        }
        format!("{matches}-m comment --comment \"{comment}\" -j {to}")
    }
}

/// The chains and jumps that a mode writes, and how their rules are compared.
#[derive(Debug)]
pub(crate) struct ModeChains {
    /// Returns the chain with this name in a table; `None` if the mode does not write it.
    pub(crate) parse: fn(Table, &str) -> Option<Chain>,
    /// The jumps, in the order in which each is inserted before the rules that exist.
    pub(crate) jumps: &'static [Jump],
    /// Returns the content of a chain with these rules, given as lines `-A CHAIN RULE`.
    pub(crate) content: fn(&str) -> Content,
}

impl ModeChains {
    /// Returns the jump that a rule of a built-in chain is.
    pub(crate) fn jump(&self, table: Table, from: &str, rule: &str) -> Option<Jump> {
        let words = sorted_words(rule);
        let is_same =
            |jump: &&Jump| jump.table == table && jump.from == from && sorted_words(&jump.rule()) == words;
        self.jumps.iter().find(is_same).copied()
    }
}

/// What a chain holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// A hash of its rules in order.
    digest: u64,
    pub(crate) rules: usize,
}

impl Content {
    /// The content of a chain with these rules, a line each.
    pub(crate) fn of(lines: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(lines.as_bytes());
        Self { digest: hasher.finish(), rules: lines.lines().count() }
    }

    /// The same, whatever the order of words in a rule is. It differs between versions of iptables.
    pub(crate) fn of_words(lines: &str) -> Self {
        let sorted = lines.lines().map(|line| sorted_words(line).join(" ") + "\n");
        Self::of(&sorted.collect::<String>())
    }

    /// Returns the hash of its rules.
    pub(crate) const fn digest(self) -> u64 {
        self.digest
    }
}

/// What a table holds of a mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableState {
    pub(crate) chains: BTreeMap<Chain, Content>,
    /// The number of rules in all of these chains.
    pub(crate) rules: usize,
    /// The jumps that exist.
    pub(crate) jumps: BTreeSet<Jump>,
}

impl TableState {
    /// Reads what iptables-save or `iptables -S` printed of a table.
    pub(crate) fn read(mode: &ModeChains, table: Table, saved: &str) -> Self {
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
    pub(crate) fn fill(&mut self, chain: Chain, content: Content) {
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
    pub(crate) fn record(&mut self, mode: &ModeChains, input: &TableInput) {
        for rules in &input.filled {
            self.fill(rules.chain, (mode.content)(&rules.lines));
        }
        input.removed.iter().for_each(|chain| self.remove(*chain));
        self.jumps.extend(&input.jumps);
    }

    /// Returns the jumps that the table should hold and does not hold.
    pub(crate) fn missing_jumps(&self, mode: &ModeChains, table: Table) -> Vec<Jump> {
        let is_missing = |jump: &&Jump| jump.table == table && !self.jumps.contains(*jump);
        mode.jumps.iter().filter(is_missing).copied().collect()
    }
}
