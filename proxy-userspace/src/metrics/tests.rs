//! Tests names, kinds and formats of the metrics.

use std::collections::{BTreeMap, BTreeSet};

use prometheus_client::encoding::prometheus_protobuf;
use proxy_common::layout::ServiceCounts;

use super::*;
use crate::{
    dataplane::{
        DisplacedLink, KernelCounts, MapFill, PrefilterFill, ProgramErrorCount, ServiceCount,
        conntrack::DeletionCounts,
    },
    kernel::conntrack,
    model::{NamespacedName, Protocol, ServicePortKey, ServicePortName},
};

fn text(metrics: &Metrics, accept: Option<&str>) -> (&'static str, String) {
    metrics.exposition().encode(accept).expect("metrics can be written")
}

fn used_metrics() -> Metrics {
    let metrics = Metrics::default();
    metrics.set_mode("ebpf", "as configured");
    metrics.mode_broke("nftables");
    metrics.set_map_fill(MapFill { map: "services", entries: 3, capacity: 64 });
    metrics.set_links_displaced(&[DisplacedLink { link: "eth0".into(), by: "other".into() }]);
    metrics.event_received(WatchedKind::Service, 1);
    metrics.event_received(WatchedKind::EndpointSlice, 1);
    metrics.sync_queued(1.5);
    metrics.sync_failed(&[IpFamily::V6]);
    metrics.sync_ended(SyncExtent::Full, Duration::from_millis(3));
    metrics.sync_succeeded(&IpFamily::ALL, 7, 2.5);
    metrics.endpoints_programmed(IpFamily::V4, Duration::from_millis(300));
    metrics.endpoints_programmed(IpFamily::V6, Duration::ZERO);
    metrics.set_no_local_endpoints(PolicySide::External, IpFamily::V6, 2);
    metrics.conntrack_cleaned(StaleUdpDeletion {
        family: IpFamily::V4,
        flows: DeletionCounts { seen: 9, deleted: 4 },
        took: Duration::from_millis(2),
    });
    metrics.healthz_answered(false);
    metrics.api_request_answered("GET", "10.0.0.1:6443", Some(200), Duration::from_millis(30));
    metrics.api_request_answered("POST", "10.0.0.1:6443", None, Duration::from_secs(9));
    metrics.set_feature("AllowServiceExternalIPs", "DEPRECATED", false);
    metrics
}

/// The names of metrics, except those that depend on the kernel, and their kinds.
const KINDS: [(&str, &str); 46] = [
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
    ("kubernetes_build_info", "gauge"),
    ("kubernetes_feature_enabled", "gauge"),
    ("process_cpu_seconds_total", "counter"),
    ("process_max_fds", "gauge"),
    ("process_open_fds", "gauge"),
    ("process_resident_memory_bytes", "gauge"),
    ("process_start_time_seconds", "gauge"),
    ("process_threads", "gauge"),
    ("process_virtual_memory_bytes", "gauge"),
    ("rest_client_request_duration_seconds", "histogram"),
    ("rest_client_requests_total", "counter"),
    ("shunt_build_info", "gauge"),
    ("shunt_configuration_refused", "gauge"),
    ("shunt_exempt_namespaces", "gauge"),
    ("shunt_fell_back", "gauge"),
    ("shunt_links_displaced", "gauge"),
    ("shunt_links_left_out", "gauge"),
    ("shunt_maglev_service_ports", "gauge"),
    ("shunt_map_capacity", "gauge"),
    ("shunt_map_entries", "gauge"),
    ("shunt_mode", "gauge"),
    ("shunt_mode_info", "gauge"),
    ("shunt_modes_broken_total", "counter"),
    ("shunt_service_ports_left_out", "gauge"),
    ("shunt_sync_drift_operations_total", "counter"),
    ("shunt_sync_failures_total", "counter"),
    ("shunt_sync_operations_total", "counter"),
    ("shunt_manifest_errors", "gauge"),
    ("shunt_watch_connected", "gauge"),
    ("shunt_watch_events_total", "counter"),
    ("shunt_watch_synced", "gauge"),
];

#[test]
fn every_metric_has_upstreams_name_and_kind() {
    let (_, text) = text(&used_metrics(), None);
    let mut kinds: BTreeMap<_, _> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    // They are there if this kernel has conntrack.
    kinds.retain(|name, _| !name.starts_with("shunt_conntrack_"));
    assert_eq!(kinds, BTreeMap::from(KINDS));
}

