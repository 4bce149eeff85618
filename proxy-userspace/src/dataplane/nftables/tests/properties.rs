//! Checks the properties of all dataplanes for nftables plans of generated Snapshots.

use proptest::prelude::*;

use super::{
    golden::web,
    packet::{Answer, Origin, Outcome, outcome},
    *,
};
use crate::dataplane::nftables::table::RuleSettings;
use crate::model::{NoEndpointVerdict, testing};

fn destinations(snapshot: &Snapshot) -> Vec<(IpFamily, Destination, ServicePortKey, Frontend)> {
    let of = |(key, port): (&ServicePortKey, &Arc<ResolvedPort>)| {
        let protocol = key.name.protocol;
        let family = key.family;
        let of_frontend = move |frontend: &Frontend| {
            (
                family,
                Destination { address: frontend.address, protocol, port: frontend.port.get() },
                *frontend,
            )
        };
        port.frontends.iter().map(of_frontend).map(|(f, d, e)| (f, d, key.clone(), e)).collect::<Vec<_>>()
    };
    snapshot.ports.iter().flat_map(of).collect()
}

/// Returns all destinations of both Snapshots.
fn all_destinations(before: &Snapshot, after: &Snapshot) -> Vec<(IpFamily, Destination)> {
    let all = [before, after].into_iter().flat_map(destinations);
    let mut all: Vec<_> = all.map(|(family, destination, ..)| (family, destination)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the endpoints that a Snapshot has for a caller.
fn expected_endpoints(
    snapshot: &Snapshot,
    key: &ServicePortKey,
    kind: FrontendKind,
    from: Origin,
) -> BTreeSet<SocketAddr> {
    let port = &snapshot.ports[key];
    let settings = RuleSettings::new(MASQUERADE, &snapshot.node);
    let is_detected = settings.is_from_pod(key.family, true).is_some();
    let caller = match from {
        Origin::Node => ClientLocation::Inside,
        Origin::Pod if is_detected => ClientLocation::Inside,
        _ => ClientLocation::Outside,
    };
    let is_local = kind != FrontendKind::ClusterIp && port.external_policy == TrafficPolicy::Local;
    let endpoints = match port.endpoints(port.policy(kind, caller)) {
        // All endpoints are local.
        [] if is_local => &port.local_endpoints,
        endpoints => endpoints,
    };
    endpoints.iter().map(|endpoint| endpoint.address).collect()
}

/// Returns true if the address is a cluster IP in only one of the Snapshots.
fn changes_cluster_ip(before: &Snapshot, after: &Snapshot, destination: &Destination) -> bool {
    let is_cluster_ip = |snapshot: &Snapshot| {
        let frontends = snapshot.ports.values().flat_map(|port| &port.frontends);
        let mut cluster_ips = frontends.filter(|frontend| frontend.kind == FrontendKind::ClusterIp);
        cluster_ips.any(|frontend| frontend.address == destination.address)
    };
    is_cluster_ip(before) != is_cluster_ip(after)
}

/// Returns the Snapshot in between: the node has changed, but not the Services.
fn between(before: &Snapshot, after: &Snapshot) -> Snapshot {
    Snapshot { ports: before.ports.clone(), node: after.node.clone() }
}

/// Returns the outcomes for packets of all origins.
fn all_outcomes(state: &State, family: IpFamily, destination: &Destination) -> Vec<Outcome> {
    Origin::ALL.map(|from| outcome(state, family, destination, from)).into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn plan_after_apply_is_empty(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again}");
    }

    #[test]
    fn partial_plan_leads_to_the_same_state_as_a_full_plan(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let incremental = plan(&state, &after, &dirty);
        apply(&mut state, incremental);
        let rest = plan(&state, &after, &Dirty::everything());
        prop_assert!(rest.is_empty(), "missing: {rest}");
        let fresh = programmed(&after);
        for (family, destination) in all_destinations(&before, &after) {
            prop_assert_eq!(all_outcomes(&state, family, &destination), all_outcomes(&fresh, family, &destination));
        }
        prop_assert_eq!(without_lists(&state), without_lists(&fresh));
    }

    #[test]
    fn every_destination_leads_to_all_its_endpoints(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        for (family, destination, key, frontend) in destinations(&snapshot) {
            let port = &snapshot.ports[&key];
            for from in Origin::ALL {
                let actual = outcome(&state, family, &destination, from);
                let expected = expected_endpoints(&snapshot, &key, frontend.kind, from);
                prop_assert_eq!(&actual.endpoints, &expected, "{} {:?} {:?}", key, frontend, from);
                prop_assert!(!actual.falls_through, "{} {:?}", key, frontend);
                let answer = match port.no_endpoint_verdict() {
                    NoEndpointVerdict::Refuse => Answer::Refused,
                    NoEndpointVerdict::Drop => Answer::Dropped,
                };
                prop_assert_eq!(actual.answer, expected.is_empty().then_some(answer));
            }
            if frontend.kind == FrontendKind::LoadBalancerIp {
                let guarded = state.table(family).elements.contains_key(&(SharedSet::FirewallIps, destination.key()));
                prop_assert_eq!(guarded, !port.source_ranges.is_empty());
            }
        }
    }

    #[test]
    fn partially_applied_plan_serves_the_old_or_the_new_list(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let old = programmed(&before);
        let change = plan::plan(&old, &after, &dirty, 1);
        let mut new = old.clone();
        apply(&mut new, plan(&old, &after, &dirty));
        let mut states = vec![old.clone(), new];
        if before.node != after.node {
            let mut between_both = old.clone();
            let dirty = Dirty { node: true, ..Dirty::default() };
            let node = plan(&old, &between(&before, &after), &dirty);
            apply(&mut between_both, node);
            states.push(between_both);
        }
        let mut cases = Vec::new();
        for (family, destination) in all_destinations(&before, &after) {
            for from in Origin::ALL {
                let may: Vec<_> = states.iter().map(|state| outcome(state, family, &destination, from)).collect();
                cases.push((family, destination, from, may));
            }
        }
        let mut prefix = old;
        for group in change.transactions {
            for (family, change) in group {
                commit(&mut prefix, family, change);
            }
            for (family, destination, from, may) in &cases {
                let is = outcome(&prefix, *family, destination, *from);
                // Traffic to a former cluster IP may be masqueraded for a moment too long.
                let other = Outcome { is_masqueraded: false, ..is.clone() };
                let is_too_long = changes_cluster_ip(&before, &after, destination) && may.contains(&other);
                prop_assert!(
                    may.contains(&is) || is_too_long,
                    "{destination:?} {from:?}: {is:?}, expected one of {may:?}"
                );
            }
        }
    }

    #[test]
    fn interrupted_sync_is_completed_after_the_tables_are_read_again(
        (before, after, _) in testing::snapshot_change(),
        is_first in any::<bool>(),
        made in any::<prop::sample::Index>(),
    ) {
        let mut kernel = programmed(&before);
        let state = if is_first { restarted(&kernel) } else { kernel.clone() };
        let all = plan::plan(&state, &after, &Dirty::everything(), 1).transactions;
        for (family, change) in all.iter().take(made.index(all.len() + 1)).flatten() {
            commit(&mut kernel, *family, change.clone());
        }
        let mut next = restarted(&kernel);
        let rest = plan(&next, &after, &Dirty::everything());
        apply_to(&mut kernel, &mut next, rest);
        prop_assert_eq!(without_lists(&next), without_lists(&programmed(&after)));
    }

    #[test]
    fn restarted_proxy_rewrites_rules_but_no_elements(snapshot in testing::snapshot()) {
        let before = programmed(&snapshot);
        let mut state = restarted(&before);
        let takeover = plan(&state, &snapshot, &Dirty::everything());
        for (_, change) in takeover.transactions.iter().flatten() {
            prop_assert!(matches!(change, Change::FlushChain(_) | Change::AddRule(..)), "{change:?}");
        }
        apply_to(&mut before.clone(), &mut state, takeover);
        prop_assert_eq!(without_lists(&state), without_lists(&before));
    }

    #[test]
    fn restarted_proxy_catches_up_with_changes(
        (before, after, _) in testing::snapshot_change()
    ) {
        let mut kernel = programmed(&before);
        let mut state = restarted(&kernel);
        let catching_up = plan(&state, &after, &Dirty::everything());
        apply_to(&mut kernel, &mut state, catching_up);
        prop_assert_eq!(without_lists(&state), without_lists(&programmed(&after)));
        prop_assert!(plan(&state, &after, &Dirty::everything()).is_empty());
    }

    #[test]
    fn plan_for_one_service_does_not_grow_with_the_cluster(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let mut more = snapshot.clone();
        let added = key("new/service", "");
        more.ports.insert(added.clone(), Arc::new(web(&["10.244.9.1:80", "10.244.9.2:80"])));
        let dirty = Dirty { ports: BTreeSet::from([added]), ..Dirty::default() };
        let change = plan(&state, &more, &dirty);
        // An element of cluster-ips, one of the list size, two endpoints, and at most the chain of
        // this size and the chain that leads to it.
        prop_assert!((4..=4 + 4 + 1 + 18).contains(&change.len()), "{change}");
    }

    #[test]
    fn removing_all_services_leaves_the_shared_objects(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        let nothing = Snapshot { node: NodeView { node_port_addresses: BTreeSet::new(), ..snapshot.node }, ..Snapshot::default() };
        let removal = plan(&state, &nothing, &Dirty::everything());
        apply(&mut state, removal);
        for family in IpFamily::ALL {
            prop_assert!(state.table(family).elements.is_empty());
        }
        prop_assert_eq!(without_lists(&state), without_lists(&programmed(&nothing)));
    }
}
