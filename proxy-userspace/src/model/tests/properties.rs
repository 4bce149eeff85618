//! Laws for generated objects, some of which the API would reject.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{prelude::*, sample::Index, strategy::ValueTree, test_runner::TestRunner};

use super::*;

/// Returns the keys whose ports differ.
fn difference(before: &Snapshot, after: &Snapshot) -> BTreeSet<ServicePortKey> {
    let keys = before.ports.keys().chain(after.ports.keys());
    keys.filter(|key| before.ports.get(*key) != after.ports.get(*key)).cloned().collect()
}

fn assert_same(model: &Model, fresh: &Model) {
    assert_eq!(model.snapshot(), fresh.snapshot());
    assert_eq!(model.health_checks(), fresh.health_checks());
    assert_eq!(model.conflicts().collect::<Vec<_>>(), fresh.conflicts().collect::<Vec<_>>());
    assert_eq!(model.service_count(), fresh.service_count());
    assert_eq!(model.endpoint_count(), fresh.endpoint_count());
}

/// Checks the promises on which all dataplanes rely.
fn check_promises(snapshot: &Snapshot) {
    let mut seen = BTreeSet::new();
    for (key, port) in &snapshot.ports {
        for frontend in &port.frontends {
            let family = frontend.address.map(IpFamily::of);
            assert!(family.is_none_or(|family| family == key.family), "{key}: {frontend:?}");
            let matched = (frontend.address, frontend.port, key.name.protocol, key.family);
            assert!(seen.insert(matched), "{key}: {frontend:?} is a duplicate");
        }
        check_endpoints(key, port);
    }
    assert!(snapshot.node.node_port_addresses.is_subset(&snapshot.node.local_addresses));
}

fn check_endpoints(key: &ServicePortKey, port: &ResolvedPort) {
    assert!(port.frontends.is_sorted_by(|a, b| a < b), "{key}: {port:?}");
    for list in [&port.cluster_endpoints, &port.local_endpoints] {
        assert!(list.is_sorted_by(|a, b| a.address < b.address), "{key}: {port:?}");
        assert!(list.iter().all(|e| IpFamily::of(e.address.ip()) == key.family), "{key}: {port:?}");
        assert!(list.is_empty() || port.has_endpoints, "{key}: {port:?}");
        let is_udp = key.name.protocol == Protocol::Udp;
        assert!(!is_udp || list.iter().all(|e| port.serving.contains(e)), "{key}: {port:?}");
    }
    assert!(port.serving.is_sorted_by(|a, b| a.address < b.address), "{key}: {port:?}");
    assert!(port.local_endpoints.iter().all(|endpoint| endpoint.is_local), "{key}: {port:?}");
    let has_dsr = port.forwarding == Forwarding::Dsr;
    let uses_local = has_dsr || [port.internal_policy, port.external_policy].contains(&TrafficPolicy::Local);
    assert!(has_dsr || port.dsr_nodes.is_empty(), "{key}: {port:?}");
    assert!(uses_local || port.local_endpoints.is_empty(), "{key}: {port:?}");
}

