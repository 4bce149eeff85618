//! Holds the metrics for Prometheus: upstream kube-proxy's metrics under upstream's names, and
//! shunt's own.
//!
//! One sync programs both IP families. Metrics that upstream keeps for each family therefore get
//! the same observation for each family, and those of successful syncs for each that succeeded.
#![forbid(unsafe_code)]

mod conntrack;
mod exposition;
mod histograms;
mod kernel_counts;
mod labels;
mod mode_metrics;
mod of_mode;
mod process;
mod registration;

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, RwLock, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

pub use self::{
    exposition::Exposition,
    labels::{Fallback, PolicySide, SyncExtent, WatchedKind},
};

use self::{
    histograms::Durations,
    kernel_counts::KernelCountsCollector,
    labels::{Labels, TextLabels, code, ip_family, policy_labels},
    mode_metrics::ModeMetricsCollector,
};
use crate::{
    dataplane::{LeftOutReason, conntrack::StaleUdpDeletion},
    model::IpFamily,
};

type Seconds = Gauge<f64, AtomicU64>;

/// All metrics of the process. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    durations: Durations,
    last_sync: Family<Labels<1>, Seconds>,
    last_queued: Family<Labels<1>, Seconds>,
    endpoint_changes: Counter,
    endpoint_changes_pending: Gauge,
    service_changes: Counter,
    service_changes_pending: Gauge,
    no_local_endpoints: Family<Labels<2>, Gauge>,
    healthz: Family<Labels<1>, Counter>,
    livez: Family<Labels<1>, Counter>,
    healthcheck: Family<Labels<2>, Gauge>,
    healthchecks: Family<Labels<3>, Counter>,
    mode: Family<Labels<1>, Gauge>,
    mode_info: Family<TextLabels, Gauge>,
    backstop_info: Family<Labels<2>, Gauge>,
    link_path_info: Family<TextLabels, Gauge>,
    exempt_namespaces: Gauge,
    modes_broken: Family<Labels<1>, Counter>,
    fell_back: Family<Labels<1>, Gauge>,
    running_mode: Arc<RwLock<&'static str>>,
    conntrack_deleted: Family<Labels<1>, Counter>,
    map_entries: Family<Labels<1>, Gauge>,
    map_capacity: Family<Labels<1>, Gauge>,
    maglev_service_ports: Family<Labels<1>, Gauge>,
    links_left_out: Gauge,
    links_displaced: Family<TextLabels, Gauge>,
    service_ports_left_out: Family<Labels<1>, Gauge>,
    kernel_counts: KernelCountsCollector,
    of_mode: ModeMetricsCollector,
    operations: Counter,
    failures: Family<Labels<1>, Counter>,
    drift: Counter,
    configuration_refused: Gauge,
    watch_events: Family<Labels<1>, Counter>,
    watch_synced: Gauge,
    manifest_errors: Gauge,
    watch_connected: Family<Labels<1>, Gauge>,
    features: Family<Labels<2>, Gauge>,
    build_info: Family<Labels<9>, Gauge>,
    own_build_info: Family<Labels<1>, Gauge>,
    api_requests: Family<TextLabels, Counter>,
}

impl Metrics {
    /// Creates metrics without values, whose histograms also have native buckets (KEP-5808).
    pub fn with_native_histograms() -> Self {
        Self { durations: Durations::new(true), ..Self::default() }
    }

    /// Returns all metrics for encoding.
    pub fn exposition(&self) -> Exposition {
        self.create_known_labels();
        Exposition(registration::registry(self))
    }

    /// Returns the service level indicators: the results of the health probes. Reading them is
    /// cheap enough for a scrape every second.
    pub fn indicators(&self) -> Exposition {
        Exposition(registration::indicators(self))
    }

    /// Sets the number of errors in the directory of manifests.
    pub fn set_manifest_errors(&self, errors: usize) {
        self.manifest_errors.set(gauge_value(errors));
    }

