//! Renders the chart as helm does, and with helm if this machine has it.

use std::{fs, io::Write as _, time::Duration};

use proxy_userspace::kernel::command::{Command, Launcher};
use serde_json::Value;

use crate::{deploy, documents, files};

/// Returns the chart's default values.
pub(crate) fn default_values() -> Value {
    documents(&fs::read_to_string(deploy().join("chart/shunt/values.yaml")).expect("values")).remove(0)
}

/// Returns each template's name and what it renders with these values.
pub(crate) fn templates(values: &Value) -> Vec<(String, String)> {
    let templates = files(&deploy().join("chart/shunt/templates")).into_iter();
    templates.map(|(name, template)| (name, render(&template, values))).collect()
}

/// Returns a way to run a program that this machine may lack. Without it, the caller leaves a test
/// out. The summary of `cargo xtask test` says so.
pub(crate) fn launcher_of(program: &str) -> Option<Launcher> {
    let launcher = Launcher::default();
    if launcher.find(program).is_none() {
        eprintln!("left out: {program} is missing");
        return None;
    }
    Some(launcher)
}

/// Runs helm on the chart with these values, if this machine has it. Returns what it prints.
pub(crate) fn helm(arguments: &[&str], values: &Value) -> Option<String> {
    let launcher = launcher_of("helm")?;
    let mut file = tempfile::NamedTempFile::with_suffix(".yaml").expect("a file");
    write!(file, "{values}").expect("written");
    let helm =
        Command::new("helm", &launcher).args(arguments).args(["--namespace", "kube-system", "--values"]);
    let helm = helm.args([file.path(), &deploy().join("chart/shunt")]).limit(Duration::from_mins(1));
    Some(helm.run().expect("helm accepts the chart").stdout)
}

/// Renders a template as `helm template shunt --namespace kube-system` does. Supports what the
/// chart uses: `.Values`, `.Release`, `VALUE | default TEXT`,
/// `toYaml VALUE | indent N`, and `with VALUE` on a line of its
/// own. Within that, paths begin with `$`. Parts of a path in parentheses may be missing. Anything
/// else in braces is an error.
pub(crate) fn render(template: &str, values: &Value) -> String {
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
    let path = path.strip_prefix('$').unwrap_or(path).replace(['(', ')'], "");
    if path == ".Release.Namespace" {
        return "kube-system".into();
    }
    let path = path.strip_prefix(".Values.").unwrap_or_else(|| panic!("{path}: not known here"));
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    let value = values.get(name).unwrap_or_else(|| panic!("{path} has no value"));
    // A map may be empty: then all its values are.
    rest.split('.').filter(|name| !name.is_empty()).fold(value, |value, name| &value[name]).clone()
}
