//! Scenarios of the ebpf mode without a bpf filesystem for the pins.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use shunt_tests::{agent::protocol::GetRequest, deadline::Deadline, process::write_script, world::Host};

use super::test_node::{Setup, TestNode};

const HEALTHZ: &str = "http://127.0.0.1:10256/healthz";
const TIMEOUT: Duration = Duration::from_secs(30);
const OFTEN: &str = "{iptables: {syncPeriod: 1s}, nftables: {syncPeriod: 1s}}";
const FAILURES: &str = "shunt_sync_failures_total{ip_family=\"IPv4\"} ";
/// What the log must contain: what is missing, and what to do about it.
const LOG_PARTS: [&str; 3] = ["is not on a bpf filesystem", "mount -t bpf bpf /sys/fs/bpf", "--bpf-pin-dir"];

pub(crate) fn without_a_bpf_filesystem_the_proxy_ends_with_an_error(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, "ebpf", "{}")?;
    let elsewhere = node.world.directory().join("no-bpffs");
    node.proxy.set_flag("--bpf-pin-dir", &elsewhere.display().to_string());
    ensure!(node.proxy.start(&mut node.world).is_err(), "it started without a bpf filesystem");
    wait_for_log_parts(&node, &elsewhere)?;
    ensure!(!fs::exists(&elsewhere)?, "it left something in the directory");
    let programs = node.world.run(Host::Node1, "bpftool net list; nft list ruleset")?;
    ensure!(!programs.contains("shunt"), "it left something in the kernel: {programs}");
    Ok(())
}

/// kube-proxy's own `DaemonSet` does not mount `/sys/fs/bpf`. A bpf filesystem that shunt mounted
/// would end with the container, and connections with it.
pub(crate) fn a_bpf_filesystem_of_the_container_only_is_refused_for_ebpf(setup: &Setup) -> Result<()> {
    const REASON: &str = "would end with this container";
    let folder = tempfile::tempdir()?;
    let shunt = folder.path().join("shunt-without-bpffs");
    let hide = "while umount --lazy /sys/fs/bpf 2>/dev/null; do :; done; exec \"$@\"";
    let script =
        format!("#!/bin/bash\nexec unshare --mount bash -c '{hide}' hide {} \"$@\"\n", setup.shunt.display());
    write_script(&shunt, &script)?;
    let contained = |mode| {
        let mut node = TestNode::new(&Setup { shunt: shunt.clone(), mode: setup.mode.clone() }, mode, "{}")?;
        node.proxy.set_flag("--bpf-pin-dir", "/sys/fs/bpf/shunt");
        anyhow::Ok(node)
    };
    let mut node = contained("ebpf")?;
    ensure!(node.proxy.start(&mut node.world).is_err(), "it started without a bpf filesystem that lasts");
    [REASON, "the mode ebpf does not work here"]
        .iter()
        .try_for_each(|part| node.wait_for_log(part, TIMEOUT))?;
    let mut node = contained("auto")?;
    node.proxy.start(&mut node.world)?;
    node.wait_for_metric("shunt_mode{mode=\"nftables\"} 1", TIMEOUT)?;
    node.wait_for_log(REASON, Duration::ZERO)?;
    let report = node.world.run(Host::Node1, &format!("{} probe", shunt.display()))?;
    ensure!(report.contains(REASON), "{report}");
    node.end()
}

/// Programs and maps are in the kernel and work. But shunt cannot repair them, and they cannot
/// outlive the process.
pub(crate) fn a_lost_bpf_filesystem_makes_the_proxy_unhealthy(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, "ebpf", OFTEN)?;
    let pins = node.world.pin_directory();
    node.under_load(|node| {
        let covered = Covered::new(&pins)?;
        wait_for_health(node, 503)?;
        wait_for_log_parts(node, &pins)?;
        let failures = |node: &mut TestNode| {
            let body = node.page("/metrics").ok()?.body;
            body.lines().find_map(|line| line.strip_prefix(FAILURES)?.parse::<u64>().ok())
        };
        Deadline::after(TIMEOUT)
            .poll(|| failures(node).filter(|count| *count > 0))
            .context("no failure is counted")?;
        drop(covered);
        wait_for_health(node, 200)?;
        node.wait_for_log("programming the kernel works again", TIMEOUT)?;
        let lock = format!("flock --nonblock {} true", pins.display());
        ensure!(node.world.run(Host::Node1, &lock).is_err(), "another proxy could write the same maps");
        node.set_endpoints(&[Host::A2, Host::A3])?;
        let served = node.wait_until_served(&[Host::A2, Host::A3], TIMEOUT);
        served.with_context(|| node.proxy.log_tail(20))
    })?;
    node.end()
}

/// Nodes in containers may share a bpf filesystem. The second proxy must neither take the first
/// one's connections over nor remove its programs, whatever it starts as.
pub(crate) fn another_node_leaves_the_pins_of_a_running_proxy_alone(setup: &Setup) -> Result<()> {
    let mut first = TestNode::started(setup, "ebpf", "{}")?;
    let mut second = TestNode::new(setup, "nftables", "{}")?;
    let pins = first.world.pin_directory();
    second.proxy.set_flag("--bpf-pin-dir", &pins.display().to_string());
    let process = first.proxy.process_id().context("the first proxy does not run")?;
    let in_use = format!("another shunt (process {process}) uses {}", pins.display());
    first.under_load(|first| {
        second.proxy.start(&mut second.world)?;
        second.wait_for_log(&in_use, TIMEOUT)?;
        first.set_endpoints(&[Host::A2, Host::A3])?;
        first.wait_until_served(&[Host::A2, Host::A3], TIMEOUT)?;
        second.proxy.stop()?;
        ensure!(second.proxy.clean_up(&second.world).is_err(), "--cleanup beside a running proxy succeeds");
        ensure!(second.proxy.log().contains("nothing was removed"), "{}", second.proxy.log_tail(5));
        let tables = second.world.run(Host::Node1, "nft list tables")?;
        ensure!(tables.contains("kube-proxy"), "--cleanup removed something: {tables}");
        first.set_endpoints(&[Host::A1, Host::A3])?;
        first.wait_until_served(&[Host::A1, Host::A3], TIMEOUT)
    })?;
    first.end()?;
    second.proxy.clean_up(&second.world)
}

fn wait_for_log_parts(node: &TestNode, directory: &Path) -> Result<()> {
    node.wait_for_log(&directory.display().to_string(), TIMEOUT)?;
    LOG_PARTS.iter().try_for_each(|part| node.wait_for_log(part, TIMEOUT))
}

pub(super) fn wait_for_health(node: &mut TestNode, status: u16) -> Result<()> {
    let get = GetRequest { url: HEALTHZ.into(), timeout: TIMEOUT };
    let mut look = || {
        let page = node.world.agent(Host::Node1).ok()?.get(get.clone()).ok()?.ok()?;
        (page.status == status).then_some(())
    };
    let answered = Deadline::after(TIMEOUT).poll(&mut look);
    answered.with_context(|| format!("/healthz does not answer {status}:\n{}", node.proxy.log_tail(20)))
}

/// An empty file system mounted over a directory. It is unmounted when this value is dropped.
pub(crate) struct Covered<'a>(&'a Path);

impl<'a> Covered<'a> {
    pub(crate) fn new(path: &'a Path) -> Result<Self> {
        ensure!(fs::exists(path)?, "{} is not there", path.display());
        let none = None::<&str>;
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), none).context("mount over the pins")?;
        Ok(Self(path))
    }
}

impl Drop for Covered<'_> {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0, MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {error}", self.0.display());
        }
    }
}