#[test]
fn fallback_has_a_series_for_each_reason() {
    let metrics = Metrics::default();
    let series = |metrics: &Metrics| {
        let (_, text) = text(metrics, None);
        ["unsupported", "broken"]
            .map(|reason| text.contains(&format!("shunt_fell_back{{reason=\"{reason}\"}} 1\n")))
    };
    assert_eq!(series(&metrics), [false, false]);
    assert!(text(&metrics, None).1.contains("shunt_fell_back{reason=\"broken\"} 0\n"), "it starts at 0");
    metrics.set_fallback(Some(Fallback::Unsupported));
    assert_eq!(series(&metrics), [true, false]);
    metrics.set_fallback(Some(Fallback::Broken));
    assert_eq!(series(&metrics), [false, true]);
    metrics.set_fallback(None);
    assert_eq!(series(&metrics), [false, false]);
}

#[test]
fn scrape_has_the_fill_of_conntrack_if_the_kernel_has_conntrack() {
    let (_, text) = text(&Metrics::default(), None);
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|value| value.parse::<i64>().expect("a number"))
    };
    let fill = [value("shunt_conntrack_entries"), value("shunt_conntrack_limit")];
    match conntrack::table_fill().expect("readable") {
        Some(seen) => {
            assert_eq!(fill[1], Some(seen.limit));
            assert!(fill[0].is_some_and(|entries| entries >= 0));
        }
        None => assert_eq!(fill, [None, None]),
    }
}

