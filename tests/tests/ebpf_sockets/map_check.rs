//! The thread that compares the maps with what was written, every `syncPeriod`.

use std::sync::Arc;

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{EndpointKey, EndpointValue};
use proxy_userspace::{
    dataplane::{DataplaneRenderer, Renderer as _, ebpf::Ebpf},
    model::{Dirty, Protocol, Snapshot},
};
use shunt_tests::system_calls::system_calls_of;
use tokio::sync::Notify;

use crate::bench::{Bench, key, port, soon};

/// A dataplane that checks its maps and serves this number of Services.
fn serving(bench: &mut Bench, services: u8, drift: &Arc<Notify>) -> DataplaneRenderer<Ebpf> {
    for number in 1..=services {
        let address = std::net::SocketAddr::from(([10, 96, 8, number], 80));
        let key = key(&format!("service-{number}"), Protocol::Tcp, address.ip());
        bench.snapshot.ports.insert(key, port(address, &[([10, 1, 8, number], 8080).into()]).into());
    }
    let mut dataplane = bench.dataplane.take().expect("running");
    let notified = Arc::clone(drift);
    dataplane.check_in_threads(move || notified.notify_one()).expect("a thread");
    let mut rendering = DataplaneRenderer::new(dataplane);
    rendering.render(&bench.snapshot, &Dirty::everything()).expect("served");
    rendering
}

/// Does what the sync loop does every `syncPeriod`. Returns false if the maps were read instead.
fn look(rendering: &mut DataplaneRenderer<Ebpf>, snapshot: &Snapshot) -> bool {
    rendering.observe().expect("observe");
    let node = Dirty { node: true, ..Dirty::default() };
    rendering.is_current() && rendering.render(snapshot, &node).expect("rendered") == 0
}

#[test]
fn drift_is_found_by_the_thread_and_repaired() {
    let (mut bench, drift) = (Bench::new(), Arc::new(Notify::new()));
    let mut rendering = serving(&mut bench, 2, &drift);
    for _ in 0..20 {
        assert!(look(&mut rendering, &bench.snapshot), "nothing else wrote to the maps");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let mut endpoints: HashMap<MapData, EndpointKey, EndpointValue> = bench.pinned("endpoints");
    let slot = endpoints.keys().next().expect("an entry").expect("read");
    endpoints.remove(&slot).expect("removed");
    assert!(soon(|| !look(&mut rendering, &bench.snapshot)), "an entry is missing");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(drift.notified());
    assert_eq!(rendering.render(&bench.snapshot, &Dirty::everything()).expect("repaired"), 2);
    assert!(endpoints.get(&slot, 0).is_ok());
    // A comparison from before the repair may have found the difference once more.
    let mut is_current = || {
        look(&mut rendering, &bench.snapshot)
            || rendering.render(&bench.snapshot, &Dirty::everything()).is_err()
    };
    assert!(soon(&mut is_current));
}

#[test]
fn look_costs_the_thread_of_changes_the_same_calls_at_any_size() {
    let calls = [1, 60].map(|services| {
        let (mut bench, drift) = (Bench::new(), Arc::new(Notify::new()));
        let mut rendering = serving(&mut bench, services, &drift);
        system_calls_of(|| assert!(look(&mut rendering, &bench.snapshot))).expect("strace").len()
    });
    assert_eq!(calls[0], calls[1]);
}
