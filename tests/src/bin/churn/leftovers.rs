//! What a proxy leaves in the kernel: what commands show on its node, and the objects that it pins.

use std::{collections::BTreeMap, fmt, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::Value;
use shunt_tests::{
    deadline::Deadline,
    process,
    world::{Host, World},
};

const BPFTOOL_TIMEOUT: Duration = Duration::from_mins(1);
/// The kernel frees programs and maps some time after the last reference is gone.
const FREE_TIMEOUT: Duration = Duration::from_mins(1);

/// Command lines for node1. Each shows one kind of state. `$CGROUP` is the proxy's cgroup.
const COMMANDS: [(&str, &str); 6] = [
    ("nftables", "nft list ruleset"),
    (
        "iptables-legacy",
        "if [ -s /proc/net/ip_tables_names ]; then iptables-legacy-save | grep -e -A -e '^:[A-Z-]* -' || true; fi",
    ),
    (
        "ip6tables-legacy",
        "if [ -s /proc/net/ip6_tables_names ]; then ip6tables-legacy-save | grep -e -A -e '^:[A-Z-]* -' || true; fi",
    ),
    (
        "tc",
        "tc qdisc show; for link in $(ip -o link | cut -d: -f2 | cut -d@ -f1); do tc filter show dev $link ingress; tc filter show dev $link egress; done",
    ),
    ("bpftool net", "bpftool net list"),
    ("bpftool cgroup", "bpftool cgroup show $CGROUP"),
];

/// The state of the kernel, as commands show it on the node.
#[derive(Debug)]
pub(crate) struct KernelState {
    shown: BTreeMap<&'static str, String>,
}

/// The pinned objects, by kind and identifier.
#[derive(Debug)]
pub(crate) struct PinnedObjects {
    objects: Vec<(&'static str, u64)>,
}

impl KernelState {
    /// Reads the current state.
    pub(crate) fn read(world: &World) -> Result<Self> {
        let cgroup = format!("CGROUP={}; ", world.cgroup_root().display());
        let read = |(name, line): &(&'static str, &str)| {
            Ok((*name, world.run(Host::Node1, &(cgroup.clone() + line))?))
        };
        Ok(Self { shown: COMMANDS.iter().map(read).collect::<Result<_>>()? })
    }

    /// Returns a line for each command whose output differs from `before`.
    pub(crate) fn difference_from(&self, before: &Self) -> Vec<String> {
        let differ = self.shown.iter().filter(|(name, text)| before.shown.get(*name) != Some(text));
        differ.map(|(name, text)| format!("{name} shows: {}", text.trim().replace('\n', "; "))).collect()
    }
}

impl PinnedObjects {
    /// Reads all objects below the proxy's pin directory; links with their programs.
    pub(crate) fn read(world: &World) -> Result<Self> {
        // Only the ebpf mode has a pin directory.
        let directory = world.pin_directory();
        if !directory.exists() {
            return Ok(Self { objects: Vec::new() });
        }
        let files = world.run(Host::Node1, &format!("find {} -type f", directory.display()))?;
        let mut objects = Vec::new();
        for file in files.lines() {
            objects.extend(identify(file).with_context(|| format!("identify the object pinned at {file}"))?);
        }
        Ok(Self { objects })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Returns a line for each object that still exists.
    pub(crate) fn remaining(&self) -> Vec<String> {
        let deadline = Deadline::after(FREE_TIMEOUT);
        let exists = |(kind, id): &&(&str, u64)| {
            deadline.poll(|| show(&[kind, "show", "id", &id.to_string()]).is_err().then_some(())).is_none()
        };
        self.objects.iter().filter(exists).map(|(kind, id)| format!("{kind} {id} still exists")).collect()
    }
}

fn identify(file: &str) -> Result<Vec<(&'static str, u64)>> {
    if let Ok(map) = show(&["map", "show", "pinned", file]) {
        return Ok(vec![("map", map["id"].as_u64().context("a map without id")?)]);
    }
    let link = show(&["link", "show", "pinned", file])?;
    let id = |name| link[name].as_u64().with_context(|| format!("a link without {name}"));
    Ok(vec![("link", id("id")?), ("prog", id("prog_id")?)])
}

/// Returns what bpftool shows of one object. An error if the object does not exist.
fn show(arguments: &[&str]) -> Result<Value> {
    let arguments = [&["-j"], arguments].concat();
    let finished = process::run_with_timeout(Path::new("bpftool"), &arguments, BPFTOOL_TIMEOUT)?;
    anyhow::ensure!(finished.status.success(), "bpftool: {}{}", finished.stdout, finished.stderr);
    serde_json::from_str(&finished.stdout).context("bpftool's JSON")
}

impl fmt::Display for PinnedObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |kind| self.objects.iter().filter(|(of, _)| *of == kind).count();
        write!(f, "{} maps, {} links and their programs", count("map"), count("link"))
    }
}
