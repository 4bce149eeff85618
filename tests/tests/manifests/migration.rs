//! Checks the patches of docs/migration.md: what they make of a `DaemonSet`.

use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use proxy_userspace::kernel::command::Command;
use serde_json::{Value, json};

use crate::{check, deploy, documents, objects, page, render::launcher_of};

/// The part of kube-proxy's `DaemonSet` that the patches need.
const KUBE_PROXY: &str = "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: kube-proxy, namespace: kube-system}, \
     spec: {selector: {matchLabels: {k8s-app: kube-proxy}}, template: {metadata: {labels: {k8s-app: kube-proxy}}, \
     spec: {nodeSelector: {kubernetes.io/os: linux}, containers: [{name: kube-proxy, image: x}]}}}}";

/// Returns the patch of the command that begins so.
fn patch(command: &str) -> Value {
    let page = page("docs/migration.md").replace("\\\n", "");
    let line = page.lines().find(|line| line.starts_with(command)).expect(command);
    let text = line.split("--patch").nth(1).and_then(|rest| rest.split('\'').nth(1)).expect("a patch");
    serde_json::from_str(text).expect("JSON")
}

/// Lays a patch of maps over an object.
fn lay_over(object: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(fields) => {
            for (name, value) in fields {
                lay_over(&mut object[name.as_str()], value);
            }
        }
        None => object.clone_from(patch),
    }
}

/// Patches an object without an API server, with the kubectl of this machine if it has one.
fn kubectl(object: &Value, kind: &str, patch: &Value) -> Option<Value> {
    let launcher = launcher_of("kubectl")?;
    let file = tempfile::NamedTempFile::with_suffix(".yaml").expect("a file").into_temp_path();
    std::fs::write(&file, object.to_string()).expect("written");
    let kubectl = Command::new("kubectl", &launcher).args(["patch", "--local", "--output", "json", "--type"]);
    let patch = patch.to_string();
    let kubectl = kubectl.args([kind, "--patch", &patch, "--filename"]).args([&*file]);
    let text = kubectl.limit(Duration::from_mins(1)).run().expect("kubectl patches it").stdout;
    Some(serde_json::from_str(&text).expect("JSON"))
}

#[test]
fn the_patch_of_migration_selects_the_nodes_of_shunt() {
    assert!(deploy().join("kubernetes/daemonset.yaml").is_file(), "the command names it");
    let set = objects().into_iter().find(|object| object["kind"] == "DaemonSet").expect("a DaemonSet");
    let patch = patch("kubectl patch --local --filename deploy/kubernetes/daemonset.yaml --type merge");
    let mut patched = set.clone();
    lay_over(&mut patched, &patch);
    check::<DaemonSet>(&patched);
    assert_eq!(patched["spec"]["template"]["spec"]["nodeSelector"]["shunt"], "");
    let Some(built) = kubectl(&set, "merge", &patch) else { return };
    assert_eq!(built, patched);
}

#[test]
fn kube_proxy_leaves_labelled_nodes_until_the_way_back() {
    let set = documents(KUBE_PROXY).remove(0);
    let patch_away = patch("kubectl --namespace kube-system patch daemonset kube-proxy --patch");
    let mut patched = set.clone();
    lay_over(&mut patched, &patch_away);
    check::<DaemonSet>(&patched);
    let affinity = &patched["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    let terms = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let expected = json!([{"matchExpressions": [{"key": "shunt", "operator": "DoesNotExist"}]}]);
    assert_eq!(*terms, expected, "nodes without the label");
    let back = patch("kubectl --namespace kube-system patch daemonset kube-proxy --type json --patch");
    assert_eq!(back, json!([{"op": "remove", "path": "/spec/template/spec/affinity"}]));
    let Some(built) = kubectl(&set, "strategic", &patch_away) else { return };
    assert_eq!(built, patched);
    assert_eq!(kubectl(&built, "json", &back), Some(set));
}
