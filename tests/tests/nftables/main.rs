//! The nftables mode when other programs change its table: removed objects come back at once, and
//! its own changes are not taken for foreign ones. Needs root; uses network namespaces of its own.

mod leftovers;

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::sched::{CloneFlags, setns, unshare};
use proxy_userspace::{
    dataplane::{
        Dataplane, DataplaneRenderer, FailureScope, MetricValue,
        nftables::{Nftables, NftablesError, NftablesSettings, Plan, State, TABLE},
    },
    health::{ProxyHealth, Status},
    kernel::{
        nftables::Change,
        ruleset_changes::{TableChangeFlag, TableChanges},
    },
    metrics::Metrics,
    model::{Dirty, IpFamily, ModelSettings, NodeFacts, Snapshot},
    sync::{Inputs, Inspector, Outputs, SyncLoop, SyncPeriods, SyncSettings},
    watch::ManifestSource,
};
use shunt_tests::{deadline::Deadline, process::run_with_timeout};
use tempfile::TempDir;
use tokio::{
    runtime::Runtime,
    sync::{Notify, mpsc, watch},
};
use tokio_util::sync::CancellationToken;

const WITHIN: Duration = Duration::from_secs(20);
const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {type: ClusterIP, clusterIP: 10.96.0.80, clusterIPs: [10.96.0.80], ports: [{port: 80, protocol: TCP}]}
";

/// A network namespace for the calling thread, which returns to its old one on drop.
struct Namespace {
    home: File,
}

impl Namespace {
    fn enter() -> Self {
        let home = File::open("/proc/thread-self/ns/net").expect("procfs");
        unshare(CloneFlags::CLONE_NEWNET).expect("root may make network namespaces");
        Self { home }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _home_again = setns(&self.home, CloneFlags::CLONE_NEWNET);
    }
}

/// The dataplane, with a count of its observations of the kernel.
struct Counted {
    inner: Nftables,
    observed: Arc<AtomicUsize>,
}

impl Dataplane for Counted {
    type State = State;
    type Plan = Plan;
    type Error = NftablesError;

    fn observe(&mut self) -> Result<State, NftablesError> {
        self.observed.fetch_add(1, Ordering::SeqCst);
        self.inner.observe()
    }

    fn is_certain(&mut self, state: &State) -> bool {
        self.inner.is_certain(state)
    }

    fn plan(state: &State, snapshot: &Snapshot, dirty: &Dirty) -> Plan {
        Nftables::plan(state, snapshot, dirty)
    }

    fn apply(&mut self, state: &mut State, plan: Plan) -> Result<(), NftablesError> {
        self.inner.apply(state, plan)
    }

    fn cleanup(&mut self) -> Vec<NftablesError> {
        self.inner.cleanup()
    }
}

/// A running proxy, with manifests to change.
struct Daemon {
    manifests: TempDir,
    disturbed: Arc<Notify>,
    observed: Arc<AtomicUsize>,
    shutdown: CancellationToken,
    running: tokio::task::JoinHandle<()>,
    runtime: Runtime,
    _namespace: Namespace,
}

impl Daemon {
    fn start() -> Self {
        Self::start_in(Namespace::enter())
    }

    fn start_in(namespace: Namespace) -> Self {
        let manifests = TempDir::new().expect("a directory");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let touched = Arc::new(TableChangeFlag::default());
        let dataplane = Nftables::new(&NftablesSettings { masquerade: 1 << 14 }, Arc::clone(&touched))
            .expect("nf_tables");
        let disturbed = Arc::new(Notify::new());
        let (to_loop, events) = mpsc::channel(64);
        let (facts, node_facts) = watch::channel(Some(NodeFacts::default()));
        let shutdown = CancellationToken::new();
        let observed = Arc::new(AtomicUsize::new(0));
        let port = dataplane.port();
        let renderer =
            Box::new(DataplaneRenderer::new(Counted { inner: dataplane, observed: Arc::clone(&observed) }));
        let outputs = Outputs {
            metrics: Metrics::default(),
            health: ProxyHealth::new(Duration::from_mins(10)),
            health_checks: watch::Sender::default(),
            dsr_announcement: watch::Sender::default(),
            status: Status::default(),
            events: proxy_userspace::node::NodeEvents::default(),
        };
        let periods = SyncPeriods {
            min_sync_period: Duration::ZERO,
            sync_period: Duration::from_hours(1),
            give_up_after: None,
            wait_for_node: false,
        };
        let settings = SyncSettings { model: settings(), periods };
        let mut daemon = SyncLoop::new(settings.clone(), renderer, outputs, shutdown.clone());
        let (_, settings) = watch::channel(settings);
        let inputs = Inputs {
            events,
            node_facts,
            drift: Arc::clone(&disturbed),
            settings,
            requests: Inspector::default().open(),
        };
        std::fs::write(manifests.path().join("service.yaml"), SERVICE).expect("written");
        let running = {
            let _inside = runtime.enter();
            let changes = TableChanges::open(TABLE, port, touched).expect("notices");
            tokio::spawn(changes.report(Arc::clone(&disturbed)));
            tokio::spawn(ManifestSource::new(manifests.path()).run(to_loop));
            tokio::spawn(async move {
                daemon.run(inputs, &mut ()).await.expect("the loop runs");
                drop(facts);
            })
        };
        Self { manifests, disturbed, observed, shutdown, running, runtime, _namespace: namespace }
    }

