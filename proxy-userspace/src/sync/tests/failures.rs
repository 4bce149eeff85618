//! Failures of the whole dataplane, of one family, and of a part.

use std::collections::BTreeMap;

use super::*;
use crate::model::ServicePortKey;

#[tokio::test(start_paused = true)]
async fn a_retry_starts_from_what_the_kernel_really_holds() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().failures_left = 2;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::FailedApply]);
    assert_eq!(daemon.metric("shunt_sync_failures_total{ip_family=\"IPv4\"}"), "1");
    // Something else happens to the kernel meanwhile, and a change comes in.
    daemon.fake.kernel().content.ports.clear();
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    tokio::time::sleep(SYNC / 2).await;
    assert_eq!(
        daemon.calls(),
        [Call::FailedApply, Call::Observe, Call::FailedApply, Call::Observe, Call::Apply(2)]
    );
    assert_eq!(daemon.endpoints("a"), ["10.0.0.2:80"]);
    assert_eq!(daemon.fake.kernel().content.ports.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn drift_whose_first_repair_fails_is_counted_when_it_is_repaired() {
    let drift = |daemon: &Daemon| daemon.metric("shunt_sync_drift_operations_total");
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().content.ports.clear();
    daemon.fake.kernel().failures_left = 2;
    daemon.drift.notify_one();
    tokio::time::sleep(SYNC / 2).await;
    assert_eq!((daemon.endpoints("a"), drift(&daemon)), (vec!["10.0.0.1:80".to_owned()], "1".to_owned()));
    // A change that failed is no drift.
    daemon.fake.kernel().failures_left = 1;
    daemon.send(endpoint_is("10.0.0.2")).await;
    tokio::time::sleep(SYNC).await;
    assert_eq!((daemon.endpoints("a"), drift(&daemon)), (vec!["10.0.0.2:80".to_owned()], "1".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_failed_sync_has_a_duration() {
    let daemon = Daemon::synced().await;
    let syncs = || -> usize {
        let name = "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}";
        daemon.metric(name).parse().expect("a number")
    };
    let before = syncs();
    daemon.fake.kernel().failures_left = 1;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    assert_eq!((daemon.calls(), syncs()), (vec![Call::FailedApply], before + 1));
}

#[tokio::test(start_paused = true)]
async fn only_a_whole_failure_breaks_the_mode() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().is_full = true;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    tokio::time::sleep(3 * GIVE_UP).await;
    assert!(!daemon.task.is_finished(), "some Services are served");
    daemon.fake.kernel().is_full = false;
    daemon.fake.kernel().failures_left = usize::MAX;
    daemon.send(endpoint_is("10.0.0.3")).await;
    tokio::time::sleep(GIVE_UP / 2).await;
    assert!(!daemon.task.is_finished());
    tokio::time::sleep(GIVE_UP).await;
    let ended = daemon.task.await.expect("no panic").expect_err("given up");
    assert!(matches!(ended, SyncError::Broken { after, .. } if after >= GIVE_UP), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn an_exchange_of_programs_does_not_end_a_failure_with_a_part_of_the_changes() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().failures_left = usize::MAX;
    daemon.send(endpoint_is("10.0.0.2")).await;
    tokio::time::sleep(SYNC / 2).await;
    daemon.fake.kernel().failures_left = 0;
    daemon.fake.kernel().can_trace = true;
    daemon.inspector.trace_end().expect("the loop runs").end().await.expect("an answer");
    assert!(!daemon.outputs.status.is_failing(SyncTask::Program));
    assert_eq!(daemon.endpoints("a"), ["10.0.0.2:80"]);
}

#[tokio::test(start_paused = true)]
async fn a_lasting_failure_is_unhealthy_until_it_ends() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().failures_left = usize::MAX;
    daemon.send(endpoint_is("10.0.0.2")).await;
    tokio::time::sleep(SYNC).await;
    assert!(daemon.outputs.health.is_live(), "not before twice the sync period");
    tokio::time::sleep(SYNC).await;
    assert!(!daemon.outputs.health.is_live());
    assert!(daemon.outputs.status.is_failing(SyncTask::Program));
    daemon.fake.kernel().failures_left = 0;
    tokio::time::sleep(SYNC).await;
    assert!(daemon.outputs.health.is_live());
    assert!(!daemon.outputs.status.is_failing(SyncTask::Program));
    assert_eq!(daemon.endpoints("a"), ["10.0.0.2:80"]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_family_backs_off_and_the_other_continues() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().failing_family = Some(IpFamily::V6);
    daemon.send(WatchEvent::Services(Delta::Apply(service("six", "fd96::6")))).await;
    tokio::time::sleep(SYNC / 2).await;
    let failures = |family: &str| {
        let count = daemon.metric(&format!("shunt_sync_failures_total{{ip_family=\"{family}\"}}"));
        count.parse::<u32>().expect("a number")
    };
    assert_eq!(failures("IPv4"), 0);
    assert!((2..20).contains(&failures("IPv6")), "{}", failures("IPv6"));
    for address in ["10.0.0.2", "10.0.0.3"] {
        daemon.send(endpoint_is(address)).await;
        tokio::time::sleep(MIN_SYNC).await;
        assert_eq!(daemon.endpoints("a"), [format!("{address}:80")]);
    }
    // Upstream's limit, twice the sync period, is over for one family.
    tokio::time::sleep(2 * SYNC).await;
    let health = &daemon.outputs.health;
    assert_eq!(IpFamily::ALL.map(|family| health.is_live_for(family)), [true, false]);
    assert!(!health.is_live() && !health.is_ready());
    daemon.fake.kernel().failing_family = None;
    tokio::time::sleep(SYNC).await;
    assert!(health.is_live() && health.is_ready());
    assert_eq!(daemon.fake.kernel().content.ports.len(), 2);
}

/// Sends a change of endpoints that is made now, and returns how many changes were measured.
async fn measured(daemon: &Daemon, address: &str) -> String {
    let slice = EndpointSlice { last_change_trigger_time: Some(now()), ..slice("a", address) };
    daemon.send(WatchEvent::EndpointSlices(Delta::Apply(slice))).await;
    daemon.settle().await;
    daemon.metric("kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}")
}

#[tokio::test(start_paused = true)]
async fn a_change_is_measured_at_once_while_a_part_fails_and_never_if_everything_fails() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().rejects_link = true;
    assert_eq!(measured(&daemon, "10.0.0.2").await, "1", "its port is programmed");
    daemon.fake.kernel().rejects_link = false;
    tokio::time::sleep(SYNC).await;
    daemon.fake.kernel().failures_left = usize::MAX;
    assert_eq!(measured(&daemon, "10.0.0.3").await, "1");
    daemon.fake.kernel().failures_left = 0;
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.3:80"]);
    assert_eq!(measured(&daemon, "10.0.0.4").await, "2", "not those that waited");
}

/// Sends a Service that the kernel does not accept.
async fn leave_out_b(daemon: &Daemon) {
    daemon.fake.kernel().is_full = true;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    daemon.settle().await;
}

const LEFT_OUT: &str = r#"shunt_service_ports_left_out{reason="map-full"}"#;

#[tokio::test(start_paused = true)]
async fn a_left_out_service_port_delays_neither_others_nor_health_checks() {
    let daemon = Daemon::synced().await;
    leave_out_b(&daemon).await;
    let health_checks = daemon.outputs.health_checks.subscribe();
    daemon.send(WatchEvent::Services(Delta::Apply(with_health_check("a", 31_710)))).await;
    daemon.settle().await;
    assert_eq!(health_checks.borrow().checks.len(), 1);
    tokio::time::sleep(2 * MIN_SYNC).await;
    daemon.fake.kernel().calls.clear();
    daemon.fake.kernel().is_full = false;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::Apply(1)], "what changed, and the kernel is not read for it");
    assert_eq!(daemon.metric(LEFT_OUT), "1", "what is left out was not tried again yet");
}

#[tokio::test(start_paused = true)]
async fn a_left_out_service_port_does_not_make_the_node_unhealthy() {
    let daemon = Daemon::synced().await;
    leave_out_b(&daemon).await;
    assert_eq!(daemon.metric(LEFT_OUT), "1");
    for _ in 0..10 {
        tokio::time::sleep(SYNC).await;
        assert!(daemon.outputs.health.is_live() && daemon.outputs.health.is_ready());
    }
    assert!(daemon.outputs.status.is_failing(SyncTask::Program));
    daemon.fake.kernel().is_full = false;
    daemon.send(WatchEvent::Services(Delta::Delete(testing::namespaced("default/b")))).await;
    // A retry may have been a moment ago, and then the next full sync waits.
    tokio::time::sleep(schedule::MIN_ROOM_PERIOD + 150 * MILLI).await;
    assert_eq!(daemon.metric(LEFT_OUT), "0");
    assert!(!daemon.outputs.status.is_failing(SyncTask::Program));
}

#[tokio::test(start_paused = true)]
async fn a_left_out_service_port_that_gets_room_is_no_drift() {
    let daemon = Daemon::synced().await;
    leave_out_b(&daemon).await;
    daemon.fake.kernel().is_full = false;
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.metric(LEFT_OUT), "0");
    assert_eq!(daemon.metric("shunt_sync_drift_operations_total"), "0");
}

