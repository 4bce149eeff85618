//! Checks `deploy/monitoring` without a running Prometheus: rules, their unit tests and runbooks,
//! the metrics that queries name, and the monitor. The program `daemon` runs the queries.

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use proxy_common::layout::{Counter, MAPS};
use proxy_userspace::kernel::command::{Command, Launcher};
use serde::Deserialize;
use serde_yaml_ng::Value;

const ALERTS: [&str; 9] = [
    "ShuntApiDisconnected",
    "ShuntConfigurationRefused",
    "ShuntConntrackNearlyFull",
    "ShuntDown",
    "ShuntFellBack",
    "ShuntMapNearlyFull",
    "ShuntNotSynced",
    "ShuntProgramErrors",
    "ShuntServiceLeftOut",
];

#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    alert: Option<String>,
    #[serde(default)]
    annotations: Annotations,
}

#[derive(Default, Deserialize)]
struct Annotations {
    #[serde(default)]
    runbook_url: String,
}

#[derive(Deserialize)]
struct UnitTests {
    tests: Vec<UnitTest>,
}

#[derive(Deserialize)]
struct UnitTest {
    alert_rule_test: Vec<AlertTest>,
}

#[derive(Deserialize)]
struct AlertTest {
    alertname: String,
    exp_alerts: Vec<Value>,
}

fn root(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(root(path)).expect(path)
}

fn promtool(arguments: [&str; 3]) -> String {
    let command = Command::new("promtool", &Launcher::default()).args(arguments);
    command.limit(Duration::from_mins(1)).run().expect("promtool (of the package prometheus)").stdout
}

#[test]
fn rules_load_and_alerts_fire_and_stay_silent_as_their_tests_say() {
    let path = |path| root(path).display().to_string();
    let loaded = promtool(["check", "rules", &path("deploy/monitoring/rules.yaml")]);
    assert!(loaded.contains("SUCCESS"), "{loaded}");
    let tested = promtool(["test", "rules", &path("tests/monitoring/alerts.yaml")]);
    assert!(tested.contains("SUCCESS"), "{tested}");
}

#[test]
fn each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_is_silent() {
    let tests: UnitTests = serde_yaml_ng::from_str(&read("tests/monitoring/alerts.yaml")).expect("tests");
    let names = |fires: bool| -> BTreeSet<&str> {
        let tests = tests.tests.iter().flat_map(|test| &test.alert_rule_test);
        let tests = tests.filter(|test| test.exp_alerts.is_empty() != fires);
        tests.map(|test| &*test.alertname).collect()
    };
    assert_eq!(names(true), BTreeSet::from(ALERTS));
    assert_eq!(names(false), BTreeSet::from(ALERTS));
}

#[test]
fn each_alert_has_a_runbook() {
    let repository = read("Cargo.toml");
    let repository = repository.lines().find_map(|line| line.strip_prefix("repository = "));
    let page = format!("{}/blob/main/docs/alerts.md#", repository.expect("an address").trim_matches('"'));
    let rules: Rules = serde_yaml_ng::from_str(&read("deploy/monitoring/rules.yaml")).expect("rules");
    let runbooks = read("docs/alerts.md");
    let mut names = Vec::new();
    for rule in rules.groups.into_iter().flat_map(|group| group.rules) {
        let Some(name) = rule.alert else { continue };
        assert_eq!(rule.annotations.runbook_url, format!("{page}{}", name.to_lowercase()));
        let runbook = runbooks.split("\n## ").find(|section| section.lines().next() == Some(&name));
        let runbook = runbook.unwrap_or_else(|| panic!("docs/alerts.md has no section {name}"));
        for part in ["**Meaning.**", "**See more.**", "**What to do.**"] {
            assert!(runbook.contains(part), "{name}: {part}");
        }
        names.push(name);
    }
    names.sort_unstable();
    assert_eq!(names, ALERTS);
}

/// Returns the names of shunt's metrics in a text, as `docs/metrics.md` has them.
fn metrics(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    // A recorded series has colons.
    words.filter(|word| word.starts_with("shunt_") && !word.contains(':')).collect()
}

#[test]
fn queries_name_only_metrics_that_are_documented() {
    let page = read("docs/metrics.md");
    let documented = metrics(&page);
    for path in ["deploy/monitoring/rules.yaml", "deploy/monitoring/dashboards.yaml"] {
        let text = read(path);
        let unknown: Vec<_> = metrics(&text).difference(&documented).copied().collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?} are not in docs/metrics.md");
    }
}

#[test]
fn pages_name_only_counters_that_are_documented() {
    let documented = read("docs/metrics.md");
    let documented = metrics(&documented);
    for entry in fs::read_dir(root("docs")).expect("pages") {
        let path = entry.expect("a page").path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("text");
        let mut unknown = metrics(&text);
        unknown.retain(|name| name.ends_with("_total") && !documented.contains(name));
        assert!(unknown.is_empty(), "{}: {unknown:?} are not in docs/metrics.md", path.display());
    }
}

#[test]
fn monitor_selects_the_pods_of_the_daemon_set() {
    let object = |path| serde_yaml_ng::from_str::<Value>(&read(path)).expect(path);
    let monitor = object("deploy/monitoring/operator/podmonitor.yaml");
    let set = object("deploy/kubernetes/daemonset.yaml");
    assert_eq!(monitor["spec"]["selector"]["matchLabels"], set["spec"]["template"]["metadata"]["labels"]);
    assert_eq!(monitor["metadata"]["namespace"], set["metadata"]["namespace"]);
    assert_eq!(monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"], true);
}

#[test]
fn each_decision_about_packets_is_documented() {
    let page = read("docs/metrics.md");
    for counter in Counter::ALL {
        assert!(page.contains(&format!("| `{}` | ", counter.name())), "{counter:?}");
    }
}

#[test]
fn maps_that_fill_up_over_time_are_no_reason_for_an_alert() {
    let mut maps: Vec<&str> = MAPS.iter().filter(|map| map.fills_up).map(|map| map.name).collect();
    maps.sort_unstable();
    let rules = read("deploy/monitoring/rules.yaml");
    assert!(rules.contains(&format!("{{map!~\"{}\"}}", maps.join("|"))), "{maps:?}");
    let last = maps.pop().expect("some");
    let text = format!("It is normal that {} and {last} are full.", maps.join(", "));
    assert_eq!(read("deploy/monitoring/dashboards.yaml").matches(&text).count(), 2, "{text}");
    let names: Vec<String> = maps.iter().chain([&last]).map(|map| format!("`{map}`")).collect();
    let page = read("docs/metrics.md");
    let line = page.lines().find(|line| line.contains("stay until room is needed")).expect("a line");
    assert!(names.iter().all(|name| line.contains(&**name)), "{line}");
}
