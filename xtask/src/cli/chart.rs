//! Checks that `values.schema.json` of the chart describes every value, and refuses wrong ones.

use std::collections::BTreeSet;
use std::fs;

use jsonschema::Validator;
use serde::Deserialize as _;
use serde_json::{Value, json};
use xtask::workspace;

/// Files that shunt accepts.
const GOOD: &str = "proxy-userspace/src/config/tests/good";

fn read(path: &str) -> String {
    fs::read_to_string(workspace::root().join(path)).expect(path)
}

/// Returns the first document of a YAML text.
fn yaml(text: &str) -> Value {
    let first = serde_yaml_ng::Deserializer::from_str(text).next().expect("a document");
    Value::deserialize(first).expect("YAML")
}

/// Returns the texts of all files of a folder with this ending, with their names.
fn files(folder: &str, ending: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(workspace::root().join(folder)).expect(folder).flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let names = names.filter(|name| name.ends_with(ending));
    names.map(|name| (format!("{folder}/{name}"), read(&format!("{folder}/{name}")))).collect()
}

fn default_values() -> Value {
    yaml(&read("deploy/chart/shunt/values.yaml"))
}

fn schema() -> Value {
    serde_json::from_str(&read("deploy/chart/shunt/values.schema.json")).expect("JSON")
}

fn validator(schema: &Value) -> Validator {
    jsonschema::draft7::new(schema).expect("a valid schema")
}

/// Returns what the schema says against a value: the path and the message.
fn complaints(validator: &Validator, value: &Value) -> Vec<String> {
    validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[test]
fn values_of_the_chart_are_valid() {
    let validator = validator(&schema());
    for values in [default_values(), yaml(&read("tests/tests/manifests/every-value.yaml"))] {
        assert_eq!(complaints(&validator, &values), Vec::<String>::new());
    }
}

/// Collects the paths of objects' members.
fn paths_of_values(value: &Value, path: &str, paths: &mut BTreeSet<String>) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        paths_of_values(value, &path, paths);
        paths.insert(path);
    }
}

/// Collects the paths of the properties that a schema names.
fn paths_of_schema(root: &Value, schema: &Value, path: &str, paths: &mut BTreeSet<String>) {
    let reference = schema["$ref"].as_str().and_then(|text| root.pointer(text.strip_prefix('#')?));
    let schema = reference.unwrap_or(schema);
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        paths_of_schema(root, schema, &path, paths);
        paths.insert(path);
    }
}

/// Values below these are Kubernetes' or kube-proxy's, and `values.yaml` shows some of them.
const OPEN: [&str; 5] = ["/config", "/appArmorProfile", "/resources", "/seLinuxOptions", "/podMonitor"];

#[test]
fn values_and_schema_have_the_same_keys() {
    let is_ours = |path: &String| !OPEN.iter().any(|open| path.starts_with(&format!("{open}/")));
    let (mut of_values, mut of_schema) = (BTreeSet::new(), BTreeSet::new());
    paths_of_values(&default_values(), "", &mut of_values);
    let schema = schema();
    paths_of_schema(&schema, &schema, "", &mut of_schema);
    // Helm adds it to the values of charts within charts.
    assert!(of_schema.remove("/global"));
    let (of_values, of_schema): (Vec<_>, Vec<_>) =
        (of_values.into_iter().filter(is_ours).collect(), of_schema.into_iter().filter(is_ours).collect());
    assert_eq!(of_values, of_schema);
}

