//! Scenarios about AppArmor: under the rules that container runtimes apply by default, shunt names
//! the profile and falls back; without a profile it uses eBPF.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{
    process,
    world::{Host, World},
};

use crate::{capabilities::listed_capabilities, test_node::TestNode};

const PARSER: &str = "/usr/sbin/apparmor_parser";
const LIMIT: Duration = Duration::from_mins(1);
/// The name of the profile in the text.
pub(crate) const PROFILE: &str = "shunt-test-runtime-default";
const TEXT: &str = include_str!("runtime-default.apparmor");
/// What the log and the probe must contain: who denies it, and what to do about it.
const REPORTED: [&str; 2] =
    ["the AppArmor profile shunt-test-runtime-default denies it", "securityContext.appArmorProfile.type"];

/// The profile in the kernel. It is removed when this value is dropped.
struct LoadedProfile {
    file: String,
}

impl LoadedProfile {
    fn load(world: &World) -> Result<Self> {
        let file = world.directory().join(PROFILE);
        fs::write(&file, TEXT)?;
        let this = Self { file: file.display().to_string() };
        this.parse("--replace").context("the kernel needs AppArmor, and securityfs must be mounted")?;
        Ok(this)
    }

    fn parse(&self, action: &str) -> Result<()> {
        let arguments = [action, "--skip-cache", &self.file];
        let finished = process::run_with_timeout(Path::new(PARSER), &arguments, LIMIT)?;
        ensure!(finished.status.success(), "{PARSER} {action}: {}", finished.stderr);
        Ok(())
    }
}

impl Drop for LoadedProfile {
    fn drop(&mut self) {
        if let Err(error) = self.parse("--remove") {
            eprintln!("cannot remove the profile {PROFILE}: {error:#}");
        }
    }
}

/// Asserts that a text names the profile and the remedy.
fn check_reported(text: &str) -> Result<()> {
    REPORTED.iter().try_for_each(|part| {
        ensure!(text.contains(part), "{part:?} is missing:\n{text}");
        Ok(())
    })
}

pub(crate) fn the_probe_names_the_profile(shunt: &Path) -> Result<()> {
    let node = TestNode::build(shunt)?;
    let _profile = LoadedProfile::load(&node.world)?;
    let probe = format!("{} probe", shunt.display());
    let confined = format!("echo exec {PROFILE} >/proc/self/attr/exec; exec {probe}");
    check_reported(&node.world.run(Host::Node1, &confined)?)?;
    let unconfined = node.world.run(Host::Node1, &probe)?;
    ensure!(!unconfined.contains("AppArmor"), "without a profile:\n{unconfined}");
    Ok(())
}

/// The profile also denies writes to `/proc/sys/net`. In the pod, the sysctls are mounted
/// elsewhere. Here, node ports on loopback addresses are off, because the iptables mode sets a
/// sysctl for them.
pub(crate) fn auto_falls_back_and_names_the_profile(shunt: &Path) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    let _profile = LoadedProfile::load(&node.world)?;
    node.configure("auto", "{iptables: {localhostNodePorts: false}}")?;
    node.spawn_confined(PROFILE, &listed_capabilities()?)?;
    node.wait_until_healthy()?;
    let mode = node.mode()?;
    ensure!(["nftables", "iptables"].contains(&&*mode), "the mode is {mode}:\n{}", node.log()?);
    check_reported(&node.log()?)?;
    node.check_served()?;
    node.stop()
}

/// A pin directory that an earlier process created does not help.
pub(crate) fn ebpf_does_not_start_and_names_the_profile(shunt: &Path) -> Result<()> {
    for prepare in ["true", "mkdir -p $PINS/links"] {
        let mut node = TestNode::build(shunt)?;
        let _profile = LoadedProfile::load(&node.world)?;
        node.world.run(Host::Node1, prepare)?;
        node.configure("ebpf", "{}")?;
        node.spawn_confined(PROFILE, &listed_capabilities()?)?;
        ensure!(node.wait_for_exit()?, "after {prepare}, ebpf ends without an error");
        check_reported(&node.log()?)?;
    }
    Ok(())
}

pub(crate) fn auto_uses_ebpf_without_a_profile(shunt: &Path) -> Result<()> {
    let mut node = TestNode::build(shunt)?;
    let _profile = LoadedProfile::load(&node.world)?;
    node.configure("auto", "{}")?;
    node.spawn(Some(&listed_capabilities()?), &[])?;
    node.wait_until_healthy()?;
    let mode = node.mode()?;
    ensure!(mode == "ebpf", "the mode is {mode}:\n{}", node.log()?);
    node.check_served()?;
    node.stop()
}
