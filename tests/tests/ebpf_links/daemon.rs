//! The whole way from rtnetlink to programs: the loop, with facts as the kernel reports them.

use std::{sync::Arc, time::Duration};

use proxy_userspace::{
    dataplane::{Rendering, ebpf::LinkAttachment},
    health::ProxyHealth,
    kernel::{bpf::tc::Hook, links},
    metrics::Metrics,
    sync::{Inputs, Outputs, SyncLoop, SyncPeriods, SyncSettings},
};
use shunt_tests::deadline::Deadline;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::bench::{ATTACHMENTS, Bench, WITHIN, in_this_kernel, no_objects, tc};

/// Lets the loop run until this is so.
fn wait_until(bench: &Bench, what: &str, is_so: impl Fn(&Bench) -> bool) {
    let look = || {
        bench.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
        is_so(bench).then_some(())
    };
    assert!(Deadline::after(WITHIN).poll(look).is_some(), "not within {WITHIN:?}: {what}");
}

#[test]
fn a_running_proxy_follows_links_and_puts_back_what_is_removed_long_before_sync_period() {
    for attachment in ATTACHMENTS {
        let mut bench = Bench::new(attachment);
        let renderer = Box::new(Rendering::new(bench.dataplane.take().expect("running")));
        let outputs = Outputs {
            metrics: Metrics::default(),
            health: ProxyHealth::new(Duration::from_mins(10)),
            health_checks: watch::Sender::default(),
            events: proxy_userspace::node::NodeEvents::default(),
        };
        let periods = SyncPeriods {
            min_sync_period: Duration::ZERO,
            sync_period: Duration::from_mins(5),
            give_up_after: None,
            wait_for_node: false,
        };
        let daemon = SyncLoop::new(bench.model_settings.clone(), periods, renderer, outputs);
        let (events, received) = mpsc::channel(8);
        let (facts, node_facts) = watch::channel(None);
        let (stop, stopped) = oneshot::channel::<()>();
        let disturbed = Arc::new(Notify::new());
        let settings = watch::Sender::new(SyncSettings { model: bench.model_settings.clone(), periods });
        let settings = settings.subscribe();
        let inputs = Inputs { events: received, node_facts, disturbed: Arc::clone(&disturbed), settings };
        let running = {
            let _inside = bench.runtime.enter();
            tokio::spawn(links::report(facts, disturbed));
            tokio::spawn(daemon.run(inputs, async { stopped.await.unwrap_or_default() }))
        };
        for event in no_objects() {
            bench.runtime.block_on(events.send(event)).expect("the loop listens");
        }
        let runs = |bench: &Bench| bench.names("v1", Hook::Ingress) == ["shunt_in_eth"];
        for _ in 0..2 {
            bench.add_veth("v0", "v1");
            wait_until(&bench, "programs on a new link", runs);
            bench.remove("v0");
        }
        if in_this_kernel(attachment) == LinkAttachment::Clsact {
            bench.add_veth("v0", "v1");
            wait_until(&bench, "programs on a new link", runs);
            tc(&["qdisc", "del", "dev", "v1", "clsact"]);
            wait_until(&bench, "programs after the qdisc was removed", runs);
            tc(&["filter", "del", "dev", "v1", "ingress"]);
            wait_until(&bench, "programs after all filters were removed", runs);
        }
        stop.send(()).expect("the loop runs");
        bench.runtime.block_on(running).expect("no panic").expect("no error");
    }
}
