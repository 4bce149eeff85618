//! The laws of every dataplane, held to the eBPF plan over generated Snapshots, and a packet's view of every prefix of a plan.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proxy_common::{
    layout::{BridgeAddress, Endpoint, EndpointKey, ServiceKey, flags},
    select::Slots,
};

use super::{
    HookState, LinkHook, MapEntry, MapSizes, Plan, State, Step,
    failures::Failures,
    plan::{capacity, plan},
};
use crate::{
    dataplane::PlanSize as _,
    kernel::bpf::tc::Hook,
    model::{Dirty, Snapshot, testing},
};

/// What `apply` does to the mirror when the kernel takes everything.
fn apply(state: &mut State, plan: &Plan) {
    for (name, service) in &plan.names {
        state.record_name(name, *service);
    }
    for step in &plan.steps {
        state.record(step);
    }
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = State::default();
    apply(&mut state, &plan(&State::default(), snapshot, &Dirty::everything()));
    state
}

/// What the maps would hold for a process that starts on them.
fn restarted(state: &State) -> State {
    let mut state = state.clone();
    state.forget_names();
    state.attached = false;
    state.links.values_mut().for_each(|running| *running = HookState::Outdated);
    state
}

/// What a destination offers a caller of this node: its endpoints, and what happens without any. `None` in a slot is a hole.
type Offer = (Vec<Option<Endpoint>>, bool);

fn offer(state: &State, key: &ServiceKey) -> Option<Offer> {
    let value = state.service(key)?;
    let slots = Slots::inside(value);
    let endpoints = (0..slots.count).map(|slot| {
        let key =
            EndpointKey { service: value.service, generation: value.generation, slot, list: slots.list };
        state.endpoints.get(&key).copied()
    });
    Some((endpoints.collect(), value.flags & flags::DROP_WHEN_EMPTY != 0))
}

