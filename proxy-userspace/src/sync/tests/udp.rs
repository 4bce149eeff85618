//! Deletion of stale UDP entries.

use super::*;

fn dns(endpoint: &str) -> [WatchEvent; 2] {
    let ports = vec![testing::service_port("", Protocol::Udp, 53)];
    let service = Service { ports, ..service("dns", "10.96.0.53") };
    let ports = [testing::slice_port("", Protocol::Udp, 53)].into();
    let slice = EndpointSlice { ports, ..slice("dns", endpoint) };
    [WatchEvent::Services(Delta::Apply(service)), WatchEvent::EndpointSlices(Delta::Apply(slice))]
}

fn flow_to_dns(endpoint: &str) -> UdpFlow {
    let [source, destination, reply_source] =
        ["10.0.0.9:4000", "10.96.0.53:53", endpoint].map(|address| address.parse().unwrap());
    UdpFlow { source, destination, reply_source, zone: 0 }
}

#[tokio::test(start_paused = true)]
async fn stale_udp_entries_are_deleted_when_udp_changes_or_rules_drift() {
    let daemon = Daemon::synced().await;
    for event in dns("10.0.0.1") {
        daemon.send(event).await;
    }
    daemon.settle().await;
    tokio::time::sleep(2 * SYNC).await;
    daemon.fake.kernel().udp_deletions.clear();
    let [old, new] = ["10.0.0.1:53", "10.0.0.2:53"].map(flow_to_dns);
    daemon.fake.kernel().flows = vec![old, new];

    daemon.send(endpoint_is("10.0.0.7")).await;
    tokio::time::sleep(2 * SYNC).await;
    assert_eq!(
        daemon.fake.kernel().udp_deletions,
        [],
        "TCP changed, and the kernel was compared with everything"
    );

    for event in dns("10.0.0.2") {
        daemon.send(event).await;
    }
    daemon.settle().await;
    assert_eq!(daemon.fake.kernel().flows, [new]);
    let deleted = r#"kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"}"#;
    assert_eq!(daemon.metric(deleted), "1");

    let untranslated = flow_to_dns("10.96.0.53:53");
    daemon.fake.kernel().flows.push(untranslated);
    daemon.fake.kernel().content.ports.clear();
    daemon.drift.notify_one();
    tokio::time::sleep(MIN_SYNC).await;
    assert_eq!(daemon.fake.kernel().flows, [new]);
}

#[tokio::test(start_paused = true)]
async fn a_conntrack_failure_is_no_sync_failure() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().lacks_conntrack = true;
    for event in dns("10.0.0.1") {
        daemon.send(event).await;
    }
    daemon.settle().await;
    tokio::time::sleep(MIN_SYNC).await;
    assert_eq!(daemon.endpoints("dns"), ["10.0.0.1:53"]);
    assert!(daemon.outputs.health.is_ready());
    assert_eq!(daemon.metric("shunt_sync_failures_total{ip_family=\"IPv4\"}"), "0");
    daemon.fake.kernel().flows = vec![flow_to_dns("10.96.0.53:53")];
    daemon.fake.kernel().lacks_conntrack = false;
    tokio::time::sleep(2 * SYNC).await;
    assert_eq!(daemon.fake.kernel().flows, [], "deleted by a later sync");
}
