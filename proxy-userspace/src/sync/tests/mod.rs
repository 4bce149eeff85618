//! Tests of the loop with the fake dataplane, in tokio's paused time: a sleep runs all ready tasks.

mod failures;
mod node;
mod udp;

use std::{num::NonZeroU16, sync::Arc};

use tokio::{sync::Notify, task::JoinHandle};

use super::*;
use crate::{
    dataplane::{
        DataplaneRenderer,
        conntrack::UdpFlow,
        fake::{Call, FakeDataplane},
    },
    model::{
        Delta, DetectLocalMode, DsrAnnouncement, EndpointSlice, LinkAddress, ModelSettings, Node,
        NodePortAddresses, Protocol, Service, ServiceType, TrafficPolicy, UnixNanos, testing,
    },
    node::NodeEvents,
};

const MILLI: Duration = Duration::from_millis(1);
const MIN_SYNC: Duration = Duration::from_secs(1);
const SYNC: Duration = Duration::from_secs(30);
const GIVE_UP: Duration = Duration::from_secs(40);

struct Daemon {
    fake: FakeDataplane,
    outputs: Outputs,
    events: mpsc::Sender<WatchEvent>,
    facts: watch::Sender<Option<NodeFacts>>,
    drift: Arc<Notify>,
    settings: watch::Sender<SyncSettings>,
    inspector: Inspector,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), SyncError>>,
}

impl Daemon {
    fn start(fake: FakeDataplane) -> Self {
        Self::start_giving_up(fake, Some(GIVE_UP))
    }

    fn start_giving_up(fake: FakeDataplane, give_up_after: Option<Duration>) -> Self {
        Self::start_with(fake, give_up_after, DetectLocalMode::ClusterCidr)
    }

    fn start_with(
        fake: FakeDataplane,
        give_up_after: Option<Duration>,
        detect_local: DetectLocalMode,
    ) -> Self {
        let outputs = Outputs::new(2 * SYNC, NodeEvents::default());
        Self::start_reporting_to(outputs, fake, give_up_after, detect_local)
    }

    fn start_reporting_to(
        outputs: Outputs,
        fake: FakeDataplane,
        give_up_after: Option<Duration>,
        detect_local: DetectLocalMode,
    ) -> Self {
        Self::start_serving(NodePortAddresses::All, outputs, fake, give_up_after, detect_local)
    }

    fn start_serving(
        node_port_addresses: NodePortAddresses,
        outputs: Outputs,
        fake: FakeDataplane,
        give_up_after: Option<Duration>,
        detect_local: DetectLocalMode,
    ) -> Self {
        let settings = settings(node_port_addresses, give_up_after, detect_local);
        let renderer = Box::new(DataplaneRenderer::new(fake.clone()));
        let settings = watch::Sender::new(settings);
        let shutdown = CancellationToken::new();
        let now = settings.borrow().clone();
        let mut sync = SyncLoop::new(now, renderer, outputs.clone(), shutdown.clone());
        let (events, received) = mpsc::channel(1024);
        let (facts, node_facts) = watch::channel(None);
        let (drift, inspector) = (Arc::new(Notify::new()), Inspector::default());
        let inputs = Inputs {
            events: received,
            node_facts,
            drift: Arc::clone(&drift),
            settings: settings.subscribe(),
            requests: inspector.open(),
        };
        let task = tokio::spawn(async move { sync.run(inputs, &mut ()).await });
        Self { fake, outputs, events, facts, drift, settings, inspector, shutdown, task }
    }

    /// Returns a daemon that has programmed one Service with one endpoint.
    async fn synced() -> Self {
        Self::start(FakeDataplane::default()).programmed().await
    }

    /// Returns the same daemon, but it never gives the dataplane up.
    async fn never_giving_up() -> Self {
        Self::start_giving_up(FakeDataplane::default(), None).programmed().await
    }

    async fn programmed(self) -> Self {
        let daemon = self;
        daemon.send_facts();
        for event in lists() {
            daemon.send(event).await;
        }
        daemon.settle().await;
        assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
        daemon.fake.kernel().calls.clear();
        tokio::time::sleep(2 * MIN_SYNC).await;
        daemon
    }

    async fn send(&self, event: WatchEvent) {
        self.events.send(event).await.expect("the loop listens");
    }

    fn send_facts(&self) {
        let address = |link: &str, address: &str, prefix_len| LinkAddress {
            link: link.into(),
            address: address.parse().unwrap(),
            prefix_len,
        };
        let addresses = vec![address("eth0", "192.0.2.1", 24), address("lo", "127.0.0.1", 8)];
        self.facts.send_replace(Some(NodeFacts { addresses, ..NodeFacts::default() }));
    }

