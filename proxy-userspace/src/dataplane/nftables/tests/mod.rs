//! The laws of every dataplane, held to the nftables plan over generated Snapshots, what a packet meets in every prefix of a
//! plan, and plans as people read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use proptest::prelude::*;

use self::golden::web;
use super::{
    Plan, State,
    plan::plan,
    service,
    state::{Held, Table},
    table::{Base, Destination},
};
use crate::{
    dataplane::PlanSize as _,
    kernel::nftables::{Change, Family, Key, Name, Statement, Value, Verdict},
    model::{
        Caller, Dirty, Frontend, FrontendKind, IpFamily, LocalTrafficDetector, NodeView, ResolvedEndpoint,
        ResolvedPort, ServicePortKey, Snapshot, TrafficPolicy, testing,
        testing::{cidrs, ip, key, port_number, resolved_port},
    },
};

mod golden;

const MASQUERADE: u32 = 0x4000;

fn empty() -> State {
    State { masquerade: MASQUERADE, ..State::default() }
}

/// What `apply` does to the mirror when the kernel takes everything.
fn apply(state: &mut State, plan: Plan) {
    for (family, change) in plan.transactions.into_iter().flatten() {
        check(state, family, &change);
        state.record(family, change);
    }
    state.learn(plan.facts);
}

/// The kernel refuses what is there already or is not there, and to remove what is in use.
fn check(state: &State, family: Family, change: &Change) {
    let table = state.table(family);
    let base = |set| Base::of(set).expect("one of ours");
    let has_set = |name: &Name| table.sets.contains_key(name);
    let has_chain = |name: &Name| table.chains.contains_key(name);
    match change {
        Change::AddTable(_) => assert!(!table.is_there),
        Change::DeleteTable => assert!(table.is_there),
        Change::AddChain(chain) => assert!(table.is_there && !has_chain(&chain.name), "{}", chain.name),
        Change::FlushChain(chain) => assert!(has_chain(chain), "{chain}"),
        Change::DeleteChain(chain) => {
            assert!(has_chain(chain), "{chain}");
            assert!(!leads_to(table, chain), "{chain} is in use");
        }
        Change::AddRule(chain, rule) => {
            assert!(has_chain(chain), "{chain}");
            for name in needs(&rule.statements) {
                assert!(has_set(&name) || has_chain(&name), "{chain}: there is no {name}");
            }
        }
        Change::AddSet(set) => assert!(table.is_there && !has_set(&set.name), "{}", set.name),
        Change::DeleteSet(set) => {
            assert!(has_set(set), "{set}");
            let rules = table.chains.values().flatten().flatten();
            assert!(
                rules.flat_map(|rule| needs(&rule.statements)).all(|name| name != *set),
                "{set} is in use"
            );
        }
        Change::AddElement(set, key, value) => {
            assert!(has_set(&set.name) && !table.elements.contains_key(&(base(set), *key)));
            if let Value::Verdict(Verdict::Goto(chain), _) = value {
                assert!(has_chain(chain), "there is no {chain}");
            }
        }
        Change::DeleteElement(set, key) => assert!(table.elements.contains_key(&(base(set), *key))),
    }
}

fn needs(statements: &[Statement]) -> Vec<Name> {
    let named = |statement: &Statement| match statement {
        Statement::In(_, name)
        | Statement::VerdictMap(_, name)
        | Statement::DnatByMap(_, name)
        | Statement::Update(name, _)
        | Statement::Verdict(Verdict::Goto(name) | Verdict::Jump(name)) => Some(name.clone()),
        _ => None,
    };
    statements.iter().filter_map(named).collect()
}

fn leads_to(table: &Table, chain: &Name) -> bool {
    let rules = table.chains.values().flatten().flatten();
    let by_rule = rules.flat_map(|rule| needs(&rule.statements)).any(|name| name == *chain);
    let goto = |held: &Held| matches!(&held.value, Value::Verdict(Verdict::Goto(name), _) if name == chain);
    by_rule || table.elements.values().any(goto)
}

fn programmed(snapshot: &Snapshot) -> State {
    let mut state = empty();
    let all = plan(&state, snapshot, &Dirty::everything());
    apply(&mut state, all);
    state
}

/// What a process that starts finds.
fn restarted(state: &State) -> State {
    let mut found = empty();
    for family in Family::ALL {
        let table = state.table(family);
        let held = |(key, held): (&(Base, Key), &Held)| (*key, Held { value: held.value.clone(), claims: 0 });
        *found.table_mut(family) = Table {
            is_there: table.is_there,
            is_foreign: false,
            elements: table.elements.iter().map(held).collect(),
            chains: table.chains.keys().map(|name| (name.clone(), None)).collect(),
            sets: table.sets.clone(),
            shared: BTreeSet::new(),
        };
    }
    found
}

