//! Plans around rejected objects, over generated Snapshots and for known ones.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{options, plan, programmed};
use crate::{
    dataplane::{
        PlanSize as _,
        ipvs::{
            IpvsError,
            desired::{Item, KernelObject},
            failures::ApplyFailures,
            plan::Plan,
            rule_features::RuleFeature,
            sets::{Entry, Set, SetEntry},
            state::State,
            step::{SetChange, Step},
        },
    },
    kernel::{KernelError, ipvs::Change},
    model::{Dirty, IpFamily, ServicePortKey, Snapshot, testing},
};

/// A kernel that rejects one object, all changes of sets, or the removal of virtual servers.
struct Kernel {
    rejects: Option<KernelObject>,
    sets_fail: bool,
    servers_stay: bool,
    state: State,
}

fn error() -> KernelError {
    KernelError::call("add", "it")(std::io::Error::from_raw_os_error(libc::EINVAL))
}

impl Kernel {
    fn new(rejects: Option<KernelObject>) -> Self {
        Self { rejects, sets_fail: false, servers_stay: false, state: State::empty(options()) }
    }

    fn sync(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, IpvsError> {
        let plan = plan(&self.state, snapshot, dirty);
        let changes = plan.len();
        self.apply(plan).map(|()| changes)
    }

    fn apply(&mut self, mut plan: Plan) -> Result<(), IpvsError> {
        let mut failures = ApplyFailures::default();
        for step in std::mem::take(&mut plan.steps) {
            let step = failures.safe_part(step, &self.state);
            let step = self.accepted(step, &mut failures);
            self.state.record(step);
        }
        plan.finish(&mut self.state, failures, !self.sets_fail && !self.servers_stay)?;
        self.state.rejections.check()
    }

    fn accepts(&self, what: KernelObject, failures: &mut ApplyFailures) -> bool {
        let is_rejected = self.rejects == Some(what);
        if is_rejected {
            failures.add(what, error());
        }
        !is_rejected
    }

    fn accepted(&self, step: Step, failures: &mut ApplyFailures) -> Step {
        match step {
            Step::Sets(changes) if self.sets_fail => {
                failures.sets_failed(&changes);
                Step::Sets(Vec::new())
            }
            Step::Sets(mut changes) => {
                changes.retain(|change| match *change {
                    // The set accepts each address. Only the link can reject it.
                    SetChange::Add(entry) if entry.set != Set::Addresses => {
                        self.accepts(KernelObject::Item(Item::Entry(entry)), failures)
                    }
                    _ => true,
                });
                Step::Sets(changes)
            }
            Step::Servers(mut changes) => {
                changes.retain(|change| match change {
                    Change::AddServer(key, _) => self.accepts(KernelObject::VirtualServer(*key), failures),
                    Change::RemoveServer(_) if self.servers_stay => {
                        failures.server_failed(change);
                        false
                    }
                    Change::AddReal(key, real, _) => {
                        !failures.contains(KernelObject::VirtualServer(*key))
                            && self.accepts(KernelObject::RealServer(*key, *real), failures)
                    }
                    _ => true,
                });
                Step::Servers(changes)
            }
            Step::AddAddresses(mut addresses) => {
                addresses
                    .retain(|address| self.accepts(KernelObject::Item(Item::address(*address)), failures));
                Step::AddAddresses(addresses)
            }
            step => step,
        }
    }

    /// Returns true if each address has a virtual server, and the virtual server that the rejected
    /// entry would protect does not exist.
    fn is_safe(&self) -> bool {
        let servers = &self.state.servers;
        let leads = |address| servers.keys().any(|key| key.address.ip() == address);
        let is_guarded = match self.rejects {
            Some(KernelObject::Item(Item::Entry(SetEntry { set, entry, .. }))) if set != Set::LoopBack => {
                entry.server().is_none_or(|key| !servers.contains_key(&key))
            }
            _ => true,
        };
        is_guarded && self.state.addresses.iter().all(|address| leads(*address))
    }
}

/// Returns all objects that the kernel could reject. It never rejects port numbers.
fn rejectable(state: &State) -> Vec<KernelObject> {
    let items = state
        .items
        .keys()
        .filter(|item| matches!(item, Item::Entry(entry) if !matches!(entry.entry, Entry::Port(_))));
    let servers = state.servers.iter().flat_map(|(key, server)| {
        let reals = server.reals.iter().map(|real| KernelObject::RealServer(*key, real.address));
        reals.chain([KernelObject::VirtualServer(*key)])
    });
    items.map(|item| KernelObject::Item(*item)).chain(servers).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_rejected_object_does_not_affect_other_service_ports(
        snapshot in testing::snapshot(),
        choice in any::<prop::sample::Index>(),
    ) {
        let whole = programmed(&snapshot);
        let all = rejectable(&whole);
        prop_assume!(!all.is_empty());
        let rejected = all[choice.index(all.len())];
        let mut kernel = Kernel::new(Some(rejected));
        let first = kernel.sync(&snapshot, &Dirty::everything());
        prop_assert!(matches!(first, Err(IpvsError::LeftOut { .. })), "{rejected:?}: {first:?}");
        prop_assert!(kernel.is_safe(), "{rejected:?}");
        // The second plan removes what is left of it. Later plans are empty, and still fail.
        prop_assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
        prop_assert!(plan(&kernel.state, &snapshot, &Dirty::everything()).is_empty(), "{rejected:?}");
        prop_assert!(kernel.is_safe(), "{rejected:?}");
        let affected: BTreeSet<&ServicePortKey> =
            snapshot.ports.keys().filter(|key| kernel.state.rejections.contains(key, rejected)).collect();
        prop_assert!(!affected.is_empty());
        for (key, claims) in &whole.ports {
            if !affected.contains(key) {
                prop_assert_eq!(kernel.state.ports.get(key), Some(claims));
            }
        }
        // When the service ports change and the kernel accepts the object, nothing is left out.
        kernel.rejects = None;
        let dirty = Dirty { ports: affected.into_iter().cloned().collect(), ..Dirty::default() };
        let last = kernel.sync(&snapshot, &dirty);
        prop_assert!(last.is_ok(), "{rejected:?}: {last:?}");
        prop_assert_eq!(kernel.state, whole, "{:?}", rejected);
    }
}

#[test]
fn an_entry_of_a_full_set_is_tried_again_when_there_is_room() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let rejected = rejectable(&whole)
        .into_iter()
        .find(|what| matches!(what, KernelObject::Item(Item::Entry(SetEntry { set: Set::ClusterIp, .. }))))
        .expect("a cluster IP");
    let mut kernel = Kernel::new(Some(rejected));
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    // A full plan does not try again while the set is full.
    kernel.rejects = None;
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    let mut fewer = snapshot.clone();
    let affected = |key: &ServicePortKey| kernel.state.rejections.contains(key, rejected);
    let gone = fewer.ports.keys().find(|key| !affected(key)).expect("another").clone();
    fewer.ports.remove(&gone);
    let dirty = Dirty { ports: [gone].into(), ..Dirty::default() };
    assert!(kernel.sync(&fewer, &dirty).is_err(), "a partial plan does not try again");
    assert!(kernel.sync(&fewer, &Dirty::everything()).is_ok());
    assert_eq!(kernel.state, programmed(&fewer));
}