    async fn settle(&self) {
        tokio::time::sleep(MILLI).await;
    }

    fn calls(&self) -> Vec<Call> {
        self.fake.kernel().calls.clone()
    }

    /// Returns the endpoints that the kernel has for a Service.
    fn endpoints(&self, service: &str) -> Vec<String> {
        let kernel = self.fake.kernel();
        let port = kernel.content.ports.iter().find(|(key, _)| *key.name.service.name == *service);
        port.map(|(_, port)| {
            port.cluster_endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
        })
        .unwrap_or_default()
    }

    fn metric(&self, name: &str) -> String {
        let (_, text) = self.outputs.metrics.exposition().encode(None).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is missing")).to_owned()
    }
}

fn settings(
    node_port_addresses: NodePortAddresses,
    give_up_after: Option<Duration>,
    detect_local: DetectLocalMode,
) -> SyncSettings {
    let periods =
        SyncPeriods { min_sync_period: MIN_SYNC, sync_period: SYNC, give_up_after, wait_for_node: true };
    let model = ModelSettings {
        node_name: "node1".into(),
        detect_local,
        node_port_addresses,
        loopback_node_ports: true,
        ..ModelSettings::default()
    };
    SyncSettings { model, periods }
}

fn service(name: &str, cluster_ip: &str) -> Service {
    testing::service(&format!("default/{name}"), cluster_ip)
}

fn with_health_check(name: &str, port: u16) -> Service {
    Service {
        service_type: ServiceType::LoadBalancer,
        external_traffic_policy: TrafficPolicy::Local,
        health_check_node_port: NonZeroU16::new(port),
        ..service(name, "10.96.0.1")
    }
}

fn slice(service: &str, address: &str) -> EndpointSlice {
    let name = format!("default/{service}-1");
    let ports = [testing::slice_port("", Protocol::Tcp, 80)].into();
    EndpointSlice { ports, ..testing::slice(&name, service, vec![testing::endpoint(address)]) }
}

fn node() -> Node {
    let addresses = Vec::new();
    Node {
        name: "node1".into(),
        zone: None,
        pod_cidrs: Vec::new(),
        addresses,
        being_deleted: false,
        dsr: DsrAnnouncement::default(),
    }
}

fn lists() -> [WatchEvent; 3] {
    [
        WatchEvent::Services(Delta::Replace(vec![service("a", "10.96.0.1")])),
        WatchEvent::EndpointSlices(Delta::Replace(vec![slice("a", "10.0.0.1")])),
        WatchEvent::Nodes(Delta::Replace(vec![node()])),
    ]
}

fn endpoint_is(address: &str) -> WatchEvent {
    WatchEvent::EndpointSlices(Delta::Apply(slice("a", address)))
}

