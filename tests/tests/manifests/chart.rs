//! Checks that the chart renders the plain manifests with its defaults, and what its values
//! change.

use std::fs;

use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::Value;

use crate::{
    check, deploy, documents, manifests,
    render::{default_values, render, templates},
};

#[test]
fn chart_with_defaults_renders_the_plain_manifests() {
    let mut rendered = templates(&default_values());
    let monitor = rendered.iter().position(|(name, _)| name == "podmonitor.yaml").expect("a PodMonitor");
    assert_eq!(documents(&rendered.remove(monitor).1), [Value::Null], "no object");
    let plain = manifests();
    assert_eq!(rendered.len(), plain.len());
    for ((name, rendered), (plain_name, plain)) in rendered.iter().zip(&plain) {
        assert_eq!(name, plain_name);
        assert_eq!(with_config_parsed(documents(rendered)), with_config_parsed(documents(plain)), "{name}");
    }
    let about = &documents(&fs::read_to_string(deploy().join("chart/shunt/Chart.yaml")).expect("text"))[0];
    assert_eq!((about["apiVersion"].as_str(), about["name"].as_str()), (Some("v2"), Some("shunt")));
    assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Renders the chart's `DaemonSet` with changed values. Returns the text and the object.
fn daemon_set_of_chart(change: impl FnOnce(&mut Value)) -> (String, Value) {
    let template =
        fs::read_to_string(deploy().join("chart/shunt/templates/daemonset.yaml")).expect("a template");
    let mut values = default_values();
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
    for probe in ["startupProbe", "readinessProbe"] {
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
        let values = serde_json::json!({"readPods": read_pods, "config": {}});
        let objects = documents(&render(&template, &values));
        objects.into_iter().find(|object| object["kind"] == "ClusterRole").expect("a role")
    };
    let (plain, mut with_pods) = (roles(false), roles(true));
    let pods = with_pods["rules"].as_array_mut().expect("rules").pop().expect("a rule");
    assert_eq!(pods, serde_json::json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}));
    assert_eq!(with_pods, plain);
}

#[test]
fn chart_has_the_rights_for_direct_server_return_only_if_it_is_on() {
    let template = fs::read_to_string(deploy().join("chart/shunt/templates/rbac.yaml")).expect("text");
    let objects = |shunt: Value| {
        let values = serde_json::json!({"readPods": false, "config": {"shunt": shunt}});
        documents(&render(&template, &values))
    };
    let without = objects(Value::Null);
    for off in [serde_json::json!({"dsr": {"enabled": false}}), serde_json::json!({"dsr": null})] {
        assert_eq!(objects(off), without);
    }
    let component = fs::read_to_string(deploy().join("components/dsr/rbac.yaml")).expect("text");
    let all = [without, documents(&component)].concat();
    assert_eq!(objects(serde_json::json!({"dsr": {"enabled": true}})), all);
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
