//! Foreign programs and filters beside ours, for example of a CNI or a firewall.

use std::{
    fs,
    net::UdpSocket,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aya::{
    programs::{ProgramInfo, SchedClassifier, TcAttachType},
    sys::{Stats, enable_stats},
};
use nix::sched::{CloneFlags, setns};
use proxy_userspace::{
    dataplane::{
        Dataplane as _,
        ebpf::{Ebpf, EbpfSettings, LinkAttachment, Plan},
    },
    kernel::{
        bpf::tc::Hook,
        foreign_filters::{self, LinkFilter},
    },
};

use crate::bench::{Bench, HOOKS, attachments, has_clsact, in_this_kernel, run, tc};

/// Sends a packet on `v0`.
fn send() {
    let socket = UdpSocket::bind("192.0.2.1:0").expect("an address of v0");
    socket.set_broadcast(true).expect("broadcast");
    socket.send_to(b"x", "192.0.2.255:9").expect("send");
}

#[test]
fn foreign_filter_stays_after_ours_and_keeps_the_qdisc() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    let _counting = enable_stats(Stats::RunTime).expect("kernel 5.8");
    bench.add_veth("v0", "v1");
    run("ip", &["address", "add", "192.0.2.1/24", "brd", "+", "dev", "v0"]);
    bench.sync();
    send();
    let received = bench.received("v1");
    assert!(received > 0, "ours let it pass");
    // Classic BPF: drop.
    let drop_all =
        ["filter", "add", "dev", "v0", "egress", "prio", "2", "bpf", "bytecode", "1,6 0 0 2", "da"];
    tc(&drop_all);
    let received = bench.received("v1");
    let ours = bench.programs("v0", Hook::Egress)[0].run_count();
    send();
    assert_eq!(bench.received("v1"), received, "the other runs after ours");
    assert!(bench.programs("v0", Hook::Egress)[0].run_count() > ours, "and ours before it");
    bench.restart();
    bench.sync();
    assert_eq!(bench.filters("v0", Hook::Egress).len(), 2);
    assert!(Ebpf::cleanup_at(&bench.settings.pin_dir).is_empty());
    let left = tc(&["filter", "show", "dev", "v0", "egress"]);
    assert!(left.contains("pref 2") && !left.contains("shunt"), "{left}");
    assert!(has_clsact("v0") && !has_clsact("v1"));
    send();
    assert_eq!(bench.received("v1"), received);
}

#[test]
fn foreign_filter_before_ours_is_behind_it_after_a_resync() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    let _counting = enable_stats(Stats::RunTime).expect("kernel 5.8");
    bench.add_veth("v0", "v1");
    run("ip", &["address", "add", "192.0.2.1/24", "brd", "+", "dev", "v0"]);
    bench.sync();
    let runs = |bench: &Bench| bench.programs("v0", Hook::Egress)[0].run_count();
    for round in 0..2 {
        // Classic BPF: accept, and run no other filter.
        let pass_all =
            ["filter", "add", "dev", "v0", "egress", "prio", "1", "bpf", "bytecode", "1,6 0 0 0", "da"];
        tc(&pass_all);
        let before = runs(&bench);
        send();
        assert_eq!(
            runs(&bench),
            before,
            "round {round}: the newest filter of a priority runs first, and alone"
        );
        assert_eq!(bench.verify(), 1, "round {round}");
        send();
        assert!(runs(&bench) > before, "round {round}");
        assert_eq!(bench.verify(), 0, "round {round}");
    }
    assert_eq!(bench.filters("v0", Hook::Egress).len(), 3);
    assert!(Ebpf::cleanup_at(&bench.settings.pin_dir).is_empty());
    let left = tc(&["filter", "show", "dev", "v0", "egress"]);
    assert!(left.contains("bytecode") && !left.contains("shunt"), "{left}");
}

/// Applies the plan for the current links. Returns the error, if any.
fn apply(bench: &mut Bench) -> Option<String> {
    let steps = bench.planned();
    bench.try_apply(&steps).err().map(|error| error.to_string())
}

fn left_out(bench: &Bench) -> Vec<Arc<str>> {
    bench.dataplane.as_ref().expect("running").left_out()
}

#[test]
fn pods_link_with_an_ingress_qdisc_is_left_out_until_it_is_gone() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    bench.add_veth("v0", "v1");
    // As the CNI bandwidth plugin creates it, with its own filter.
    tc(&["qdisc", "add", "dev", "v0", "handle", "ffff:", "ingress"]);
    // Classic BPF for "pass".
    let theirs =
        ["filter", "add", "dev", "v0", "parent", "ffff:", "prio", "1", "bpf", "bytecode", "1,6 0 0 0", "da"];
    tc(&theirs);
    assert_eq!(apply(&mut bench), None);
    assert_eq!(bench.names("v1", Hook::Ingress), ["shunt_in_eth"]);
    assert_eq!(left_out(&bench), ["v0".into()]);
    assert_eq!(bench.verify(), 0, "it is known: no retry, and no drift");
    let shown = tc(&["filter", "show", "dev", "v0", "ingress"]);
    assert!(shown.contains("bytecode") && !shown.contains("shunt"), "{shown}");
    bench.restart();
    assert_eq!(bench.sync(), 1 + 2, "the next process finds out again");
    assert_eq!((left_out(&bench), bench.verify()), (vec!["v0".into()], 0));
    tc(&["qdisc", "del", "dev", "v0", "ingress"]);
    assert_eq!(bench.verify(), 2);
    for hook in HOOKS {
        assert_eq!(bench.names("v0", hook).len(), 1);
    }
    assert!(left_out(&bench).is_empty());
}

