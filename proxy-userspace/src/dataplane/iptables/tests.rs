//! The laws of every dataplane, held to the plans of the iptables mode over generated Snapshots. What the rules mean is shown
//! by tracing packets through them, in `tests/tests/iptables_rules`.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{
    input::TableInput,
    names::{Chain, KUBELET_FIREWALL, ROUTES_LOCALNET, Table},
    plan::{Plan, plan},
    state::{FamilyState, State},
    terms::Offer,
};
use crate::{
    dataplane::PlanSize as _,
    kernel::iptables::Backend,
    model::{Dirty, Snapshot, testing},
};

fn offer() -> impl Strategy<Value = Offer> {
    any::<[bool; 4]>().prop_map(|[localhost_node_ports, random_fully, be_liberal, counters]| Offer {
        masquerade_mark: 1 << 14,
        localhost_node_ports,
        random_fully,
        be_liberal,
        counters,
    })
}

fn programmed(offer: Offer, snapshot: &Snapshot) -> State {
    let mut state = State::of_empty_tables(offer);
    plan(&state, snapshot, &Dirty::everything()).record(&mut state);
    state
}

/// What a process that starts on these tables reads from them.
fn restarted(state: &State) -> State {
    let read =
        |held: &FamilyState| FamilyState::observed(held.offer, held.tables.clone(), held.routes_localnet);
    State { families: state.families.iter().map(|(family, held)| (*family, read(held))).collect() }
}

