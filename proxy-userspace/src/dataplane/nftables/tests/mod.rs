//! Tests plans on a mirror of the tables that fails where the kernel would: properties of all
//! dataplanes, the path of a packet, and golden plans.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use super::{
    Plan, State,
    lists::EndpointList,
    plan,
    sets::{Destination, SharedSet},
    state::{Element, Table},
};
use crate::{
    dataplane::PlanSize as _,
    kernel::nftables::{
        Chain, Change, ElementKey, ElementValue, Hook, Name, Set, Statement, TableListing, Verdict,
    },
    model::{
        ClientLocation, Dirty, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NodeView, Protocol,
        ResolvedEndpoint, ResolvedPort, ServicePortKey, Snapshot, TrafficPolicy,
        testing::{cidrs, ip, key, port_number, resolved_port},
    },
};

mod golden;
mod packet;
mod properties;

const MASQUERADE: u32 = 0x4000;

fn empty() -> State {
    State { masquerade_mark: MASQUERADE, ..State::default() }
}

/// Records a plan as `apply` does when the kernel accepts everything.
fn apply(state: &mut State, plan: Plan) {
    apply_to(&mut state.clone(), state, plan);
}

/// As [`apply`], for a process that does not know all rules in the kernel.
fn apply_to(kernel: &mut State, state: &mut State, plan: Plan) {
    for (family, change) in plan.transactions.into_iter().flatten() {
        commit(kernel, family, change.clone());
        state.record(family, change);
    }
    state.update(plan.update, &[]);
}

/// Makes a change in the kernel. `kernel` has all rules.
fn commit(kernel: &mut State, family: IpFamily, change: Change) {
    check(kernel, family, &change);
    kernel.record(family, change);
}

/// Fails where the kernel would: if a new object exists, an old one does not, or a rule or an
/// element uses a deleted one (EBUSY).
fn check(state: &State, family: IpFamily, change: &Change) {
    let table = state.table(family);
    let shared = |set: &Set| SharedSet::from_name(&set.name).expect("a shared set");
    let has_set = |name: &Name| table.sets.contains_key(name);
    let has_chain = |name: &Name| table.chains.contains_key(name);
    match change {
        Change::AddTable(_) => assert!(!table.exists),
        Change::DeleteTable => assert!(table.exists),
        Change::AddChain(chain) => assert!(table.exists && !has_chain(&chain.name), "{}", chain.name),
        Change::FlushChain(chain) => assert!(has_chain(chain), "{chain}"),
        Change::DeleteChain(chain) => {
            assert!(has_chain(chain), "{chain}");
            assert!(!is_referenced(table, chain), "{chain} is in use");
        }
        Change::AddRule(chain, rule) => {
            assert!(has_chain(chain), "{chain}");
            for name in referenced_names(&rule.statements) {
                assert!(has_set(&name) || has_chain(&name), "{chain}: {name} does not exist");
            }
        }
        Change::AddSet(set) => assert!(table.exists && !has_set(&set.name), "{}", set.name),
        Change::DeleteSet(set) => {
            assert!(has_set(set), "{set}");
            assert!(!is_in_rule(table, set), "{set} is in use");
        }
        Change::AddElement(set, key, value) => {
            assert!(has_set(&set.name) && !table.elements.contains_key(&(shared(set), *key)));
            if let Some(chain) = goto(value) {
                assert!(has_chain(chain), "{chain} does not exist");
            }
        }
        Change::DeleteElement(set, key) => assert!(table.elements.contains_key(&(shared(set), *key))),
    }
}

fn referenced_names(statements: &[Statement]) -> Vec<Name> {
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

fn is_referenced(table: &Table, chain: &Name) -> bool {
    is_in_rule(table, chain) || table.elements.values().any(|element| goto(&element.value) == Some(chain))
}

fn is_in_rule(table: &Table, name: &Name) -> bool {
    assert!(table.chains.values().all(Option::is_some), "the kernel knows its rules");
    let rules = table.chains.values().flatten().flatten();
    rules.flat_map(|rule| referenced_names(&rule.statements)).any(|used| used == *name)
}

fn goto(value: &ElementValue) -> Option<&Name> {
    match value {
        ElementValue::Verdict(value) => match &value.verdict {
            Verdict::Goto(chain) => Some(chain),
            _ => None,
        },
        _ => None,
    }
}

/// Returns a plan with transactions of the usual size.
fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
    plan::plan(state, snapshot, dirty, plan::MAX_CHANGES)
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = empty();
    let all = plan(&state, snapshot, &Dirty::everything());
    apply(&mut state, all);
    state
}

/// Returns the state that a new process observes.
fn restarted(state: &State) -> State {
    let mut observed = empty();
    for family in IpFamily::ALL {
        let table = state.table(family);
        let element = |(key, element): (&(SharedSet, ElementKey), &Element)| {
            (*key, Element { value: element.value.clone(), references: 0 })
        };
        *observed.table_mut(family) = Table {
            exists: table.exists,
            is_foreign: false,
            elements: table.elements.iter().map(element).collect(),
            chains: table.chains.keys().map(|name| (name.clone(), None)).collect(),
            sets: table.sets.clone(),
            lists: BTreeSet::new(),
        };
    }
    observed
}

/// Returns the state without the chains and sets of lists, which stay when no destination needs
/// them.
fn without_lists(state: &State) -> State {
    let mut state = state.clone();
    for family in IpFamily::ALL {
        let table = state.table_mut(family);
        for sized in std::mem::take(&mut table.lists) {
            table.chains.remove(&sized.chain());
            table.sets.remove(&SharedSet::Sized(sized).name());
        }
        for list in EndpointList::ALL {
            table.chains.remove(list.chain());
        }
        // The numbers of endpoints may differ.
        table.elements.retain(|(set, _), _| !EndpointList::ALL.iter().any(|list| list.endpoints() == *set));
    }
    state
}
