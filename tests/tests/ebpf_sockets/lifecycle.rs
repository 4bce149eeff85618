//! Restarts, changed map sizes, full maps, and how much a change writes.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aya::maps::{HashMap, MapData};
use proxy_common::layout::{NodeValue, ServiceKey, ServiceValue};
use proxy_userspace::{
    dataplane::{
        Dataplane as _, DataplaneRenderer, FailureScope, LeftOutPort, LeftOutReason, PlanSize as _,
        Renderer as _,
        ebpf::{Ebpf, MapEntry, Step},
    },
    kernel::netns,
    model::{Dirty, Frontend, Protocol},
};
use shunt_tests::deadline::slowdown;

use crate::bench::{Bench, key, port, soon, tcp_server};

#[test]
fn restart_writes_nothing_and_connections_continue() {
    let mut bench = Bench::new();
    let (server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.6:80", &[endpoint]);
    let mut before = TcpStream::connect(vip).expect("connect");
    let programs = bench.program_ids();
    bench.dataplane = None;
    TcpStream::connect(vip).expect("works while no proxy runs");
    bench.restart();
    assert_eq!(bench.sync(&Dirty::everything()), 1, "only the programs are attached");
    assert_eq!(bench.program_ids(), programs, "they are used again");
    let after = TcpStream::connect(vip).expect("connect");
    assert_eq!(before.peer_addr().expect("peer"), after.peer_addr().expect("peer"));
    let (mut accepted, _) = server.accept().expect("accept");
    accepted.write_all(b"x").expect("answer");
    before.read_exact(&mut [0]).expect("an established connection lives on");
}

#[test]
fn programs_for_links_are_loaded_when_they_are_needed() {
    let mut bench = Bench::new();
    let of_links = |bench: &Bench| {
        let names = bench.programs().into_keys();
        names.filter(|name| name.contains("_in_") || name.contains("_out_")).collect::<Vec<_>>()
    };
    assert_eq!(of_links(&bench), Vec::<String>::new());
    bench.dataplane().load_link_programs().expect("load");
    assert_eq!(of_links(&bench), ["shunt_in_eth", "shunt_out_eth"], "no link lacks the Ethernet header");
}

#[test]
fn process_with_other_map_sizes_builds_new_maps_and_swaps_them() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.7:80", &[endpoint]);
    bench.settings.map_sizes.services = 128;
    bench.restart();
    TcpStream::connect(vip).expect("the old maps serve until the new ones are full");
    assert!(bench.sync(&Dirty::everything()) > 1);
    TcpStream::connect(vip).expect("the new ones serve");
    bench.restart();
    assert_eq!(bench.sync(&Dirty::everything()), 1, "they are pinned in place now");
}

#[test]
fn full_map_is_reported_with_the_service_and_others_work() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.1.0:80", &[endpoint]);
    for last in 1..=100u8 {
        let address = SocketAddr::from(([10, 96, 2, last], 80));
        let key = key(&format!("many-{last}"), Protocol::Tcp, address.ip());
        bench.snapshot.ports.insert(key, Arc::new(port(address, &[endpoint])));
    }
    let plan = Ebpf::plan(&bench.state, &bench.snapshot, &Dirty::everything());
    let Bench { dataplane, state, .. } = &mut bench;
    let error = dataplane.as_mut().expect("running").apply(state, plan).expect_err("64 fit");
    let message = error.to_string();
    assert!(message.contains("map services is full") && message.contains("test/many-"), "{message}");
    TcpStream::connect(vip).expect("the first Service still works");
    bench.snapshot.ports.retain(|key, _| !key.name.service.name.starts_with("many"));
    bench.sync(&Dirty::everything());
    let rest = Ebpf::plan(&bench.state, &bench.snapshot, &Dirty::everything());
    assert!(rest.is_empty(), "nothing half written is left: {rest:?}");
}