/// A path, a wrong value, and a part of the complaint.
fn wrong_values() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        ("/imgae", json!({}), "'imgae' was unexpected"),
        ("/image/tga", json!("1"), "'tga' was unexpected"),
        ("/image/pullPolicy", json!("Sometimes"), "pullPolicy"),
        ("/apiServer/host", json!("https://192.0.2.1:6443"), "apiServer/host"),
        ("/apiServer/port", json!("0"), "apiServer/port"),
        ("/apiServer/port", json!(70_000), "apiServer/port"),
        ("/cgroup", json!("sys/fs/cgroup"), "cgroup"),
        ("/config", json!({}), "apiVersion"),
        ("/config/apiVersion", json!("kubeproxy.config.k8s.io/v1"), "config/apiVersion"),
        ("/config/mode", json!("bpf"), "config/mode"),
        ("/config/clusterCidr", json!("10.0.0.0/8"), "'clusterCidr' was unexpected"),
        ("/config/oomScoreAdj", json!(-1001), "oomScoreAdj"),
        ("/config/iptables", json!({"syncPeriod": "1 minute"}), "syncPeriod"),
        ("/config/shunt", json!({"ebpf": {"mapSizes": {"flows": 1}}}), "flows"),
        ("/extraEnv", json!({"HTTPS_PROXY": "x"}), "extraEnv"),
        ("/extraEnv", json!([{"name": "A", "value": 1}]), "extraEnv/0/value"),
        ("/maxUnavailable", json!(0), "maxUnavailable"),
        ("/maxUnavailable", json!("10"), "maxUnavailable"),
        ("/nodeSelector", json!({"shunt": true}), "nodeSelector/shunt"),
        ("/podAnnotations", json!({"a": 1}), "podAnnotations/a"),
        ("/podMonitor", json!({"jobs": "x"}), "'jobs' was unexpected"),
        ("/probes/port", json!("10256"), "probes/port"),
        ("/probes/host", json!("localhost"), "probes/host"),
        ("/readPods", json!("yes"), "readPods"),
        ("/resources", json!({"request": {}}), "'request' was unexpected"),
        ("/resources", json!({"requests": {"memory": "160 MiB"}}), "requests/memory"),
        ("/seLinuxOptions", json!({"types": "spc_t"}), "'types' was unexpected"),
        ("/appArmorProfile", json!({"type": "unconfined"}), "appArmorProfile/type"),
        ("/tolerations", json!([{"operator": "Exist"}]), "tolerations/0/operator"),
    ]
}

#[test]
fn wrong_values_are_refused_by_name() {
    let validator = validator(&schema());
    for (path, wrong, part) in wrong_values() {
        let mut values = default_values();
        let (owner, name) = path.rsplit_once('/').expect("a path");
        values.pointer_mut(owner).expect(path)[name] = wrong;
        let complaints = complaints(&validator, &values);
        assert!(complaints.iter().any(|complaint| complaint.contains(part)), "{path}: {complaints:?}");
    }
}

/// Lays values over others, as helm does: maps are merged, everything else is replaced.
fn lay_over(values: &mut Value, over: &Value) {
    match (values.as_object_mut(), over.as_object()) {
        (Some(fields), Some(over)) => {
            for (name, value) in over {
                lay_over(fields.entry(name).or_insert(Value::Null), value);
            }
        }
        _ => values.clone_from(over),
    }
}

#[test]
fn values_of_the_guides_are_valid() {
    let (validator, mut checked) = (validator(&schema()), 0);
    for (name, text) in files("docs/guides", ".md") {
        for block in text.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            let block_values = yaml(block);
            if block.starts_with("# values.yaml") {
                let mut values = default_values();
                lay_over(&mut values, &block_values);
                assert_eq!(complaints(&validator, &values), Vec::<String>::new(), "{name}");
                checked += 1;
            }
        }
    }
    assert!(checked >= 7, "{checked} blocks");
}

/// The schema must not refuse a file of kube-proxy that shunt accepts.
#[test]
fn files_that_shunt_accepts_are_valid() {
    let mut schema = schema();
    schema["properties"] = json!({"config": {"$ref": "#/definitions/config"}});
    schema["required"] = json!(["config"]);
    let validator = validator(&schema);
    let files = files(GOOD, ".yaml");
    assert!(!files.is_empty(), "no files in {GOOD}");
    for (name, text) in files {
        let values = json!({"config": yaml(&text)});
        assert_eq!(complaints(&validator, &values), Vec::<String>::new(), "{name}");
    }
}
