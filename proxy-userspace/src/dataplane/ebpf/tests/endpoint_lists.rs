//! What packets see while the endpoint lists of Services change, and what a change costs.

use std::{collections::BTreeSet, net::SocketAddr, num::NonZeroU16};

use proptest::prelude::*;
use proxy_common::{
    layout::{Endpoint, EndpointKey, ServiceKey, ServiceValue},
    select::Slots,
};

use super::{
    super::{Plan, State, plan::plan},
    apply, endpoints, frontends, programmed, restarted, view,
};
use crate::{
    dataplane::PlanSize as _,
    model::{
        Dirty, Frontend, FrontendKind, ResolvedEndpoint, ResolvedPort, ServicePortKey, Snapshot,
        testing::{self, resolved_port},
    },
};

/// Returns the endpoints that are in the slots of a list.
fn list(state: &State, service: u32, list: u32) -> BTreeSet<Option<Endpoint>> {
    let slots = state.slots_from(EndpointKey { service, list, slot: 0 });
    slots.map(|(_, value)| Some(value.endpoint)).collect()
}

fn slots_of(value: &ServiceValue) -> [Slots; 2] {
    [Slots::inside(value), Slots::outside(value)]
}

/// Checks what a frontend shows between two states: its value is that of one of them, each endpoint
/// is in a list of one of them, and endpoints in both lists are there. The new value shows new
/// endpoints only.
fn check_between(old: &State, new: &State, now: &State, key: &ServiceKey) -> Result<(), TestCaseError> {
    let Some(value) = now.service(key) else {
        prop_assert!(old.service(key).is_none() || new.service(key).is_none(), "{key:?} is missing");
        return Ok(());
    };
    let [is_old, is_new] = [old, new].map(|state| state.service(key) == Some(value));
    prop_assert!(is_old || is_new, "{key:?} has {value:?}");
    for slots in slots_of(value) {
        let shown = endpoints(now, value, slots);
        let [before, after] = [old, new].map(|state| list(state, value.service, slots.list));
        prop_assert!(!shown.contains(&None), "an empty slot of {key:?}");
        prop_assert!(shown.is_subset(&before.union(&after).copied().collect()), "{key:?} shows {shown:?}");
        let staying: BTreeSet<_> = before.intersection(&after).copied().collect();
        prop_assert!(shown.is_superset(&staying), "{key:?} shows {shown:?} without some of {staying:?}");
        prop_assert!(is_old || shown == after, "{key:?} shows {shown:?} in the new generation");
    }
    Ok(())
}

/// What connections may remember: frontend, value and list, and an endpoint that they chose.
type Remembered = BTreeSet<(ServiceKey, ServiceValue, u32, Option<Endpoint>)>;

fn remember(remembered: &mut Remembered, state: &State) {
    for key in frontends(state) {
        let Some(value) = state.service(&key) else { continue };
        for slots in slots_of(value) {
            let chosen = endpoints(state, value, slots).into_iter();
            remembered.extend(chosen.map(|endpoint| (key, *value, slots.list, endpoint)));
        }
    }
}