#[test]
fn service_that_does_not_fit_whole_is_left_out_until_it_does() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    for last in 1..=60u8 {
        let address = SocketAddr::from(([10, 96, 5, last], 80));
        let key = key(&format!("one-{last}"), Protocol::Tcp, address.ip());
        bench.snapshot.ports.insert(key, Arc::new(port(address, &[endpoint])));
    }
    bench.sync(&Dirty::everything());
    let first = SocketAddr::from(([10, 96, 6, 1], 80));
    let mut large = port(first, &[endpoint]);
    let of_large = large.frontends[0];
    large.frontends =
        (1..=8u8).map(|last| Frontend { address: Some([10, 96, 6, last].into()), ..of_large }).collect();
    let large_key = key("large", Protocol::Tcp, first.ip());
    let dirty = Dirty { ports: [large_key.clone()].into(), ..Dirty::default() };
    bench.snapshot.ports.insert(large_key.clone(), Arc::new(large));
    let destinations =
        |bench: &Bench| bench.pinned::<HashMap<MapData, ServiceKey, ServiceValue>>("services").keys().count();
    for dirty in [dirty, Dirty::everything()] {
        let plan = Ebpf::plan(&bench.state, &bench.snapshot, &dirty);
        let Bench { dataplane, state, .. } = &mut bench;
        let error = dataplane.as_mut().expect("running").apply(state, plan).expect_err("4 would fit");
        assert_eq!(Ebpf::failure_scope(&error), FailureScope::ServicePorts, "{error}");
        assert!(error.to_string().contains("test/large"), "{error}");
        let left_out = dataplane.as_ref().expect("running").left_out_ports();
        assert!(
            matches!(&left_out[..], [LeftOutPort { port, reason: LeftOutReason::MapFull, .. }] if *port == large_key),
            "{left_out:?}"
        );
        assert_eq!(destinations(&bench), 60, "none of it");
        bench.state = bench.dataplane().observe().expect("observe");
    }
    bench.snapshot.ports.retain(|key, _| !key.name.service.name.starts_with("one-1"));
    // Removals come last, so they make room only for the next plan.
    let plan = Ebpf::plan(&bench.state, &bench.snapshot, &Dirty::everything());
    let Bench { dataplane, state, .. } = &mut bench;
    assert!(dataplane.as_mut().expect("running").apply(state, plan).is_err());
    bench.sync(&Dirty::everything());
    assert_eq!(destinations(&bench), 49 + 8);
    TcpStream::connect(first).expect("connect");
}

#[test]
fn change_writes_only_entries_of_its_service() {
    let mut bench = Bench::new();
    bench.settings.map_sizes.services = 2048;
    bench.settings.map_sizes.endpoints = 8192;
    bench.restart();
    let endpoint = |last: u8| SocketAddr::from(([10, 244, 1, last], 8080));
    let four: Vec<SocketAddr> = (1..=4).map(endpoint).collect();
    let mut written = Vec::new();
    for count in [10u8, 250] {
        for last in 1..=count {
            let address = SocketAddr::from(([10, 96, 3, last], 80));
            let key = key(&format!("service-{last}"), Protocol::Tcp, address.ip());
            bench.snapshot.ports.insert(key, Arc::new(port(address, &four)));
        }
        bench.sync(&Dirty::everything());
        let changed = SocketAddr::from(([10, 96, 3, 5], 80));
        let key = key("service-5", Protocol::Tcp, changed.ip());
        bench.snapshot.ports.insert(key.clone(), Arc::new(port(changed, &four[..3])));
        let dirty = Dirty { ports: [key].into(), ..Dirty::default() };
        let plan = Ebpf::plan(&bench.state, &bench.snapshot, &dirty);
        let switches =
            plan.steps.iter().filter(|step| matches!(step, Step::Put(MapEntry::Service(..)))).count();
        assert_eq!(switches, 1, "one write switches the destination over");
        written.push(bench.sync(&dirty));
    }
    // The frontend, and the slot that it does not count any more.
    assert_eq!(written, [2, 2]);
}

