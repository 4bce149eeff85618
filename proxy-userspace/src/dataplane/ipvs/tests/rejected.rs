//! What is planned around what the kernel refuses, over generated Snapshots and for some that are known.

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
            sets::{Entry, Set, SetEntry},
            state::State,
            step::{SetChange, Step},
        },
    },
    kernel::{KernelError, ipvs::Change},
    model::{Dirty, IpFamily, ServicePortKey, Snapshot, testing},
};

/// A kernel that refuses one thing, or changes of sets altogether, or to remove any virtual server.
struct Kernel {
    refuses: Option<KernelObject>,
    sets_fail: bool,
    servers_stay: bool,
    state: State,
}

fn error() -> KernelError {
    KernelError::call("add", "it")(std::io::Error::from_raw_os_error(libc::EINVAL))
}

impl Kernel {
    fn new(refuses: Option<KernelObject>) -> Self {
        Self { refuses, sets_fail: false, servers_stay: false, state: State::empty(options()) }
    }

    fn sync(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, IpvsError> {
        let plan = plan(&self.state, snapshot, dirty);
        let changes = plan.len();
        self.carry_out(plan).map(|()| changes)
    }

    fn carry_out(&mut self, mut plan: Plan) -> Result<(), IpvsError> {
        let mut failures = ApplyFailures::default();
        for step in std::mem::take(&mut plan.steps) {
            let step = failures.safe_part(step, &self.state);
            let step = self.taken(step, &mut failures);
            self.state.record(step);
        }
        plan.finish(&mut self.state, failures, !self.sets_fail && !self.servers_stay)?;
        self.state.rejections.check()
    }

    fn takes(&self, what: KernelObject, failures: &mut ApplyFailures) -> bool {
        let is_refused = self.refuses == Some(what);
        if is_refused {
            failures.add(what, error());
        }
        !is_refused
    }

    fn taken(&self, step: Step, failures: &mut ApplyFailures) -> Step {
        match step {
            Step::Sets(changes) if self.sets_fail => {
                failures.sets_failed(&changes);
                Step::Sets(Vec::new())
            }
            Step::Sets(mut changes) => {
                changes.retain(|change| match *change {
                    // The set takes any address, and the link does not.
                    SetChange::Add(entry) if entry.set != Set::Addresses => {
                        self.takes(KernelObject::Item(Item::Entry(entry)), failures)
                    }
                    _ => true,
                });
                Step::Sets(changes)
            }
            Step::Servers(mut changes) => {
                changes.retain(|change| match change {
                    Change::AddServer(key, _) => self.takes(KernelObject::VirtualServer(*key), failures),
                    Change::RemoveServer(_) if self.servers_stay => {
                        failures.server_failed(change);
                        false
                    }
                    Change::AddReal(key, real, _) => {
                        !failures.contains(KernelObject::VirtualServer(*key))
                            && self.takes(KernelObject::RealServer(*key, *real), failures)
                    }
                    _ => true,
                });
                Step::Servers(changes)
            }
            Step::AddAddresses(mut addresses) => {
                addresses.retain(|address| self.takes(KernelObject::Item(Item::address(*address)), failures));
                Step::AddAddresses(addresses)
            }
            step => step,
        }
    }

    /// Whether every address leads to a virtual server, and what the refused entry should guard is not there.
    fn is_safe(&self) -> bool {
        let servers = &self.state.servers;
        let leads = |address| servers.keys().any(|key| key.address.ip() == address);
        let is_guarded = match self.refuses {
            Some(KernelObject::Item(Item::Entry(SetEntry { set, entry, .. }))) if set != Set::LoopBack => {
                entry.server().is_none_or(|key| !servers.contains_key(&key))
            }
            _ => true,
        };
        is_guarded && self.state.addresses.iter().all(|address| leads(*address))
    }
}

/// All that could be refused of what a Snapshot has in the kernel. The kernel has all numbers of ports.
fn all_of(state: &State) -> Vec<KernelObject> {
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
    fn what_is_refused_keeps_nothing_else_from_being_served(
        snapshot in testing::snapshot(),
        choice in any::<prop::sample::Index>(),
    ) {
        let whole = programmed(&snapshot);
        let all = all_of(&whole);
        prop_assume!(!all.is_empty());
        let refused = all[choice.index(all.len())];
        let mut kernel = Kernel::new(Some(refused));
        let first = kernel.sync(&snapshot, &Dirty::everything());
        prop_assert!(matches!(first, Err(IpvsError::LeftOut { .. })), "{refused:?}: {first:?}");
        prop_assert!(kernel.is_safe(), "{refused:?}");
        // What is left of it goes, and then there is nothing to do, but to tell.
        prop_assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
        prop_assert!(plan(&kernel.state, &snapshot, &Dirty::everything()).is_empty(), "{refused:?}");
        prop_assert!(kernel.is_safe(), "{refused:?}");
        let blamed: BTreeSet<&ServicePortKey> =
            snapshot.ports.keys().filter(|key| kernel.state.rejections.contains(key, refused)).collect();
        prop_assert!(!blamed.is_empty());
        for (key, claims) in &whole.ports {
            if !blamed.contains(key) {
                prop_assert_eq!(kernel.state.ports.get(key), Some(claims));
            }
        }
        // When they change and the kernel takes it, all is as if nothing had been.
        kernel.refuses = None;
        let dirty = Dirty { ports: blamed.into_iter().cloned().collect(), ..Dirty::default() };
        let last = kernel.sync(&snapshot, &dirty);
        prop_assert!(last.is_ok(), "{refused:?}: {last:?}");
        prop_assert_eq!(kernel.state, whole, "{:?}", refused);
    }
}

#[test]
fn what_a_full_set_lacked_room_for_is_tried_when_something_leaves_it() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let refused = all_of(&whole)
        .into_iter()
        .find(|what| matches!(what, KernelObject::Item(Item::Entry(SetEntry { set: Set::ClusterIp, .. }))))
        .expect("a cluster IP");
    let mut kernel = Kernel::new(Some(refused));
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    // Still full: a look at everything does not try it.
    kernel.refuses = None;
    assert!(kernel.sync(&snapshot, &Dirty::everything()).is_err());
    let mut fewer = snapshot.clone();
    let blamed = |key: &ServicePortKey| kernel.state.rejections.contains(key, refused);
    let gone = fewer.ports.keys().find(|key| !blamed(key)).expect("another").clone();
    fewer.ports.remove(&gone);
    let dirty = Dirty { ports: [gone].into(), ..Dirty::default() };
    assert!(kernel.sync(&fewer, &dirty).is_err(), "it is not there yet");
    assert!(kernel.sync(&fewer, &Dirty::everything()).is_ok());
    assert_eq!(kernel.state, programmed(&fewer));
}

