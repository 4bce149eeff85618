//! The number of system calls of a change, counted by strace. It depends only on what changes.

use std::net::SocketAddr;

use proxy_userspace::{
    dataplane::{
        Dataplane as _, PlanSize as _,
        ebpf::{Ebpf, LinkAttachment},
    },
    kernel::bpf::tc::Hook,
    model::{Dirty, Protocol, ServicePortKey, Snapshot},
};
use shunt_tests::{
    resolved::{key, port},
    system_calls::system_calls_of,
};

use crate::bench::{Bench, attachments, in_this_kernel};

/// Few and many: Services, and pairs of links.
const OTHERS: [(u8, u8); 2] = [(1, 1), (40, 6)];

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address and port")
}

/// Returns a Service with four endpoints. The last one is given.
fn service(number: u8, last: &str) -> (ServicePortKey, SocketAddr, [SocketAddr; 4]) {
    let vip = address(&format!("10.96.0.{number}:80"));
    let endpoint = |host: u8| address(&format!("10.1.{number}.{host}:8080"));
    (
        key(&vip.to_string(), Protocol::Tcp, vip.ip()),
        vip,
        [endpoint(1), endpoint(2), endpoint(3), address(last)],
    )
}

fn put(snapshot: &mut Snapshot, number: u8, last: &str) -> ServicePortKey {
    let (key, vip, endpoints) = service(number, last);
    snapshot.ports.insert(key.clone(), port(vip, &endpoints).into());
    key
}

/// Returns a bench with a number of Services, and a number of pairs of links with programs.
fn among(attachment: LinkAttachment, (services, pairs): (u8, u8)) -> (Bench, Snapshot) {
    let mut bench = Bench::new(attachment);
    for pair in 0..pairs {
        bench.add_veth(&format!("one{pair}"), &format!("other{pair}"));
    }
    let mut snapshot = bench.snapshot();
    for number in 1..=services {
        put(&mut snapshot, number, "10.2.0.1:8080");
    }
    apply(&mut bench, &snapshot, &Dirty::everything());
    (bench, snapshot)
}

/// Applies the changes. Returns the number of steps, and their system calls.
fn apply(bench: &mut Bench, snapshot: &Snapshot, dirty: &Dirty) -> (usize, Vec<String>) {
    let plan = Ebpf::plan(&bench.state, snapshot, dirty);
    let steps = plan.len();
    let Bench { dataplane, state, .. } = bench;
    let dataplane = dataplane.as_mut().expect("running");
    let calls = system_calls_of(|| dataplane.apply(state, plan).expect("apply"));
    (steps, calls.expect("strace"))
}

#[test]
fn endpoint_change_is_two_calls_at_any_size() {
    for attachment in attachments() {
        for others in OTHERS {
            let (mut bench, mut snapshot) = among(attachment, others);
            let changed = put(&mut snapshot, 1, "10.2.0.2:8080");
            let dirty = Dirty { ports: [changed].into(), ..Dirty::default() };
            // The slot and the frontend.
            let (steps, calls) = apply(&mut bench, &snapshot, &dirty);
            assert_eq!((steps, calls), (2, vec!["bpf".to_owned(); 2]), "{attachment:?} among {others:?}");
        }
    }
}

#[test]
fn new_pair_of_links_costs_the_same_calls_at_any_size() {
    for attachment in attachments() {
        for others in OTHERS {
            let (mut bench, snapshot) = among(attachment, others);
            bench.add_veth("new", "newer");
            let snapshot = Snapshot { node: bench.snapshot().node, ..snapshot };
            let (steps, calls) = apply(&mut bench, &snapshot, &Dirty { node: true, ..Dirty::default() });
            assert_eq!(steps, 4, "two links, two hooks each");
            let asked = |name: &str| calls.iter().filter(|call| *call == name).count();
            let (counted, expected) = match in_this_kernel(attachment) {
                // Check for a pin, create the link, pin it.
                LinkAttachment::Probe => (asked("bpf"), 4 * 3),
                // Create the qdisc, list the filters, add ours.
                LinkAttachment::Clsact => (asked("sendto"), 4 * 3),
            };
            assert_eq!(counted, expected, "{attachment:?} among {others:?}: {calls:?}");
            assert_eq!(bench.names("new", Hook::Ingress).len(), 1);
        }
    }
}
