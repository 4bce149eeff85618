//! Compares the rules that iptables-save prints with those that were written.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    fixed_chains::{MODE, add_last_rules, fixed_chains},
    node::Node,
    rules::{PortRules, RuleContext, SHARED_CHAINS, empty_shared_rules},
    state::{FamilyState, State},
};
use crate::{
    dataplane::iptables_text::{
        Chain, ChainRules, Content, ModeChains, SavedLine, Table, TableState, save, saved_lines,
    },
    kernel::{KernelError, iptables::Iptables as Commands},
    model::{IpFamily, ServicePortKey, Snapshot},
};

/// The chains and jumps of this mode. The order of words in a rule does not count: it differs
/// between versions of iptables.
static WORDS: ModeChains = ModeChains { parse: MODE.parse, jumps: MODE.jumps, content: Content::of_words };

/// The tables of each family.
pub struct HeldTables(BTreeMap<IpFamily, BTreeMap<Table, HeldTable>>);

/// A table as iptables-save prints it.
struct HeldTable {
    state: TableState,
    /// The content of each rule of a shared chain. Rules of thousands of Services are in it.
    shared: BTreeSet<(Chain, u64)>,
}

impl HeldTables {
    /// Runs iptables-save for each family.
    pub(super) fn read(commands: &BTreeMap<IpFamily, Commands>) -> Result<Self, KernelError> {
        let mut families = BTreeMap::new();
        for (family, commands) in commands {
            let mut tables = BTreeMap::new();
            for (table, saved) in save(commands, &Table::ALL) {
                let saved = saved?;
                if !Commands::is_complete(&saved) {
                    let error = std::io::Error::other("it holds rules that this iptables does not know");
                    let object = format!("the {family} table {} with iptables-save", table.name());
                    return Err(KernelError::call("list", object)(error));
                }
                tables.insert(table, HeldTable::read(table, &saved));
            }
            families.insert(*family, tables);
        }
        Ok(Self(families))
    }

    /// Returns what differs of a service port.
    pub(super) fn differences(
        &self,
        state: &State,
        snapshot: &Snapshot,
        key: &ServicePortKey,
    ) -> Vec<String> {
        let family = state.families.get(&key.family).zip(self.0.get(&key.family));
        let (Some((state, tables)), Some(port)) = (family, snapshot.ports.get(key)) else {
            return Vec::new();
        };
        let node = Node::of(snapshot, key.family, state.options);
        let rules = PortRules::new(context(state, key.family, &node), key, port);
        let mut found = Vec::new();
        for chain in rules.own_chains() {
            found.extend(chain_difference(tables, Table::Nat, &chain));
        }
        for ((table, chain), rules) in SHARED_CHAINS.iter().zip(&rules.shared_rules()) {
            let missing = rules.lines.lines().filter(|line| {
                let rule = (*chain, normalized(line));
                tables.get(table).is_some_and(|table| !table.shared.contains(&rule))
            });
            found.extend(missing.map(|line| format!("the {} rule {line:?} is missing", table.name())));
        }
        found
    }

    /// Returns what differs of the chains that all service ports share.
    pub(super) fn differences_of_node(&self, state: &State, snapshot: &Snapshot) -> Vec<String> {
        let mut found = Vec::new();
        for (family, tables) in &self.0 {
            let Some(state) = state.families.get(family) else { continue };
            let node = Node::of(snapshot, *family, state.options);
            let context = context(state, *family, &node);
            let mut of_family: Vec<String> = Vec::new();
            for (table, rules) in fixed_chains(context) {
                of_family.extend(chain_difference(tables, table, &rules));
            }
            for (index, mut rules) in empty_shared_rules().into_iter().enumerate() {
                add_last_rules(index, &mut rules, context);
                let (table, chain) = SHARED_CHAINS[index];
                let Some(held) = tables.get(&table) else { continue };
                let missing =
                    rules.lines.lines().filter(|line| !held.shared.contains(&(chain, normalized(line))));
                of_family
                    .extend(missing.map(|line| format!("the {} rule {line:?} is missing", table.name())));
            }
            for (table, held) in tables {
                let missing = held.state.missing_jumps(&WORDS, *table).into_iter();
                of_family.extend(missing.map(|jump| {
                    format!("the {} rule \"-A {} {}\" is missing", table.name(), jump.from, jump.rule())
                }));
            }
            found.extend(of_family.into_iter().map(|difference| format!("{family}: {difference}")));
        }
        found
    }
}

impl HeldTable {
    fn read(table: Table, saved: &str) -> Self {
        let state = TableState::read(&WORDS, table, saved);
        let mut shared = BTreeSet::new();
        for line in saved_lines(saved) {
            let SavedLine::Rule { chain: name, rule } = line else { continue };
            let chain = SHARED_CHAINS.iter().find(|(of, chain)| *of == table && chain.is_named(name));
            shared.extend(chain.map(|(_, chain)| (*chain, normalized(&format!("-A {chain} {rule}")))));
        }
        Self { state, shared }
    }
}

const fn context<'a>(state: &'a FamilyState, family: IpFamily, node: &'a Node) -> RuleContext<'a> {
    RuleContext { family, options: &state.options, node, is_large: state.is_large }
}

/// Returns a number for a rule, given as a line.
fn normalized(rule: &str) -> u64 {
    Content::of_words(rule).digest()
}

/// Compares all rules of a chain that belongs to one service port, or to none.
fn chain_difference(
    tables: &BTreeMap<Table, HeldTable>,
    table: Table,
    wanted: &ChainRules,
) -> Option<String> {
    let name = table.name();
    let Some(held) = tables.get(&table)?.state.chains.get(&wanted.chain) else {
        return Some(format!("the {name} chain {} is missing", wanted.chain));
    };
    let (has, needs) = (held.rules, wanted.len());
    if has != needs {
        return Some(format!("the {name} chain {} has {has} rules instead of {needs}", wanted.chain));
    }
    (*held != Content::of_words(&wanted.lines))
        .then(|| format!("the {name} chain {} has other rules", wanted.chain))
}