#[tokio::test(start_paused = true)]
async fn a_sync_that_leaves_a_service_port_out_counts_as_a_sync() {
    let daemon = Daemon::synced().await;
    let count = |name: &str| daemon.metric(&format!("{name}{{ip_family=\"IPv4\"}}"));
    let syncs =
        || count("kubeproxy_sync_proxy_rules_duration_seconds_count").parse::<u32>().expect("a number");
    let before = (syncs(), daemon.metric("shunt_sync_operations_total"));
    daemon.fake.kernel().is_full = true;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    daemon.send(WatchEvent::Services(Delta::Delete(testing::namespaced("default/a")))).await;
    daemon.settle().await;
    assert_eq!(syncs(), before.0 + 1);
    let operations = |text: &str| text.parse::<u32>().expect("a number");
    let made = operations(&daemon.metric("shunt_sync_operations_total")) - operations(&before.1);
    assert_eq!(made, 1, "a is removed");
    assert_eq!(count("shunt_sync_failures_total"), "0");
    assert_eq!(daemon.metric("kubeproxy_sync_proxy_rules_service_changes_pending"), "0");
}

#[tokio::test(start_paused = true)]
async fn a_left_out_service_port_does_not_change_the_pace() {
    let daemon = Daemon::synced().await;
    leave_out_b(&daemon).await;
    daemon.fake.kernel().calls.clear();
    for number in 0..2000_u32 {
        daemon.send(endpoint_is(&format!("10.1.{}.{}", number / 200, number % 200 + 1))).await;
        tokio::time::sleep(5 * MILLI).await;
    }
    let calls = daemon.calls();
    let syncs = calls.iter().filter(|call| **call == Call::FailedApply).count();
    let full = calls.iter().filter(|call| **call == Call::Observe).count();
    // One a second, a burst, and the retries after 0.1, 0.3, 0.7, 1.5, 3.1 and 6.3 s at the latest.
    assert!((10..=20).contains(&syncs) && (4..=9).contains(&full), "{syncs} syncs, {full} of them full");
}

