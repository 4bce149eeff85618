//! What Prometheus reads: upstream kube-proxy's metrics under upstream's names, and our own beside them.
//!
//! One sync programs both IP families, so metrics that upstream keeps by family get the same observation under each, but for one
//! that failed.
#![forbid(unsafe_code)]

mod exposition;
mod kernel_counts;
mod process;
mod readings;
mod registration;

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, PoisonError, RwLock, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};

pub use exposition::Exposition;

use self::{kernel_counts::OfKernel, readings::OfMode};
use crate::{
    dataplane::{KernelCounts, MapFill, Readings, conntrack::StaleUdpDeletion},
    model::IpFamily,
};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Seconds = Gauge<f64, AtomicU64>;
type Histograms = Family<Labels<1>, Histogram, fn() -> Histogram>;

/// Which side of a Service a traffic policy is for; the label `traffic_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicySide {
    /// internalTrafficPolicy.
    Internal,
    /// externalTrafficPolicy.
    External,
}

/// How much of the kernel a sync looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncExtent {
    /// Everything, from a fresh observation.
    Full,
    /// What was dirty.
    Partial,
}

/// The kinds of objects that are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchedKind {
    /// Services.
    Service,
    /// EndpointSlices.
    EndpointSlice,
    /// Nodes.
    Node,
}

impl WatchedKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
        }
    }
}

/// Every metric of the process. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    sync_duration: Histograms,
    sync_full_duration: Histograms,
    sync_partial_duration: Histograms,
    last_sync: Family<Labels<1>, Seconds>,
    last_queued: Family<Labels<1>, Seconds>,
    programming_duration: Histograms,
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
    mode_info: Family<Vec<(&'static str, String)>, Gauge>,
    modes_broken: Family<Labels<1>, Counter>,
    running_mode: Arc<RwLock<&'static str>>,
    conntrack_duration: Histograms,
    conntrack_deleted: Family<Labels<1>, Counter>,
    map_entries: Family<Labels<1>, Gauge>,
    map_capacity: Family<Labels<1>, Gauge>,
    links_left_out: Gauge,
    of_kernel: OfKernel,
    of_mode: OfMode,
    operations: Counter,
    failures: Family<Labels<1>, Counter>,
    drift: Counter,
    watch_events: Family<Labels<1>, Counter>,
    watch_synced: Gauge,
    watch_connected: Family<Labels<1>, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            sync_duration: histograms(sync_buckets),
            sync_full_duration: histograms(sync_buckets),
            sync_partial_duration: histograms(sync_buckets),
            last_sync: Family::default(),
            last_queued: Family::default(),
            programming_duration: histograms(programming_buckets),
            endpoint_changes: Counter::default(),
            endpoint_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            no_local_endpoints: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
            healthcheck: Family::default(),
            healthchecks: Family::default(),
            mode: Family::default(),
            mode_info: Family::default(),
            modes_broken: Family::default(),
            running_mode: Arc::default(),
            conntrack_duration: histograms(sync_buckets),
            conntrack_deleted: Family::default(),
            map_entries: Family::default(),
            map_capacity: Family::default(),
            links_left_out: Gauge::default(),
            of_kernel: OfKernel::default(),
            of_mode: OfMode::default(),
            operations: Counter::default(),
            failures: Family::default(),
            drift: Counter::default(),
            watch_events: Family::default(),
            watch_synced: Gauge::default(),
            watch_connected: Family::default(),
        };
        metrics.create_known_labels();
        metrics
    }
}

impl Metrics {
    /// All metrics, ready to be written out.
    pub fn exposition(&self) -> Exposition {
        Exposition::new(registration::registry(self))
    }

    /// What probes were told: service level indicators, which cost so little that they may be read every second.
    pub fn indicators(&self) -> Exposition {
        Exposition::new(registration::indicators(self))
    }

    /// Where to read what the kernel counts in the mode that runs now.
    pub fn set_kernel_counts(&self, counts: Option<Box<dyn KernelCounts>>) {
        self.of_kernel.set(counts);
    }