#[test]
fn slis_have_the_last_probe_result_and_the_counts() {
    let metrics = used_metrics();
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
fn samples_have_upstreams_labels() {
    let (_, text) = text(&used_metrics(), None);
    for line in [
        r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1"#,
        r#"kubeproxy_sync_full_proxy_rules_duration_seconds_bucket{le="0.004",ip_family="IPv6"} 1"#,
        r#"kubeproxy_network_programming_duration_seconds_bucket{le="0",ip_family="IPv4"} 0"#,
        r#"kubeproxy_network_programming_duration_seconds_bucket{le="0.5",ip_family="IPv4"} 1"#,
        r#"kubeproxy_network_programming_duration_seconds_bucket{le="0",ip_family="IPv6"} 1"#,
        r#"kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 4"#,
        r#"kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv6"} 0"#,
        r#"kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 2.5"#,
        r#"kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="external",ip_family="IPv6"} 2"#,
        "kubeproxy_sync_proxy_rules_service_changes_total 1",
        "kubeproxy_sync_proxy_rules_service_changes_pending 0",
        r#"kubeproxy_proxy_healthz_total{code="503"} 1"#,
        r#"rest_client_requests_total{code="200",method="GET",host="10.0.0.1:6443"} 1"#,
        r#"rest_client_requests_total{code="<error>",method="POST",host="10.0.0.1:6443"} 1"#,
        r#"rest_client_request_duration_seconds_bucket{le="0.025",verb="GET",host="10.0.0.1:6443"} 0"#,
        r#"rest_client_request_duration_seconds_bucket{le="0.1",verb="GET",host="10.0.0.1:6443"} 1"#,
        r#"rest_client_request_duration_seconds_count{verb="POST",host="10.0.0.1:6443"} 1"#,
        r#"kubernetes_feature_enabled{name="AllowServiceExternalIPs",stage="DEPRECATED"} 0"#,
        r#"shunt_mode{mode="ebpf"} 1"#,
        r#"shunt_mode_info{mode="ebpf",why="as configured"} 1"#,
        r#"shunt_map_capacity{map="services"} 64"#,
        "shunt_sync_operations_total 7",
    ] {
        assert!(text.lines().any(|seen| seen == line), "{line} is missing in:\n{text}");
    }
}

/// Returns the bucket bounds of a histogram for IPv4, in order.
fn bounds(text: &str, name: &str) -> Vec<String> {
    let bound = |line: &str| {
        let labels = line.strip_prefix(name)?.strip_prefix("_bucket{le=\"")?;
        Some(labels.split_once("\",ip_family=\"IPv4\"}")?.0.to_owned())
    };
    text.lines().filter_map(bound).collect()
}

#[test]
fn buckets_and_their_text_equal_upstream() {
    let (_, text) = text(&used_metrics(), None);
    // `ExponentialBuckets(0.001, 2, 15)`
    let sync_bounds =
        "0.001 0.002 0.004 0.008 0.016 0.032 0.064 0.128 0.256 0.512 1.024 2.048 4.096 8.192 16.384 +Inf";
    for name in [
        "sync_proxy_rules_duration_seconds",
        "sync_full_proxy_rules_duration_seconds",
        "sync_partial_proxy_rules_duration_seconds",
        "conntrack_reconciler_sync_duration_seconds",
    ] {
        assert_eq!(bounds(&text, &format!("kubeproxy_{name}")).join(" "), sync_bounds, "{name}");
    }
    // `MergeBuckets` begins with a zero: `LinearBuckets(0.25, 0.25, 2)`, `(1, 1, 59)`,
    // `(60, 5, 12)`, `(120, 30, 7)`.
    let mut programming_bounds = vec!["0".to_owned(), "0.25".into(), "0.5".into()];
    let steps = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    programming_bounds.extend(steps.map(|seconds: u32| seconds.to_string()));
    programming_bounds.push("+Inf".into());
    assert_eq!(bounds(&text, "kubeproxy_network_programming_duration_seconds"), programming_bounds);
}

#[test]
fn the_plain_format_is_well_formed() {
    let (content_type, text) = text(&used_metrics(), Some("text/plain"));
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
        text(&used_metrics(), Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
    assert!(content_type.starts_with("application/openmetrics-text"));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn histograms_have_native_buckets_in_protobuf_if_they_are_wanted() {
    let native_buckets = |metrics: &Metrics| {
        metrics.sync_ended(SyncExtent::Full, Duration::from_millis(3));
        let families = prometheus_protobuf::encode(&metrics.exposition().0).expect("metrics can be written");
        let name = "kubeproxy_sync_proxy_rules_duration_seconds";
        let family = families.into_iter().find(|family| family.name == name).expect("it is written");
        let histogram = family.metric[0].histogram.clone().expect("a histogram");
        assert_eq!(histogram.bucket.len(), 16, "the classic buckets stay");
        histogram.positive_span.len()
    };
    assert_eq!(native_buckets(&Metrics::default()), 0);
    assert_eq!(native_buckets(&Metrics::with_native_histograms()), 1);
    let accept = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let (content_type, body) = used_metrics().exposition().answer(Some(accept)).expect("a body");
    assert!(content_type.starts_with("application/vnd.google.protobuf; proto="), "{content_type}");
    assert!(body.windows(9).any(|part| part == b"kubeproxy"), "{body:?}");
}

#[test]
fn kernel_counts_are_absent_until_there_is_a_source() {
    let metrics = Metrics::default();
    let text = |metrics: &Metrics| metrics.exposition().encode(None).expect("text").1;
    assert!(!text(&metrics).contains("shunt_link_packets"));
    metrics.set_kernel_counts(Some(Box::new(FixedCounts(Vec::new()))));
    let text = text(&metrics);
    assert!(!text.contains("shunt_service_connections"), "no Service has counts");
    for line in [
        "# TYPE shunt_link_packets_total counter",
        "shunt_link_packets_total{fate=\"flow_begun\"} 7",
        "shunt_link_packets_total{fate=\"refused\"} 0",
        "# TYPE shunt_program_errors_total counter",
        "shunt_program_errors_total{program=\"shunt_in_eth\",reason=\"packet_malformed\"} 3",
        "# TYPE shunt_prefilter_false_positive_ratio gauge",
        "shunt_prefilter_false_positive_ratio 0.0025",
        "# TYPE shunt_prefilter_bytes gauge",
        "shunt_prefilter_bytes 4096",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
    }
}

/// A kernel with fixed counters, and these counts of service ports.
struct FixedCounts(Vec<ServiceCount>);

impl KernelCounts for FixedCounts {
    fn packets(&self) -> Vec<(&'static str, u64)> {
        vec![("flow_begun", 7), ("refused", 0)]
    }

    fn errors(&self) -> Vec<ProgramErrorCount> {
        vec![ProgramErrorCount { program: "shunt_in_eth", reason: "packet_malformed", count: 3 }]
    }

    fn prefilter(&self) -> Option<PrefilterFill> {
        Some(PrefilterFill { bytes: 4096, false_positive_ratio: 0.0025 })
    }

    fn services(&self) -> Vec<ServiceCount> {
        self.0.clone()
    }
}

fn service_count(port: Option<ServicePortKey>, connections: u64) -> ServiceCount {
    let (refusals, drops, bytes_to_endpoints, bytes_to_clients) = (1, 2, 3000, 4000);
    let counts = ServiceCounts { connections, refusals, drops, bytes_to_endpoints, bytes_to_clients };
    ServiceCount { port, counts }
}

#[test]
fn service_counts_have_the_service_as_labels_and_the_rest_is_other() {
    let metrics = Metrics::default();
    let name = ServicePortName {
        service: NamespacedName::new("shop", "web"),
        port: "http".into(),
        protocol: Protocol::Tcp,
    };
    let web = ServicePortKey { name, family: IpFamily::V6 };
    let counted = vec![service_count(Some(web), 5), service_count(None, 9)];
    metrics.set_kernel_counts(Some(Box::new(FixedCounts(counted))));
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
