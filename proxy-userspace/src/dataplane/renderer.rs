//! [`Renderer`]: any dataplane together with its state, behind one type for the sync loop.

use std::{error::Error, sync::Arc};

use super::{
    BackstopStatus, Dataplane, DisplacedLink, FailureScope, Held, HeldReader, KernelCounts, LeftOutPort,
    MaglevCount, MapFill, ModeMetricsReader, PlanSize, conntrack::StaleUdpDeletion, ebpf::TracingPrograms,
    sctp_ports::SctpPorts,
};
use crate::{
    kernel::KernelError,
    model::{Dirty, ServicePortKey, Snapshot},
};

/// An error of a dataplane, with the operation that failed.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The kernel could not be read.
    #[error("cannot read what the kernel holds")]
    Observe(#[source] Box<dyn Error + Send + Sync>),
    /// The kernel could not be changed. Some of the changes may have been made.
    #[error("cannot make all changes to the kernel")]
    Apply {
        /// What failed. Everything else was applied.
        scope: FailureScope,
        /// The number of changes that were made, if only service ports are left out.
        operations: usize,
        /// The mode's error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The rules are right, but UDP flows can continue to removed endpoints.
    #[error("cannot delete stale UDP entries of conntrack")]
    StaleUdp(#[source] KernelError),
    /// Something could not be removed.
    #[error("cannot clean up")]
    Cleanup(#[source] Box<dyn Error + Send + Sync>),
}

impl RenderError {
    /// Returns what failed.
    pub fn scope(&self) -> FailureScope {
        if let Self::Apply { scope, .. } = self { *scope } else { FailureScope::Everything }
    }
}

/// A dataplane with its state, for the sync loop.
pub trait Renderer: Send {
    /// Reads what the kernel holds, unless it certainly holds what the state says. Needed before
    /// the first [`Self::render`] and after one that failed.
    fn observe(&mut self) -> Result<(), RenderError>;

    /// Returns true if the kernel holds what was rendered, as far as [`Self::observe`] knows. Then
    /// only what is dirty, and the node, must be rendered.
    fn is_current(&self) -> bool {
        false
    }

    /// Makes the next [`Self::observe`] read the kernel in any case.
    fn invalidate(&mut self) {}

    /// See [`Dataplane::distrust`].
    fn distrust(&mut self) {}

    /// Makes the kernel serve what is dirty of the Snapshot. Returns the number of kernel changes.
    /// Observes first if there is no state.
    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError>;

    /// Deletes the UDP entries of conntrack that became stale by the last [`Self::render`]. Returns
    /// one value for each family whose entries were read. Called with the same arguments, after
    /// each [`Self::render`] that succeeded or failed only in part.
    fn delete_stale_udp(
        &mut self,
        _snapshot: &Snapshot,
        _dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        Ok(Vec::new())
    }

    /// Removes what no Service needs any more. Called after each sync that succeeded, once stale
    /// UDP entries are deleted. Continues after errors.
    fn remove_unneeded(&mut self) -> Vec<RenderError> {
        Vec::new()
    }

    /// Returns the backstop that is in place.
    fn backstop(&self) -> Option<BackstopStatus> {
        None
    }

    /// See [`Dataplane::cleanup`].
    fn cleanup(&mut self) -> Vec<RenderError>;

    /// See [`Dataplane::map_fill`]. Empty if there is no state.
    fn map_fill(&self) -> Vec<MapFill>;

    /// See [`Dataplane::maglev_count`].
    fn maglev_count(&self) -> Option<MaglevCount> {
        None
    }

    /// See [`Dataplane::held_reader`].
    fn held_reader(&self) -> Option<HeldReader> {
        None
    }

    /// See [`Dataplane::differences`]. `None` if it is not known what the kernel should hold.
    fn differences(
        &self,
        _held: &Held,
        _snapshot: &Snapshot,
        _of: Option<&ServicePortKey>,
    ) -> Option<Vec<String>> {
        None
    }

    /// See [`Dataplane::left_out_ports`]. Includes service ports that the mode never serves.
    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        Vec::new()
    }

    /// See [`Dataplane::left_out`].
    fn left_out(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// See [`Dataplane::displaced`].
    fn displaced(&self) -> Vec<DisplacedLink> {
        Vec::new()
    }

    /// See [`Dataplane::trace`]. Without a state, nothing changes.
    fn trace(&mut self, _programs: Option<TracingPrograms>) -> bool {
        false
    }

    /// See [`Dataplane::mode_metrics`].
    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        None
    }

    /// See [`Dataplane::kernel_counts`]. A second call returns `None`.
    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        None
    }
}

/// A [`Dataplane`] as a [`Renderer`].
#[derive(Debug)]
pub struct DataplaneRenderer<D: Dataplane> {
    dataplane: D,
    state: Option<D::State>,
    sctp_ports: SctpPorts,
}

impl<D: Dataplane> DataplaneRenderer<D> {
    /// Returns a renderer without a state.
    pub fn new(dataplane: D) -> Self {
        Self { dataplane, state: None, sctp_ports: SctpPorts::default() }
    }
}

impl<D> Renderer for DataplaneRenderer<D>
where
    D: Dataplane + Send,
    D::State: Send,
{
    fn observe(&mut self) -> Result<(), RenderError> {
        let failed = |error: D::Error| RenderError::Observe(error.into());
        if let Some(mut state) = self.state.take()
            && self.dataplane.refresh(&mut state).map_err(failed)?
        {
            self.state = Some(state);
            return Ok(());
        }
        self.state = Some(self.dataplane.observe().map_err(failed)?);
        Ok(())
    }

    fn is_current(&self) -> bool {
        self.state.as_ref().is_some_and(D::is_current)
    }

    fn invalidate(&mut self) {
        if !self.dataplane.compares_all() {
            self.state = None;
        }
    }

    fn distrust(&mut self) {
        self.dataplane.distrust();
    }

    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        self.sctp_ports.update(snapshot, dirty);
        if self.state.is_none() {
            self.observe()?;
        }
        let Some(state) = &mut self.state else { return Ok(0) };
        let plan = D::plan(state, snapshot, dirty);
        let operations = plan.len();
        tracing::trace!(?plan, "applying the plan");
        // A plan without changes is applied too: it can add to the state what the kernel does not
        // show.
        if let Err(source) = self.dataplane.apply(state, plan) {
            let scope = D::failure_scope(&source);
            let is_partly_made = scope == FailureScope::ServicePorts;
            // What was not made is in the next plan.
            let not_made = if is_partly_made { D::plan(state, snapshot, dirty).len() } else { operations };
            let operations = operations.saturating_sub(not_made);
            return Err(RenderError::Apply { scope, operations, source: source.into() });
        }
        // While rules were missing, packets could pass untranslated, also those of unchanged
        // Services.
        if dirty.all
            && operations > 0
            && let Some(stale_udp) = self.dataplane.stale_udp()
        {
            stale_udp.recheck_all(snapshot);
        }
        Ok(operations)
    }

    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let Some(stale_udp) = self.dataplane.stale_udp() else { return Ok(Vec::new()) };
        stale_udp.delete_stale(snapshot, dirty).map_err(RenderError::StaleUdp)
    }

    fn cleanup(&mut self) -> Vec<RenderError> {
        self.state = None;
        let errors = self.dataplane.cleanup().into_iter();
        errors.map(|error| RenderError::Cleanup(error.into())).collect()
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.state.as_ref().map_or_else(Vec::new, |state| self.dataplane.map_fill(state))
    }

    fn maglev_count(&self) -> Option<MaglevCount> {
        self.dataplane.maglev_count()
    }

    fn held_reader(&self) -> Option<HeldReader> {
        self.dataplane.held_reader().filter(|_| self.state.is_some())
    }

    fn differences(
        &self,
        held: &Held,
        snapshot: &Snapshot,
        of: Option<&ServicePortKey>,
    ) -> Option<Vec<String>> {
        Some(D::differences(self.state.as_ref()?, held, snapshot, of))
    }

    fn left_out_ports(&self) -> Vec<LeftOutPort> {
        let mut ports = self.dataplane.left_out_ports();
        let needs_sctp = !self.sctp_ports.is_empty();
        if let Some(why) = needs_sctp.then(|| self.dataplane.lacks_sctp()).flatten() {
            ports.extend(self.sctp_ports.left_out(why));
        }
        ports
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.dataplane.left_out()
    }

    fn displaced(&self) -> Vec<DisplacedLink> {
        self.dataplane.displaced()
    }

    fn trace(&mut self, programs: Option<TracingPrograms>) -> bool {
        self.state.as_mut().is_some_and(|state| self.dataplane.trace(state, programs))
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.dataplane.kernel_counts()
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        self.dataplane.mode_metrics()
    }
}
