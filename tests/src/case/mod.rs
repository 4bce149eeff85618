//! A conformance case as its file describes it: the configuration, the steps that change objects,
//! and the flows that must hold.

mod flow;
mod pairs;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_yaml_ng::{Mapping, Value};

pub use self::flow::{Action, Expectation, ExpectedAnswers, ExpectedPage, Flow, Peer, Send, Source};
use crate::world::{CgroupSubtree, Host};

/// The tags that `requires` may contain.
pub const TAGS: [&str; 16] = [
    "a-link-path-of-its-own",
    "an-xdp-mode-of-its-own",
    "bonds",
    "bridged-pods",
    "flows-of-its-own",
    "forward-of-legacy",
    "forward-of-nft",
    "ipv6",
    "libxdp",
    "localhost-nodeports",
    "nodeports-on-all-addresses",
    "rules-that-need-netfilter",
    "sctp",
    "ifb",
    "ipsec",
    "vlan-links",
];

/// The modes that a case may name.
pub const MODES: [&str; 4] = ["ebpf", "nftables", "iptables", "ipvs"];

/// A case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The name for `--only` and for reports.
    pub name: String,
    /// What the case tests.
    pub about: String,
    /// Fields that override the base configuration.
    #[serde(default)]
    pub config: Mapping,
    /// What the mode or the machine must support, from [`TAGS`].
    #[serde(default)]
    pub requires: Vec<String>,
    /// The modes in which the case runs. If empty, all modes.
    #[serde(default)]
    pub modes: Vec<String>,
    /// Hosts of node1 whose processes run outside the cgroup of the proxy.
    #[serde(default, rename = "outside-cgroup")]
    pub outside_cgroup: Vec<Host>,
    /// The nodes on which the proxy runs.
    #[serde(default = "only_node1")]
    pub proxies: Vec<Host>,
    /// Commands that change the world of this case before the proxy starts.
    #[serde(default)]
    pub world: Vec<Commands>,
    /// Hosts whose ports of the bridge take frames that drivers send (XDP).
    #[serde(default, rename = "ports-with-xdp")]
    pub ports_with_xdp: Vec<Host>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

/// A step: changes, made in the order of the fields, and the flows that must then hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Stop the proxy.
    #[serde(default)]
    pub stop: bool,
    /// Have the proxy remove everything it made. The proxy must be stopped.
    #[serde(default)]
    pub cleanup: bool,
    /// Start the proxy in this mode from now on. The proxy must be stopped. Without this key, the
    /// mode is that of the previous step, or of the run.
    #[serde(default)]
    pub mode: Option<String>,
    /// Objects to delete.
    #[serde(default)]
    pub delete: Vec<ObjectKey>,
    /// Objects to add or replace.
    #[serde(default)]
    pub apply: Vec<Object>,
    /// Start the proxy again.
    #[serde(default)]
    pub start: bool,
    /// Commands to run after the proxy has programmed the changes.
    #[serde(default)]
    pub run: Vec<Commands>,
    /// The flows that must hold.
    #[serde(default)]
    pub flows: Vec<Flow>,
}

/// Command lines for a host's shell, in its network namespace. Each must succeed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commands {
    /// The host.
    pub on: Host,
    /// The lines. Each is passed to `sh -c`.
    pub run: Vec<String>,
}

/// The key of an object. Written `Kind/namespace/name`, or `Kind/name` if it has no namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct ObjectKey {
    /// The kind, such as `EndpointSlice`.
    pub kind: String,
    /// The namespace. None for Nodes.
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
}

/// A Kubernetes object, passed to the proxy without changes.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Mapping")]
pub struct Object {
    /// The key, read from the manifest.
    pub key: ObjectKey,
    /// The whole manifest.
    pub manifest: Mapping,
}

