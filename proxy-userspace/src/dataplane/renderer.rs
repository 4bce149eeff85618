//! [`Renderer`]: any dataplane together with its state, behind one type that the sync loop can hold.

use std::{error::Error, sync::Arc};

use super::{Dataplane, KernelCounts, MapFill, ModeMetricsReader, PlanSize, conntrack::StaleUdpDeletion};
use crate::{
    kernel::KernelError,
    model::{Dirty, IpFamily, Snapshot},
};

/// What went wrong in the dataplane, with what it was doing.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The kernel could not be read.
    #[error("cannot read what the kernel holds")]
    Observe {
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The kernel could not be changed; some of the changes may have been made.
    #[error("cannot make all changes to the kernel")]
    Apply {
        /// Some service ports or links are not as they should be; all else is.
        partial: bool,
        /// Nothing of this family is known to be as it should be; all of the other is.
        family: Option<IpFamily>,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The rules are right, but UDP flows may go on to endpoints that left.
    #[error("cannot delete stale UDP entries of conntrack")]
    StaleUdp {
        /// Why.
        source: KernelError,
    },
    /// Something could not be removed.
    #[error("cannot clean up")]
    Cleanup {
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl RenderError {
    /// Some service ports or links are not as they should be; all else is.
    pub fn is_partial(&self) -> bool {
        matches!(self, Self::Apply { partial: true, .. })
    }

    /// Whether something is served as it should be all the same: what did not fail goes on.
    pub fn leaves_others(&self) -> bool {
        self.is_partial() || self.family().is_some()
    }

    /// The family that failed, where the other did not.
    pub fn family(&self) -> Option<IpFamily> {
        if let Self::Apply { family, .. } = self { *family } else { None }
    }
}

/// A dataplane that remembers what it last saw in the kernel.
pub trait Renderer: Send {
    /// Reads what the kernel holds, unless that is certain. Needed before the first [`Self::render`] and after one that failed.
    fn observe(&mut self) -> Result<(), RenderError>;

    /// The next [`Self::observe`] reads all that the kernel holds, however certain it seems.
    fn distrust(&mut self) {}

    /// Makes the kernel serve what is dirty of the Snapshot and returns how many changes that took. Without an
    /// observation to go by it observes first.
    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError>;

    /// Makes conntrack forget UDP flows that became stale by what was rendered, a value for each family that was looked at. To
    /// be called after each [`Self::render`] that succeeded, or failed in part only, with the same arguments.
    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let _ = (snapshot, dirty);
        Ok(Vec::new())
    }

    /// Removes all that this mode ever put into the kernel; goes on past errors and returns them all.
    fn cleanup(&mut self) -> Vec<RenderError>;

    /// How full the kernel's tables are, as far as was seen.
    fn map_fill(&self) -> Vec<MapFill>;

    /// The links that are served without what comes in on them, since somebody else's setting leaves no other way.
    fn left_out(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// What the mode has for metrics besides what all have. There is one reader, too.
    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        None
    }

    /// What the kernel counts. There is one reader: who asks again gets none.
    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        None
    }
}

/// A [`Dataplane`] as a [`Renderer`].
#[derive(Debug)]
pub struct DataplaneRenderer<D: Dataplane> {
    dataplane: D,
    state: Option<D::State>,
}

impl<D: Dataplane> DataplaneRenderer<D> {
    /// A dataplane that has not looked at the kernel yet.
    pub fn new(dataplane: D) -> Self {
        Self { dataplane, state: None }
    }
}

impl<D> Renderer for DataplaneRenderer<D>
where
    D: Dataplane + Send,
    D::State: Send,
{
    fn observe(&mut self) -> Result<(), RenderError> {
        if self.state.as_ref().is_some_and(|state| self.dataplane.is_certain(state)) {
            return Ok(());
        }
        self.state = None;
        let observed = self.dataplane.observe();
        self.state = Some(observed.map_err(|source| RenderError::Observe { source: source.into() })?);
        Ok(())
    }

    fn distrust(&mut self) {
        self.state = None;
    }

    fn render(&mut self, snapshot: &Snapshot, dirty: &Dirty) -> Result<usize, RenderError> {
        if self.state.is_none() {
            self.observe()?;
        }
        let Some(state) = &mut self.state else {
            return Ok(0);
        };
        let plan = D::plan(state, snapshot, dirty);
        let operations = plan.len();
        tracing::trace!(?plan, "applying");
        // Also a plan without changes: it may tell the state what it could not read from the kernel.
        self.dataplane.apply(state, plan).map_err(|source| RenderError::Apply {
            partial: D::is_partial(&source),
            family: D::failed_family(&source),
            source: source.into(),
        })?;
        // What had to be repaired let packets pass as they were, of Services that did not change too.
        if dirty.all
            && operations > 0
            && let Some(stale_udp) = self.dataplane.stale_udp()
        {
            stale_udp.recheck_all();
        }
        Ok(operations)
    }

    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let Some(stale_udp) = self.dataplane.stale_udp() else {
            return Ok(Vec::new());
        };
        stale_udp.delete_stale(snapshot, dirty).map_err(|source| RenderError::StaleUdp { source })
    }

    fn cleanup(&mut self) -> Vec<RenderError> {
        self.state = None;
        self.dataplane
            .cleanup()
            .into_iter()
            .map(|source| RenderError::Cleanup { source: source.into() })
            .collect()
    }

    fn map_fill(&self) -> Vec<MapFill> {
        self.state.as_ref().map_or_else(Vec::new, |state| self.dataplane.map_fill(state))
    }

    fn left_out(&self) -> Vec<Arc<str>> {
        self.dataplane.left_out()
    }

    fn kernel_counts(&mut self) -> Option<Box<dyn KernelCounts>> {
        self.dataplane.kernel_counts()
    }

    fn mode_metrics(&mut self) -> Option<ModeMetricsReader> {
        self.dataplane.mode_metrics()
    }
}
