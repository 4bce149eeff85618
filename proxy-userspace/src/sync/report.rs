//! Reports of a sync: metrics, health and the log.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::{Outputs, SyncLoop, inspection::EndedSync};
use crate::{
    dataplane::FailureScope,
    health::{HealthChecks, ListenOn, NodeObject},
    metrics::SyncExtent,
    model::{Dirty, DsrAnnouncement, IpFamily, NodeView, TriggerTime, UnixNanos},
};

/// Syncs that follow each other faster are logged at level debug.
const FREQUENT: Duration = Duration::from_secs(1);

impl SyncLoop {
    /// Records and reports a sync that succeeded.
    pub(super) fn succeeded(
        &mut self,
        started: Instant,
        extent: SyncExtent,
        dirty: &Dirty,
        operations: usize,
    ) {
        let now = Instant::now();
        let took = now - started;
        let is_repair = operations > 0 && self.is_repair(extent, dirty);
        let has_recovered = self.may_end_failure(extent) && self.end_failure();
        let is_first = !self.outputs.health.is_programmed();
        self.schedule.succeeded(started, extent, dirty.is_empty());
        self.report(operations);
        if has_recovered {
            tracing::info!("programming the kernel works again: all Services are served");
        }
        if is_repair && !is_first {
            self.outputs.metrics.drift_repaired(operations);
            tracing::warn!(
                operations,
                "somebody else changed what shunt wrote into the kernel; shunt has repaired it"
            );
        }
        if operations > 0 || is_first {
            self.log_sync(now, took, operations);
        }
    }

    /// Notes which service ports a sync programmed, and which ones wait because their family
    /// failed. If only a part of the node failed, the kernel has all service ports.
    pub(super) fn note_programmed(&mut self, extent: SyncExtent, dirty: &Dirty, scope: Option<FailureScope>) {
        let failed: &[IpFamily] = match &scope {
            Some(FailureScope::Everything) => &IpFamily::ALL,
            Some(FailureScope::Family(family)) => std::slice::from_ref(family),
            Some(FailureScope::Node | FailureScope::ServicePorts) | None => &[],
        };
        let ended = EndedSync { extent, dirty, failed };
        self.programmed.update(now(), ended, &self.model.snapshot().ports);
    }

    /// Reports a successful sync of all families that do not fail.
    pub(super) fn report(&mut self, operations: usize) {
        let families = served_families(self.failure.family);
        self.outputs.metrics.sync_succeeded(families, operations, unix_now().as_secs_f64());
        self.report_latency();
        self.report_served();
    }

    /// Reports how long ago the programmed changes of endpoints were made. As with upstream,
    /// changes of a family that fails do not count later.
    pub(super) fn report_latency(&mut self) {
        let (now, families) = (unix_now(), served_families(self.failure.family));
        for TriggerTime { family, at } in
            self.trigger_times.drain(..).filter(|t| families.contains(&t.family))
        {
            let latency = now.saturating_sub(Duration::from_nanos(at.0));
            self.outputs.metrics.endpoints_programmed(family, latency);
        }
    }

    /// Reports health to load balancers and the kubelet: of all Services, of all but some, or of
    /// one family.
    pub(super) fn report_served(&self) {
        let Outputs { metrics, health, health_checks, dsr_announcement, .. } = &self.outputs;
        let snapshot = self.model.snapshot();
        if let Some(node) = self.model.node() {
            self.outputs.status.set_node_families(node.families());
        }
        self.report_node();
        health.updated(served_families(self.failure.family));
        self.no_local_endpoints.report(metrics);
        let listen_on = IpFamily::ALL.map(|family| (family, listen_on(&snapshot.node, family))).into();
        let announcement = self.dsr_announcement();
        dsr_announcement.send_if_modified(|sent| {
            let differs = *sent != announcement;
            *sent = announcement;
            differs
        });
        let checks = self.model.health_checks();
        health_checks.send_if_modified(|sent| {
            let differs = sent.checks != *checks || sent.listen_on != listen_on;
            if differs {
                *sent = HealthChecks { checks: checks.clone(), listen_on };
            }
            differs
        });
    }

    /// Reports how full maps are, and the Maglev tables.
    pub(super) fn report_maps(&self) {
        let Outputs { metrics, status, .. } = &self.outputs;
        let map_fill = self.renderer.map_fill();
        for fill in &map_fill {
            metrics.set_map_fill(*fill);
        }
        status.set_map_fill(map_fill);
        metrics.set_maglev(self.renderer.maglev_count().unwrap_or_default());
    }

    /// Reports the Node object, which decides whether load balancers choose this node.
    pub(super) fn report_node(&self) {
        let being_deleted = self.model.snapshot().node.being_deleted;
        self.outputs.health.set_node(match (being_deleted, self.node_wait.is_unknown) {
            (true, _) => NodeObject::Deleting,
            (false, true) => NodeObject::Missing,
            (false, false) => NodeObject::Present,
        });
    }

    /// Returns what this node announces for the tunnel, if its Node object says something else.
    fn dsr_announcement(&self) -> Option<DsrAnnouncement> {
        let announced = &self.model.node()?.dsr;
        let tunnel = self.model.snapshot().node.tunnel.as_ref().filter(|tunnel| tunnel.is_up);
        let wanted = tunnel.map(|tunnel| tunnel.announcement.clone()).unwrap_or_default();
        (*announced != wanted).then_some(wanted)
    }

    /// Logs a sync with the number of changes it made to the kernel.
    pub(super) fn log_sync(&mut self, now: Instant, took: Duration, operations: usize) {
        let services = self.model.service_count();
        let endpoints = self.model.endpoint_count();
        if self.last_logged.replace(now).is_some_and(|last| now - last < FREQUENT) {
            tracing::debug!(services, endpoints, operations, ?took, "programmed");
        } else {
            tracing::info!(services, endpoints, operations, ?took, "programmed");
        }
    }
}

/// Returns where health check node ports of a family listen: where node ports are served.
fn listen_on(node: &NodeView, family: IpFamily) -> ListenOn {
    if node.every_node_port_address.contains(&family) {
        return ListenOn::EveryAddress;
    }
    let addresses = node.node_port_addresses_of_links();
    ListenOn::Addresses(addresses.filter(|address| IpFamily::of(*address) == family).collect())
}

/// Returns the families that are served: all but the one that fails.
const fn served_families(failing: Option<IpFamily>) -> &'static [IpFamily] {
    match failing {
        None => &IpFamily::ALL,
        Some(IpFamily::V4) => &[IpFamily::V6],
        Some(IpFamily::V6) => &[IpFamily::V4],
    }
}

/// Returns the time of the node as the model has it.
pub(super) fn now() -> UnixNanos {
    UnixNanos(u64::try_from(unix_now().as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the time since the Unix epoch.
pub(super) fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