#[test]
fn service_deleted_after_a_resync_is_removed_from_the_maps() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.12:80", &[endpoint]);
    let mut rendering = DataplaneRenderer::new(bench.dataplane.take().expect("running"));
    let everything = Dirty::everything();
    rendering.render(&bench.snapshot, &everything).expect("take over");
    rendering.observe().expect("read anew");
    assert_eq!(rendering.render(&bench.snapshot, &everything).expect("compare"), 0, "nothing had changed");
    let gone = key(&vip.to_string(), Protocol::Tcp, vip.ip());
    bench.snapshot.ports.remove(&gone);
    let dirty = Dirty { ports: [gone].into(), ..Dirty::default() };
    assert_eq!(rendering.render(&bench.snapshot, &dirty).expect("remove"), 2, "the destination and its slot");
}

#[test]
fn no_connection_fails_while_endpoints_change() {
    let mut bench = Bench::new();
    let servers = [tcp_server("127.0.0.1:0"), tcp_server("127.0.0.1:0")];
    let mut endpoints = servers.each_ref().map(|(_, address)| *address);
    endpoints.sort();
    let vip = bench.serve(Protocol::Tcp, "10.96.0.13:80", &endpoints);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (server, _) in &servers {
            server.set_nonblocking(true).expect("nonblocking");
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    while server.accept().is_ok() {}
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let connections = 20_000 / slowdown();
        let client = scope.spawn(move || (0..connections).find_map(|_| TcpStream::connect(vip).err()));
        let mut changes = 0u32;
        while !client.is_finished() {
            let one = changes as usize % 2;
            bench.serve(Protocol::Tcp, "10.96.0.13:80", &endpoints[one..=one]);
            changes += 1;
        }
        done.store(true, Ordering::Relaxed);
        let failure = client.join().expect("no panic");
        assert!(failure.is_none(), "after some of {changes} changes: {failure:?}");
    });
}

#[test]
fn programs_report_the_netns_where_the_kernel_does_not() {
    let mut bench = Bench::new();
    bench.sync(&Dirty::everything());
    let told = bench.dataplane().ask_netns().expect("a connected socket has an entry");
    // Kernels before 5.14 show the cookie to programs only.
    let known = netns::current_cookie().expect("a socket");
    assert_eq!(told, known.unwrap_or(told));
    assert_ne!(told.0, NodeValue::NETNS_UNKNOWN);
    bench.state = bench.dataplane().observe().expect("observe");
    assert_eq!(bench.sync(&Dirty::everything()), 0, "nothing of it stays in the maps");
}

#[test]
fn cleanup_removes_only_the_proxys_pins() {
    let mut bench = Bench::new();
    bench.serve(Protocol::Tcp, "10.96.0.16:80", &[]);
    let foreign = bench.settings.pin_dir.join("another");
    fs::create_dir(&foreign).expect("bpffs");
    assert!(Ebpf::cleanup_at(&bench.settings.pin_dir).is_empty());
    let left: Vec<_> = fs::read_dir(&bench.settings.pin_dir).expect("still there").flatten().collect();
    assert!(matches!(&left[..], [entry] if entry.path() == foreign), "{left:?}");
    fs::remove_dir(foreign).expect("ours");
}

#[test]
fn cleanup_refuses_a_directory_outside_bpffs() {
    let directory = tempfile::tempdir().expect("temporary directory");
    fs::write(directory.path().join("services"), "not a pin").expect("write");
    let errors = Ebpf::cleanup_at(directory.path());
    assert!(errors[0].to_string().contains("is not on a bpf filesystem"), "{errors:?}");
    assert!(directory.path().join("services").exists());
    assert!(Ebpf::cleanup_at(&directory.path().join("nothing")).is_empty(), "nothing there is no error");
}

