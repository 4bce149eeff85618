//! The laws of every dataplane, held to the nftables plan over generated Snapshots.

use proptest::prelude::*;

use super::{
    golden::web,
    packet::{Answer, From, Meets, meets},
    *,
};
use crate::dataplane::nftables::table::Basis;
use crate::model::{NoEndpointVerdict, testing};

fn destinations(snapshot: &Snapshot) -> Vec<(Family, Destination, ServicePortKey, Frontend)> {
    let of = |(key, port): (&ServicePortKey, &Arc<ResolvedPort>)| {
        let protocol = key.name.protocol.number();
        let family = service::family(key.family);
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

/// All destinations before and after.
fn all_destinations(before: &Snapshot, after: &Snapshot) -> Vec<(Family, Destination)> {
    let all = [before, after].into_iter().flat_map(destinations);
    let mut all: Vec<_> = all.map(|(family, destination, ..)| (family, destination)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The endpoints that a Snapshot has for a caller.
fn wanted(snapshot: &Snapshot, key: &ServicePortKey, kind: FrontendKind, from: From) -> BTreeSet<SocketAddr> {
    let port = &snapshot.ports[key];
    let basis = Basis::new(MASQUERADE, &snapshot.node);
    let is_told = basis.is_from_pod(service::family(key.family), true).is_some();
    let caller = match from {
        From::Node => ClientLocation::Inside,
        From::Pod if is_told => ClientLocation::Inside,
        _ => ClientLocation::Outside,
    };
    let is_local = kind != FrontendKind::ClusterIp && port.external_policy == TrafficPolicy::Local;
    let endpoints = match port.endpoints(port.policy(kind, caller)) {
        // There are local ones only.
        [] if is_local => &port.local_endpoints,
        endpoints => endpoints,
    };
    endpoints.iter().map(|endpoint| endpoint.address).collect()
}

/// Whether the address was a cluster IP, and is none now, or the other way round.
fn was_cluster_ip(before: &Snapshot, after: &Snapshot, destination: &Destination) -> bool {
    let is_cluster_ip = |snapshot: &Snapshot| {
        let frontends = snapshot.ports.values().flat_map(|port| &port.frontends);
        let mut cluster_ips = frontends.filter(|frontend| frontend.kind == FrontendKind::ClusterIp);
        cluster_ips.any(|frontend| frontend.address == destination.address)
    };
    is_cluster_ip(before) != is_cluster_ip(after)
}

/// What is between both: the node has changed, and Services have not.
fn between(before: &Snapshot, after: &Snapshot) -> Snapshot {
    Snapshot { ports: before.ports.clone(), node: after.node.clone() }
}

/// What packets from everywhere meet.
fn all(state: &State, family: Family, destination: &Destination) -> Vec<Meets> {
    From::ALL.map(|from| meets(state, family, destination, from)).into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn after_apply_nothing_is_left_to_plan(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let again = plan(&state, &snapshot, &Dirty::everything());
        prop_assert!(again.is_empty(), "{again}");
    }

    #[test]
    fn planning_what_is_dirty_reaches_what_planning_everything_reaches(
        (before, after, dirty) in testing::snapshot_change()
    ) {
        let mut state = programmed(&before);
        let incremental = plan(&state, &after, &dirty);
        apply(&mut state, incremental);
        let rest = plan(&state, &after, &Dirty::everything());
        prop_assert!(rest.is_empty(), "left out: {rest}");
        let fresh = programmed(&after);
        for (family, destination) in all_destinations(&before, &after) {
            prop_assert_eq!(all(&state, family, &destination), all(&fresh, family, &destination));
        }
        prop_assert_eq!(without_sizes(&state), without_sizes(&fresh));
    }

    #[test]
    fn every_destination_leads_to_its_endpoints_and_past_none(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        for (family, destination, key, frontend) in destinations(&snapshot) {
            let port = &snapshot.ports[&key];
            for from in From::ALL {
                let meets = meets(&state, family, &destination, from);
                let wanted = wanted(&snapshot, &key, frontend.kind, from);
                prop_assert_eq!(&meets.endpoints, &wanted, "{} {:?} {:?}", key, frontend, from);
                prop_assert!(!meets.falls_through, "{} {:?}", key, frontend);
                let answer = match port.no_endpoint_verdict() {
                    NoEndpointVerdict::Refuse => Answer::Refused,
                    NoEndpointVerdict::Drop => Answer::Dropped,
                };
                prop_assert_eq!(meets.answer, wanted.is_empty().then_some(answer));
            }
            if frontend.kind == FrontendKind::LoadBalancerIp {
                let guarded = state.table(family).elements.contains_key(&(Base::FirewallIps, destination.key()));
                prop_assert_eq!(guarded, !port.source_ranges.is_empty());
            }
        }
    }

    #[test]
    fn every_prefix_of_a_plan_offers_the_old_or_the_new_and_never_a_mixture(
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
            for from in From::ALL {
                let may: Vec<_> = states.iter().map(|state| meets(state, family, &destination, from)).collect();
                cases.push((family, destination, from, may));
            }
        }
        let mut prefix = old;
        for group in change.transactions {
            for (family, change) in group {
                check(&prefix, family, &change);
                prefix.record(family, change);
            }
            for (family, destination, from, may) in &cases {
                let is = meets(&prefix, *family, destination, *from);
                // An address that is another Service's cluster IP no longer may be masqueraded to a moment too long.
                let other = Meets { is_masqueraded: false, ..is.clone() };
                let is_too_long = was_cluster_ip(&before, &after, destination) && may.contains(&other);
                prop_assert!(
                    may.contains(&is) || is_too_long,
                    "{destination:?} {from:?}: {is:?} is none of {may:?}"
                );
            }
        }
    }

    #[test]
    fn a_proxy_that_starts_may_be_killed_anywhere_on_its_way(
        (before, after, _) in testing::snapshot_change(),
        made in any::<prop::sample::Index>(),
    ) {
        let mut state = restarted(&programmed(&before));
        let all = plan::plan(&state, &after, &Dirty::everything(), 1).transactions;
        for (family, change) in all.iter().take(made.index(all.len() + 1)).flatten() {
            check(&state, *family, change);
            state.record(*family, change.clone());
        }
        let mut next = restarted(&state);
        let rest = plan(&next, &after, &Dirty::everything());
        apply(&mut next, rest);
        prop_assert_eq!(without_sizes(&next), without_sizes(&programmed(&after)));
    }

    #[test]
    fn a_restarted_proxy_writes_rules_and_touches_no_element_and_no_client(snapshot in testing::snapshot()) {
        let before = programmed(&snapshot);
        let mut state = restarted(&before);
        let takeover = plan(&state, &snapshot, &Dirty::everything());
        for (_, change) in takeover.transactions.iter().flatten() {
            prop_assert!(matches!(change, Change::FlushChain(_) | Change::AddRule(..)), "{change:?}");
        }
        apply(&mut state, takeover);
        prop_assert_eq!(without_sizes(&state), without_sizes(&before));
    }

    #[test]
    fn what_changed_while_the_proxy_was_away_is_put_right(
        (before, after, _) in testing::snapshot_change()
    ) {
        let mut state = restarted(&programmed(&before));
        let catching_up = plan(&state, &after, &Dirty::everything());
        apply(&mut state, catching_up);
        prop_assert_eq!(without_sizes(&state), without_sizes(&programmed(&after)));
        prop_assert!(plan(&state, &after, &Dirty::everything()).is_empty());
    }

    #[test]
    fn a_plan_grows_with_the_change_and_not_with_the_cluster(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        let mut more = snapshot.clone();
        let added = key("new/service", "");
        more.ports.insert(added.clone(), Arc::new(web(&["10.244.9.1:80", "10.244.9.2:80"])));
        let dirty = Dirty { ports: BTreeSet::from([added]), ..Dirty::default() };
        let change = plan(&state, &more, &dirty);
        // Where packets are masqueraded to, how many endpoints there are, two of them, and at most the chain of that size and the
        // one that tells sizes apart.
        prop_assert!((4..=4 + 4 + 1 + 18).contains(&change.len()), "{change}");
    }

    #[test]
    fn undoing_everything_leaves_the_base(snapshot in testing::snapshot()) {
        let mut state = programmed(&snapshot);
        let nothing = Snapshot { node: NodeView { node_port_addresses: BTreeSet::new(), ..snapshot.node }, ..Snapshot::default() };
        let removal = plan(&state, &nothing, &Dirty::everything());
        apply(&mut state, removal);
        for family in Family::ALL {
            prop_assert!(state.table(family).elements.is_empty());
        }
        prop_assert_eq!(without_sizes(&state), without_sizes(&programmed(&nothing)));
    }
}