/// The targets of the rules that an input puts into chains.
fn targets(input: &TableInput) -> BTreeSet<Chain> {
    let lines = input.filled.iter().flat_map(|(_, lines)| lines.lines());
    lines.filter_map(|line| Chain::parse(line.rsplit_once("-j ")?.1)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn after_apply_nothing_is_left_to_plan(offer in offer(), snapshot in testing::snapshot()) {
        let state = programmed(offer, &snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again:#?}");
    }

    #[test]
    fn planning_what_is_dirty_reaches_what_planning_everything_reaches(
        offer in offer(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(offer, &before);
        plan(&state, &after, &dirty).record(&mut state);
        // Routing loopback addresses is not taken back.
        let mut fresh = programmed(offer, &after);
        for (family, held) in &mut fresh.families {
            held.routes_localnet |= state.families[family].routes_localnet;
            held.set_route_localnet |= state.families[family].set_route_localnet;
            for (table, chain) in [(Table::Filter, KUBELET_FIREWALL), (Table::Mangle, ROUTES_LOCALNET)] {
                if let Some(content) = state.families[family].tables[&table].chains.get(&chain) {
                    held.tables.get_mut(&table).unwrap().fill(chain, *content);
                }
            }
        }
        prop_assert_eq!(&state, &fresh);
    }

    #[test]
    fn a_plan_names_only_what_changes(
        offer in offer(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let old = programmed(offer, &before);
        let change = plan(&old, &after, &dirty);
        let mut new = old.clone();
        let named: Vec<_> = change.families.iter().flat_map(|plan| {
            plan.tables.iter().flat_map(move |input| {
                let chains = input.filled.iter().map(|(chain, _)| chain).chain(&input.removed);
                chains.map(move |chain| (plan.family, input.table, *chain))
            })
        }).collect();
        change.record(&mut new);
        for (family, table, chain) in named {
            let held = |state: &State| state.families[&family].tables[&table].chains.get(&chain).copied();
            prop_assert_ne!(held(&old), held(&new), "{} {}", table.name(), chain);
        }
    }

    #[test]
    fn a_restarted_proxy_writes_nothing(offer in offer(), snapshot in testing::snapshot()) {
        let state = programmed(offer, &snapshot);
        let mut again = restarted(&state);
        let takeover = plan(&again, &snapshot, &Dirty::everything());
        prop_assert!(takeover.is_empty(), "{takeover:#?}");
        takeover.record(&mut again);
        prop_assert_eq!(again, state);
    }

    #[test]
    fn what_changed_while_the_proxy_was_away_is_put_right(
        offer in offer(),
        (before, after, _) in testing::snapshot_change(),
    ) {
        let mut state = restarted(&programmed(offer, &before));
        plan(&state, &after, &Dirty::everything()).record(&mut state);
        let fresh = programmed(offer, &after);
        for (family, held) in &fresh.families {
            prop_assert_eq!(&state.families[family].tables[&Table::Nat], &held.tables[&Table::Nat]);
            prop_assert_eq!(&state.families[family].ports, &held.ports);
        }
    }

    #[test]
    fn nothing_leads_to_a_chain_that_is_not_there_and_no_chain_goes_that_something_leads_to(
        offer in offer(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        // What leads where, as it is in the kernel; each table is changed as one.
        let mut edges: BTreeMap<_, BTreeSet<Chain>> = BTreeMap::new();
        let mut state = State::of_empty_tables(offer);
        for (snapshot, dirty) in [(before, Dirty::everything()), (after, dirty)] {
            let change: Plan = plan(&state, &snapshot, &dirty);
            for plan in &change.families {
                let held = state.families.get_mut(&plan.family).unwrap();
                for input in &plan.tables {
                    for (chain, lines) in &input.filled {
                        let one = TableInput { filled: vec![(*chain, lines.clone())], ..TableInput::new(input.table) };
                        edges.insert((plan.family, input.table, *chain), targets(&one));
                    }
                    for chain in &input.removed {
                        edges.remove(&(plan.family, input.table, *chain));
                    }
                    held.tables.get_mut(&input.table).unwrap().record(input);
                    for ((_, _, from), to) in edges.range((plan.family, input.table, Chain::Fixed(""))..).filter(|((family, table, _), _)| *family == plan.family && *table == input.table) {
                        for chain in to {
                            prop_assert!(held.tables[&input.table].chains.contains_key(chain), "{} leads to {}", from, chain);
                        }
                    }
                }
            }
            change.record(&mut state);
        }
    }

    #[test]
    fn undoing_everything_leaves_the_fixed_chains_alone(offer in offer(), snapshot in testing::snapshot()) {
        let mut state = programmed(offer, &snapshot);
        plan(&state, &Snapshot::default(), &Dirty::everything()).record(&mut state);
        for held in state.families.values() {
            prop_assert!(held.tables[&Table::Nat].chains.keys().all(|chain| matches!(chain, Chain::Fixed(_))));
            prop_assert!(held.ports.is_empty());
            prop_assert_eq!(held.endpoints, 0);
        }
    }
}

/// A Service with so many endpoints.
fn served_by(endpoints: usize) -> Snapshot {
    let mut world = testing::World::default();
    let service = testing::service("default/web", "10.96.0.80");
    world.services.insert(service.name.clone(), service);
    let numbers: Vec<usize> = (0..endpoints).collect();
    for (number, part) in numbers.chunks(100).enumerate() {
        let addresses =
            part.iter().map(|at| testing::endpoint(&format!("10.244.{}.{}", at / 200, at % 200 + 1)));
        let slice = testing::slice(&format!("default/web-{number}"), "web", addresses.collect());
        world.slices.insert(slice.name.clone(), slice);
    }
    let facts = testing::facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24")]);
    world.model(&testing::settings(), &facts).snapshot().clone()
}

#[test]
fn in_a_large_cluster_stale_chains_go_when_everything_is_looked_at_and_in_a_small_one_at_once() {
    for (endpoints, is_large) in [(1_002, true), (12, false)] {
        let [before, after] = [endpoints, endpoints - 1].map(served_by);
        let dirty = Dirty { ports: before.ports.keys().cloned().collect(), ..Dirty::default() };
        let mut state = programmed(OFFER, &before);
        let removed = |plan: &Plan| -> usize {
            plan.families.iter().flat_map(|plan| &plan.tables).map(|input| input.removed.len()).sum()
        };
        let change = plan(&state, &after, &dirty);
        assert_eq!(removed(&change), usize::from(!is_large), "of {endpoints}");
        change.record(&mut state);
        let later = plan(&state, &after, &Dirty::everything());
        assert_eq!(removed(&later), usize::from(is_large), "of {endpoints}");
        assert!(later.is_empty(), "what was put off is no change");
        later.record(&mut state);
        assert_eq!(state, programmed(OFFER, &after));
    }
}

const OFFER: Offer = Offer {
    masquerade_mark: 1 << 14,
    localhost_node_ports: true,
    random_fully: true,
    be_liberal: false,
    counters: true,
};

#[test]
fn the_first_input_is_as_upstream_would_write_it() {
    let mut world = testing::World::default();
    let service = testing::service("default/web", "10.96.0.80");
    world.services.insert(service.name.clone(), service);
    let endpoints = ["10.244.1.11", "10.244.2.11"].map(testing::endpoint);
    let slice = testing::slice("default/web-1", "web", endpoints.into());
    world.slices.insert(slice.name.clone(), slice);
    let model = world
        .model(&testing::settings(), &testing::facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24")]));
    let first = plan(&State::of_empty_tables(OFFER), model.snapshot(), &Dirty::everything());
    let (_, input) = first.inputs(Backend::Legacy).into_iter().next().unwrap();
    insta::assert_snapshot!(input);
}