/// Returns the event that reverts `event`, given the objects before it.
fn inverse(before: &World, event: &WatchEvent) -> WatchEvent {
    let [services, slices, nodes] = before.lists();
    match event {
        WatchEvent::Services(Delta::Apply(service)) if !before.services.contains_key(&service.name) => {
            WatchEvent::Services(Delta::Delete(service.name.clone()))
        }
        WatchEvent::EndpointSlices(Delta::Apply(slice)) if !before.slices.contains_key(&slice.name) => {
            WatchEvent::EndpointSlices(Delta::Delete(slice.name.clone()))
        }
        WatchEvent::Services(_) | WatchEvent::ServicePart(_) => services,
        WatchEvent::EndpointSlices(_) | WatchEvent::EndpointSlicePart(_) => slices,
        WatchEvent::Nodes(_) => nodes,
        WatchEvent::ServiceCidrs(_) => WatchEvent::ServiceCidrs(Delta::Replace(Vec::new())),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// `batches` has a bit for each event after which the model resolves.
    #[test]
    fn any_batching_leads_to_the_state_of_a_fresh_list(
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
        assert_same(&model, &world.model(&settings, &facts));
    }

    #[test]
    fn lists_in_parts_lead_to_the_state_of_whole_lists_also_after_one_that_did_not_end(
        settings in any_settings(),
        facts in any_facts(),
        broken in world(),
        world in world(),
        size in 1..4_usize,
    ) {
        let mut model = Model::new(settings.clone());
        model.set_node_facts(facts.clone());
        let without_end = |event: &WatchEvent| match event {
            WatchEvent::ServicePart(part) => !part.is_last,
            WatchEvent::EndpointSlicePart(part) => !part.is_last,
            _ => false,
        };
        for part in broken.parts(size).into_iter().filter(without_end) {
            model.apply(part);
        }
        model.apply(WatchEvent::Nodes(Delta::Replace(world.nodes.values().cloned().collect())));
        for part in world.parts(size) {
            prop_assert!(!model.is_synced());
            model.apply(part);
        }
        model.resolve();
        assert_same(&model, &world.model(&settings, &facts));
    }

    #[test]
    fn the_order_of_objects_does_not_matter(
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
            for list in world.lists() {
                model.apply(list);
            }
        }
        model.resolve();
        assert_same(&model, &world.model(&settings, &facts));
    }

    #[test]
    fn reverted_events_leave_no_difference(
        settings in any_settings(),
        facts in any_facts(),
        mut world in world(),
        events in events(1..6),
        resolve_between: bool,
    ) {
        // A Node that was unknown before cannot be reverted.
        world.nodes.entry(NamespacedName::new("", THIS_NODE)).or_insert_with(|| node(THIS_NODE));
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
        for event in inverses.into_iter().rev() {
            model.apply(event);
        }
        let dirty = model.resolve();
        prop_assert!(resolve_between || dirty.is_empty(), "{:?}", dirty);
        assert_same(&model, &start);
    }

    #[test]
    fn changed_settings_and_facts_equal_a_fresh_model(
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
        // Which endpoints are behind the tunnel depends on its port.
        prop_assert!(dirty.ports.is_empty() || before.0.dsr_port != after.0.dsr_port);
        assert_same(&model, &world.model(&after.0, &after.1));
    }

    #[test]
    fn each_frontend_is_served_by_its_smallest_claim(world in world(), settings in any_settings()) {
        let model = world.model(&settings, &NodeFacts::default());
        let mut owners: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for service in world.services.values().filter(|service| is_served(service)) {
            for (key, port) in service_port::ports(service) {
                for frontend in service_port::frontends(service, port, key.family) {
                    let id = (frontend.address, frontend.port, key.name.protocol, key.family);
                    owners.entry(id).or_default().push((service_port::precedence(frontend.kind), key.clone(), frontend));
                }
            }
        }
        let losers: usize = owners.values().map(|claims| claims.len() - 1).sum();
        prop_assert_eq!(model.conflicts().count(), losers);
        let expected: BTreeSet<_> =
            owners.into_values().filter_map(|claims| claims.into_iter().min()).map(|(_, key, frontend)| (key, frontend)).collect();
        let ports = model.snapshot().ports.iter();
        let served: BTreeSet<_> =
            ports.flat_map(|(key, port)| port.frontends.iter().map(move |frontend| (key.clone(), *frontend))).collect();
        prop_assert_eq!(served, expected);
    }

    #[test]
    fn generated_snapshots_keep_the_promises((before, after, dirty) in snapshot_change()) {
        check_promises(&before);
        check_promises(&after);
        prop_assert_eq!(dirty.ports, difference(&before, &after));
    }
}

fn is_served(service: &Service) -> bool {
    !service.excluded_by_label && service.service_type != ServiceType::ExternalName
}

#[test]
fn generated_worlds_have_enough_content() {
    let mut runner = TestRunner::deterministic();
    let mut seen = [0_usize; 5];
    for _ in 0..300 {
        let (snapshot, _, dirty) = snapshot_change().new_tree(&mut runner).expect("no filters").current();
        let ports = || snapshot.ports.values();
        let facts = [
            ports().any(|port| !port.cluster_endpoints.is_empty()),
            ports().any(|port| !port.local_endpoints.is_empty()),
            ports().any(|port| !port.serving.is_empty()),
            ports().any(|port| port.frontends.len() > 2),
            !dirty.ports.is_empty(),
        ];
        facts.iter().zip(&mut seen).for_each(|(fact, seen)| *seen += usize::from(*fact));
    }
    assert!(
        seen.iter().all(|seen| *seen >= 30),
        "the number of worlds, of 300, with each property: {seen:?}"
    );
}
