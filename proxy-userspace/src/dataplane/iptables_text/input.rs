//! The input of iptables-restore: the changes of a table as data, and as text.

use std::fmt;

use super::{Chain, ChainRules, Jump, Table};
use crate::kernel::iptables::Backend;

/// From this many lines on, an input makes iptables-nft look at all chains: see
/// [`TableInput::write`].
const MANY_LINES: usize = 2000;

/// The changes of one table. iptables-restore makes all of them or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableInput {
    pub(crate) table: Table,
    /// Chains that are created or flushed, and then hold these rules.
    pub(crate) filled: Vec<ChainRules>,
    /// Chains that are removed. No rule may lead to them any more.
    pub(crate) removed: Vec<Chain>,
    /// Rules that are inserted at the top of built-in chains.
    pub(crate) jumps: Vec<Jump>,
}

/// Where an input names chains. A chain that is named is created or flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// All chains first.
    ChainsFirst,
    /// The targets of jumps first, and the others after the jumps. For inputs of any size to this
    /// backend.
    TargetsFirst(Backend),
}

impl TableInput {
    pub(crate) const fn new(table: Table) -> Self {
        Self { table, filled: Vec::new(), removed: Vec::new(), jumps: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.filled.len() + self.removed.len() + self.jumps.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if the chain is among those that get rules.
    pub(crate) fn fills(&self, chain: Chain) -> bool {
        self.filled.iter().any(|rules| rules.chain == chain)
    }

    /// The number of rules that it writes.
    pub(crate) fn rules(&self) -> usize {
        self.filled.iter().map(ChainRules::len).sum()
    }

    /// Returns the text of the table; `None` if there are no changes.
    ///
    /// iptables-nft before 1.8.11 keeps the chains that an input names in a sorted list. For each
    /// rule it walks this list from the start, for the rule's chain and for its target
    /// (`cache_chain_list_insert` of `iptables/nft-cache.c`): half a minute at 5,000 Services. It
    /// keeps no list after a command about all chains; `-S`, which lists them, is the one that
    /// changes nothing. It has to come after the jumps, since iptables-nft does not create built-in
    /// chains after it.
    fn write(&self, layout: Layout) -> Option<String> {
        let mut writer = TableWriter::new(self.table);
        let is_first =
            |chain: &Chain| layout == Layout::ChainsFirst || self.jumps.iter().any(|jump| jump.to == *chain);
        let chains = self.filled.iter().map(|rules| rules.chain).chain(self.removed.iter().copied());
        let (first, others): (Vec<_>, Vec<_>) = chains.partition(is_first);
        writer.flush(first);
        for jump in &self.jumps {
            writer.line(format_args!("-I {} {}", jump.from, jump.rule()));
        }
        if layout == Layout::TargetsFirst(Backend::Nft) && self.rules() + self.len() > MANY_LINES {
            writer.list_all_chains();
        }
        writer.flush(others);
        self.filled.iter().for_each(|rules| writer.rules(rules));
        writer.delete(&self.removed);
        writer.finish()
    }
}

pub(crate) fn text(tables: &[TableInput], layout: Layout) -> String {
    tables.iter().filter_map(|table| table.write(layout)).collect()
}

/// Writes the input for one table.
#[derive(Debug)]
pub(crate) struct TableWriter {
    text: String,
    /// The length of the text without any changes.
    empty: usize,
}

impl TableWriter {
    pub(crate) fn new(table: Table) -> Self {
        let text = format!("*{}\n", table.name());
        Self { empty: text.len(), text }
    }

    pub(crate) fn line(&mut self, line: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = fmt::write(&mut self.text, format_args!("{line}\n"));
    }

    /// Creates chains, or removes their rules.
    pub(crate) fn flush(&mut self, chains: impl IntoIterator<Item: fmt::Display>) {
        for chain in chains {
            self.line(format_args!(":{chain} - [0:0]"));
        }
    }

    /// Appends rules to their chain.
    pub(crate) fn rules(&mut self, rules: &ChainRules) {
        self.text.push_str(&rules.lines);
    }

    /// Removes chains. All are flushed first, so that no rule leads from one to another.
    pub(crate) fn remove_chains(&mut self, chains: &[impl fmt::Display]) {
        self.flush(chains);
        self.delete(chains);
    }

    fn delete(&mut self, chains: &[impl fmt::Display]) {
        for chain in chains {
            self.line(format_args!("-X {chain}"));
        }
    }

    /// Makes iptables-nft look at all chains: see [`TableInput::write`].
    pub(crate) fn list_all_chains(&mut self) {
        self.line(format_args!("-S"));
    }

    /// Returns the text; `None` if there are no changes.
    pub(crate) fn finish(self) -> Option<String> {
        (self.text.len() > self.empty).then(|| self.text + "COMMIT\n")
    }
}
