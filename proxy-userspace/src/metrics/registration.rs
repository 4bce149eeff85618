//! Registers each metric under its name.
//!
//! Upstream's names, help texts and kinds are those of `pkg/proxy/metrics/metrics.go` (1.36), where
//! `…_no_local_endpoints_total` is a gauge too. The encoder adds `_total` to counters.

use prometheus_client::registry::Registry;

use super::{
    Metrics,
    conntrack::ConntrackCollector,
    process::{ProcessCollector, TaskCollector},
};

/// Registers fields of [`Metrics`], one in a row: field, name, help.
macro_rules! register {
    ($registry:expr, $metrics:expr, { $($($field:ident).+: $name:literal, $help:literal;)* }) => {
        $($registry.register($name, $help, $metrics.$($field).+.clone());)*
    };
}

/// Returns a registry of all metrics.
pub(super) fn registry(metrics: &Metrics) -> Registry {
    let mut registry = Registry::default();
    let upstream = registry.sub_registry_with_prefix("kubeproxy");
    upstream_metrics(metrics, upstream);
    shunt_metrics(metrics, registry.sub_registry_with_prefix("shunt"));
    api_client_metrics(metrics, &mut registry);
    kubernetes_metrics(metrics, registry.sub_registry_with_prefix("kubernetes"));
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

fn upstream_metrics(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.of_mode.clone()));
    register!(to, metrics, {
        durations.sync: "sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds";
        durations.sync_full: "sync_full_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for full resyncs";
        durations.sync_partial: "sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs";
        last_sync: "sync_proxy_rules_last_timestamp_seconds",
            "The last time proxy rules were successfully synced";
        last_queued: "sync_proxy_rules_last_queued_timestamp_seconds",
            "The last time a sync of proxy rules was queued";
        durations.programming: "network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds";
        durations.conntrack: "conntrack_reconciler_sync_duration_seconds",
            "ReconcileConntrackFlowsLatency latency in seconds";
        endpoint_changes: "sync_proxy_rules_endpoint_changes", "Cumulative proxy rules Endpoint changes";
        endpoint_changes_pending: "sync_proxy_rules_endpoint_changes_pending",
            "Pending proxy rules Endpoint changes";
        service_changes: "sync_proxy_rules_service_changes", "Cumulative proxy rules Service changes";
        service_changes_pending: "sync_proxy_rules_service_changes_pending",
            "Pending proxy rules Service changes";
        no_local_endpoints: "sync_proxy_rules_no_local_endpoints_total",
            "Number of services with a Local traffic policy and no endpoints";
        conntrack_deleted: "conntrack_reconciler_deleted_entries",
            "Cumulative conntrack flows deleted by conntrack reconciler";
        healthz: "proxy_healthz", "Cumulative proxy healthz HTTP status";
        livez: "proxy_livez", "Cumulative proxy livez HTTP status";
    });
}

/// client-go's metrics (`component-base/metrics/prometheus/restclient`).
fn api_client_metrics(metrics: &Metrics, to: &mut Registry) {
    register!(to, metrics, {
        api_requests: "rest_client_requests",
            "Number of HTTP requests, partitioned by status code, method, and host";
        durations.api_requests: "rest_client_request_duration_seconds",
            "Request latency in seconds. Broken down by verb, and host";
    });
}

/// The metrics that every component of Kubernetes has (`component-base/metrics/prometheus`).
fn kubernetes_metrics(metrics: &Metrics, to: &mut Registry) {
    register!(to, metrics, {
        build_info: "build_info",
            "A metric with a constant '1' value labeled by the version of Kubernetes whose kube-proxy shunt stands in for";
        features: "feature_enabled",
            "This metric records the data about the stage and enablement of a k8s feature.";
    });
}

fn shunt_metrics(metrics: &Metrics, to: &mut Registry) {
    to.register_collector(Box::new(metrics.kernel_counts.clone()));
    to.register_collector(Box::new(TaskCollector));
    to.register_collector(Box::new(ConntrackCollector));
    register!(to, metrics, {
        own_build_info: "build_info", "1, labeled by the version of shunt";
        mode: "mode", "The current mode";
        mode_info: "mode_info", "The reason for the current mode";
        backstop_info: "backstop_info",
            "The netfilter mode whose rules are beneath the programs, and why";
        link_path_info: "link_path_info",
            "What translates packets that come in on links, and why it is netfilter";
        exempt_namespaces: "exempt_namespaces",
            "Network namespaces of pods that redirect their own packets, so that their sockets are left alone";
        modes_broken: "modes_broken", "Modes that failed permanently and were replaced by another mode";
        fell_back: "fell_back",
            "1 while the mode auto runs another mode than the one that it prefers, by reason";
        map_entries: "map_entries", "Entries in a map of the dataplane";
        map_capacity: "map_capacity", "Capacity of a map of the dataplane, in entries";
        maglev_service_ports: "maglev_service_ports",
            "Service ports that have Maglev tables, and those for whose tables the map has no room";
        links_left_out: "links_left_out",
            "Links without link programs, because a foreign qdisc leaves no room for them";
        links_displaced: "links_displaced",
            "1 for a link on which a program of another owner insists on running before shunt's";
        service_ports_left_out: "service_ports_left_out",
            "Service ports that are not served as they should be, while all others are";
        operations: "sync_operations", "Changes to the kernel";
        failures: "sync_failures", "Syncs that failed and were retried";
        drift: "sync_drift_operations",
            "Changes that repaired drift: what something other than shunt had changed in the kernel";
        configuration_refused: "configuration_refused",
            "1 while the configuration file is refused, so that the settings stay as they were";
        watch_events: "watch_events", "Events received from the object source";
        watch_connected: "watch_connected", "1 if the object source is connected";
        manifest_errors: "manifest_errors",
            "Parts of manifests that cannot be read, so that their last good version is in effect, or none";
        watch_synced: "watch_synced", "1 after all kinds of objects were listed and programmed once";
    });
}
