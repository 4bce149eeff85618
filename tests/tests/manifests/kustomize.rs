//! Checks the base and the overlay of kustomize: their files exist, and the base has all manifests.

use std::{fs, path::Path, time::Duration};

use k8s_openapi::api::apps::v1::DaemonSet;
use proxy_userspace::{
    config::{Config, ConfigFile, Environment, Flags},
    dataplane::Mode,
    kernel::command::Command,
};
use serde_json::Value;

use crate::{deploy, documents, manifests, object, objects, render::launcher_of};

/// The file that makes a folder one of kustomize.
pub(crate) const FILE: &str = "kustomization.yaml";

fn base() -> std::path::PathBuf {
    deploy().join("kubernetes")
}

fn example() -> std::path::PathBuf {
    deploy().join("overlays/example")
}

fn kustomization(folder: &Path) -> Value {
    documents(&fs::read_to_string(folder.join(FILE)).expect("a kustomization")).remove(0)
}

fn texts<'a>(list: &'a Value, of: impl Fn(&'a Value) -> &'a Value) -> Vec<&'a str> {
    list.as_array().expect("a list").iter().map(|item| of(item).as_str().expect("a text")).collect()
}

#[test]
fn base_has_every_manifest_and_nothing_else() {
    let kustomization = kustomization(&base());
    assert_eq!(kustomization["kind"], "Kustomization");
    let files = manifests();
    let names: Vec<&str> = files.iter().map(|(name, _)| &**name).collect();
    assert_eq!(texts(&kustomization["resources"], |item| item), names);
}

#[test]
fn overlay_names_files_that_exist_and_the_image_of_the_base() {
    let (folder, kustomization) = (example(), kustomization(&example()));
    let [resource] = texts(&kustomization["resources"], |item| item)[..] else { panic!("one base") };
    assert_eq!(folder.join(resource).canonicalize().unwrap(), base().canonicalize().unwrap());
    for patch in texts(&kustomization["patches"], |patch| &patch["path"]) {
        assert!(folder.join(patch).is_file(), "{patch}");
    }
    let set: DaemonSet = object("DaemonSet");
    let container = set.spec.and_then(|set| set.template.spec).expect("a pod").containers.remove(0);
    let image = container.image.expect("an image");
    let [name] = texts(&kustomization["images"], |image| &image["name"])[..] else { panic!("one image") };
    assert_eq!(Some(name), image.rsplit_once(':').map(|(name, _)| name));
    let [generator] = &kustomization["configMapGenerator"].as_array().expect("a list")[..] else { panic!() };
    assert_eq!(texts(&generator["files"], |file| file), ["config.conf"], "the DaemonSet reads this file");
}

#[test]
fn component_for_direct_server_return_names_its_file() {
    let folder = deploy().join("components/dsr");
    let component = kustomization(&folder);
    assert_eq!(component["kind"], "Component");
    assert_eq!(texts(&component["resources"], |item| item), ["rbac.yaml"]);
    let Some(built) = build(&folder) else { return };
    let written = documents(&fs::read_to_string(folder.join("rbac.yaml")).expect("text"));
    assert_eq!(built.len(), written.len());
    assert!(built.iter().all(|object| written.contains(object)));
}

#[test]
fn configuration_of_the_overlay_is_accepted_without_warning() {
    let flags = Flags::parse(["shunt", "--config", "unread"]).expect("flags");
    let file = Some(ConfigFile::read(example().join("config.conf")).expect("the file"));
    let environment = Environment { host_name: "node1".into(), ..Environment::default() };
    let config = Config::load_from(&flags, file, &environment, Mode::Ebpf).expect("accepted");
    assert_eq!(config.ineffective, []);
}

/// Builds a folder with the kustomize in kubectl, if this machine has it.
fn build(folder: &Path) -> Option<Vec<Value>> {
    let launcher = launcher_of("kubectl")?;
    let kubectl = Command::new("kubectl", &launcher).args(["kustomize"]).args([folder]);
    let text = kubectl.limit(Duration::from_mins(1)).run().expect("kustomize accepts it").stdout;
    Some(documents(&text))
}

#[test]
fn kustomize_builds_the_plain_manifests_and_the_changes_of_the_overlay() {
    let sorted = |objects: Vec<Value>| {
        let mut texts: Vec<String> = objects.iter().map(ToString::to_string).collect();
        texts.sort();
        texts
    };
    let Some(built) = build(&base()) else { return };
    assert_eq!(sorted(built), sorted(objects()));
    let built = build(&example()).expect("kubectl");
    assert_eq!(built.len(), objects().len());
    let set = built.iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["nodeSelector"]["shunt"], "");
    assert_eq!(pod["containers"].as_array().map(Vec::len), Some(1), "the patch is merged");
    assert!(pod["containers"][0]["image"].as_str().is_some_and(|image| image.starts_with("mirror.example/")));
    let environment = pod["containers"][0]["env"].as_array().expect("variables");
    let host = environment.iter().find(|variable| variable["name"] == "KUBERNETES_SERVICE_HOST");
    assert_eq!(host.map(|host| &host["value"]), Some(&"api.cluster.example".into()));
    let map = built.iter().find(|object| object["kind"] == "ConfigMap").expect("a ConfigMap");
    assert_eq!(map["metadata"]["name"], "shunt", "the DaemonSet names it");
}
