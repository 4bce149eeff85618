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

    /// See [`Dataplane::keep_nat`].
    fn keep_nat(&mut self) {}

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
    /// The number of changes that the last plan did not make.
    not_made: usize,
    /// Rules were missing, and stale UDP entries were not rechecked since.
    rechecks_udp: bool,
}

impl<D: Dataplane> DataplaneRenderer<D> {
    /// Returns a renderer without a state.
    pub fn new(dataplane: D) -> Self {
        Self { dataplane, state: None, sctp_ports: SctpPorts::default(), not_made: 0, rechecks_udp: false }
    }

    /// Applies a plan. If that failed in part, what was not made is in the next plan.
    fn apply(
        &mut self,
        state: &mut D::State,
        plan: D::Plan,
        (snapshot, dirty): (&Snapshot, &Dirty),
    ) -> Result<usize, RenderError> {
        let planned = plan.len();
        // A plan without changes is applied too: it can add to the state what the kernel does not
        // show.
        let Err(source) = self.dataplane.apply(state, plan) else {
            self.not_made = 0;
            return Ok(planned);
        };
        let scope = D::failure_scope(&source);
        let is_partly_made = scope == FailureScope::ServicePorts;
        self.not_made = if is_partly_made { D::plan(state, snapshot, dirty).len() } else { planned };
        let operations = planned.saturating_sub(self.not_made);
        Err(RenderError::Apply { scope, operations, source: source.into() })
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
        let Some(mut state) = self.state.take() else { return Ok(0) };
        let plan = D::plan(&state, snapshot, dirty);
        tracing::trace!(?plan, "applying the plan");
        // While rules were missing, packets could pass untranslated, also those of unchanged
        // Services. A plan that only repeats what failed does not count.
        self.rechecks_udp |= dirty.all && !plan.is_empty() && plan.len() != self.not_made;
        let applied = self.apply(&mut state, plan, (snapshot, dirty));
        self.state = Some(state);
        if applied.as_ref().map_or_else(|error| error.scope().is_limited(), |_| true)
            && std::mem::take(&mut self.rechecks_udp)
            && let Some(stale_udp) = self.dataplane.stale_udp()
        {
            stale_udp.recheck_all(snapshot);
        }
        applied
    }

    fn delete_stale_udp(
        &mut self,
        snapshot: &Snapshot,
        dirty: &Dirty,
    ) -> Result<Vec<StaleUdpDeletion>, RenderError> {
        let Some(stale_udp) = self.dataplane.stale_udp() else { return Ok(Vec::new()) };
        stale_udp.delete_stale(snapshot, dirty).map_err(RenderError::StaleUdp)
    }

    fn keep_nat(&mut self) {
        self.dataplane.keep_nat();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        dataplane::fake::FakeDataplane,
        model::{IpFamily, Protocol, testing},
    };

    /// Returns a Snapshot of the UDP service dns and these TCP services.
    fn snapshot(tcp: &[&str]) -> Snapshot {
        let mut world = testing::World::default();
        let mut dns = testing::service("default/dns", "10.96.0.10");
        dns.ports = vec![testing::service_port("", Protocol::Udp, 53)];
        let tcp = tcp.iter().zip(11..).map(|(name, number)| {
            let address = if *name == "v6" { "fd96::10".into() } else { format!("10.96.0.{number}") };
            testing::service(&format!("default/{name}"), &address)
        });
        for service in tcp.chain([dns]) {
            world.services.insert(service.name.clone(), service);
        }
        world.model(&testing::settings(), &testing::facts(&[])).snapshot().clone()
    }

    /// A renderer of the fake dataplane, after a first success.
    struct Scene {
        kernel: FakeDataplane,
        renderer: DataplaneRenderer<FakeDataplane>,
    }

    impl Scene {
        fn new(snapshot: &Snapshot) -> Self {
            let kernel = FakeDataplane::default();
            let mut scene = Self { renderer: DataplaneRenderer::new(kernel.clone()), kernel };
            assert!(scene.rechecks(snapshot), "a start checks all");
            scene
        }

        /// Renders everything. Returns true if all stale UDP entries were rechecked then.
        fn rechecks(&mut self, snapshot: &Snapshot) -> bool {
            let dirty = Dirty::everything();
            self.kernel.kernel().udp_deletions.clear();
            self.renderer.observe().expect("the fake kernel can be read");
            let rendered = self.renderer.render(snapshot, &dirty);
            if rendered.is_ok() || rendered.is_err_and(|error| error.scope().is_limited()) {
                self.renderer.delete_stale_udp(snapshot, &dirty).expect("conntrack works");
            }
            !self.kernel.kernel().udp_deletions.is_empty()
        }

        /// Makes the kernel lose the rules of a service.
        fn lose(&mut self, name: &str) {
            self.kernel.kernel().content.ports.retain(|key, _| *key.name.service.name != *name);
        }
    }

    #[test]
    fn udp_entries_are_rechecked_after_rules_were_missing() {
        let all = snapshot(&["web"]);
        let mut scene = Scene::new(&all);
        assert!(!scene.rechecks(&all), "no rules were missing");
        scene.lose("dns");
        assert!(scene.rechecks(&all));
        assert!(!scene.rechecks(&all));
    }

    #[test]
    fn udp_entries_are_rechecked_once_while_a_part_fails() {
        let (before, after) = (snapshot(&["web"]), snapshot(&["web", "v6"]));
        let mut scene = Scene::new(&before);
        scene.kernel.kernel().failing_family = Some(IpFamily::V6);
        scene.lose("dns");
        scene.lose("web");
        assert!(scene.rechecks(&after), "IPv4 is served again");
        for _ in 0..3 {
            scene.rechecks(&after);
        }
        assert!(!scene.rechecks(&after), "each plan only repeats what failed");
        scene.lose("dns");
        assert!(scene.rechecks(&after));
    }

    #[test]
    fn udp_entries_are_rechecked_by_the_first_sync_that_succeeds_in_part() {
        let all = snapshot(&["web"]);
        let mut scene = Scene::new(&all);
        scene.lose("dns");
        scene.kernel.kernel().failures_left = 1;
        assert!(!scene.rechecks(&all), "nothing is certain");
        assert!(scene.rechecks(&all));
    }
}