#[tokio::test(start_paused = true)]
async fn nothing_is_programmed_before_lists_and_addresses_are_complete() {
    let daemon = Daemon::start(FakeDataplane::default());
    for event in lists() {
        daemon.send(event).await;
        daemon.settle().await;
    }
    tokio::time::sleep(3 * SYNC).await;
    assert_eq!(daemon.calls(), [Call::Observe], "at the start");
    assert!(!daemon.outputs.health.is_programmed() && daemon.outputs.health.is_live());
    daemon.send_facts();
    daemon.settle().await;
    let calls = daemon.calls();
    assert!(matches!(calls[..], [Call::Observe, Call::Observe, Call::Apply(_)]), "{calls:?}");
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    assert!(daemon.outputs.health.is_programmed());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_told_before_all_objects_are_read() {
    let daemon = Daemon::start(FakeDataplane::default());
    let services = async || daemon.inspector.read(|inspected| inspected.model.snapshot().ports.len()).await;
    daemon.settle().await;
    assert_eq!(services().await, Err(NoAnswer::NotSynced), "it knows of no Service");
    daemon.send_facts();
    let [listed, slices, nodes] = lists();
    for event in [listed, nodes] {
        daemon.send(event).await;
        daemon.settle().await;
        assert_eq!(services().await, Err(NoAnswer::NotSynced), "without the endpoints");
    }
    daemon.send(slices).await;
    daemon.settle().await;
    assert_eq!(services().await, Ok(1));
}

#[tokio::test(start_paused = true)]
async fn kernel_is_read_again_if_somebody_changed_it_before_the_first_sync() {
    let daemon = Daemon::start(FakeDataplane::default());
    daemon.settle().await;
    daemon.drift.notify_one();
    daemon.settle().await;
    daemon.send_facts();
    for event in lists() {
        daemon.send(event).await;
    }
    daemon.settle().await;
    let calls = daemon.calls();
    assert!(matches!(calls[..], [Call::Observe, Call::Observe, Call::Apply(_)]), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn kernel_is_read_while_the_objects_are_on_their_way() {
    let daemon = Daemon::start(FakeDataplane::default());
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::Observe]);
    daemon.send_facts();
    for event in lists() {
        daemon.send(event).await;
    }
    daemon.settle().await;
    assert!(matches!(daemon.calls()[..], [Call::Observe, Call::Apply(_)]), "{:?}", daemon.calls());
}

#[tokio::test(start_paused = true)]
async fn a_change_is_programmed_at_once_when_idle() {
    let daemon = Daemon::synced().await;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.2:80"]);
    assert_eq!(daemon.metric(r#"shunt_map_entries{map="ports"}"#), "1");
    assert_eq!(daemon.calls(), [Call::Apply(1)], "a partial sync neither observes nor touches anything else");
}

#[tokio::test(start_paused = true)]
async fn changes_under_load_are_combined() {
    let daemon = Daemon::synced().await;
    daemon.send(endpoint_is("10.0.0.2")).await;
    daemon.settle().await;
    daemon.send(endpoint_is("10.0.0.3")).await;
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.3:80"], "two changes are not yet load");
    for host in 4..100 {
        daemon.send(endpoint_is(&format!("10.0.0.{host}"))).await;
        daemon.settle().await;
    }
    assert_eq!(daemon.endpoints("a"), ["10.0.0.3:80"]);
    tokio::time::sleep(MIN_SYNC).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.99:80"]);
    assert_eq!(daemon.calls(), [Call::Apply(1); 3]);
}

#[tokio::test(start_paused = true)]
async fn events_that_change_nothing_do_not_touch_the_kernel() {
    let daemon = Daemon::synced().await;
    for event in lists() {
        daemon.send(event).await;
    }
    daemon.send_facts();
    daemon.settle().await;
    assert_eq!(daemon.calls(), []);
    assert_eq!(daemon.metric("kubeproxy_sync_proxy_rules_service_changes_pending"), "0");
}

#[tokio::test(start_paused = true)]
async fn changes_are_counted_by_objects_and_not_by_lists() {
    let daemon = Daemon::synced().await;
    let count = |kind| daemon.metric(&format!("kubeproxy_sync_proxy_rules_{kind}_changes_total"));
    assert_eq!([count("service"), count("endpoint")], ["1", "1"]);
    let services = ["a", "b", "c"].map(|name| service(name, &format!("10.96.0.{}", name.as_bytes()[0])));
    daemon.send(WatchEvent::Services(Delta::Replace(services.to_vec()))).await;
    daemon.send(WatchEvent::EndpointSlices(Delta::Replace(vec![slice("b", "10.0.0.2")]))).await;
    daemon.settle().await;
    // One Service and two new ones; one slice is new and one is gone.
    assert_eq!([count("service"), count("endpoint")], ["4", "3"]);
    daemon.send(WatchEvent::Services(Delta::Replace(services.to_vec()))).await;
    daemon.settle().await;
    assert_eq!(count("service"), "4", "the list is the same");
    daemon.send(WatchEvent::Services(Delta::Apply(services[0].clone()))).await;
    daemon.settle().await;
    assert_eq!(count("service"), "5", "a watch sends only objects that changed");
    assert_eq!(daemon.metric("shunt_watch_events_total{kind=\"Service\"}"), "4");
}

#[tokio::test(start_paused = true)]
async fn drift_is_repaired_at_sync_period() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().content.ports.clear();
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    assert_eq!(daemon.calls(), [Call::Observe, Call::Apply(1)]);
    assert_eq!(daemon.metric("shunt_sync_drift_operations_total"), "1");
    daemon.fake.kernel().calls.clear();
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.calls(), [Call::Observe], "without drift the kernel is only read");
}

#[tokio::test(start_paused = true)]
async fn reported_drift_is_repaired_before_sync_period() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().content.ports.clear();
    daemon.drift.notify_one();
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
}

