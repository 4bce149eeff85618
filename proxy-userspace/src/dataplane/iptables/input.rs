//! What iptables-restore is given: the chains of a table that change, as data, and the text that makes them so.

use std::fmt::Write as _;

use super::{
    jumps::JUMPS,
    names::{Chain, Table},
    rules::Lines,
};
use crate::kernel::iptables::Backend;

/// So many lines, and iptables-nft is told to look at all chains rather than at those that are named: see [`text`].
const MANY_LINES: usize = 2000;

/// What changes in a table. It is made as one: all of it or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableInput {
    /// The table.
    pub(super) table: Table,
    /// Chains that are emptied, or made, and then hold these rules.
    pub(super) filled: Vec<(Chain, Lines)>,
    /// Chains that nothing leads to any more.
    pub(super) removed: Vec<Chain>,
    /// Rules of built-in chains to put first, of [`JUMPS`].
    pub(super) jumps: Vec<usize>,
}

impl TableInput {
    /// Nothing changes.
    pub(super) const fn new(table: Table) -> Self {
        Self { table, filled: Vec::new(), removed: Vec::new(), jumps: Vec::new() }
    }

    /// How many things change.
    pub(super) fn len(&self) -> usize {
        self.filled.len() + self.removed.len() + self.jumps.len()
    }

    /// Nothing changes.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the chain is among those that get rules.
    pub(super) fn fills(&self, chain: Chain) -> bool {
        self.filled.iter().any(|(filled, _)| *filled == chain)
    }

    /// How many rules it has.
    pub(super) fn rules(&self) -> usize {
        self.filled.iter().map(|(_, lines)| lines.lines().count()).sum()
    }

    /// Adds the table to what a backend is given. Naming a chain makes or empties it, so that it can be filled or removed.
    ///
    /// iptables-nft before 1.8.11 keeps the chains that an input names in a sorted list, through which each rule goes from
    /// the start for its chain and for its target (`cache_chain_list_insert` of `iptables/nft-cache.c`): half a minute at 5,000
    /// Services. A command about all chains ends that; listing them is the one that changes nothing. It comes after the
    /// jumps, since it also keeps built-in chains from being made.
    pub(super) fn write(&self, backend: Backend, text: &mut String) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "*{}", self.table.name());
        let filled = self.filled.iter().map(|(chain, _)| chain);
        let is_target = |chain: &Chain| self.jumps.iter().any(|jump| JUMPS[*jump].to == *chain);
        let (targets, others): (Vec<_>, Vec<_>) =
            filled.chain(&self.removed).partition(|chain| is_target(chain));
        write_heads(text, targets);
        for jump in self.jumps.iter().map(|jump| JUMPS[*jump]) {
            let _ = writeln!(text, "-I {} {}", jump.from, jump.rule());
        }
        if backend == Backend::Nft && self.rules() + self.len() > MANY_LINES {
            text.push_str("-S\n");
        }
        write_heads(text, others);
        self.filled.iter().for_each(|(_, lines)| text.push_str(lines));
        for chain in &self.removed {
            let _ = writeln!(text, "-X {chain}");
        }
        text.push_str("COMMIT\n");
    }
}

fn write_heads(text: &mut String, chains: Vec<&Chain>) {
    for chain in chains {
        let _ = writeln!(text, ":{chain} - [0:0]");
    }
}

/// The whole input for a backend.
pub(super) fn text(tables: &[TableInput], backend: Backend) -> String {
    let mut text = String::new();
    for table in tables {
        table.write(backend, &mut text);
    }
    text
}
