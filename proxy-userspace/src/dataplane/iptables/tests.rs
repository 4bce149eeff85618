//! Checks the laws of every dataplane for the plans of the iptables mode, over generated Snapshots.
//! `tests/tests/iptables_rules` traces packets through the rules.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{
    fixed_chains::MODE,
    node::{Node, RuleOptions},
    plan::{Plan, plan},
    state::{FamilyState, State},
};
use crate::{
    dataplane::{
        PlanSize as _,
        iptables_text::{Chain, ChainRules, KUBELET_FIREWALL, ROUTES_LOCALNET, Table},
    },
    kernel::iptables::Backend,
    model::{Dirty, IpFamily, ModelSettings, NodePortAddresses, Snapshot, testing},
};

fn options() -> impl Strategy<Value = RuleOptions> {
    any::<[bool; 4]>().prop_map(|[localhost_node_ports, random_fully, be_liberal, counters]| RuleOptions {
        masquerade_mark: 1 << 14,
        localhost_node_ports,
        random_fully,
        be_liberal,
        counters,
    })
}

fn programmed(options: RuleOptions, snapshot: &Snapshot) -> State {
    let mut state = State::of_empty_tables(options);
    plan(&state, snapshot, &Dirty::everything()).record(&mut state);
    state
}

/// Returns the state that a process reads from these tables at its start.
fn restarted(state: &State) -> State {
    let read = |family: &FamilyState| {
        FamilyState::observed(family.options, family.tables.clone(), family.routes_localnet)
    };
    State { families: state.families.iter().map(|(family, state)| (*family, read(state))).collect() }
}

