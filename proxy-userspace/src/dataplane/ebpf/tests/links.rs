//! Which programs stay on links if others cannot be attached.

use std::{sync::Arc, time::Duration};

use super::{super::rules::RuleDuties, *};
use crate::{
    kernel::KernelError,
    model::{DirectScope, Masquerade, NodeView, PortRange},
    net::MacAddress,
};

const PORT: u32 = 2;
const BOND: u32 = 4;

fn hooks(index: u32) -> [LinkHook; 2] {
    [Hook::Egress, Hook::Ingress].map(|hook| LinkHook { hook, index })
}

/// Returns a node on which a link has become a port of a bond, and the state before.
fn new_bond() -> (State, Snapshot) {
    let mut snapshot = Snapshot::default();
    let bond = ServedLink { name: "bond0".into(), framing: Framing::Ethernet };
    snapshot.node.links.insert(BOND, bond);
    snapshot.node.bond_ports.insert(PORT, BOND);
    let mut state = State::default();
    state.links.extend(hooks(PORT).map(|at| (at, HookState::Current(Framing::Ethernet))));
    (state, snapshot)
}

/// Does what `apply` does to the state. No program can be attached if `error` is given.
fn apply_with(state: &mut State, snapshot: &Snapshot, error: Option<fn() -> KernelError>) {
    let mut failures = Failures::default();
    for step in plan(state, snapshot, &Dirty::everything()).steps {
        let Some(step) = failures.adjust(&step, state) else { continue };
        match (&*step, error) {
            (Step::AttachLink(..), Some(error)) => failures.add(&step, error(), state),
            _ => state.record(&step),
        }
    }
}

fn refused() -> KernelError {
    KernelError::CommandNotFound("tc".to_owned())
}

#[test]
fn a_port_keeps_its_programs_until_its_bond_has_some() {
    let (mut state, snapshot) = new_bond();
    apply_with(&mut state, &snapshot, Some(refused));
    assert_eq!(state.links.keys().copied().collect::<Vec<_>>(), hooks(PORT));
    apply_with(&mut state, &snapshot, None);
    assert_eq!(state.links.keys().copied().collect::<Vec<_>>(), hooks(BOND));
}

#[test]
fn ports_of_a_bond_that_is_left_out_keep_their_programs() {
    let (mut state, snapshot) = new_bond();
    state.links.extend(hooks(BOND).map(|at| (at, HookState::LeftOut)));
    let steps = plan(&state, &snapshot, &Dirty::everything()).steps;
    assert!(!steps.iter().any(|step| matches!(step, Step::DetachLink(..))), "{steps:?}");
}

#[test]
fn only_full_syncs_and_changes_of_the_node_install_missing_rules() {
    let mut snapshot = Snapshot::default();
    let mut state = programmed(&snapshot);
    state.rules_are_installed = false;
    let name = testing::key("default/web", "http");
    snapshot.ports.insert(name.clone(), Arc::new(testing::resolved_port()));
    let installs = |dirty: &Dirty| {
        let steps = plan(&state, &snapshot, dirty).steps;
        steps.iter().any(|step| matches!(step, Step::InstallRules(_)))
    };
    assert!(!installs(&Dirty { ports: [name].into(), ..Dirty::default() }));
    assert!(installs(&Dirty { node: true, ..Dirty::default() }));
    assert!(installs(&Dirty::everything()));
}

fn direct(seconds: u64, without: &[&str]) -> LinkPath {
    LinkPath::Direct {
        scope: DirectScope::Learned,
        lease: Duration::from_secs(seconds),
        without: without.iter().map(|link| Arc::from(*link)).collect(),
        filtered: BTreeSet::from(["eth0".into()]),
    }
}

fn masquerade() -> Masquerade {
    let ports = PortRange { first: 61_000, last: 65_535 };
    Masquerade { ports, with_direct_path: true, addresses: BTreeMap::new() }
}

#[test]
fn rules_refuse_unless_nothing_of_others_sees_the_packets() {
    let masquerade = Some(masquerade());
    let mut state = State::default();
    state.rule_duties = Some(RuleDuties::ALL);
    let mut after = |link_path, masquerade: &Option<Masquerade>, change: fn(&mut NodeView)| {
        let mut snapshot = Snapshot::default();
        snapshot.node.link_path = link_path;
        snapshot.node.masquerade = masquerade.clone();
        change(&mut snapshot.node);
        for step in plan(&state, &snapshot, &Dirty::everything()).steps {
            state.record(&step);
        }
        let RuleDuties { masquerade, refuse } = state.rule_duties.expect("a process with rules");
        (masquerade, refuse)
    };
    let same: fn(&mut NodeView) = |_| {};
    assert_eq!(after(direct(8, &[]), &masquerade, same), (false, false));
    assert_eq!(after(direct(8, &["eth1"]), &masquerade, same), (false, true), "a filter sees packets first");
    assert_eq!(after(direct(0, &[]), &masquerade, same), (false, true), "a rule sees packets first");
    assert_eq!(after(direct(8, &[]), &None, same), (true, true));
    let bridge: fn(&mut NodeView) = |node| node.bridge_ports.extend([(PORT, MacAddress([2; 6]))]);
    assert_eq!(after(direct(8, &[]), &masquerade, bridge), (false, true));
    assert_eq!(after(direct(8, &[]), &masquerade, same), (false, false));
    let tunnel = |node: &mut NodeView| {
        drop(node.links.insert(BOND, ServedLink { name: "tun0".into(), framing: Framing::Ip }));
    };
    assert_eq!(after(direct(8, &[]), &masquerade, tunnel), (false, true));
    assert_eq!(after(LinkPath::Programs, &masquerade, same), (false, true), "and go on to masquerade");
}

#[test]
fn rules_that_refuse_go_after_the_programs_are_replaced() {
    let mut snapshot = Snapshot::default();
    let bond = ServedLink { name: "bond0".into(), framing: Framing::Ethernet };
    snapshot.node.links.insert(BOND, bond);
    for refuse in [true, false] {
        snapshot.node.link_path = direct(u64::from(!refuse), &[]);
        snapshot.node.masquerade = Some(masquerade());
        let steps = plan(&State::default(), &snapshot, &Dirty::everything()).steps;
        let at = |is: fn(&Step) -> bool| steps.iter().position(is).expect("a step of a new process");
        let rules = at(|step| matches!(step, Step::InstallRules(_)));
        assert_eq!(rules < at(|step| matches!(step, Step::AttachLink(..))), refuse, "{steps:?}");
    }
}
