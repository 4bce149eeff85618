//! Registers each metric under its name.
//!
//! Upstream's names, help texts and kinds are those of `pkg/proxy/metrics/metrics.go` (1.36), where
//! `…_no_local_endpoints_total` is a gauge too. The encoder adds `_total` to counters.

use prometheus_client::registry::Registry;

use super::{Metrics, process::ProcessCollector};

/// Returns a registry of all metrics.
pub(super) fn registry(metrics: &Metrics) -> Registry {
    let mut registry = Registry::default();
    let upstream = registry.sub_registry_with_prefix("kubeproxy");
    upstream_durations(metrics, upstream);
    upstream_counts(metrics, upstream);
    shunt_metrics(metrics, registry.sub_registry_with_prefix("shunt"));
    registry.sub_registry_with_prefix("process").register_collector(Box::<ProcessCollector>::default());
    registry
}

/// Returns a registry of the probe results, under the names of
/// `component-base/metrics/prometheus/slis` (1.36).
pub(super) fn indicators(metrics: &Metrics) -> Registry {
    let mut registry = Registry::with_prefix("kubernetes");
    registry.register("healthcheck", "The result of a single healthcheck", metrics.healthcheck.clone());
    registry.register("healthchecks", "The results of all healthchecks", metrics.healthchecks.clone());
    registry
}

fn upstream_durations(metrics: &Metrics, to: &mut Registry) {
    to.register(
        "sync_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds",
        metrics.durations.sync.clone(),
    );
    to.register(
        "sync_full_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds for full resyncs",
        metrics.durations.sync_full.clone(),
    );
    to.register(
        "sync_partial_proxy_rules_duration_seconds",
        "SyncProxyRules latency in seconds for partial resyncs",
        metrics.durations.sync_partial.clone(),
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
        metrics.durations.programming.clone(),
    );
    to.register(
        "conntrack_reconciler_sync_duration_seconds",
        "ReconcileConntrackFlowsLatency latency in seconds",
        metrics.durations.conntrack.clone(),
    );
}

fn upstream_counts(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.mode_metrics.clone()));
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

fn shunt_metrics(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.kernel_counts.clone()));
    to.register("mode", "The current mode", metrics.mode.clone());
    to.register("mode_info", "The reason for the current mode", metrics.mode_info.clone());
    to.register(
        "modes_broken",
        "Modes that failed permanently and were replaced by another mode",
        metrics.modes_broken.clone(),
    );
    to.register("map_entries", "Entries in a map of the dataplane", metrics.map_entries.clone());
    to.register(
        "map_capacity",
        "Capacity of a map of the dataplane, in entries",
        metrics.map_capacity.clone(),
    );
    to.register(
        "links_left_out",
        "Links without link programs, because a foreign qdisc leaves no room for them",
        metrics.links_left_out.clone(),
    );
    to.register("sync_operations", "Changes to the kernel", metrics.operations.clone());
    to.register("sync_failures", "Syncs that failed and were retried", metrics.failures.clone());
    to.register(
        "sync_drift_operations",
        "Changes that repaired drift: what something other than shunt had changed in the kernel",
        metrics.drift.clone(),
    );
    to.register("watch_events", "Events received from the object source", metrics.watch_events.clone());
    to.register("watch_connected", "1 if the object source is connected", metrics.watch_connected.clone());
    to.register(
        "watch_synced",
        "1 after all kinds of objects were listed and programmed once",
        metrics.watch_synced.clone(),
    );
}