#[test]
fn the_error_names_the_service_port_and_the_kernels_error() {
    let snapshot = super::golden::snapshot();
    let key = testing::key("default/external", "");
    let address = testing::ip("198.51.100.12");
    let rejected = KernelObject::Item(Item::address(address));
    let mut kernel = Kernel::new(Some(rejected));
    let message = kernel.sync(&snapshot, &Dirty::everything()).expect_err("it is rejected").to_string();
    assert!(message.contains("of 1 service port") && message.contains(&key.to_string()), "{message}");
    assert!(message.contains("Invalid argument"), "{message}");
    let servers: Vec<String> = kernel.state.servers.keys().map(ToString::to_string).collect();
    assert!(servers.contains(&"TCP 10.96.0.12:80".to_owned()), "its cluster IP is served: {servers:?}");
}

#[test]
fn a_full_plan_forgets_rejected_objects_that_are_not_needed() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let real = rejectable(&whole)
        .into_iter()
        .find(|what| matches!(what, KernelObject::RealServer(..)))
        .expect("one");
    let mut kernel = Kernel::new(Some(real));
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    let mut changed = snapshot.clone();
    let KernelObject::RealServer(_, address) = real else { panic!("{real:?}") };
    for port in changed.ports.values_mut() {
        let port = std::sync::Arc::make_mut(port);
        port.cluster_endpoints.retain(|endpoint| endpoint.address != address);
        port.local_endpoints.retain(|endpoint| endpoint.address != address);
    }
    assert!(kernel.sync(&changed, &Dirty::everything()).is_ok());
}

#[test]
fn without_sets_no_virtual_server_with_source_ranges_is_added() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let mut kernel = Kernel::new(None);
    kernel.sync(&Snapshot::default(), &Dirty::everything()).expect("no service port is left out");
    kernel.sets_fail = true;
    kernel.sync(&snapshot, &Dirty::everything()).expect("no service port is left out");
    let is_there = |key| kernel.state.servers.contains_key(key);
    let (with_ranges, others): (Vec<_>, Vec<_>) =
        whole.servers.keys().partition(|key| whole.has_source_ranges(**key));
    assert!(!with_ranges.is_empty() && !with_ranges.iter().any(&is_there), "{with_ranges:?}");
    assert!(!others.is_empty() && others.iter().all(is_there), "{others:?}");
    assert!(kernel.is_safe());
    kernel.sets_fail = false;
    kernel.sync(&snapshot, &Dirty::everything()).expect("nothing is rejected");
    assert_eq!(kernel.state, whole);
}

