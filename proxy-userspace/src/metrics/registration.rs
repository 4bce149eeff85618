//! Under which name each metric is exposed.
//!
//! Names, help and kinds are those of upstream's `pkg/proxy/metrics/metrics.go` (1.36), where
//! `…_no_local_endpoints_total` is a gauge too. The encoder adds `_total` to counters.

use prometheus_client::registry::Registry;

use super::{Metrics, process::OfProcess};

/// All metrics under their names.
pub(super) fn registry(metrics: &Metrics) -> Registry {
    let mut registry = Registry::default();
    let upstream = registry.sub_registry_with_prefix("kubeproxy");
    durations(metrics, upstream);
    counts(metrics, upstream);
    own(metrics, registry.sub_registry_with_prefix("shunt"));
    registry.sub_registry_with_prefix("process").register_collector(Box::<OfProcess>::default());
    registry
}

/// What probes were told, under the names of `component-base/metrics/prometheus/slis` (1.36).
pub(super) fn indicators(metrics: &Metrics) -> Registry {
    let mut registry = Registry::with_prefix("kubernetes");
    registry.register("healthcheck", "The result of a single healthcheck", metrics.healthcheck.clone());
    registry.register("healthchecks", "The results of all healthchecks", metrics.healthchecks.clone());
    registry
}

fn durations(metrics: &Metrics, to: &mut Registry) {
    to.register(
        "sync_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds",
        metrics.sync_duration.clone(),
    );
    to.register(
        "sync_full_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds for full resyncs",
        metrics.sync_full_duration.clone(),
    );
    to.register(
        "sync_partial_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds for partial resyncs",
        metrics.sync_partial_duration.clone(),
    );
    to.register(
        "sync_proxy_rules_last_timestamp_seconds",
        "The last time proxy rules were successfully synced",
        metrics.last_sync.clone(),
    );
    to.register(
        "sync_proxy_rules_last_queued_timestamp_seconds",
        "The last time a sync of proxy rules was queued",
        metrics.last_queued.clone(),
    );
    to.register(
        "network_programming_duration_seconds",
        "In Cluster Network Programming Latency in seconds",
        metrics.programming_duration.clone(),
    );
    to.register(
        "conntrack_reconciler_sync_duration_seconds",
        "ReconcileConntrackFlowsLatency latency in seconds",
        metrics.conntrack_duration.clone(),
    );
}

fn counts(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.of_mode.clone()));
    to.register(
        "sync_proxy_rules_endpoint_changes",
        "Cumulative proxy rules Endpoint changes",
        metrics.endpoint_changes.clone(),
    );
    to.register(
        "sync_proxy_rules_endpoint_changes_pending",
        "Pending proxy rules Endpoint changes",
        metrics.endpoint_changes_pending.clone(),
    );
    to.register(
        "sync_proxy_rules_service_changes",
        "Cumulative proxy rules Service changes",
        metrics.service_changes.clone(),
    );
    to.register(
        "sync_proxy_rules_service_changes_pending",
        "Pending proxy rules Service changes",
        metrics.service_changes_pending.clone(),
    );
    to.register(
        "sync_proxy_rules_no_local_endpoints_total",
        "Number of services with a Local traffic policy and no endpoints",
        metrics.no_local_endpoints.clone(),
    );
    to.register(
        "conntrack_reconciler_deleted_entries",
        "Cumulative conntrack flows deleted by conntrack reconciler",
        metrics.conntrack_deleted.clone(),
    );
    to.register("proxy_healthz", "Cumulative proxy healthz HTTP status", metrics.healthz.clone());
    to.register("proxy_livez", "Cumulative proxy livez HTTP status", metrics.livez.clone());
}

fn own(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.of_kernel.clone()));
    to.register("mode", "The mode that runs", metrics.mode.clone());
    to.register("mode_info", "Why this mode runs", metrics.mode_info.clone());
    to.register(
        "modes_broken",
        "Modes that broke for good, so that another took over",
        metrics.modes_broken.clone(),
    );
    to.register("map_entries", "Entries a map of the dataplane holds", metrics.map_entries.clone());
    to.register("map_capacity", "Entries a map of the dataplane can hold", metrics.map_capacity.clone());
    to.register(
        "links_left_out",
        "Links on which nothing is translated, since somebody else's qdisc leaves no room",
        metrics.links_left_out.clone(),
    );
    to.register("sync_operations", "Changes made to the kernel", metrics.operations.clone());
    to.register("sync_failures", "Syncs that failed and were tried again", metrics.failures.clone());
    to.register(
        "sync_drift_operations",
        "Changes that put right what something else had changed in the kernel",
        metrics.drift.clone(),
    );
    to.register("watch_events", "Events received from the source of objects", metrics.watch_events.clone());
    to.register(
        "watch_connected",
        "Whether changes come in from the source of objects",
        metrics.watch_connected.clone(),
    );
    to.register(
        "watch_synced",
        "Whether all kinds of objects were listed and programmed once",
        metrics.watch_synced.clone(),
    );
}
