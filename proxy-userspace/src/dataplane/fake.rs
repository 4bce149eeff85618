//! A dataplane whose kernel is a map in memory that tests can look into, break and drift.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    Dataplane, MapFill, PlanSize,
    conntrack::{StaleUdpCleaner, UdpTable},
};
use crate::{
    kernel::{
        KernelError,
        conntrack::{DeletionCounts, UdpFilter, UdpFlow},
    },
    model::{Dirty, IpFamily, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

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
    /// It is not read anew as long as it seems as it was.
    pub(crate) certain: bool,
    /// It has no room for what is to be put in.
    pub(crate) full: bool,
    /// It takes nothing of this family.
    pub(crate) failing_family: Option<IpFamily>,
    /// Links that it has no room on.
    pub(crate) left_out: Vec<Arc<str>>,
    /// Tracked UDP flows.
    pub(crate) flows: Vec<UdpFlow>,
    /// What the flows were looked through for.
    pub(crate) looks: Vec<UdpFilter>,
    /// Flows can neither be listed nor deleted.
    pub(crate) without_conntrack: bool,
}

/// The dataplane; clones work on the same kernel.
#[derive(Debug)]
pub(crate) struct Fake {
    kernel: Shared,
    stale_udp: StaleUdpCleaner,
}

/// Shares the kernel.
#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Kernel>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<Shared> for Fake {
    fn from(kernel: Shared) -> Self {
        Self { stale_udp: StaleUdpCleaner::with_table(kernel.clone(), &[]), kernel }
    }
}

impl Default for Fake {
    fn default() -> Self {
        Shared::default().into()
    }
}

impl Clone for Fake {
    fn clone(&self) -> Self {
        self.kernel.clone().into()
    }
}

impl UdpTable for Shared {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let mut kernel = self.lock();
        if kernel.without_conntrack {
            return Err(KernelError::NoConntrackNetlink { source: io::ErrorKind::InvalidInput.into() });
        }
        kernel.looks.push(filter);
        let before = kernel.flows.len();
        let mut seen = 0;
        kernel.flows.retain(|flow| {
            let passes = filter.matches(flow);
            seen += usize::from(passes);
            !passes || !is_stale(flow)
        });
        Ok(DeletionCounts { seen, deleted: before - kernel.flows.len() })
    }
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
    #[error("the fake kernel takes nothing of {0}")]
    OfFamily(IpFamily),
}

impl Fake {
    pub(crate) fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock()
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
        let mut left_out = 0;
        let mut failed = None;
        for change in plan {
            if kernel.failing > 0 {
                kernel.failing -= 1;
                kernel.calls.push(Call::FailedApply);
                return Err(FakeError::Told);
            }
            if let Change::Set(key, _) | Change::Remove(key) = &change
                && kernel.failing_family == Some(key.family)
            {
                failed = kernel.failing_family;
                left_out += 1;
            } else if kernel.full && matches!(change, Change::Set(..)) {
                left_out += 1;
            } else {
                kernel.programmed.make(change);
            }
        }
        if operations > left_out {
            kernel.calls.push(Call::Apply(operations - left_out));
            *state = kernel.programmed.clone();
        }
        if let Some(family) = failed {
            kernel.calls.push(Call::FailedApply);
            return Err(FakeError::OfFamily(family));
        }
        if left_out > 0 {
            kernel.calls.push(Call::FailedApply);
            return Err(FakeError::Full);
        }
        Ok(())
    }

    fn cleanup(&mut self) -> Vec<FakeError> {
        let mut kernel = self.kernel();
        kernel.calls.push(Call::Cleanup);
        kernel.programmed = Programmed::default();
        Vec::new()
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn is_certain(&mut self, _: &Programmed) -> bool {
        self.kernel().certain
    }

    fn is_partial(error: &FakeError) -> bool {
        matches!(error, FakeError::Full)
    }

    fn failed_family(error: &FakeError) -> Option<IpFamily> {
        if let FakeError::OfFamily(family) = error { Some(*family) } else { None }
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.kernel().left_out.clone()
    }

    fn map_fill(&self, state: &Programmed) -> Vec<MapFill> {
        vec![MapFill { map: "ports", entries: state.ports.len(), capacity: 64 }]
    }
}