    /// Runs the loop until a condition is true.
    fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let deadline = Deadline::after(WITHIN);
        let reached = deadline.poll(|| {
            self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
            is_so().then_some(())
        });
        assert!(reached.is_some(), "not within {WITHIN:?}: {what}");
    }

    fn set_endpoint(&self, address: &str) {
        let slice = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-1, namespace: default, labels: \
             {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nendpoints: [{{addresses: ['{address}'], conditions: \
             {{ready: true}}}}]\nports: [{{name: '', port: 8080, protocol: TCP}}]\n"
        );
        let written = self.manifests.path().join("slice.tmp");
        std::fs::write(&written, slice).expect("written");
        std::fs::rename(written, self.manifests.path().join("slice.yaml")).expect("renamed");
    }

    fn stop(self) {
        self.shutdown.cancel();
        self.runtime.block_on(self.running).expect("no panic");
    }
}

fn settings() -> ModelSettings {
    ModelSettings { node_name: "node1".into(), loopback_node_ports: true, ..ModelSettings::default() }
}

/// Returns the output of nft, or an empty text if it fails.
fn nft(arguments: &[&str]) -> String {
    run_with_timeout(Path::new("nft"), arguments, WITHIN)
        .map_or_else(|_| String::new(), |finished| finished.stdout)
}

fn leads_to(endpoint: &str) -> bool {
    nft(&["list", "map", "ip", TABLE, "service-endpoints"])
        .contains(&format!("10.96.0.80 . tcp . 80 . 0 : {endpoint}"))
}

fn listing() -> String {
    nft(&["list", "ruleset"])
}

#[test]
fn removed_objects_come_back_before_sync_period() {
    let daemon = Daemon::start();
    daemon.set_endpoint("10.244.1.1");
    daemon.wait_until("the endpoint is served", || leads_to("10.244.1.1 . 8080"));
    let whole = listing();
    let damages: [&[&str]; 7] = [
        &["delete", "table", "ip", TABLE],
        &["delete", "table", "ip6", TABLE],
        &["flush", "ruleset"],
        &["flush", "chain", "ip", TABLE, "services"],
        &["flush", "chain", "ip", TABLE, "endpoints"],
        &["delete", "element", "ip", TABLE, "service-ips-1", "{ 10.96.0.80 . tcp . 80 }"],
        &["add", "element", "ip", TABLE, "cluster-ips", "{ 10.96.0.99 }"],
    ];
    for damage in damages {
        nft(damage);
        assert_ne!(listing(), whole, "{damage:?} changes nothing");
        daemon.wait_until(&format!("repaired after {damage:?}"), || same(&listing(), &whole));
    }
    daemon.stop();
}

