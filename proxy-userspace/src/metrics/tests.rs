//! Names, kinds and shape of what is exposed.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::{
    dataplane::{ProgramErrorCount, ServiceCount, conntrack::DeletionCounts},
    model::{NamespacedName, Protocol, ServicePortKey, ServicePortName},
};

fn text(metrics: &Metrics, accept: Option<&str>) -> (&'static str, String) {
    metrics.exposition().encode(accept).expect("metrics can be written")
}

fn used() -> Metrics {
    let metrics = Metrics::default();
    metrics.set_mode("ebpf", "as configured");
    metrics.mode_broke("nftables");
    metrics.set_map_fill(MapFill { map: "services", entries: 3, capacity: 64 });
    metrics.event_received(WatchedKind::Service);
    metrics.event_received(WatchedKind::EndpointSlice);
    metrics.sync_queued(1.5);
    metrics.sync_failed(&[IpFamily::V6]);
    metrics.sync_succeeded(&IpFamily::ALL, SyncExtent::Full, Duration::from_millis(3), 7, 2.5);
    metrics.endpoints_programmed(&IpFamily::ALL, Duration::from_millis(300));
    metrics.set_no_local_endpoints(PolicySide::External, IpFamily::V6, 2);
    metrics.flows_forgotten(StaleUdpDeletion {
        family: IpFamily::V4,
        flows: DeletionCounts { seen: 9, deleted: 4 },
        took: Duration::from_millis(2),
    });
    metrics.healthz_answered(false);
    metrics
}

#[test]
fn every_metric_has_upstreams_name_and_kind() {
    let (_, text) = text(&used(), None);
    let kinds: BTreeMap<_, _> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    let expected = [
        ("kubeproxy_conntrack_reconciler_deleted_entries_total", "counter"),
        ("kubeproxy_conntrack_reconciler_sync_duration_seconds", "histogram"),
        ("kubeproxy_network_programming_duration_seconds", "histogram"),
        ("kubeproxy_proxy_healthz_total", "counter"),
        ("kubeproxy_proxy_livez_total", "counter"),
        ("kubeproxy_sync_full_proxy_rules_duration_seconds", "histogram"),
        ("kubeproxy_sync_partial_proxy_rules_duration_seconds", "histogram"),
        ("kubeproxy_sync_proxy_rules_duration_seconds", "histogram"),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "gauge"),
        ("kubeproxy_sync_proxy_rules_endpoint_changes_total", "counter"),
        ("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "gauge"),
        ("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "gauge"),
        ("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "gauge"),
        ("kubeproxy_sync_proxy_rules_service_changes_pending", "gauge"),
        ("kubeproxy_sync_proxy_rules_service_changes_total", "counter"),
        ("process_cpu_seconds_total", "counter"),
        ("process_max_fds", "gauge"),
        ("process_open_fds", "gauge"),
        ("process_resident_memory_bytes", "gauge"),
        ("process_start_time_seconds", "gauge"),
        ("process_virtual_memory_bytes", "gauge"),
        ("shunt_links_left_out", "gauge"),
        ("shunt_map_capacity", "gauge"),
        ("shunt_map_entries", "gauge"),
        ("shunt_mode", "gauge"),
        ("shunt_mode_info", "gauge"),
        ("shunt_modes_broken_total", "counter"),
        ("shunt_sync_drift_operations_total", "counter"),
        ("shunt_sync_failures_total", "counter"),
        ("shunt_sync_operations_total", "counter"),
        ("shunt_watch_connected", "gauge"),
        ("shunt_watch_events_total", "counter"),
        ("shunt_watch_synced", "gauge"),
    ];
    assert_eq!(kinds, BTreeMap::from(expected));
}

#[test]
fn what_probes_were_told_last_and_how_often_are_indicators_with_kubernetes_names() {
    let metrics = used();
    metrics.livez_answered(true);
    metrics.healthz_answered(true);
    metrics.healthz_answered(false);
    let (_, text) = metrics.indicators().encode(None).expect("metrics can be written");
    let (comments, mut samples): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.starts_with('#'));
    samples.sort_unstable();
    let expected = [
        r#"kubernetes_healthchecks_total{name="sync",type="healthz",status="error"} 2"#,
        r#"kubernetes_healthchecks_total{name="sync",type="healthz",status="success"} 1"#,
        r#"kubernetes_healthchecks_total{name="sync",type="livez",status="success"} 1"#,
        r#"kubernetes_healthcheck{name="sync",type="healthz"} 0"#,
        r#"kubernetes_healthcheck{name="sync",type="livez"} 1"#,
    ];
    assert_eq!(samples, expected, "{text}");
    assert!(comments.contains(&"# TYPE kubernetes_healthchecks_total counter"), "{text}");
}

#[test]
fn samples_carry_upstreams_labels() {
    let (_, text) = text(&used(), None);
    for line in [
        r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1"#,
        r#"kubeproxy_sync_full_proxy_rules_duration_seconds_bucket{le="0.004",ip_family="IPv6"} 1"#,
        r#"kubeproxy_network_programming_duration_seconds_bucket{le="0.5",ip_family="IPv4"} 1"#,
        r#"kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 4"#,
        r#"kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv6"} 0"#,
        r#"kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 2.5"#,
        r#"kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="external",ip_family="IPv6"} 2"#,
        "kubeproxy_sync_proxy_rules_service_changes_total 1",
        "kubeproxy_sync_proxy_rules_service_changes_pending 0",
        r#"kubeproxy_proxy_healthz_total{code="503"} 1"#,
        r#"shunt_mode{mode="ebpf"} 1"#,
        r#"shunt_mode_info{mode="ebpf",why="as configured"} 1"#,
        r#"shunt_map_capacity{map="services"} 64"#,
        "shunt_sync_operations_total 7",
    ] {
        assert!(text.lines().any(|seen| seen == line), "{line} is missing in:\n{text}");
    }
}

/// The bounds of a histogram's buckets for IPv4, in their order.
fn bounds(text: &str, name: &str) -> Vec<String> {
    let bound = |line: &str| {
        let labels = line.strip_prefix(name)?.strip_prefix("_bucket{le=\"")?;
        Some(labels.split_once("\",ip_family=\"IPv4\"}")?.0.to_owned())
    };
    text.lines().filter_map(bound).collect()
}

#[test]
fn buckets_are_upstreams_and_written_as_upstream_writes_them() {
    let (_, text) = text(&used(), None);
    // `ExponentialBuckets(0.001, 2, 15)`
    let of_syncs =
        "0.001 0.002 0.004 0.008 0.016 0.032 0.064 0.128 0.256 0.512 1.024 2.048 4.096 8.192 16.384 +Inf";
    for name in [
        "sync_proxy_rules_duration_seconds",
        "sync_full_proxy_rules_duration_seconds",
        "sync_partial_proxy_rules_duration_seconds",
        "conntrack_reconciler_sync_duration_seconds",
    ] {
        assert_eq!(bounds(&text, &format!("kubeproxy_{name}")).join(" "), of_syncs, "{name}");
    }
    // `LinearBuckets(0.25, 0.25, 2)`, `(1, 1, 59)`, `(60, 5, 12)`, `(120, 30, 7)`
    let mut of_programming = vec!["0.25".to_owned(), "0.5".into()];
    let steps = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    of_programming.extend(steps.map(|seconds: u32| seconds.to_string()));
    of_programming.push("+Inf".into());
    assert_eq!(bounds(&text, "kubeproxy_network_programming_duration_seconds"), of_programming);
}

#[test]
fn the_plain_format_is_well_formed() {
    let (content_type, text) = text(&used(), Some("text/plain"));
    assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
    let mut described = BTreeSet::new();
    let mut lines = text.lines();
    let mut current = "";
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, _) = rest.split_once(' ').expect("help has a text");
            assert!(described.insert(name), "{name} is described twice");
            let kind = lines.next().expect("a type follows help");
            assert!(kind.starts_with(&format!("# TYPE {name} ")), "{kind} does not belong to {name}");
            current = name;
        } else {
            assert!(line.starts_with(current), "{line} stands under {current}");
            let (_, value) = line.rsplit_once(' ').expect("a sample has a value");
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}

