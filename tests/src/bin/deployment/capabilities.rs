//! Scenarios about the capabilities that the `DaemonSet` lists.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize as _;
use serde_yaml_ng::Value;

use shunt_tests::{process, world::Host};

use crate::test_node::TestNode;

const LIMIT: Duration = Duration::from_secs(30);

const MODES: [&str; 3] = ["ebpf", "nftables", "iptables"];

/// Returns the specification of the pods of the `DaemonSet`.
pub(crate) fn pod() -> Result<Value> {
    let text = include_str!("../../../../deploy/kubernetes/daemonset.yaml");
    let daemon_set = Value::deserialize(serde_yaml_ng::Deserializer::from_str(text))?;
    Ok(daemon_set["spec"]["template"]["spec"].clone())
}

/// Returns the capabilities of the manifest, without `CAP_`.
pub(crate) fn listed_capabilities() -> Result<Vec<String>> {
    let context = &pod()?["containers"][0]["securityContext"];
    ensure!(context["privileged"] == Value::Bool(false), "the container is privileged");
    let names = context["capabilities"]["add"].as_sequence().context("capabilities")?;
    names.iter().map(|name| name.as_str().map(String::from).context("a name")).collect()
}

/// Returns the capabilities of this process, as capsh names them.
pub(crate) fn own_capabilities() -> Result<String> {
    capabilities_of("self", "CapEff:")
}

/// Returns a set of capabilities of a process, as capsh names them.
pub(crate) fn capabilities_of(process: &str, set: &str) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let set = status.lines().find_map(|line| line.strip_prefix(set)).context("no such set")?;
    let decoded = process::run_with_timeout(
        Path::new("/usr/sbin/capsh"),
        &[&format!("--decode={}", set.trim())],
        LIMIT,
    )?;
    Ok(decoded.stdout)
}

fn all_but(missing: &str) -> Result<Vec<String>> {
    let mut all = listed_capabilities()?;
    let before = all.len();
    all.retain(|name| name != missing);
    ensure!(all.len() < before, "the manifest does not list {missing}");
    Ok(all)
}

/// shunt serves with these capabilities only, and logs no complaint.
pub(crate) fn capabilities_of_the_manifest_are_sufficient(shunt: &Path, mode: &str) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    node.configure(mode, "{}")?;
    node.spawn(Some(&listed_capabilities()?), &[])?;
    node.wait_until_healthy()?;
    node.check_served()?;
    node.stop()?;
    let log = node.log()?;
    // A capability that this machine itself lacks cannot be given to a process.
    let may_adjust = own_capabilities()?.contains("cap_sys_resource");
    let counts = |line: &&str| may_adjust || !line.contains("oom_score_adj");
    let refused = |line: &&str| line.contains("denied") || line.contains("not permitted");
    let complaints: Vec<_> = log.lines().filter(refused).filter(counts).collect();
    ensure!(complaints.is_empty(), "the log has complaints: {complaints:?}");
    Ok(())
}

/// The table of `deploy/README.md`: what each mode needs at least.
pub(crate) fn each_mode_runs_with_the_capabilities_that_it_needs(shunt: &Path) -> Result<()> {
    for (mode, needed) in [
        ("ebpf", &["NET_ADMIN", "SYS_ADMIN"][..]),
        ("ebpf", &["NET_ADMIN", "BPF", "PERFMON"]),
        ("nftables", &["NET_ADMIN"]),
        ("iptables", &["NET_ADMIN"]),
    ] {
        let mut node = TestNode::build(shunt)?;
        node.configure(mode, "{}")?;
        let needed: Vec<String> = needed.iter().map(ToString::to_string).collect();
        node.spawn(Some(&needed), &[])?;
        node.wait_until_healthy().with_context(|| format!("{mode} with {needed:?}"))?;
        node.check_served().with_context(|| format!("{mode} with {needed:?}"))?;
        node.stop()?;
    }
    Ok(())
}