impl Case {
    /// Reads and checks the cases of a file: one case, or one for each pair of modes. An error
    /// names the file, the field and the problem.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        pairs::texts(&text)
            .and_then(|texts| texts.iter().map(|text| text.parse()).collect())
            .with_context(|| path.display().to_string())
    }

    /// Returns true if the case needs its own world, because it changes more than the proxy
    /// removes.
    pub fn needs_own_world(&self) -> bool {
        self.proxies != only_node1()
            || !self.outside_cgroup.is_empty()
            || !self.world.is_empty()
            || !self.ports_with_xdp.is_empty()
            || self.steps.iter().any(|step| !step.run.is_empty() || step.mode.is_some())
    }

    /// Reads all cases below a directory. If `only` is not empty, returns only the named cases; an
    /// unknown name is an error.
    pub fn read_directory(directory: &Path, only: &[String]) -> Result<Vec<Self>> {
        let paths = yaml_files(directory)?;
        ensure!(!paths.is_empty(), "--cases: no .yaml files in {}", directory.display());
        let mut cases = paths.iter().map(|path| Self::read(path)).collect::<Result<Vec<_>>>()?.concat();
        if let Some(unknown) = only.iter().find(|name| cases.iter().all(|case| case.name != **name)) {
            bail!("--only: there is no case {unknown:?} in {}", directory.display());
        }
        if !only.is_empty() {
            cases.retain(|case| only.contains(&case.name));
        }
        Ok(cases)
    }

    fn check(&self) -> Result<()> {
        if let Some(unknown) = self.requires.iter().find(|tag| !TAGS.contains(&tag.as_str())) {
            bail!("requires: unknown tag {unknown:?}; known are {}", TAGS.join(", "));
        }
        if let Some(unknown) = self.modes.iter().find(|mode| !MODES.contains(&mode.as_str())) {
            bail!("modes: unknown mode {unknown:?}; known are {}", MODES.join(", "));
        }
        if let Some(host) = self.outside_cgroup.iter().find(|host| host.cgroup() != CgroupSubtree::Node1) {
            bail!("outside-cgroup: {host} is always outside; only node1 and its pods are inside");
        }
        self.check_proxies()?;
        ensure!(!self.steps.is_empty(), "steps: the list is empty");
        let mut open = BTreeSet::new();
        for (number, step) in self.steps.iter().enumerate() {
            for (flow_number, flow) in step.flows.iter().enumerate() {
                let place = || format!("steps[{number}].flows[{flow_number}]");
                match &flow.action {
                    Action::Connect(connect) => {
                        open.extend(connect.hold.iter().map(|id| (flow.from, id.clone())));
                    }
                    Action::Send(send) => ensure!(
                        open.contains(&(flow.from, send.request.id.clone())),
                        "{}: send: no earlier flow from {} has hold: {}",
                        place(),
                        flow.from,
                        send.request.id
                    ),
                    Action::Get(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Without a proxy on node1, the runner does not see when a step is programmed. In other modes
    /// than ebpf, nothing needs a second proxy.
    fn check_proxies(&self) -> Result<()> {
        const NODES: [Host; 2] = [Host::Node1, Host::Node2];
        if let Some(host) = self.proxies.iter().find(|host| !NODES.contains(host)) {
            bail!("proxies: {host} is not a node; the nodes are node1 and node2");
        }
        ensure!(self.proxies.contains(&Host::Node1), "proxies: node1 is missing; it always has a proxy");
        let distinct: BTreeSet<_> = self.proxies.iter().collect();
        ensure!(distinct.len() == self.proxies.len(), "proxies: a node is in the list twice");
        let only_ebpf = self.modes == ["ebpf"] && self.steps.iter().all(|step| step.mode.is_none());
        let needs_ebpf = self.proxies.contains(&Host::Node2);
        ensure!(
            only_ebpf || !needs_ebpf,
            "proxies: a case with a proxy on node2 needs `modes: [ebpf]`, and has no step with `mode`"
        );
        Ok(())
    }
}

fn only_node1() -> Vec<Host> {
    vec![Host::Node1]
}

impl FromStr for Case {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let document = serde_yaml_ng::Deserializer::from_str(text);
        let case: Self = serde_path_to_error::deserialize(document)?;
        case.check()?;
        Ok(case)
    }
}

/// Returns the files of the directory first, then those of its subdirectories.
fn yaml_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("--cases: read {}", directory.display()))?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    let directories: Vec<_> = paths.extract_if(.., |path| path.is_dir()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    for directory in directories {
        paths.extend(yaml_files(&directory)?);
    }
    Ok(paths)
}

impl TryFrom<String> for ObjectKey {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parts: Vec<_> = text.split('/').map(str::to_owned).collect();
        match <[String; 3]>::try_from(parts) {
            Ok([kind, namespace, name]) => Ok(Self { kind, namespace: Some(namespace), name }),
            Err(parts) => match <[String; 2]>::try_from(parts) {
                Ok([kind, name]) => Ok(Self { kind, namespace: None, name }),
                Err(_) => Err(format!("{text:?} is not Kind/namespace/name or Kind/name")),
            },
        }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self;
        match namespace {
            Some(namespace) => write!(f, "{kind}/{namespace}/{name}"),
            None => write!(f, "{kind}/{name}"),
        }
    }
}

impl TryFrom<Mapping> for Object {
    type Error = String;

    fn try_from(manifest: Mapping) -> Result<Self, String> {
        let metadata = manifest.get("metadata").and_then(Value::as_mapping);
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let key = ObjectKey {
            kind: text(manifest.get("kind")).ok_or("the object has no kind")?,
            namespace: metadata.and_then(|metadata| text(metadata.get("namespace"))),
            name: metadata
                .and_then(|metadata| text(metadata.get("name")))
                .ok_or("the object has no metadata.name")?,
        };
        Ok(Self { key, manifest })
    }
}