/// A table of kube-proxy with a Service that no longer exists, and the sets that it needs.
const KUBE_PROXYS: &str = "
table ip kube-proxy {
    comment \"rules for kube-proxy\"
    set cluster-ips { type ipv4_addr; comment \"Active ClusterIPs\"; elements = { 10.96.0.81 }; }
    map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
    set affinity-43MH3RY4-default/af/tcp/__10.244.1.12/8080 {
        type ipv4_addr; size 65535; flags dynamic,timeout; timeout 3h
    }
    chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
    chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
    chain endpoint-43MH3RY4-default/af/tcp/__10.244.1.12/8080 {
        update @affinity-43MH3RY4-default/af/tcp/__10.244.1.12/8080 { ip saddr }
        meta l4proto tcp dnat to 10.244.1.12:8080
    }
    chain service-UEU3GDQ7-default/af/tcp/ {
        ip saddr @affinity-43MH3RY4-default/af/tcp/__10.244.1.12/8080 goto endpoint-43MH3RY4-default/af/tcp/__10.244.1.12/8080
        numgen random mod 1 vmap { 0 : goto endpoint-43MH3RY4-default/af/tcp/__10.244.1.12/8080 }
    }
    chain external-UEU3GDQ7-default/af/tcp/ {
        meta mark set meta mark | 0x00004000 comment \"masquerade\"
        goto service-UEU3GDQ7-default/af/tcp/
    }
}
add element ip kube-proxy service-ips { 10.96.0.81 . tcp . 80 : goto service-UEU3GDQ7-default/af/tcp/ }
";

#[test]
fn kube_proxys_table_is_taken_over_and_unused_objects_are_removed() {
    let namespace = Namespace::enter();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), KUBE_PROXYS).expect("written");
    nft(&["-f", &file.path().display().to_string()]);
    assert!(listing().contains("__10.244.1.12/8080"), "nft takes it");
    let daemon = Daemon::start_in(namespace);
    daemon.set_endpoint("10.244.1.1");
    daemon.wait_until("the endpoint is served", || leads_to("10.244.1.1 . 8080"));
    let left = listing();
    assert!(
        !left.contains("UEU3GDQ7") && !left.contains("43MH3RY4") && !left.contains("10.96.0.81"),
        "{left}"
    );
    daemon.stop();
}

/// Compares two listings. nft lists chains and sets in the order of their creation.
fn same(listing: &str, other: &str) -> bool {
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    sorted(listing) == sorted(other)
}

#[test]
fn own_changes_are_not_foreign_and_cause_no_observation() {
    let daemon = Daemon::start();
    for number in 1..=20 {
        let endpoint = format!("10.244.1.{number}");
        daemon.set_endpoint(&endpoint);
        daemon.wait_until("the endpoint is served", || leads_to(&format!("{endpoint} . 8080")));
        daemon.disturbed.notify_one();
    }
    nft(&["add", "table", "ip", "other"]);
    nft(&["delete", "table", "ip", "other"]);
    assert_eq!(daemon.observed.load(Ordering::SeqCst), 1, "the kernel was read again");
    nft(&["delete", "table", "ip", TABLE]);
    daemon.wait_until("the table is back", || leads_to("10.244.1.20 . 8080"));
    assert_eq!(daemon.observed.load(Ordering::SeqCst), 2);
    daemon.stop();
}

#[test]
fn unknown_map_is_removed_with_the_chain_to_which_it_leads() {
    let namespace = Namespace::enter();
    nft(&["add", "table", "ip", TABLE]);
    nft(&["add", "chain", "ip", TABLE, "theirs"]);
    let map = "{ type ipv4_addr : verdict; elements = { 10.1.1.1 : goto theirs }; }";
    nft(&["add", "map", "ip", TABLE, "their-map", map]);
    assert!(listing().contains("goto theirs"), "nft takes it");
    let daemon = Daemon::start_in(namespace);
    daemon.set_endpoint("10.244.1.1");
    daemon.wait_until("the endpoint is served", || leads_to("10.244.1.1 . 8080"));
    assert!(!listing().contains("their"), "{}", listing());
    assert_eq!(daemon.observed.load(Ordering::SeqCst), 1, "the kernel accepts the first plan");
    daemon.stop();
}

/// A table of the same name with sets of another shape, or with the hooks of kube-proxy 1.33, is
/// replaced in one transaction: a listing always shows the old or the new one.
#[test]
fn table_with_other_sets_or_hooks_is_replaced_at_once() {
    for theirs in [
        "set cluster-ips { type inet_service; elements = { 80 }; }",
        "chain filter-output { type filter hook output priority -110; }",
    ] {
        let namespace = Namespace::enter();
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), format!("table ip {TABLE} {{ {theirs}; chain theirs {{ }}; }}"))
            .expect("written");
        nft(&["-f", &file.path().display().to_string()]);
        let whose =
            |listing: &str| (listing.contains("chain theirs"), listing.contains("chain nat-prerouting"));
        assert_eq!(whose(&nft(&["list", "table", "ip", TABLE])), (true, false), "{theirs}");
        let daemon = Daemon::start_in(namespace);
        daemon.set_endpoint("10.244.1.1");
        daemon.wait_until("the endpoint is served", || {
            let (is_theirs, is_ours) = whose(&nft(&["list", "table", "ip", TABLE]));
            assert!(is_theirs != is_ours, "theirs {is_theirs}, ours {is_ours}");
            leads_to("10.244.1.1 . 8080")
        });
        let output = nft(&["list", "chain", "ip", TABLE, "filter-output"]);
        assert!(output.contains("hook output priority filter;"), "{output}");
        daemon.stop();
    }
}