/// Returns the targets of a chain's rules.
fn targets(rules: &ChainRules) -> BTreeSet<Chain> {
    let lines = rules.lines.lines();
    lines.filter_map(|line| Chain::parse(line.rsplit_once("-j ")?.1)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_second_plan_is_empty(options in options(), snapshot in testing::snapshot()) {
        let state = programmed(options, &snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again:#?}");
    }

    #[test]
    fn a_partial_plan_reaches_the_state_of_a_full_plan(
        options in options(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(options, &before);
        plan(&state, &after, &dirty).record(&mut state);
        // `route_localnet` is never reset.
        let mut fresh = programmed(options, &after);
        for (family, current) in &mut fresh.families {
            current.routes_localnet |= state.families[family].routes_localnet;
            current.set_route_localnet |= state.families[family].set_route_localnet;
            for (table, chain) in [(Table::Filter, KUBELET_FIREWALL), (Table::Mangle, ROUTES_LOCALNET)] {
                if let Some(content) = state.families[family].tables[&table].chains.get(&chain) {
                    current.tables.get_mut(&table).unwrap().fill(chain, *content);
                }
            }
        }
        prop_assert_eq!(&state, &fresh);
    }

    #[test]
    fn a_plan_writes_only_chains_that_change(
        options in options(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let old = programmed(options, &before);
        let change = plan(&old, &after, &dirty);
        let mut new = old.clone();
        let named: Vec<_> = change.families.iter().flat_map(|plan| {
            plan.tables.iter().flat_map(move |input| {
                let chains = input.filled.iter().map(|rules| rules.chain).chain(input.removed.iter().copied());
                chains.map(move |chain| (plan.family, input.table, chain))
            })
        }).collect();
        change.record(&mut new);
        for (family, table, chain) in named {
            let content = |state: &State| state.families[&family].tables[&table].chains.get(&chain).copied();
            prop_assert_ne!(content(&old), content(&new), "{} {}", table.name(), chain);
        }
    }

    #[test]
    fn a_restarted_proxy_writes_nothing(options in options(), snapshot in testing::snapshot()) {
        let state = programmed(options, &snapshot);
        let mut again = restarted(&state);
        let takeover = plan(&again, &snapshot, &Dirty::everything());
        prop_assert!(takeover.is_empty(), "{takeover:#?}");
        takeover.record(&mut again);
        prop_assert_eq!(again, state);
    }

    #[test]
    fn a_restarted_proxy_catches_up_with_changes(
        options in options(),
        (before, after, _) in testing::snapshot_change(),
    ) {
        let mut state = restarted(&programmed(options, &before));
        plan(&state, &after, &Dirty::everything()).record(&mut state);
        let fresh = programmed(options, &after);
        for (family, current) in &fresh.families {
            prop_assert_eq!(&state.families[family].tables[&Table::Nat], &current.tables[&Table::Nat]);
            prop_assert_eq!(&state.families[family].ports, &current.ports);
        }
    }

    #[test]
    fn targets_of_rules_always_exist(
        options in options(),
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        // The targets of each chain in the kernel. iptables-restore changes a table as a whole.
        let mut edges: BTreeMap<_, BTreeSet<Chain>> = BTreeMap::new();
        let mut state = State::of_empty_tables(options);
        for (snapshot, dirty) in [(before, Dirty::everything()), (after, dirty)] {
            let change: Plan = plan(&state, &snapshot, &dirty);
            for plan in &change.families {
                let current = state.families.get_mut(&plan.family).unwrap();
                for input in &plan.tables {
                    for rules in &input.filled {
                        edges.insert((plan.family, input.table, rules.chain), targets(rules));
                    }
                    for chain in &input.removed {
                        edges.remove(&(plan.family, input.table, *chain));
                    }
                    current.tables.get_mut(&input.table).unwrap().record(&MODE, input);
                    for ((_, _, from), to) in edges.range((plan.family, input.table, Chain::Fixed(""))..).filter(|((family, table, _), _)| *family == plan.family && *table == input.table) {
                        for chain in to {
                            prop_assert!(current.tables[&input.table].chains.contains_key(chain), "{} leads to {}", from, chain);
                        }
                    }
                }
            }
            change.record(&mut state);
        }
    }

    #[test]
    fn without_services_only_fixed_chains_remain(options in options(), snapshot in testing::snapshot()) {
        let mut state = programmed(options, &snapshot);
        plan(&state, &Snapshot::default(), &Dirty::everything()).record(&mut state);
        for current in state.families.values() {
            prop_assert!(current.tables[&Table::Nat].chains.keys().all(|chain| matches!(chain, Chain::Fixed(_))));
            prop_assert!(current.ports.is_empty());
            prop_assert_eq!(current.endpoints, 0);
        }
    }
}

#[test]
fn only_ranges_of_every_address_serve_node_ports_on_local_routes() {
    let facts = testing::facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24")]);
    let served_on = |ranges: &[&str]| {
        let settings = ModelSettings {
            node_port_addresses: NodePortAddresses::Cidrs(testing::cidrs(ranges)),
            ..testing::settings()
        };
        let model = testing::World::default().model(&settings, &facts);
        Node::of(model.snapshot(), IpFamily::V4, OPTIONS).served_on
    };
    assert_eq!(served_on(&["0.0.0.0/0"]), None);
    let on_links = testing::ips(&["127.0.0.1", "192.168.57.11"]);
    assert_eq!(served_on(&["127.0.0.0/8", "192.168.0.0/16"]), Some(on_links));
}

/// Returns a Snapshot of one Service with this number of endpoints.
fn served_by(endpoints: usize) -> Snapshot {
    of_services(&[("web", endpoints)])
}

/// Returns a Snapshot of Services with these numbers of endpoints.
fn of_services(services: &[(&str, usize)]) -> Snapshot {
    let mut world = testing::World::default();
    for (at, (name, endpoints)) in services.iter().enumerate() {
        let service = testing::service(&format!("default/{name}"), &format!("10.96.0.{}", 80 + at));
        world.services.insert(service.name.clone(), service);
        let numbers: Vec<usize> = (0..*endpoints).collect();
        for (number, part) in numbers.chunks(100).enumerate() {
            let addresses = part.iter().map(|number| {
                testing::endpoint(&format!("10.244.{}.{}", 20 * at + number / 200, number % 200 + 1))
            });
            let slice = testing::slice(&format!("default/{name}-{number}"), name, addresses.collect());
            world.slices.insert(slice.name.clone(), slice);
        }
    }
    let facts = testing::facts(&[("lo", "127.0.0.1/8"), ("eth0", "192.168.57.11/24")]);
    world.model(&testing::settings(), &facts).snapshot().clone()
}

#[test]
fn large_clusters_defer_the_removal_of_stale_chains() {
    for (endpoints, is_large) in [(1_002, true), (12, false)] {
        let [before, after] = [endpoints, endpoints - 1].map(served_by);
        let dirty = Dirty { ports: before.ports.keys().cloned().collect(), ..Dirty::default() };
        let mut state = programmed(OPTIONS, &before);
        let removed = |plan: &Plan| -> usize {
            plan.families.iter().flat_map(|plan| &plan.tables).map(|input| input.removed.len()).sum()
        };
        let change = plan(&state, &after, &dirty);
        assert_eq!(removed(&change), usize::from(!is_large), "of {endpoints}");
        change.record(&mut state);
        let later = plan(&state, &after, &Dirty::everything());
        assert_eq!(removed(&later), usize::from(is_large), "of {endpoints}");
        assert!(later.is_empty(), "deferred removals do not count");
        later.record(&mut state);
        assert_eq!(state, programmed(OPTIONS, &after));
    }
}

#[test]
fn endpoints_of_service_ports_that_are_left_out_do_not_count() {
    let [before, after] = [992, 991].map(|endpoints| of_services(&[("web", endpoints), ("refused", 20)]));
    let refused = testing::key("default/refused", "");
    let mut state = State::of_empty_tables(OPTIONS);
    let family = state.families.get_mut(&IpFamily::V4).unwrap();
    let rejected = programmed(OPTIONS, &before).families[&IpFamily::V4].ports[&refused].clone();
    family.left_out.insert(refused.clone(), rejected);
    plan(&state, &before, &Dirty::everything()).record(&mut state);
    let is_full = |state: &State, changed: &str| {
        let dirty = Dirty { ports: [testing::key(changed, "")].into(), ..Dirty::default() };
        let change = plan(state, &after, &dirty);
        change.families.into_iter().any(|plan| plan.family == IpFamily::V4 && plan.is_full)
    };
    assert!(!is_full(&state, "default/web"));
    assert!(!is_full(&state, "default/refused"));
    // Once it is served, its endpoints count.
    state.families.get_mut(&IpFamily::V4).unwrap().left_out.clear();
    assert!(is_full(&state, "default/refused"));
}

pub(super) const OPTIONS: RuleOptions = RuleOptions {
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
    let first = plan(&State::of_empty_tables(OPTIONS), model.snapshot(), &Dirty::everything());
    let (_, input) = first.inputs(Backend::Legacy).into_iter().next().unwrap();
    insta::assert_snapshot!(input);
}
