//! The laws of every dataplane, held to the plans of the ipvs mode over generated Snapshots, and what upstream's kube-proxy
//! wrote for a few.

mod golden;
mod rejected;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{
    IpvsSettings,
    desired::Item,
    node::PlanOptions,
    plan::plan,
    sets::{Entry, Set, SetEntry},
    state::{ItemState, State},
    step::{SetChange, Step},
};
use crate::{
    dataplane::PlanSize as _,
    kernel::ipvs::Change,
    model::{Dirty, IpFamily, Protocol, Snapshot, testing},
};

fn options() -> PlanOptions {
    let exclude_cidrs = testing::cidrs(&["203.0.113.0/24"]);
    PlanOptions {
        families: IpFamily::ALL.to_vec(),
        settings: IpvsSettings { exclude_cidrs, ..IpvsSettings::default() },
        random_fully: IpFamily::ALL.into(),
    }
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = State::empty(options());
    let first = plan(&state, snapshot, &Dirty::everything());
    first.record(&mut state);
    state
}

/// What a process that starts on this kernel reads from it. Real servers that drain have lost their connections meanwhile.
fn restarted(state: &State, is_idle: bool) -> State {
    let mut read = State::empty(state.options.clone());
    read.has_link = state.has_link;
    read.addresses.clone_from(&state.addresses);
    read.sets.clone_from(&state.sets);
    read.rules.clone_from(&state.rules);
    read.servers.clone_from(&state.servers);
    for real in read.servers.values_mut().flat_map(|server| &mut server.reals) {
        real.is_idle = is_idle;
    }
    for item in state.existing_items() {
        read.items.insert(*item, ItemState { users: 0, exists: true });
    }
    read
}

/// Without real servers that drain, which stay by design, and what is known of connections.
fn settled(mut state: State) -> State {
    for server in state.servers.values_mut() {
        server.reals.retain(|real| real.weight > 0);
        server.reals.iter_mut().for_each(|real| real.is_idle = false);
    }
    state
}

/// Whether an address leads to a virtual server, and none to one without the rules that guard it.
fn is_safe(state: &State) -> bool {
    state.addresses.iter().all(|address| state.has_item(&Item::address(*address)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn after_apply_nothing_is_left_to_plan(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again:#?}");
    }

    #[test]
    fn planning_what_is_dirty_reaches_what_planning_everything_reaches(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        change.record(&mut state);
        prop_assert_eq!(settled(state), programmed(&after));
    }

    #[test]
    fn a_restarted_proxy_changes_nothing(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let mut again = restarted(&state, false);
        let takeover = plan(&again, &snapshot, &Dirty::everything());
        prop_assert!(takeover.is_empty(), "{takeover:#?}");
        takeover.record(&mut again);
        prop_assert_eq!(again, state);
    }

    #[test]
    fn what_changed_while_the_proxy_was_away_is_put_right(
        (before, after, _) in testing::snapshot_change(),
    ) {
        let mut state = restarted(&programmed(&before), true);
        let change = plan(&state, &after, &Dirty::everything());
        change.record(&mut state);
        prop_assert_eq!(settled(state), programmed(&after));
    }

    #[test]
    fn real_servers_that_drained_are_removed_when_all_is_looked_at_again(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        change.record(&mut state);
        for is_idle in [false, true] {
            let mut again = restarted(&state, is_idle);
            let late = plan(&again, &after, &Dirty::everything());
            let removals = late.steps.iter().all(|step| matches!(step, Step::Servers(changes) if changes.iter().all(|change| matches!(change, Change::RemoveReal(..)))));
            prop_assert!(removals && (is_idle || late.is_empty()), "{late:#?}");
            late.record(&mut again);
            prop_assert!(!is_idle || again.servers.values().flat_map(|server| &server.reals).all(|real| real.weight > 0));
        }
    }

    #[test]
    fn every_beginning_of_a_plan_is_safe(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = State::empty(options());
        for (snapshot, dirty) in [(before, Dirty::everything()), (after, dirty)] {
            let mut change = plan(&state, &snapshot, &dirty);
            for step in std::mem::take(&mut change.steps) {
                // Rules name sets, and the kernel takes none that is not there.
                if let Step::Rules(..) = step {
                    prop_assert_eq!(state.sets.len(), 2 * Set::all().len());
                }
                // A virtual server comes before the addresses that lead to it, and goes after no real server of it.
                if let Step::AddAddresses(addresses) = &step {
                    for address in addresses {
                        prop_assert!(state.servers.keys().any(|key| key.address.ip() == *address), "{}", address);
                    }
                }
                // What guards goes last.
                if let Step::Sets(changes) = &step {
                    for change in changes {
                        if let SetChange::Delete(SetEntry { entry: Entry::Address(address), .. }) = change {
                            prop_assert!(!state.addresses.contains(address), "{}", address);
                        }
                    }
                }
                state.record(step);
                prop_assert!(is_safe(&state));
            }
            change.record(&mut state);
        }
    }

    #[test]
    fn tcp_connections_are_never_cut_off_by_a_change_of_endpoints(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        for step in &change.steps {
            let Step::Servers(changes) = step else { continue };
            for change in changes {
                let cuts = matches!(change, Change::RemoveReal(key, _) if key.protocol == Protocol::Tcp);
                prop_assert!(!cuts, "{change}");
            }
        }
    }

    #[test]
    fn undoing_everything_leaves_nothing_of_services(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        let nothing = Snapshot { node: snapshot.node.clone(), ..Snapshot::default() };
        let change = plan(&state, &nothing, &Dirty::everything());
        change.record(&mut state);
        prop_assert_eq!(state, programmed(&nothing));
    }
}

#[test]
fn virtual_servers_of_others_stay_where_they_are_excluded_and_go_elsewhere() {
    let mut state = programmed(&Snapshot::default());
    let ours = programmed(&golden::snapshot());
    let (key, server) = ours.servers.iter().next().expect("a virtual server");
    for address in ["203.0.113.7:80", "192.0.2.7:80"] {
        let mut key = *key;
        key.address = address.parse().unwrap();
        state.servers.insert(key, server.clone());
    }
    let cleared = plan(&state, &Snapshot::default(), &Dirty::everything());
    let removed: BTreeSet<String> = cleared
        .steps
        .iter()
        .flat_map(|step| match step {
            Step::Servers(changes) => changes.iter().map(ToString::to_string).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(removed, BTreeSet::from(["remove the virtual server TCP 192.0.2.7:80".to_owned()]));
}
