//! Checks that the chart renders the plain manifests with its defaults, and what its values
//! change.

use std::{fs, time::Duration};

use k8s_openapi::api::apps::v1::DaemonSet;
use proxy_userspace::kernel::command::{Command, Launcher};
use serde_json::Value;

use crate::{check, deploy, documents, files};

#[test]
fn chart_with_defaults_renders_the_plain_manifests() {
    let chart = deploy().join("chart/shunt");
    let values = fs::read_to_string(chart.join("values.yaml")).expect("values");
    let templates = files(&chart.join("templates"));
    let (monitors, templates): (Vec<_>, Vec<_>) =
        templates.into_iter().partition(|(name, _)| name == "podmonitor.yaml");
    assert_eq!((monitors.len(), templates.len()), (1, files(&deploy().join("kubernetes")).len()));
    assert_eq!(documents(&render(&monitors[0].1, &documents(&values)[0])), [Value::Null], "no object");
    for (name, template) in templates {
        let plain = fs::read_to_string(deploy().join("kubernetes").join(&name)).expect("the plain manifest");
        let rendered = render(&template, &documents(&values)[0]);
        assert_eq!(with_config_parsed(documents(&rendered)), with_config_parsed(documents(&plain)), "{name}");
        if let Some(rendered) = render_with_helm(&name) {
            assert_eq!(
                with_config_parsed(documents(&rendered)),
                with_config_parsed(documents(&plain)),
                "{name}"
            );
        }
    }
    let about = &documents(&fs::read_to_string(chart.join("Chart.yaml")).expect("Chart.yaml"))[0];
    assert_eq!((about["apiVersion"].as_str(), about["name"].as_str()), (Some("v2"), Some("shunt")));
    assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Renders the chart's `DaemonSet` with changed values. Returns the text and the object.
fn daemon_set_of_chart(change: impl FnOnce(&mut Value)) -> (String, Value) {
    let template =
        fs::read_to_string(deploy().join("chart/shunt/templates/daemonset.yaml")).expect("a template");
    let mut values =
        documents(&fs::read_to_string(deploy().join("chart/shunt/values.yaml")).expect("values")).remove(0);
    change(&mut values);
    let rendered = render(&template, &values);
    let set = documents(&rendered).remove(0);
    check::<DaemonSet>(&set);
    (rendered, set)
}

#[test]
fn values_of_the_chart_appear_in_the_objects() {
    let proxy = serde_json::json!({"name": "HTTPS_PROXY", "value": "http://192.0.2.3:3128"});
    let (rendered, set) = daemon_set_of_chart(|values| {
        values["image"]["tag"] = "9.9".into();
        values["apiServer"]["host"] = "192.0.2.1".into();
        values["cgroup"] = "/sys/fs/cgroup/unified".into();
        values["probes"] = serde_json::json!({"host": "192.0.2.7", "port": 10257});
        values["tolerations"] = serde_json::json!([{"key": "a", "effect": "NoSchedule"}]);
        values["extraEnv"] = serde_json::json!([proxy]);
    });
    let environment = set["spec"]["template"]["spec"]["containers"][0]["env"].as_array().expect("a list");
    assert_eq!((environment.len(), environment.last()), (4, Some(&proxy)));
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let asked = &container[probe]["httpGet"];
        assert_eq!((&asked["host"], &asked["port"]), (&"192.0.2.7".into(), &10257.into()), "{probe}");
    }
    for part in ["shunt:9.9", "value: 192.0.2.1", "path: /sys/fs/cgroup/unified", "effect: NoSchedule"] {
        assert!(rendered.contains(part), "{part}: {rendered}");
    }
}

/// Before Kubernetes 1.30, the API server refuses the field and reads the annotation.
#[test]
fn chart_can_set_the_apparmor_annotation_instead_of_the_field_and_the_selinux_type() {
    let annotations =
        serde_json::json!({"container.apparmor.security.beta.kubernetes.io/shunt": "unconfined"});
    let (_, set) = daemon_set_of_chart(|values| {
        values["appArmorProfile"] = Value::Null;
        values["podAnnotations"] = annotations.clone();
        values["seLinuxOptions"] = serde_json::json!({"type": "spc_t"});
    });
    let pod = &set["spec"]["template"];
    let context = &pod["spec"]["containers"][0]["securityContext"];
    assert_eq!(pod["metadata"]["annotations"], annotations);
    assert_eq!(
        (&context["appArmorProfile"], &context["seLinuxOptions"]["type"]),
        (&Value::Null, &"spc_t".into())
    );
}

#[test]
fn empty_values_of_the_chart_render_a_valid_object() {
    let (_, set) = daemon_set_of_chart(|values| {
        values["tolerations"] = serde_json::json!([]);
        values["resources"] = serde_json::json!({});
        values["appArmorProfile"] = serde_json::json!({});
    });
    assert_eq!(set["spec"]["template"]["spec"]["tolerations"], Value::Null);
}

