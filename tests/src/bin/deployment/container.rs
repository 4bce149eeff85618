//! Scenarios about the image of a release: containerd runs it with the security context and the
//! mounts of the `DaemonSet`, and it serves a Service in each mode.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_yaml_ng::Value;
use shunt_tests::{runner::IptablesVariant, world::Host};

use crate::{
    capabilities::{capabilities_of, listed_capabilities, own_capabilities, pod},
    runtime::{PROGRAM, Runtime},
    test_node::TestNode,
};

/// The capabilities that containerd gives to a container.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// Commands of the image that print their version.
const COMMANDS: [&str; 7] = [
    "/usr/sbin/nft",
    "/usr/sbin/ipset",
    "/usr/sbin/iptables",
    "/usr/sbin/iptables-nft-restore",
    "/usr/sbin/iptables-legacy-restore",
    "/usr/sbin/ip6tables-nft-restore",
    "/usr/sbin/ip6tables-legacy-restore",
];

/// A container that serves, and what it runs in. The runtime ends before the world.
struct Container {
    runtime: Runtime,
    node: TestNode,
}

impl Container {
    /// Starts the container in a mode, and waits until it is healthy.
    fn start(image: &Path, mode: &str, prepare: impl FnOnce(&TestNode) -> Result<()>) -> Result<Self> {
        // The binary is that of the image.
        let mut node = TestNode::build(Path::new(PROGRAM))?;
        prepare(&node)?;
        node.configure(mode, "{}")?;
        let runtime = Runtime::start(&node.world, image)?;
        let pod = pod()?;
        let container = &pod["containers"][0];
        let options =
            [security(&container["securityContext"])?, mounts(&node, &pod)?, environment()].concat();
        let network = node.world.namespace_path(Host::Node1)?;
        let command = runtime.run(&network, &options, &arguments(container)?);
        node.spawn_command(command)?;
        node.wait_until_healthy()?;
        Ok(Self { runtime, node })
    }

    /// Asserts that the process has the rights of the manifest and no others.
    fn check_confined(&self) -> Result<()> {
        let process = self.runtime.process()?;
        let own = own_capabilities()?;
        let mut wanted = given_capabilities(&own)?;
        for set in ["CapBnd:", "CapEff:", "CapPrm:"] {
            let decoded = capabilities_of(&process, set)?;
            let names = decoded.trim().split('=').nth(1).unwrap_or_default().to_uppercase();
            let mut found: Vec<&str> = names.split(',').map(|name| name.trim_start_matches("CAP_")).collect();
            found.sort_unstable();
            wanted.sort_unstable();
            ensure!(found == wanted, "{set} {found:?} instead of {wanted:?}");
        }
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        for (field, wanted) in [("NoNewPrivs:", "1"), ("Seccomp:", "2")] {
            let value = status.lines().find_map(|line| line.strip_prefix(field)).context(field)?;
            ensure!(value.trim() == wanted, "{field} {value}");
        }
        let mounts = fs::read_to_string(format!("/proc/{process}/mounts"))?;
        let root = mounts.lines().find(|line| line.split(' ').nth(1) == Some("/")).context("no root")?;
        ensure!(root.split(' ').nth(3).is_some_and(|options| options.starts_with("ro")), "{root}");
        Ok(())
    }

    /// Checks that Services are served, in this mode, and stops.
    fn check(&mut self, mode: &str) -> Result<()> {
        let running = self.node.mode()?;
        ensure!(running == mode, "the mode is {running}:\n{}", self.node.log()?);
        self.node.check_served()?;
        self.check_confined()
    }
}

/// Returns the capabilities of the manifest that this machine can give.
fn given_capabilities(own: &str) -> Result<Vec<String>> {
    let can_give = |name: &String| own.contains(&format!("cap_{}", name.to_lowercase()));
    Ok(listed_capabilities()?.into_iter().filter(can_give).collect())
}

/// Returns the options for a security context. A field that is not known here is an error.
fn security(context: &Value) -> Result<Vec<String>> {
    let mut options = Vec::new();
    for (field, value) in context.as_mapping().context("a security context")? {
        let field = field.as_str().context("a field")?;
        match (field, value) {
            ("privileged" | "allowPrivilegeEscalation", Value::Bool(false)) => {}
            ("readOnlyRootFilesystem", Value::Bool(true)) => options.push("--read-only".to_owned()),
            ("runAsUser", Value::Number(user)) if user.as_u64() == Some(0) => {}
            ("seccompProfile", profile) if profile["type"] == "RuntimeDefault" => {
                options.push("--seccomp".to_owned());
            }
            ("appArmorProfile", profile) if profile["type"] == "Unconfined" => {}
            ("capabilities", capabilities) if capabilities["drop"][0] == "ALL" => {
                let given = given_capabilities(&own_capabilities()?)?;
                let dropped =
                    DEFAULT_CAPABILITIES.iter().filter(|name| !given.iter().any(|given| given == *name));
                options.extend(dropped.flat_map(|name| ["--cap-drop".to_owned(), format!("CAP_{name}")]));
                options.extend(given.iter().flat_map(|name| ["--cap-add".to_owned(), format!("CAP_{name}")]));
            }
            (field, value) => bail!("securityContext.{field}: {value:?} is not known here"),
        }
    }
    Ok(options)
}