#[test]
fn a_virtual_server_that_stays_keeps_its_set_entries() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.sync(&snapshot, &Dirty::everything()).expect("nothing is rejected");
    let firewall_entries = |state: &State| -> BTreeSet<Item> {
        let is_firewall_entry =
            |item: &&Item| matches!(item, Item::Entry(SetEntry { set: Set::LoadBalancerFirewall, .. }));
        state.existing_items().filter(is_firewall_entry).copied().collect()
    };
    let (before, servers) = (firewall_entries(&kernel.state), kernel.state.servers.len());
    assert!(!before.is_empty());
    kernel.servers_stay = true;
    for _ in 0..2 {
        kernel.sync(&Snapshot::default(), &Dirty::everything()).expect("no service port is left out");
        assert_eq!(kernel.state.servers.len(), servers);
        assert_eq!(firewall_entries(&kernel.state), before);
        // An error that concerns no single family requests a full plan.
        kernel.state.node = None;
    }
    kernel.servers_stay = false;
    kernel.sync(&Snapshot::default(), &Dirty::everything()).expect("nothing is rejected");
    assert!(kernel.state.servers.is_empty() && firewall_entries(&kernel.state).is_empty());
}

#[test]
fn if_rules_of_one_family_fail_everything_else_is_planned() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.state.rules.remove(&IpFamily::V4);
    kernel.sync(&snapshot, &Dirty::everything()).expect("the rules of IPv4 are not written");
    let whole = programmed(&snapshot);
    assert_eq!(kernel.state.rules.get(&IpFamily::V6), whole.rules.get(&IpFamily::V6));
    assert!(!kernel.state.rules.contains_key(&IpFamily::V4));
    assert_eq!((&kernel.state.sets, &kernel.state.items), (&whole.sets, &whole.items));
    // Only virtual servers that rules must protect are missing.
    let missing: Vec<_> =
        whole.servers.keys().filter(|key| !kernel.state.servers.contains_key(key)).collect();
    assert!(!missing.is_empty());
    assert!(missing.iter().all(|key| key.address.is_ipv4() && whole.has_source_ranges(**key)), "{missing:?}");
    assert!(kernel.is_safe());
    // The next plan is a partial one.
    assert!(plan(&kernel.state, &snapshot, &Dirty::default()).is_empty());
}

/// Returns the text of the rules that a plan writes.
fn rules(plan: &Plan) -> String {
    plan.rules().into_iter().map(|(_, input)| input).collect()
}

#[test]
fn without_the_ipvs_match_only_the_addresses_that_need_it_are_left_out() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.state.options.refused.insert((IpFamily::V4, RuleFeature::IpvsMatch), "no such match".into());
    let first = plan(&kernel.state, &snapshot, &Dirty::everything());
    let rules = rules(&first);
    assert!(rules.contains("KUBE-CLUSTER-IP") && !rules.contains("-m ipvs"), "{rules}");
    let error = kernel.apply(first).expect_err("a service port is left out").to_string();
    assert!(error.contains("default/balanced") && error.contains("no such match"), "{error}");
    let whole = programmed(&snapshot);
    let missing: Vec<_> =
        whole.servers.keys().filter(|key| !kernel.state.servers.contains_key(key)).collect();
    assert!(matches!(missing[..], [key] if key.address.to_string() == "198.51.100.14:80"), "{missing:?}");
    // Later plans have nothing to do, and still report it.
    for dirty in [
        Dirty::everything(),
        Dirty { ports: [testing::key("default/balanced", "")].into(), ..Dirty::default() },
    ] {
        assert_eq!(plan(&kernel.state, &snapshot, &dirty).len(), 0);
        assert!(matches!(kernel.sync(&snapshot, &dirty), Err(IpvsError::LeftOut { count: 1, .. })));
    }
    // Without source ranges, the address needs no such rule.
    let mut open = snapshot.clone();
    let port = open.ports.get_mut(&testing::key("default/balanced", "")).expect("a service port");
    std::sync::Arc::make_mut(port).source_ranges.clear();
    kernel.sync(&open, &Dirty::everything()).expect("nothing is left out");
}

#[test]
fn without_the_physdev_match_everything_is_served() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.state.options.refused.insert((IpFamily::V4, RuleFeature::PhysdevMatch), "no such match".into());
    let first = plan(&kernel.state, &snapshot, &Dirty::everything());
    let rules = rules(&first);
    assert!(rules.contains("KUBE-EXTERNAL-IP dst,dst -m addrtype --dst-type LOCAL -j ACCEPT"), "{rules}");
    assert!(!rules.contains("physdev"), "{rules}");
    kernel.apply(first).expect("nothing is left out");
    assert_eq!(kernel.state.servers, programmed(&snapshot).servers);
}
