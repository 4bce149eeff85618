//! Which programs stay on links if others cannot be attached.

use super::*;
use crate::kernel::KernelError;

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
    snapshot.ports.insert(name.clone(), std::sync::Arc::new(testing::resolved_port()));
    let installs = |dirty: &Dirty| {
        let steps = plan(&state, &snapshot, dirty).steps;
        steps.iter().any(|step| matches!(step, Step::InstallRules { .. }))
    };
    assert!(!installs(&Dirty { ports: [name].into(), ..Dirty::default() }));
    assert!(installs(&Dirty { node: true, ..Dirty::default() }));
    assert!(installs(&Dirty::everything()));
}