/// Returns the options for the mounts of the manifest, whose sources are in the world.
fn mounts(node: &TestNode, pod: &Value) -> Result<Vec<String>> {
    let container = &pod["containers"][0];
    let mut options = Vec::new();
    for mount in container["volumeMounts"].as_sequence().context("mounts")? {
        let (name, path) = (text(&mount["name"])?, text(&mount["mountPath"])?);
        let source = source(node, name)?;
        let access = if mount["readOnly"] == true { "ro" } else { "rw" };
        let propagation = match &mount["mountPropagation"] {
            Value::Null => "rprivate",
            Value::String(kind) if kind == "HostToContainer" => "rslave",
            other => bail!("mountPropagation: {other:?} is not known here"),
        };
        options.extend(bind(&source, path, &format!("{propagation}:{access}")));
    }
    // The objects come from files, because the world has no API server.
    options.extend(bind(node.manifests(), "/manifests", "rprivate:ro"));
    Ok(options)
}

fn bind(source: &Path, path: &str, options: &str) -> [String; 2] {
    let source = source.display();
    ["--mount".to_owned(), format!("type=bind,src={source},dst={path},options=rbind:{options}")]
}

/// Returns what the world has in place of a volume of the node.
fn source(node: &TestNode, volume: &str) -> Result<PathBuf> {
    let world = &node.world;
    let own = world.directory().join(volume);
    match volume {
        "config" => Ok(node.mount()),
        "bpffs" => Ok(world.pin_directory().parent().context("the mount point of bpffs")?.to_owned()),
        // The mount namespace of the runtime has cgroup version 2 there.
        "cgroup" => {
            let subtree = world.cgroup_root();
            let subtree = subtree.file_name().context("a cgroup")?;
            Ok(Path::new("/sys/fs/cgroup").join(world.name()).join(subtree))
        }
        "netns" => Ok("/run/netns".into()),
        "sysctl" => Ok("/proc/sys/net".into()),
        "xtables-lock" => fs::write(&own, "").map(|()| own).context("the lock"),
        "modules" => fs::create_dir_all(&own).map(|()| own).context("the modules"),
        other => bail!("the volume {other} is not known here"),
    }
}

fn environment() -> Vec<String> {
    vec!["--env".to_owned(), "NODE_NAME=node1".to_owned()]
}

/// Returns the arguments of the manifest, in which the kubelet replaces variables.
fn arguments(container: &Value) -> Result<Vec<String>> {
    let listed = container["args"].as_sequence().context("arguments")?;
    let own = listed.iter().map(|argument| Ok(text(argument)?.replace("$(NODE_NAME)", "node1")));
    own.chain([Ok("--manifests=/manifests".to_owned())]).collect()
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("{value:?} is no text"))
}

pub(crate) fn ebpf(image: &Path) -> Result<()> {
    let mut container = Container::start(image, "ebpf", |_| Ok(()))?;
    container.check("ebpf")?;
    for command in COMMANDS {
        let version = container.runtime.exec(&[command, "--version"])?;
        ensure!(version.contains(" v"), "{command}: {version}");
    }
    container.node.stop()
}

pub(crate) fn nftables(image: &Path) -> Result<()> {
    let mut container = Container::start(image, "nftables", |_| Ok(()))?;
    container.check("nftables")?;
    container.node.stop()
}

pub(crate) fn iptables_nft(image: &Path) -> Result<()> {
    iptables(image, IptablesVariant::Nft, "iptables-nft-save")
}

pub(crate) fn iptables_legacy(image: &Path) -> Result<()> {
    iptables(image, IptablesVariant::Legacy, "iptables-legacy-save")
}

/// The rules must be those of this variant.
fn iptables(image: &Path, variant: IptablesVariant, save: &str) -> Result<()> {
    let mut container = Container::start(image, "iptables", |node| variant.write_hint(&node.world))?;
    container.check("iptables")?;
    let rules = container.node.world.run(Host::Node1, &format!("{save} -t nat"))?;
    ensure!(rules.contains(":KUBE-SERVICES "), "{save} shows no rules of shunt:\n{rules}");
    container.node.stop()
}
