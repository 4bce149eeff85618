//! Finds the service ports that iptables-restore rejects when it names no rule: by trying parts of
//! a plan, half by half. All other service ports are served meanwhile.
//!
//! Legacy iptables hands over a table as a whole, and the kernel does not say which rule it
//! rejects.

use std::collections::{BTreeSet, HashSet};

use super::{plan::FamilyPlan, rules::SHARED_CHAINS, state::PortState};
use crate::{
    dataplane::iptables_text::{Chain, ChainRules, TableInput},
    model::ServicePortKey,
};

/// The number of inputs to try after one rejection: enough for three service ports among ten
/// thousand. The next sync finds the others; it has fewer service ports to try.
const MAX_TRIES: usize = 64;

/// A service port that the plan writes.
type Port<'a> = (&'a ServicePortKey, &'a PortState);

/// Applies a plan without the service ports that are rejected, and returns these. `restore` returns
/// true if an input was accepted. Returns nothing if the rejection has another cause than service
/// ports.
pub(super) fn isolate<'a>(
    plan: &'a FamilyPlan,
    restore: &mut dyn FnMut(&[TableInput]) -> bool,
) -> Vec<Port<'a>> {
    let ports: Vec<Port<'a>> = plan.written().collect();
    let (mut rejected, mut tries) = (Vec::new(), 0);
    let mut left_out: BTreeSet<&ServicePortKey> = ports.iter().map(|(key, _)| *key).collect();
    if !restore(&part(plan, &[], &ports)) {
        return rejected;
    }
    let mut untried = vec![&ports[..]];
    while let Some(tried) = untried.pop().filter(|_| tries < MAX_TRIES) {
        tries += 1;
        for (key, _) in tried {
            left_out.remove(key);
        }
        let others: Vec<Port<'_>> = ports.iter().copied().filter(|(key, _)| left_out.contains(key)).collect();
        if restore(&part(plan, tried, &others)) {
            continue;
        }
        left_out.extend(tried.iter().map(|(key, _)| *key));
        match tried {
            [] => {}
            [one] => rejected.push(*one),
            _ => untried.extend(<[_; 2]>::from(tried.split_at(tried.len() / 2))),
        }
    }
    rejected
}

/// Returns the plan's input with the own chains of some service ports, and without the rules of
/// others in shared chains. It removes no chains.
fn part(plan: &FamilyPlan, with: &[Port<'_>], without: &[Port<'_>]) -> Vec<TableInput> {
    let (included, excluded) = (RuleOwners::of(with), RuleOwners::of(without));
    let of_table = |input: &TableInput| {
        let is_included = |rules: &&ChainRules| {
            matches!(rules.chain, Chain::Fixed(_)) || included.chains.contains(&rules.chain)
        };
        let mut filled: Vec<ChainRules> = input.filled.iter().filter(is_included).cloned().collect();
        for rules in &mut filled {
            if SHARED_CHAINS.contains(&(input.table, rules.chain)) {
                let others = rules.lines.lines().filter(|rule| !excluded.own(rule));
                rules.lines = others.flat_map(|rule| [rule, "\n"]).collect();
            }
        }
        TableInput { filled, removed: Vec::new(), jumps: input.jumps.clone(), table: input.table }
    };
    plan.tables.iter().map(of_table).filter(|input| !input.is_empty()).collect()
}

/// Service ports that own rules.
pub(super) struct RuleOwners {
    chains: BTreeSet<Chain>,
    names: HashSet<String>,
}

impl RuleOwners {
    pub(super) fn of(ports: &[Port<'_>]) -> Self {
        let chains = ports.iter().flat_map(|(_, port)| port.chains.iter().copied()).collect();
        Self { chains, names: ports.iter().map(|(key, _)| key.name.to_string()).collect() }
    }

    /// Returns true if a rule belongs to one of them, by the first chain of a service port in it,
    /// or by its comment.
    pub(super) fn own(&self, rule: &str) -> bool {
        let mut chains = rule.split([' ', '"']).filter_map(Chain::parse);
        if let Some(chain) = chains.find(|chain| matches!(chain, Chain::Of(..))) {
            return self.chains.contains(&chain);
        }
        let comment = rule.split_once("--comment \"").map_or("", |(_, comment)| comment);
        comment.split([' ', '"']).next().is_some_and(|name| self.names.contains(name))
    }
}
