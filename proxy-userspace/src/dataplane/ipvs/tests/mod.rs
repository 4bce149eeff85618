//! Checks the laws of all dataplanes for plans of the ipvs mode, over generated Snapshots, and some
//! plans in detail.

mod golden;
mod rejected;

use proptest::prelude::*;

use super::{
    IpvsSettings,
    desired::Item,
    node::{Node, PlanOptions},
    plan::{Plan, plan},
    rule_features::RefusedFeatures,
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
        refused: RefusedFeatures::new(),
    }
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = State::empty(options());
    let first = plan(&state, snapshot, &Dirty::everything());
    first.record(&mut state);
    state
}

/// Returns the state that a new process reads from the kernel. `is_idle` says whether real servers
/// have lost their connections by then.
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

/// Removes draining real servers, which stay by design, and what is known of connections.
fn without_draining(mut state: State) -> State {
    for server in state.servers.values_mut() {
        server.reals.retain(|real| real.weight > 0);
        server.reals.iter_mut().for_each(|real| real.is_idle = false);
    }
    state
}

/// Returns true if each address of the dummy link has an entry in the set that protects it.
fn is_safe(state: &State) -> bool {
    state.addresses.iter().all(|address| state.has_item(&Item::address(*address)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn after_apply_a_new_plan_is_empty(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again:#?}");
    }

    #[test]
    fn a_partial_plan_reaches_the_state_of_a_full_plan(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        change.record(&mut state);
        prop_assert_eq!(without_draining(state), programmed(&after));
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
    fn a_restarted_proxy_applies_what_changed_meanwhile(
        (before, after, _) in testing::snapshot_change(),
    ) {
        let mut state = restarted(&programmed(&before), true);
        let change = plan(&state, &after, &Dirty::everything());
        change.record(&mut state);
        prop_assert_eq!(without_draining(state), programmed(&after));
    }

    #[test]
    fn a_full_plan_removes_idle_draining_real_servers(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        change.record(&mut state);
        for is_idle in [false, true] {
            let mut again = restarted(&state, is_idle);
            let late_plan = plan(&again, &after, &Dirty::everything());
            let is_removal = |change: &Change| matches!(change, Change::RemoveReal(..));
            let only_removes =
                |step: &Step| matches!(step, Step::Servers(changes) if changes.iter().all(is_removal));
            let removals = late_plan.steps.iter().all(only_removes);
            prop_assert!(removals && (is_idle || late_plan.is_empty()), "{late_plan:#?}");
            late_plan.record(&mut again);
            prop_assert!(!is_idle || again.servers.values().flat_map(|server| &server.reals).all(|real| real.weight > 0));
        }
    }

    #[test]
    fn the_kernel_is_safe_after_each_step(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let mut state = State::empty(options());
        for (snapshot, dirty) in [(before, Dirty::everything()), (after, dirty)] {
            let mut change = plan(&state, &snapshot, &dirty);
            for step in std::mem::take(&mut change.steps) {
                // Rules match sets, which must exist.
                if let Step::Rules(..) = step {
                    prop_assert_eq!(state.sets.len(), 2 * Set::all().len());
                }
                // A virtual server is added before its address.
                if let Step::AddAddresses(addresses) = &step {
                    for address in addresses {
                        prop_assert!(state.servers.keys().any(|key| key.address.ip() == *address), "{}", address);
                    }
                }
                // An address is deleted before the entry that protects it.
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
    fn a_change_of_endpoints_never_ends_tcp_connections(
        (before, after, dirty) in testing::snapshot_change(),
    ) {
        let state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        for step in &change.steps {
            let Step::Servers(changes) = step else { continue };
            for change in changes {
                let ends = matches!(change, Change::RemoveReal(key, _) if key.protocol == Protocol::Tcp);
                prop_assert!(!ends, "{change}");
            }
        }
    }

    #[test]
    fn removing_all_services_leaves_no_objects_of_services(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        let nothing = Snapshot { node: snapshot.node.clone(), ..Snapshot::default() };
        let change = plan(&state, &nothing, &Dirty::everything());
        change.record(&mut state);
        prop_assert_eq!(state, programmed(&nothing));
    }
}

/// Returns the changes of virtual and real servers that a plan makes.
fn server_changes(plan: &Plan) -> Vec<String> {
    let changes = plan.steps.iter().filter_map(|step| match step {
        Step::Servers(changes) => Some(changes.iter().map(ToString::to_string)),
        _ => None,
    });
    changes.flatten().collect()
}

#[test]
fn foreign_virtual_servers_stay_only_in_excluded_ranges() {
    let mut state = programmed(&Snapshot::default());
    let ours = programmed(&golden::snapshot());
    let (key, server) = ours.servers.iter().next().expect("a virtual server");
    for address in ["203.0.113.7:80", "192.0.2.7:80"] {
        let mut key = *key;
        key.address = address.parse().unwrap();
        state.servers.insert(key, server.clone());
    }
    let cleared = plan(&state, &Snapshot::default(), &Dirty::everything());
    assert_eq!(server_changes(&cleared), ["remove the virtual server TCP 192.0.2.7:80"]);
    assert_eq!(cleared.len(), 1, "{cleared:?}");
}

#[test]
fn a_deleted_service_in_an_excluded_range_keeps_its_virtual_server_but_no_address() {
    let address = testing::ip("203.0.113.10");
    let (before, after) = (golden::one_service("203.0.113.10"), Snapshot::default());
    let state = programmed(&before);
    assert!(state.addresses.contains(&address));
    let deleted = Dirty { ports: before.ports.keys().cloned().collect(), ..Dirty::default() };
    let mut started_again = restarted(&state, true);
    started_again.node = Some(Node::new(&after));
    for (mut state, dirty) in
        [(state.clone(), deleted), (state, Dirty::everything()), (started_again, Dirty::everything())]
    {
        let change = plan(&state, &after, &dirty);
        assert_eq!(server_changes(&change), Vec::<String>::new());
        change.record(&mut state);
        assert!(state.addresses.is_empty() && is_safe(&state), "{:?}", state.addresses);
        assert_eq!(state.servers.len(), 1);
    }
}

#[test]
fn objects_of_a_family_that_is_not_served_stay() {
    let mut state = restarted(&programmed(&golden::one_service("fd96::10")), true);
    assert!(!state.servers.is_empty() && !state.addresses.is_empty());
    state.options.families = vec![IpFamily::V4];
    state.rules.remove(&IpFamily::V6);
    let change = plan(&state, &Snapshot::default(), &Dirty::everything());
    assert!(change.is_empty(), "{change:#?}");
}
