//! Laws over generated objects, among them such as the API would refuse.

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::Index};

use super::*;

/// The keys whose ports differ.
fn difference(before: &Snapshot, after: &Snapshot) -> BTreeSet<ServicePortKey> {
    let keys = before.ports.keys().chain(after.ports.keys());
    keys.filter(|key| before.ports.get(*key) != after.ports.get(*key))
        .cloned()
        .collect()
}

fn same(model: &Model, fresh: &Model) {
    assert_eq!(model.snapshot(), fresh.snapshot());
    assert_eq!(model.health_checks(), fresh.health_checks());
    assert_eq!(
        model.conflicts().collect::<Vec<_>>(),
        fresh.conflicts().collect::<Vec<_>>()
    );
    assert_eq!(model.service_count(), fresh.service_count());
    assert_eq!(model.endpoint_count(), fresh.endpoint_count());
}

/// What every dataplane relies on.
fn check_promises(snapshot: &Snapshot) {
    let mut seen = BTreeSet::new();
    for (key, port) in &snapshot.ports {
        for frontend in &port.frontends {
            let family = frontend.address.map(IpFamily::of);
            assert!(
                family.is_none_or(|family| family == key.family),
                "{key}: {frontend:?}"
            );
            let matched = (frontend.address, frontend.port, key.name.protocol, key.family);
            assert!(seen.insert(matched), "{key}: {frontend:?} is another's");
        }
        check_endpoints(key, port);
    }
    assert!(
        snapshot
            .node
            .node_port_addresses
            .is_subset(&snapshot.node.local_addresses)
    );
}

fn check_endpoints(key: &ServicePortKey, port: &ResolvedPort) {
    assert!(port.frontends.is_sorted_by(|a, b| a < b), "{key}: {port:?}");
    for list in [&port.cluster_endpoints, &port.local_endpoints] {
        assert!(list.is_sorted_by(|a, b| a.address < b.address), "{key}: {port:?}");
        assert!(
            list.iter().all(|e| IpFamily::of(e.address.ip()) == key.family),
            "{key}: {port:?}"
        );
        assert!(list.is_empty() || port.has_endpoints, "{key}: {port:?}");
        let is_udp = key.name.protocol == Protocol::Udp;
        assert!(
            !is_udp || list.iter().all(|e| port.serving.contains(&e.address)),
            "{key}: {port:?}"
        );
    }
    assert!(port.serving.is_sorted_by(|a, b| a < b), "{key}: {port:?}");
    assert!(
        port.local_endpoints.iter().all(|endpoint| endpoint.is_local),
        "{key}: {port:?}"
    );
    let uses_local = [port.internal_policy, port.external_policy].contains(&TrafficPolicy::Local);
    assert!(uses_local || port.local_endpoints.is_empty(), "{key}: {port:?}");
}

/// The event that takes one back, given what was there before it.
fn inverse(before: &World, event: &WatchEvent) -> WatchEvent {
    let [services, slices, nodes] = before.lists();
    match event {
        WatchEvent::Services(Delta::Apply(service)) if !before.services.contains_key(&service.name) => {
            WatchEvent::Services(Delta::Delete(service.name.clone()))
        }
        WatchEvent::EndpointSlices(Delta::Apply(slice)) if !before.slices.contains_key(&slice.name) => {
            WatchEvent::EndpointSlices(Delta::Delete(slice.name.clone()))
        }
        WatchEvent::Services(_) => services,
        WatchEvent::EndpointSlices(_) => slices,
        WatchEvent::Nodes(_) => nodes,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// `batches` says after which events there is a resolution.
    #[test]
    fn any_batching_ends_as_a_fresh_list_and_dirty_names_exactly_what_differs(
        settings in any_settings(),
        facts in any_facts(),
        start in world(),
        events in events(0..20),
        batches in any::<u32>(),
    ) {
        let (mut model, mut world) = (start.model(&settings, &facts), start);
        for (number, event) in events.into_iter().enumerate() {
            world.apply(event.clone());
            model.apply(event);
            if batches & (1 << number) == 0 {
                continue;
            }
            let before = model.snapshot().clone();
            let dirty = model.resolve();
            prop_assert!(!dirty.all);
            prop_assert_eq!(&dirty.ports, &difference(&before, model.snapshot()));
            prop_assert_eq!(dirty.node, before.node != model.snapshot().node);
            check_promises(model.snapshot());
        }
        model.resolve();
        same(&model, &world.model(&settings, &facts));
    }

    #[test]
    fn the_order_in_which_objects_arrive_does_not_matter(
        settings in any_settings(),
        facts in any_facts(),
        world in world(),
        shuffle in prop::collection::vec(any::<Index>(), 32),
        listed_first: bool,
    ) {
        let mut events = world.single_events();
        for index in shuffle.iter().filter(|_| events.len() > 1).collect::<Vec<_>>() {
            let event = events.remove(index.index(events.len()));
            events.push(event);
        }
        let mut model = if listed_first {
            World::default().model(&settings, &facts)
        } else {
            Model::new(settings.clone())
        };
        for event in events {
            model.apply(event);
            model.resolve();
        }
        if !listed_first {
            model.set_node_facts(facts.clone());
            world.lists().into_iter().for_each(|list| model.apply(list));
        }
        model.resolve();
        same(&model, &world.model(&settings, &facts));
    }

    #[test]
    fn what_is_done_and_undone_leaves_nothing_behind(
        settings in any_settings(),
        facts in any_facts(),
        mut world in world(),
        events in events(1..6),
        resolve_between: bool,
    ) {
        let mut model = world.model(&settings, &facts);
        let start = world.model(&settings, &facts);
        let mut inverses = Vec::new();
        for event in events {
            inverses.push(inverse(&world, &event));
            world.apply(event.clone());
            model.apply(event);
        }
        if resolve_between {
            model.resolve();
        }
        inverses.into_iter().rev().for_each(|event| model.apply(event));
        let dirty = model.resolve();
        prop_assert!(resolve_between || dirty.is_empty(), "{:?}", dirty);
        same(&model, &start);
    }

    #[test]
    fn settings_and_facts_may_change_at_any_time(
        before in (any_settings(), any_facts()),
        after in (any_settings(), any_facts()),
        world in world(),
    ) {
        let mut model = world.model(&before.0, &before.1);
        model.set_settings(after.0.clone());
        model.set_node_facts(after.1.clone());
        let former = model.snapshot().clone();
        let dirty = model.resolve();
        prop_assert_eq!(dirty.node, former.node != model.snapshot().node);
        prop_assert!(dirty.ports.is_empty());
        same(&model, &world.model(&after.0, &after.1));
    }

    #[test]
    fn every_claim_has_an_owner_or_lost_to_one(world in world(), settings in any_settings()) {
        let model = world.model(&settings, &NodeFacts::default());
        for conflict in model.conflicts() {
            let port = &model.snapshot().ports[&conflict.owner];
            let owned = |frontend: &Frontend| (frontend.address, frontend.port) == (conflict.address, conflict.port);
            prop_assert!(port.frontends.iter().any(owned), "{:?}", conflict);
            let loser = &model.snapshot().ports[&conflict.loser];
            prop_assert!(!loser.frontends.iter().any(owned), "{:?}", conflict);
        }
    }
}
