//! `cargo xtask monitoring`: writes the dashboards, the rules as an object of the Prometheus
//! operator, and pictures of the dashboards.

mod grafana;
mod layout;
mod picture;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xtask::workspace;

use self::source::Source;

const RULES: &str = "rules.yaml";

/// The rules as the operator takes them. The groups follow.
const PROMETHEUS_RULE: &str = "\
# Written by `cargo xtask monitoring` from ../rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: shunt
  namespace: kube-system
  labels:
    app.kubernetes.io/name: shunt
spec:
";

/// Writes all generated files, and pictures of the dashboards if there is a recording.
pub(crate) fn run(recording: Option<&Path>) -> Result<()> {
    for (name, text) in generated()? {
        let path = folder().join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    recording.map_or(Ok(()), |recording| picture::draw_all(&source()?, recording))
}

fn source() -> Result<Source> {
    serde_yaml_ng::from_str(&read("dashboards.yaml")?).context("deploy/monitoring/dashboards.yaml")
}

/// Returns the path, below the folder, and the text of each generated file.
fn generated() -> Result<Vec<(String, String)>> {
    let source = source()?;
    let dashboards = source
        .dashboards
        .iter()
        .map(|dashboard| (format!("dashboards/{}.json", dashboard.name), grafana::text(&source, dashboard)));
    let rules = ("operator/prometheusrule.yaml".to_owned(), prometheus_rule(&read(RULES)?));
    Ok(dashboards.chain([rules]).collect())
}

/// Puts the groups of a file of rules into an object. Its comments stay, except those at its head.
fn prometheus_rule(rules: &str) -> String {
    let groups = rules.lines().skip_while(|line| line.starts_with('#'));
    let indented = groups.map(|line| if line.is_empty() { "\n".into() } else { format!("  {line}\n") });
    PROMETHEUS_RULE.to_owned() + &indented.collect::<String>()
}

fn read(name: &str) -> Result<String> {
    let path = folder().join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

fn folder() -> PathBuf {
    workspace::root().join("deploy/monitoring")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn committed_files_are_those_of_their_sources() {
        for (name, text) in generated().unwrap() {
            assert!(read(&name).unwrap_or_default() == text, "{name} is old: run `cargo xtask monitoring`");
        }
        let committed = fs::read_dir(folder().join("dashboards")).unwrap().count();
        assert_eq!(committed, generated().unwrap().len() - 1, "a dashboard without source");
    }

    fn dashboards() -> Vec<Value> {
        let files = generated().unwrap().into_iter().filter(|(name, _)| name.starts_with("dashboards/"));
        files.map(|(_, text)| serde_json::from_str(&text).unwrap()).collect()
    }

    fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
        value[name].as_array().unwrap_or_else(|| panic!("{name} is no list"))
    }

    #[test]
    fn queries_use_only_variables_that_their_dashboard_has() {
        for dashboard in dashboards() {
            let names = list(&dashboard["templating"], "list").iter().map(|variable| &variable["name"]);
            let names: Vec<&str> = names.filter_map(Value::as_str).collect();
            let panels = list(&dashboard, "panels").iter().filter(|panel| panel["type"] != "row");
            for target in panels.flat_map(|panel| list(panel, "targets")) {
                let query = target["expr"].as_str().unwrap();
                assert!(!query.is_empty() && !query.contains("SELECT"), "{target}");
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                for rest in query.split('$').skip(1) {
                    let name = rest.split(|c| !is_name(c)).next().unwrap();
                    assert!(names.contains(&name) || name == "__rate_interval", "{query}: {name}");
                }
            }
        }
    }

    #[test]
    fn panels_do_not_overlap_and_stay_in_the_grid() {
        for dashboard in dashboards() {
            let places = list(&dashboard, "panels")
                .iter()
                .map(|panel| ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap()));
            let places: Vec<_> = places.collect();
            for (index, [x, y, w, h]) in places.iter().enumerate() {
                assert!(x + w <= 24, "{}: {x} {y}", dashboard["title"]);
                for [x2, y2, w2, h2] in &places[..index] {
                    let is_apart = x + w <= *x2 || x2 + w2 <= *x || y + h <= *y2 || y2 + h2 <= *y;
                    assert!(is_apart, "{}: panels at {x} {y} and {x2} {y2}", dashboard["title"]);
                }
            }
        }
    }

    #[test]
    fn groups_of_the_rules_become_the_spec_of_the_object() {
        let text = prometheus_rule("# about\n# rules\ngroups:\n- name: a\n\n  # why\n  rules: []\n");
        let object: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
        assert_eq!(object["spec"]["groups"][0]["name"], "a");
        assert!(text.ends_with("spec:\n  groups:\n  - name: a\n\n    # why\n    rules: []\n"), "{text}");
    }
}