    /// Records a request to the API server: the HTTP method, the server with its port, the status
    /// of the response if there was one, and the time until its head.
    pub fn api_request_answered(&self, method: &str, host: &str, status: Option<u16>, took: Duration) {
        // client-go's text for a request without a response.
        let code = status.map_or_else(|| "<error>".into(), |status| status.to_string());
        let (method, host) = (method.to_owned(), host.to_owned());
        let labels = vec![("code", code), ("method", method.clone()), ("host", host.clone())];
        self.api_requests.get_or_create(&labels).inc();
        let labels = vec![("verb", method), ("host", host)];
        self.durations.api_requests.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Sets whether a feature gate is on. `stage` is its maturity, in capitals.
    pub fn set_feature(&self, name: &'static str, stage: &'static str, is_on: bool) {
        self.features.get_or_create(&[("name", name), ("stage", stage)]).set(is_on.into());
    }

    /// Sets whether the present content of the configuration file is refused.
    pub fn set_configuration_refused(&self, refused: bool) {
        self.configuration_refused.set(refused.into());
    }

    /// Counts an event of an object source, and the objects that it changed.
    pub fn event_received(&self, kind: WatchedKind, objects: usize) {
        self.watch_events.get_or_create(&[("kind", kind.name())]).inc();
        match kind {
            WatchedKind::Service => {
                self.service_changes.inc_by(objects as u64);
                self.service_changes_pending.inc_by(gauge_value(objects));
            }
            WatchedKind::EndpointSlice => {
                self.endpoint_changes.inc_by(objects as u64);
                self.endpoint_changes_pending.inc_by(gauge_value(objects));
            }
            WatchedKind::Node => {}
        }
    }

    /// Sets whether the source of this kind of object is connected.
    pub fn set_watch_connected(&self, kind: WatchedKind, connected: bool) {
        let gauge = self.watch_connected.get_or_create(&[("kind", kind.name())]);
        gauge.set(connected.into());
    }

    /// Records when a sync was requested, in seconds since 1970.
    pub fn sync_queued(&self, unix_seconds: f64) {
        set_for_families(&IpFamily::ALL, &self.last_queued, unix_seconds);
    }

    /// Records how long a sync took, whether it succeeded or not.
    pub fn sync_ended(&self, extent: SyncExtent, took: Duration) {
        let by_extent = match extent {
            SyncExtent::Full => &self.durations.sync_full,
            SyncExtent::Partial => &self.durations.sync_partial,
        };
        for family in IpFamily::ALL {
            for histograms in [&self.durations.sync, by_extent] {
                histograms.get_or_create(&[ip_family(family)]).observe(took.as_secs_f64());
            }
        }
    }

    /// Records a successful sync of these families.
    pub fn sync_succeeded(&self, families: &[IpFamily], operations: usize, unix_seconds: f64) {
        set_for_families(families, &self.last_sync, unix_seconds);
        self.operations.inc_by(operations as u64);
        if families == IpFamily::ALL {
            self.endpoint_changes_pending.set(0);
            self.service_changes_pending.set(0);
            self.watch_synced.set(1);
        }
    }

    /// Counts a failed sync of these families.
    pub fn sync_failed(&self, families: &[IpFamily]) {
        for family in families {
            self.failures.get_or_create(&[ip_family(*family)]).inc();
        }
    }

    /// Counts the changes that repaired drift.
    pub fn drift_repaired(&self, operations: usize) {
        self.drift.inc_by(operations as u64);
    }

    /// Records the time from a change of endpoints of this family until the kernel had it.
    pub fn endpoints_programmed(&self, family: IpFamily, after: Duration) {
        self.durations.programming.get_or_create(&[ip_family(family)]).observe(after.as_secs_f64());
    }

    /// Records a search of conntrack for stale flows.
    pub fn conntrack_cleaned(&self, deletion: StaleUdpDeletion) {
        let label = [ip_family(deletion.family)];
        self.durations.conntrack.get_or_create(&label).observe(deletion.took.as_secs_f64());
        self.conntrack_deleted.get_or_create(&label).inc_by(deletion.flows.deleted as u64);
    }

    /// Sets the number of service ports with traffic policy Local that have endpoints, but none on
    /// this node.
    pub fn set_no_local_endpoints(&self, side: PolicySide, family: IpFamily, ports: usize) {
        self.no_local_endpoints.get_or_create(&policy_labels(side, family)).set(gauge_value(ports));
    }

    /// Counts an answer of `/healthz`.
    pub fn healthz_answered(&self, healthy: bool) {
        self.healthz.get_or_create(&[code(healthy)]).inc();
        self.record_probe("sync", "healthz", healthy);
    }

    /// Counts an answer of `/livez`.
    pub fn livez_answered(&self, healthy: bool) {
        self.livez.get_or_create(&[code(healthy)]).inc();
        self.record_probe("sync", "livez", healthy);
    }

    /// Counts an answer of the metrics server's `/healthz`, which always succeeds.
    pub fn ping_answered(&self) {
        self.record_probe("ping", "healthz", true);
    }

    fn record_probe(&self, name: &'static str, probe: &'static str, healthy: bool) {
        let status = if healthy { "success" } else { "error" };
        let [name, probe] = [("name", name), ("type", probe)];
        self.healthcheck.get_or_create(&[name, probe]).set(healthy.into());
        self.healthchecks.get_or_create(&[name, probe, ("status", status)]).inc();
    }

    /// Series whose labels are known in advance start at zero, so that a query sees the first
    /// increase.
    fn create_known_labels(&self) {
        self.build_info.get_or_create(&process::BUILD_OF_KUBERNETES).set(1);
        self.own_build_info.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        for healthy in [true, false] {
            drop(self.healthz.get_or_create(&[code(healthy)]));
            drop(self.livez.get_or_create(&[code(healthy)]));
        }
        for kind in [WatchedKind::Service, WatchedKind::EndpointSlice, WatchedKind::Node] {
            drop(self.watch_events.get_or_create(&[("kind", kind.name())]));
            drop(self.watch_connected.get_or_create(&[("kind", kind.name())]));
        }
        for reason in LeftOutReason::ALL {
            drop(self.service_ports_left_out.get_or_create(&[("reason", reason.name())]));
        }
        for reason in Fallback::ALL {
            drop(self.fell_back.get_or_create(&[("reason", reason.name())]));
        }
        for family in IpFamily::ALL {
            let label = [ip_family(family)];
            let histograms = [
                &self.durations.sync,
                &self.durations.sync_full,
                &self.durations.sync_partial,
                &self.durations.programming,
                &self.durations.conntrack,
            ];
            for histogram in histograms {
                drop(histogram.get_or_create(&label));
            }
            drop(self.failures.get_or_create(&label));
            drop(self.conntrack_deleted.get_or_create(&label));
            for side in [PolicySide::Internal, PolicySide::External] {
                drop(self.no_local_endpoints.get_or_create(&policy_labels(side, family)));
            }
        }
    }
}

fn set_for_families(families: &[IpFamily], gauges: &Family<Labels<1>, Seconds>, seconds: f64) {
    for family in families {
        gauges.get_or_create(&[ip_family(*family)]).set(seconds);
    }
}

fn gauge_value(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
