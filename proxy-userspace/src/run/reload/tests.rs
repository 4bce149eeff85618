//! Files that change while shunt runs, and what is applied of them.

use std::{fs, path::PathBuf};

use nix::sys::signal::{Signal, raise};
use proxy_userspace::{dataplane::Mode, health::NodeReport, kernel::command::Launcher, node::NodeEvent};
use tokio::{
    sync::{Mutex, mpsc},
    time::timeout,
};

use super::*;

const MINUTE: Duration = Duration::from_mins(1);

/// A SIGHUP of one test would be one of the others too.
static TURN: Mutex<()> = Mutex::const_new(());

/// A reload of a file in the mode nftables, whose settings need no restart.
struct Node {
    path: PathBuf,
    reload: Reload,
    outputs: Outputs,
    events: mpsc::Receiver<NodeEvent>,
    _directory: tempfile::TempDir,
}

impl Node {
    /// Objects come from a directory, with which a restart works.
    fn new() -> Self {
        Self::with_flag("--manifests=/")
    }

    fn with_flag(flag: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("config.yaml");
        write(&path, "");
        let arguments = ["shunt", "--hostname-override=n1", flag, &format!("--config={}", path.display())];
        let flags = Flags::parse(arguments).expect("valid flags");
        let choice =
            ModeChoice::new(flags, Environment::of_this_process(), Launcher::default()).expect("valid");
        let (events, received) = NodeEvents::channel();
        let outputs = Outputs::new(MINUTE, events);
        let reload = Reload::new(&choice, Arc::new(|_| {}), &outputs).expect("valid");
        Self { path, reload, outputs, events: received, _directory: directory }
    }

    /// Writes the file and watches it for this time.
    async fn change(&mut self, settings: &str, time: Duration) -> Option<ReloadAction> {
        write(&self.path, settings);
        self.pass(time).await
    }

    async fn pass(&mut self, time: Duration) -> Option<ReloadAction> {
        timeout(time, self.reload.watch()).await.ok()
    }

    fn sync_period(&self) -> u64 {
        self.reload.config.sync_period.as_secs()
    }

    fn is_refused(&self) -> bool {
        let (_, text) = self.outputs.metrics.exposition().encode(None).expect("text");
        text.contains("shunt_configuration_refused 1\n")
    }

    /// Returns the refusal that `shunt doctor` gets.
    fn refusal(&self) -> Option<String> {
        let report = NodeReport::new(&self.outputs.status, &self.outputs.health, String::new());
        report.configuration_refused
    }

    fn event(&mut self) -> Option<(&'static str, String)> {
        self.events.try_recv().ok().map(|event| (event.reason, event.note))
    }
}

fn write(path: &PathBuf, settings: &str) {
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let mode = if settings.starts_with("mode:") { "" } else { "mode: nftables\n" };
    fs::write(path, format!("{head}{mode}{settings}")).expect("written");
}

