//! The sync loop with the kernel's link facts, from rtnetlink to programs.

use std::{fs, sync::Arc, time::Duration};

use proxy_userspace::{
    dataplane::{DataplaneRenderer, ebpf::LinkAttachment, ipvs},
    health::{ProxyHealth, Status},
    kernel::{bpf::tc::Hook, links},
    metrics::Metrics,
    node::NodeEvents,
    sync::{Inputs, Inspector, Outputs, SyncError, SyncLoop, SyncPeriods, SyncSettings},
};
use shunt_tests::deadline::Deadline;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::bench::{Bench, HOOKS, WITHIN, attachments, in_this_kernel, no_objects, run, tc};

/// A period that is longer than any test.
const LATE: Duration = Duration::from_mins(5);
const OFTEN: Duration = Duration::from_secs(1);

/// The sync loop with a bench's dataplane.
struct Daemon {
    bench: Bench,
    metrics: Metrics,
    shutdown: CancellationToken,
    running: JoinHandle<Result<(), SyncError>>,
    // Dropping a sender of events or settings ends the loop.
    _events: mpsc::Sender<proxy_userspace::model::WatchEvent>,
    _settings: watch::Sender<SyncSettings>,
}

impl Daemon {
    fn start(attachment: LinkAttachment, sync_period: Duration) -> Self {
        let mut bench = Bench::new(attachment);
        let mut dataplane = bench.dataplane.take().expect("running");
        let disturbed = Arc::new(Notify::new());
        let notified = Arc::clone(&disturbed);
        dataplane.check_in_threads(move || notified.notify_one()).expect("threads");
        let renderer = Box::new(DataplaneRenderer::new(dataplane));
        let metrics = Metrics::default();
        let outputs = Outputs {
            metrics: metrics.clone(),
            health: ProxyHealth::new(Duration::from_mins(10)),
            health_checks: watch::Sender::default(),
            dsr_announcement: watch::Sender::default(),
            status: Status::default(),
            events: NodeEvents::default(),
        };
        let periods = SyncPeriods {
            min_sync_period: Duration::ZERO,
            sync_period,
            give_up_after: None,
            wait_for_node: false,
        };
        let settings = SyncSettings { model: bench.model_settings.clone(), periods };
        let shutdown = CancellationToken::new();
        let mut daemon = SyncLoop::new(settings.clone(), renderer, outputs, shutdown.clone());
        let (events, received) = mpsc::channel(8);
        let (facts, node_facts) = watch::channel(None);
        let settings = watch::Sender::new(settings);
        let inputs = Inputs {
            events: received,
            node_facts,
            drift: Arc::clone(&disturbed),
            settings: settings.subscribe(),
            requests: Inspector::default().open(),
        };
        let running = {
            let _inside = bench.runtime.enter();
            tokio::spawn(links::report(ipvs::DUMMY_LINK, facts, disturbed));
            tokio::spawn(async move { daemon.run(inputs, &mut ()).await })
        };
        for event in no_objects() {
            bench.runtime.block_on(events.send(event)).expect("the loop listens");
        }
        Self { bench, metrics, shutdown, running, _events: events, _settings: settings }
    }

    /// Runs the loop until a condition is true.
    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let look = || {
            self.bench.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
            is_so(self).then_some(())
        };
        assert!(Deadline::after(WITHIN).poll(look).is_some(), "not within {WITHIN:?}: {what}");
    }

    fn wait_for_programs(&self, link: &str, after: &str) {
        let runs = |daemon: &Self| HOOKS.iter().all(|hook| daemon.bench.names(link, *hook).len() == 1);
        self.wait_until(&format!("programs on {link} after {after}"), runs);
    }

    /// Creates the links `v0` and `v1`, and waits for their programs.
    fn add_veth(&self) {
        self.bench.add_veth("v0", "v1");
        self.wait_for_programs("v1", "it came");
    }

    fn metric(&self, name: &str) -> Option<u64> {
        let (_, text) = self.metrics.exposition().encode(None).expect("text");
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    fn end(self) {
        self.shutdown.cancel();
        self.bench.runtime.block_on(self.running).expect("no panic").expect("no error");
    }
}