#[test]
fn table_of_an_earlier_process_is_kept() {
    let _namespace = Namespace::enter();
    let settings = NftablesSettings { masquerade: 1 << 14 };
    let plan_of_new_process = || {
        let mut dataplane = Nftables::new(&settings, Arc::default()).expect("nf_tables");
        let state = dataplane.observe().expect("the tables can be read");
        let plan = Nftables::plan(&state, &Snapshot::default(), &Dirty::everything());
        (dataplane, state, plan)
    };
    let (mut dataplane, mut state, plan) = plan_of_new_process();
    dataplane.apply(&mut state, plan).expect("the kernel accepts it");
    let (_, _, plan) = plan_of_new_process();
    let mut changes = plan.transactions.iter().flatten();
    assert!(
        changes.all(|(_, change)| matches!(change, Change::FlushChain(_) | Change::AddRule(..))),
        "{plan}"
    );
}

/// shunt does not see the element for all other destinations, and cannot delete the chain to which
/// it leads.
#[test]
fn table_with_a_hidden_element_in_the_way_is_written_again() {
    let namespace = Namespace::enter();
    let file = tempfile::NamedTempFile::new().expect("a file");
    let hidden = format!("{KUBE_PROXYS}\nadd element ip {TABLE} service-ips {{ * : goto theirs }}");
    let hidden = hidden.replace("chain nat-prerouting", "chain theirs { }\n chain nat-prerouting");
    std::fs::write(file.path(), hidden).expect("written");
    nft(&["-f", &file.path().display().to_string()]);
    assert!(listing().contains("* : goto theirs"), "nft takes it: {}", listing());
    let daemon = Daemon::start_in(namespace);
    daemon.set_endpoint("10.244.1.1");
    daemon.wait_until("nothing is in the way", || !listing().contains("theirs"));
    let observed = daemon.observed.load(Ordering::SeqCst);
    assert!(observed >= 3, "the kernel refused two plans, of {observed}");
    daemon.wait_until("the endpoint is served", || leads_to("10.244.1.1 . 8080"));
    daemon.set_endpoint("10.244.1.2");
    daemon.wait_until("changes are accepted", || leads_to("10.244.1.2 . 8080"));
    daemon.stop();
}

#[test]
fn transaction_refused_in_one_family_is_made_in_the_other() {
    let _namespace = Namespace::enter();
    let settings = NftablesSettings { masquerade: 1 << 14 };
    let mut dataplane = Nftables::new(&settings, Arc::default()).expect("nf_tables");
    let mut state = dataplane.observe().expect("the tables can be read");
    let snapshot = Snapshot::default();
    let mut plan = Nftables::plan(&state, &snapshot, &Dirty::everything());
    let transaction = plan.transactions.first_mut().expect("there is nothing yet");
    assert!(IpFamily::ALL.iter().all(|of| transaction.iter().any(|(family, _)| family == of)));
    // The table does not exist any more at the second deletion.
    transaction.extend([(IpFamily::V6, Change::DeleteTable), (IpFamily::V6, Change::DeleteTable)]);
    let refused = dataplane.apply(&mut state, plan).expect_err("a table can be deleted once");
    assert_eq!(Nftables::failure_scope(&refused), FailureScope::Family(IpFamily::V6), "{refused}");
    let metrics = dataplane.mode_metrics().expect("failures are counted")();
    let failures: Vec<_> = metrics.iter().map(|one| (one.name, one.labels[0].1, one.value)).collect();
    let failed =
        |family, times| ("sync_proxy_rules_nftables_sync_failures", family, MetricValue::Counter(times));
    assert_eq!(failures, [failed("IPv4", 0), failed("IPv6", 1)]);
    assert_eq!(nft(&["list", "tables"]).trim(), format!("table ip {TABLE}"));
    assert!(!dataplane.is_certain(&state), "what there is of IPv6 has to be read");
    let mut state = dataplane.observe().expect("the tables can be read");
    let plan = Nftables::plan(&state, &snapshot, &Dirty::everything());
    dataplane.apply(&mut state, plan).expect("both families accept it");
    assert!(nft(&["list", "tables"]).contains(&format!("table ip6 {TABLE}")));
}
