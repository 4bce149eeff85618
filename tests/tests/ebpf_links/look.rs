//! The periodic look at programs on links and at netfilter rules, in a thread.

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use proxy_userspace::{
    dataplane::{
        DataplaneRenderer, Renderer as _,
        ebpf::{Ebpf, LinkAttachment},
    },
    kernel::{bpf::tc::Hook, command::Launcher},
    model::{Dirty, Protocol, Snapshot},
};
use shunt_tests::{
    deadline::Deadline,
    process::write_script,
    resolved::{key, port},
    system_calls::system_calls_of,
};
use tempfile::TempDir;
use tokio::{sync::Notify, time::timeout};

use crate::bench::{Bench, WITHIN, attachments, in_this_kernel, run, tc};

/// A dataplane with rules and a number of pairs of links, which looks at them in threads.
struct Looking {
    renderer: DataplaneRenderer<Ebpf>,
    snapshot: Snapshot,
    drift: Arc<Notify>,
    bench: Bench,
}

impl Looking {
    fn start(attachment: LinkAttachment, pairs: u8, launcher: Launcher) -> Self {
        let mut bench = Bench::new(attachment);
        for pair in 0..pairs {
            bench.add_veth(&format!("one{pair}"), &format!("other{pair}"));
        }
        bench.settings.netfilter = Some(launcher);
        bench.restart();
        let snapshot = bench.snapshot();
        let mut dataplane = bench.dataplane.take().expect("running");
        let drift = Arc::new(Notify::new());
        let notified = Arc::clone(&drift);
        dataplane.check_in_threads(move || notified.notify_one()).expect("threads");
        let mut renderer = DataplaneRenderer::new(dataplane);
        renderer.render(&snapshot, &Dirty::everything()).expect("served");
        Self { renderer, snapshot, drift, bench }
    }

    /// Does what the sync loop does every `syncPeriod`. Returns the number of changes.
    fn look(&mut self) -> usize {
        self.renderer.observe().expect("observe");
        assert!(self.renderer.is_current(), "the maps hold what was written");
        let node = Dirty { node: true, ..Dirty::default() };
        self.renderer.render(&self.snapshot, &node).expect("rendered")
    }

    fn wait_for_drift(&self, what: &str) {
        let notified = self.bench.runtime.block_on(async { timeout(WITHIN, self.drift.notified()).await });
        assert!(notified.is_ok(), "not noticed within {WITHIN:?}: {what}");
    }

    /// Asserts that the thread finds some damage, and that the next look repairs it.
    fn assert_repaired(&mut self, what: &str) {
        let mut repair = || Some(self.look()).filter(|changes| *changes > 0);
        assert_eq!(Deadline::after(WITHIN).poll(&mut repair), Some(1), "{what}");
        self.wait_for_drift(what);
        assert_eq!(self.look(), 0, "{what}: it is repaired");
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let errors = self.renderer.cleanup();
        assert!(std::thread::panicking() || errors.is_empty(), "{errors:?}");
    }
}

#[test]
fn removed_rule_is_found_by_the_thread_and_repaired() {
    let mut looking = Looking::start(LinkAttachment::Probe, 1, Launcher::default());
    let list = || run("nft", &["list", "table", "inet", "shunt"]);
    let installed = list();
    for damage in ["delete table inet shunt", "flush ruleset"] {
        run("nft", &damage.split(' ').collect::<Vec<_>>());
        looking.assert_repaired(damage);
        assert_eq!(list(), installed, "{damage}");
    }
}

#[test]
fn removed_program_is_found_by_the_thread_and_repaired() {
    for attachment in attachments() {
        let mut looking = Looking::start(attachment, 1, Launcher::default());
        for (hook, name) in [(Hook::Ingress, "in"), (Hook::Egress, "out")] {
            let before = looking.bench.names("one0", hook);
            if in_this_kernel(attachment) == LinkAttachment::Clsact {
                tc(&["filter", "del", "dev", "one0", &format!("{hook:?}").to_lowercase()]);
            } else {
                let pin = format!("links/shunt_{name}_{}", looking.bench.index("one0"));
                let pin = looking.bench.settings.pin_dir.join(pin);
                run("bpftool", &["link", "detach", "pinned", pin.to_str().expect("text")]);
            }
            assert_eq!(looking.bench.names("one0", hook), [""; 0]);
            looking.assert_repaired(name);
            assert_eq!(looking.bench.names("one0", hook), before);
        }
    }
}