#[tokio::test(start_paused = true)]
async fn what_is_left_out_defers_no_repair_of_drift() {
    let daemon = Daemon::synced().await;
    leave_out_b(&daemon).await;
    tokio::time::sleep(10 * SYNC).await;
    daemon.fake.kernel().is_full = false;
    daemon.fake.kernel().content.ports.clear();
    daemon.drift.notify_one();
    tokio::time::sleep(2 * MIN_SYNC).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
}

#[tokio::test(start_paused = true)]
async fn a_part_of_the_node_that_fails_for_long_makes_it_unhealthy_but_live() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().rejects_link = true;
    daemon.send(endpoint_is("10.0.0.2")).await;
    tokio::time::sleep(SYNC).await;
    assert!(daemon.outputs.health.is_ready(), "not before twice the sync period");
    tokio::time::sleep(2 * SYNC).await;
    assert!(daemon.outputs.health.is_live() && !daemon.outputs.health.is_ready());
    assert_eq!(daemon.endpoints("a"), ["10.0.0.2:80"]);
    assert_ne!(daemon.metric("shunt_sync_failures_total{ip_family=\"IPv4\"}"), "0");
    daemon.fake.kernel().rejects_link = false;
    tokio::time::sleep(SYNC).await;
    assert!(daemon.outputs.health.is_ready());

    let fake = FakeDataplane::default();
    fake.kernel().rejects_link = true;
    let daemon = Daemon::start(fake).programmed().await;
    assert!(daemon.outputs.health.is_live() && !daemon.outputs.health.is_ready(), "it never worked");
}