#[test]
fn removed_programs_come_back_before_sync_period() {
    for attachment in attachments() {
        let daemon = Daemon::start(attachment, LATE);
        for _ in 0..2 {
            daemon.add_veth();
            daemon.bench.remove("v0");
        }
        if in_this_kernel(attachment) == LinkAttachment::Clsact {
            daemon.add_veth();
            tc(&["qdisc", "del", "dev", "v1", "clsact"]);
            daemon.wait_for_programs("v1", "the qdisc was removed");
            for hook in ["ingress", "egress"] {
                tc(&["filter", "del", "dev", "v1", hook]);
                daemon.wait_for_programs("v1", "all filters were removed");
            }
        }
        daemon.end();
    }
}

#[test]
fn foreign_filter_before_ours_is_behind_it_before_sync_period() {
    let daemon = Daemon::start(LinkAttachment::Clsact, LATE);
    daemon.add_veth();
    let pass_all =
        ["filter", "add", "dev", "v1", "ingress", "prio", "1", "bpf", "bytecode", "1,6 0 0 0", "da"];
    tc(&pass_all);
    let is_first = || {
        let shown = tc(&["filter", "show", "dev", "v1", "ingress"]);
        let [ours, theirs] = ["shunt_in_eth", "bytecode"].map(|text| shown.find(text));
        ours.zip(theirs).is_some_and(|(ours, theirs)| ours < theirs)
    };
    assert!(!is_first(), "the loop has not run since");
    daemon.wait_until("ours is first", |_| is_first());
    daemon.end();
}

#[test]
fn left_out_link_is_counted_and_gets_programs_when_possible() {
    let daemon = Daemon::start(LinkAttachment::Clsact, LATE);
    daemon.add_veth();
    // The loop does not run between these commands, so it sees one change and adds no clsact in
    // between.
    for command in [["del", "v1", "clsact"], ["add", "v1", "ingress"]] {
        tc(&["qdisc", command[0], "dev", command[1], command[2]]);
    }
    daemon.wait_until("one is left out", |daemon| daemon.metric("shunt_links_left_out") == Some(1));
    assert_eq!(daemon.bench.names("v0", Hook::Egress), ["shunt_out_eth"], "other links keep their programs");
    tc(&["qdisc", "del", "dev", "v1", "ingress"]);
    daemon.wait_for_programs("v1", "there is room");
    daemon.wait_until("none is left out", |daemon| daemon.metric("shunt_links_left_out") == Some(0));
    assert_eq!(daemon.metric("shunt_sync_failures_total{ip_family=\"IPv4\"}"), Some(0));
    daemon.end();
}

/// The kernel sends no notification for TCX, so the resync finds the change.
#[test]
fn removed_tcx_program_comes_back_within_sync_period() {
    let daemon = Daemon::start(LinkAttachment::Probe, OFTEN);
    daemon.add_veth();
    if in_this_kernel(LinkAttachment::Probe) == LinkAttachment::Clsact {
        assert!(
            daemon.bench.filters("v1", Hook::Ingress).len() == 1,
            "filters, as the tests above have them"
        );
        return daemon.end();
    }
    let index = daemon.bench.index("v1");
    for (hook, name) in [(Hook::Ingress, "in"), (Hook::Egress, "out")] {
        let pin = daemon.bench.settings.pin_dir.join(format!("links/shunt_{name}_{index}"));
        let repaired = || daemon.metric("shunt_sync_drift_operations_total");
        let before = repaired();
        run("bpftool", &["link", "detach", "pinned", pin.to_str().expect("text")]);
        assert_eq!(daemon.bench.names("v1", hook), [""; 0], "the loop has not run since");
        daemon.wait_for_programs("v1", "its program was detached");
        daemon.wait_until("the repair is counted", |_| repaired() > before);
        let before = repaired();
        fs::remove_file(pin).expect("pinned");
        daemon.wait_for_programs("v1", "its pin was removed");
        daemon.wait_until("the repair is counted", |_| repaired() > before);
    }
    daemon.end();
}