    /// Where to read the metrics of the mode that runs now.
    pub fn set_readings(&self, readings: Option<Readings>) {
        self.of_mode.set(readings);
    }

    /// How full one of the dataplane's maps is.
    pub fn set_map_fill(&self, fill: MapFill) {
        self.map_entries.get_or_create(&[("map", fill.map)]).set(gauge_value(fill.entries));
        self.map_capacity.get_or_create(&[("map", fill.map)]).set(fill.capacity.into());
    }

    /// On so many links nothing is translated, although it should be.
    pub fn set_links_left_out(&self, links: usize) {
        self.links_left_out.set(gauge_value(links));
    }

    /// The mode that runs, and why it is this one.
    pub fn set_mode(&self, mode: &'static str, why: &str) {
        self.mode.clear();
        self.mode.get_or_create(&[("mode", mode)]).set(1);
        self.mode_info.clear();
        self.mode_info.get_or_create(&vec![("mode", mode.into()), ("why", why.into())]).set(1);
        *self.running_mode.write().unwrap_or_else(PoisonError::into_inner) = mode;
        // Maps are a mode's own.
        self.map_entries.clear();
        self.map_capacity.clear();
    }

    /// The mode that runs; empty before one does.
    pub fn mode(&self) -> &'static str {
        *self.running_mode.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mode broke for good, and another one takes over.
    pub fn mode_broke(&self, mode: &'static str) {
        self.modes_broken.get_or_create(&[("mode", mode)]).inc();
    }

    /// An event of a source came in.
    pub fn event_received(&self, kind: WatchedKind) {
        self.watch_events.get_or_create(&[("kind", kind.name())]).inc();
        match kind {
            WatchedKind::Service => {
                self.service_changes.inc();
                self.service_changes_pending.inc();
            }
            WatchedKind::EndpointSlice => {
                self.endpoint_changes.inc();
                self.endpoint_changes_pending.inc();
            }
            WatchedKind::Node => {}
        }
    }

    /// Whether changes of a kind come in from its source.
    pub fn set_watch_connected(&self, kind: WatchedKind, connected: bool) {
        let gauge = self.watch_connected.get_or_create(&[("kind", kind.name())]);
        gauge.set(connected.into());
    }

    /// A sync was asked for at this time, in seconds since 1970.
    pub fn sync_queued(&self, unix_seconds: f64) {
        set_for_families(&IpFamily::ALL, &self.last_queued, unix_seconds);
    }

    /// A sync of these families succeeded.
    pub fn sync_succeeded(
        &self,
        families: &[IpFamily],
        extent: SyncExtent,
        took: Duration,
        operations: usize,
        unix_seconds: f64,
    ) {
        let by_extent = match extent {
            SyncExtent::Full => &self.sync_full_duration,
            SyncExtent::Partial => &self.sync_partial_duration,
        };
        for histograms in [&self.sync_duration, by_extent] {
            observe_for_families(families, histograms, took.as_secs_f64());
        }
        set_for_families(families, &self.last_sync, unix_seconds);
        self.operations.inc_by(operations as u64);
        if families == IpFamily::ALL {
            self.endpoint_changes_pending.set(0);
            self.service_changes_pending.set(0);
            self.watch_synced.set(1);
        }
    }

    /// A sync of these families failed.
    pub fn sync_failed(&self, families: &[IpFamily]) {
        for family in families {
            self.failures.get_or_create(&[ip_family(*family)]).inc();
        }
    }

    /// The kernel held something else than it should, and so many changes put it right.
    pub fn drift_repaired(&self, operations: usize) {
        self.drift.inc_by(operations as u64);
    }

    /// A change of endpoints of these families reached the kernel so long after it happened.
    pub fn endpoints_programmed(&self, families: &[IpFamily], after: Duration) {
        observe_for_families(families, &self.programming_duration, after.as_secs_f64());
    }

