//! A mirror of the tables that refuses what the kernel refuses, for the laws of every dataplane, what a packet meets, and plans as
//! people read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use super::{
    Plan, State,
    lists::List,
    plan, service,
    sets::{Base, Destination},
    state::{Held, Table},
};
use crate::{
    dataplane::PlanSize as _,
    kernel::nftables::{Change, ElementKey, ElementValue, Family, Name, Set, Statement, Verdict},
    model::{
        ClientLocation, Dirty, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NodeView,
        ResolvedEndpoint, ResolvedPort, ServicePortKey, Snapshot, TrafficPolicy,
        testing::{cidrs, ip, key, port_number, resolved_port},
    },
};

mod golden;
mod laws;
mod packet;

const MASQUERADE: u32 = 0x4000;

fn empty() -> State {
    State { masquerade: MASQUERADE, ..State::default() }
}

/// What `apply` does to the mirror when the kernel takes everything.
fn apply(state: &mut State, plan: Plan) {
    for (family, change) in plan.transactions.into_iter().flatten() {
        check(state, family, &change);
        state.record(family, change);
    }
    state.learn(plan.facts, &[]);
}

/// The kernel refuses what is there already or is not there, and to remove what is in use.
fn check(state: &State, family: Family, change: &Change) {
    let table = state.table(family);
    let base = |set: &Set| Base::of(&set.name).expect("one of ours");
    let has_set = |name: &Name| table.sets.contains_key(name);
    let has_chain = |name: &Name| table.chains.contains_key(name);
    match change {
        Change::AddTable(_) => assert!(!table.is_there),
        Change::DeleteTable => assert!(table.is_there),
        Change::AddChain(chain) => assert!(table.is_there && !has_chain(&chain.name), "{}", chain.name),
        Change::FlushChain(chain) => assert!(has_chain(chain), "{chain}"),
        Change::DeleteChain(chain) => {
            assert!(has_chain(chain), "{chain}");
            assert!(!leads_to(table, chain), "{chain} is in use");
        }
        Change::AddRule(chain, rule) => {
            assert!(has_chain(chain), "{chain}");
            for name in needs(&rule.statements) {
                assert!(has_set(&name) || has_chain(&name), "{chain}: there is no {name}");
            }
        }
        Change::AddSet(set) => assert!(table.is_there && !has_set(&set.name), "{}", set.name),
        Change::DeleteSet(set) => {
            assert!(has_set(set), "{set}");
            let rules = table.chains.values().flatten().flatten();
            assert!(
                rules.flat_map(|rule| needs(&rule.statements)).all(|name| name != *set),
                "{set} is in use"
            );
        }
        Change::AddElement(set, key, value) => {
            assert!(has_set(&set.name) && !table.elements.contains_key(&(base(set), *key)));
            if let Some(chain) = goto(value) {
                assert!(has_chain(chain), "there is no {chain}");
            }
        }
        Change::DeleteElement(set, key) => assert!(table.elements.contains_key(&(base(set), *key))),
    }
}

fn needs(statements: &[Statement]) -> Vec<Name> {
    let named = |statement: &Statement| match statement {
        Statement::InSet(_, name)
        | Statement::VerdictMap(_, name)
        | Statement::DnatByMap(_, name)
        | Statement::UpdateSet(name, _)
        | Statement::Verdict(Verdict::Goto(name) | Verdict::Jump(name)) => Some(name.clone()),
        _ => None,
    };
    statements.iter().filter_map(named).collect()
}

fn leads_to(table: &Table, chain: &Name) -> bool {
    let rules = table.chains.values().flatten().flatten();
    let by_rule = rules.flat_map(|rule| needs(&rule.statements)).any(|name| name == *chain);
    by_rule || table.elements.values().any(|held| goto(&held.value) == Some(chain))
}

fn goto(value: &ElementValue) -> Option<&Name> {
    match value {
        ElementValue::Verdict(led) => match &led.verdict {
            Verdict::Goto(chain) => Some(chain),
            _ => None,
        },
        _ => None,
    }
}

/// A plan in transactions of the usual size.
fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    plan::plan(state, snapshot, dirty, plan::MOST_IN_TRANSACTION)
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = empty();
    let all = plan(&state, snapshot, &Dirty::everything());
    apply(&mut state, all);
    state
}

/// What a process that starts finds.
fn restarted(state: &State) -> State {
    let mut found = empty();
    for family in Family::ALL {
        let table = state.table(family);
        let held =
            |(key, held): (&(Base, ElementKey), &Held)| (*key, Held { value: held.value.clone(), claims: 0 });
        *found.table_mut(family) = Table {
            is_there: table.is_there,
            is_foreign: false,
            elements: table.elements.iter().map(held).collect(),
            chains: table.chains.keys().map(|name| (name.clone(), None)).collect(),
            sets: table.sets.clone(),
            sizes: BTreeSet::new(),
        };
    }
    found
}

/// Without the chains and sets of sizes, which stay when nothing leads to them.
fn without_sizes(state: &State) -> State {
    let mut state = state.clone();
    for family in Family::ALL {
        let table = state.table_mut(family);
        for sized in std::mem::take(&mut table.sizes) {
            table.chains.remove(&sized.chain());
            table.sets.remove(&Base::Sized(sized).name());
        }
        for list in List::ALL {
            table.chains.remove(list.chain());
        }
        // Which number an endpoint has is of no importance.
        table.elements.retain(|(base, _), _| !List::ALL.iter().any(|list| list.endpoints() == *base));
    }
    state
}
