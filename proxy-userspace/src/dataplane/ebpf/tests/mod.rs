//! The laws of every dataplane, checked for eBPF plans over generated Snapshots.

mod endpoint_lists;

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

    #[test]
    fn ingress_is_attached_after_all_services_and_all_egress_programs(
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
                let with_egress = after.node.links.iter().filter(|(_, link)| link.framing != Framing::Tunnel);
                for (index, link) in with_egress {
                    let egress = LinkHook { hook: Hook::Egress, index: *index };
                    prop_assert_eq!(state.links.get(&egress), Some(&HookState::Current(link.framing)));
                }
            }
        }
    }

    #[test]
    fn links_get_the_programs_of_their_framing_and_unwanted_ones_are_detached(
        (before, after, dirty) in testing::snapshot_change(),
        is_restarted in any::<bool>(),
    ) {
        let mut state = programmed(&before);
        let dirty = if is_restarted { state = restarted(&state); Dirty::everything() } else { dirty };
        let change = plan(&state, &after, &dirty);
        apply(&mut state, &change);
        prop_assert_eq!(&state.links, &wanted_links(&after));
        prop_assert_eq!(&state.local_links, &after.node.local_links);
        let bridge_ports = after.node.bridge_ports.iter();
        let bridge_ports = bridge_ports.map(|(index, address)| (*index, HardwareAddress::new(address.0)));
        prop_assert_eq!(&state.bridge_ports, &bridge_ports.collect::<BTreeMap<_, _>>());
        prop_assert_eq!(&state.vlans, &after.node.vlans.iter().copied().map(translate::vlan).collect());
    }

    #[test]
    fn maps_know_the_nodes_behind_the_tunnel((before, after, dirty) in testing::snapshot_change()) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        apply(&mut state, &changes);
        let tunnel = after.node.tunnel.as_ref();
        let nodes = tunnel.map(translate::dsr_nodes).unwrap_or_default();
        prop_assert_eq!(&state.dsr_nodes, &nodes);
        for (address, kind) in &nodes {
            let is_end = tunnel.is_some_and(|tunnel| tunnel.nodes.contains(&IpAddr::from(*address)));
            prop_assert_eq!(*kind == DsrAddress::End as u8, is_end);
        }
        prop_assert_eq!(state.tunnel.link, tunnel.filter(|tunnel| tunnel.is_up).map_or(0, |tunnel| tunnel.link));
        let ports = after.ports.values().filter(|port| !port.frontends.is_empty());
        let wanted: BTreeSet<_> = ports.flat_map(|port| &port.dsr_nodes).map(|(_, node)| *node).collect();
        let known: BTreeSet<_> = state.dsr_endpoints.values().map(|node| IpAddr::from(*node)).collect();
        prop_assert_eq!(known, wanted);
    }

    /// Before a frontend sends packets through the tunnel, the nodes of its endpoints are known.
    /// The frontend for packets that come through it never sends them on.
    #[test]
    fn frontends_with_direct_server_return_have_a_second_one_for_the_tunnel(
        snapshot in testing::snapshot()
    ) {
        let state = programmed(&snapshot);
        for key in frontends(&state) {
            let value = *state.service(&key).expect("a frontend");
            let is_dsr = value.flags & flags::DSR != 0;
            prop_assert!(key.tunneled == 0 || !is_dsr);
            let second = state.service(&key.tunneled());
            prop_assert!(!is_dsr || second.is_some());
            if let Some(second) = second.filter(|second| second.outside_list == List::Local as u8) {
                prop_assert_eq!(second.flags & (flags::MASQUERADE_OUTSIDE | flags::MASQUERADE_INSIDE), 0);
                prop_assert_eq!(second.service, value.service);
            }
        }
    }

    /// A packet of a new flow is translated by programs that are on all links, or by netfilter. A
    /// flow of the programs goes on while they are detached, because conntrack has it by then.
    #[test]
    fn link_programs_take_new_flows_only_while_they_are_on_all_links(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let changes = plan(&state, &after, &dirty);
        let is_switch = state.links.is_empty() || wanted_links(&after).is_empty();
        for (at, step) in changes.steps.iter().enumerate() {
            let leaves = state.new_flows == NewFlows::Leave as u16;
            let (earlier, later) = changes.steps.split_at(at);
            match step {
                Step::AttachLink(..) if is_switch => prop_assert!(leaves),
                Step::LeaveLink(_) => {
                    prop_assert!(leaves && earlier.contains(&Step::HandFlowsToConntrack));
                }
                Step::HandFlowsToConntrack => {
                    prop_assert!(leaves && earlier.contains(&Step::TrackFlows));
                }
                // Netfilter gives new flows no addresses that it does not know to be in use.
                Step::TrackFlows => prop_assert!(!leaves),
                Step::ForgetFlows(StaleFlows::Left) => {
                    let translates = |step: &Step| *step == Step::SetNewFlows(NewFlows::Translate);
                    let position = earlier.iter().position(translates);
                    let listed = position.map(|at| earlier[at..].contains(&Step::LeaveFlowsToConntrack));
                    prop_assert_eq!(listed, Some(true));
                }
                Step::ForgetFlows(stale) => {
                    // What netfilter began meanwhile may have the addresses of a flow that ended.
                    let all = state.links.is_empty() && is_netfilter(&before);
                    prop_assert_eq!(*stale == StaleFlows::All, all);
                }
                Step::SetNewFlows(NewFlows::Translate) => {
                    prop_assert!(earlier.contains(&Step::LeaveFlowsToConntrack));
                    // Flows that began after the first list.
                    prop_assert!(later.contains(&Step::LeaveFlowsToConntrack));
                    prop_assert!(!later.iter().any(|step| matches!(step, Step::AttachLink(..))));
                }
                _ => {}
            }
            state.record(step);
        }
        let path = if is_netfilter(&after) { NewFlows::Leave } else { NewFlows::Translate };
        prop_assert!(state.new_flows == path as u16);
    }

    #[test]
    fn direct_path_is_on_only_while_all_programs_translate_and_ends_with_the_endpoints_of_datagrams(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let steps = plan(&state, &after, &dirty).steps;
        for (at, step) in steps.iter().enumerate() {
            let (epoch, later) = (state.direct.epoch, &steps[at + 1..]);
            match step {
                Step::SetDirect(DirectFields { epoch: next, .. }) => {
                    prop_assert!(next.0 > epoch.0, "no epoch returns");
                    let attaches = later.iter().any(|step| matches!(step, Step::AttachLink(..)));
                    prop_assert!(!next.is_on() || !attaches && state.new_flows == NewFlows::Translate as u16);
                }
                Step::Remove(MapEntry::Member(_) | MapEntry::DirectLink(_)) if epoch.is_on() => {
                    prop_assert!(later.iter().any(|step| matches!(step, Step::SetDirect(_))), "{later:?}");
                }
                Step::LeaveLink(_) | Step::HandFlowsToConntrack => prop_assert!(!epoch.is_on()),
                _ => {}
            }
            state.record(step);
        }
        match after.node.link_path {
            LinkPath::Direct { scope, lease, .. } => {
                prop_assert!(state.direct.epoch.is_on());
                prop_assert_eq!(state.direct.scope, scope as u16);
                prop_assert_eq!(state.direct.lease_ns, clock::nanos(lease));
            }
            _ => prop_assert!(!state.direct.epoch.is_on()),
        }
        prop_assert_eq!(state.direct_links, after.node.direct_links);
    }

    #[test]
    fn xdp_programs_forward_only_where_they_are_attached(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let steps = plan(&state, &after, &dirty).steps;
        for (at, step) in steps.iter().enumerate() {
            match step {
                Step::AttachXdp(index, link) => {
                    let is_replaced = state.xdp_mode(*index) == Some(link.mode);
                    prop_assert!(is_replaced || !state.xdp_links.contains_key(index));
                    prop_assert!(!steps[at..].iter().any(|step| matches!(step, Step::AttachLink(..))));
                }
                Step::DetachXdp(index) => prop_assert!(!state.xdp_links.contains_key(index)),
                Step::Put(MapEntry::XdpLink(index, _)) => {
                    prop_assert!(state.xdp_mode(*index).is_some());
                    prop_assert!(after.node.direct_links.contains(index));
                }
                _ => {}
            }
            state.record(step);
        }
        prop_assert_eq!(&state.xdp_links, &translate::xdp_links(&after.node, &state));
        for (index, link) in after.node.xdp_links.iter().filter(|(_, link)| link.forwards) {
            prop_assert_eq!(state.xdp.get(index), Some(&XdpState::Current(link.mode)));
        }
        prop_assert!(state.xdp.keys().all(|index| after.node.xdp_links.contains_key(index)));
    }

    #[test]
    fn link_that_refuses_an_xdp_program_forwards_nothing_and_is_not_asked_again_at_once(
        snapshot in testing::snapshot()
    ) {
        let mut state = programmed(&snapshot);
        state.xdp.values_mut().for_each(|state| *state = XdpState::Refused(state.mode()));
        let refused = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(!refused.steps.iter().any(|step| matches!(step, Step::AttachXdp(..))));
        apply(&mut state, &refused);
        prop_assert!(state.xdp_links.is_empty());
        prop_assert_eq!(plan(&state, &snapshot, &Dirty::everything()).steps, []);
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
