//! Links that appear and disappear, globs, restarts, and removed programs.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::gettid,
};
use proxy_userspace::{
    dataplane::ebpf::{Ebpf, EbpfError, LinkAttachment, Step},
    kernel::{
        bpf::{LogLevel, tc::Hook},
        command::Launcher,
    },
    model::InterfaceGlobs,
};

use shunt_tests::deadline::slowdown;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::bench::{ATTACHMENTS, Bench, HOOKS, attachments, has_clsact, in_this_kernel, run, tc};

#[test]
fn new_links_get_programs_on_both_hooks_and_removed_links_leave_nothing() {
    // Without TCX both are filters.
    for attachment in ATTACHMENTS {
        let mut bench = Bench::new(attachment);
        bench.sync();
        bench.add_veth("v0", "v1");
        // The first links are taken over from netfilter, which costs six steps.
        assert_eq!(bench.sync(), 6 + 4, "two links, two hooks each");
        for link in ["v0", "v1"] {
            assert_eq!(bench.names(link, Hook::Ingress), ["shunt_in_eth"], "{attachment:?}");
            assert_eq!(bench.names(link, Hook::Egress), ["shunt_out_eth"], "{attachment:?}");
        }
        assert_eq!(bench.names("lo", Hook::Ingress), [""; 0]);
        assert_eq!(bench.verify(), 0, "nothing is left to do");
        bench.remove("v0");
        assert_eq!(bench.sync(), 4, "pins go with their links");
        assert_eq!(bench.verify(), 0);
        let links = fs::read_dir(bench.settings.pin_dir.join("links")).expect("bpffs").flatten();
        let names: Vec<String> = links.map(|entry| entry.file_name().display().to_string()).collect();
        let of_links =
            names.iter().filter(|name| name.starts_with("shunt_in") || name.starts_with("shunt_out"));
        assert_eq!(of_links.count(), 0, "{names:?}");
    }
}

/// The kernel interprets a program that its JIT compiler gives up on, such as one with jumps that
/// the compiler cannot lay out (x86, before 5.12). That is several times slower. Kernels with
/// `CONFIG_BPF_JIT_ALWAYS_ON` refuse such a program.
#[test]
fn kernel_compiles_every_program() {
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.add_veth("v0", "v1");
    run("ip", &["tuntap", "add", "tun0", "mode", "tun"]);
    bench.sync();
    let size = |program: ProgramInfo| Some((program.name_as_str()?.to_owned(), program.size_jitted()));
    let ours = loaded_programs().flatten().filter_map(size).filter(|(name, _)| name.starts_with("shunt_"));
    let (interpreted, compiled): (Vec<_>, Vec<_>) = ours.partition(|(_, size)| *size == 0);
    assert_eq!(interpreted, []);
    for program in ["shunt_in_eth", "shunt_in_ip", "shunt_out_eth", "shunt_out_ip"] {
        assert!(compiled.iter().any(|(name, _)| name == program), "{program}: {compiled:?}");
    }
}

/// The end of a command is such a signal: it has a handler, and any thread may get it.
#[test]
fn programs_load_while_signals_arrive() {
    const MAX_SIGNALS: usize = 100_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let _entered = runtime.enter();
    let _handler = signal(SignalKind::user_defined1()).expect("a handler");
    let (loader, is_loaded) = (gettid(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..MAX_SIGNALS {
                if is_loaded.load(Ordering::Relaxed) {
                    break;
                }
                // The kernel prefers the thread that has this number.
                kill(loader, Signal::SIGUSR1).expect("this process");
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut bench = Bench::new(LinkAttachment::Probe);
        bench.add_veth("v0", "v1");
        bench.sync();
        is_loaded.store(true, Ordering::Relaxed);
        assert_eq!(bench.names("v0", Hook::Ingress), ["shunt_in_eth"]);
    });
}

#[test]
fn bare_ip_link_gets_its_programs() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        run("ip", &["tuntap", "add", "tun0", "mode", "tun"]);
        bench.sync();
        assert_eq!(bench.names("tun0", Hook::Ingress), ["shunt_in_ip"]);
        assert_eq!(bench.names("tun0", Hook::Egress), ["shunt_out_ip"]);
    }
}

#[test]
fn excluded_links_have_no_programs_even_of_an_earlier_process() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("eth0", "v.1");
        bench.add_bridge("br0", &[]);
        bench.sync();
        assert_eq!(bench.names("v.1", Hook::Ingress), ["shunt_in_eth"], "a dot in the name does no harm");
        let globs = |globs: &[&str]| globs.iter().map(|glob| glob.parse().expect("glob")).collect();
        bench.model_settings.interfaces =
            InterfaceGlobs { only: globs(&["eth*", "br*"]), except: globs(&["*r0"]) };
        bench.restart();
        bench.sync();
        for hook in HOOKS {
            assert_eq!(bench.names("eth0", hook).len(), 1);
            assert_eq!(bench.names("v.1", hook).len() + bench.names("br0", hook).len(), 0, "{attachment:?}");
        }
        assert!(!has_clsact("br0"), "an empty qdisc goes too");
    }
}

