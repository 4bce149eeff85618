//! What a mode needs and the node has not, or will not give: what follows, and what is said.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    deadline::Deadline,
    process::{ChildProcess, write_script},
    slow_commands::{SLOW_FILE, STARTED_FILE, with_slow_commands},
    world::{Host, World},
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
const RESTORES: [&str; 4] =
    ["iptables-nft-restore", "iptables-legacy-restore", "ip6tables-nft-restore", "ip6tables-legacy-restore"];
/// The time that a mode may fail, and the time that the next one takes.
const GIVE_UP_TIMEOUT: Duration = Duration::from_mins(2);
const OFTEN: &str = "{iptables: {syncPeriod: 30s}, nftables: {syncPeriod: 30s}}";
const FAILURES: &str = "sync_proxy_rules_iptables_restore_failures_total";
const FAILED_FOR: Duration = Duration::from_secs(8);

/// Its tables belong to somebody else, while iptables' are free.
pub(crate) fn nftables_that_is_refused_is_followed_by_iptables(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "auto", OFTEN)?;
    // Programs cannot be pinned where no bpf filesystem is.
    let elsewhere = node.world.directory().join("no-bpffs");
    node.proxy.set_flag("--bpf-pin-dir", &elsewhere.display().to_string());
    let owned = Owned::tables(&node.world, &["ip kube-proxy", "ip6 kube-proxy"])?;
    node.proxy.spawn(&node.world)?;
    node.wait_for_metric("shunt_mode{mode=\"iptables\"} 1", GIVE_UP_TIMEOUT)?;
    node.wait_for_metric("shunt_modes_broken_total{mode=\"nftables\"} 1", TIMEOUT)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.wait_for_log("another mode replaces it", Duration::ZERO)?;
    drop(owned);
    node.end()
}

pub(crate) fn a_node_without_iptables_is_told_what_is_missing(setup: &Setup) -> Result<()> {
    let folder = Folder::new(&std::env::temp_dir())?;
    let shunt = without_iptables(&folder.0, &setup.shunt)?;
    let mut node = TestNode::new(&Setup { shunt, mode: "iptables".into() }, "iptables", "{}")?;
    ensure!(node.proxy.start(&mut node.world).is_err(), "it started without iptables");
    let log = node.proxy.log();
    ensure!(log.contains("the mode iptables does not work here"), "{log}");
    ensure!(log.contains("iptables-restore"), "{log}");
    Ok(())
}

/// What is refused is tried again, later and later; once it is taken, all is served.
pub(crate) fn a_restore_that_fails_is_tried_again_later_and_later(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "iptables", OFTEN)?;
    // Of iptables' own, so that neither family can be written.
    let owned = Owned::tables(&node.world, &["ip nat", "ip6 nat"])?;
    node.proxy.spawn(&node.world)?;
    let failures = |node: &mut TestNode| -> Option<f64> {
        let body = node.page("/metrics").ok()?.body;
        let lines = body.lines().filter(|line| line.contains(FAILURES) && !line.starts_with('#'));
        Some(lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
    };
    Deadline::after(TIMEOUT)
        .poll(|| (failures(&mut node)? >= 3.0).then_some(()))
        .with_context(|| format!("no failures are counted: {}", node.proxy.log_tail(10)))?;
    let first = failures(&mut node).context("/metrics")?;
    Deadline::after(FAILED_FOR).poll(|| None::<()>);
    let later = failures(&mut node).context("/metrics")? - first;
    // Pauses double from a tenth of a second on: ten times as many without.
    ensure!(later <= 12.0, "{later} failures in {FAILED_FOR:?}");
    drop(owned);
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.end()
}

/// A restore that hangs, as one may that waits for somebody else's lock, is killed: what was there goes on, and the next process
/// makes the change.
pub(crate) fn sigterm_waits_for_no_restore_that_does_not_end(setup: &Setup) -> Result<()> {
    let folder = Folder::new(&std::env::temp_dir())?;
    let shunt = with_slow_commands(&folder.0, &setup.shunt, &RESTORES, "[ \"$1\" != --version ]")?;
    let [slow, begun] = [SLOW_FILE, STARTED_FILE].map(|name| folder.0.join(name));
    let mut node = TestNode::new(&Setup { shunt, mode: "iptables".into() }, "iptables", OFTEN)?;
    node.proxy.set_flag("--log-filter", "info,proxy_userspace::sync=debug");
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    File::create(&slow)?;
    node.serve(&[Host::A1])?;
    let has_begun = || begun.exists().then_some(());
    Deadline::after(TIMEOUT).poll(has_begun).context("no restore has begun")?;
    // Far less than what the restore takes, and than what any command may take.
    node.proxy.stop()?;
    node.wait_for_log("shunt is shutting down", Duration::ZERO)?;
    ensure!(!node.proxy.log().contains(" ERROR "), "stopping is told as a failure:\n{}", node.proxy.log());
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    fs::remove_file(&slow)?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1], TIMEOUT)?;
    node.end()
}

/// Tables of nftables that only the process that holds them may change (kernel 5.12). They go when this is dropped.
struct Owned {
    _commands: File,
    _holder: ChildProcess,
}

impl Owned {
    fn tables(world: &World, tables: &[&str]) -> Result<Self> {
        let path = world.directory().join("commands");
        let [shown, log] =
            [path.display().to_string(), world.directory().join("nft.log").display().to_string()];
        world.run(Host::Node1, &format!("mkfifo {shown}"))?;
        let mut commands = File::options().read(true).write(true).open(&path)?;
        let line = ["-c".to_owned(), format!("exec nft -i < {shown}")];
        let holder = world.spawn(Host::Node1, Path::new("/bin/bash"), &line, &File::create(&log)?)?;
        for table in tables {
            writeln!(commands, "add table {table} {{ flags owner; }}")?;
        }
        let is_held = || {
            let listed = world.run(Host::Node1, "nft list ruleset").unwrap_or_default();
            (listed.matches("flags owner").count() == tables.len()).then_some(())
        };
        Deadline::after(TIMEOUT)
            .poll(is_held)
            .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        Ok(Self { _commands: commands, _holder: holder })
    }
}

/// A folder that goes when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(parent: &Path) -> Result<Self> {
        let path = parent.join(format!("shunt-test-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// A program that becomes this one, in a mount namespace in which iptables of both kinds are no programs.
fn without_iptables(folder: &Path, shunt: &Path) -> Result<PathBuf> {
    let path = folder.join("shunt-without-iptables");
    let hide = "for name in xtables-nft-multi xtables-legacy-multi; do \
                mount --bind /dev/null \"$(readlink -f \"$(command -v $name)\")\" || exit; done; exec \"$@\"";
    let script =
        format!("#!/bin/bash\nexec unshare --mount bash -c '{hide}' hide {} \"$@\"\n", shunt.display());
    write_script(&path, &script)?;
    Ok(path)
}