#[tokio::test(start_paused = true)]
async fn reported_drift_is_read_although_the_state_seems_certain() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().is_certain = true;
    daemon.fake.kernel().content.ports.clear();
    daemon.drift.notify_one();
    daemon.settle().await;
    assert_eq!(daemon.calls(), [Call::Observe, Call::Apply(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_changes_nothing_in_the_kernel() {
    let daemon = Daemon::synced().await;
    let before = daemon.fake.kernel().content.clone();
    daemon.shutdown.cancel();
    daemon.task.await.expect("no panic").expect("an orderly end");
    assert_eq!(daemon.fake.kernel().calls, []);
    assert_eq!(daemon.fake.kernel().content, before);
}

#[tokio::test(start_paused = true)]
async fn a_new_process_continues_from_the_kernels_state() {
    let daemon = Daemon::synced().await;
    daemon.shutdown.cancel();
    daemon.task.await.expect("no panic").expect("an orderly end");
    let next = Daemon::start(daemon.fake);
    next.send_facts();
    for event in lists() {
        next.send(event).await;
    }
    next.settle().await;
    assert_eq!(next.calls(), [Call::Observe], "everything was there already");
    assert!(next.outputs.health.is_programmed());
}

#[tokio::test(start_paused = true)]
async fn the_end_of_all_sources_is_an_error() {
    let daemon = Daemon::synced().await;
    drop(daemon.events);
    assert!(matches!(daemon.task.await.expect("no panic"), Err(SyncError::SourceEnded)));
}

#[tokio::test(start_paused = true)]
async fn the_time_from_a_change_to_the_kernel_is_measured() {
    let daemon = Daemon::synced().await;
    let count = |family| {
        let name = "kubeproxy_network_programming_duration_seconds_count";
        daemon.metric(&format!("{name}{{ip_family=\"{family}\"}}"))
    };
    let before = UnixNanos(now().0 - 60_000_000_000);
    for (address, changed, expected) in [("10.0.0.2", before, "0"), ("10.0.0.3", now(), "1")] {
        let slice = EndpointSlice { last_change_trigger_time: Some(changed), ..slice("a", address) };
        daemon.send(WatchEvent::EndpointSlices(Delta::Apply(slice))).await;
        daemon.settle().await;
        assert_eq!(count("IPv4"), expected, "a change before the start does not count");
        assert_eq!(count("IPv6"), "0", "the other family has not changed");
    }
}

#[tokio::test(start_paused = true)]
async fn events_that_never_pause_do_not_keep_out_the_rest() {
    let settings = watch::Sender::new(settings(NodePortAddresses::All, None, DetectLocalMode::ClusterCidr));
    let now = settings.borrow().clone();
    let renderer = Box::new(DataplaneRenderer::new(FakeDataplane::default()));
    let outputs = Outputs::new(2 * SYNC, NodeEvents::default());
    let mut sync = SyncLoop::new(now, renderer, outputs, CancellationToken::new());
    let (facts, node_facts) = watch::channel(None);
    let (_, events) = mpsc::channel(1);
    let (drift, inspector) = (Arc::new(Notify::new()), Inspector::default());
    let requests = inspector.open();
    let mut inputs = Inputs { events, node_facts, drift, settings: settings.subscribe(), requests };
    let mut read = Box::pin(inspector.read(|_| ()));
    assert!(read.as_mut().now_or_never().is_none());
    facts.send_replace(Some(NodeFacts::default()));
    settings.send_modify(|_| {});
    inputs.drift.notify_one();
    sync.take_events(endpoint_is("10.0.0.2"), &mut inputs, &mut ()).expect("nothing is programmed");
    assert_eq!(read.now_or_never(), Some(Err(NoAnswer::NotSynced)));
    assert!(!inputs.node_facts.has_changed().expect("open"));
    assert!(!inputs.settings.has_changed().expect("open"));
    assert!(inputs.drift.notified().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_certain_dataplane_is_read_every_hour() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().is_certain = true;
    daemon.fake.kernel().content.ports.clear();
    tokio::time::sleep(10 * SYNC).await;
    assert_eq!(daemon.endpoints("a"), [""; 0]);
    tokio::time::sleep(kernel_reads::FULL_READ_PERIOD).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
}

#[tokio::test(start_paused = true)]
async fn the_state_is_read_between_two_syncs() {
    let daemon = Daemon::synced().await;
    let read = daemon.inspector.read(|inspected| {
        let ports = &inspected.model.snapshot().ports;
        ports.keys().map(|key| inspected.programmed(key).is_some()).collect::<Vec<_>>()
    });
    assert_eq!(read.await, Ok(vec![true]), "one service port, and it is programmed");
}
