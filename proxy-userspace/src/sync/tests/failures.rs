//! Failures of the whole dataplane, of one family, and of a part.

use super::*;

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

#[tokio::test(start_paused = true)]
async fn a_partial_failure_delays_neither_others_nor_health_checks() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().is_full = true;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    daemon.settle().await;
    let health_checks = daemon.outputs.health_checks.subscribe();
    daemon.send(WatchEvent::Services(Delta::Apply(with_health_check("a", 31_710)))).await;
    daemon.settle().await;
    assert_eq!(health_checks.borrow().checks.len(), 1);
    daemon.fake.kernel().calls.clear();
    daemon.fake.kernel().is_full = false;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::Apply(1)], "what changed, and the kernel is not read for it");
    assert!(!daemon.outputs.health.is_ready(), "what failed was not tried again yet");
    daemon.fake.kernel().is_full = true;
    tokio::time::sleep(5 * SYNC).await;
    assert!(daemon.outputs.health.is_live() && !daemon.outputs.health.is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_full_map_is_not_ready_until_everything_fits() {
    let daemon = Daemon::synced().await;
    assert!(daemon.outputs.health.is_ready());
    daemon.fake.kernel().is_full = true;
    daemon.send(WatchEvent::Services(Delta::Apply(service("b", "10.96.0.2")))).await;
    daemon.settle().await;
    assert!(!daemon.outputs.health.is_ready() && daemon.outputs.health.is_live());
    daemon.fake.kernel().is_full = false;
    daemon.send(WatchEvent::Services(Delta::Delete(testing::namespaced("default/b")))).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(daemon.outputs.health.is_ready());
}