fn destinations(state: &State) -> Vec<ServiceKey> {
    state.services_in_use().into_iter().flat_map(|id| state.frontends(id).map(|(key, _)| key)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn after_apply_nothing_is_left_to_plan(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty() && again.names.is_empty(), "{again:#?}");
    }

    #[test]
    fn planning_what_is_dirty_reaches_what_planning_everything_reaches(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let incremental = plan(&state, &after, &dirty);
        apply(&mut state, &incremental);
        let rest = plan(&state, &after, &Dirty::everything());
        prop_assert!(rest.is_empty() && rest.names.is_empty(), "left out: {rest:#?}");
        let fresh = programmed(&after);
        for key in destinations(&fresh).iter().chain(&destinations(&state)) {
            prop_assert_eq!(offer(&state, key), offer(&fresh, key));
        }
    }

    #[test]
    fn every_prefix_of_a_plan_offers_the_old_or_the_new_and_never_a_mixture(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let old = programmed(&before);
        let change = plan(&old, &after, &dirty);
        let mut new = old.clone();
        apply(&mut new, &change);
        let mut prefix = old.clone();
        for step in &change.steps {
            prefix.record(step);
            for key in destinations(&old).iter().chain(&destinations(&new)) {
                let offered = offer(&prefix, key);
                prop_assert!(
                    offered == offer(&old, key) || offered == offer(&new, key),
                    "after {step:?}, {key:?} offers {offered:?}"
                );
                if let Some((endpoints, _)) = offered {
                    prop_assert!(endpoints.iter().all(Option::is_some), "a hole after {step:?}");
                }
            }
        }
    }

    #[test]
    fn a_restarted_proxy_writes_nothing_but_the_programs(snapshot in testing::snapshot()) {
        let mut state = restarted(&programmed(&snapshot));
        let takeover = plan(&state, &snapshot, &Dirty::everything());
        prop_assert_eq!(takeover.steps.first(), Some(&Step::Attach));
        prop_assert!(takeover.steps.iter().skip(1).all(|step| matches!(step, Step::AttachLink(..))));
        prop_assert_eq!(takeover.steps.len(), 1 + 2 * snapshot.node.links.len());
        apply(&mut state, &takeover);
        prop_assert_eq!(state, programmed(&snapshot));
    }

    #[test]
    fn what_changed_while_the_proxy_was_away_is_put_right(
        (before, after, _) in testing::snapshot_change()
    ) {
        let mut state = restarted(&programmed(&before));
        let takeover = plan(&state, &after, &Dirty::everything());
        apply(&mut state, &takeover);
        let fresh = programmed(&after);
        prop_assert_eq!(destinations(&state).len(), destinations(&fresh).len());
        for key in destinations(&fresh) {
            prop_assert_eq!(offer(&state, &key), offer(&fresh, &key));
        }
        prop_assert_eq!(state.endpoints.len(), fresh.endpoints.len());
        prop_assert_eq!(state.members.len(), fresh.members.len());
        prop_assert_eq!(state.ranges.len(), fresh.ranges.len());
    }

    #[test]
    fn an_interrupted_plan_is_completed_by_the_next_process(
        (before, after, dirty) in testing::snapshot_change(),
        done in any::<prop::sample::Index>(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        for step in change.steps.iter().take(done.index(change.steps.len() + 1)) {
            state.record(step);
        }
        let mut state = restarted(&state);
        let takeover = plan(&state, &after, &Dirty::everything());
        apply(&mut state, &takeover);
        let rest = plan(&state, &after, &Dirty::everything());
        prop_assert!(rest.is_empty(), "{rest:#?}");
        let fresh = programmed(&after);
        for key in destinations(&fresh).iter().chain(&destinations(&state)) {
            prop_assert_eq!(offer(&state, key), offer(&fresh, key));
        }
        prop_assert_eq!(state.endpoints.len(), fresh.endpoints.len());
    }

    #[test]
    fn nothing_is_translated_on_a_link_before_all_links_translate_back_and_all_services_are_there(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        for (at, step) in changes.steps.iter().enumerate() {
            let later = &changes.steps[at..];
            if matches!(step, Step::AttachLink(..)) {
                prop_assert!(later.iter().all(|step| !matches!(step, Step::Put(MapEntry::Service(..) | MapEntry::Endpoint(..)))));
            }
            state.record(step);
            let ingress = LinkHook { hook: Hook::Ingress, index: step.link().unwrap_or_default() };
            if matches!(step, Step::AttachLink(at, _) if *at == ingress) {
                for (index, link) in &after.node.links {
                    let egress = LinkHook { hook: Hook::Egress, index: *index };
                    prop_assert_eq!(state.links.get(&egress), Some(&HookState::Current(link.framing)));
                }
            }
        }
    }

    #[test]
    fn links_have_the_programs_of_their_kind_and_what_is_not_wanted_any_more_is_taken_off(
        (before, after, dirty) in testing::snapshot_change(),
        is_restarted in any::<bool>(),
    ) {
        let mut state = programmed(&before);
        let dirty = if is_restarted { state = restarted(&state); Dirty::everything() } else { dirty };
        let change = plan(&state, &after, &dirty);
        apply(&mut state, &change);
        let hooks = [Hook::Egress, Hook::Ingress].into_iter();
        let wanted: BTreeMap<LinkHook, HookState> = hooks
            .flat_map(|hook| {
                after.node.links.iter().map(move |(index, link)| {
                    (LinkHook { hook, index: *index }, HookState::Current(link.framing))
                })
            })
            .collect();
        prop_assert_eq!(&state.links, &wanted);
        prop_assert_eq!(&state.local_links, &after.node.local_links);
        let bridge_ports = after.node.bridge_ports.iter();
        let bridge_ports = bridge_ports.map(|(index, address)| (*index, BridgeAddress::new(address.0)));
        prop_assert_eq!(&state.bridge_ports, &bridge_ports.collect::<BTreeMap<_, _>>());
    }

    #[test]
    fn a_service_port_without_room_stays_as_it_was_and_the_others_change(
        (before, after, dirty) in testing::snapshot_change(),
        (services, endpoints, members) in (0..12_u32, 0..24_u32, 0..8_u32),
    ) {
        let old = programmed(&before);
        let change = plan(&old, &after, &dirty);
        let sizes = MapSizes {
            services: services + u32::try_from(old.entries("services").unwrap()).unwrap(),
            endpoints: endpoints + u32::try_from(old.endpoints.len()).unwrap(),
            members: members + u32::try_from(old.members.len()).unwrap(),
            ..MapSizes::default()
        };
        let mut state = old.clone();
        for (name, service) in &change.names {
            state.record_name(name, *service);
        }
        let failures = Failures::without_room(&state, &change, &sizes);
        let refused: BTreeSet<u32> = capacity::without_room(&state, &change, &sizes).into_keys().collect();
        for step in &change.steps {
            if let Some(step) = failures.adjust(step, &state) {
                state.record(&step);
                prop_assert!(state.entries("services").unwrap() <= sizes.services as usize);
                prop_assert!(state.endpoints.len() <= sizes.endpoints as usize);
                prop_assert!(state.members.len() <= sizes.members as usize);
            }
        }
        let mut new = old.clone();
        apply(&mut new, &change);
        for key in destinations(&state) {
            let owner = state.service(&key).map_or(0, |value| value.service);
            let whole = if refused.contains(&owner) { &old } else { &new };
            prop_assert_eq!(offer(&state, &key), offer(whole, &key), "{:?} of {}", key, owner);
            prop_assert!(offer(&state, &key).is_some_and(|(slots, _)| slots.iter().all(Option::is_some)), "a hole");
        }
        prop_assert_eq!(failures.into_result(&state).is_err(), !refused.is_empty());
    }

    #[test]
    fn undoing_everything_leaves_empty_maps(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        let removal = plan(&state, &Snapshot::default(), &Dirty::everything());
        apply(&mut state, &removal);
        prop_assert!(state.services_in_use().is_empty() && state.node_addresses.is_empty());
        prop_assert!(state.local_sources.is_empty() && state.local_links.is_empty());
        prop_assert!(state.bridge_ports.is_empty());
        prop_assert!(state.links.is_empty());
    }
}
