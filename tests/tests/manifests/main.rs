//! Checks `deploy/`: valid objects, roles with least rights, a chart that renders the same objects;
//! and commands of the pages.

mod chart;
mod direct_return;
mod golden;
mod kustomize;
mod migration;
mod render;

use std::{fs, net::IpAddr, path::Path};

use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, Pod, PodSpec, ServiceAccount, VolumeMount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proxy_userspace::{
    config::{Config, ConfigFile, Environment, Flags},
    dataplane::Mode,
};
use serde::{Deserialize as _, Serialize, de::DeserializeOwned};
use serde_json::Value;

fn deploy() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy"))
}

fn documents(text: &str) -> Vec<Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    documents.map(|document| Value::deserialize(document).expect("YAML")).collect()
}

fn files(directory: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(directory).expect("a directory");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry"))
        .map(|entry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                fs::read_to_string(entry.path()).expect("text"),
            )
        })
        .collect();
    files.sort();
    files
}

/// Returns the files of the plain manifests: their names and texts.
fn manifests() -> Vec<(String, String)> {
    let files = files(&deploy().join("kubernetes")).into_iter();
    files.filter(|(name, _)| name != kustomize::FILE).collect()
}

/// Returns all objects of the plain manifests.
fn objects() -> Vec<Value> {
    manifests().iter().flat_map(|(_, text)| documents(text)).collect()
}

fn object<T: DeserializeOwned>(kind: &str) -> T {
    let found = objects().into_iter().find(|object| object["kind"] == kind).expect(kind);
    serde_json::from_value(found).expect(kind)
}

/// Decodes an object as Kubernetes' type and encodes it again. Unknown fields get lost, so they are
/// found.
fn check<T: DeserializeOwned + Serialize>(object: &Value) {
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object:#}"));
    let back = serde_json::to_value(&typed).expect("JSON");
    assert_holds(&back, object, "");
}

/// Asserts that every field of `wanted` is in `object`, at any depth.
fn assert_holds(object: &Value, wanted: &Value, path: &str) {
    match (object, wanted) {
        (Value::Object(object), Value::Object(wanted)) => {
            for (name, value) in wanted {
                let path = format!("{path}.{name}");
                assert_holds(
                    object.get(name).unwrap_or_else(|| panic!("{path}: no such field")),
                    value,
                    &path,
                );
            }
        }
        (Value::Array(object), Value::Array(wanted)) => {
            assert_eq!(object.len(), wanted.len(), "{path}");
            for (i, (object, wanted)) in object.iter().zip(wanted).enumerate() {
                assert_holds(object, wanted, &format!("{path}[{i}]"));
            }
        }
        _ => assert_eq!(object, wanted, "{path}"),
    }
}

#[test]
fn objects_have_only_fields_that_kubernetes_knows() {
    for object in objects() {
        assert!(has_known_fields(&object), "say in has_known_fields what it is: {object:?}");
    }
}

/// Checks the fields of an object with Kubernetes' type. Returns false for a kind that is not of
/// Kubernetes.
fn has_known_fields(object: &Value) -> bool {
    match object["kind"].as_str().expect("a kind") {
        "ConfigMap" => check::<ConfigMap>(object),
        "DaemonSet" => check::<DaemonSet>(object),
        "ServiceAccount" => check::<ServiceAccount>(object),
        "ClusterRole" => check::<ClusterRole>(object),
        "ClusterRoleBinding" => check::<ClusterRoleBinding>(object),
        "ValidatingAdmissionPolicy" => check::<ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => check::<ValidatingAdmissionPolicyBinding>(object),
        _ => return false,
    }
    true
}

#[test]
#[should_panic(expected = "hostNetworks: no such field")]
fn unknown_field_is_found() {
    let mut object = objects().into_iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    object["spec"]["template"]["spec"]["hostNetworks"] = true.into();
    check::<DaemonSet>(&object);
}