#[test]
fn chart_renders_the_pod_monitor_with_job_and_labels_if_it_is_wanted() {
    let template = fs::read_to_string(deploy().join("chart/shunt/templates/podmonitor.yaml")).expect("text");
    let plain = fs::read_to_string(deploy().join("monitoring/operator/podmonitor.yaml")).expect("text");
    let rendered = |monitor: Value| {
        let values = serde_json::json!({"podMonitor": monitor});
        documents(&render(&template, &values)).remove(0)
    };
    let mut wanted = documents(&plain).remove(0);
    for values in [serde_json::json!({"job": "shunt"}), serde_json::json!({"labels": {}, "job": null})] {
        assert_eq!(rendered(values), wanted);
    }
    wanted["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] = "kube-proxy".into();
    wanted["metadata"]["labels"]["release"] = "prometheus".into();
    let values = serde_json::json!({"job": "kube-proxy", "labels": {"release": "prometheus"}});
    assert_eq!(rendered(values), wanted);
}

#[test]
fn chart_permits_to_read_pods_only_if_it_is_wanted() {
    let template = fs::read_to_string(deploy().join("chart/shunt/templates/rbac.yaml")).expect("text");
    let roles = |read_pods: bool| {
        let values = serde_json::json!({"readPods": read_pods});
        let objects = documents(&render(&template, &values));
        objects.into_iter().find(|object| object["kind"] == "ClusterRole").expect("a role")
    };
    let (plain, mut with_pods) = (roles(false), roles(true));
    let pods = with_pods["rules"].as_array_mut().expect("rules").pop().expect("a rule");
    assert_eq!(pods, serde_json::json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}));
    assert_eq!(with_pods, plain);
}

/// Parses the file in the `ConfigMap`, so that its comments are ignored.
fn with_config_parsed(mut objects: Vec<Value>) -> Vec<Value> {
    for object in &mut objects {
        if let Some(text) = object["data"]["config.conf"].as_str() {
            object["data"]["config.conf"] = documents(text).remove(0);
        } else if object["data"].is_null()
            && let Some(object) = object.as_object_mut()
        {
            object.remove("data");
        }
    }
    objects
}

/// Renders a template with helm, if this machine has it.
fn render_with_helm(template: &str) -> Option<String> {
    let launcher = Launcher::default();
    launcher.find("helm")?;
    let (chart, template) = (deploy().join("chart/shunt"), format!("templates/{template}"));
    let helm = Command::new("helm", &launcher).args(["template", "shunt", "--namespace", "kube-system"]);
    let helm = helm.args(["--show-only", &template]).args([chart]).limit(Duration::from_mins(1));
    Some(helm.run().expect("helm renders it").stdout)
}

/// Renders a template as `helm template shunt --namespace kube-system` does. Supports what the
/// chart uses: `.Values`, `.Release`, `VALUE | default TEXT`,
/// `toYaml VALUE | indent N`, and `with VALUE` on a line of its
/// own. Within that, paths begin with `$`. Anything else in braces is an error.
fn render(template: &str, values: &Value) -> String {
    // The first block that ends has no other one in it.
    if let Some((before, after)) = template.split_once("\n{{- end }}") {
        let (before, with) = before.rsplit_once("\n{{- with ").expect("a block begins");
        let (path, body) = with.split_once(" }}").expect("an action ends");
        let is_empty = match lookup(path, values) {
            Value::Null => true,
            Value::Bool(is_set) => !is_set,
            Value::Array(list) => list.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            other => panic!("{path}: {other} is neither a list, a map nor a switch"),
        };
        let body =
            if is_empty { String::new() } else { body.replace("toYaml . ", &format!("toYaml {path} ")) };
        return render(&format!("{before}{body}{after}"), values);
    }
    let mut rendered = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (action, after) = after.split_once("}}").expect("an action ends");
        rendered.push_str(before);
        rendered.push_str(&action_value(action.trim(), values));
        rest = after;
    }
    rendered + rest
}

fn action_value(action: &str, values: &Value) -> String {
    let words: Vec<&str> = action.split_whitespace().collect();
    match words[..] {
        [path] => match lookup(path, values) {
            Value::String(text) => text,
            other => other.to_string(),
        },
        [path, "|", "default", text] => match lookup(path, values) {
            Value::Null => text.trim_matches('"').to_owned(),
            given => given.as_str().expect("a text").to_owned(),
        },
        ["toYaml", path, "|", "indent", width] => {
            let yaml = serde_yaml_ng::to_string(&lookup(path, values)).expect("YAML");
            let indent = " ".repeat(width.parse().expect("a width"));
            yaml.trim_end().lines().map(|line| format!("{indent}{line}")).collect::<Vec<_>>().join("\n")
        }
        _ => panic!("{{{{ {action} }}}}: not known here"),
    }
}

fn lookup(path: &str, values: &Value) -> Value {
    let path = path.strip_prefix('$').unwrap_or(path);
    if path == ".Release.Namespace" {
        return "kube-system".into();
    }
    let path = path.strip_prefix(".Values.").unwrap_or_else(|| panic!("{path}: not known here"));
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    let value = values.get(name).unwrap_or_else(|| panic!("{path} has no value"));
    // A map may be empty: then all its values are.
    rest.split('.').filter(|name| !name.is_empty()).fold(value, |value, name| &value[name]).clone()
}