/// Without shared chains, which stay when nothing leads to them.
fn without_shared(state: &State) -> State {
    let mut state = state.clone();
    for family in Family::ALL {
        let table = state.table_mut(family);
        for shared in std::mem::take(&mut table.shared) {
            table.chains.remove(&shared.name());
        }
        // Which number an endpoint has is of no importance.
        let slots = |(base, _): &(Base, Key)| {
            matches!(
                base,
                Base::ServiceEndpoints
                    | Base::ServiceLocalEndpoints
                    | Base::NodePortEndpoints
                    | Base::NodePortLocalEndpoints
            )
        };
        table.elements.retain(|key, _| !slots(key));
    }
    for owned in state.owned.values_mut() {
        owned.elements.sort_unstable();
    }
    state
}

/// What a packet meets at a destination: the chain it is sent to, with all endpoints that may be chosen there and are in the map,
/// and what becomes of it if none is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Offer {
    chain: Option<Name>,
    endpoints: Vec<BTreeSet<SocketAddr>>,
    holes: usize,
    without: Option<Verdict>,
}

impl Offer {
    fn all(&self) -> BTreeSet<SocketAddr> {
        self.endpoints.iter().flatten().copied().collect()
    }
}

fn endpoints_of(snapshot: &Snapshot) -> BTreeSet<SocketAddr> {
    let lists = snapshot.ports.values().flat_map(|port| [&port.cluster_endpoints, &port.local_endpoints]);
    lists.flatten().map(|endpoint| endpoint.address).collect()
}

fn offer(state: &State, family: Family, destination: &Destination) -> Offer {
    let table = state.table(family);
    let (lead, without) = match destination.address {
        Some(_) => (Base::ServiceIps, Base::NoEndpointServices),
        None => (Base::ServiceNodePorts, Base::NoEndpointNodePorts),
    };
    let verdict = |base| match table.elements.get(&(base, destination.key())).map(|held| &held.value) {
        Some(Value::Verdict(verdict, _)) => Some(verdict.clone()),
        _ => None,
    };
    let mut offer = Offer { without: verdict(without), ..Offer::default() };
    if let Some(Verdict::Goto(chain)) = verdict(lead) {
        choices(table, destination, &chain, &mut offer);
        offer.chain = Some(chain);
    }
    offer
}

fn choices(table: &Table, destination: &Destination, chain: &Name, offer: &mut Offer) {
    let rules = table.chains.get(chain).expect("the chain").as_ref().expect("its rules");
    // The number that is there in any case is drawn from lists with others, in another rule.
    let is_first_choice =
        |at: &usize| *at == 0 || !matches!(rules[at - 1].statements[..], [Statement::DnatByMap(..)]);
    let rules = (0..rules.len()).filter(is_first_choice).map(|at| &rules[at]);
    for statement in rules.flat_map(|rule| &rule.statements) {
        match statement {
            Statement::Verdict(Verdict::Goto(next)) => choices(table, destination, next, offer),
            Statement::Dnat(endpoint) => offer.endpoints.push(BTreeSet::from([*endpoint])),
            Statement::DnatByMap(key, map) => {
                let Some(crate::kernel::nftables::Selector::Random(count)) = key.last() else { continue };
                let base = Base::ALL.into_iter().find(|base| base.name() == *map).expect("a map");
                let slots = (0..*count).map(|number| table.elements.get(&(base, destination.slot(number))));
                let found: Vec<_> = slots.collect();
                offer.holes += found.iter().filter(|slot| slot.is_none()).count();
                let endpoint = |held: &Held| match held.value {
                    Value::Data(data) => data.to_endpoint(),
                    _ => None,
                };
                offer.endpoints.push(found.into_iter().flatten().filter_map(endpoint).collect());
            }
            _ => {}
        }
    }
}

