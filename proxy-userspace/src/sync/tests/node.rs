//! The Node object, and settings that change.

use super::*;
use crate::{health::ListenOn, model::NodeAddressType, net::TUNNEL_LINK};

fn with_pod_cidrs(cidrs: &[&str]) -> Node {
    Node { pod_cidrs: testing::cidrs(cidrs), ..node() }
}

async fn list(daemon: &Daemon, nodes: Vec<Node>) {
    daemon.send_facts();
    let [services, slices, _] = lists();
    for event in [services, slices, WatchEvent::Nodes(Delta::Replace(nodes))] {
        daemon.send(event).await;
    }
    daemon.settle().await;
}

#[tokio::test(start_paused = true)]
async fn the_loop_waits_for_the_node_for_a_while() {
    let daemon = Daemon::start(FakeDataplane::default());
    list(&daemon, Vec::new()).await;
    assert_eq!(daemon.calls(), [Call::Observe], "nothing is programmed");
    daemon.send(WatchEvent::Nodes(Delta::Apply(node()))).await;
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);

    let daemon = Daemon::start(FakeDataplane::default());
    list(&daemon, Vec::new()).await;
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(daemon.calls(), [Call::Observe], "nothing is programmed");
    // The wait is checked every ten seconds.
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    // All Services are served, but without a Node the node is not ready for traffic.
    let health = &daemon.outputs.health;
    assert!(health.is_programmed() && health.is_live() && !health.is_ready());
    daemon.send(WatchEvent::Nodes(Delta::Apply(node()))).await;
    daemon.settle().await;
    assert!(health.is_ready());
    // A deleted Node was seen before.
    daemon.send(WatchEvent::Nodes(Delta::Replace(Vec::new()))).await;
    daemon.settle().await;
    assert!(health.is_ready());
}