#[test]
fn left_out_link_that_disappears_or_is_excluded_is_forgotten() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    for (one, other) in [("v0", "v1"), ("v2", "v3")] {
        bench.add_veth(one, other);
        tc(&["qdisc", "add", "dev", one, "ingress"]);
    }
    assert_eq!((apply(&mut bench), left_out(&bench).len()), (None, 2));
    bench.remove("v0");
    bench.model_settings.interfaces.except = vec!["v2".parse().expect("glob")];
    bench.sync();
    assert!(left_out(&bench).is_empty());
    assert_eq!(bench.verify(), 0);
    assert!(tc(&["qdisc", "show", "dev", "v2"]).contains("ingress"), "it is not ours");
}

#[test]
fn link_with_an_address_of_the_node_is_left_out_too() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    bench.add_veth("v0", "v1");
    tc(&["qdisc", "add", "dev", "v0", "ingress"]);
    run("ip", &["address", "add", "192.0.2.1/24", "dev", "v0"]);
    assert_eq!((apply(&mut bench), left_out(&bench).len()), (None, 1));
    assert_eq!(bench.names("v1", Hook::Ingress), ["shunt_in_eth"]);
    assert_eq!(bench.names("v0", Hook::Ingress), [""; 0], "what cannot be translated back is not translated");
    tc(&["qdisc", "del", "dev", "v0", "ingress"]);
    assert_eq!(bench.verify(), 2);
}

#[test]
fn ingress_qdisc_does_not_matter_with_tcx() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.add_veth("v0", "v1");
    tc(&["qdisc", "add", "dev", "v0", "ingress"]);
    assert_eq!(apply(&mut bench), None);
    let has_tcx = in_this_kernel(LinkAttachment::Probe) == LinkAttachment::Probe;
    assert_eq!(left_out(&bench).is_empty(), has_tcx);
    assert_eq!(bench.names("v0", Hook::Egress).len(), usize::from(has_tcx));
}

/// A dataplane with another pin directory. To the bench's, its programs are foreign.
struct Other {
    dataplane: Option<Ebpf>,
    pin_dir: PathBuf,
}

impl Other {
    fn new(bench: &Bench) -> Self {
        let name = format!("{}-other", bench.settings.pin_dir.file_name().expect("a name").display());
        let pin_dir = bench.settings.pin_dir.with_file_name(name);
        let settings = EbpfSettings { pin_dir: pin_dir.clone(), ..bench.settings.clone() };
        Self { dataplane: Some(Ebpf::new(&settings).expect("load")), pin_dir }
    }

    /// Attaches its programs before all others on all links.
    fn attach(&mut self, bench: &Bench) {
        let dataplane = self.dataplane.as_mut().expect("running");
        let mut state = dataplane.observe().expect("observe");
        let plan = Plan { steps: bench.planned_from(&state), ..Plan::default() };
        dataplane.apply(&mut state, plan).expect("apply");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.dataplane = None;
        let errors = Ebpf::cleanup_at(&self.pin_dir);
        if !std::thread::panicking() {
            assert!(errors.is_empty() && !self.pin_dir.exists(), "{errors:?}");
        }
    }
}

/// Returns the ids of the programs on a hook of `v0`, in the order in which they run.
fn ids(bench: &Bench, hook: Hook) -> Vec<u32> {
    bench.programs("v0", hook).iter().map(ProgramInfo::id).collect()
}

#[test]
fn foreign_tcx_program_before_ours_is_behind_it_after_a_resync() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    if in_this_kernel(LinkAttachment::Probe) == LinkAttachment::Clsact {
        bench.sync();
        assert_eq!(bench.verify(), 0, "without TCX ours are filters, which a test above puts beside others");
        return;
    }
    bench.add_veth("v0", "v1");
    bench.sync();
    let mut other = Other::new(&bench);
    other.attach(&bench);
    let before = HOOKS.map(|hook| ids(&bench, hook));
    let here = fs::File::open("/proc/thread-self/ns/net").expect("procfs");
    let done = AtomicBool::new(false);
    let fewest = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            setns(&here, CloneFlags::CLONE_NEWNET).expect("same namespace");
            let mut fewest = usize::MAX;
            loop {
                let is_last = done.load(Ordering::Relaxed);
                let found = SchedClassifier::query_tcx("v0", TcAttachType::Ingress);
                // A program may disappear between the list and the query of each.
                fewest = fewest.min(found.map_or(usize::MAX, |(_, programs)| programs.len()));
                if is_last {
                    return fewest;
                }
            }
        });
        assert_eq!(bench.verify(), 4, "two hooks of two links");
        done.store(true, Ordering::Relaxed);
        watcher.join().expect("no panic")
    });
    assert!(fewest >= 2, "a program of ours is always attached, beside the other: {fewest}");
    for (hook, before) in HOOKS.into_iter().zip(before) {
        let after = ids(&bench, hook);
        assert!(after.len() == 2 && after[1] == before[0] && after[0] != before[1], "{before:?} {after:?}");
    }
    assert_eq!(bench.verify(), 0);
    assert!(bench.dataplane().displaced().is_empty());
}