#[tokio::test(start_paused = true)]
async fn a_refused_file_is_an_event_and_a_metric_until_it_is_corrected() {
    let _turn = TURN.lock().await;
    let mut node = Node::new();
    assert!(!node.is_refused());
    assert_eq!(node.change("nftables: {syncPeriod: often}\n", MINUTE).await, None);
    assert!(node.is_refused());
    let (reason, text) = node.event().expect("an Event");
    assert!(reason == "ConfigurationRefused" && text.contains("nftables.syncPeriod"), "{text}");
    assert_eq!(node.pass(10 * MINUTE).await, None);
    assert_eq!(node.event(), None, "one Event");
    node.outputs.status.set_mode(Mode::Iptables, "another mode broke");
    assert!(node.refusal().is_some_and(|error| error.contains("nftables.syncPeriod")), "in each mode");
    assert_eq!(node.change("nftables: {syncPeriod: 7s}\n", MINUTE).await, None);
    assert_eq!((node.is_refused(), node.refusal(), node.sync_period()), (false, None, 7));
    assert_eq!(node.event().map(|(reason, _)| reason), Some("ConfigurationAccepted"));
    fs::remove_file(&node.path).expect("removed");
    assert_eq!(node.pass(MINUTE).await, None);
    assert!(node.is_refused());
    assert_eq!(node.change("nftables: {syncPeriod: 7s}\n", MINUTE).await, None);
    assert!(!node.is_refused(), "the same text is readable again");
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_applied_within_the_jitter_and_the_newest_counts() {
    // A delay below three seconds would be too short for the test.
    fastrand::seed(7);
    let _turn = TURN.lock().await;
    let mut node = Node::new();
    let with_period =
        |period: u8| format!("nftables: {{syncPeriod: {period}s}}\nshunt: {{reload: {{jitter: 1h}}}}\n");
    // A new file has another delay, but at most that of the one before.
    let mut was_deferred = false;
    for period in 1..=8 {
        node.change(&with_period(period), Duration::from_secs(30)).await;
        was_deferred |= node.sync_period() != u64::from(period);
    }
    assert!(was_deferred);
    node.pass(60 * MINUTE).await;
    assert_eq!(node.sync_period(), 8);
    // A refused file cancels what waits: it is newer.
    node.change(&with_period(9), Duration::from_secs(3)).await;
    node.change("mode: what\n", 90 * MINUTE).await;
    assert_eq!((node.is_refused(), node.sync_period()), (true, 8));
    // A setting that needs a restart waits, too.
    let restart = format!("clusterCIDR: 10.0.0.0/8\n{}", with_period(8));
    assert_eq!(node.change(&restart, 61 * MINUTE).await, Some(ReloadAction::Restart));
}

/// Files that are right by themselves, and what a start with them would report.
const UNSTARTABLE: [(&str, &str); 7] = [
    ("clientConnection: {kubeconfig: /nonexistent}\n", "cannot use kubeconfig /nonexistent"),
    ("shunt: {manifests: /nonexistent}\n", "cannot read manifests directory /nonexistent"),
    (
        "mode: ebpf\nshunt: {manifests: /, ebpf: {cgroupRoot: /proc}}\n",
        "--cgroup-root /proc is not a directory of a cgroup2 filesystem",
    ),
    (
        "mode: ebpf\nshunt: {manifests: /, ebpf: {pinDir: /proc/pins}}\n",
        "/proc/pins is not on a bpf filesystem",
    ),
    (
        "bindAddressHardFail: true\nmetricsBindAddress: 192.0.2.1:10249\nshunt: {manifests: /}\n",
        "cannot listen on 192.0.2.1:10249 for metrics: Cannot assign requested address",
    ),
    (
        "bindAddressHardFail: true\nmetricsBindAddress: 127.0.0.1:3\nhealthzBindAddress: 127.0.0.1:3\nshunt: {manifests: /}\n",
        "cannot listen on 127.0.0.1:3 for metrics: Address already in use",
    ),
    (
        "bindAddressHardFail: true\nmetricsBindAddress: 127.0.0.1:10256\nhealthzBindAddress: 127.0.0.1:10256\nshunt: {manifests: /}\n",
        "cannot listen on 127.0.0.1:10256 for metrics: Address already in use",
    ),
];

#[tokio::test(start_paused = true)]
async fn a_file_with_which_a_start_would_fail_is_refused_until_it_can_be_used() {
    let _turn = TURN.lock().await;
    for (settings, problem) in UNSTARTABLE {
        let mut node = Node::with_flag("--v=2");
        assert_eq!(node.change(settings, MINUTE).await, None, "{settings}");
        let (reason, text) = node.event().expect("an Event");
        assert!(reason == "ConfigurationRefused" && text.contains(problem), "{settings}: {text}");
        assert!(node.is_refused());
    }
    let mut node = Node::with_flag("--v=2");
    let manifests = tempfile::tempdir().expect("a directory");
    let later = manifests.path().join("later");
    let settings = format!("shunt: {{manifests: {}}}\n", later.display());
    assert_eq!(node.change(&settings, 10 * MINUTE).await, None);
    assert!(node.is_refused());
    assert_eq!((node.event().is_some(), node.event()), (true, None), "one Event");
    fs::create_dir(later).expect("created");
    assert_eq!(node.pass(2 * MINUTE).await, Some(ReloadAction::Restart), "it is tried again");
    assert!(!node.is_refused());
}

#[tokio::test(start_paused = true)]
async fn a_hangup_reads_the_file_again_at_once_and_ends_no_process() {
    let _turn = TURN.lock().await;
    let mut node = Node::new();
    node.change("nftables: {syncPeriod: 7s}\nshunt: {reload: {jitter: 1000h}}\n", MINUTE).await;
    assert_ne!(node.sync_period(), 7, "it waits");
    raise(Signal::SIGHUP).expect("raised");
    node.pass(MINUTE).await;
    assert_eq!(node.sync_period(), 7);
    let settings = "shunt: {manifests: /nonexistent}\nclusterCIDR: 10.0.0.0/8\n";
    let mut node = Node::with_flag("--v=2");
    node.change(settings, MINUTE).await;
    assert!(node.is_refused());
    raise(Signal::SIGHUP).expect("raised");
    assert_eq!(node.pass(MINUTE).await, None);
    assert!(node.is_refused(), "the same problem as before");
}