#[test]
fn removed_pins_come_back_with_the_next_resync() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.17:80", &[endpoint]);
    let pins = bench.settings.pin_dir.clone();
    for removed in ["everything", "endpoints"] {
        if removed == "everything" {
            assert!(Ebpf::cleanup_at(&pins).is_empty() && !pins.exists());
        } else {
            fs::remove_file(pins.join(removed)).expect("pinned");
        }
        bench.state = bench.dataplane().observe().expect("observe");
        assert_eq!(bench.sync(&Dirty::everything()), 1, "{removed}: attach");
        TcpStream::connect(vip).expect("the Service works");
    }
    bench.restart();
    assert_eq!(bench.sync(&Dirty::everything()), 1, "the next process takes the same maps over");
}

#[test]
fn next_process_completes_an_interrupted_swap() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.24:80", &[endpoint]);
    let pins = bench.settings.pin_dir.clone();
    fs::hard_link(pins.join("endpoints"), pins.join("old-endpoints")).expect("bpffs");
    bench.settings.map_sizes.services = 128;
    bench.restart();
    bench.sync(&Dirty::everything());
    // Restores the state in which `services` was moved and `endpoints` was not.
    bench.dataplane = None;
    let swap = PathBuf::from(format!("{}-swap", pins.display()));
    fs::create_dir(&swap).expect("bpffs");
    fs::rename(pins.join("endpoints"), swap.join("endpoints")).expect("bpffs");
    fs::rename(pins.join("old-endpoints"), pins.join("endpoints")).expect("bpffs");
    bench.restart();
    assert_eq!(bench.sync(&Dirty::everything()), 1, "the maps in use hold everything");
    TcpStream::connect(vip).expect("connect");
    assert!(!swap.exists());
}

#[test]
fn link_of_an_unknown_program_is_removed() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "10.96.0.25:80", &[endpoint]);
    let links = bench.settings.pin_dir.join("links");
    let names = || {
        let entries = fs::read_dir(&links).expect("bpffs").map(|entry| entry.expect("bpffs").file_name());
        entries.collect::<BTreeSet<_>>()
    };
    let ours = names();
    fs::rename(links.join("shunt_release"), links.join("shunt_former")).expect("bpffs");
    bench.restart();
    bench.sync(&Dirty::everything());
    assert_eq!(names(), ours);
    TcpStream::connect(vip).expect("connect");
}

#[test]
fn link_of_another_cgroup_is_replaced_by_the_next_resync() {
    let mut bench = Bench::new();
    let (_server, endpoint) = tcp_server("127.0.0.1:0");
    let vip = bench.serve(Protocol::Tcp, "127.96.0.26:80", &[endpoint]);
    let own = bench.settings.cgroup_root.clone();
    let other = own.join("other");
    fs::create_dir(&other).expect("cgroup");
    bench.settings.cgroup_root = other.clone();
    bench.restart();
    bench.sync(&Dirty::everything());
    // No other process answers there on loopback.
    let unserved = || TcpStream::connect(vip).is_err();
    // The kernel removes a link shortly after its last pin.
    assert!(soon(unserved), "this process is not in that cgroup");
    let link = bench.settings.pin_dir.join("links/shunt_connect4");
    let saved = bench.settings.pin_dir.join("saved");
    fs::hard_link(&link, &saved).expect("bpffs");
    bench.settings.cgroup_root = own;
    bench.restart();
    bench.sync(&Dirty::everything());
    TcpStream::connect(vip).expect("given this cgroup again");
    fs::rename(&saved, &link).expect("bpffs");
    assert!(soon(unserved), "the link that served this cgroup is gone");
    bench.state = bench.dataplane().observe().expect("observe");
    assert_eq!(bench.sync(&Dirty::everything()), 1, "the programs are attached again");
    TcpStream::connect(vip).expect("connect");
}

#[test]
fn second_process_is_refused_while_one_uses_the_maps() {
    let mut bench = Bench::new();
    let error = Ebpf::new(&bench.settings).err().expect("in use").to_string();
    let expected = format!("another shunt (process {}) uses", process::id());
    assert!(error.contains(&expected), "{error}");
    bench.restart();
    assert_eq!(bench.sync(&Dirty::everything()), 1, "when the first has ended it takes over");
}
