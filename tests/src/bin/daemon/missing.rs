//! Scenarios in which the node lacks or refuses what a mode needs.

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
/// The time that a mode may fail, plus the time that the next one needs.
const GIVE_UP_TIMEOUT: Duration = Duration::from_mins(2);
const OFTEN: &str = "{iptables: {syncPeriod: 30s}, nftables: {syncPeriod: 30s}}";
const FAILURES: &str = "sync_proxy_rules_iptables_restore_failures_total";
const FAILED_FOR: Duration = Duration::from_secs(8);

/// The tables of nftables belong to another process. Those of iptables are free.
pub(crate) fn iptables_replaces_nftables_if_the_tables_are_refused(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "auto", OFTEN)?;
    // Without a bpf filesystem, programs cannot be pinned.
    let elsewhere = node.world.directory().join("no-bpffs");
    node.proxy.set_flag("--bpf-pin-dir", &elsewhere.display().to_string());
    let owned = OwnedTables::create(&node.world, &["ip kube-proxy", "ip6 kube-proxy"])?;
    node.proxy.spawn(&node.world)?;
    node.wait_for_metric("shunt_mode{mode=\"iptables\"} 1", GIVE_UP_TIMEOUT)?;
    node.wait_for_metric("shunt_modes_broken_total{mode=\"nftables\"} 1", TIMEOUT)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.wait_for_log("another mode replaces it", Duration::ZERO)?;
    drop(owned);
    node.end()
}

pub(crate) fn without_iptables_the_error_names_what_is_missing(setup: &Setup) -> Result<()> {
    let folder = Folder::new(&std::env::temp_dir())?;
    let shunt = without_iptables(&folder.0, &setup.shunt)?;
    let mut node = TestNode::new(&Setup { shunt, mode: "iptables".into() }, "iptables", "{}")?;
    ensure!(node.proxy.start(&mut node.world).is_err(), "it started without iptables");
    let log = node.proxy.log();
    ensure!(log.contains("the mode iptables does not work here"), "{log}");
    ensure!(log.contains("iptables-restore"), "{log}");
    Ok(())
}

/// A refused restore is retried with growing pauses. When it is accepted, everything is served.
pub(crate) fn a_failed_restore_is_retried_with_backoff(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "iptables", OFTEN)?;
    // Tables of iptables, so that neither family can be written.
    let owned = OwnedTables::create(&node.world, &["ip nat", "ip6 nat"])?;
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
    // The pauses double, from a tenth of a second on. Without backoff, there would be ten times as
    // many failures.
    ensure!(later <= 12.0, "{later} failures in {FAILED_FOR:?}");
    drop(owned);
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    node.end()
}

/// A restore that hangs, for example because it waits for a lock, is killed. The old state stays,
/// and the next process makes the change.
pub(crate) fn sigterm_does_not_wait_for_a_hanging_restore(setup: &Setup) -> Result<()> {
    let folder = Folder::new(&std::env::temp_dir())?;
    let shunt = with_slow_commands(&folder.0, &setup.shunt, &RESTORES, "[ \"$1\" != --version ]")?;
    let [slow, begun] = [SLOW_FILE, STARTED_FILE].map(|name| folder.0.join(name));
    let mut node = TestNode::new(&Setup { shunt, mode: "iptables".into() }, "iptables", OFTEN)?;
    node.proxy.set_flag("--log-filter", "info,proxy_userspace::sync=debug");
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    File::create(&slow)?;
    node.set_endpoints(&[Host::A1])?;
    let has_begun = || begun.exists().then_some(());
    Deadline::after(TIMEOUT).poll(has_begun).context("no restore has begun")?;
    // Far less than the restore takes, and than the time limit of commands.
    node.proxy.stop()?;
    node.wait_for_log("shunt is shutting down", Duration::ZERO)?;
    ensure!(!node.proxy.log().contains(" ERROR "), "stopping is logged as a failure:\n{}", node.proxy.log());
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    fs::remove_file(&slow)?;
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1], TIMEOUT)?;
    node.end()
}

/// Tables of nftables that only the owning process may change (kernel 5.12). They are removed when
/// this value is dropped.
struct OwnedTables {
    _commands: File,
    _holder: ChildProcess,
}

impl OwnedTables {
    fn create(world: &World, tables: &[&str]) -> Result<Self> {
        let path = world.directory().join("commands");
        let [path_text, log] =
            [path.display().to_string(), world.directory().join("nft.log").display().to_string()];
        world.run(Host::Node1, &format!("mkfifo {path_text}"))?;
        let mut commands = File::options().read(true).write(true).open(&path)?;
        let line = ["-c".to_owned(), format!("exec nft -i < {path_text}")];
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

/// A folder that is removed when this value is dropped.
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

/// Writes a program that executes this one in a mount namespace in which the iptables programs of
/// both variants are not executable.
fn without_iptables(folder: &Path, shunt: &Path) -> Result<PathBuf> {
    let path = folder.join("shunt-without-iptables");
    let hide = "for name in xtables-nft-multi xtables-legacy-multi; do \
                mount --bind /dev/null \"$(readlink -f \"$(command -v $name)\")\" || exit; done; exec \"$@\"";
    let script =
        format!("#!/bin/bash\nexec unshare --mount bash -c '{hide}' hide {} \"$@\"\n", shunt.display());
    write_script(&path, &script)?;
    Ok(path)
}