/// Returns whether the loop says of each Service that it is programmed, by name.
async fn programmed(daemon: &Daemon) -> Vec<(String, bool)> {
    let read = daemon.inspector.read(|inspected| {
        let ports = inspected.model.snapshot().ports.keys();
        let is_programmed = |key: &ServicePortKey| inspected.programmed(key).is_some();
        ports.map(|key| (key.name.service.name.to_string(), is_programmed(key))).collect::<BTreeMap<_, _>>()
    });
    read.await.expect("the loop runs").into_iter().collect()
}

#[tokio::test(start_paused = true)]
async fn a_service_that_no_sync_could_write_waits() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().failures_left = usize::MAX;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    tokio::time::sleep(SYNC).await;
    assert_eq!(programmed(&daemon).await, [("a".into(), true), ("b".into(), false)]);
    daemon.fake.kernel().failures_left = 0;
    tokio::time::sleep(SYNC).await;
    assert_eq!(programmed(&daemon).await, [("a".into(), true), ("b".into(), true)]);
}

#[tokio::test(start_paused = true)]
async fn a_service_of_a_failing_family_waits_while_the_other_family_is_programmed() {
    let daemon = Daemon::never_giving_up().await;
    daemon.fake.kernel().failing_family = Some(IpFamily::V6);
    daemon.send(WatchEvent::Services(Delta::Apply(service("six", "fd96::6")))).await;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    tokio::time::sleep(SYNC / 2).await;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    let all = |six| [("a".into(), true), ("b".into(), true), ("six".into(), six)];
    assert_eq!(programmed(&daemon).await, all(false));
    let failing = daemon.inspector.read(|inspected| IpFamily::ALL.map(|family| inspected.is_failing(family)));
    assert_eq!(failing.await, Ok([false, true]));
    daemon.fake.kernel().failing_family = None;
    tokio::time::sleep(SYNC).await;
    assert_eq!(programmed(&daemon).await, all(true));
}

#[tokio::test(start_paused = true)]
async fn what_changes_while_the_kernel_is_read_ahead_is_read_before_the_first_sync() {
    let daemon = Daemon::start(FakeDataplane::default());
    daemon.send_facts();
    for event in lists() {
        daemon.send(event).await;
    }
    daemon.drift.notify_one();
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    assert_eq!(daemon.calls()[..2], [Call::Observe; 2]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_programmed_after_a_shutdown_during_the_first_read() {
    let daemon = Daemon::start(FakeDataplane::default());
    daemon.send_facts();
    for event in lists() {
        daemon.send(event).await;
    }
    daemon.shutdown.cancel();
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::Observe]);
}