    /// Conntrack was looked through for stale flows.
    pub fn flows_forgotten(&self, forgotten: StaleUdpDeletion) {
        let label = [ip_family(forgotten.family)];
        self.conntrack_duration.get_or_create(&label).observe(forgotten.took.as_secs_f64());
        self.conntrack_deleted.get_or_create(&label).inc_by(forgotten.flows.deleted as u64);
    }

    /// Service ports whose policy is Local, that have endpoints, but none here.
    pub fn set_no_local_endpoints(&self, side: PolicySide, family: IpFamily, ports: usize) {
        let side = match side {
            PolicySide::Internal => "internal",
            PolicySide::External => "external",
        };
        self.no_local_endpoints
            .get_or_create(&[("traffic_policy", side), ("ip_family", family.name())])
            .set(gauge_value(ports));
    }

    /// `/healthz` answered.
    pub fn healthz_answered(&self, healthy: bool) {
        self.healthz.get_or_create(&[code(healthy)]).inc();
        self.checked("sync", "healthz", healthy);
    }

    /// `/livez` answered.
    pub fn livez_answered(&self, healthy: bool) {
        self.livez.get_or_create(&[code(healthy)]).inc();
        self.checked("sync", "livez", healthy);
    }

    /// `/healthz` of the metrics server answered, which it always does.
    pub fn ping_answered(&self) {
        self.checked("ping", "healthz", true);
    }

    fn checked(&self, name: &'static str, probe: &'static str, healthy: bool) {
        let status = if healthy { "success" } else { "error" };
        let [name, probe] = [("name", name), ("type", probe)];
        self.healthcheck.get_or_create(&[name, probe]).set(healthy.into());
        self.healthchecks.get_or_create(&[name, probe, ("status", status)]).inc();
    }

    /// Series that are known beforehand start at zero, so that a first increase is seen as one.
    fn create_known_labels(&self) {
        for healthy in [true, false] {
            drop(self.healthz.get_or_create(&[code(healthy)]));
            drop(self.livez.get_or_create(&[code(healthy)]));
        }
        for kind in [WatchedKind::Service, WatchedKind::EndpointSlice, WatchedKind::Node] {
            drop(self.watch_events.get_or_create(&[("kind", kind.name())]));
            self.set_watch_connected(kind, false);
        }
        for family in IpFamily::ALL {
            let label = [ip_family(family)];
            let histograms = [
                &self.sync_duration,
                &self.sync_full_duration,
                &self.sync_partial_duration,
                &self.programming_duration,
                &self.conntrack_duration,
            ];
            for histogram in histograms {
                drop(histogram.get_or_create(&label));
            }
            drop(self.failures.get_or_create(&label));
            drop(self.conntrack_deleted.get_or_create(&label));
            self.set_no_local_endpoints(PolicySide::Internal, family, 0);
            self.set_no_local_endpoints(PolicySide::External, family, 0);
        }
    }
}

const fn ip_family(family: IpFamily) -> (&'static str, &'static str) {
    ("ip_family", family.name())
}

const fn code(healthy: bool) -> (&'static str, &'static str) {
    ("code", if healthy { "200" } else { "503" })
}

fn observe_for_families(families: &[IpFamily], histograms: &Histograms, seconds: f64) {
    for family in families {
        histograms.get_or_create(&[ip_family(*family)]).observe(seconds);
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

fn histograms(constructor: fn() -> Histogram) -> Histograms {
    Family::new_with_constructor(constructor)
}

/// From a millisecond to 16 seconds.
fn sync_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// Quarter seconds to 0.5, seconds to 59, five seconds to 115, half minutes to 5 minutes.
fn programming_buckets() -> Histogram {
    let steps = |first: u16, step: u16, count: u16| (0..count).map(move |n| f64::from(first + n * step));
    Histogram::new(
        [0.25, 0.5].into_iter().chain(steps(1, 1, 59)).chain(steps(60, 5, 12)).chain(steps(120, 30, 7)),
    )
}
