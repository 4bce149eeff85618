//! The loop with the fake dataplane, in tokio's paused time: sleeping lets everything that is ready run first.

mod failures;
mod node;
mod udp;

use std::{num::NonZeroU16, sync::Arc};

use tokio::{sync::oneshot, task::JoinHandle};

use super::*;
use crate::{
    dataplane::{
        Rendering,
        conntrack::UdpFlow,
        fake::{Call, Fake},
    },
    model::{
        Delta, DetectLocalMode, EndpointSlice, InterfaceGlobs, LinkAddress, Node, Protocol, Service,
        ServiceType, TrafficPolicy, testing,
    },
};

const MILLI: Duration = Duration::from_millis(1);
const MIN_SYNC: Duration = Duration::from_secs(1);
const SYNC: Duration = Duration::from_secs(30);
const GIVE_UP: Duration = Duration::from_secs(40);

struct Daemon {
    fake: Fake,
    outputs: Outputs,
    events: mpsc::Sender<WatchEvent>,
    facts: watch::Sender<Option<NodeFacts>>,
    disturbed: Arc<Notify>,
    settings: watch::Sender<SyncSettings>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), SyncError>>,
}

impl Daemon {
    fn start(fake: Fake) -> Self {
        Self::start_giving_up(fake, Some(GIVE_UP))
    }

    fn start_giving_up(fake: Fake, give_up_after: Option<Duration>) -> Self {
        Self::start_with(fake, give_up_after, DetectLocalMode::ClusterCidr)
    }

    fn start_with(fake: Fake, give_up_after: Option<Duration>, detect_local: DetectLocalMode) -> Self {
        let outputs = Outputs {
            metrics: Metrics::default(),
            health: ProxyHealth::new(2 * SYNC),
            health_checks: watch::Sender::default(),
            events: NodeEvents::default(),
        };
        Self::start_telling(outputs, fake, give_up_after, detect_local)
    }

    fn start_telling(
        outputs: Outputs,
        fake: Fake,
        give_up_after: Option<Duration>,
        detect_local: DetectLocalMode,
    ) -> Self {
        let periods =
            SyncPeriods { min_sync_period: MIN_SYNC, sync_period: SYNC, give_up_after, wait_for_node: true };
        let settings = ModelSettings {
            node_name: "node1".into(),
            cluster_cidrs: Vec::new(),
            detect_local,
            node_port_addresses: NodePortAddresses::All,
            masquerade_all: false,
            bind_address: None,
            interfaces: InterfaceGlobs::default(),
        };
        let renderer = Box::new(Rendering::new(fake.clone()));
        let settings = watch::Sender::new(SyncSettings { model: settings, periods });
        let SyncSettings { model, periods } = settings.borrow().clone();
        let sync = SyncLoop::new(model, periods, renderer, outputs.clone());
        let (events, received) = mpsc::channel(1024);
        let (facts, node_facts) = watch::channel(None);
        let (stop, stopped) = oneshot::channel();
        let disturbed = Arc::new(Notify::new());
        let inputs = Inputs {
            events: received,
            node_facts,
            disturbed: Arc::clone(&disturbed),
            settings: settings.subscribe(),
        };
        let task = tokio::spawn(sync.run(inputs, async { stopped.await.unwrap_or_default() }));
        Self { fake, outputs, events, facts, disturbed, settings, stop, task }
    }

    /// A daemon that has programmed one Service with one endpoint.
    async fn synced() -> Self {
        Self::start(Fake::default()).programmed().await
    }

    /// The same, of one that never gives up.
    async fn keeping_on() -> Self {
        Self::start_giving_up(Fake::default(), None).programmed().await
    }