/// Checks that a pod has what it mounts, and the rights of shunt and no more.
fn check_pod(pod: &PodSpec) -> &Container {
    assert_eq!(pod.host_network, Some(true));
    let [container] = &pod.containers[..] else { panic!("one container") };
    let mut mounts: Vec<_> =
        container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()).collect();
    let mut volumes: Vec<_> = pod.volumes.iter().flatten().map(|volume| volume.name.as_str()).collect();
    mounts.sort_unstable();
    volumes.sort_unstable();
    assert_eq!(mounts, volumes);
    let context = container.security_context.as_ref().expect("a context");
    assert_eq!((context.privileged, context.allow_privilege_escalation), (Some(false), Some(false)));
    let profile = context.app_armor_profile.as_ref().expect("an AppArmor profile");
    assert_eq!(profile.type_, "Unconfined", "the runtime's default denies pins");
    let capabilities = context.capabilities.as_ref().expect("capabilities");
    assert_eq!(capabilities.drop.as_deref(), Some(&["ALL".to_owned()][..]));
    let added = capabilities.add.as_deref().expect("some");
    let names = ["NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_RESOURCE"];
    assert_eq!(added, names, "the program `deployment` tries these");
    let seccomp = context.seccomp_profile.as_ref().expect("a seccomp profile");
    assert_eq!(seccomp.type_, "RuntimeDefault");
    let is_cgroup = |mount: &&VolumeMount| mount.name == "cgroup";
    let cgroup = container.volume_mounts.iter().flatten().find(is_cgroup).expect("cgroups");
    assert_eq!(cgroup.read_only, Some(true));
    container
}

#[test]
fn daemon_set_is_consistent_and_not_privileged() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let labels = set.template.metadata.and_then(|metadata| metadata.labels).expect("labels");
    for (name, value) in set.selector.match_labels.expect("a selector") {
        assert_eq!(labels.get(&name), Some(&value));
    }
    let pod = set.template.spec.expect("a pod");
    assert_eq!(pod.service_account_name.as_deref(), Some("shunt"));
    check_pod(&pod);
}

/// As kube-proxy's: it is not evicted for other pods, runs on nodes with any taint, and an upgrade
/// replaces it on few nodes at a time. Services need more memory on some days than on others, so
/// the kernel must not kill it for a limit.
#[test]
fn daemon_set_has_the_priority_and_tolerations_of_kube_proxy_and_no_limits() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let update = set.update_strategy.and_then(|strategy| strategy.rolling_update).expect("a strategy");
    assert_eq!(update.max_unavailable, Some(IntOrString::String("10%".into())));
    assert_eq!(update.max_surge, None, "two pods cannot have the ports of the node");
    let pod = set.template.spec.expect("a pod");
    assert_eq!(pod.priority_class_name.as_deref(), Some("system-node-critical"));
    let [toleration] = &pod.tolerations.expect("tolerations")[..] else { panic!("one toleration") };
    assert_eq!((toleration.operator.as_deref(), toleration.effect.as_deref()), (Some("Exists"), None));
    assert_eq!(toleration.key, None);
    let resources = pod.containers[0].resources.as_ref().expect("resources");
    assert_eq!(resources.limits, None);
    let requests = resources.requests.as_ref().expect("requests");
    assert_eq!((&*requests["cpu"].0, &*requests["memory"].0), ("50m", "160Mi"), "deploy/README.md has these");
}

/// Returns the configuration of the manifests, with the flags of a container.
fn configuration(container: &Container) -> Config {
    let map: ConfigMap = object("ConfigMap");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.conf");
    fs::write(&path, &map.data.expect("data")["config.conf"]).expect("written");
    let arguments = container.args.iter().flatten().map(|argument| {
        argument.replace("/etc/shunt", &directory.path().to_string_lossy()).replace("$(NODE_NAME)", "n")
    });
    let flags = Flags::parse(["shunt".to_owned()].into_iter().chain(arguments)).expect("flags");
    let file = flags.config.is_some().then(|| ConfigFile::read(&path).expect("the file"));
    let environment = Environment { host_name: "node1".into(), ..Environment::default() };
    Config::load_from(&flags, file, &environment, Mode::Ebpf).expect("a configuration")
}

#[test]
fn probes_ask_where_shunt_answers() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let container = set.template.spec.expect("a pod").containers.remove(0);
    let address = configuration(&container).healthz_bind_address.expect("an address");
    for probe in [&container.startup_probe, &container.readiness_probe] {
        let get = probe.as_ref().and_then(|probe| probe.http_get.as_ref()).expect("a request");
        let asked: IpAddr = get.host.as_deref().expect("a host").parse().expect("an address");
        assert!(address.ip() == asked || address.ip().is_unspecified(), "{address} {asked}");
        assert_eq!(get.port, IntOrString::Int(address.port().into()));
    }
}

/// `/livez` returns 503 if one family cannot be programmed. A restart does not help, and while its
/// pauses grow, nobody programs the other family.
#[test]
fn no_failure_to_program_the_kernel_restarts_the_pod() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let container = set.template.spec.expect("a pod").containers.remove(0);
    assert_eq!(container.liveness_probe, None);
}

