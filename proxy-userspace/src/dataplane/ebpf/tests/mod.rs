//! The laws of every dataplane, checked for eBPF plans over generated Snapshots.

mod endpoint_lists;
mod link_plans;
mod links;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use proptest::prelude::*;
use proxy_common::{
    Addr,
    layout::{
        self, DsrAddress, Endpoint, EndpointKey, HardwareAddress, List, NewFlows, ServiceKey, ServiceValue,
        flags,
    },
    select::Slots,
};

use super::{
    HookState, LinkHook, MapEntry, MapSizes, Plan, State, Step,
    failures::Failures,
    links::{has_program, xdp::XdpState},
    plan::{
        capacity, has_table, plan,
        state::EntriesRead,
        step::{DirectFields, StaleFlows},
        translate,
    },
};
use crate::{
    dataplane::PlanSize as _,
    kernel::{bpf::tc::Hook, clock},
    model::{Dirty, Framing, LinkPath, ServedLink, Snapshot, SocketScope, testing},
};

/// Does what `apply` does to the state if every change succeeds.
fn apply(state: &mut State, plan: &Plan) {
    for (name, service) in &plan.names {
        state.record_name(name.clone(), *service);
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

/// Returns what a new process observes in the maps of another one.
fn restarted(state: &State) -> State {
    let mut state = state.clone();
    state.forget_names();
    state.attached = false;
    state.links.values_mut().for_each(|running| *running = HookState::Outdated);
    state.xdp.values_mut().for_each(|running| *running = XdpState::Outdated(running.mode()));
    state
}

/// What a frontend offers to a client on this node: its endpoints, and what happens if there are
/// none. `None` is an empty slot.
type FrontendView = (BTreeSet<Option<Endpoint>>, bool);

fn view(state: &State, key: &ServiceKey) -> Option<FrontendView> {
    let value = state.service(key)?;
    Some((endpoints(state, value, Slots::inside(value)), value.flags & flags::DROP_WHEN_EMPTY != 0))
}

fn endpoints(
    state: &State,
    value: &ServiceValue,
    Slots { list, count, .. }: Slots,
) -> BTreeSet<Option<Endpoint>> {
    let key = |slot| EndpointKey { service: value.service, list, slot };
    (0..count).map(|slot| state.endpoints.get(&key(slot)).map(|value| value.endpoint)).collect()
}

fn frontends(state: &State) -> Vec<ServiceKey> {
    state.services_in_use().into_iter().flat_map(|id| state.frontends(id).map(|(key, _)| key)).collect()
}

/// Returns the programs that links must have.
fn wanted_links(snapshot: &Snapshot) -> BTreeMap<LinkHook, HookState> {
    let links = snapshot.node.links.iter().filter(|_| !is_netfilter(snapshot));
    let hooks = |(index, link): (&u32, &ServedLink)| {
        let (index, framing) = (*index, link.framing);
        let hooks = [Hook::Egress, Hook::Ingress].into_iter().filter(move |hook| has_program(*hook, framing));
        hooks.map(move |hook| (LinkHook { hook, index }, HookState::Current(framing)))
    };
    links.flat_map(hooks).collect()
}

const fn is_netfilter(snapshot: &Snapshot) -> bool {
    matches!(snapshot.node.link_path, LinkPath::Netfilter { .. })
}

#[test]
fn a_restarted_process_finds_the_identifiers_of_many_service_ports() {
    let services = testing::many_names().map(|(name, cluster_ip)| {
        let service = testing::service(&name, &cluster_ip);
        (service.name.clone(), service)
    });
    let world = testing::World { services: services.collect(), ..testing::World::default() };
    let model = world.model(&testing::settings(), &testing::facts(&[("eth0", "192.168.57.11/24")]));
    let before = programmed(model.snapshot());
    let mut state = restarted(&before);
    let takeover = plan(&state, model.snapshot(), &Dirty::everything());
    assert_eq!(takeover.steps.first(), Some(&Step::Attach));
    apply(&mut state, &takeover);
    assert_eq!(state, before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn nothing_is_left_to_plan_after_apply(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty() && again.names.is_empty(), "{again:#?}");
    }

    #[test]
    fn partial_plan_reaches_the_same_state_as_a_full_plan(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let incremental = plan(&state, &after, &dirty);
        apply(&mut state, &incremental);
        let rest = plan(&state, &after, &Dirty::everything());
        prop_assert!(rest.is_empty() && rest.names.is_empty(), "left out: {rest:#?}");
        let fresh = programmed(&after);
        for key in frontends(&fresh).iter().chain(&frontends(&state)) {
            prop_assert_eq!(view(&state, key), view(&fresh, key));
        }
    }

    #[test]
    fn restarted_process_attaches_programs_and_writes_nothing(snapshot in testing::snapshot()) {
        let mut state = restarted(&programmed(&snapshot));
        let takeover = plan(&state, &snapshot, &Dirty::everything());
        prop_assert_eq!(takeover.steps.first(), Some(&Step::Attach));
        let attaches = |step: &Step| matches!(step, Step::AttachLink(..) | Step::AttachXdp(..));
        prop_assert!(takeover.steps.iter().skip(1).all(attaches));
        let links = wanted_links(&snapshot).len() + state.xdp.len();
        prop_assert_eq!(takeover.steps.len(), 1 + links);
        apply(&mut state, &takeover);
        prop_assert_eq!(state, programmed(&snapshot));
    }

    #[test]
    fn restarted_process_applies_what_changed_meanwhile(
        (before, after, _) in testing::snapshot_change()
    ) {
        let mut state = restarted(&programmed(&before));
        let takeover = plan(&state, &after, &Dirty::everything());
        apply(&mut state, &takeover);
        let fresh = programmed(&after);
        prop_assert_eq!(frontends(&state).len(), frontends(&fresh).len());
        for key in frontends(&fresh) {
            prop_assert_eq!(view(&state, &key), view(&fresh, &key));
        }
        prop_assert_eq!(state.endpoints.len(), fresh.endpoints.len());
        prop_assert_eq!(state.members.len(), fresh.members.len());
        prop_assert_eq!(state.ranges.len(), fresh.ranges.len());
    }

    /// The connections that the other mode left to conntrack may have ended, and a new one may have
    /// the same client port. Flows that it did not hand over are still translated.
    #[test]
    fn programs_forget_passed_flows_when_another_mode_did_not_finish_its_takeover(
        snapshot in testing::snapshot()
    ) {
        prop_assume!(!is_netfilter(&snapshot) && !snapshot.node.links.is_empty());
        let mut state = restarted(&programmed(&snapshot));
        state.new_flows = NewFlows::Leave as u16;
        let changes = plan(&state, &snapshot, &Dirty::everything());
        let position = |step: &Step| changes.steps.iter().position(|other| other == step);
        let forgotten = position(&Step::ForgetFlows(StaleFlows::Passed));
        prop_assert!(forgotten.is_some());
        prop_assert!(forgotten < position(&Step::LeaveFlowsToConntrack));
        prop_assert_eq!(position(&Step::ForgetFlows(StaleFlows::All)), None);
    }

    #[test]
    fn exempt_namespaces_are_in_the_map_while_the_scope_relies_on_it(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        for step in &plan(&state, &after, &dirty).steps {
            if let (Step::SetSocketScope(_), SocketScope::AllBut(exempt)) = (step, &after.node.socket_scope) {
                prop_assert!(state.exempt_netns.is_superset(exempt));
            }
            if let Step::SetSocketScope(_) | Step::Put(MapEntry::ExemptNetns(_)) = step {
                let sources = after.node.exempt_addresses.iter().map(|address| Addr::from(*address));
                prop_assert!(state.exempt_sources.is_superset(&sources.collect()), "sources come first");
            }
            state.record(step);
        }
        let (scope, exempt) = match &after.node.socket_scope {
            SocketScope::All if after.node.exempt_addresses.is_empty() => {
                (layout::SocketScope::All, BTreeSet::new())
            }
            SocketScope::All => (layout::SocketScope::NotExempt, BTreeSet::new()),
            SocketScope::Node => (layout::SocketScope::Node, BTreeSet::new()),
            SocketScope::AllBut(exempt) => (layout::SocketScope::NotExempt, exempt.clone()),
        };
        prop_assert_eq!((state.socket_scope, state.exempt_netns), (scope as u16, exempt));
    }

    #[test]
    fn programs_masquerade_as_soon_as_they_have_the_addresses(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let wanted = translate::masquerade_addresses(&after.node);
        let change = plan(&state, &after, &dirty);
        let masquerades = state.masquerade.masquerading == layout::Masquerading::Programs as u16;
        let ports = after.node.masquerade_ports(masquerades);
        let fields = state.masquerade.after(ports);
        for (at, step) in change.steps.iter().enumerate() {
            if matches!(step, Step::SetMasquerade(_)) && ports.is_some() {
                let has = |(subnet, address): (&_, &Addr)| state.masquerade_addresses.get(subnet) == Some(address);
                prop_assert!(wanted.iter().all(has), "{:?}", state.masquerade_addresses);
                let learns_ports = change.steps[at..].contains(&Step::LeaveFlowsToConntrack);
                prop_assert!(masquerades || state.links.is_empty() || learns_ports);
            }
            if let Step::ForgetSource(address) = step {
                prop_assert!(ports.is_some(), "netfilter goes on with new flows, and the programs with known ones");
                prop_assert!(!wanted.values().any(|wanted| wanted == address));
            }
            state.record(step);
        }
        prop_assert_eq!((state.masquerade, state.masquerade_addresses), (fields, wanted));
    }

    #[test]
    fn displaced_programs_stay_where_they_are(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        for (at, link) in &mut state.links {
            *link = HookState::Displaced(snapshot.node.links[&at.index].framing);
        }
        prop_assert_eq!(plan(&state, &snapshot, &Dirty::everything()).steps, []);
    }

    #[test]
    fn service_port_without_room_stays_as_it_was(
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
            state.record_name(name.clone(), *service);
        }
        let failures = Failures::without_room(&state, &change, &sizes);
        let without_room: BTreeSet<u32> = capacity::without_room(&state, &change, &sizes).into_keys().collect();
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
        for key in frontends(&state) {
            let owner = state.service(&key).map_or(0, |value| value.service);
            let whole = if without_room.contains(&owner) { &old } else { &new };
            prop_assert_eq!(view(&state, &key), view(whole, &key), "{:?} of {}", key, owner);
            prop_assert!(view(&state, &key).is_some_and(|(slots, _)| !slots.contains(&None)), "an empty slot");
        }
        prop_assert_eq!(failures.into_result().is_err(), !without_room.is_empty());
    }

    #[test]
    fn connections_of_conntrack_are_left_to_it_before_their_service_gets_tables(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let old = programmed(&before);
        let change = plan(&old, &after, &dirty);
        let mut left = BTreeSet::new();
        let mut got = BTreeSet::new();
        for step in &change.steps {
            match step {
                Step::LeaveConnectionsToConntrack { frontends } => left.extend(frontends),
                Step::Put(MapEntry::Service(key, value)) if has_table(value) => {
                    let gets_table = old.service(key).is_some_and(|before| !has_table(before));
                    got.extend(gets_table.then_some(*key));
                    prop_assert!(!gets_table || left.contains(key), "{step:?}");
                }
                _ => {}
            }
        }
        prop_assert_eq!(left, got, "no list of connections is read in vain");
    }

    #[test]
    fn entries_that_are_read_in_any_order_make_the_state_of_their_writer(
        (_, snapshot, _) in testing::snapshot_change()
    ) {
        let steps = plan(&State::default(), &snapshot, &Dirty::everything()).steps;
        let (mut written, mut read) = (State::default(), EntriesRead::default());
        for step in &steps {
            if let Step::Put(entry) = step {
                written.put(entry);
            }
        }
        for step in steps.iter().rev() {
            if let Step::Put(entry) = step {
                read.add(entry);
            }
        }
        prop_assert_eq!(read.into_state(), written);
    }

    #[test]
    fn empty_snapshot_leaves_empty_maps((before, after, dirty) in testing::snapshot_change()) {
        let mut state = programmed(&before);
        let change = plan(&state, &after, &dirty);
        apply(&mut state, &change);
        let removal = plan(&state, &Snapshot::default(), &Dirty::everything());
        apply(&mut state, &removal);
        prop_assert!(state.services_in_use().is_empty() && state.node_addresses.is_empty());
        prop_assert!(state.local_sources.is_empty() && state.local_links.is_empty());
        prop_assert!(state.bridge_ports.is_empty() && state.vlans.is_empty());
        prop_assert!(state.links.is_empty());
        prop_assert_eq!(state.digest, State::default().digest);
    }
}