#[test]
fn removed_programs_come_back_with_the_next_resync() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        let index = bench.index("v0");
        match in_this_kernel(attachment) {
            LinkAttachment::Clsact => drop(tc(&["qdisc", "del", "dev", "v0", "clsact"])),
            LinkAttachment::Probe => {
                let pin = bench.settings.pin_dir.join(format!("links/shunt_in_{index}"));
                fs::remove_file(pin).expect("pinned");
                let pin = bench.settings.pin_dir.join(format!("links/shunt_out_{index}"));
                run("bpftool", &["link", "detach", "pinned", pin.to_str().expect("text")]);
            }
        }
        assert_eq!(bench.verify(), 2, "{attachment:?}");
        for hook in HOOKS {
            assert_eq!(bench.names("v0", hook).len(), 1, "{attachment:?}");
        }
    }
}

#[test]
fn reused_interface_index_gets_new_programs() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        let add = |name| run("ip", &["link", "add", name, "index", "77", "type", "bridge"]);
        add("one");
        bench.sync();
        bench.remove("one");
        add("two");
        bench.restart();
        bench.sync();
        for hook in HOOKS {
            assert_eq!(bench.names("two", hook).len(), 1, "{attachment:?}");
        }
        assert_eq!(bench.verify(), 0);
    }
}

#[test]
fn link_that_vanishes_between_hooks_is_no_error_for_others() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_bridge("br0", &[]);
        bench.add_veth("v0", "v1");
        let count = bench.planned().len();
        for cut in 0..count {
            let steps = bench.planned();
            let (before, after) = steps.split_at(cut.min(steps.len()));
            bench.apply(before);
            bench.remove("v0");
            bench.apply(after);
            assert_eq!(bench.names("br0", Hook::Ingress), ["shunt_in_eth"]);
            bench.sync();
            assert_eq!(bench.verify(), 0, "{attachment:?}, gone after {cut} steps");
            bench.add_veth("v0", "v1");
        }
    }
}

#[test]
fn link_that_vanishes_during_attach_is_no_error() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.sync();
        for _ in 0..6 / slowdown().min(3) {
            bench.add_veth("v0", "v1");
            let steps = bench.planned();
            let here = fs::File::open("/proc/thread-self/ns/net").expect("procfs");
            thread::scope(|scope| {
                let removal = scope.spawn(|| {
                    setns(&here, CloneFlags::CLONE_NEWNET).expect("same namespace");
                    run("ip", &["link", "del", "v0"]);
                });
                // Repeats, so that an attach is in progress when the link disappears.
                while !removal.is_finished() {
                    bench.apply(&steps);
                }
            });
            bench.sync();
            assert_eq!(bench.verify(), 0, "{attachment:?}");
        }
    }
}

#[test]
fn restart_uses_the_programs_in_the_kernel_again() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        let first = ids(&bench);
        bench.restart();
        assert_eq!((bench.sync(), ids(&bench)), (1, first.clone()), "{attachment:?}");
        // A link that comes later gets the same programs.
        bench.add_veth("w0", "w1");
        bench.sync();
        let ids_of_others = HOOKS.map(|hook| bench.programs("w0", hook)[0].id());
        assert_eq!(first, ids_of_others.map(|id| vec![id]), "{attachment:?}");
    }
}

#[test]
fn programs_with_other_constants_are_replaced() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        let first = ids(&bench);
        bench.settings.log = LogLevel::Error;
        bench.restart();
        assert_eq!(bench.sync(), 5, "{attachment:?}");
        assert_ne!(ids(&bench), first, "{attachment:?}");
    }
}

/// Returns the ids of the programs on the hooks of v0.
fn ids(bench: &Bench) -> [Vec<u32>; 2] {
    HOOKS.map(|hook| bench.programs("v0", hook).iter().map(ProgramInfo::id).collect())
}

#[test]
fn restart_replaces_programs_without_a_gap() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        let before = ids(&bench);
        let here = fs::File::open("/proc/thread-self/ns/net").expect("procfs");
        let (done, looks) = (AtomicBool::new(false), AtomicU32::new(0));
        let gaps = thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                setns(&here, CloneFlags::CLONE_NEWNET).expect("same namespace");
                let mut gaps = 0u32;
                while !done.load(Ordering::Relaxed) {
                    gaps += u32::from(!runs_on(attachment, "v0"));
                    looks.fetch_add(1, Ordering::Relaxed);
                }
                gaps
            });
            let ended = SetOnDrop(&done);
            // Repeats until the observer saw enough.
            for restart in 0..100 {
                // Every third time with maps of another size, as after an upgrade.
                bench.settings.map_sizes.services = if restart % 3 == 2 { 128 } else { 64 };
                // Other constants, as in another build: no program is used again.
                bench.settings.log = [LogLevel::Error, LogLevel::Off][restart % 2];
                bench.restart();
                assert_eq!(bench.sync(), 5, "the programs on sockets, and those on two links");
                if restart >= 2 && looks.load(Ordering::Relaxed) > 10 {
                    break;
                }
            }
            drop(ended);
            watcher.join().expect("no panic")
        });
        assert_eq!(gaps, 0, "{attachment:?}: of {looks:?} looks");
        let after = ids(&bench);
        assert!(before.iter().zip(&after).all(|(a, b)| a != b && b.len() == 1), "{before:?} {after:?}");
    }
}