#[tokio::test(start_paused = true)]
async fn the_loop_waits_for_the_addresses_of_the_node_if_node_ports_depend_on_them() {
    let start = || {
        let outputs = Outputs::new(2 * SYNC, NodeEvents::default());
        let primary = NodePortAddresses::Primary { cidrs: Vec::new() };
        Daemon::start_serving(primary, outputs, FakeDataplane::default(), None, DetectLocalMode::ClusterCidr)
    };
    let daemon = start();
    list(&daemon, vec![node()]).await;
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(daemon.calls(), [Call::Observe], "node ports would be served on all addresses");
    let addresses = vec![(NodeAddressType::InternalIp, testing::ip("192.0.2.1"))];
    daemon.send(WatchEvent::Nodes(Delta::Apply(Node { addresses, ..node() }))).await;
    daemon.settle().await;
    let served = daemon.fake.kernel().content.node.node_port_addresses.clone();
    assert_eq!(Vec::from_iter(served), [testing::ip("192.0.2.1")]);

    let daemon = start();
    list(&daemon, vec![node()]).await;
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"], "it does not wait forever");
    assert!(daemon.outputs.health.is_ready(), "the Node is there");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_node_stays_known_to_the_next_loop() {
    let first = Daemon::synced().await;
    let health = first.outputs.health.clone();
    assert!(health.is_ready());
    let outputs = first.outputs.clone();
    drop(first);
    let next =
        Daemon::start_reporting_to(outputs, FakeDataplane::default(), None, DetectLocalMode::ClusterCidr);
    list(&next, Vec::new()).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(next.endpoints("a"), ["10.0.0.1:80"]);
    assert!(health.is_ready());
}

#[tokio::test(start_paused = true)]
async fn pod_cidrs_are_awaited_and_must_not_change() {
    let daemon = Daemon::start_with(FakeDataplane::default(), None, DetectLocalMode::NodeCidr);
    list(&daemon, vec![node()]).await;
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(daemon.calls(), [Call::Observe], "nothing is programmed");
    daemon.send(WatchEvent::Nodes(Delta::Apply(with_pod_cidrs(&["10.244.1.0/24"])))).await;
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    // A Node that is deleted and created again is no change.
    list(&daemon, Vec::new()).await;
    list(&daemon, vec![with_pod_cidrs(&["10.244.1.0/24"])]).await;
    assert!(!daemon.task.is_finished());
    daemon.send(WatchEvent::Nodes(Delta::Apply(with_pod_cidrs(&["10.244.2.0/24"])))).await;
    let ended = daemon.task.await.expect("no panic").expect_err("a new process is needed");
    let said = ended.to_string();
    assert!(said.contains("10.244.1.0/24") && said.contains("10.244.2.0/24"), "{said}");

    let daemon = Daemon::start_with(FakeDataplane::default(), None, DetectLocalMode::NodeCidr);
    list(&daemon, vec![node()]).await;
    tokio::time::sleep(Duration::from_mins(6)).await;
    let ended = daemon.task.await.expect("no panic").expect_err("without them no rule is right");
    assert!(ended.to_string().contains("no pod CIDRs"), "{ended}");
}

#[tokio::test(start_paused = true)]
async fn the_running_loop_applies_changed_settings() {
    let daemon = Daemon::synced().await;
    daemon.settings.send_modify(|settings| {
        settings.model.node_port_addresses = NodePortAddresses::Cidrs(vec!["192.0.2.0/24".parse().unwrap()]);
        settings.periods.sync_period = 2 * SYNC;
    });
    daemon.settle().await;
    let served = daemon.fake.kernel().content.node.node_port_addresses.clone();
    assert_eq!(Vec::from_iter(served), ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    daemon.fake.kernel().calls.clear();
    tokio::time::sleep(SYNC + SYNC / 2).await;
    assert_eq!(daemon.calls(), [], "the kernel is compared as often as the new period says");
    tokio::time::sleep(SYNC).await;
    assert_ne!(daemon.calls(), []);
}

#[tokio::test(start_paused = true)]
async fn node_announces_the_tunnel_until_its_object_says_so_and_takes_it_back() {
    let daemon = Daemon::synced().await;
    let announced = || daemon.outputs.dsr_announcement.borrow().clone();
    assert_eq!(announced(), None, "there is no tunnel, and the Node says none");

    let addresses = vec!["192.0.2.1:4790".parse().unwrap()];
    let alone = DsrAnnouncement { addresses, ..DsrAnnouncement::default() };
    let settings = daemon.settings.borrow().clone();
    let model = ModelSettings { dsr_port: NonZeroU16::new(4_790), ..settings.model.clone() };
    daemon.settings.send_replace(SyncSettings { model, ..settings.clone() });
    let mut facts = daemon.facts.borrow().clone().unwrap();
    facts.links = vec![testing::link(9, TUNNEL_LINK)];
    daemon.facts.send_replace(Some(facts));
    tokio::time::sleep(2 * MIN_SYNC).await;
    assert_eq!(announced(), Some(alone.clone()));

    let own = Node { dsr: alone.clone(), ..node() };
    daemon.send(WatchEvent::Nodes(Delta::Apply(own))).await;
    tokio::time::sleep(2 * MIN_SYNC).await;
    assert_eq!(announced(), None, "the Node says so");

    let mut facts = daemon.facts.borrow().clone().unwrap();
    facts.addresses.extend(testing::facts(&[("eth1", "198.51.100.7/24")]).addresses);
    daemon.facts.send_replace(Some(facts));
    tokio::time::sleep(2 * MIN_SYNC).await;
    let with_another = DsrAnnouncement { others: [testing::ip("198.51.100.7")].into(), ..alone };
    assert_eq!(announced(), Some(with_another), "the node has another address");

    daemon.settings.send_replace(settings);
    tokio::time::sleep(2 * MIN_SYNC).await;
    assert_eq!(announced(), Some(DsrAnnouncement::default()), "other nodes must not send packets any more");
}

#[tokio::test(start_paused = true)]
async fn health_check_ports_listen_where_node_ports_are_served_in_each_family() {
    let daemon = Daemon::synced().await;
    let every = |family| (family, ListenOn::EveryAddress);
    let some = |family, addresses: &[&str]| {
        (family, ListenOn::Addresses(addresses.iter().map(|address| testing::ip(address)).collect()))
    };
    let (v4, v6) = (IpFamily::V4, IpFamily::V6);
    for (ranges, expected) in [
        (&["0.0.0.0/0", "::/0"][..], [every(v4), every(v6)]),
        (&["192.0.2.0/24"], [some(v4, &["192.0.2.1"]), every(v6)]),
        (&["192.0.2.0/24", "::/0", "0.0.0.0/0"], [every(v4), every(v6)]),
        (&["2001:db8::/64"], [every(v4), some(v6, &[])]),
    ] {
        daemon.settings.send_modify(|settings| {
            settings.model.node_port_addresses = NodePortAddresses::Cidrs(testing::cidrs(ranges));
        });
        tokio::time::sleep(2 * MIN_SYNC).await;
        assert_eq!(daemon.outputs.health_checks.borrow().listen_on, expected.into(), "{ranges:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_being_deleted_is_not_ready_also_while_the_kernel_refuses_changes() {
    let daemon = Daemon::synced().await;
    assert!(daemon.outputs.health.is_ready());
    daemon.fake.kernel().failures_left = usize::MAX;
    daemon.send(WatchEvent::Nodes(Delta::Apply(Node { being_deleted: true, ..node() }))).await;
    daemon.settle().await;
    assert!(daemon.outputs.health.is_live() && !daemon.outputs.health.is_ready());
}