/// The other dataplane puts its programs back three times too, and comes before ours at the end.
#[test]
fn tcx_program_that_insists_stays_first_and_is_reported() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    if in_this_kernel(LinkAttachment::Probe) == LinkAttachment::Clsact {
        assert!(bench.dataplane().displaced().is_empty(), "the test below has filters");
        return;
    }
    bench.add_veth("v0", "v1");
    bench.sync();
    let mut other = Other::new(&bench);
    for round in 0..3 {
        other.attach(&bench);
        assert_eq!(bench.verify(), 4, "round {round}");
    }
    other.attach(&bench);
    let order = HOOKS.map(|hook| ids(&bench, hook));
    for round in 0..3 {
        assert_eq!(bench.verify(), 0, "round {round}");
        let mut displaced = bench.dataplane().displaced();
        displaced.retain(|link| link.by.starts_with("shunt_"));
        let links: Vec<&str> = displaced.iter().map(|link| &*link.link).collect();
        assert_eq!(links, ["v0", "v1"], "round {round}");
    }
    assert_eq!(HOOKS.map(|hook| ids(&bench, hook)), order, "nothing moves any more");
    drop(other);
    assert_eq!(bench.verify(), 0);
    assert!(bench.dataplane().displaced().is_empty(), "ours is first again");
}

#[test]
fn filter_that_insists_stays_first_and_is_reported() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    bench.add_veth("v0", "v1");
    bench.sync();
    let insist = || {
        tc(&["filter", "add", "dev", "v0", "ingress", "prio", "1", "bpf", "bytecode", "1,6 0 0 0", "da"]);
    };
    for round in 0..3 {
        insist();
        assert_eq!(bench.verify(), 1, "round {round}");
    }
    insist();
    assert_eq!((bench.verify(), bench.verify()), (0, 0));
    let displaced = bench.dataplane().displaced();
    assert!(displaced.len() == 1 && &*displaced[0].link == "v0", "{displaced:?}");
}

#[test]
fn foreign_tcx_programs_stay_and_ours_run_first() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    let _counting = enable_stats(Stats::RunTime).expect("kernel 5.8");
    bench.add_veth("v0", "v1");
    run("ip", &["address", "add", "192.0.2.1/24", "brd", "+", "dev", "v0"]);
    bench.sync();
    if in_this_kernel(LinkAttachment::Probe) == LinkAttachment::Clsact {
        assert!(has_clsact("v0"), "without TCX ours are filters, which the tests above put beside others");
        return;
    }
    let first = HOOKS.map(|hook| bench.programs("v0", hook)[0].id());
    let mut other = Other::new(&bench);
    other.attach(&bench);
    for (hook, first) in HOOKS.into_iter().zip(first) {
        let ids: Vec<u32> = bench.programs("v0", hook).iter().map(ProgramInfo::id).collect();
        assert!(ids.len() == 2 && ids[1] == first && ids[0] != first, "{ids:?}");
    }
    send();
    assert!(
        bench.programs("v0", Hook::Egress).iter().all(|program| program.run_count() > 0),
        "both let it pass"
    );
    drop(other);
    for (hook, first) in HOOKS.into_iter().zip(first) {
        let ids: Vec<u32> = bench.programs("v0", hook).iter().map(ProgramInfo::id).collect();
        assert_eq!(ids, [first]);
    }
}

#[test]
fn lists_of_foreign_filters_have_the_programs_of_both_attachments_without_ours() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        let all = foreign_filters::list("none").expect("rtnetlink and bpf(2)");
        let kind = match in_this_kernel(attachment) {
            LinkAttachment::Probe => "tcx",
            LinkAttachment::Clsact => "bpf",
        };
        for (hook, name) in [(Hook::Ingress, "shunt_in_eth"), (Hook::Egress, "shunt_out_eth")] {
            let is_ours = |found: &&LinkFilter| {
                &*found.link == "v0" && found.hook == hook && found.name.as_deref() == Some(name)
            };
            let ours: Vec<_> = all.iter().filter(is_ours).collect();
            assert_eq!(ours.len(), 1, "{all:?}");
            assert_eq!(ours[0].kind, kind);
        }
        assert_eq!(foreign_filters::list("shunt_").expect("rtnetlink and bpf(2)"), []);
    }
}
