//! A dataplane for tests. Its kernel is a map in memory that a test can read, change and break.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    Dataplane, FailureScope, LeftOutPort, LeftOutReason, MapFill, PlanSize,
    conntrack::{StaleUdpCleaner, UdpTable},
    ebpf::TracingPrograms,
};
use crate::{
    kernel::{
        KernelError,
        conntrack::{DeletionCounts, UdpFilter, UdpFlow},
    },
    model::{Dirty, IpFamily, NodeView, ResolvedPort, ServicePortKey, Snapshot},
};

/// The content of the fake kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelContent {
    pub(crate) ports: BTreeMap<ServicePortKey, Arc<ResolvedPort>>,
    pub(crate) node: NodeView,
}

/// A call of the fake kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Observe,
    /// An `apply` with this number of changes. An `apply` without changes does not reach the
    /// kernel.
    Apply(usize),
    FailedApply,
    Cleanup,
}

/// The fake kernel, which the dataplane and the test share.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an independent fault")]
pub(crate) struct FakeKernel {
    pub(crate) content: KernelContent,
    pub(crate) calls: Vec<Call>,
    /// The number of next applies that fail.
    pub(crate) failures_left: usize,
    /// [`Dataplane::is_certain`] returns this. [`Dataplane::distrust`] ends it.
    pub(crate) is_certain: bool,
    /// The kernel rejects new and changed service ports.
    pub(crate) is_full: bool,
    /// [`Dataplane::lacks_sctp`] returns a reason.
    pub(crate) lacks_sctp: bool,
    /// The kernel rejects a link with each `apply`.
    pub(crate) rejects_link: bool,
    /// [`Dataplane::trace`] exchanges programs.
    pub(crate) can_trace: bool,
    /// The kernel rejects all changes of this family.
    pub(crate) failing_family: Option<IpFamily>,
    /// [`Dataplane::left_out`] returns these.
    pub(crate) left_out: Vec<Arc<str>>,
    /// The UDP flows in conntrack.
    pub(crate) flows: Vec<UdpFlow>,
    /// The filters of all deletions of UDP flows.
    pub(crate) udp_deletions: Vec<UdpFilter>,
    /// The kernel has no conntrack netlink.
    pub(crate) lacks_conntrack: bool,
}

/// The dataplane. Clones share the kernel.
#[derive(Debug)]
pub(crate) struct FakeDataplane {
    kernel: SharedKernel,
    stale_udp: StaleUdpCleaner,
    left_out_ports: Vec<LeftOutPort>,
}

/// A shared fake kernel.
#[derive(Clone, Debug, Default)]
struct SharedKernel(Arc<Mutex<FakeKernel>>);

impl SharedKernel {
    fn lock(&self) -> MutexGuard<'_, FakeKernel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<SharedKernel> for FakeDataplane {
    fn from(kernel: SharedKernel) -> Self {
        let stale_udp = StaleUdpCleaner::with_table(kernel.clone(), &[]);
        Self { stale_udp, kernel, left_out_ports: Vec::new() }
    }
}

impl Default for FakeDataplane {
    fn default() -> Self {
        SharedKernel::default().into()
    }
}

impl Clone for FakeDataplane {
    fn clone(&self) -> Self {
        self.kernel.clone().into()
    }
}

impl UdpTable for SharedKernel {
    fn delete(
        &mut self,
        filter: UdpFilter,
        is_stale: &mut dyn FnMut(&UdpFlow) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        let mut kernel = self.lock();
        if kernel.lacks_conntrack {
            return Err(KernelError::NoConntrackNetlink(io::ErrorKind::InvalidInput.into()));
        }
        kernel.udp_deletions.push(filter);
        let before = kernel.flows.len();
        let mut seen = 0;
        kernel.flows.retain(|flow| {
            let passes = filter.matches(flow);
            seen += usize::from(passes);
            !passes || !is_stale(flow)
        });
        Ok(DeletionCounts { seen, deleted: before - kernel.flows.len() })
    }

    /// The tests with this kernel have no TCP entries.
    fn delete_tcp_attempts(
        &mut self,
        _: IpFamily,
        _: &mut dyn FnMut(std::net::SocketAddr) -> bool,
    ) -> Result<DeletionCounts, KernelError> {
        Ok(DeletionCounts::default())
    }
}