/// Old link programs go on writing flows to the former maps, where the next process does not find
/// them.
#[test]
fn maps_of_another_size_are_taken_over_although_the_process_ends() {
    let shutdown = CancellationToken::new();
    let mut bench = Bench::new(LinkAttachment::Probe);
    bench.settings.netfilter = Some(Launcher::default());
    bench.restart();
    bench.add_veth("v0", "v1");
    bench.sync();
    let before = ids(&bench);
    bench.settings.map_sizes.flows = 2048;
    bench.settings.netfilter = Some(Launcher::default().until(shutdown.clone()));
    // From now on, no command finds or installs the rules.
    shutdown.cancel();
    bench.restart();
    let steps = bench.planned();
    assert!(steps.iter().any(|step| matches!(step, Step::InstallRules(_))), "{steps:?}");
    let refused = bench.try_apply(&steps).expect_err("commands are not started any more");
    assert!(matches!(refused, EbpfError::Rules(_)), "{refused}");
    let after = ids(&bench);
    assert!(before.iter().zip(&after).all(|(a, b)| a != b && b.len() == 1), "{before:?} {after:?}");
}

/// Sets a flag on drop, also if a test fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns true if a program of ours is at ingress.
fn runs_on(attachment: LinkAttachment, link: &str) -> bool {
    match in_this_kernel(attachment) {
        // Programs may disappear between the list and the query of each.
        LinkAttachment::Probe => {
            SchedClassifier::query_tcx(link, TcAttachType::Ingress).map_or(true, |(_, p)| !p.is_empty())
        }
        LinkAttachment::Clsact => tc(&["filter", "show", "dev", link, "ingress"]).contains("shunt_in_eth"),
    }
}

#[test]
fn programs_stay_without_a_process_and_cleanup_removes_them() {
    for attachment in attachments() {
        let mut bench = Bench::new(attachment);
        bench.add_veth("v0", "v1");
        bench.sync();
        bench.stop();
        assert_eq!(bench.names("v0", Hook::Ingress), ["shunt_in_eth"], "{attachment:?}");
        let errors = Ebpf::cleanup_at(&bench.settings.pin_dir);
        assert!(errors.is_empty(), "{errors:?}");
        for link in ["v0", "v1"] {
            for hook in HOOKS {
                assert_eq!(bench.names(link, hook), [""; 0], "{attachment:?}");
            }
            assert!(!has_clsact(link));
        }
        assert!(!bench.settings.pin_dir.exists());
    }
}

/// To remove a clsact qdisc, or to add it, loses the packets that leave on the link meanwhile.
#[test]
fn clsact_qdisc_stays_on_links_that_netfilter_serves_and_cleanup_removes_it() {
    let mut bench = Bench::new(LinkAttachment::Clsact);
    bench.add_veth("v0", "v1");
    let planned = bench.planned();
    bench.apply(&planned);
    let leave = planned.iter().filter_map(|step| match step {
        Step::AttachLink(at, _) => Some(Step::LeaveLink(*at)),
        _ => None,
    });
    bench.apply(&leave.collect::<Vec<_>>());
    for link in ["v0", "v1"] {
        assert_eq!(HOOKS.map(|hook| bench.names(link, hook).len()), [0, 0]);
        assert!(has_clsact(link));
    }
    let others = ["filter", "add", "dev", "v1", "egress", "prio", "2", "bpf", "bytecode", "1,6 0 0 0", "da"];
    tc(&others);
    bench.stop();
    let errors = Ebpf::cleanup_at(&bench.settings.pin_dir);
    assert!(errors.is_empty(), "{errors:?}");
    assert!(!has_clsact("v0") && has_clsact("v1"), "the filter of another owner stays");
    assert!(!bench.settings.pin_dir.exists());
}

#[test]
fn programs_are_attached_to_sockets_then_egress_then_ingress() {
    let bench = Bench::new(LinkAttachment::Probe);
    bench.add_veth("v0", "v1");
    let hooks: Vec<Option<Hook>> = bench
        .planned()
        .iter()
        .filter_map(|step| match step {
            Step::Attach => Some(None),
            Step::AttachLink(at, _) => Some(Some(at.hook)),
            _ => None,
        })
        .collect();
    let (out, into) = (Some(Hook::Egress), Some(Hook::Ingress));
    assert_eq!(hooks, [None, out, out, into, into]);
}