    async fn programmed(self) -> Self {
        let daemon = self;
        daemon.tell_facts();
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

    fn tell_facts(&self) {
        let address = |link: &str, address: &str, prefix_len| LinkAddress {
            link: link.into(),
            address: address.parse().unwrap(),
            prefix_len,
        };
        let addresses = vec![address("eth0", "192.0.2.1", 24), address("lo", "127.0.0.1", 8)];
        self.facts.send_replace(Some(NodeFacts { addresses, links: Vec::new() }));
    }

    async fn settle(&self) {
        tokio::time::sleep(MILLI).await;
    }

    fn calls(&self) -> Vec<Call> {
        self.fake.kernel().calls.clone()
    }

    /// The endpoints that the kernel has for a Service's port.
    fn endpoints(&self, service: &str) -> Vec<String> {
        let kernel = self.fake.kernel();
        let port = kernel.programmed.ports.iter().find(|(key, _)| *key.name.service.name == *service);
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
    let ports = vec![testing::slice_port("", Protocol::Tcp, 80)];
    EndpointSlice { ports, ..testing::slice(&name, service, vec![testing::endpoint(address)]) }
}

fn node() -> Node {
    let addresses = Vec::new();
    Node { name: Arc::from("node1"), zone: None, pod_cidrs: Vec::new(), addresses, being_deleted: false }
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
async fn nothing_is_programmed_before_all_kinds_are_listed_and_addresses_are_known() {
    let daemon = Daemon::start(Fake::default());
    for event in lists() {
        daemon.send(event).await;
        daemon.settle().await;
    }
    tokio::time::sleep(3 * SYNC).await;
    assert_eq!(daemon.calls(), []);
    assert!(!daemon.outputs.health.is_programmed() && daemon.outputs.health.is_live());
    daemon.tell_facts();
    daemon.settle().await;
    assert!(matches!(daemon.calls()[..], [Call::Observe, Call::Apply(_)]), "{:?}", daemon.calls());
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    assert!(daemon.outputs.health.is_programmed());
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
async fn changes_under_load_are_taken_together() {
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
    daemon.tell_facts();
    daemon.settle().await;
    assert_eq!(daemon.calls(), []);
    assert_eq!(daemon.metric("kubeproxy_sync_proxy_rules_service_changes_pending"), "0");
}

#[tokio::test(start_paused = true)]
async fn drift_is_repaired_at_sync_period() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().programmed.ports.clear();
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
    assert_eq!(daemon.calls(), [Call::Observe, Call::Apply(1)]);
    assert_eq!(daemon.metric("shunt_sync_drift_operations_total"), "1");
    daemon.fake.kernel().calls.clear();
    tokio::time::sleep(SYNC).await;
    assert_eq!(daemon.calls(), [Call::Observe], "without drift the kernel is only read");
}

#[tokio::test(start_paused = true)]
async fn what_somebody_else_removed_is_put_back_long_before_sync_period() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().programmed.ports.clear();
    daemon.disturbed.notify_one();
    daemon.settle().await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
}

#[tokio::test(start_paused = true)]
async fn shutting_down_leaves_the_kernel_as_it_is() {
    let daemon = Daemon::synced().await;
    let before = daemon.fake.kernel().programmed.clone();
    daemon.stop.send(()).unwrap();
    daemon.task.await.expect("no panic").expect("an orderly end");
    assert_eq!(daemon.fake.kernel().calls, []);
    assert_eq!(daemon.fake.kernel().programmed, before);
}

#[tokio::test(start_paused = true)]
async fn a_new_process_takes_over_what_the_last_one_left() {
    let daemon = Daemon::synced().await;
    daemon.stop.send(()).unwrap();
    daemon.task.await.expect("no panic").expect("an orderly end");
    let next = Daemon::start(daemon.fake);
    next.tell_facts();
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
    let mut slice = slice("a", "10.0.0.2");
    let nanos = u64::try_from(unix_now().saturating_sub(Duration::from_secs(3)).as_nanos()).unwrap();
    slice.last_change_trigger_time = Some(UnixNanos(nanos));
    daemon.send(WatchEvent::EndpointSlices(Delta::Apply(slice))).await;
    daemon.settle().await;
    let bucket = |le| {
        daemon.metric(&format!(
            r#"kubeproxy_network_programming_duration_seconds_bucket{{le="{le}",ip_family="IPv4"}}"#
        ))
    };
    assert_eq!((bucket("2"), bucket("+Inf")), ("0".into(), "1".into()));
}

#[tokio::test(start_paused = true)]
async fn a_dataplane_that_seems_certain_is_read_anew_every_hour() {
    let daemon = Daemon::synced().await;
    daemon.fake.kernel().certain = true;
    daemon.fake.kernel().programmed.ports.clear();
    tokio::time::sleep(10 * SYNC).await;
    assert_eq!(daemon.endpoints("a"), [""; 0]);
    tokio::time::sleep(WHOLE_READING).await;
    assert_eq!(daemon.endpoints("a"), ["10.0.0.1:80"]);
}