#[derive(Debug)]
pub(crate) enum Change {
    Set(ServicePortKey, Arc<ResolvedPort>),
    Remove(ServicePortKey),
    SetNode(Box<NodeView>),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FakeError {
    #[error("the test lets the fake kernel fail")]
    Injected,
    #[error("the fake kernel is full")]
    Full,
    #[error("the fake kernel rejects a link")]
    OfNode,
    #[error("the fake kernel rejects {0}")]
    OfFamily(IpFamily),
}

impl FakeDataplane {
    pub(crate) fn kernel(&self) -> MutexGuard<'_, FakeKernel> {
        self.kernel.lock()
    }
}

impl KernelContent {
    fn make(&mut self, change: Change) {
        match change {
            Change::Set(key, port) => drop(self.ports.insert(key, port)),
            Change::Remove(key) => drop(self.ports.remove(&key)),
            Change::SetNode(node) => self.node = *node,
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

impl Dataplane for FakeDataplane {
    type State = KernelContent;
    type Plan = Vec<Change>;
    type Error = FakeError;

    fn observe(&mut self) -> Result<KernelContent, FakeError> {
        let mut kernel = self.kernel();
        kernel.calls.push(Call::Observe);
        Ok(kernel.content.clone())
    }

    fn plan(state: &KernelContent, snapshot: &Snapshot, dirty: &Dirty) -> Vec<Change> {
        let mut plan = Vec::new();
        if (dirty.all || dirty.node) && state.node != snapshot.node {
            plan.push(Change::SetNode(Box::new(snapshot.node.clone())));
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

    fn apply(&mut self, state: &mut KernelContent, plan: Vec<Change>) -> Result<(), FakeError> {
        let mut kernel = self.kernel();
        let operations = plan.len();
        let mut left_out = 0;
        let mut failed = None;
        let mut ports = Vec::new();
        for change in plan {
            if kernel.failures_left > 0 {
                kernel.failures_left -= 1;
                kernel.calls.push(Call::FailedApply);
                return Err(FakeError::Injected);
            }
            if let Change::Set(key, _) | Change::Remove(key) = &change
                && kernel.failing_family == Some(key.family)
            {
                failed = kernel.failing_family;
                left_out += 1;
            } else if kernel.is_full
                && let Change::Set(port, _) = &change
            {
                left_out += 1;
                let (port, message) = (port.clone(), "the fake kernel is full".into());
                ports.push(LeftOutPort { port, reason: LeftOutReason::MapFull, message });
            } else {
                kernel.content.make(change);
            }
        }
        if operations > left_out {
            kernel.calls.push(Call::Apply(operations - left_out));
            *state = kernel.content.clone();
        }
        if let Some(family) = failed {
            kernel.calls.push(Call::FailedApply);
            return Err(FakeError::OfFamily(family));
        }
        let rejects_link = kernel.rejects_link;
        if left_out > 0 || rejects_link {
            kernel.calls.push(Call::FailedApply);
        }
        drop(kernel);
        self.left_out_ports = ports;
        match (rejects_link, left_out) {
            (true, _) => Err(FakeError::OfNode),
            (false, 0) => Ok(()),
            (false, _) => Err(FakeError::Full),
        }
    }

    fn cleanup(&mut self) -> Vec<FakeError> {
        let mut kernel = self.kernel();
        kernel.calls.push(Call::Cleanup);
        kernel.content = KernelContent::default();
        Vec::new()
    }

    fn stale_udp(&mut self) -> Option<&mut StaleUdpCleaner> {
        Some(&mut self.stale_udp)
    }

    fn is_certain(&mut self, _: &KernelContent) -> bool {
        self.kernel().is_certain
    }

    fn distrust(&mut self) {
        self.kernel().is_certain = false;
    }

    fn trace(&mut self, _: &mut KernelContent, _: Option<TracingPrograms>) -> bool {
        self.kernel().can_trace
    }

    fn failure_scope(error: &FakeError) -> FailureScope {
        match error {
            FakeError::Injected => FailureScope::Everything,
            FakeError::Full => FailureScope::ServicePorts,
            FakeError::OfNode => FailureScope::Node,
            FakeError::OfFamily(family) => FailureScope::Family(*family),
        }
    }

    fn lacks_sctp(&self) -> Option<&'static str> {
        self.kernel().lacks_sctp.then_some("the fake kernel has no SCTP")
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        self.left_out_ports.clone()
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.kernel().left_out.clone()
    }

    fn map_fill(&self, state: &KernelContent) -> Vec<MapFill> {
        vec![MapFill { map: "ports", entries: state.ports.len(), capacity: 64 }]
    }
}