#[test]
fn a_service_port_that_is_left_out_is_named_with_what_the_kernel_said() {
    let snapshot = super::golden::snapshot();
    let key = testing::key("default/external", "");
    let address = testing::ip("198.51.100.12");
    let refused = KernelObject::Item(Item::address(address));
    let mut kernel = Kernel::new(Some(refused));
    let told = kernel.sync(&snapshot, &Dirty::everything()).expect_err("it is refused").to_string();
    assert!(told.contains("of 1 service port") && told.contains(&key.to_string()), "{told}");
    assert!(told.contains("Invalid argument"), "{told}");
    let servers: Vec<String> = kernel.state.servers.keys().map(ToString::to_string).collect();
    assert!(servers.contains(&"TCP 10.96.0.12:80".to_owned()), "its cluster IP is served: {servers:?}");
}

#[test]
fn what_was_refused_and_is_not_wanted_any_more_is_forgotten_by_a_look_at_everything() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let real =
        all_of(&whole).into_iter().find(|what| matches!(what, KernelObject::RealServer(..))).expect("one");
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
fn where_sets_fail_altogether_nothing_is_opened_that_source_ranges_should_guard() {
    let snapshot = super::golden::snapshot();
    let whole = programmed(&snapshot);
    let mut kernel = Kernel::new(None);
    kernel.sync(&Snapshot::default(), &Dirty::everything()).expect("all that Services stand on");
    kernel.sets_fail = true;
    kernel.sync(&snapshot, &Dirty::everything()).expect("nothing is to blame on a service port");
    let is_there = |key| kernel.state.servers.contains_key(key);
    let (guarded, free): (Vec<_>, Vec<_>) =
        whole.servers.keys().partition(|key| whole.has_source_ranges(**key));
    assert!(!guarded.is_empty() && !guarded.iter().any(&is_there), "{guarded:?}");
    assert!(!free.is_empty() && free.iter().all(is_there), "{free:?}");
    assert!(kernel.is_safe());
    kernel.sets_fail = false;
    kernel.sync(&snapshot, &Dirty::everything()).expect("all is taken");
    assert_eq!(kernel.state, whole);
}

#[test]
fn a_server_that_cannot_be_removed_is_guarded_until_it_can() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.sync(&snapshot, &Dirty::everything()).expect("all is taken");
    let guards = |state: &State| -> BTreeSet<Item> {
        let is_guard =
            |item: &&Item| matches!(item, Item::Entry(SetEntry { set: Set::LoadBalancerFirewall, .. }));
        state.existing_items().filter(is_guard).copied().collect()
    };
    let (before, servers) = (guards(&kernel.state), kernel.state.servers.len());
    assert!(!before.is_empty());
    kernel.servers_stay = true;
    for _ in 0..2 {
        kernel
            .sync(&Snapshot::default(), &Dirty::everything())
            .expect("nothing is to blame on a service port");
        assert_eq!(kernel.state.servers.len(), servers);
        assert_eq!(guards(&kernel.state), before);
        // As after any error that is of no family.
        kernel.state.node = None;
    }
    kernel.servers_stay = false;
    kernel.sync(&Snapshot::default(), &Dirty::everything()).expect("all is taken");
    assert!(kernel.state.servers.is_empty() && guards(&kernel.state).is_empty());
}

#[test]
fn where_rules_of_one_family_fail_all_else_of_both_is_planned() {
    let snapshot = super::golden::snapshot();
    let mut kernel = Kernel::new(None);
    kernel.state.rules.remove(&IpFamily::V4);
    kernel.sync(&snapshot, &Dirty::everything()).expect("the rules of IPv4 are not tried");
    let whole = programmed(&snapshot);
    assert_eq!(kernel.state.rules.get(&IpFamily::V6), whole.rules.get(&IpFamily::V6));
    assert!(!kernel.state.rules.contains_key(&IpFamily::V4));
    assert_eq!((&kernel.state.sets, &kernel.state.items), (&whole.sets, &whole.items));
    // Only what rules should guard waits for them.
    let missing: Vec<_> =
        whole.servers.keys().filter(|key| !kernel.state.servers.contains_key(key)).collect();
    assert!(!missing.is_empty());
    assert!(missing.iter().all(|key| key.address.is_ipv4() && whole.has_source_ranges(**key)), "{missing:?}");
    assert!(kernel.is_safe());
    // What changes then is planned as a change, and not as everything.
    assert!(plan(&kernel.state, &snapshot, &Dirty::default()).is_empty());
}