/// They run on one node each, without access to the API server.
#[test]
fn pods_for_nodes_have_the_rights_and_the_image_of_the_daemon_set() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let of_set = set.template.spec.expect("a pod");
    let pods = files(&deploy().join("pods"));
    assert_eq!(pods.len(), 3);
    for (name, text) in pods {
        let object = documents(&text.replace("NODE", "node1")).remove(0);
        check::<Pod>(&object);
        let pod: Pod = serde_json::from_value(object).expect("a pod");
        let spec = pod.spec.expect("a spec");
        assert_eq!(spec.node_name.as_deref(), Some("node1"));
        assert_ne!(pod.metadata.labels, set.selector.match_labels, "the DaemonSet would adopt it");
        let container = check_pod(&spec);
        assert_eq!(container.image, of_set.containers[0].image);
        let arguments = ["shunt"].into_iter().chain(container.args.iter().flatten().map(String::as_str));
        let flags = Flags::parse(arguments).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(flags.probe.is_some() || !flags.runs(), "{name} would run the proxy");
        if flags.cleanup_own {
            let asked = configuration(container).metrics_bind_address;
            assert_eq!(asked, configuration(&of_set.containers[0]).metrics_bind_address);
        }
    }
}

#[test]
fn flags_and_file_of_the_daemon_set_are_accepted_without_warning() {
    let set = object::<DaemonSet>("DaemonSet").spec.expect("a spec");
    let config = configuration(&set.template.spec.expect("a pod").containers.remove(0));
    assert_eq!(config.ineffective, []);
    assert!(config.mode_is_auto && &*config.model.node_name == "n");
    assert_eq!(config.ebpf.cgroup_root, Path::new("/host/cgroup"));
}

/// Returns what rules allow, sorted.
fn allowed(rules: Option<Vec<PolicyRule>>) -> Vec<String> {
    let mut allowed = Vec::new();
    for rule in rules.expect("rules") {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                allowed.push(format!("{group}/{resource}: {}", rule.verbs.join(" ")));
            }
        }
    }
    allowed.sort();
    allowed
}

/// The program lists and watches three kinds, and in nftables mode a fourth. It writes Events about
/// the Node and Services.
#[test]
fn roles_allow_exactly_what_is_requested() {
    let role: ClusterRole = object("ClusterRole");
    assert_eq!(
        allowed(role.rules),
        [
            "/nodes: list watch",
            "/services: list watch",
            "discovery.k8s.io/endpointslices: list watch",
            "events.k8s.io/events: create",
            "networking.k8s.io/servicecidrs: list watch"
        ]
    );
    let account: ServiceAccount = object("ServiceAccount");
    let binding: ClusterRoleBinding = object("ClusterRoleBinding");
    let subjects = binding.subjects.expect("subjects");
    assert_eq!((binding.role_ref.name.as_str(), subjects.len()), ("shunt", 1));
    assert_eq!(Some(&subjects[0].name), account.metadata.name.as_ref());
    assert_eq!(subjects[0].namespace, account.metadata.namespace);
}

/// Returns a page of the repository.
fn page(name: &str) -> String {
    fs::read_to_string(deploy().join("..").join(name)).expect(name)
}

/// Returns the arguments of shunt in the blocks marked `sh` and in the code spans of a page.
fn arguments_of_shunt(page: &str) -> Vec<String> {
    let (mut is_command, mut found) = (false, Vec::new());
    for line in page.lines() {
        if line.starts_with("```") {
            is_command = line == "```sh";
        }
        let command = line.split(" #").next().unwrap_or_default().replace("target/release/", "");
        let spans = line.split('`').skip(1).step_by(2).map(str::to_owned);
        let commands = if is_command { vec![command] } else { spans.collect() };
        found.extend(commands.iter().filter_map(|command| command.strip_prefix("shunt ")).map(str::to_owned));
    }
    found
}

#[test]
fn commands_of_the_pages_are_accepted() {
    let mut found = 0;
    for name in ["README.md", "deploy/README.md", "docs/migration.md", "docs/ebpf.md"] {
        for arguments in arguments_of_shunt(&page(name)) {
            match Flags::parse(["shunt"].into_iter().chain(arguments.split_whitespace())) {
                Ok(_) => found += 1,
                Err(error) => panic!("{name}: shunt {arguments}: {error}"),
            }
        }
    }
    assert!(found >= 5, "{found} commands");
}

#[test]
fn configuration_of_the_readme_is_accepted_without_warning() {
    let page = page("README.md");
    let text = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a file");
    let path = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
    fs::write(&path, text).expect("written");
    let flags = Flags::parse(["shunt", "--config", "unread"]).expect("flags");
    let file = Some(ConfigFile::read(&path).expect("the file"));
    let config =
        Config::load_from(&flags, file, &Environment::default(), Mode::Ebpf).expect("a configuration");
    assert_eq!((config.ineffective, &*config.model.node_name), (Vec::new(), "node1"));
}