#[test]
fn scrapers_that_ask_for_openmetrics_get_it() {
    let (content_type, text) =
        text(&used(), Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
    assert!(content_type.starts_with("application/openmetrics-text"));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn packets_are_counted_when_they_are_asked_for_and_missing_where_nothing_counts() {
    let metrics = Metrics::default();
    let text = |metrics: &Metrics| metrics.exposition().encode(None).expect("text").1;
    assert!(!text(&metrics).contains("shunt_link_packets"));
    metrics.set_kernel_counts(Some(Box::new(Counted(Vec::new()))));
    let text = text(&metrics);
    assert!(!text.contains("shunt_service_"), "nothing is counted of Services");
    for line in [
        "# TYPE shunt_link_packets_total counter",
        "shunt_link_packets_total{fate=\"flow_begun\"} 7",
        "shunt_link_packets_total{fate=\"refused\"} 0",
        "# TYPE shunt_program_errors_total counter",
        "shunt_program_errors_total{program=\"shunt_in_eth\",reason=\"packet_malformed\"} 3",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
    }
}

/// A kernel that counted this of Services.
struct Counted(Vec<ServiceCount>);

impl KernelCounts for Counted {
    fn packets(&self) -> Vec<(&'static str, u64)> {
        vec![("flow_begun", 7), ("refused", 0)]
    }

    fn errors(&self) -> Vec<ProgramErrorCount> {
        vec![ProgramErrorCount { program: "shunt_in_eth", reason: "packet_malformed", count: 3 }]
    }

    fn services(&self) -> Vec<ServiceCount> {
        self.0.clone()
    }
}

fn service_count(port: Option<ServicePortKey>, connections: u64) -> ServiceCount {
    let (refusals, drops, bytes_to_endpoints, bytes_to_clients) = (1, 2, 3000, 4000);
    ServiceCount { port, connections, refusals, drops, bytes_to_endpoints, bytes_to_clients }
}

#[test]
fn what_became_of_traffic_to_services_has_their_names_and_the_rest_is_other() {
    let metrics = Metrics::default();
    let name = ServicePortName {
        service: NamespacedName::new("shop", "web"),
        port: "http".into(),
        protocol: Protocol::Tcp,
    };
    let web = ServicePortKey { name, family: IpFamily::V6 };
    let counted = vec![service_count(Some(web), 5), service_count(None, 9)];
    metrics.set_kernel_counts(Some(Box::new(Counted(counted))));
    let (_, text) = metrics.exposition().encode(None).expect("text");
    let labels = r#"namespace="shop",name="web",port_name="http",protocol="TCP",ip_family="IPv6""#;
    for line in [
        format!("shunt_service_connections_total{{{labels}}} 5"),
        format!("shunt_service_refusals_total{{{labels}}} 1"),
        format!("shunt_service_drops_total{{{labels}}} 2"),
        format!("shunt_service_bytes_total{{{labels},direction=\"to_endpoint\"}} 3000"),
        format!("shunt_service_bytes_total{{{labels},direction=\"to_client\"}} 4000"),
        r#"shunt_service_connections_total{namespace="",name="other",port_name="",protocol="",ip_family=""} 9"#
            .into(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
    }
}
