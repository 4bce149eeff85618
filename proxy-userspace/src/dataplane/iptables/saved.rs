//! Reads what iptables-save and `iptables -S` print: which chains of ours there are, what they hold, and which jumps lead to them.

use std::collections::BTreeMap;

use super::{
    jumps::{JUMPS, Jump},
    names::{Chain, Table},
    rules::Lines,
    state::{Content, TableState},
};

/// What a table holds of ours.
pub(super) fn table(table: Table, saved: &str) -> TableState {
    let mut chains: BTreeMap<Chain, Lines> = BTreeMap::new();
    let mut state = TableState::default();
    for line in saved.lines() {
        if let Some(name) = declared(line) {
            if let Some(chain) = Chain::parse(name) {
                chains.entry(chain).or_default();
            }
        } else if let Some((name, rule)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' ')) {
            match Chain::parse(name) {
                Some(chain) => {
                    let lines = chains.entry(chain).or_default();
                    lines.push_str(&single_spaced(line));
                    lines.push('\n');
                }
                None => state.jumps.extend(jump(table, name, rule)),
            }
        }
    }
    chains.into_iter().for_each(|(chain, lines)| state.fill(chain, Content::of(&lines)));
    state
}

/// The chain that a line names as being there.
fn declared(line: &str) -> Option<&str> {
    let rest = line.strip_prefix(':').or_else(|| line.strip_prefix("-N "))?;
    rest.split(' ').next()
}

/// iptables prints two spaces before a counter's name, where nobody wrote them.
fn single_spaced(line: &str) -> String {
    line.replace("--nfacct-name  ", "--nfacct-name ")
}

/// The jump that a rule of a built-in chain is.
fn jump(table: Table, from: &str, rule: &str) -> Option<usize> {
    let words = words(rule);
    let is_this =
        |jump: &Jump| jump.table == table && jump.from == from && self::words(&jump.rule()) == words;
    JUMPS.iter().position(is_this)
}

/// The order of matches and what stands in quotation marks differ between versions.
fn words(rule: &str) -> Vec<&str> {
    let mut words: Vec<_> = rule.split([' ', '"']).filter(|word| !word.is_empty()).collect();
    words.sort_unstable();
    words
}