/// Checks that the endpoint of a connection is still in its list if the generation is the same.
fn check_remembered(remembered: &Remembered, state: &State) -> Result<(), TestCaseError> {
    for (key, before, number, endpoint) in remembered {
        let is_same =
            |now: &ServiceValue| (now.service, now.generation) == (before.service, before.generation);
        if state.service(key).is_some_and(is_same) {
            let list = list(state, before.service, *number);
            prop_assert!(list.contains(endpoint), "{endpoint:?} left, and {key:?} has its generation");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_prefix_of_a_plan_shows_old_or_new_endpoints_only(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let old = programmed(&before);
        let change = plan(&old, &after, &dirty);
        let mut new = old.clone();
        apply(&mut new, &change);
        let (mut prefix, mut remembered) = (old.clone(), Remembered::new());
        for step in &change.steps {
            remember(&mut remembered, &prefix);
            prefix.record(step);
            for key in frontends(&old).iter().chain(&frontends(&new)) {
                check_between(&old, &new, &prefix, key)?;
            }
        }
        check_remembered(&remembered, &new)?;
    }

    #[test]
    fn next_process_completes_or_reverts_an_interrupted_plan(
        (before, after, dirty) in testing::snapshot_change(),
        done in any::<prop::sample::Index>(),
        is_reverted in any::<bool>(),
    ) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        let mut remembered = Remembered::new();
        for step in change.steps.iter().take(done.index(change.steps.len() + 1)) {
            remember(&mut remembered, &state);
            state.record(step);
        }
        let mut state = restarted(&state);
        let target = if is_reverted { before } else { after };
        let takeover = plan(&state, &target, &Dirty::everything());
        apply(&mut state, &takeover);
        let rest = plan(&state, &target, &Dirty::everything());
        prop_assert!(rest.is_empty(), "{rest:#?}");
        let fresh = programmed(&target);
        for key in frontends(&fresh).iter().chain(&frontends(&state)) {
            prop_assert_eq!(view(&state, key), view(&fresh, key));
        }
        prop_assert_eq!(state.endpoints.len(), fresh.endpoints.len());
        check_remembered(&remembered, &state)?;
    }
}

/// A Service with this number of endpoints and two frontends.
struct Large {
    name: ServicePortKey,
    port: ResolvedPort,
    state: State,
}

impl Large {
    fn new(endpoints: usize) -> Self {
        let frontend = |port| Frontend {
            address: Some([10, 96, 0, 1].into()),
            port: NonZeroU16::new(port).expect("not zero"),
            kind: FrontendKind::ClusterIp,
        };
        let port = ResolvedPort { frontends: [80, 81].map(frontend).into(), ..resolved_port() };
        let name = testing::key("default/large", "");
        let mut large = Self { name, port, state: State::default() };
        large.port.cluster_endpoints = (0..endpoints).map(Self::endpoint).collect();
        large.change();
        large
    }

    fn endpoint(number: usize) -> ResolvedEndpoint {
        let [.., a, b] = number.to_be_bytes();
        ResolvedEndpoint { address: SocketAddr::from(([10, 244, a, b], 8080)), is_local: false }
    }

    fn plan(&self, state: &State) -> Plan {
        let ports = [(self.name.clone(), self.port.clone().into())].into();
        let dirty = Dirty { ports: [self.name.clone()].into(), ..Dirty::default() };
        plan(state, &Snapshot { ports, ..Snapshot::default() }, &dirty)
    }

    /// Applies the endpoint list. Returns the number of steps.
    fn change(&mut self) -> usize {
        let change = self.plan(&self.state);
        apply(&mut self.state, &change);
        change.len()
    }
}

#[test]
fn change_of_one_endpoint_costs_the_same_with_5000_endpoints() {
    for (count, position) in [(4, 1), (5_000, 0), (5_000, 2_500), (5_000, 4_999)] {
        let mut large = Large::new(count);
        large.port.cluster_endpoints[position] = Large::endpoint(60_000);
        assert_eq!(large.change(), 1 + 2, "one slot and two frontends");
        large.port.cluster_endpoints.push(Large::endpoint(60_001));
        assert_eq!(large.change(), 1 + 2, "one slot and two frontends");
        large.port.cluster_endpoints.remove(position);
        assert!(large.change() <= 1 + 2 + 1, "the last endpoint moves, and its slot is removed");
        assert_eq!(large.change(), 0);
    }
}

#[test]
fn rolling_5000_endpoints_is_linear() {
    let count = 5_000;
    let mut large = Large::new(count);
    let mut steps = 0;
    for part in 0..10 {
        for number in 0..count / 10 {
            let position = part * count / 10 + number;
            large.port.cluster_endpoints[position] = Large::endpoint(10_000 + position);
        }
        steps += large.change();
    }
    assert_eq!(steps, count + 10 * 2);
}

#[test]
fn generation_rises_although_a_change_was_interrupted() {
    let changes: [fn(&mut Vec<ResolvedEndpoint>); 3] = [
        |endpoints| endpoints[1] = Large::endpoint(9),
        |endpoints| endpoints.retain(|endpoint| *endpoint != Large::endpoint(0)),
        |endpoints| endpoints.truncate(2),
    ];
    for change in changes {
        let mut large = Large::new(3);
        change(&mut large.port.cluster_endpoints);
        let steps = large.plan(&large.state).steps;
        for done in 0..=steps.len() {
            let (mut state, mut remembered) = (large.state.clone(), Remembered::new());
            remember(&mut remembered, &state);
            steps[..done].iter().for_each(|step| state.record(step));
            let mut state = restarted(&state);
            let rest = large.plan(&state);
            apply(&mut state, &rest);
            check_remembered(&remembered, &state).expect("another generation");
        }
    }
}
