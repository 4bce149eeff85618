//! The queries of the dashboards, and of those of kubernetes-mixin.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde::Deserialize;

const DASHBOARDS: &str = include_str!("../../../../../deploy/monitoring/dashboards.yaml");
const MIXIN: &str = include_str!("../../../../monitoring/kubernetes-mixin.yaml");

/// The interval of rates in checks. It includes everything since the start.
pub(super) const INTERVAL: &str = "1m";

/// A query, and what is expected of it.
#[derive(Debug, Default)]
pub(super) struct Query {
    /// Where it is from.
    pub(super) panel: String,
    /// The names of its series, with labels in double braces. Empty outside of dashboards.
    pub(super) legend: String,
    /// What Prometheus evaluates.
    pub(super) expression: String,
    /// The modes that have the metrics. Empty if all have.
    modes: Vec<String>,
    /// True if there is a reason why it may have no data.
    may_be_empty: bool,
    /// True if it must have no data: it is that of an alert.
    is_alert: bool,
    /// True if the data may be no number, because nothing was observed in the interval.
    pub(super) is_rare: bool,
}

impl Query {
    /// Returns true if it must have data in a mode, false if it must have none, `None` if either is
    /// right.
    pub(super) fn must_have_data(&self, mode: &str) -> Option<bool> {
        let has_metrics = self.modes.is_empty() || self.modes.iter().any(|name| name == mode);
        if self.is_alert || !has_metrics {
            return Some(false);
        }
        (!self.may_be_empty).then_some(true)
    }
}

/// The source of the dashboards, as far as its queries need it.
#[derive(Debug, Deserialize)]
struct Dashboards {
    variables: BTreeMap<String, String>,
    dashboards: Vec<Dashboard>,
}

#[derive(Debug, Deserialize)]
struct Dashboard {
    name: String,
    select: String,
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Row {
    panels: Vec<Panel>,
}

#[derive(Debug, Deserialize)]
struct Panel {
    title: String,
    #[serde(default)]
    modes: Vec<String>,
    #[serde(default)]
    empty: Option<String>,
    queries: BTreeMap<String, String>,
}

/// Returns the queries of all panels, and those for the values of the variables, for a job
/// and an interval of rates.
pub(super) fn of_dashboards(job: &str, interval: &str) -> Result<Vec<Query>> {
    let source: Dashboards = serde_yaml_ng::from_str(DASHBOARDS).context("dashboards.yaml")?;
    let mut queries = Vec::new();
    for (variable, query) in source.variables {
        let series = query.strip_prefix("label_values(").and_then(|rest| Some(rest.rsplit_once(',')?.0));
        let series = series.with_context(|| format!("the variable {variable} is not label_values(…)"))?;
        let modes =
            if query.contains("shunt_service_") { vec!["ebpf".into(), "ipvs".into()] } else { vec![] };
        let expression = filled(series, job, interval);
        queries.push(Query { panel: format!("variable {variable}"), expression, modes, ..Query::default() });
    }
    for Dashboard { name, select, rows } in source.dashboards {
        for panel in rows.into_iter().flat_map(|row| row.panels) {
            let may_be_empty = panel.empty.is_some();
            queries.extend(panel.queries.into_iter().map(|(legend, query)| Query {
                panel: format!("{name}: {}", panel.title),
                legend,
                expression: filled(&query.replace("SELECT", &select), job, interval),
                modes: panel.modes.clone(),
                may_be_empty,
                ..Query::default()
            }));
        }
    }
    Ok(queries)
}

#[derive(Debug, Deserialize)]
struct Mixin {
    dashboard: Vec<MixinPanel>,
    alerts: Vec<MixinAlert>,
    metrics: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct MixinPanel {
    panel: String,
    query: String,
    #[serde(default)]
    empty: Option<String>,
    #[serde(default)]
    rare: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MixinAlert {
    alert: String,
    query: String,
}

/// Returns the queries of kubernetes-mixin.
pub(super) fn of_mixin() -> Result<Vec<Query>> {
    let mixin: Mixin = serde_yaml_ng::from_str(MIXIN).context("kubernetes-mixin.yaml")?;
    let query = |name: &str, query: &str| Query {
        panel: format!("kubernetes-mixin: {name}"),
        expression: filled(query, "", INTERVAL),
        ..Query::default()
    };
    let panels = mixin.dashboard.iter().map(|panel| Query {
        may_be_empty: panel.empty.is_some(),
        is_rare: panel.rare.is_some(),
        ..query(&panel.panel, &panel.query)
    });
    let alerts = mixin.alerts.iter();
    let alerts = alerts.map(|alert| Query { is_alert: true, ..query(&alert.alert, &alert.query) });
    let metrics = mixin.metrics.iter().map(|metric| query(metric, metric));
    Ok(panels.chain(alerts).chain(metrics).collect())
}

/// Puts values in place of variables, as Grafana does.
fn filled(query: &str, job: &str, interval: &str) -> String {
    [
        ("$__rate_interval", interval),
        ("$job", job),
        ("$instance", "node1"),
        ("$namespace", "default"),
        ("$service", "web"),
        ("$cluster", ""),
    ]
    .into_iter()
    .fold(query.to_owned(), |query, (variable, value)| query.replace(variable, value))
}
