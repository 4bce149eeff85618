//! Golden files of the whole chart: with its defaults, and with every value set.

use serde_json::Value;

use crate::{
    documents, has_known_fields,
    render::{default_values, helm, templates},
};

/// Values that all differ from the defaults.
const EVERY_VALUE: &str = include_str!("every-value.yaml");

fn every_value() -> Value {
    documents(EVERY_VALUE).remove(0)
}

/// Returns what the chart renders, as `helm template` prints it. The image is left out, because it
/// changes with every version.
fn rendered(values: &Value) -> String {
    let part = |(name, text): (String, String)| format!("---\n# Source: shunt/templates/{name}\n{text}");
    let text: String = templates(values).into_iter().map(part).collect();
    let line = |line: &str| match line.split_once("image: ") {
        Some((before, _)) => format!("{before}image: IMAGE\n"),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn chart_with_defaults() {
    insta::assert_snapshot!(rendered(&default_values()));
}

#[test]
fn chart_with_every_value_set() {
    insta::assert_snapshot!(rendered(&every_value()));
}

/// Calls `differs` with the path of each value of `defaults` that is no map, or an empty one.
fn for_each_value(defaults: &Value, path: &str, differs: &mut impl FnMut(&str)) {
    match defaults.as_object() {
        Some(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                for_each_value(value, &format!("{path}/{name}"), differs);
            }
        }
        _ => differs(path),
    }
}

#[test]
fn every_value_has_another_than_its_default() {
    let (defaults, every) = (default_values(), every_value());
    for_each_value(&defaults, "", &mut |path| {
        if !["/config/apiVersion", "/config/kind"].contains(&path) {
            assert_ne!(every.pointer(path), defaults.pointer(path), "{path}");
            assert!(every.pointer(path).is_some(), "{path} is missing");
        }
    });
}

#[test]
fn objects_with_every_value_set_have_only_fields_that_kubernetes_knows() {
    for (name, text) in templates(&every_value()) {
        for object in documents(&text) {
            // A PodMonitor is the operator's. A test of the chart compares it with
            // deploy/monitoring.
            assert!(has_known_fields(&object) || name == "podmonitor.yaml", "{name}: {object:?}");
        }
    }
}

/// Returns the objects of a text, sorted.
fn objects(text: &str) -> Vec<String> {
    let objects = documents(text).into_iter().filter(|object| !object.is_null());
    let mut objects: Vec<String> = objects.map(|object| object.to_string()).collect();
    objects.sort();
    objects
}

/// Our renderer knows only what the chart uses. On a machine with helm, the two must agree.
#[test]
fn helm_renders_the_same_and_has_nothing_to_complain_about() {
    for values in [default_values(), every_value()] {
        let Some(text) = helm(&["template", "shunt"], &values) else { return };
        let ours: Vec<String> = templates(&values).into_iter().map(|(_, text)| text).collect();
        assert_eq!(objects(&text), objects(&ours.join("\n---\n")));
        helm(&["lint", "--strict"], &values).expect("helm");
    }
}
