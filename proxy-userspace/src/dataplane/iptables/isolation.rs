//! Which service ports a refusal is about, where iptables-restore names no rule: found by trying, half by half, so that what is
//! wrong with one keeps no other from being served.
//!
//! The old iptables hands over a table as one, and the kernel says no more of what it refuses than that it does.

use std::collections::{BTreeSet, HashSet};

use super::{
    input::TableInput,
    names::Chain,
    plan::FamilyPlan,
    rules::{Lines, SHARED},
    state::PortState,
};
use crate::model::ServicePortKey;

/// Inputs that are tried for one refusal: enough for three service ports among ten thousand. Those after it are found at the
/// next try, which has less to look at.
const MOST_TRIES: usize = 64;

/// A service port that the plan writes.
type Port<'a> = (&'a ServicePortKey, &'a PortState);

/// Puts all of a plan into place but those service ports that are refused, and returns these. `restore` says whether an input
/// was taken. None are returned where the refusal is not about service ports.
pub(super) fn isolate<'a>(
    plan: &'a FamilyPlan,
    restore: &mut dyn FnMut(&[TableInput]) -> bool,
) -> Vec<Port<'a>> {
    let ports: Vec<Port<'a>> = plan.written().collect();
    let (mut refused, mut tries) = (Vec::new(), 0);
    let mut left_out: BTreeSet<&ServicePortKey> = ports.iter().map(|(key, _)| *key).collect();
    if !restore(&part(plan, &[], &ports)) {
        return refused;
    }
    let mut untried = vec![&ports[..]];
    while let Some(tried) = untried.pop().filter(|_| tries < MOST_TRIES) {
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
            [one] => refused.push(*one),
            _ => untried.extend(<[_; 2]>::from(tried.split_at(tried.len() / 2))),
        }
    }
    refused
}

/// The plan's input with the chains of some service ports, and without what others add to shared ones. Nothing is removed.
fn part(plan: &FamilyPlan, with: &[Port<'_>], without: &[Port<'_>]) -> Vec<TableInput> {
    let own: BTreeSet<Chain> = with.iter().flat_map(|(_, port)| port.chains.iter().copied()).collect();
    let absent = Absent::of(without);
    let of_table = |input: &TableInput| {
        let is_filled = |chain: &Chain| matches!(chain, Chain::Fixed(_)) || own.contains(chain);
        let filled = input.filled.iter().filter(|(chain, _)| is_filled(chain));
        let filled = filled.map(|(chain, lines)| {
            let is_shared = SHARED.contains(&(input.table, *chain));
            (*chain, if is_shared { absent.cut_from(lines) } else { lines.clone() })
        });
        TableInput { filled: filled.collect(), removed: Vec::new(), ..input.clone() }
    };
    plan.tables.iter().map(of_table).filter(|input| !input.is_empty()).collect()
}

/// What rules of service ports that are not there are told by: a chain that they name, or else their comment.
struct Absent {
    chains: BTreeSet<Chain>,
    names: HashSet<String>,
}

impl Absent {
    fn of(ports: &[Port<'_>]) -> Self {
        let chains = ports.iter().flat_map(|(_, port)| port.chains.iter().copied()).collect();
        Self { chains, names: ports.iter().map(|(key, _)| key.name.to_string()).collect() }
    }

    fn cut_from(&self, lines: &str) -> Lines {
        let kept = lines.lines().filter(|line| !self.has(line));
        kept.flat_map(|line| [line, "\n"]).collect()
    }

    fn has(&self, rule: &str) -> bool {
        let mut chains = rule.split([' ', '"']).filter_map(Chain::parse);
        if let Some(chain) = chains.find(|chain| matches!(chain, Chain::Of(..))) {
            return self.chains.contains(&chain);
        }
        let comment = rule.split_once("--comment \"").map_or("", |(_, comment)| comment);
        comment.split([' ', '"']).next().is_some_and(|name| self.names.contains(name))
    }
}