/// As in the manifest: the node's cgroups are mounted read-only. The path of the manifest, on a
/// node with both versions of cgroups, holds version 2 in a directory.
pub(crate) fn ebpf_works_on_read_only_cgroups_of_either_layout(shunt: &Path) -> Result<()> {
    for at in ["/mnt", "/mnt/unified"] {
        let mut node = TestNode::build(shunt)?;
        let script = format!(
            "mount -t tmpfs none /mnt && mkdir -p {at} && mount --bind {cgroup} {at} && \
             mount -o remount,bind,ro {at} && ! mkdir {at}/refused 2>/dev/null && exec \"$@\"",
            cgroup = node.world.cgroup_root().display()
        );
        let wrapper = ["/usr/bin/unshare", "--mount", "/bin/bash", "-c", &script, "cgroups"];
        node.configure("ebpf", "{}")?;
        node.spawn_within(&wrapper, &listed_capabilities()?, &["--cgroup-root", "/mnt"])?;
        node.wait_until_healthy()?;
        node.check_served()?;
        node.stop()?;
    }
    Ok(())
}

pub(crate) fn without_net_admin_no_mode_starts(shunt: &Path) -> Result<()> {
    for mode in MODES {
        check_fails_and_names(shunt, mode, "NET_ADMIN", "CAP_NET_ADMIN")?;
    }
    Ok(())
}

pub(crate) fn without_sys_admin_only_ebpf_does_not_start(shunt: &Path) -> Result<()> {
    check_fails_and_names(shunt, "ebpf", "SYS_ADMIN", "CAP_PERFMON, CAP_BPF")?;
    for mode in ["nftables", "iptables"] {
        let mut node = TestNode::build(shunt)?;
        node.configure(mode, "{}")?;
        node.spawn(Some(&all_but("SYS_ADMIN")?), &[])?;
        node.wait_until_healthy()?;
        node.check_served()?;
        node.stop()?;
    }
    Ok(())
}

pub(crate) fn without_net_raw_iptables_legacy_is_an_error(shunt: &Path) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    shunt_tests::runner::IptablesVariant::Legacy.write_hint(&node.world)?;
    node.configure("iptables", "{}")?;
    node.spawn(Some(&all_but("NET_RAW")?), &[])?;
    node.wait_for_log("CAP_NET_RAW")?;
    node.stop().or_else(|_| node.wait_for_exit().map(drop))
}

pub(crate) fn without_sys_resource_the_oom_score_stays(shunt: &Path) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    node.configure("nftables", "{}")?;
    node.spawn(Some(&all_but("SYS_RESOURCE")?), &[])?;
    node.wait_until_healthy()?;
    node.wait_for_log("oom_score_adj")?;
    node.wait_for_log("CAP_SYS_RESOURCE")?;
    node.check_served()?;
    node.stop()
}

/// Changes a setting of the network namespace only, not of the whole machine.
pub(crate) fn init_only_makes_the_settings_and_exits(shunt: &Path) -> Result<()> {
    const SETTING: &str = "cat /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    let node = TestNode::build(shunt)?;
    let before = node.world.run(Host::Node1, SETTING)?;
    ensure!(before.trim() != "1234", "the setting has this value already");
    let flags = "--init-only --mode nftables --hostname-override node1 --conntrack-max-per-core 0 \
                 --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 20m34s";
    node.world.run(Host::Node1, &format!("{} {flags}", shunt.display()))?;
    let after = node.world.run(Host::Node1, SETTING)?;
    ensure!(after.trim() == "1234", "the setting is {after}; it was {before}");
    Ok(())
}

fn check_fails_and_names(shunt: &Path, mode: &str, missing: &str, named: &str) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    node.configure(mode, "{}")?;
    node.spawn(Some(&all_but(missing)?), &[])?;
    ensure!(node.wait_for_exit()?, "{mode} without {missing} ends without an error");
    let log = node.log()?;
    let last = log.lines().last().unwrap_or_default();
    ensure!(last.contains(named), "{mode} without {missing} does not name it: {last}");
    Ok(())
}