fn destinations(snapshot: &Snapshot) -> Vec<(Family, Destination, ServicePortKey, Frontend)> {
    let of = |(key, port): (&ServicePortKey, &Arc<ResolvedPort>)| {
        let protocol = match key.name.protocol {
            crate::model::Protocol::Tcp => 6,
            crate::model::Protocol::Udp => 17,
            crate::model::Protocol::Sctp => 132,
        };
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

/// All that is dialled before and after.
fn dialled(before: &Snapshot, after: &Snapshot) -> Vec<(Family, Destination)> {
    let all = [before, after].into_iter().flat_map(destinations);
    let mut all: Vec<_> = all.map(|(family, destination, ..)| (family, destination)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The endpoints a Snapshot has for callers from outside, which every chain ends with.
fn outside(port: &ResolvedPort, kind: FrontendKind) -> BTreeSet<SocketAddr> {
    port.endpoints(port.policy(kind, Caller::Outside)).iter().map(|endpoint| endpoint.address).collect()
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
        for (family, destination) in dialled(&before, &after) {
            prop_assert_eq!(offer(&state, family, &destination), offer(&fresh, family, &destination));
        }
        prop_assert_eq!(without_shared(&state), without_shared(&fresh));
    }

    #[test]
    fn every_destination_leads_to_its_endpoints_and_to_no_hole(snapshot in testing::snapshot()) {
        let state = programmed(&snapshot);
        for (family, destination, key, frontend) in destinations(&snapshot) {
            let port = &snapshot.ports[&key];
            let offered = offer(&state, family, &destination);
            let wanted = outside(port, frontend.kind);
            prop_assert_eq!(offered.holes, 0);
            prop_assert_eq!(offered.without.is_some(), wanted.is_empty(), "{} {:?}", key, frontend);
            let all: BTreeSet<_> = port.cluster_endpoints.iter().chain(&port.local_endpoints).map(|e| e.address).collect();
            for endpoints in &offered.endpoints {
                prop_assert!(endpoints.is_subset(&all), "{offered:?}");
            }
            let is_inside_only = frontend.kind == FrontendKind::ClusterIp;
            if is_inside_only && port.affinity_timeout.is_none() && !wanted.is_empty() {
                prop_assert_eq!(&offered.endpoints[0], &wanted);
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
        let change = plan(&old, &after, &dirty);
        let groups = split(&change);
        let mut new = old.clone();
        apply(&mut new, change);
        let mut prefix = old.clone();
        for group in groups {
            for (family, change) in group {
                check(&prefix, family, &change);
                prefix.record(family, change);
            }
            for (family, destination) in dialled(&before, &after) {
                let [is, was, becomes] = [&prefix, &old, &new].map(|state| offer(state, family, &destination));
                prop_assert_eq!(is.holes, 0, "{:?}", destination);
                // A chain of the service port's own is written once for all its addresses: one that goes leads to the new
                // list until then.
                let is_own = is.chain.as_ref().is_some_and(|chain| chain.contains('/'));
                let goes = is_own && becomes.chain != is.chain && is.all().is_subset(&endpoints_of(&after));
                prop_assert!(
                    is.all() == was.all() || is.all() == becomes.all() || goes,
                    "{is:?} {was:?} {becomes:?}"
                );
                // Where nothing is chosen, it is said what happens instead.
                if is.endpoints.is_empty() {
                    prop_assert!(is.without == was.without || is.without == becomes.without, "{is:?}");
                }
            }
        }
    }

    #[test]
    fn a_proxy_that_starts_may_be_killed_anywhere_on_its_way(
        (before, after, _) in testing::snapshot_change(),
        made in any::<prop::sample::Index>(),
    ) {
        let mut state = restarted(&programmed(&before));
        let all = split(&plan(&state, &after, &Dirty::everything()));
        for (family, change) in all.iter().take(made.index(all.len() + 1)).flatten() {
            check(&state, *family, change);
            state.record(*family, change.clone());
        }
        let mut next = restarted(&state);
        let rest = plan(&next, &after, &Dirty::everything());
        apply(&mut next, rest);
        prop_assert_eq!(without_shared(&next), without_shared(&programmed(&after)));
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
        prop_assert_eq!(without_shared(&state), without_shared(&before));
    }

    #[test]
    fn what_changed_while_the_proxy_was_away_is_put_right(
        (before, after, _) in testing::snapshot_change()
    ) {
        let mut state = restarted(&programmed(&before));
        let catching_up = plan(&state, &after, &Dirty::everything());
        apply(&mut state, catching_up);
        prop_assert_eq!(without_shared(&state), without_shared(&programmed(&after)));
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
        // Where packets are masqueraded to, where they lead, two endpoints, and what is shared if it is new.
        prop_assert!((4..=7).contains(&change.len()), "{change}");
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
        prop_assert_eq!(without_shared(&state), without_shared(&programmed(&nothing)));
    }
}

/// The changes of a plan, as if each destination, chain or set were a transaction of its own.
fn split(plan: &Plan) -> Vec<Vec<(Family, Change)>> {
    let place = |(family, change): &(Family, Change)| match change {
        Change::AddElement(set, key, _) | Change::DeleteElement(set, key) => {
            let place = Base::of(set).and_then(|base| base.place(*family, key));
            Some((*family, place))
        }
        // Chains and sets are in groups that are not told apart here.
        _ => None,
    };
    let mut all: Vec<Vec<(Family, Change)>> = Vec::new();
    for change in plan.transactions.iter().flatten() {
        match all.last_mut() {
            Some(last) if place(change) == place(&last[0]) => last.push(change.clone()),
            _ => all.push(vec![change.clone()]),
        }
    }
    all
}
