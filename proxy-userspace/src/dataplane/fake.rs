//! A dataplane whose kernel is a map in memory that tests can look into, break and drift.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Dataplane, MapFill, PlanSize};
use crate::model::{Dirty, NodeView, ResolvedPort, ServicePortKey, Snapshot};

/// What the fake kernel holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Programmed {
    pub(crate) ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    pub(crate) node: NodeView,
}

/// What was done to the fake kernel, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Observe,
    /// An apply of so many changes; one without any does not reach the kernel.
    Apply(usize),
    FailedApply,
    Cleanup,
}

/// The kernel, shared between the dataplane and the test.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) programmed: Programmed,
    pub(crate) calls: Vec<Call>,
    /// How many applies to come fail, each after its first change.
    pub(crate) failing: usize,
    /// It has no room for what is to be put in.
    pub(crate) full: bool,
}

/// The dataplane; clones work on the same kernel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fake {
    kernel: Arc<Mutex<Kernel>>,
}

#[derive(Debug)]
pub(crate) enum Change {
    Set(ServicePortKey, Arc<ResolvedPort>),
    Remove(ServicePortKey),
    SetNode(NodeView),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FakeError {
    #[error("the fake kernel was told to fail")]
    Told,
    #[error("the fake kernel is full")]
    Full,
}

impl Fake {
    pub(crate) fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Programmed {
    fn make(&mut self, change: Change) {
        match change {
            Change::Set(key, port) => drop(self.ports.insert(key, port)),
            Change::Remove(key) => drop(self.ports.remove(&key)),
            Change::SetNode(node) => self.node = node,
        }
    }

    fn change_for(&self, key: &ServicePortKey, snapshot: &Snapshot) -> Option<Change> {
        match (self.ports.get(key), snapshot.ports.get(key)) {
            (is, Some(wanted)) if is != Some(wanted) => Some(Change::Set(key.clone(), wanted.clone())),
            (Some(_), None) => Some(Change::Remove(key.clone())),
            _ => None,
        }
    }
}

impl PlanSize for Vec<Change> {
    fn len(&self) -> usize {
        self.len()
    }
}

impl Dataplane for Fake {
    type State = Programmed;
    type Plan = Vec<Change>;
    type Error = FakeError;

    fn observe(&mut self) -> Result<Programmed, FakeError> {
        let mut kernel = self.kernel();
        kernel.calls.push(Call::Observe);
        Ok(kernel.programmed.clone())
    }

    fn plan(state: &Programmed, snapshot: &Snapshot, dirty: &Dirty) -> Vec<Change> {
        let mut plan = Vec::new();
        if (dirty.all || dirty.node) && state.node != snapshot.node {
            plan.push(Change::SetNode(snapshot.node.clone()));
        }
        if dirty.all {
            let mut keys: Vec<_> = state.ports.keys().chain(snapshot.ports.keys()).collect();
            keys.sort_unstable();
            keys.dedup();
            plan.extend(keys.into_iter().filter_map(|key| state.change_for(key, snapshot)));
        } else {
            plan.extend(dirty.ports.iter().filter_map(|key| state.change_for(key, snapshot)));
        }
        plan
    }

    fn apply(&mut self, state: &mut Programmed, plan: Vec<Change>) -> Result<(), FakeError> {
        let mut kernel = self.kernel();
        let operations = plan.len();
        for change in plan {
            if kernel.failing > 0 {
                kernel.failing -= 1;
                kernel.calls.push(Call::FailedApply);
                return Err(FakeError::Told);
            }
            if kernel.full && matches!(change, Change::Set(..)) {
                kernel.calls.push(Call::FailedApply);
                return Err(FakeError::Full);
            }
            kernel.programmed.make(change);
        }
        if operations > 0 {
            kernel.calls.push(Call::Apply(operations));
        }
        *state = kernel.programmed.clone();
        Ok(())
    }

    fn cleanup(&mut self) -> Vec<FakeError> {
        let mut kernel = self.kernel();
        kernel.calls.push(Call::Cleanup);
        kernel.programmed = Programmed::default();
        Vec::new()
    }

    fn is_out_of_room(error: &FakeError) -> bool {
        matches!(error, FakeError::Full)
    }

    fn map_fill(&self, state: &Programmed) -> Vec<MapFill> {
        vec![MapFill { map: "ports", entries: state.ports.len(), capacity: 64 }]
    }
}