/// A command `nft` that creates the file `asked` when it starts, and `answered` when it has listed
/// the last chain of a look. It takes long while there is a file `hold`.
struct Nft(TempDir);

impl Nft {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        // The tools of a virtual machine are elsewhere than those of a host.
        let path = std::env::var_os("PATH").expect("a PATH");
        let path = path.display();
        let script = format!(
            "#!/bin/sh\nPATH={path}\ncd {}\ntouch asked\n\
             for i in $(seq 500); do [ -e hold ] || break; sleep 0.01; done\n\
             nft \"$@\"\nstatus=$?\ncase \"$*\" in *ip6*) touch answered ;; esac\nexit $status\n",
            folder.path().display()
        );
        write_script(&folder.path().join("nft"), &script).expect("a script");
        Self(folder)
    }

    fn launcher(&self) -> Launcher {
        Launcher::only_in([self.0.path().to_owned()])
    }

    fn exists(&self, file: &str) -> bool {
        self.0.path().join(file).exists()
    }

    fn forget_commands(&self) {
        for file in ["asked", "answered"] {
            fs::remove_file(self.0.path().join(file)).expect(file);
        }
    }

    fn wait_for(&self, file: &str) {
        assert!(Deadline::after(WITHIN).poll(|| self.exists(file).then_some(())).is_some(), "{file}");
    }
}

#[test]
fn change_does_not_wait_for_commands() {
    let nft = Nft::new();
    let mut looking = Looking::start(LinkAttachment::Probe, 1, nft.launcher());
    nft.forget_commands();
    fs::write(nft.0.path().join("hold"), "").expect("a file");
    assert_eq!(looking.look(), 0);
    nft.wait_for("asked");
    let [vip, endpoint] =
        ["10.96.0.1:80", "10.1.0.1:8080"].map(|text| text.parse::<SocketAddr>().expect("an address"));
    let changed = key("service", Protocol::Tcp, vip.ip());
    looking.snapshot.ports.insert(changed.clone(), port(vip, &[endpoint]).into());
    let dirty = Dirty { ports: [changed].into(), ..Dirty::default() };
    assert!(looking.renderer.render(&looking.snapshot, &dirty).expect("rendered") > 0);
    assert!(!nft.exists("answered"), "the change is made while nft lists the rules");
    fs::remove_file(nft.0.path().join("hold")).expect("a file");
}

/// A pod that ends takes its link with it.
#[test]
fn removed_link_is_no_drift() {
    for attachment in attachments() {
        let nft = Nft::new();
        let mut looking = Looking::start(attachment, 2, nft.launcher());
        looking.bench.remove("one1");
        for _ in 0..2 {
            nft.forget_commands();
            assert_eq!(looking.look(), 0, "the node's facts report it");
            // The thread reads the links before the rules.
            nft.wait_for("answered");
        }
        let drift =
            looking.bench.runtime.block_on(async { timeout(Duration::ZERO, looking.drift.notified()).await });
        assert!(drift.is_err());
    }
}

#[test]
fn look_costs_the_thread_of_changes_the_same_calls_with_any_number_of_links() {
    for attachment in attachments() {
        let calls = [1, 6].map(|pairs| {
            let mut looking = Looking::start(attachment, pairs, Launcher::default());
            system_calls_of(|| assert_eq!(looking.look(), 0)).expect("strace")
        });
        assert_eq!(calls[0], calls[1]);
        let starts_a_process = |name: &String| name.contains("clone") || name.contains("fork");
        assert!(!calls[0].iter().any(starts_a_process), "{:?}", calls[0]);
    }
}
